"""Whose turn it is, of those that wait in flow control: llm-d's policies under its names.

Sources: GIE v1.5 pkg/epp/flowcontrol, llm-d-router v0.10 (fairness, ordering and usage limits; their READMEs).
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush, merge
from math import exp, expm1, inf, log2, sqrt
from typing import Final, Literal
from weakref import WeakSet

from epp.plugin import (
    BandSelectionPolicy,
    Endpoint,
    FairnessPolicy,
    Flow,
    FlowBand,
    OrderingPolicy,
    Request,
    Response,
    Services,
    Slot,
    UsageLimitPolicy,
    Waiting,
    stages_of,
)

_OUTPUT: Final = 2.0
"""What a generated token counts as, in prompt tokens."""
_PROGRAMS: Final = 10_000
"""Programs whose service is remembered; of more, the one that was served longest ago is forgotten."""
_LEAST: Final = 0.5
"""Ceiling of the lowest priority where most is held back: with it chats beside batches have a TTFT (p95) of 1.4 times
what they have alone, and the batches lose 2 % of their throughput (docs/flow-control.md)."""
_LIKELY: Final = 1.645
"""Standard deviations above the mean that are exceeded 5 times of 100."""
_RECENT: Final = 60.0
"""Seconds over which it is remembered how many came."""
_WEIGHT: Final = 0.02
"""Of one more first token in the mean seconds until it: the last fifty or so count."""
_PATIENT: Final = 5.0
"""Seconds: a head that has waited so long counts as if its program had got nothing."""


# --- order in a flow ------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class FirstComeFirstServed(OrderingPolicy):
    """`fcfs-ordering-policy`: in the order in which they came."""

    def place(self, waiting: Waiting) -> float:
        return 0.0


@dataclass(eq=False)
class EarliestDeadlineFirst(OrderingPolicy):
    """`edf-ordering-policy`: who would be refused first for having waited too long; those who never would come last."""

    def place(self, waiting: Waiting) -> float:
        return waiting.expires


@dataclass(eq=False)
class SloDeadline(OrderingPolicy):
    """`slo-deadline-ordering-policy`: by when the first token is wanted, as a header or the objective says; without
    comes last.
    """

    def place(self, waiting: Waiting) -> float:
        slo = waiting.request.slo
        return inf if slo is None or slo.ttft is None else waiting.since + slo.ttft


# --- fairness between flows -----------------------------------------------------------------------------------------


@dataclass(eq=False)
class GlobalStrict(FairnessPolicy):
    """`global-strict-fairness-policy`: all flows are one: the head with the first place, whoever it belongs to."""

    def turns(self, band: FlowBand) -> Iterable[Flow]:
        return band.by_head


@dataclass(eq=False)
class RoundRobin(FairnessPolicy):
    """`round-robin-fairness-policy`: one of each flow in turn."""

    def turns(self, band: FlowBand) -> Iterable[Flow]:
        return band.in_turn


@dataclass(eq=False)
class RoundRobinWithRoom(RoundRobin):
    """`round-robin-with-room-fairness-policy`: the same, and who floods leaves room to who does not: a flow of which
    several requests wait is let go up to a share, `room` (0.6), of what its priority is, while another of its priority
    was served in the last `seconds` (60) and has one waiting or none.
    """

    room: float = 0.6
    seconds: float = 60.0
    _served: dict[int, OrderedDict[str, float]] = field(default_factory=dict, init=False, repr=False)
    """Priority -> flow -> when it was served last; the one that was served longest ago first."""

    def __post_init__(self) -> None:
        if not 0.0 < self.room <= 1.0:
            raise ValueError(f"room: expected more than 0, up to 1, got {self.room:g}")
        if self.seconds <= 0.0:
            raise ValueError(f"seconds: expected more than 0, got {self.seconds:g}")

    def dispatched(self, flow: str, waiting: Waiting, now: float) -> None:
        served = self._served.setdefault(waiting.request.priority, OrderedDict())
        served[flow] = now
        served.move_to_end(flow)
        if len(served) > _PROGRAMS:
            served.popitem(last=False)

    def share(self, band: FlowBand) -> float:
        served = self._served.get(band.priority)
        if served is None or not band.several:
            return 1.0
        now = self.clock()
        while served and now - next(iter(served.values())) > self.seconds:
            served.popitem(last=False)
        return self.room if len(served) > band.several else 1.0


@dataclass(eq=False)
class ProgramAware(FairnessPolicy):
    """`program-aware-fairness`: whose program (fairness id) got least, of prompt tokens and twice its generated ones.

    `strategy`: `las`, least attained service; `rr`: as `round-robin-fairness-policy`; `turn-priority`: who is in its
    latest turn, half a turn more for each second its head has waited. With `las` service counts half after
    `service_half_life_seconds` (60); a program's score is its share of what the one served most got, times
    `weight_service` (0.8), less the seconds its head has waited in fives, times `weight_service_head_wait` (0.2); the
    least is next. `eviction_ttl_seconds` (3600): a program not served for so long is forgotten;
    `eviction_sweep_seconds` is taken for llm-d's files, that is exact here. Source: llm-d-router v0.10.
    """

    strategy: Literal["las", "rr", "turn-priority"] = "las"
    weight_service: float = 0.8
    weight_service_head_wait: float = 0.2
    service_half_life_seconds: float = 60.0
    eviction_ttl_seconds: float = 3600.0
    eviction_sweep_seconds: float = 300.0
    _attained: OrderedDict[str, tuple[float, float, int]] = field(default_factory=OrderedDict, init=False, repr=False)
    """Program -> (tokens, as they counted at the time, turns); who was served longest ago first."""
    _program: Slot[str] = field(default_factory=Slot, init=False, repr=False)
    _bands: WeakSet[FlowBand] = field(default_factory=WeakSet, init=False, repr=False)
    """Those that keep orders by what programs got."""
    _now: float = field(default=0.0, init=False, repr=False)
    """When bands were looked at last."""

    def __post_init__(self) -> None:
        for name in ("service_half_life_seconds", "eviction_ttl_seconds"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name}: expected more than 0, got {value:g}")
        for name in ("weight_service", "weight_service_head_wait", "eviction_sweep_seconds"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}: expected 0 or more, got {value:g}")

    def turns(self, band: FlowBand) -> Iterable[Flow]:
        if self.strategy == "rr":
            return band.in_turn
        self._now = now = self.clock()
        self._forget(now)
        self._bands.add(band)
        if self.strategy == "turn-priority":
            return band.by(self._turn)
        return self._by_score(band)

    def dispatched(self, flow: str, waiting: Waiting, now: float) -> None:
        self._program.set(waiting.request, flow)
        self._serve(flow, waiting.request.tokens, now, turns=1)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if (program := self._program.get(request)) is not None and response.usage is not None:
            self._serve(program, _OUTPUT * max(0, response.usage.completion), self.clock())

    def statistics(self) -> Mapping[str, float]:
        """`programs` that are remembered, and Jain's index of how even their service is: 1 is even."""
        now = self.clock()
        got = [self._service(program, now) for program in self._attained]
        squares = sum(tokens * tokens for tokens in got)
        return {
            "programs": len(got),
            "jains_fairness_index": sum(got) ** 2 / (len(got) * squares) if squares else 1.0,
        }

    def _service(self, program: str, now: float) -> float:
        tokens, at, _ = self._attained.get(program, (0.0, now, 0))
        return float(tokens * 0.5 ** ((now - at) / self.service_half_life_seconds))

    # With `las` a score changes as time passes, but two do not change places while both heads have waited `_PATIENT`
    # seconds: service fades alike, and their wait counts the same. Nor do two that got nothing. Both kinds are kept in
    # an order each. Of the others those with least service and those that have waited longest are listed side by side,
    # until none that was not listed can have a lower score: about the root of their number.

    def _by_score(self, band: FlowBand) -> Iterator[Flow]:
        for key in (self._new_by_wait, self._unserved_by_wait):
            while (soonest := band.first(key)) is not None and self._waited(soonest) == 1.0:
                band.again(soonest.id)
        ends = (band.last(self._old_by_service), band.last(self._new_by_service))
        most = max((self._service(flow.id, self._now) for flow in ends if flow is not None), default=0.0) or 1.0
        kept = (
            ((self._score(flow, flow, most), flow.turn, flow) for flow in flows)
            for flows in (band.by(self._old_by_service), band.by(self._unserved_by_wait))
        )
        new = self._new_by_score(band.by(self._new_by_service), band.by(self._new_by_wait), most)
        return (flow for _, _, flow in merge(*kept, new))

    def _new_by_score(
        self, by_service: Iterable[Flow], by_wait: Iterable[Flow], most: float
    ) -> Iterator[tuple[float, int, Flow]]:
        found: list[tuple[float, int, Flow]] = []
        listed = set[str]()
        for least, longest in zip(by_service, by_wait, strict=False):
            for flow in (least, longest):
                if flow.id not in listed:
                    listed.add(flow.id)
                    heappush(found, (self._score(flow, flow, most), flow.turn, flow))
            bound = self._score(least, longest, most)
            while found and (found[0][0] < bound or found[0][2] is least is longest):
                yield heappop(found)
        while found:
            yield heappop(found)

    def _score(self, served: Flow, waits: Flow, most: float) -> float:
        """With the service of one and the wait of another, which may be the same."""
        service = self.weight_service * self._service(served.id, self._now) / most
        return service - self.weight_service_head_wait * self._waited(waits)

    def _waited(self, flow: Flow) -> float:
        return min(1.0, (self._now - flow.head.since) / _PATIENT)

    def _old_by_service(self, flow: Flow) -> float | None:
        return self._got(flow) if self._waited(flow) == 1.0 else None

    def _unserved_by_wait(self, flow: Flow) -> float | None:
        return self._came(flow) if self._waited(flow) < 1.0 and self._got(flow) == -inf else None

    def _new_by_service(self, flow: Flow) -> tuple[float, float] | None:
        got = self._got(flow)
        return (got, self._came(flow)) if self._waited(flow) < 1.0 and got > -inf else None

    def _new_by_wait(self, flow: Flow) -> tuple[float, float] | None:
        got = self._got(flow)
        return (self._came(flow), got) if self._waited(flow) < 1.0 and got > -inf else None

    def _got(self, flow: Flow) -> float:
        """Its service such that it does not change as it fades: in half-lives; what does not count is equal."""
        tokens, at, _ = self._attained.get(flow.id, (0.0, 0.0, 0))
        return log2(tokens) + at / self.service_half_life_seconds if tokens > 0.0 and self.weight_service else -inf

    def _came(self, flow: Flow) -> float:
        return flow.head.since if self.weight_service_head_wait else 0.0

    def _turn(self, flow: Flow) -> float:
        """As all wait equally long from one look to the next, it counts from when they came."""
        return 0.5 * flow.head.since - self._attained.get(flow.id, (0.0, 0.0, 0))[2]

    def _serve(self, program: str, tokens: float, now: float, turns: int = 0) -> None:
        count = self._attained.get(program, (0.0, now, 0))[2] + turns
        self._attained[program] = (self._service(program, now) + tokens, now, count)
        self._attained.move_to_end(program)
        self._say_changed(program)
        if len(self._attained) > _PROGRAMS:
            self._say_changed(self._attained.popitem(last=False)[0])

    def _forget(self, now: float) -> None:
        while self._attained:
            program, (_, at, _) = next(iter(self._attained.items()))
            if now - at < self.eviction_ttl_seconds:
                return
            del self._attained[program]
            self._say_changed(program)

    def _say_changed(self, program: str) -> None:
        for band in self._bands:
            band.again(program)


# --- which band is asked first --------------------------------------------------------------------------------------


@dataclass(eq=False)
class StrictBands(BandSelectionPolicy):
    """`strict-band-selection-policy`: the highest priority always, as without a policy. Source: llm-d-router #2920."""

    def turns(self, priorities: Sequence[int]) -> Sequence[int]:
        return priorities


# --- how far each band may fill the pool ----------------------------------------------------------------------------


@dataclass(eq=False)
class StaticLimit(UsageLimitPolicy):
    """`static-usage-limit-policy`: the same `threshold` (1.0) for all priorities."""

    threshold: float = 1.0

    def __post_init__(self) -> None:
        if not 0.0 < self.threshold <= 1.0:
            raise ValueError(f"threshold: expected more than 0, up to 1, got {self.threshold:g}")

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        return [self.threshold] * len(priorities)


class _Use:
    """What requests of one priority lately made of the pool."""

    __slots__ = ("_at", "_count", "_first_at", "_seen", "seconds")

    def __init__(self, now: float) -> None:
        self._first_at = self._at = now
        self._count = 0.0
        """Those of the last minute, the latest counting most."""
        self._seen = 0
        self.seconds = inf
        """From the pick to the first token, a mean of those that were seen; inf: none was."""

    def picked(self, now: float) -> None:
        self._count = self._faded(now) + 1
        self._at = now

    def served(self, seconds: float) -> None:
        self._seen += 1
        mean = self.seconds if self._seen > 1 else seconds
        self.seconds = mean + max(_WEIGHT, 1 / self._seen) * (seconds - mean)

    def busy(self, now: float) -> float:
        """Endpoints that compute a prompt of these at a time, in the mean: by Little's law."""
        span = _RECENT * -expm1((self._first_at - now) / _RECENT)
        return self._faded(now) / span * self.seconds if span > 0 and self.seconds < inf else inf

    def _faded(self, now: float) -> float:
        return self._count * exp((self._at - now) / _RECENT)


@dataclass(eq=False)
class PriorityHoldback(UsageLimitPolicy):
    """`priority-holdback-policy`: the highest priority up to `max_ceiling` (1.0), the lowest up to `min_ceiling`, those
    between in even steps (`domain: rank`) or as their numbers lie (`value`). `shape`: linear.

    `min_ceiling` has no default in llm-d. Without one, each priority leaves as many endpoints as those above it are
    likely to need at once, but no more than with 0.5: where b prompts of those above are computed at a time in the
    mean, 1 + b + 1.645 * sqrt(b) endpoints. As arrivals are random, no more are busy with these 95 times of 100, and
    one is free for who comes next. Where first tokens of those above are not seen, it is 0.5.
    """

    min_ceiling: float | None = None
    max_ceiling: float = 1.0
    shape: Literal["linear"] = "linear"
    domain: Literal["rank", "value"] = "rank"
    _used: dict[int, _Use] = field(default_factory=dict, init=False, repr=False)
    """By priority."""
    _picked: Slot[float] = field(default_factory=Slot, init=False, repr=False)
    _endpoints: Callable[[], Sequence[Endpoint]] = field(default=tuple, init=False, repr=False)
    _pool: tuple[Sequence[Endpoint], int] = field(default=((), 0), init=False, repr=False)
    """Endpoints, and how many can compute a prompt, or decode, if that is less."""

    def __post_init__(self) -> None:
        if self.min_ceiling is None:
            if not _LEAST <= self.max_ceiling <= 1.0:
                raise ValueError(f"maxCeiling: expected {_LEAST} up to 1, got {self.max_ceiling:g}")
            return
        if not 0.0 <= self.min_ceiling < 1.0:
            raise ValueError(f"minCeiling: expected 0 or more, less than 1, got {self.min_ceiling:g}")
        if not self.min_ceiling <= self.max_ceiling <= 1.0 or not self.max_ceiling:
            raise ValueError(f"maxCeiling: expected more than 0, minCeiling up to 1, got {self.max_ceiling:g}")

    def start(self, services: Services) -> None:
        self._endpoints = services.endpoints

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        if len(priorities) < 2:
            return [self.max_ceiling] * len(priorities)
        low = _LEAST if self.min_ceiling is None else self.min_ceiling
        span = self.max_ceiling - low
        if self.domain == "rank":
            found = [self.max_ceiling - span * i / (len(priorities) - 1) for i in range(len(priorities))]
        else:
            least = priorities[-1]
            found = [low + span * (priority - least) / (priorities[0] - least) for priority in priorities]
        return found if self.min_ceiling is not None else self._raised(found, priorities)

    def _raised(self, found: Sequence[float], priorities: Sequence[int]) -> Sequence[float]:
        """To what leaves free what those above need."""
        now, busy, count, raised = self.clock(), 0.0, self._count(), [self.max_ceiling]
        if len(self._used) > len(priorities):
            self._used = {priority: self._used[priority] for priority in priorities if priority in self._used}
        for ceiling, above in zip(found[1:], priorities, strict=False):
            if (use := self._used.get(above)) is not None:
                busy += use.busy(now)
            free = 1 + busy + _LIKELY * sqrt(busy)
            raised.append(max(ceiling, self.max_ceiling * (1 - free / count)) if count else ceiling)
        return raised

    def _count(self) -> int:
        endpoints = self._endpoints()
        if endpoints is not self._pool[0]:
            self._pool = endpoints, min(map(len, stages_of(endpoints)), default=0)
        return self._pool[1]

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if self.min_ceiling is not None or request.stage == "decode":
            return
        now = self.clock()
        if (use := self._used.get(request.priority)) is None:
            use = self._used[request.priority] = _Use(now)
        use.picked(now)
        if request.sees_answer and request.stream:
            self._picked.set(request, now)

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        at, use = self._picked.get(request), self._used.get(request.priority)
        if at is not None and use is not None:
            use.served(self.clock() - at)


@dataclass(eq=False)
class SoftReflectiveCeiling(UsageLimitPolicy):
    """`soft-reflective-ceiling-policy`: band i of N up to 1 - i * saturation / (N - 1); beyond, it is let go once in
    saturation / (1 - saturation) looks at the queues.
    """

    _looks: int = field(default=0, init=False, repr=False)

    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        self._looks += 1
        steps = max(1, len(priorities) - 1)
        open_ = saturation < 1.0 and self._looks % max(1, round(saturation / (1.0 - saturation))) == 0
        return [
            1.0 if i == 0 or open_ or saturation < 1.0 - i * saturation / steps else 0.0 for i in range(len(priorities))
        ]
