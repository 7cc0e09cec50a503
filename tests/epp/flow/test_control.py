"""What waits, what is let go and when; each request ends exactly once, whatever happens."""

import asyncio
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import inf
from random import Random
from typing import Any, Literal
from unittest.mock import ANY

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp import protocol
from epp.errors import EppError, NoEndpoint, Queued, Rejected
from epp.flow.control import FlowControl, Outcome
from epp.flow.policies import (
    EarliestDeadlineFirst,
    FirstComeFirstServed,
    GlobalStrict,
    PriorityHoldback,
    ProgramAware,
    RoundRobin,
    RoundRobinWithRoom,
    SloDeadline,
    StaticLimit,
)
from epp.flow.queues import Band, BandSettings, Entry, FlowSettings, Group, Need, QueuedFlow, Queues
from epp.plugin import (
    AGENT_IDENTITY,
    BandSelectionPolicy,
    Detector,
    Endpoint,
    FairnessPolicy,
    Flow,
    FlowBand,
    OrderingPolicy,
    Request,
    Response,
    Slo,
    Usage,
    UsageLimitPolicy,
    Waiting,
    annotated,
    stages_of,
)

PODS = tuple(Endpoint(f"default/{name}", f"10.0.0.{n}:8000") for n, name in enumerate("abcd", 1))


class Slots(Detector):
    """Each endpoint has room for so many, and a slot for one adapter: models of one capital letter."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.adapters: dict[Endpoint, list[str]] = {}
        """In flight there."""
        self.used: dict[Endpoint, int] = {}
        self.asked = 0
        self.looked = 0
        self.opens_in = inf

    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        self.asked += 1
        return sum(min(1.0, self.used.get(one, 0) / self.size) for one in endpoints) / len(endpoints)

    def scarce(self, request: Request) -> str:
        return request.model if request.model.isupper() else ""

    def ready(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        self.looked += 1
        return [one for one in endpoints if {*self.adapters.get(one, ())} <= {request.model}]

    def falls_in(self, endpoints: Sequence[Endpoint]) -> float:
        return self.opens_in


class Timer:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class World:
    """A pool, a clock, timers, and what became of each request: `let go` or its error."""

    def __init__(
        self,
        size: int = 1,
        *,
        pods: int = 1,
        trusted: bool = True,
        control: type[FlowControl] = FlowControl,
        **settings: Any,
    ) -> None:
        self.now = 0.0
        self.pods: tuple[Endpoint, ...] = PODS[:pods]
        self.slots = Slots(size)
        self.replicas = 1
        self.timers: list[tuple[float, int, Timer]] = []
        self.fates: dict[str, list[str]] = {}
        self.again: dict[str, str] = {}
        """What `Retry-After` said."""
        self.models: dict[str, str] = {}
        self.prefills: dict[str, Endpoint] = {}
        self.order: list[str] = []
        self.where: dict[str, Endpoint] = {}
        self.outcomes: list[tuple[str, int, Outcome, float]] = []
        self.ended_models: list[str] = []
        self.failed: list[str] = []
        self.flow = control(
            make(self.slots, **settings),
            self.candidates,
            lambda group: "no endpoint is ready",
            self.later,
            self.ended,
            lambda plugin, error: self.failed.append(f"{plugin}: {error}"),
            clock=lambda: self.now,
            trusted=trusted,
            replicas=lambda: self.replicas,
        )

    def ended(self, fairness_id: str, priority: int, outcome: Outcome, seconds: float, model: str) -> None:
        self.outcomes.append((fairness_id, priority, outcome, seconds))
        self.ended_models.append(model)

    def candidates(self, group: Group) -> Sequence[Endpoint]:
        return self.pods if group is None else tuple(pod for pod in self.pods if pod.address in group)

    def later(self, seconds: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heappush(self.timers, (self.now + seconds, len(self.timers) + id(timer), timer))
        return timer

    def pass_(self, seconds: float = 0.0) -> None:
        """Time passes."""
        until = self.now + seconds
        while self.timers and self.timers[0][0] <= until:
            at, _, timer = heappop(self.timers)
            self.now = max(self.now, at)
            if timer.call is not None:
                timer.call()
        self.now = until

    def ask(
        self,
        name: str,
        priority: int = 0,
        flow: str = "",
        *,
        group: Group = None,
        slo: Slo | None = None,
        model: str = "m",
        tokens: int = 0,
        **headers: str,
    ) -> Entry:
        headers = {name.replace("_", "-"): value for name, value in headers.items()}
        if flow:
            headers[protocol.FAIRNESS_ID[0]] = flow
        request = Request(
            id=name, model=model, priority=priority, slo=slo, headers=headers, body=b"x" * 10, tokens=tokens
        )
        self.fates[name] = []
        self.models[name] = model

        def choose(endpoints: Sequence[Endpoint]) -> None:
            decode, *prefill = stages(request, endpoints)
            if prefill:
                self.prefills[name] = prefill[0][0]
                self.slots.used[prefill[0][0]] = self.slots.used.get(prefill[0][0], 0) + 1
            able = self.slots.ready(request, decode) if self.slots.scarce(request) else decode
            best = min(able, key=lambda pod: self.slots.used.get(pod, 0))
            self.slots.used[best] = self.slots.used.get(best, 0) + 1
            if self.slots.scarce(request):
                self.slots.adapters.setdefault(best, []).append(model)
            self.where[name] = best
            self.fates[name].append("let go")
            self.order.append(name)

        def refuse(error: EppError) -> None:
            self.fates[name].append(f"{error.status} {error.reason}")
            if "retry-after" in error.headers:
                self.again[name] = error.headers["retry-after"]

        def stages(request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
            """Who asks for model `m` needs a prefiller beside the one that decodes, where there are any."""
            decode, *prefill = stages_of(endpoints)
            return [decode, *prefill] if model == "m" else [decode]

        def look(request: Request, endpoints: Sequence[Endpoint], kinds: Any) -> Request:
            return request

        entry = Entry(request, group, 10, look, stages, choose, refuse)
        try:
            self.flow.enter(entry)
        except EppError as error:
            refuse(error)
        return entry

    def end(self, name: str) -> None:
        pod = self.where.pop(name)
        self.slots.used[pod] -= 1
        if (prefiller := self.prefills.pop(name, None)) is not None:
            self.slots.used[prefiller] -= 1
        if (model := self.models[name]).isupper():
            self.slots.adapters[pod].remove(model)
        self.flow.on_finished(Request(id=name, model="m"), pod, Response())

    def could_go(self, entry: Entry) -> bool:
        """Whether there is room for it in all that it needs."""
        pods = self.candidates(entry.group)
        decode, *others = entry.stages(entry.request, pods) if pods else ((),)
        if scarce := self.slots.scarce(entry.request):
            others = [*others, [one for one in decode if {*self.slots.adapters.get(one, ())} <= {scarce}]]
        return all(any(self.slots.used.get(pod, 0) < self.slots.size for pod in group) for group in (decode, *others))

    @property
    def waiting(self) -> int:
        return sum(row[2] for row in self.flow.figures().waiting)


def make(  # noqa: PLR0913 - what one test says of flow control, each by its name
    detector: Detector,
    *,
    fairness: FairnessPolicy | None = None,
    ordering: OrderingPolicy | None = None,
    usage: UsageLimitPolicy | None = None,
    max_requests: float = inf,
    band_bytes: float = inf,
    band_requests: float = 100,
    ttl: float = 60.0,
    no_endpoint_ttl: float = 60.0,
    bands: dict[int, float] | None = None,
) -> FlowSettings:
    def band(ttl: float | None = None) -> BandSettings:
        order = ordering or FirstComeFirstServed()
        return BandSettings(fairness or RoundRobin(), order, band_requests, band_bytes, ttl)

    own = {priority: band(its) for priority, its in (bands or {}).items()}
    return FlowSettings(detector, usage or StaticLimit(), band(), band(), own, max_requests, inf, ttl, no_endpoint_ttl)


# --- order ----------------------------------------------------------------------------------------------------------


def test_with_room_nobody_waits() -> None:
    world = World(size=2)
    world.ask("a")
    world.ask("b")
    assert world.order == ["a", "b"]
    assert world.outcomes == [("default-flow", 0, "Dispatched", 0.0)] * 2
    assert not world.timers


def test_who_waits_goes_when_another_ends_the_highest_priority_first() -> None:
    world = World()
    for name, priority in (("first", 0), ("batch", -1), ("chat", 5), ("plain", 0)):
        world.ask(name, priority)
    world.pass_(3.0)
    assert world.order == ["first"]
    for ended in ("first", "chat", "plain", "batch"):
        world.end(ended)
        world.pass_()
    assert world.order == ["first", "chat", "plain", "batch"]
    assert world.outcomes[1] == ("default-flow", 5, "Dispatched", 3.0)
    assert world.waiting == 0


def test_flows_of_a_band_take_turns() -> None:
    world = World()
    for name in ("a1", "a2", "a3", "b1", "b2", "c1"):
        world.ask(name, flow=name[0])
    for _ in range(5):
        world.end(world.order[-1])
        world.pass_()
    assert world.order == ["a1", "a2", "b1", "c1", "a3", "b2"]


def test_where_clients_are_not_trusted_all_are_one_flow_and_ask_for_nothing() -> None:
    world = World(trusted=False)
    for name in ("a1", "a2", "b1"):
        world.ask(name, flow=name[0], x_llm_d_inference_ttl="1s")
    assert world.flow.figures().waiting == [("default-flow", 0, 2, 20, "m")]
    world.pass_(2.0)
    world.end("a1")
    world.pass_()
    assert world.order == ["a1", "a2"]


def test_deadlines_order_a_flow() -> None:
    world = World(ordering=SloDeadline())
    for name, ttft in (("first", None), ("none", None), ("late", 9.0), ("soon", 0.5), ("tokens", None)):
        world.ask(name, slo=None if name == "none" else Slo(ttft, 0.05))
    while world.where:
        world.end(world.order[-1])
        world.pass_()
    assert world.order == ["first", "soon", "late", "none", "tokens"]


def test_several_go_where_there_is_room_for_several_and_no_more() -> None:
    world = World(size=2, pods=2)
    for number in range(7):
        world.ask(str(number))
    assert world.order == ["0", "1", "2", "3"]
    world.end("0")
    world.end("3")
    world.pass_()
    assert world.order == ["0", "1", "2", "3", "4", "5"]
    assert world.waiting == 1


def test_lower_priorities_leave_room_to_the_highest() -> None:
    world = World(size=4, usage=PriorityHoldback(0.5))
    for name, priority in (("b1", -1), ("c1", 1), ("b2", -1), ("c2", 1), ("b3", -1), ("c3", 1)):
        world.ask(name, priority)
    assert world.order == ["b1", "c1", "c2", "c3"]
    world.end("b1")
    world.end("c1")
    world.pass_()
    assert world.order == ["b1", "c1", "c2", "c3"], "half of the room is for the highest"
    world.end("c2")
    world.pass_()
    assert world.order[-1] == "b2"


def test_a_head_that_cannot_go_holds_back_none_that_may_go_elsewhere() -> None:
    world = World(pods=2)
    a, b = ((pod.address,) for pod in PODS[:2])
    world.ask("a1", 5, group=a)
    world.ask("a2", 5, group=a)
    world.ask("b1", 0, "x", group=b)
    assert world.order == ["a1", "b1"]
    world.ask("a3", 0, group=a)
    world.end("b1")
    world.pass_()
    assert world.order == ["a1", "b1"]
    world.end("a1")
    world.pass_()
    assert world.order[-1] == "a2", "the higher band first, where both want the same"


def test_the_session_of_a_coding_agent_is_its_flow_where_clients_are_trusted() -> None:
    agent = annotated(Request(id="r", model="m"), attributes={AGENT_IDENTITY: "s1"})
    headers = {protocol.FAIRNESS_ID[0]: "own"}
    for trusted, said in ((True, ("s1", "own", "team")), (False, ("default-flow", "default-flow", "team"))):
        flow = World(trusted=trusted).flow
        asks = (agent, msgspec.structs.replace(agent, headers=headers), annotated(agent, tenant="team"))
        assert tuple(flow._fairness_id(each) for each in asks) == said


def test_a_request_that_cannot_go_holds_back_none_of_its_own_tenants_that_may_go_elsewhere() -> None:
    world = World(pods=2)
    a, b = ((pod.address,) for pod in PODS[:2])
    for name, group in (("a1", a), ("a2", a), ("b1", b), ("a3", a), ("b2", b)):
        world.ask(name, flow="x", group=group)
    assert world.order == ["a1", "b1"]
    assert world.flow.figures().waiting == [("x", 0, 3, 30, "m")]
    world.end("b1")
    world.pass_()
    assert world.order[-1] == "b2", "a2 came before it, and may not go where there is room"
    world.end("a1")
    world.pass_()
    assert world.order[-1] == "a2"


def test_an_adapter_without_a_slot_holds_back_its_own_requests_and_no_others() -> None:
    world = World(size=3, pods=2)
    for name, model in (("x1", "X"), ("y1", "Y"), ("z1", "Z"), ("z2", "Z"), ("base", "m"), ("x2", "X"), ("y2", "Y")):
        world.ask(name, model=model, flow="one")
    assert world.order == ["x1", "y1", "base", "x2", "y2"], "a slot for X and one for Y, and room for more"
    world.ask("high", 5, model="Z")
    world.end("y1")
    world.end("y2")
    world.pass_()
    assert world.order[-3:] == ["high", "z1", "z2"]


def test_who_waits_long_for_a_slot_gets_the_next_though_others_could_have_it_longer() -> None:
    world = World(size=3)
    world.ask("x1", model="X")
    world.ask("z1", model="Z")
    world.pass_(4.0)
    world.ask("x2", model="X")
    assert world.order == ["x1", "x2"]
    world.pass_(2.0)
    world.ask("x3", model="X")
    world.ask("base")
    assert world.order == ["x1", "x2", "base"]
    world.end("x1")
    world.end("x2")
    world.pass_()
    assert world.order[-1] == "z1"
    assert world.waiting == 1
    world.end("z1")
    world.end("base")
    world.pass_()
    assert world.order[-1] == "x3"


def test_slots_that_do_not_come_free_are_not_waited_for_by_all_for_ever() -> None:
    world = World(size=2)
    world.slots.adapters[PODS[0]] = ["F"]
    world.ask("z1", model="Z")
    world.pass_(6.0)
    world.ask("f1", model="F")
    assert world.order == []
    world.pass_(13.9)
    assert world.order == []
    world.pass_(0.2)
    assert world.order == ["f1"]


def test_full_prefillers_hold_back_only_who_needs_one() -> None:
    world = World(size=1, pods=0)
    roles = ("prefill", "decode", "decode")
    world.pods = tuple(Endpoint(f"default/{n}", f"10.0.1.{n}:80", {"llm-d.ai/role": r}) for n, r in enumerate(roles))
    world.slots.used[world.pods[0]] = 1
    world.ask("long")
    world.ask("short", model="short")
    assert world.order == ["short"]
    assert world.flow.figures().saturation == 1.0, "prefill is as full as it gets"
    world.slots.used[world.pods[0]] = 0
    world.flow.changed()
    world.pass_()
    assert world.order == ["short", "long"]
    world.ask("longer")
    world.ask("last", model="short")
    world.end("long")
    world.pass_()
    assert world.order == ["short", "long", "longer"], "they share those that decode, in their order"


def test_prefillers_that_come_later_are_waited_for_too() -> None:
    world = World(pods=1)
    world.ask("first")
    world.ask("long")
    world.pods = (PODS[0], PREFILLER)
    world.slots.used[PREFILLER] = 1
    world.flow.endpoints_changed()
    world.end("first")
    world.pass_()
    assert world.order == ["first"]
    world.ask("short", model="short")
    assert world.order == ["first", "short"]


def test_many_adapters_are_a_bounded_number_of_lines() -> None:
    world = World(size=1000, band_requests=inf)
    world.slots.adapters[PODS[0]] = ["F"]
    for number in range(300):
        world.ask(str(number), model=f"A{number}")
    world.ask("base")
    assert world.order == ["base"]
    asked = world.slots.looked
    world.ask("more")
    assert world.slots.looked - asked < 100
    world.slots.adapters.clear()
    world.pass_(21.0)
    world.flow.changed()
    while world.where:
        world.end(next(iter(world.where)))
        world.pass_()
    assert world.waiting == 0
    assert len(world.order) == 302


def test_a_flow_that_floods_leaves_room_and_holds_nobody_else_back() -> None:
    world = World(size=4)
    policy = RoundRobinWithRoom(room=0.5)
    policy.clock = lambda: world.now
    band = BandSettings(policy, FirstComeFirstServed())
    world.flow.configure(replace(make(world.slots), usual=band, negative=band))
    world.ask("q0", flow="quiet")
    world.end("q0")
    for number in range(6):
        world.ask(f"f{number}", flow="flood")
    assert world.order == ["q0", "f0", "f1", "f2", "f3"], "before one waits it is no flood"
    world.end("f0")
    world.pass_()
    assert world.order[-1] == "f3", "three of four are used, and half is for it"
    world.ask("q1", flow="quiet")
    assert world.order[-1] == "q1"
    for ended in ("f1", "f2", "q1"):
        world.end(ended)
        world.pass_()
    assert world.order[-2:] == ["f4", "f5"], "a last one alone is no flood"


class LowestFirst(BandSelectionPolicy):
    """What nobody should want."""

    def __init__(self) -> None:
        self.name = "lowest-first"
        self.went: list[int] = []
        self.fails = False

    def turns(self, priorities: Sequence[int]) -> Sequence[int]:
        if self.fails:
            raise RuntimeError("no")
        return sorted(priorities)

    def dispatched(self, priority: int, waiting: Waiting, now: float) -> None:
        self.went.append(priority)


def test_a_policy_says_which_band_is_asked_first() -> None:
    world, policy = World(), LowestFirst()
    world.flow.configure(replace(make(world.slots), selection=policy))
    for name, priority in (("first", 0), ("chat", 5), ("batch", -1), ("plain", 0)):
        world.ask(name, priority)
    for ended in ("first", "batch"):
        world.end(ended)
        world.pass_()
    assert world.order == ["first", "batch", "plain"]
    assert policy.went == [0, -1, 0]
    policy.fails = True
    world.end("plain")
    world.pass_()
    assert world.order[-1] == "chat"
    assert set(world.failed) == {"lowest-first: no"}


def test_a_band_that_is_held_back_holds_back_none_that_a_policy_asks_later() -> None:
    world = World(size=4)
    world.flow.configure(replace(make(world.slots, usage=PriorityHoldback(0.25)), selection=LowestFirst()))
    for name, priority in (("c1", 1), ("b1", -1), ("c2", 1), ("b2", -1), ("c3", 1)):
        world.ask(name, priority)
    assert world.order == ["c1", "c2", "c3"]


# --- ends -----------------------------------------------------------------------------------------------------------


def test_too_many_are_refused() -> None:
    world = World(band_requests=2)
    for number in range(4):
        world.ask(str(number))
    world.ask("chat", 1)
    assert world.fates["3"] == ["429 rejected-saturated"]
    assert world.outcomes[-1] == ("default-flow", 0, "RejectedCapacity", 0.0)
    assert world.waiting == 3, "the other band has a limit of its own"


@pytest.mark.parametrize("limit", [{"max_requests": 1}, {"band_bytes": 15}])
def test_every_limit_counts(limit: dict[str, Any]) -> None:
    world = World(**limit)
    for number in range(3):
        world.ask(str(number))
    assert world.fates == {"0": ["let go"], "1": [], "2": ["429 rejected-saturated"]}


def test_figures_say_how_much_of_each_limit_is_used() -> None:
    world = World(band_requests=8, band_bytes=100, max_requests=40)
    for number in range(5):
        world.ask(str(number))
    assert (world.flow.figures().bands, world.flow.figures().whole) == ([(0, 0.5, 0.4)], (0.1, None))
    world.replicas = 2
    assert (world.flow.figures().bands, world.flow.figures().whole) == ([(0, 1.0, 0.8)], (0.2, None))
    assert World(max_requests=inf).flow.figures().whole == (None, None)


def test_replicas_share_a_limit() -> None:
    world = World(band_requests=4)
    world.replicas = 2
    for number in range(5):
        world.ask(str(number))
    assert world.fates["3"] == ["429 rejected-saturated"]
    world.replicas = 1
    world.ask("more")
    assert world.waiting == 3
    world.replicas = 9
    world.ask("chat", 1)
    assert world.waiting == 4, "one may always wait"


def test_who_waits_too_long_is_refused_then_and_not_later() -> None:
    world = World(ttl=10.0, bands={-1: 3.0})
    for name, priority, ttl in (("first", 0, ""), ("plain", 0, ""), ("batch", -1, ""), ("short", 0, "500ms")):
        world.ask(name, priority, x_llm_d_inference_ttl=ttl)
    world.pass_(0.4)
    assert world.waiting == 3
    world.pass_(0.2)
    assert world.fates["short"] == ["429 rejected-ttl-expired"]
    world.pass_(2.5)
    assert world.fates["batch"] == ["429 rejected-ttl-expired"]
    world.pass_(7.0)
    assert world.fates["plain"] == ["429 rejected-ttl-expired"]
    assert [outcome[2] for outcome in world.outcomes] == ["Dispatched", *["EvictedTTL"] * 3]


def test_what_waits_is_counted_by_model() -> None:
    world = World(band_requests=3)
    for name, flow, model in (("a", "x", "m"), ("b", "x", "m"), ("c", "x", "o"), ("d", "y", "o"), ("e", "y", "p")):
        world.ask(name, flow=flow, model=model)
    assert {*world.flow.figures().waiting} == {("x", 0, 1, 10, "m"), ("x", 0, 1, 10, "o"), ("y", 0, 1, 10, "o")}
    assert world.ended_models == ["m", "p"], "one went, one found no room"
    world.end("a")
    world.pass_()
    assert {*world.flow.figures().waiting} == {("x", 0, 1, 10, "o"), ("y", 0, 1, 10, "o")}
    world.flow.shut()
    assert world.flow.figures().waiting == []
    assert world.ended_models == ["m", "p", "m", "o", "o"]


def test_who_is_refused_is_told_when_those_that_wait_will_have_gone() -> None:
    world = World(band_requests=4)
    for number in range(9):
        world.ask(str(number))  # one goes, four wait
    assert world.again["8"] == "1", "nothing is known yet"
    for number in range(3):
        world.pass_(3.0)
        world.end(str(number))
        world.pass_()
    for number in range(9, 13):
        world.ask(str(number))
    assert world.again["12"] == "12", "four, one each 3 s"
    world.pass_(10.0)
    world.ask("later")
    assert world.again["later"] == "40", "the next takes 10 s already"
    world.pass_(3600.0)
    assert {*world.again.values()} == {"1", "12", "40", "60"}, "no more than a minute"


def test_an_idle_time_is_no_wait() -> None:
    world = World(band_requests=1)
    for number in range(2):
        world.ask(str(number))
    world.pass_(2.0)
    world.end("0")
    world.pass_(1000.0)
    for number in range(2, 4):
        world.ask(str(number))
    assert world.again == {"3": "2"}


def test_a_waiting_room_that_is_full_says_that_there_is_no_endpoint() -> None:
    world = World(pods=0, band_requests=1)
    world.ask("first")
    world.ask("second")
    assert world.fates["second"] == ["503 rejected-no-endpoints"]
    assert world.outcomes == [("default-flow", 0, "RejectedNoEndpoints", 0.0)]
    assert world.again == {}, "when one comes is not known"


def test_a_header_makes_no_wait_longer_and_bounds_one_without_end() -> None:
    world = World(ttl=10.0, bands={1: 0.0})
    world.ask("first")
    world.ask("long", x_llm_d_inference_ttl="1h")
    world.ask("endless", 1)
    world.ask("bounded", 1, x_llm_d_inference_ttl="20s")
    world.pass_(11.0)
    assert world.fates["long"] == ["429 rejected-ttl-expired"]
    world.pass_(3600.0)
    assert world.fates["bounded"] == ["429 rejected-ttl-expired"]
    assert world.fates["endless"] == []


def test_an_empty_pool_is_a_waiting_room() -> None:
    world = World(pods=0, ttl=10.0, no_endpoint_ttl=100.0)
    world.ask("early")
    world.ask("late")
    world.pass_(50.0)
    assert world.waiting == 2
    world.pods = PODS[:1]
    world.flow.endpoints_changed()
    world.pass_()
    assert world.order == ["early"]
    assert world.fates["late"] == ["429 rejected-ttl-expired"], "with endpoints it has waited too long"
    world.pods = ()
    world.flow.endpoints_changed()
    world.ask("alone")
    world.pass_(101.0)
    assert world.fates["alone"] == ["503 rejected-no-endpoints"]
    assert world.outcomes[-1][2] == "EvictedNoEndpoints"


def fill(world: World, *pods: Endpoint) -> None:
    """These come into its pool, which has been empty."""
    world.pods = pods
    world.flow.filled(2.0)
    world.flow.endpoints_changed()


def test_nobody_goes_to_a_first_endpoint_that_the_gateway_may_not_know_yet() -> None:
    world = World(size=9, pods=0)
    world.ask("early")
    fill(world, PODS[0])
    world.pass_(1.0)
    world.ask("later")
    world.pods = PODS[:2]
    world.flow.endpoints_changed()
    world.pass_(0.9)
    assert world.order == []
    world.pass_(0.2)
    assert world.order == ["early", "later"]
    world.ask("known")
    assert world.order[-1] == "known", "from then on nobody waits"
    assert world.outcomes == [(ANY, 0, "Dispatched", 2.0), (ANY, 0, "Dispatched", 1.0), (ANY, 0, "Dispatched", 0.0)]


def test_a_pool_that_is_filled_twice_is_known_after_the_second_time() -> None:
    world = World(pods=0, ttl=1.0, no_endpoint_ttl=10.0)
    world.ask("waits")
    fill(world, PODS[0])
    world.pass_(1.5)
    world.pods = ()
    world.flow.endpoints_changed()
    world.pass_(0.1)
    fill(world, PODS[1])
    world.pass_(1.9)
    assert world.fates["waits"] == [], "the time without an endpoint counts, in which it waits longer"
    world.pass_(0.2)
    assert world.where == {"waits": PODS[1]}


def test_a_first_endpoint_that_decodes_apart_is_one_of_two_that_are_needed_then() -> None:
    world = World(pods=0)
    world.ask("both")
    roles = ("prefill", "decode")
    fill(world, *(replace(pod, labels={protocol.ROLE_LABEL: role}) for pod, role in zip(PODS, roles, strict=False)))
    world.pass_(1.9)
    assert world.order == []
    world.pass_(0.2)
    assert world.order == ["both"]
    assert "both" in world.prefills


def test_without_flow_control_nobody_is_held_from_a_first_endpoint() -> None:
    world = World(pods=0)
    world.ask("waits")
    fill(world, PODS[0])
    world.flow.close()
    assert world.fates["waits"] == ["let go"]
    world.pass_(5.0)


def test_a_client_that_leaves_makes_room_for_the_next() -> None:
    world = World()
    world.ask("first")
    entry = world.ask("gone")
    world.ask("next")
    world.flow.leave(entry)
    world.flow.leave(entry)
    world.end("first")
    world.pass_()
    assert world.order == ["first", "next"]
    assert world.fates["gone"] == []
    assert [outcome[2] for outcome in world.outcomes].count("EvictedContextCancelled") == 1


def test_new_settings_keep_what_waits_in_the_order_of_its_coming() -> None:
    world = World(ttl=60.0)
    for name in ("first", "a", "b"):
        world.ask(name, flow=name)
    world.pass_(5.0)
    world.flow.configure(make(world.slots, ttl=8.0, band_requests=1))
    assert world.waiting == 2, "nothing is refused for a limit that came later"
    world.end("first")
    world.pass_()
    assert world.order == ["first", "a"]
    world.pass_(3.5)
    assert world.fates["b"] == ["429 rejected-ttl-expired"], "8 s from its coming"


def test_at_the_end_of_the_process_what_waits_is_refused_and_what_need_not_wait_goes() -> None:
    world = World(pods=2)
    a, b = ((pod.address,) for pod in PODS[:2])
    world.ask("first", group=a)
    world.ask("waits", group=a)
    world.flow.shut()
    assert world.fates["waits"] == ["503 rejected-shutting-down"]
    world.ask("late", group=a)
    assert world.fates["late"] == ["503 rejected-shutting-down"]
    world.ask("free", group=b)
    assert world.fates["free"] == ["let go"]
    assert [outcome[2] for outcome in world.outcomes] == ["Dispatched", "EvictedOther", "RejectedOther", "Dispatched"]
    assert world.again == {"waits": "1", "late": "1"}


def test_without_flow_control_all_go() -> None:
    world = World()
    for name in ("first", "a", "b"):
        world.ask(name)
    world.flow.close()
    assert world.order == ["first", "a", "b"]
    world.ask("c")
    assert world.order[-1] == "c"


# --- when it looks --------------------------------------------------------------------------------------------------


def test_it_looks_again_when_the_detector_said_and_never_on_a_tick() -> None:
    world = World()
    world.ask("first")
    world.slots.opens_in = 0.25
    world.ask("next")
    asked = world.slots.asked
    world.pass_(0.2)
    assert world.slots.asked == asked
    world.slots.used.clear()
    world.slots.opens_in = inf
    world.pass_(0.1)
    assert world.order == ["first", "next"]
    asked = world.slots.asked
    world.pass_(1000.0)
    assert world.slots.asked == asked


def test_many_that_wait_cost_one_look_for_each_that_comes() -> None:
    world = World(band_requests=inf)
    for number in range(20_000):
        world.ask(str(number), priority=number % 3, flow=str(number % 50))
    assert world.slots.asked <= 20_000 + 1
    asked = world.slots.asked
    world.pass_(10.0)
    assert world.slots.asked == asked, "nothing happens, so nothing is looked at"
    assert len(world.timers) <= 1
    world.end("0")
    world.pass_()
    assert world.slots.asked <= asked + 2


class Counted(RoundRobin):
    """How many flows it named."""

    named = 0

    def turns(self, band: FlowBand) -> Iterable[Flow]:
        for flow in super().turns(band):
            self.named += 1
            yield flow


class CountedRoom(RoundRobinWithRoom, Counted):
    """The same, with room."""


def test_flows_that_cannot_go_are_not_looked_at_one_by_one() -> None:
    policy = Counted()
    world = World(size=9999, fairness=policy, band_requests=inf)
    world.slots.adapters[PODS[0]] = ["F"]
    for number in range(1000):
        world.ask(str(number), flow=str(number), model=f"A{number % 8}")
    policy.named = 0
    world.ask("base", flow="x")
    assert world.order == ["base"]
    assert policy.named <= 2 * 9, "one for each adapter, at each of two looks"


def test_flows_that_leave_room_are_not_looked_at_one_by_one() -> None:
    policy = CountedRoom()
    world = World(size=1000, fairness=policy, band_requests=inf)
    policy.clock = lambda: world.now
    world.ask("quiet", flow="quiet")
    for number in range(3000):
        world.ask(str(number), flow=str(number % 200))
    policy.named = 0
    asked, gone = world.slots.asked, len(world.order)
    world.end("quiet")
    world.pass_()
    assert len(world.order) == gone
    assert policy.named <= 20
    assert world.slots.asked <= asked + 20
    world.ask("quiet again", flow="quiet")
    assert world.order[-1] == "quiet again"


@pytest.mark.parametrize("strategy", ["las", "turn-priority"])
def test_programs_that_wait_are_not_scored_one_by_one(strategy: Literal["las", "turn-priority"]) -> None:
    scored = 0

    class Scored(ProgramAware):
        def _score(self, served: Flow, waits: Flow, most: float) -> float:
            nonlocal scored
            scored += 1
            return super()._score(served, waits, most)

        def _turn(self, flow: Flow) -> float:
            nonlocal scored
            scored += 1
            return super()._turn(flow)

    policy = Scored(strategy)
    world = World(size=1000, fairness=policy, band_requests=inf)
    policy.clock = lambda: world.now
    for number in range(2000):
        world.ask(str(number), flow=str(number % 1000), tokens=number * 7 % 1000)
    for number in range(3):
        scored = 0
        world.end(str(number))
        world.pass_(4.0)
        assert len(world.order) == 1001 + number
        assert scored <= 40
    scored = 0
    world.ask("new", flow="new")
    assert scored <= 20


def test_plugins_that_fail_hold_nobody_up() -> None:
    class Fails(Slots, UsageLimitPolicy):
        name = "fails"

        def saturation(self, endpoints: Sequence[Endpoint]) -> float:
            raise RuntimeError("no")

        def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
            return []

    world = World()
    fails = Fails(1)
    world.flow.configure(make(fails, usage=fails))
    world.ask("a")
    world.ask("b")
    assert world.order == ["a", "b"]
    assert set(world.failed) == {"fails: no", "fails: 0 ceilings for 1 priorities"}


# --- on a loop ------------------------------------------------------------------------------------------------------


class Chooser:
    """A scheduler of which nothing is wanted but to be called."""

    def __init__(self, slots: Slots) -> None:
        self.slots = slots
        self.finishes: list[Endpoint] = []
        self.error: EppError | None = None

    def look(self, request: Request, endpoints: Sequence[Endpoint], kinds: Any) -> Request:
        return request

    def stages(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
        return [endpoints]

    def choose(self, request: Request, endpoints: Sequence[Endpoint]) -> Endpoint:
        if self.error is not None:
            raise self.error
        self.slots.used[endpoints[0]] = self.slots.used.get(endpoints[0], 0) + 1
        return endpoints[0]

    def finished(self, decision: Endpoint, response: Response) -> None:
        self.finishes.append(decision)
        self.slots.used[decision] -= 1


async def test_a_turn_gives_the_decision_and_how_long_it_took() -> None:
    world, queued = World(), []
    chooser = Chooser(world.slots)

    async def turn(name: str) -> tuple[Endpoint, Queued]:
        return await world.flow.turn(Request(id=name, model="m"), None, chooser, lambda: queued.append(name))

    assert await turn("a") == (PODS[0], Queued("default-flow", 0, 0.0))
    waits = asyncio.ensure_future(turn("b"))
    await asyncio.sleep(0)
    assert queued == ["b"]
    world.slots.used.clear()
    world.flow.changed()
    world.pass_(2.0)
    assert await waits == (PODS[0], Queued("default-flow", 0, 2.0))

    gone = asyncio.ensure_future(turn("c"))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    assert world.waiting == 0

    late = asyncio.ensure_future(turn("d"))
    await asyncio.sleep(0)
    world.slots.used.clear()
    world.flow.changed()
    world.pass_()  # it is let go, and its client leaves before it hears of that
    late.cancel()
    with pytest.raises(asyncio.CancelledError):
        await late
    assert chooser.finishes == [PODS[0]]
    assert world.slots.used[PODS[0]] == 0


async def test_the_stages_of_who_goes_at_once_are_found_once() -> None:
    world, asked = World(), []

    class Counting(Chooser):
        def stages(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
            asked.append(request.id)
            return super().stages(request, endpoints)

    await world.flow.turn(Request(id="a", model="m"), None, Counting(world.slots), lambda: None)
    assert asked == ["a"]


async def test_errors_of_choosing_are_the_requests_own() -> None:
    world = World()
    chooser = Chooser(world.slots)
    chooser.error = NoEndpoint("a filter left none")
    with pytest.raises(NoEndpoint, match="a filter"):
        await world.flow.turn(Request(id="a", model="m"), None, chooser, lambda: None)
    world.slots.used[PODS[0]] = 1
    waits = asyncio.ensure_future(world.flow.turn(Request(id="b", model="m"), None, chooser, lambda: None))
    await asyncio.sleep(0)
    world.slots.used.clear()
    world.flow.changed()
    world.pass_()
    with pytest.raises(NoEndpoint, match="a filter"):
        await waits
    world.slots.used[PODS[0]] = 1
    world.flow.configure(make(world.slots, max_requests=0))
    with pytest.raises(Rejected, match="0 requests wait already") as full:
        await world.flow.turn(Request(id="c", model="m", priority=-1), None, chooser, lambda: None)
    assert full.value.queued == Queued("default-flow", -1, 0.0)


async def test_an_error_says_how_long_it_was_waited_for() -> None:
    world = World(ttl=3.0)
    chooser = Chooser(world.slots)
    world.slots.used[PODS[0]] = 1
    asked = annotated(Request(id="a", model="m", priority=2), tenant="team")
    waits = asyncio.ensure_future(world.flow.turn(asked, None, chooser, lambda: None))
    await asyncio.sleep(0)
    world.pass_(3.0)
    with pytest.raises(Rejected) as late:
        await waits
    assert late.value.queued == Queued("team", 2, 3.0)


async def test_of_a_request_nothing_waits_for_a_collector_of_cycles() -> None:
    """However it ends: what is called back holds the request, and an error its frames."""
    world = World(ttl=3.0)
    chooser = Chooser(world.slots)

    async def ends() -> None:
        world.slots.used.clear()
        asked = [Request(id=name, model="m") for name in "abcd"]
        turns = [asyncio.ensure_future(world.flow.turn(each, None, chooser, lambda: None)) for each in asked]
        await asyncio.sleep(0)
        assert [turn.done() for turn in turns] == [True, False, False, False]
        turns[1].cancel()
        await asyncio.sleep(0)
        world.slots.used.clear()
        world.flow.changed()
        world.pass_(1.0)
        await asyncio.sleep(0)
        world.pass_(3.0)
        became = await asyncio.gather(*turns, return_exceptions=True)
        assert [type(each) for each in became] == [tuple, asyncio.CancelledError, tuple, Rejected]

    await ends()
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        await ends()
        gc.collect()
        assert [each for each in gc.garbage if isinstance(each, Entry | Request)] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# --- any history ----------------------------------------------------------------------------------------------------

PREFILLER = Endpoint("default/p", "10.0.0.9:8000", {protocol.ROLE_LABEL: "prefill"})
FAIRNESS: Sequence[Callable[[], FairnessPolicy]] = (
    RoundRobin,
    GlobalStrict,
    lambda: RoundRobinWithRoom(room=0.5, seconds=15.0),
    lambda: ProgramAware(service_half_life_seconds=7.0, eviction_ttl_seconds=18.0),
    lambda: ProgramAware(weight_service_head_wait=0.0),
    lambda: ProgramAware(weight_service=0.0),
    lambda: ProgramAware(strategy="turn-priority"),
)
ORDERING = (FirstComeFirstServed, EarliestDeadlineFirst, SloDeadline)
STEP = st.one_of(
    st.tuples(
        st.just("ask"), st.integers(-1, 1), st.sampled_from("uvwxyz"), st.sampled_from([None, "a", "b", "X", "Y", "p"])
    ),
    st.tuples(st.just("end"), st.integers(0, 9), st.just(""), st.none()),
    st.tuples(st.just("leave"), st.integers(0, 9), st.just(""), st.none()),
    st.tuples(st.just("pass"), st.integers(0, 9), st.just(""), st.none()),
    st.tuples(st.just("pods"), st.integers(0, 2), st.sampled_from(["", "prefiller"]), st.none()),
    st.tuples(st.just("reload"), st.integers(1, 9), st.just(""), st.none()),
)


class Plain(FlowControl):
    """Who is next, found by looking at each flow in its turn, and each policy's turns by sorting all flows."""

    def _next(self) -> Entry | None:
        bands = self._queues.bands(self.clock())
        now, self._owed_until, blocked = self.clock(), inf, set[Need]()
        for at, band in enumerate(bands):
            for flow in plain_turns(band, now):
                share = band.settings.fairness.share(band) if len(flow) > 1 else 1.0
                held = set[Need]()
                while (entry := flow.first(blocked | held)) is not None:
                    found = [(*each, self._ceilings(each[1], bands)[at]) for each in self._saturations(entry)]
                    missed = next((each for each in found if each[1] >= each[2] * share), None)
                    if missed is None:
                        return entry
                    need, saturation, ceiling = missed
                    if saturation < ceiling:
                        held.add(need)
                    else:
                        blocked |= {need, need._replace(name="")} if need.name and self._is_owed(entry, now) else {need}
        return None


def plain_turns(band: Band, now: float) -> Sequence[QueuedFlow]:
    """A band's flows as its policy's turns are said to be."""
    policy, flows = band.settings.fairness, sorted(band.flows.values(), key=lambda flow: flow.turn)
    if isinstance(policy, GlobalStrict):
        return sorted(flows, key=lambda flow: flow.head.place)
    if not isinstance(policy, ProgramAware):
        return flows
    policy._forget(now)
    waited = {flow: now - flow.head.since for flow in flows}
    if policy.strategy == "turn-priority":
        turns = {flow: policy._attained.get(flow.id, (0.0, now, 0))[2] for flow in flows}
        return sorted(flows, key=lambda flow: -(turns[flow] + 0.5 * waited[flow]))
    got = {flow: policy._service(flow.id, now) for flow in flows}
    most = max(got.values(), default=0.0) or 1.0
    weights = policy.weight_service, policy.weight_service_head_wait
    return sorted(flows, key=lambda flow: weights[0] * got[flow] / most - weights[1] * min(1.0, waited[flow] / 5.0))


class History:
    """A world in which things happen, with policies of its own."""

    def __init__(self, control: type[FlowControl], size: int, policies: tuple[int, int]) -> None:
        self.policies = policies
        self.world = World(size=size, pods=2, control=control)
        self.entries: dict[str, Entry] = {}
        self.left: set[str] = set()
        self.reload(12)

    def reload(self, requests: int) -> None:
        self.fairness = FAIRNESS[self.policies[0]]()
        self.fairness.clock = lambda: self.world.now
        ordering = ORDERING[self.policies[1]]()
        self.world.flow.configure(
            make(
                self.world.slots,
                fairness=self.fairness,
                ordering=ordering,
                band_requests=requests,
                ttl=20.0,
                no_endpoint_ttl=30.0,
            )
        )

    def step(self, name: str, what: str, n: int, flow: str, group: str | None) -> None:
        world = self.world
        if what == "ask":
            model = group if group in ("X", "Y", "p") else "m"
            subset = {"a": (PODS[0].address,), "b": (PODS[1].address,)}.get(group or "")
            slo = Slo({"u": 1.0, "v": 9.0}.get(flow), None)
            tokens = 1 + int(name) * 7919 % 997
            self.entries[name] = world.ask(name, n, flow, group=subset, model=model, slo=slo, tokens=tokens)
        elif what == "end" and world.where:
            ended = [*world.where][n % len(world.where)]
            usage = Usage(prompt=1, completion=1 + int(ended) * 31 % 89)
            request = self.entries[ended].request
            self.fairness.on_finished(request, world.where[ended], Response(usage=usage))
            world.end(ended)
        elif what == "leave" and self.entries:
            ended = [*self.entries][n % len(self.entries)]
            if not world.fates[ended]:
                self.left.add(ended)
            world.flow.leave(self.entries[ended])
        elif what == "pods":
            world.pods = (*PODS[:n], *([PREFILLER] if flow else []))
            world.flow.endpoints_changed()
        elif what == "reload":
            self.reload(n)
        world.pass_(float(n) if what == "pass" else 0.0)

    @property
    def waiting(self) -> list[str]:
        return [name for name, fates in self.world.fates.items() if not fates and name not in self.left]


@given(
    st.lists(STEP, max_size=60),
    st.integers(1, 3),
    st.tuples(st.integers(0, len(FAIRNESS) - 1), st.integers(0, len(ORDERING) - 1)),
)
def test_any_history_loses_nobody_and_leaves_nobody_behind(
    steps: list[Any], size: int, policies: tuple[int, int]
) -> None:
    history, plain = History(FlowControl, size, policies), History(Plain, size, policies)
    world, entries = history.world, history.entries
    with_room = isinstance(history.fairness, RoundRobinWithRoom)
    for number, step in enumerate(steps):
        gone = len(world.order)
        history.step(str(number), *step)
        plain.step(str(number), *step)
        assert world.order == plain.world.order
        assert world.fates == plain.world.fates
        waiting = history.waiting
        assert world.waiting == len(waiting)
        assert all(len(fates) <= 1 for fates in world.fates.values())
        assert sum(1 for row in world.outcomes) == len(entries) - len(waiting)
        assert all(used <= size for used in world.slots.used.values())
        flows: dict[object, list[int]] = {}
        for name in world.order:
            said = steps[int(name)]
            flows.setdefault(said[1:], []).append(int(name))
        assert all(went == sorted(went) for went in flows.values()), "in the order in which they came"
        floods = Counter(steps[int(name)][1:3] for name in waiting)
        for name in waiting:
            _, priority, flow, group = steps[int(name)]
            if with_room and floods[priority, flow] > 1:
                continue  # what there is room for may be others'
            assert not [
                other
                for other in world.order[gone:]
                if steps[int(other)][3] == group and steps[int(other)][1] < priority
            ], "none of lower priority that needs the same goes before it"
            assert not world.could_go(entries[name]) or (
                world.models[name].isupper()
                and any(world.models[other].isupper() and world.now - entries[other].since >= 5.0 for other in waiting)
            ), "nobody is left behind who could go"
    world.pass_(100.0)
    assert world.waiting == 0, "nobody waits for ever"
    assert not world.failed


HAPPENINGS = ("comes", "comes", "is served", "is answered", "leaves")


@given(st.integers(0), st.sampled_from(FAIRNESS))
def test_the_orders_that_a_band_keeps_are_those_of_sorting_its_flows(
    seed: int, fairness: Callable[[], FairnessPolicy]
) -> None:
    """Steps are drawn by a seed: lists of Hypothesis' own seldom have several flows wait with several requests each."""
    policy, now, served = fairness(), 0.0, list[Entry]()
    policy.clock = lambda: now
    queues = Queues(make(Slots(1), fairness=policy))
    band = queues.band(0, now)
    random = Random(seed)
    pauses = random.choice(((0.0, 0.25), (0.0, 0.0, 0.25, 1.0, 3.0, 12.0)))
    for _ in range(100):
        what, number, tokens = random.choice(HAPPENINGS), random.randrange(8), random.randint(1, 999)
        now += random.choice(pauses)
        program = str(number)
        flow = band.flows.get(program)
        if what == "comes":
            request = Request(id="r", model="m", tokens=tokens)
            entry = Entry(request, None, 1, ANY, ANY, ANY, ANY)
            entry.since = now
            queues.add(entry, program, now)
        elif what == "is served" and flow is not None:
            served.append(flow.head)
            queues.remove(flow.head, served=True)
            policy.dispatched(program, served[-1], now)
        elif what == "is answered" and served:
            request = served.pop(number % len(served)).request
            policy.on_finished(request, PODS[0], Response(usage=Usage(prompt=1, completion=tokens)))
        elif what == "leaves" and flow is not None:
            queues.remove([*flow][tokens % len(flow)])
        names = [flow.id for flow in policy.turns(band)]
        assert names == [flow.id for flow in plain_turns(band, now)]
