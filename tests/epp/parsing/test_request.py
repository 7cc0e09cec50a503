import pytest
from msgspec.structs import replace

from epp.parsing.request import LONGEST_SALT, Request, Slot, short_salt
from epp.pool.store import Endpoint


def test_the_first_name_present_gives_the_header() -> None:
    request = Request(id="r", model="m", headers={"b": "2", "c": ""})
    assert request.header(("a", "b", "c")) == "2"
    assert request.header("c") == ""
    assert request.header(("a",)) is None


def test_signals_are_kept_by_type_and_missing_ones_are_errors() -> None:
    endpoint = Endpoint("a", "10.0.0.1:8000")
    request = Request(id="r", model="m", signals={int: {endpoint: 5}})
    assert request.signal(int)[endpoint] == 5
    with pytest.raises(KeyError):
        request.signal(str)


def test_a_slot_has_a_value_for_each_request() -> None:
    one, other, slot, another = Request(id="r", model="m"), Request(id="r", model="m"), Slot[int](), Slot[int]()
    assert slot.set(one, 1) == 1
    assert (slot.get(one), slot.get(other), another.get(one)) == (1, None, None)
    assert (slot.take(one), slot.take(one), slot.get(one)) == (1, None, None)
    assert one != other


def test_what_becomes_known_later_keeps_the_slots() -> None:
    request, slot = Request(id="r", model="m"), Slot[int]()
    slot.set(request, 1)
    counted = replace(request, tokens=9)
    assert (slot.get(counted), request.tokens) == (1, 0)


def test_no_signal_is_there_before_a_producer_found_it() -> None:
    with pytest.raises(TypeError, match="does not support item assignment"):
        Request(id="r", model="m").signals[int] = {}  # type: ignore[index]


def test_a_slot_in_a_class_body_is_refused_as_all_plugins_of_the_class_would_share_it() -> None:
    with pytest.raises((TypeError, RuntimeError)) as refused:

        class _Shared:
            slot = Slot[int]()

    assert "_Shared.slot: a Slot belongs to one plugin" in str(refused.value.__cause__ or refused.value)


def test_a_long_salt_is_kept_as_its_digest() -> None:
    assert short_salt("s" * LONGEST_SALT) == "s" * LONGEST_SALT
    long = short_salt("\ud800" * 10_000_000)
    assert len(long) <= LONGEST_SALT
    assert short_salt(long) == long
    assert long != short_salt("\ud800" * 9_999_999)
