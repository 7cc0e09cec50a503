import pytest

from epp.parsing.request import LONGEST_SALT, Request, short_salt
from epp.pool.store import Endpoint


def test_the_first_name_present_gives_the_header() -> None:
    request = Request(id="r", model="m", headers={"b": "2", "c": ""})
    assert request.header(("a", "b", "c")) == "2"
    assert request.header("c") == ""
    assert request.header(("a",)) is None


def test_signals_are_kept_by_type_and_missing_ones_are_errors() -> None:
    endpoint = Endpoint("a", "10.0.0.1:8000")
    request = Request(id="r", model="m")
    request.signals[int] = {endpoint: 5}
    assert request.signal(int)[endpoint] == 5
    with pytest.raises(KeyError):
        request.signal(str)


def test_requests_share_no_scratch_space() -> None:
    one, other = Request(id="r", model="m"), Request(id="r", model="m")
    one.notes["x"] = 1
    assert other.notes == {}
    assert one != other


def test_a_long_salt_is_kept_as_its_digest() -> None:
    assert short_salt("s" * LONGEST_SALT) == "s" * LONGEST_SALT
    long = short_salt("\ud800" * 10_000_000)
    assert len(long) <= LONGEST_SALT
    assert short_salt(long) == long
    assert long != short_salt("\ud800" * 9_999_999)
