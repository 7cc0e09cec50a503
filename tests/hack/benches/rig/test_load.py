"""What is made of wrk's output."""

import pytest

from hack.benches.rig.load import Seen, seen
from hack.benches.rig.processes import BenchError


def test_the_result_is_found_among_other_lines() -> None:
    output = "BODIES READ\nRunning\nRESULT requests=12 failed=0 p50=850.5 p99=1396.0\n"
    assert seen(output) == Seen(12, 850.5, 1396.0)


@pytest.mark.parametrize(
    ("output", "why"),
    [
        ("RESULT requests=12 failed=3 p50=1.0 p99=2.0", "3 of 12 requests failed"),
        ("RESULT requests=0 failed=0 p50=0.0 p99=0.0", "larger --seconds"),
        ("wrk: no such file", "no such file"),
    ],
)
def test_errors_and_nothing_are_no_figures(output: str, why: str) -> None:
    with pytest.raises(BenchError, match=why):
        seen(output)
