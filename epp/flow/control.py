"""`FlowControl`: requests wait here while the pool is full, where their order can still be chosen.

It acts when something happens, never on a tick: a request comes, begins or ends, an endpoint comes or goes or is
scraped, or a time has passed of which it was said before that it would matter. Each look at the queues goes band by
band, the highest first, and in a band flow by flow as its fairness policy says. The first request whose endpoints are
not saturated up to its band's ceiling is let go, and chosen for in the same step, so that the next look knows of it.
One that may not go holds back all that need the same as it misses (`Need`: endpoints of the same subset, one to
prefill, a slot for the same LoRA adapter), in its flow, its band and below, and nobody else: its own tenant's requests
for other endpoints go.

Source of names, limits and outcomes: GIE v1.5 and llm-d-router v0.10, pkg/epp/flowcontrol.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import ceil, inf
from typing import Any, Final, Literal, Protocol, TypeVar, cast, get_args

from epp import protocol
from epp.documents.durations import seconds_of
from epp.errors import EppError, InternalError, NoEndpoint, Queued, Rejected
from epp.flow.queues import Band, Entry, FlowSettings, Group, Look, Need, Needs, QueuedFlow, Queues
from epp.plugin import AGENT_IDENTITY, BandSelectionPolicy, Detector, Endpoint, Plugin, Request, Response, stages_of
from epp.telemetry.series import FlowFigures, Waits

Outcome = Literal[
    "Dispatched", "RejectedCapacity", "RejectedNoEndpoints", "RejectedOther", "EvictedTTL", "EvictedNoEndpoints",
    "EvictedContextCancelled", "EvictedOther",
]  # fmt: skip
"""How a request's wait ended, in the words that dashboards of llm-d know: one that is rejected did not wait."""
REFUSED: Final = frozenset[Outcome](get_args(Outcome)) - {"Dispatched", "EvictedContextCancelled"}
"""Those where we said no."""
DEFAULT_FLOW: Final = "default-flow"
_LONGEST_ID: Final = 128
"""Characters of a fairness id that tell flows apart."""
_SHUT: Final = "this endpoint picker is shutting down, and the pool is full; retry"
_OWED: Final = (5.0, 20.0)
"""Seconds of waiting between which a head that misses what is scarce holds back all that need any of it: those that
pass it by would take each slot that comes free. Not for ever: what is in the slots need not be ours."""
_TRIES: Final = 16
"""Heads of flows that flood, of those that need the same, that are asked whether there is room for them in their share;
when there is none for so many, the others are held too. One may find none where another does: it has more tokens."""
_SOONEST: Final = 1e-3
"""Seconds: what is said to change sooner is waited for so long."""
_AGAIN: Final = (1, 60)
"""Least and most seconds of `Retry-After`; OpenAI's clients heed no more than 60."""
_LATEST: Final = 0.1
"""What the latest counts in the mean of the seconds between those that are let go."""


class Timer(Protocol):
    def cancel(self) -> None: ...


Later = Callable[[float, Callable[[], None]], Timer]
"""`(seconds, call)`: calls it so much later; 0: as soon as what runs now has ended."""


def name_of(plugin: Plugin) -> str:
    return plugin.name or type(plugin).__name__


class FlowObserver(Protocol):
    def __call__(self, fairness_id: str, priority: int, outcome: Outcome, seconds: float, model: str) -> None:
        """A request's wait ended; those that did not have to wait end with 0 s."""


D = TypeVar("D")
Stages = Sequence[Sequence[Endpoint]]
"""The groups of endpoints of which a request needs one each; who decodes comes first."""


class Chooser(Protocol[D]):
    """Who chooses for a request that is let go: `epp.scheduling.scheduler.Scheduler`."""

    def look(self, request: Request, endpoints: Sequence[Endpoint], kinds: Collection[type[Any]]) -> Request:
        """The request with its signals of these kinds."""

    def stages(self, request: Request, endpoints: Sequence[Endpoint]) -> Stages:
        """Those of `endpoints`, at least one."""

    def choose(self, request: Request, endpoints: Sequence[Endpoint]) -> D:
        """Decide and account, in one step. Raises EppError."""

    def finished(self, decision: D, response: Response) -> None:
        """Close the account."""


class _Pace:
    """How fast requests that wait are let go."""

    def __init__(self) -> None:
        self._each = 0.0
        """Mean seconds from one to the next; 0: not known yet."""
        self._last = 0.0

    def starts(self, now: float) -> None:
        """The first one waits."""
        self._last = now

    def goes(self, now: float) -> None:
        """One of them is let go."""
        took = now - self._last
        self._each = self._each + _LATEST * (took - self._each) if self._each else took
        self._last = now

    def seconds(self, requests: int, now: float) -> float:
        """Until so many have been let go. The next takes as long as it has taken already."""
        return requests * max(self._each, now - self._last)


class FlowControl(Plugin):
    """The queues of one pool. Each request that enters ends exactly once: `choose` or `refuse` is called, or `leave`.

    `candidates(subset)` are the endpoints a request may go to now, `why_empty(subset)` says why there are none. The
    hooks of a plugin are how it hears that requests begin and end, those that other replicas sent among them.
    `on_error(plugin, exception)` hears of plugins that fail: a detector counts as saying 0 then, a limit as none.
    `replicas()` share the limits of what may wait evenly. `trusted`: clients' headers say whose a request is and how
    long it may wait.
    """

    def __init__(
        self,
        settings: FlowSettings,
        candidates: Callable[[Group], Sequence[Endpoint]],
        why_empty: Callable[[Group], str],
        later: Later,
        observe: FlowObserver,
        on_error: Callable[[str, Exception], None],
        *,
        clock: Callable[[], float],
        trusted: bool,
        replicas: Callable[[], int] = lambda: 1,
    ) -> None:
        self._replicas = replicas
        self.name = "flow-control"
        self._on_error = on_error
        self.clock = clock
        self._queues = Queues(settings)
        self._pace = _Pace()
        self._of_pool = self._candidates = candidates
        self._held: Timer | None = None
        """Until it rings the pool counts as empty: `filled`."""
        self._why_empty = why_empty
        self._later = later
        self._observe = observe
        self._trusted = trusted
        self._found: dict[Needs, tuple[Entry, Sequence[tuple[Need, float]]]] = {}
        """What was found for the last head with these needs since something changed."""
        self._last = 0.0
        """How full were the pool's endpoints that decode, for the last request that was looked at."""
        self._owed_until = inf
        """Until when somebody is held back for what is scarce; inf: nobody is."""
        self._timer: tuple[float, Timer] | None = None
        """When it rings."""
        self._apart = False
        """Endpoints that prefill and others that decode were there when they came or went last."""
        self._closed = False
        self._shut = False

    @property
    def settings(self) -> FlowSettings:
        return self._queues.settings

    # --- one request ------------------------------------------------------------------------------------------------

    async def turn(
        self, request: Request, subset: Group, chooser: Chooser[D], queued: Callable[[], None]
    ) -> tuple[D, Queued]:
        """What is chosen for the request when it is let go, and how it had to wait. Raises EppError, which says it too.

        `queued` is called where it has to wait. Until the first wait it does not matter which task this runs in.
        """
        made: asyncio.Future[D] = asyncio.get_running_loop().create_future()
        entry = self._entry(request, subset, chooser, made)
        del request  # while it waits the entry alone has it, without its prompt
        try:
            try:
                if self.enter(entry):
                    return made.result(), self._queued(entry)
            except EppError as error:
                error.queued = self._queued(entry)
                raise
            queued()
            try:
                decision = await made
            except BaseException:  # its task may have been ended before its first step, too
                self.leave(entry)
                if made.done() and not made.cancelled() and made.exception() is None:
                    chooser.finished(made.result(), Response())
                raise
            return decision, self._queued(entry)
        finally:  # no cycle stays: what is called holds the entry, and an error this frame
            entry.ended()
            del made

    def _entry(self, request: Request, subset: Group, chooser: Chooser[D], made: "asyncio.Future[D]") -> Entry:
        def choose(endpoints: Sequence[Endpoint]) -> None:
            decision = chooser.choose(entry.ready(self.clock()), endpoints)
            if made.cancelled():  # its client is gone since this moment
                chooser.finished(decision, Response())
            else:
                made.set_result(decision)

        def refuse(error: EppError) -> None:
            error.queued = self._queued(entry)
            if not made.cancelled():
                made.set_exception(error)

        entry = Entry(request, subset, len(request.body), chooser.look, chooser.stages, choose, refuse)
        return entry

    def _queued(self, entry: Entry) -> Queued:
        return Queued(entry.fairness_id, entry.request.priority, self.clock() - entry.since)

    def enter(self, entry: Entry) -> bool:
        """A request is complete. True: it was let go at once, `entry.choose` has been called, whose EppErrors are the
        caller's. False: it waits. Raises Rejected where too many wait.
        """
        now, request = self.clock(), entry.request
        fairness_id = entry.fairness_id = self._fairness_id(request)
        entry.since = now
        endpoints = self._candidates_of(entry)
        stages = self._say_needs(entry, endpoints)
        if not self._queues.requests:
            self._pace.starts(now)
            self._found.clear()
            if endpoints and (self._closed or self._is_open_to(entry, now, stages)):
                self._observe(fairness_id, request.priority, "Dispatched", 0.0, request.model)
                self._tell(fairness_id, entry, now)
                entry.choose(endpoints)
                return True
        self._check_room(entry, now)
        self._time(entry, now)
        self._queues.add(entry, fairness_id, now)
        errors: list[EppError] = []
        refuse, entry.refuse = entry.refuse, errors.append
        self._dispatch()
        entry.refuse = refuse
        if errors:
            raise errors[0]
        return entry.flow is None

    def leave(self, entry: Entry) -> None:
        """The client is gone. Does nothing where the request does not wait any more."""
        if entry.flow is not None:
            self._end(entry, "EvictedContextCancelled")
            self.changed()

    # --- what happens -----------------------------------------------------------------------------------------------

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        self.changed()

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.changed()

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self._found.clear()

    def changed(self) -> None:
        """Something happened that may let a request go."""
        self._found.clear()
        if self._queues.requests:
            self._ring_in(0.0)

    def endpoints_changed(self) -> None:
        """Endpoints came or went."""
        apart = len([*stages_of(self._candidates(None))]) > 1
        if apart != self._apart:  # what waits needs other things than it did
            self._apart = apart
            self.configure(self.settings)
        self._queues.look_again()
        self.changed()

    def filled(self, seconds: float) -> None:
        """Endpoints came into a pool that had none. Nobody goes to them for so long: the gateway may hear of them later
        than we do, and refuse what comes before.
        """
        if self._held is not None:
            self._held.cancel()
        self._candidates = _nothing_of
        self._held = self._later(seconds, self._known)

    def _known(self) -> None:
        self._held, self._candidates = None, self._of_pool
        self.endpoints_changed()

    def configure(self, settings: FlowSettings) -> None:
        """New settings; what waits goes on waiting, in their order. Nothing is refused for limits that are less now."""
        entries, now = [*self._queues], self.clock()
        flows = [entry.flow.id for entry in entries if entry.flow is not None]
        self._queues = Queues(settings)
        for entry, fairness_id in zip(entries, flows, strict=True):
            entry.number = 0
            self._time(entry, entry.since)
            self._say_needs(entry, self._candidates_of(entry))
            self._queues.add(entry, fairness_id, now)
        self.changed()

    def close(self) -> None:
        """No flow control from now on: all that waits is let go."""
        self._closed = True
        if self._held is not None:
            self._held.cancel()
            self._known()
        for entry in self._queues:
            self._let_go(entry)

    def shut(self) -> None:
        """The process ends: all that waits is refused, and what would have to wait from now on."""
        self._shut = True
        for entry in self._queues:
            self._end(entry, "EvictedOther")
            entry.refuse(_shut())

    def figures(self) -> FlowFigures:
        rows: list[Waits] = []
        bands, queues, settings = [], self._queues, self.settings
        for band in queues.bands(self.clock()):
            for flow in band.flows.values():
                for model, (requests, size) in flow.models.items():
                    rows.append(Waits(flow.id, band.priority, requests, size, model))
            limits = self._limit(band.settings.max_requests), self._limit(band.settings.max_bytes)
            bands.append((band.priority, band.requests / limits[0], band.bytes / limits[1]))
        whole = (
            queues.requests / self._limit(settings.max_requests) if settings.max_requests < inf else None,
            queues.bytes / self._limit(settings.max_bytes) if settings.max_bytes < inf else None,
        )
        stages = [*stages_of(self._candidates(None))]
        saturation = max(self._last, *map(self._fullness, stages[1:])) if stages[1:] else self._last
        return FlowFigures(rows, saturation, bands, whole)

    # --- limits and times -------------------------------------------------------------------------------------------

    def _fairness_id(self, request: Request) -> str:
        given = (request.header(protocol.FAIRNESS_ID) if self._trusted else None) or request.tenant
        if not given and self._trusted:
            given = request.attributes.get(AGENT_IDENTITY, "")
        return given[:_LONGEST_ID] if given else DEFAULT_FLOW

    def _time(self, entry: Entry, now: float) -> None:
        """Say when it has waited too long."""
        settings, request = self.settings, entry.request
        own = settings.band(request.priority).ttl
        ttl = settings.ttl if own is None else own
        if self._trusted:
            asked = _header(request, protocol.REQUEST_TTL, seconds_of)
            ttl = min(ttl or inf, asked or inf)
        entry.expires = now + (ttl or inf)
        entry.no_endpoint_expires = now + (settings.no_endpoint_ttl or inf)

    def _check_room(self, entry: Entry, now: float) -> None:
        if self._shut:
            self._reject(entry, "RejectedOther")
            raise _shut()
        queues, settings = self._queues, self.settings
        band = queues.band(entry.request.priority, now)
        limits = (
            ("requests of its priority", band.requests + 1, band.settings.max_requests),
            ("bytes of requests of its priority", band.bytes + entry.size, band.settings.max_bytes),
            ("requests", queues.requests + 1, settings.max_requests),
            ("bytes of requests", queues.bytes + entry.size, settings.max_bytes),
        )
        for what, would_be, whole in limits:
            limit = self._limit(whole)
            if would_be > limit:
                waits = f"{limit:.0f} {what} wait already, which is the most"
                if not self._has_endpoints(entry.group):
                    self._reject(entry, "RejectedNoEndpoints")
                    raise NoEndpoint(f"{self._why_empty(entry.group)}, and {waits}; retry later")
                self._reject(entry, "RejectedCapacity")
                raise Rejected(f"the pool is full and {waits}; retry later", headers=self._again(now))

    def _reject(self, entry: Entry, outcome: Outcome) -> None:
        request = entry.request
        self._observe(entry.fairness_id, request.priority, outcome, 0.0, request.model)

    def _limit(self, whole: float) -> float:
        """This replica's part of a limit."""
        return max(whole / self._replicas(), min(whole, 1))

    # --- looking at the queues --------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Let go whom there is room for, refuse who has waited too long, and say when to look again."""
        while (entry := self._next()) is not None:
            self._let_go(entry)
        for entry in self._queues.expired(self.clock(), self._has_endpoints):
            self._expire(entry)
        self._look_later()

    def _next(self) -> Entry | None:
        """Who is to be let go now."""
        queues = self._queues
        if not queues.requests:
            return None
        blocked: set[Need] = set()
        now, self._owed_until = self.clock(), inf
        bands = self._queues.bands(now)
        ceilings: dict[Need, Sequence[float]] = {}
        selection = self.settings.selection
        for at, band in enumerate(bands) if selection is None else self._in_turn(selection, bands):
            if selection is not None:
                blocked = set()  # a band that is held back holds back none that comes after it by other rules
            if not band.requests:
                continue
            held: set[Need] = set()
            tries: Counter[Need] = Counter()
            band.look = Look(blocked, held)
            share = self._share(band)
            for flow in self._turns(band):
                part = share if flow.floods else 1.0
                own = held if flow.floods else frozenset[Need]()
                while (entry := flow.first(blocked | own)) is not None:
                    for need, saturation in self._saturations(entry):
                        if need not in ceilings:
                            ceilings[need] = self._ceilings(saturation, bands)
                        if saturation >= (ceiling := ceilings[need][at]) * part:
                            break
                    else:
                        return entry
                    if saturation < ceiling:  # there is room, and it is others'
                        own = {*own, need}
                        tries[need] += 1
                        if tries[need] >= _TRIES:
                            held.add(need)
                        continue
                    missed = {need, need._replace(name="")} if need.name and self._is_owed(entry, now) else {need}
                    blocked |= missed
                    if selection is None and not need.kind and all(Need(each) in blocked for each in queues.groups):
                        return None
        return None

    def _is_owed(self, entry: Entry, now: float) -> bool:
        """Whether it is to have the next of what is scarce."""
        since, until = (entry.since + seconds for seconds in _OWED)
        if not since <= now < until:
            return False
        self._owed_until = min(self._owed_until, until)
        return True

    def _in_turn(self, selection: BandSelectionPolicy, bands: Sequence[Band]) -> Sequence[tuple[int, Band]]:
        """The bands, with their places among all, in the order in which the policy has them asked."""
        places = {band.priority: at for at, band in enumerate(bands)}
        try:
            turns = selection.turns([*places])
            return [(places[priority], bands[places[priority]]) for priority in turns]
        except Exception as error:
            self._on_error(name_of(selection), error)
            return [*enumerate(bands)]

    def _turns(self, band: Band) -> Iterable[QueuedFlow]:
        try:
            return cast("Iterable[QueuedFlow]", band.settings.fairness.turns(band))
        except Exception as error:
            self._on_error(name_of(band.settings.fairness), error)
            return band.in_turn

    def _share(self, band: Band) -> float:
        try:
            return band.settings.fairness.share(band)
        except Exception as error:
            self._on_error(name_of(band.settings.fairness), error)
            return 1.0

    def _is_open_to(self, entry: Entry, now: float, stages: Stages) -> bool:
        band = self._queues.band(entry.request.priority, now)
        bands = self._queues.bands(now)
        at = bands.index(band)
        return all(found < self._ceilings(found, bands)[at] for _, found in self._saturations(entry, stages))

    def _ceilings(self, saturation: float, bands: Sequence[Band]) -> Sequence[float]:
        if saturation == inf:
            return [1.0] * len(bands)
        try:
            found = self.settings.usage.ceilings(saturation, [band.priority for band in bands])
            if len(found) != len(bands):
                raise ValueError(f"{len(found)} ceilings for {len(bands)} priorities")
        except Exception as error:
            self._on_error(name_of(self.settings.usage), error)
            return [1.0] * len(bands)
        return found

    def _say_needs(self, entry: Entry, endpoints: Sequence[Endpoint]) -> Stages:
        """What it will wait for, if it has to wait. Returns its stages as they are now; () where there are none."""
        group, detector, needs = entry.group, self.settings.detector, entry.needs[:1]
        stages: Stages = ()
        try:
            if endpoints and len(stages := entry.stages(entry.request, endpoints)) > 1:
                needs += (Need(group, "prefill"),)
            if name := detector.scarce(entry.request):
                needs += (Need(group, "scarce"), Need(group, "scarce", name))
        except Exception as error:
            self._on_error(name_of(detector), error)
        entry.needs = needs
        return stages

    def _saturations(self, entry: Entry, stages: Stages = ()) -> Sequence[tuple[Need, float]]:
        """How full is what it needs, as far as that is not certain to be there; inf: there is none of it. `stages`:
        its own, where they have just been found.
        """
        known = self._found.get(entry.needs)
        if known is not None and known[0] is entry:
            return known[1]
        endpoints, detector = self._candidates_of(entry), self.settings.detector
        found = [(entry.needs[0], inf)]
        if endpoints:
            try:
                found = [*self._look_at(entry, endpoints, detector, stages)]
            except Exception as error:
                self._on_error(name_of(detector), error)
                found = [(entry.needs[0], 0.0)]
            if entry.group is None:
                self._last = found[0][1]
        self._found[entry.needs] = entry, found
        return found

    def _look_at(
        self, entry: Entry, endpoints: Sequence[Endpoint], detector: Detector, stages: Stages
    ) -> Iterable[tuple[Need, float]]:
        request = entry.request
        if detector.looks_at:
            request = entry.look(request, endpoints, detector.looks_at)
        decode, *others = stages or entry.stages(request, endpoints)
        for need in entry.needs:
            if not need.kind:
                yield need, detector.saturation_for(request, decode)
            elif need.kind == "prefill":
                yield from ((need, detector.saturation_for(request, stage)) for stage in others)
            elif need.name:
                ready = detector.ready(request, decode)
                if len(ready) < len(decode):
                    yield need, detector.saturation_for(request, ready) if ready else inf

    def _fullness(self, endpoints: Sequence[Endpoint]) -> float:
        try:
            return self.settings.detector.saturation(endpoints)
        except Exception as error:
            self._on_error(name_of(self.settings.detector), error)
            return 0.0

    def _tell(self, fairness_id: str, entry: Entry, now: float) -> None:
        priority, selection = entry.request.priority, self.settings.selection
        fairness = self.settings.band(priority).fairness
        try:
            fairness.dispatched(fairness_id, entry, now)
        except Exception as error:
            self._on_error(name_of(fairness), error)
        if selection is not None:
            try:
                selection.dispatched(priority, entry, now)
            except Exception as error:
                self._on_error(name_of(selection), error)

    def _candidates_of(self, entry: Entry) -> Sequence[Endpoint]:
        return self._candidates(entry.group)

    def _has_endpoints(self, group: Group) -> bool:
        return bool(self._candidates(group))

    def _let_go(self, entry: Entry) -> None:
        flow = entry.flow
        assert flow is not None
        now = self.clock()
        self._end(entry, "Dispatched", served=True)
        self._pace.goes(now)
        self._tell(flow.id, entry, now)
        self._found.clear()
        try:
            endpoints = self._candidates_of(entry)
            if not endpoints:
                raise NoEndpoint(self._why_empty(entry.group))
            entry.choose(endpoints)
        except EppError as error:
            entry.refuse(error)
        except Exception as error:
            self._on_error(self.name, error)
            entry.refuse(InternalError("internal error"))

    def _expire(self, entry: Entry) -> None:
        waited = self.clock() - entry.since
        if self._has_endpoints(entry.group):
            self._end(entry, "EvictedTTL")
            text = f"the pool is full; the request has waited {waited:.1f} s for its turn; retry later"
            entry.refuse(Rejected(text, reason=protocol.DROP_TTL_EXPIRED, headers=self._again(self.clock())))
            return
        self._end(entry, "EvictedNoEndpoints")
        entry.refuse(NoEndpoint(f"{self._why_empty(entry.group)}; the request has waited {waited:.1f} s for one"))

    def _again(self, now: float) -> Mapping[str, str]:
        """When who comes then would go at once, if nobody else came."""
        return again_in(self._pace.seconds(self._queues.requests, now))

    def _end(self, entry: Entry, outcome: Outcome, *, served: bool = False) -> None:
        flow = entry.flow
        assert flow is not None
        self._queues.remove(entry, served=served)
        self._observe(flow.id, flow.band.priority, outcome, self.clock() - entry.since, entry.request.model)

    def _look_later(self) -> None:
        if not self._queues.requests:
            return
        now = self.clock()
        seconds = min(self._queues.next_expiry, self._owed_until) - now
        for group in self._queues.groups:
            if endpoints := self._candidates(group):
                seconds = min(seconds, self._falls_in(endpoints))
        if seconds < inf:
            self._ring_in(max(_SOONEST, seconds))

    def _falls_in(self, endpoints: Sequence[Endpoint]) -> float:
        try:
            return self.settings.detector.falls_in(endpoints)
        except Exception as error:
            self._on_error(name_of(self.settings.detector), error)
            return inf

    def _ring_in(self, seconds: float) -> None:
        """Look at the queues then, or sooner."""
        at = self.clock() + seconds
        if self._timer is not None:
            if self._timer[0] <= at:
                return
            self._timer[1].cancel()
        self._timer = at, self._later(seconds, self._ring)

    def _ring(self) -> None:
        self._timer = None
        self._found.clear()
        self._dispatch()


def again_in(seconds: float) -> Mapping[str, str]:
    """Tells a client when to ask again."""
    least, most = _AGAIN
    return {"retry-after": str(min(most, max(least, ceil(seconds))))}


def _shut() -> NoEndpoint:
    """Another replica, or the one that takes our place, may take it at once."""
    return NoEndpoint(_SHUT, reason=protocol.DROP_SHUTTING_DOWN, headers=again_in(0.0))


def _nothing_of(group: Group) -> Sequence[Endpoint]:
    return ()


def _header(request: Request, names: str, read: Callable[[str], float]) -> float | None:
    """A number above 0 that a header says; None: it does not."""
    text = request.header(names)
    try:
        value = read(text) if text else 0.0
    except ValueError:
        return None
    return value if 0 < value < inf else None
