"""Requests that wait, in order: bands by priority, flows by fairness id, places in a flow. No clock, no I/O."""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from heapq import heapify, heappop, heapreplace
from itertools import chain
from math import inf
from typing import Any, Final, Literal, NamedTuple, cast

from msgspec.structs import replace
from sortedcontainers import SortedDict, SortedKeyList, SortedList

from epp.errors import EppError
from epp.parsing.request import at_rest, whole
from epp.plugin import (
    BandSelectionPolicy,
    Detector,
    Endpoint,
    FairnessPolicy,
    Flow,
    FlowKey,
    OrderingPolicy,
    Request,
    UsageLimitPolicy,
)

Group = tuple[str, ...] | None
"""A gateway's subset; None: the whole pool. Requests of one group may go to the same endpoints."""


class Need(NamedTuple):
    """What a request waits for: of those that need the same, the first holds back the others while it is not there."""

    group: Group
    kind: Literal["", "prefill", "scarce"] = ""
    """"": an endpoint that decodes; "prefill": one beside it that prefills; "scarce": what `Detector.scarce` names."""
    name: str = ""
    """Of what is scarce; "": any of it."""


Needs = tuple[Need, ...]
"""Of one request, from what all need to what few do."""
BAND_REQUESTS: Final = 5000
BAND_BYTES: Final = 1_000_000_000
TTL: Final = 60.0
"""Seconds. This and the two above are the defaults of llm-d-router v0.10."""
_SEVERAL: Final = 2
_LANES: Final = 64
"""Different needs that wait in lines of their own; those of more scarce things are one line."""
_OTHERS: Final = "*"


@dataclass(frozen=True)
class BandSettings:
    """One priority's limits and order. `ttl`: seconds a request may wait while there are endpoints; None: as usual."""

    fairness: FairnessPolicy
    ordering: OrderingPolicy
    max_requests: float = BAND_REQUESTS
    max_bytes: float = BAND_BYTES
    ttl: float | None = None


@dataclass(frozen=True)
class FlowSettings:
    """What one configuration says of flow control. Times in seconds, inf: for ever; limits of all bands together."""

    detector: Detector
    usage: UsageLimitPolicy
    usual: BandSettings
    negative: BandSettings
    """Of priorities below 0 that are not in `bands`; `usual` is for all others."""
    bands: dict[int, BandSettings] = field(default_factory=dict)
    max_requests: float = inf
    max_bytes: float = inf
    ttl: float = TTL
    no_endpoint_ttl: float = TTL
    """The same while there is no endpoint a request may go to."""
    selection: BandSelectionPolicy | None = None
    """Which band is asked first; None: the highest."""

    def band(self, priority: int) -> BandSettings:
        return self.bands.get(priority) or (self.negative if priority < 0 else self.usual)


def _untold(_: object) -> None:
    pass


class Entry:
    """One request that waits (`epp.plugin.Waiting`)."""

    __slots__ = (
        "choose", "expires", "fairness_id", "flow", "group", "look", "look_at", "needs", "no_endpoint_expires",
        "number", "place", "refuse", "request", "since", "size", "stages",
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        group: Group,
        size: int,
        look: Callable[[Request, Sequence[Endpoint], Collection[type[Any]]], Request],
        stages: Callable[[Request, Sequence[Endpoint]], Sequence[Sequence[Endpoint]]],
        choose: Callable[[Sequence[Endpoint]], None],
        refuse: Callable[[EppError], None],
    ) -> None:
        self.request = request
        self.group = group
        self.size = size
        """Bytes of its body."""
        self.needs: Needs = (Need(group),)
        self.look = look
        """The request with its signals of some kinds."""
        self.stages = stages
        """The groups of endpoints of which it needs one each; who decodes comes first."""
        self.choose = choose
        self.refuse = refuse
        self.fairness_id = ""
        self.since = 0.0
        self.number = 0
        """Of those that came: later ones have larger ones."""
        self.expires = self.no_endpoint_expires = inf
        self.look_at = inf
        """When it may have waited too long."""
        self.place: tuple[float, int] = (0.0, 0)
        self.flow: QueuedFlow | None = None
        """None: it does not wait any more."""

    def ended(self) -> None:
        """Nobody is told anything any more."""
        self.choose = self.refuse = _untold

    def ready(self, now: float) -> Request:
        """The request as it is to be chosen for: one with an SLO says how long it has waited."""
        waited, request = now - self.since, self.request
        if not request.prompt:
            request = whole(request)
        return replace(request, waited=waited) if waited and request.slo is not None else request


class _Line:
    """The requests of a flow that need the same, in their places."""

    __slots__ = ("needs", "place", "waiting")

    def __init__(self, needs: Needs) -> None:
        self.needs = needs
        self.waiting: SortedKeyList[Entry, tuple[float, int]] = SortedKeyList(key=_place)
        self.place: tuple[float, int] = (0.0, 0)
        """Its first one's, as its flow has it in order."""


class QueuedFlow:
    """The requests of one fairness id in a band, in their places."""

    __slots__ = ("_by_first", "_lines", "band", "bytes", "id", "models", "requests", "turn")

    def __init__(self, band: "Band", id: str, turn: int) -> None:
        self.band = band
        self.id = id
        self.turn = turn
        self.requests = 0
        self.bytes = 0
        self.models: dict[str, list[int]] = {}
        """Model -> requests for it, and their bytes."""
        self._lines: dict[Needs, _Line] = {}
        self._by_first: SortedKeyList[_Line, tuple[float, int]] = SortedKeyList(key=_place)

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Entry]:
        """Its requests, those with the same needs after each other."""
        return chain.from_iterable(line.waiting for line in self._lines.values())

    @property
    def head(self) -> Entry:
        return self._by_first[0].waiting[0]

    @property
    def floods(self) -> bool:
        """It has several requests."""
        return self.requests >= _SEVERAL

    @property
    def lanes(self) -> "set[_Lane]":
        return {(needs, self.floods) for needs in self._lines}

    def first(self, blocked: AbstractSet[Need]) -> Entry | None:
        """The first that needs nothing of `blocked`."""
        return next((line.waiting[0] for line in self._by_first if blocked.isdisjoint(line.needs)), None)

    def add(self, entry: Entry) -> None:
        line = self._lines.get(entry.needs)
        if line is None:
            line = self._lines[entry.needs] = _Line(entry.needs)
        else:
            self._by_first.remove(line)
        line.waiting.add(entry)
        self._count(line, 1, entry.size, entry.request.model)

    def remove(self, entry: Entry) -> None:
        line = self._lines[entry.needs]
        self._by_first.remove(line)
        line.waiting.remove(entry)
        self._count(line, -1, -entry.size, entry.request.model)

    def _count(self, line: _Line, requests: int, size: int, model: str) -> None:
        self.requests += requests
        self.bytes += size
        if (of_model := self.models.get(model)) is None:
            of_model = self.models[model] = [0, 0]
        of_model[0] += requests
        of_model[1] += size
        if not of_model[0]:
            del self.models[model]
        if line.waiting:
            line.place = line.waiting[0].place
            self._by_first.add(line)
        else:
            del self._lines[line.needs]


def _place(one: Entry | _Line) -> tuple[float, int]:
    return one.place


_Lane = tuple[Needs, bool]
"""What some of a flow's requests need, and whether the flow floods."""
_Place = tuple[Any, int, QueuedFlow]
"""A flow's key, its turn, by which no two are equal, and itself."""
_NO_PLACE: Final = (None, 0, None)


@dataclass(frozen=True)
class Look:
    """What one look at a band has found so far. Both sets grow while its flows are listed."""

    blocked: AbstractSet[Need] = frozenset()
    """Who needs any of these cannot go."""
    held: AbstractSet[Need] = frozenset()
    """Nor who needs any of these, of flows that flood."""

    def may_go(self, lane: _Lane) -> bool:
        needs, floods = lane
        return self.blocked.isdisjoint(needs) and not (floods and not self.held.isdisjoint(needs))


class _Order:
    """A band's flows by a key. They are kept by lane, so that all flows of a lane that cannot go are left out at once:
    a look costs what there are lanes, however many flows wait.
    """

    def __init__(self, key: FlowKey, flows: Iterable[QueuedFlow]) -> None:
        self._key = key
        self._lanes: dict[_Lane, SortedList[_Place]] = {}
        self._placed: dict[QueuedFlow, tuple[_Place, set[_Lane]]] = {}
        self._changed: dict[QueuedFlow, None] = dict.fromkeys(flows)
        """Those whose key is asked for when the order is needed next: keys are a policy's, which may fail, so they are
        asked for where its turns are."""

    def change(self, flow: QueuedFlow) -> None:
        if flow.requests:
            self._changed[flow] = None
        else:  # at once: an order that nobody asks for any more keeps no flow that is gone
            self._changed.pop(flow, None)
            self._put(flow, None)

    def settle(self) -> None:
        """Put all that changed in their places."""
        while self._changed:
            flow = next(iter(self._changed))
            key = self._key(flow)
            self._put(flow, None if key is None else (key, flow.turn, flow))
            del self._changed[flow]

    def _put(self, flow: QueuedFlow, place: _Place | None) -> None:
        lanes = set[_Lane]() if place is None else flow.lanes
        stays = set[_Lane]()
        if (before := self._placed.pop(flow, None)) is not None:
            if before[0] == place:
                stays = lanes & before[1]
            for lane in before[1] - stays:
                self._lanes[lane].remove(before[0])
                if not self._lanes[lane]:
                    del self._lanes[lane]
        if place is not None:
            for lane in lanes - stays:
                self._lanes.setdefault(lane, SortedList()).add(place)
            self._placed[flow] = place, lanes

    def flows(self, look: Look) -> Iterator[QueuedFlow]:
        """Those of lanes that may go, as far as the look knows when the next one is asked for."""
        lanes = [(lane, iter(places)) for lane, places in self._lanes.items() if look.may_go(lane)]
        heap = [(next(places), at) for at, (_, places) in enumerate(lanes)]
        heapify(heap)
        latest: QueuedFlow | None = None
        while heap:
            (_, _, flow), at = heap[0]
            lane, places = lanes[at]
            if not look.may_go(lane):
                heappop(heap)
            elif flow is not latest:  # it is in each of its lanes, at the same place
                latest = flow
                yield flow
            elif (place := next(places, None)) is None:
                heappop(heap)
            else:
                heapreplace(heap, (place, at))

    def first(self) -> QueuedFlow | None:
        return min((places[0] for places in self._lanes.values()), default=_NO_PLACE)[2]

    def last(self) -> QueuedFlow | None:
        return max((places[-1] for places in self._lanes.values()), default=_NO_PLACE)[2]


def _by_turn(flow: Flow) -> float:
    return 0.0


def _by_head(flow: Flow) -> tuple[float, ...]:
    return cast("QueuedFlow", flow).head.place


class Band:
    """The flows of one priority that have requests."""

    def __init__(self, priority: int, settings: BandSettings) -> None:
        self.priority = priority
        self.settings = settings
        self.requests = 0
        self.bytes = 0
        self.several = 0
        self.used_at = 0.0
        self.look = Look()
        self.flows: dict[str, QueuedFlow] = {}
        """By fairness id."""
        self._turns = 0
        self._orders: dict[FlowKey, _Order] = {}
        """Those that were asked for."""

    @property
    def in_turn(self) -> Iterable[QueuedFlow]:
        return self.by(_by_turn)

    @property
    def by_head(self) -> Iterable[QueuedFlow]:
        return self.by(_by_head)

    def by(self, key: FlowKey) -> Iterable[QueuedFlow]:
        return self._order(key).flows(self.look)

    def first(self, key: FlowKey) -> QueuedFlow | None:
        return self._order(key).first()

    def last(self, key: FlowKey) -> QueuedFlow | None:
        return self._order(key).last()

    def again(self, flow: str) -> None:
        if (found := self.flows.get(flow)) is not None:
            self._changed(found)

    def add(self, entry: Entry, fairness_id: str) -> None:
        flow = self.flows.get(fairness_id)
        if flow is None:
            flow = self.flows[fairness_id] = QueuedFlow(self, fairness_id, self._next_turn())
        entry.flow = flow
        flow.add(entry)
        self.several += flow.requests == _SEVERAL
        self.requests += 1
        self.bytes += entry.size
        self._changed(flow)

    def remove(self, entry: Entry, *, served: bool) -> None:
        flow = entry.flow
        assert flow is not None
        flow.remove(entry)
        self.several -= flow.requests == _SEVERAL - 1
        entry.flow = None
        self.requests -= 1
        self.bytes -= entry.size
        if not flow.requests:
            del self.flows[flow.id]
        elif served:
            flow.turn = self._next_turn()
        self._changed(flow)

    def _next_turn(self) -> int:
        self._turns += 1
        return self._turns

    def _changed(self, flow: QueuedFlow) -> None:
        for order in self._orders.values():
            order.change(flow)

    def _order(self, key: FlowKey) -> _Order:
        order = self._orders.get(key)
        if order is None:
            order = self._orders[key] = _Order(key, self.flows.values())
        order.settle()
        return order


class Queues:
    """All that waits. `keep`: seconds for which a band without requests still counts as in use."""

    def __init__(self, settings: FlowSettings, keep: float = 600.0) -> None:
        self.settings = settings
        self.requests = 0
        self.bytes = 0
        self.groups: Counter[Group] = Counter()
        """How many wait, by group."""
        self._needs: Counter[Needs] = Counter()
        self._keep = keep
        self._numbers = 0
        self._bands: SortedDict[int, Band] = SortedDict(lambda priority: -priority)
        self._soonest: SortedKeyList[Entry, tuple[float, int]] = SortedKeyList(key=_look_at)

    def __len__(self) -> int:
        return self.requests

    def __iter__(self) -> Iterator[Entry]:
        """All entries, those that came first first."""
        found = [entry for band in self._bands.values() for flow in band.flows.values() for entry in flow]
        return iter(sorted(found, key=lambda entry: entry.number))

    def bands(self, now: float) -> Sequence[Band]:
        """Those in use, the highest first."""
        for band in [*self._bands.values()]:
            if not band.requests and now - band.used_at > self._keep and band.priority not in self.settings.bands:
                del self._bands[band.priority]
        return [*self._bands.values()]

    def band(self, priority: int, now: float) -> Band:
        band = self._bands.get(priority)
        if band is None:
            band = self._bands[priority] = Band(priority, self.settings.band(priority))
        band.used_at = now
        return band

    def add(self, entry: Entry, fairness_id: str, now: float) -> None:
        """From now on it waits; its times are known."""
        if not entry.number:
            self._numbers += 1
            entry.number = self._numbers
        if entry.needs[-1].name and entry.needs not in self._needs and len(self._needs) >= _LANES:
            entry.needs = (*entry.needs[:-1], entry.needs[-1]._replace(name=_OTHERS))
        self._needs[entry.needs] += 1
        entry.request = at_rest(entry.request)
        band = self.band(entry.request.priority, now)
        entry.place = (band.settings.ordering.place(entry), entry.number)
        band.add(entry, fairness_id)
        self.requests += 1
        self.bytes += entry.size
        self.groups[entry.group] += 1
        entry.look_at = min(entry.expires, entry.no_endpoint_expires)
        self._soonest.add(entry)

    def remove(self, entry: Entry, *, served: bool = False) -> None:
        """It does not wait any more. `served`: it was its flow's turn."""
        flow = entry.flow
        assert flow is not None
        flow.band.remove(entry, served=served)
        self.requests -= 1
        self.bytes -= entry.size
        self.groups[entry.group] -= 1
        if not self.groups[entry.group]:
            del self.groups[entry.group]
        self._needs[entry.needs] -= 1
        if not self._needs[entry.needs]:
            del self._needs[entry.needs]
        self._soonest.remove(entry)

    @property
    def next_expiry(self) -> float:
        """When an entry has to be looked at by `expired`; inf where there is none."""
        return self._soonest[0].look_at if self._soonest else inf

    def expired(self, now: float, has_endpoints: Callable[[Group], bool]) -> Sequence[Entry]:
        """Those that have waited too long."""
        found = []
        while self._soonest and self._soonest[0].look_at <= now:
            entry = self._soonest.pop(0)
            ends = entry.expires if has_endpoints(entry.group) else entry.no_endpoint_expires
            entry.look_at = ends if ends > now else inf
            self._soonest.add(entry)
            if ends <= now:
                found.append(entry)
        return found

    def look_again(self) -> None:
        """Endpoints came or went, so the other of an entry's two times may be the one that counts."""
        entries = [*self._soonest]
        self._soonest.clear()
        for entry in entries:
            entry.look_at = min(entry.expires, entry.no_endpoint_expires)
        self._soonest.update(entries)


def _look_at(one: Entry) -> tuple[float, int]:
    return one.look_at, one.number
