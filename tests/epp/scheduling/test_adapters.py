from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import Endpoint, Load, ServedModel
from epp.scheduling.adapters import LOADED, NOTHING, Adapters, Need


def endpoint(name: str = "a", slots: int = 2, running: str = "") -> Endpoint:
    return Endpoint(name, f"{name}:1", load=Load(lora_max=slots, lora_running=frozenset(running)))


def seen(*endpoints: Endpoint) -> Adapters:
    adapters = Adapters()
    for each in endpoints:
        adapters.see(each)
    return adapters


def test_an_adapter_is_loaded_once_and_stays_after_its_requests() -> None:
    a = endpoint()
    adapters = seen(a)
    assert adapters.need(a, "x") == LOADED
    adapters.start(a, "x")
    assert adapters.need(a, "x") == NOTHING
    adapters.end(a, "x")
    assert adapters.need(a, "x") == NOTHING
    assert [*adapters.holders("x")] == [a]


def test_the_one_unused_longest_gives_way() -> None:
    a = endpoint(slots=2)
    adapters = seen(a)
    for name in "xyx":
        adapters.start(a, name)
        adapters.end(a, name)
    assert adapters.need(a, "z") == Need(0.0, 1, 1)
    adapters.start(a, "z")
    assert adapters.need(a, "x") == NOTHING
    assert adapters.need(a, "y") == Need(0.0, 1, 1)
    assert not adapters.holders("y")


def test_where_all_slots_are_in_use_requests_have_to_end_first() -> None:
    a = endpoint(slots=2)
    adapters = seen(a)
    for name in "xxxy":
        adapters.start(a, name)
    assert adapters.need(a, "z") == Need(1.0, 1, 0), "two requests each in the mean, two slots"
    adapters.start(a, "z")
    assert adapters.need(a, "w").turns > 1.0, "one more is before it"
    adapters.end(a, "y")
    adapters.end(a, "z")
    assert adapters.need(a, "z") == NOTHING


def test_what_runs_there_for_others_is_there() -> None:
    a = endpoint(slots=2, running="x")
    adapters = seen(a)
    assert "x" in adapters.known
    assert "y" not in adapters.known
    assert adapters.need(a, "x") == NOTHING
    assert [*adapters.holders("x")] == [a]
    adapters.start(a, "y")
    assert adapters.need(a, "z").turns > 0, "both are in use"
    a.load = Load(lora_max=2, lora_running=frozenset("y"))
    adapters.see(a)
    assert adapters.need(a, "z") == Need(0.0, 1, 1), "it is idle now"


def test_what_an_endpoint_serves_says_which_models_are_adapters() -> None:
    a = Endpoint("a", "a:1", models=(ServedModel("base", "", b"{}"), ServedModel("x", "base", b"{}")))
    adapters = seen(a)
    assert "x" in adapters.known
    assert "base" not in adapters.known
    assert adapters.need(a, "x") == LOADED
    a.models = (*a.models, ServedModel("y", "base", b"{}")) if a.models else None
    adapters.see(a)
    assert "y" in adapters.known


def test_an_endpoint_that_says_nothing_has_as_many_slots_as_the_one_that_said_so_last() -> None:
    a, silent = endpoint("a", slots=1), Endpoint("b", "b:1")
    adapters = seen(a, silent)
    adapters.start(silent, "x")
    assert adapters.need(silent, "y").turns > 0
    nobody_says = Adapters()
    for name in "xyz":
        nobody_says.start(silent, name)
    assert nobody_says.need(silent, "w") == LOADED, "room without end"


def test_what_is_remembered_is_taken_over_and_what_leaves_is_forgotten() -> None:
    a, there = endpoint(), endpoint()
    adapters, other = seen(a), Adapters()
    for name in "xy":
        adapters.start(a, name)
    adapters.end(a, "x")
    for _, most, idle in adapters.remembered():
        other.restore(there, most, idle)
    assert other.need(there, "x") == NOTHING
    assert "x" in other.known
    assert other.need(there, "y") == LOADED, "what is in flight is told by itself"
    adapters.forget(a)
    assert not adapters.holders("x")
    assert not adapters.holders("y")


@given(st.lists(st.tuples(st.sampled_from(("start", "end", "see")), st.sampled_from("abc"), st.sampled_from("uvwxyz"))))
def test_holders_are_those_that_need_no_load(events: list[tuple[str, str, str]]) -> None:
    pool = {name: endpoint(name, slots=2) for name in "abc"}
    adapters = seen(*pool.values())
    for event, name, adapter in events:
        one = pool[name]
        if event == "start":
            adapters.start(one, adapter)
        elif event == "end":
            adapters.end(one, adapter)
        else:
            one.load = Load(lora_max=2, lora_running=frozenset(adapter))
            adapters.see(one)
        for wanted in "uvwxyz":
            holders = adapters.holders(wanted)
            assert {e for e in pool.values() if not adapters.need(e, wanted).loads} == set(holders)
        for slots in adapters.slots.values():
            assert len(slots.idle) + min(2, len(slots.active)) <= 2
