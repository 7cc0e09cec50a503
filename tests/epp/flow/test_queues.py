"""Bands, flows and places: who is next, who has waited too long, and counts that stay true."""

from collections.abc import Sequence
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from epp.flow.policies import FirstComeFirstServed, GlobalStrict, StaticLimit
from epp.flow.queues import BandSettings, Entry, FlowSettings, Queues
from epp.flow.saturation import ConcurrencyDetector
from epp.plugin import Endpoint, OrderingPolicy, Request, Waiting


class ByTokens(OrderingPolicy):
    """Short prompts first."""

    def place(self, waiting: Waiting) -> float:
        return waiting.request.tokens


def settings(ordering: OrderingPolicy | None = None) -> FlowSettings:
    band = BandSettings(GlobalStrict(), ordering or FirstComeFirstServed())
    return FlowSettings(ConcurrencyDetector(), StaticLimit(), band, band, {5: band})


def entry(priority: int = 0, *, tokens: int = 1, size: int = 10, expires: float = 60.0, empty: float = 60.0) -> Entry:
    def look(request: Request, endpoints: Sequence[Endpoint], kinds: Any) -> Request:
        raise AssertionError("nobody looks")

    made = Entry(
        Request(id="r", model="m", priority=priority, tokens=tokens),
        None,
        size,
        look,
        lambda request, endpoints: [endpoints],
        lambda endpoints: None,
        lambda error: None,
    )
    made.expires, made.no_endpoint_expires = expires, empty
    return made


def test_bands_come_by_priority_and_stay_in_use_for_a_while() -> None:
    queues = Queues(settings(), keep=10.0)
    for priority in (0, 7, -3):
        queues.add(entry(priority), "a", now=0.0)
    assert [band.priority for band in queues.bands(0.0)] == [7, 0, -3]
    for one in [*queues]:
        queues.remove(one)
    assert [band.priority for band in queues.bands(9.0)] == [7, 0, -3]
    queues.band(5, 9.0)
    assert [band.priority for band in queues.bands(20.0)] == [5], "what the configuration names stays"


def test_a_flow_has_its_requests_in_their_places_and_equals_as_they_came() -> None:
    queues = Queues(settings(ByTokens()))
    made = [entry(tokens=tokens) for tokens in (5, 3, 5, 1)]
    for one in made:
        queues.add(one, "a", now=0.0)
    (flow,) = queues.band(0, 0.0).in_turn
    assert [*flow] == [made[3], made[1], made[0], made[2]]


def test_flows_by_head_follow_their_heads_and_in_turn_those_who_were_served() -> None:
    queues = Queues(settings(ByTokens()))
    first, second, third = entry(tokens=2), entry(tokens=9), entry(tokens=4)
    queues.add(first, "a", now=0.0)
    queues.add(second, "a", now=0.0)
    queues.add(third, "b", now=0.0)
    band = queues.band(0, 0.0)
    assert [flow.id for flow in band.by_head] == ["a", "b"]
    queues.remove(first, served=True)
    assert [flow.id for flow in band.by_head] == ["b", "a"]
    assert [flow.id for flow in band.in_turn] == ["b", "a"]
    queues.remove(third)
    assert [flow.id for flow in band.in_turn] == ["a"]


def test_who_has_waited_too_long_depends_on_whether_there_are_endpoints() -> None:
    queues = Queues(settings())
    short, long = entry(expires=5.0, empty=50.0), entry(expires=50.0, empty=5.0)
    for one in (short, long):
        queues.add(one, "a", now=0.0)
    assert queues.next_expiry == 5.0
    assert queues.expired(4.0, lambda group: True) == []
    assert queues.expired(5.0, lambda group: True) == [short]
    queues.remove(short)
    assert queues.next_expiry == 50.0
    assert queues.expired(6.0, lambda group: False) == [], "it is not looked at before its other time"
    queues.look_again()  # the last endpoint went
    assert queues.expired(6.0, lambda group: False) == [long]


@given(st.lists(st.tuples(st.integers(-2, 2), st.sampled_from("abc"), st.integers(0, 9), st.booleans()), max_size=40))
def test_counts_are_those_of_the_entries(steps: list[tuple[int, str, int, bool]]) -> None:
    queues, alive = Queues(settings(ByTokens())), list[Entry]()
    for priority, flow, tokens, removes in steps:
        if removes and alive:
            queues.remove(alive.pop(tokens % len(alive)), served=bool(tokens % 2))
        else:
            alive.append(entry(priority, tokens=tokens, size=tokens))
            queues.add(alive[-1], flow, now=0.0)
        assert len(queues) == queues.requests == len(alive)
        assert queues.bytes == sum(one.size for one in alive)
        assert [*queues] == sorted(alive, key=lambda one: one.number)
        for band in queues.bands(0.0):
            own = [one for one in alive if one.request.priority == band.priority]
            assert (band.requests, band.bytes) == (len(own), sum(one.size for one in own))
            heads = [flow.head for flow in band.by_head]
            assert heads == sorted(heads, key=lambda one: one.place)
            assert {flow.id for flow in band.by_head} == {flow.id for flow in band.in_turn}
