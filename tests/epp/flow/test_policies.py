"""Order in a flow, turns between flows, ceilings of bands."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest

from epp.flow.policies import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    GlobalStrict,
    PriorityHoldback,
    ProgramAware,
    RoundRobin,
    RoundRobinWithRoom,
    SloDeadline,
    SoftReflectiveCeiling,
    StaticLimit,
)
from epp.plugin import Endpoint, Flow, FlowKey, Request, Response, Slo, Usage
from epp.protocol import ROLE_LABEL
from epp.testing import services


@dataclass
class Waits:
    request: Request
    since: float = 0.0
    expires: float = 60.0


@dataclass
class OneFlow:
    id: str
    head: Waits
    requests: int = 1
    turn: int = 0

    def __len__(self) -> int:
        return self.requests


@dataclass(eq=False)
class OneBand:
    """Its orders are sorted anew each time they are asked for."""

    in_turn: Sequence[Flow]
    by_head: Sequence[Flow] = ()
    priority: int = 0

    def by(self, key: FlowKey) -> Sequence[Flow]:
        placed = [(place, at) for at, flow in enumerate(self.in_turn) if (place := key(flow)) is not None]
        return [self.in_turn[at] for _, at in sorted(placed)]

    def first(self, key: FlowKey) -> Flow | None:
        return next(iter(self.by(key)), None)

    def last(self, key: FlowKey) -> Flow | None:
        return next(reversed(self.by(key)), None)

    def again(self, flow: str) -> None:
        pass

    @property
    def several(self) -> int:
        return sum(len(flow) > 1 for flow in self.in_turn)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


A = Endpoint("default/a", "10.0.0.1:8000")


def request(tokens: int = 100, slo: Slo | None = None) -> Request:
    return Request(id="r", model="m", tokens=tokens, slo=slo)


def test_places() -> None:
    first = Waits(request(slo=Slo(5.0)), since=1.0, expires=90.0)
    second = Waits(request(slo=Slo(tpot=0.05)), since=2.0, expires=30.0)
    assert FirstComeFirstServed().place(first) == FirstComeFirstServed().place(second)
    assert EarliestDeadlineFirst().place(first) > EarliestDeadlineFirst().place(second)
    assert SloDeadline().place(first) == 6.0 < SloDeadline().place(second), "who says no time comes last"


def test_one_line_for_all_or_one_of_each_in_turn() -> None:
    a, b = OneFlow("a", Waits(request())), OneFlow("b", Waits(request()))
    band = OneBand(in_turn=[b, a], by_head=[a, b])
    assert [*GlobalStrict().turns(band)] == [a, b]
    assert [*RoundRobin().turns(band)] == [b, a]


def aware(**parameters: object) -> tuple[ProgramAware, Clock]:
    made, clock = ProgramAware(**parameters), Clock()  # type: ignore[arg-type]
    made.clock = clock
    return made, clock


def order(policy: ProgramAware, *flows: OneFlow) -> list[str]:
    for turn, flow in enumerate(flows):
        flow.turn = turn
    return [flow.id for flow in policy.turns(OneBand(in_turn=flows))]


def test_who_floods_leaves_room_while_another_has_none_waiting() -> None:
    policy = RoundRobinWithRoom(room=0.6, seconds=60.0)
    policy.clock = clock = Clock()
    flood, quiet = OneFlow("flood", Waits(request()), 9), OneFlow("quiet", Waits(request()))
    alone, both = OneBand([flood]), OneBand([flood, quiet])
    policy.dispatched("flood", flood.head, 0.0)
    assert policy.share(alone) == 1.0, "there is nobody else"
    policy.dispatched("quiet", quiet.head, 0.0)
    assert policy.share(alone) == 0.6
    assert policy.share(both) == 0.6
    quiet.requests = 2
    assert policy.share(both) == 1.0, "both flood, so they take turns"
    assert policy.share(OneBand([flood], priority=5)) == 1.0, "another priority has its own"
    clock.now = 61.0
    policy.dispatched("flood", flood.head, 61.0)
    assert policy.share(alone) == 1.0


def test_who_got_least_is_next_and_what_was_generated_counts_twice() -> None:
    policy, clock = aware()
    a, b = OneFlow("a", Waits(request(300))), OneFlow("b", Waits(request(100)))
    policy.dispatched("a", a.head, 0.0)
    policy.dispatched("b", b.head, 0.0)
    assert order(policy, a, b) == ["b", "a"]
    policy.on_finished(b.head.request, A, Response(usage=Usage(prompt=100, completion=150)))
    assert order(policy, b, a) == ["a", "b"], "100 + 2 * 150 are more than 300"
    clock.now = 600.0
    policy.dispatched("a", Waits(request(10)), 600.0)
    assert order(policy, a, b) == ["b", "a"], "what was long ago hardly counts"


def test_who_waits_long_is_next_though_he_got_more() -> None:
    policy, clock = aware(weight_service_head_wait=2.0)
    clock.now = 5.0
    a, b = OneFlow("a", Waits(request(300))), OneFlow("b", Waits(request(), since=5.0))
    policy.dispatched("a", a.head, 5.0)
    assert order(policy, b, a) == ["a", "b"]


def test_the_latest_turn_first() -> None:
    policy, clock = aware(strategy="turn-priority")
    a, b = OneFlow("a", Waits(request())), OneFlow("b", Waits(request()))
    for _ in range(3):
        policy.dispatched("a", a.head, 0.0)
    assert order(policy, b, a) == ["a", "b"]
    clock.now = 8.0
    a.head.since = 8.0
    assert order(policy, a, b) == ["b", "a"], "eight seconds are four turns"


def test_programs_are_forgotten() -> None:
    policy, clock = aware(eviction_ttl_seconds=10.0)
    policy.dispatched("a", Waits(request()), 0.0)
    assert policy.statistics() == {"programs": 1, "jains_fairness_index": 1.0}
    clock.now = 10.0
    assert order(policy) == []
    assert policy.statistics()["programs"] == 0
    for number in range(10_001):
        policy.dispatched(str(number), Waits(request()), 10.0)
    assert policy.statistics()["programs"] == 10_000


def test_the_index_says_how_even_service_is() -> None:
    policy, _ = aware()
    policy.dispatched("a", Waits(request(100)), 0.0)
    policy.dispatched("b", Waits(request(300)), 0.0)
    assert policy.statistics()["jains_fairness_index"] == pytest.approx(400**2 / (2 * (100**2 + 300**2)))


def test_ceilings() -> None:
    assert StaticLimit(0.8).ceilings(0.5, (5, 0)) == [0.8, 0.8]
    assert PriorityHoldback(0.4).ceilings(0.5, (7, 0, -1)) == pytest.approx([1.0, 0.7, 0.4])
    assert PriorityHoldback(0.4, domain="value").ceilings(0.5, (7, 0, -1)) == pytest.approx([1.0, 0.475, 0.4])
    assert PriorityHoldback(0.4).ceilings(0.5, (0,)) == [1.0]
    assert PriorityHoldback().ceilings(0.5, (0, -1)) == pytest.approx([1.0, 0.5])


class HeldBack:
    """`priority-holdback-policy` without a ceiling of its own, in a pool of so many endpoints."""

    def __init__(self, *endpoints: Endpoint, min_ceiling: float | None = None) -> None:
        self.policy, self.clock = PriorityHoldback(min_ceiling), Clock()
        self.policy.clock = self.clock
        self.policy.start(replace(services(), endpoints=lambda: endpoints))
        self.endpoint = endpoints[0]

    def serve(self, *, rate: float, seconds: float, count: int, priority: int = 1, seen: bool = True) -> None:
        """So many a second, each with a first token after so long."""
        for _ in range(count):
            self.clock.now += 1 / rate
            one = Request(id="r", model="m", priority=priority, stream=True, sees_answer=seen)
            self.policy.on_picked(one, self.endpoint)
            if seen:
                picked_at = self.clock.now
                self.clock.now += seconds
                self.policy.on_first_token(one, self.endpoint)
                self.clock.now = picked_at  # the next came before

    def lowest(self, *priorities: int) -> float:
        return self.policy.ceilings(0.5, priorities)[-1]


def pool(count: int, **labels: str) -> list[Endpoint]:
    return [Endpoint(f"default/{count}-{n}", f"10.0.1.{n}:8000", labels) for n in range(count)]


def test_the_lowest_leaves_free_what_those_above_are_likely_to_need() -> None:
    held = HeldBack(*pool(16))
    assert held.lowest(1, 0) == pytest.approx(1 - 1 / 16), "nobody came: one stays free for who does"
    held.serve(rate=10.0, seconds=0.1, count=3000)
    assert held.lowest(1, 0) == pytest.approx(1 - (1 + 1 + 1.645) / 16, abs=0.01), "one prompt at a time in the mean"
    few = held.lowest(1, 0)
    held.serve(rate=10.0, seconds=0.1, count=3000, priority=2)
    assert held.lowest(2, 1, 0) < few, "what all above it use"
    assert held.policy.ceilings(0.5, (2, 1, 0))[1] > held.lowest(2, 1, 0)
    held.clock.now += 3600.0
    assert held.lowest(2, 1, 0) == pytest.approx(1 - 1 / 16), "they are gone"


def test_half_is_held_back_at_most_and_where_nothing_is_known() -> None:
    busy = HeldBack(*pool(16))
    busy.serve(rate=100.0, seconds=0.1, count=9000)
    assert busy.lowest(1, 0) == 0.5
    unseen = HeldBack(*pool(16))
    unseen.serve(rate=1.0, seconds=0.1, count=100, seen=False)
    assert unseen.lowest(1, 0) == 0.5
    for small in (HeldBack(A), HeldBack(*pool(2))):
        small.serve(rate=0.1, seconds=0.001, count=100)
        assert small.lowest(1, 0) == 0.5
    apart = HeldBack(*pool(6, **{ROLE_LABEL: "prefill"}), *pool(2, **{ROLE_LABEL: "decode"}))
    apart.serve(rate=0.1, seconds=0.001, count=100)
    assert apart.lowest(1, 0) == 0.5, "two of them decode"
    told = HeldBack(*pool(16), min_ceiling=0.3)
    told.serve(rate=0.1, seconds=0.001, count=100)
    assert told.lowest(1, 0) == pytest.approx(0.3)


def test_priorities_that_are_gone_are_forgotten() -> None:
    held = HeldBack(*pool(4))
    for priority in range(500):
        held.serve(rate=10.0, seconds=0.1, count=1, priority=priority)
        held.lowest(priority, -1)
    assert len(held.policy._used) <= 3


def test_a_reflective_ceiling_opens_the_less_often_the_fuller_the_pool_is() -> None:
    def opened(saturation: float) -> list[int]:
        policy = SoftReflectiveCeiling()
        looks = [policy.ceilings(saturation, (9, 1, 0)) for _ in range(90)]
        return [sum(saturation < one[band] for one in looks) for band in range(3)]

    assert opened(0.3) == [90, 90, 90]
    assert opened(0.7) == [90, 45, 45], "seven to three: every second look"
    assert opened(0.9) == [90, 10, 10]
    assert opened(1.0) == [0, 0, 0], "nobody is let go where the pool is full"


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: StaticLimit(0.0),
        lambda: StaticLimit(1.1),
        lambda: PriorityHoldback(1.0),
        lambda: PriorityHoldback(0.5, max_ceiling=0.4),
        lambda: PriorityHoldback(max_ceiling=0.4),
        lambda: RoundRobinWithRoom(room=0.0),
        lambda: RoundRobinWithRoom(seconds=0.0),
        lambda: ProgramAware(service_half_life_seconds=0.0),
        lambda: ProgramAware(weight_service=-1.0),
    ],
)
def test_parameters_that_mean_nothing_are_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="expected"):
        wrong()  # type: ignore[operator]
