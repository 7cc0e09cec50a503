import pytest

from tooling.conformance.verdict import Failed, require


def test_a_failure_says_what_was_expected_and_what_came() -> None:
    require(True, "this", "that")
    with pytest.raises(Failed, match=r"^expected this; got that$") as failure:
        require(False, "this", "that")
    assert (failure.value.expected, failure.value.got) == ("this", "that")
