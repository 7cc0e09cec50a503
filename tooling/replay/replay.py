"""The replay itself: a queue of events in virtual time, from the first request to the end of the last."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from random import Random
from typing import Any, Final

from epp.errors import EppError, NoEndpoint
from epp.plugin import Response, Usage
from epp.prefix.events.wire import Batch
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Adopted
from tooling.replay.kv_events import TierLog, batch_of, batch_of_l1
from tooling.replay.pod import VirtualPod
from tooling.replay.replica import Build, Replica, Told
from tooling.replay.trace import Trace, TraceRequest
from tooling.simulator.engine import Job, Transfer
from tooling.simulator.presets import PodKind, lowers
from tooling.simulator.tiers import Changed, Tier, TierParameters

ATTEMPTS: Final = 5
"""Times a request is sent before it counts as failed."""
WAITING_PER_POD: Final = 2
"""Requests kept waiting per pod while the pool's saturation is measured."""
FEWEST_MEASURED: Final = 2000
TURNOVERS: Final = 5
"""Times that everything in flight must be replaced until a pool's saturation is believed."""
ERROR_SECONDS: Final = 0.002
"""Until an error is back at the client."""
_STEP: Final = 1
"""Order among events of one time: what comes from outside is there before a step ends."""


@dataclass(frozen=True)
class Failure:
    """A pod dies, with all it holds, and comes back empty; or it answers errors at once."""

    pod: int
    at: float
    seconds: float
    """Until it is back."""
    errors: float = 0.0
    """Share of its requests that it answers with status 500 at once, instead of dying."""


@dataclass(frozen=True)
class Conditions:
    """What the pickers know and what happens to them and the pods. Times are seconds."""

    scrape: float = 1.0
    """Between two scrapes of a pod's metrics."""
    replicas: int = 1
    exchange: float | None = 0.0005
    """Until the other replicas know of a decision: about one small message in a cluster's network; None = never."""
    event_lag: float = 0.002
    """From the end of a pod's step to its KV events' arrival, for policies that listen."""
    sees_answer: bool = True
    """The gateway shows answers to the picker, so first tokens and usage are known; false is the lean wiring."""
    watched: float = 0.0
    """Share of the answers that it shows in the lean wiring, and some a second at least, unless it is 0
    (`--watch-answers` of the picker)."""
    foreign: float = 0.0
    """Share of the requests that go to the pods in turn, past the picker; figures leave them out."""
    failures: tuple[Failure, ...] = ()
    l2: TierParameters | None = None
    """Storage for KV that all pods share; None = there is none."""
    pods_per_node: int = 1
    """Pods that share a node's L1, where their kinds have one: neighbours in their order."""
    notice: float = 1.0
    """Until the picker knows that a pod is gone, or back."""
    roles: tuple[str, ...] = ()
    """Label `llm-d.ai/role` of each pod; () = none has one."""
    transfer: Transfer = field(default_factory=Transfer)
    """Of KV from a pod that prefilled to the one that decodes."""
    strand: float = 480.0
    """Until a pod gives up KV that nobody fetched: vLLM's VLLM_NIXL_ABORT_REQUEST_TIMEOUT."""
    saturate: bool = False
    """Ignore all times and pauses: send the next request whenever little waits in the pods, until the rate at which
    they complete has shown."""


@dataclass(slots=True)
class CompletedRequest:
    """What came of one request. Times are seconds of the replay."""

    sent: float = -1.0
    """When the client sent it first; -1 = never."""
    first: float = -1.0
    ended: float = -1.0
    """End of the answer, or of the last attempt."""
    pod: int = -1
    """Who served it last."""
    cached: int = 0
    """Prompt tokens that pod did not compute: it had them in its cache, or loaded them."""
    l1: int = 0
    l2: int = 0
    """Those of them that it loaded from lower tiers."""
    attempts: int = 0
    failed: bool = False
    shed: bool = False
    """It was refused, on purpose."""
    waited: float = 0.0
    """Seconds in flow control."""
    prefill: int = -1
    """The pod that computed its prompt, if another than `pod`."""
    foreign: bool = False


@dataclass(eq=False, slots=True)
class _Flight:
    """A request on its way."""

    number: int
    pod: VirtualPod
    job: Job
    decision: Decision | None
    """None: foreign traffic."""
    home: int
    """The replica that chose; -1 for foreign traffic."""
    response: Response = field(default_factory=Response)
    adopted: dict[int, Adopted] = field(default_factory=dict)
    """By each other replica that knows of it."""
    beside: list[tuple[int, Adopted]] = field(default_factory=list)
    """Replica -> what it knows of the prefill elsewhere."""
    prefilled: VirtualPod | None = None
    """Who keeps its prompt's KV until it was fetched."""
    then: VirtualPod | None = None
    """It is prefilled here, and decoded there."""

    @property
    def watched(self) -> bool:
        """Its replica sees the answer."""
        return self.decision is not None and self.decision.request.sees_answer


class _Timer:
    """What flow control asked to be called for later."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self._call = None

    def ring(self) -> None:
        if self._call is not None:
            self._call()


class Replay:
    """One trace, one policy, once. Equal arguments give equal results."""

    def __init__(
        self,
        trace: Trace,
        kinds: Sequence[PodKind],
        build: Build,
        conditions: Conditions,
        seed: int,
        on_progress: Callable[[int], None] = lambda ended: None,
    ) -> None:
        self.now = 0.0
        self.trace = trace
        self.conditions = conditions
        self._events: list[tuple[float, int, int, Callable[..., None], tuple[Any, ...]]] = []
        self._scheduled = 0
        below = lowers(kinds, conditions.l2, conditions.pods_per_node)
        roles = conditions.roles or ("",) * len(kinds)
        self.pods = [
            VirtualPod(f"pod-{n + 1}", kind, *below[n], role=role)
            for n, (kind, role) in enumerate(zip(kinds, roles, strict=True))
        ]
        self.stranded = 0
        """Requests whose KV was computed and never fetched."""
        self.tiered = any(pod.lower is not None for pod in self.pods)
        self._tier_log = TierLog([*dict.fromkeys(pod.node for pod in self.pods)]) if self.tiered else None
        self.served = [CompletedRequest() for _ in trace.asks]
        self.replicas = [
            Replica(
                build,
                self.pods,
                self.clock,
                Random(f"{seed} {n}"),
                watched=1.0 if conditions.sees_answer else conditions.watched,
                later=self._later,
                tier_log=self._tier_log,
                told=Told() if conditions.exchange is None else Told(n, conditions.replicas, conditions.exchange),
            )
            for n in range(conditions.replicas)
        ]
        self._listening = any(replica.delivery is not None for replica in self.replicas)
        if self._listening:
            for pod in self.pods:
                pod.watch()
        self._mates = {pod: [mate for mate in self.pods if mate.node == pod.node] for pod in self.pods}
        self._chance = Random(f"conditions {seed}")
        self._place = {pod: number for number, pod in enumerate(self.pods)}
        self._flights: dict[VirtualPod, dict[str, _Flight]] = {pod: {} for pod in self.pods}
        self._open = len(trace.asks)
        self._turn = self._foreign_turn = 0
        self._peak = 0
        """Most requests in flight at a time."""
        self._missing = [len(ask.after) for ask in trace.asks]
        self._followers: dict[int, list[int]] = {}
        self._line: deque[int] = deque()
        self._on_progress = on_progress

    def clock(self) -> float:
        return self.now

    def run(self) -> list[CompletedRequest]:
        """Replay everything; the trace's requests in order, with what came of each."""
        self._start()
        events = self._events
        while self._open and not self._has_shown():
            self.now, _, _, action, arguments = heappop(events)
            action(*arguments)
        self._drain()
        return self.served

    def _has_shown(self) -> bool:
        """While saturating: everything in flight has been replaced often enough."""
        ended = len(self.served) - self._open
        return self.conditions.saturate and ended >= max(FEWEST_MEASURED, TURNOVERS * self._peak)

    def _start(self) -> None:
        conditions = self.conditions
        for number, ask in enumerate(self.trace.asks):
            for earlier in ask.after:
                self._followers.setdefault(earlier, []).append(number)
            if ask.after:
                continue
            if conditions.saturate:
                self._line.append(number)
            else:
                self._at(ask.at, self._send, number)
        for ask_number in range(len(self.trace.asks)):
            self.served[ask_number].foreign = self._chance.random() < conditions.foreign
        for failure in conditions.failures:
            pod = self.pods[failure.pod]
            if failure.errors:
                self._at(failure.at, self._fail, pod, failure.errors)
                self._at(failure.at + failure.seconds, self._fail, pod, 0.0)
                continue
            self._at(failure.at, self._die, pod)
            self._at(failure.at + failure.seconds, self._revive, pod)
        for replica in self.replicas:
            for pod in self.pods:
                self._at(conditions.scrape * self._chance.random(), self._scrape, replica, pod)
            if replica.delivery is not None and replica.delivery.interval:
                self._at(0.0, self._read, replica)
        self._feed()

    def _drain(self) -> None:
        """Let the replicas learn what has ended; nothing else is left to happen."""
        while self._events:
            self.now, _, _, action, arguments = heappop(self._events)
            if action in (self._tell, self._tell_adopted, self._hear, self._note):
                action(*arguments)

    def _later(self, seconds: float, call: Callable[[], None]) -> "_Timer":
        timer = _Timer(call)
        self._at(self.now + seconds, timer.ring)
        return timer

    def _at(self, time: float, action: Callable[..., None], *arguments: Any, order: int = 0) -> None:
        self._scheduled += 1
        heappush(self._events, (time, order, self._scheduled, action, arguments))

    # --- requests ---------------------------------------------------------------------------------------------------

    def _feed(self) -> None:
        """While saturating: keep something waiting in the pods."""
        if not self._line:
            return
        waiting = sum(len(pod.engine.waiting) for pod in self.pods)
        for _ in range(WAITING_PER_POD * len(self.pods) - waiting):
            if self._line:
                self._send(self._line.popleft())

    def _send(self, number: int) -> None:
        """A client sends a request, or sends it again."""
        served, ask = self.served[number], self.trace.asks[number]
        if not served.attempts:
            served.sent = self.now
        served.attempts += 1
        if served.foreign:
            alive = [pod for pod in self.pods if pod.alive] or self.pods
            self._foreign_turn += 1
            self._reach(number, ask, alive[self._foreign_turn % len(alive)], None, -1)
            return
        home = self._turn = (self._turn + 1) % len(self.replicas)
        replica = self.replicas[home]
        if not replica.endpoints and replica.flow is None:
            self._lost(number)
            return
        asked = self.now
        replica.enter(
            number,
            ask,
            lambda decision: self._decided(number, home, asked, decision),
            lambda error: self._refused(number, error, waits=replica.flow is not None),
        )

    def _refused(self, number: int, error: EppError, *, waits: bool) -> None:
        """A picker said no. Where nobody can serve it now and it cannot wait there, the client asks again."""
        if isinstance(error, NoEndpoint) and not waits:
            self._lost(number)
            return
        self.served[number].shed = True
        self._ended(number, failed=True)

    def _decided(self, number: int, home: int, asked: float, decision: Decision) -> None:
        """A picker named a pod."""
        replica, ask = self.replicas[home], self.trace.asks[number]
        self.served[number].waited += self.now - asked
        pod = replica.pod_of[decision.endpoint]
        for fallback in decision.endpoints[1:]:  # the gateway's retry, where no endpoint answers
            if pod.alive:
                break
            pod = replica.pod_of[fallback]
            replica.scheduler.moved(decision, fallback, Response(served=fallback.address))
        prefill = next((replica.pod_of[where] for part, where in decision.parts if part.stage == "prefill"), None)
        if prefill is not None and prefill is not pod and prefill.alive and pod.alive:
            self._prefill(number, ask, prefill, pod, decision, home)
            return
        self._reach(number, ask, pod, decision, home)

    def _prefill(
        self,
        number: int,
        ask: TraceRequest,
        prefill: VirtualPod,
        pod: VirtualPod,
        decision: Decision,
        home: int,
    ) -> None:
        """The sidecar of the pod that decodes asks another one for the prompt."""
        job = prefill.add(number, ask, self.now, prefills=True)
        self.served[number].pod, self.served[number].prefill = self._place[pod], self._place[prefill]
        flight = _Flight(number, prefill, job, decision, home, then=pod)
        self._flights[prefill][job.id] = flight
        self._step_later(prefill)
        self._announce(flight)

    def _prefilled(self, flight: _Flight) -> None:
        """The prompt is computed; the pod that decodes fetches it."""
        pod, ask = flight.then, self.trace.asks[flight.number]
        assert pod is not None
        kept = flight.pod, flight.job.id
        self._at(self.now + self.conditions.strand, self._give_up, *kept)
        if not pod.alive:
            self._finish_all(flight, 503)
            self._lost(flight.number)
            return
        job = pod.add(flight.number, ask, self.now, transfer=self.conditions.transfer)
        job.found = flight.job.cached
        decoding = replace(flight, pod=pod, job=job, response=Response(), prefilled=flight.pod, then=None)
        self._flights[pod][job.id] = decoding
        self._step_later(pod)

    def _give_up(self, pod: VirtualPod, request: str) -> None:
        if pod.look(self.now).fetched(request):
            self.stranded += 1
            self._step_later(pod)

    def _reach(self, number: int, ask: TraceRequest, pod: VirtualPod, decision: Decision | None, home: int) -> None:
        """The request is at a pod, as a whole."""
        self.served[number].prefill = -1
        if not pod.alive:
            if decision is not None:
                self.replicas[home].scheduler.finished(decision, Response(status=503))
            self._lost(number)
            return
        if pod.errors and self._chance.random() < pod.errors:
            self.served[number].pod = self._place[pod]
            self._at(self.now + ERROR_SECONDS, self._error, number, decision, home)
            return
        job = pod.add(number, ask, self.now)
        self.served[number].pod = self._place[pod]
        self._peak = max(self._peak, sum(map(len, self._flights.values())) + 1)
        flight = self._flights[pod][job.id] = _Flight(number, pod, job, decision, home)
        self._step_later(pod)
        self._announce(flight)

    def _announce(self, flight: _Flight) -> None:
        """Tell the other replicas of a decision."""
        home, delay = flight.home, self.conditions.exchange
        decision = flight.decision
        if decision is not None and delay is not None and len(self.replicas) > 1:
            announced = self.replicas[home].announce(flight.number, decision)
            for peer in range(len(self.replicas)):
                if peer != home:
                    self._at(self.now + delay, self._tell_adopted, peer, flight, announced)

    def _error(self, number: int, decision: Decision | None, home: int) -> None:
        """A client gets an error, which it does not take for a reason to ask again."""
        if decision is not None:
            self.replicas[home].scheduler.answered(decision, Response(status=500))
            self.replicas[home].scheduler.finished(decision, Response(status=500))
        self._ended(number, failed=True)

    def _lost(self, number: int) -> None:
        """An attempt came to nothing; clients try again, a little later, but not for ever."""
        served = self.served[number]
        if served.attempts < ATTEMPTS:
            self._at(self.now + 0.5 * 2**served.attempts, self._send, number)
        else:
            self._ended(number, failed=True)

    def _ended(self, number: int, *, failed: bool) -> None:
        served = self.served[number]
        served.ended, served.failed = self.now, failed
        self._open -= 1
        self._on_progress(len(self.served) - self._open)
        for follower in self._followers.pop(number, ()):
            self._missing[follower] -= 1
            if not self._missing[follower]:
                pause = 0.0 if self.conditions.saturate else self.trace.asks[follower].pause
                self._at(self.now + pause, self._send, follower)

    # --- pods -------------------------------------------------------------------------------------------------------

    def _step_later(self, pod: VirtualPod) -> None:
        """Have the pod called when its step in progress ends. What a shortened leap had asked for finds nothing due."""
        if pod.due == float("inf"):
            # Requests that come at this very moment are there too before the pod begins.
            pod.due = self.now
        self._at(pod.due, self._step, pod, order=_STEP)

    def _step(self, pod: VirtualPod) -> None:
        if pod.due != self.now:
            return
        step = pod.end()
        self._tell_events(pod)
        if step is not None:
            flights = self._flights[pod]
            for job in step.first:
                self._first_token(flights[job.id])
            for job in step.finished:
                flight = flights.pop(job.id)
                if flight.then is not None:
                    self._prefilled(flight)
                else:
                    self._finish(flight)
        pod.begin(self.now)
        if pod.due != float("inf"):
            self._at(pod.due, self._step, pod, order=_STEP)
        self._feed()

    def _tell_events(self, pod: VirtualPod) -> None:
        """Pods report what became of their prefix caches when a step has ended, before its tokens are sent."""
        if self._listening and (changes := pod.engine.changes()):
            self._deliver(pod, batch_of(changes, pod.kind.parameters.block_size, self.now))
        if self._listening and pod.lower is not None:
            if changed := self._changes(pod.lower.l1, pod.node):
                for mate in self._mates[pod]:  # each engine on a node reports its L1
                    if mate.alive:
                        self._deliver(mate, batch_of_l1(changed, self.now))
            self._changes(pod.lower.l2, "")

    def _deliver(self, pod: VirtualPod, batch: Batch) -> None:
        for replica in self.replicas:
            self._at(self.now + self.conditions.event_lag, self._hear, replica, pod, batch)

    def _changes(self, tier: Tier | None, node: str) -> Sequence[Changed]:
        """What a tier has to report; the tier_log will have it as late as the pickers have events."""
        changes = tier.changes() if tier is not None else ()
        if changes:
            self._at(self.now + self.conditions.event_lag, self._note, node, changes)
        return changes

    def _note(self, node: str, changes: Sequence[Changed]) -> None:
        if self._tier_log is not None:
            self._tier_log.note(node, changes)

    def _read(self, replica: Replica) -> None:
        if replica.delivery is not None:
            replica.delivery.read()
            self._at(self.now + replica.delivery.interval, self._read, replica)

    def _hear(self, replica: Replica, pod: VirtualPod, batch: Batch) -> None:
        replica.hear(pod, batch, self.now)

    def _first_token(self, flight: _Flight) -> None:
        if flight.then is not None:
            return
        served = self.served[flight.number]
        served.first, served.cached = self.now, flight.job.cached
        if (prefill := flight.prefilled) is not None:
            served.cached = flight.job.found
            prefill.look(self.now).fetched(flight.job.id)
            self._step_later(prefill)
        served.l1, served.l2 = flight.job.l1, flight.job.l2
        flight.response.status = 200
        self._tell_all(flight, "answered")
        if flight.watched and flight.home >= 0:
            flight.response.first_token_at = self.now
            self._tell_all(flight, "first_token")

    def _finish(self, flight: _Flight) -> None:
        flight.response.complete = True
        if flight.watched:
            job = flight.job
            flight.response.usage = Usage(job.prompt, job.output, job.cached)
        self._tell_all(flight, "finished")
        self._ended(flight.number, failed=False)

    def _tell_all(self, flight: _Flight, what: str) -> None:
        """The replica that chose sees it now, the others after the exchange."""
        if flight.home < 0:
            return
        self._tell(flight.home, flight, what)
        if self.conditions.exchange is not None:
            for peer in range(len(self.replicas)):
                if peer != flight.home:
                    self._at(self.now + self.conditions.exchange, self._tell, peer, flight, what)

    def _tell(self, replica: int, flight: _Flight, what: str) -> None:
        if replica == flight.home:
            scheduler, decision = self.replicas[replica].scheduler, flight.decision
            assert decision is not None
            if what == "answered":
                scheduler.answered(decision, flight.response)
            elif what == "first_token":
                scheduler.first_token(decision)
            else:
                scheduler.finished(decision, flight.response)
            return
        if (adopted := flight.adopted.get(replica)) is None:
            return
        if what == "first_token":
            adopted.first_token()
            return
        for known in [known for known in flight.beside if known[0] == replica]:  # the prefill elsewhere has ended
            flight.beside.remove(known)
            known[1].finished(flight.response)
        if what == "finished":
            del flight.adopted[replica]
            adopted.finished(flight.response)

    def _finish_all(self, flight: _Flight, status: int) -> None:
        flight.response.status = status
        self._tell_all(flight, "finished")

    def _tell_adopted(self, replica: int, flight: _Flight, announced: list[tuple[VirtualPod, bytes]]) -> None:
        ask = self.trace.asks[flight.number]
        for at, (pod, told) in enumerate(announced):
            adopted = self.replicas[replica].adopt(ask, pod, told)
            if adopted is not None and at == 0:
                flight.adopted[replica] = adopted
            elif adopted is not None:
                flight.beside.append((replica, adopted))

    # --- what goes on beside ----------------------------------------------------------------------------------------

    def _scrape(self, replica: Replica, pod: VirtualPod) -> None:
        if pod.alive:
            replica.scraped(pod, pod.load(self.now))
        self._at(self.now + self.conditions.scrape, self._scrape, replica, pod)

    def _fail(self, pod: VirtualPod, share: float) -> None:
        """From now on the pod answers this share of its requests with an error."""
        pod.errors = share

    def _die(self, pod: VirtualPod) -> None:
        """Clients whose answer had begun see it break; the others' gateway finds another pod for them."""
        pod.die(self.now)
        flights, self._flights[pod] = self._flights[pod], {}
        for flight in flights.values():
            if flight.then is not None and flight.then.alive:  # the sidecar has it computed where it is decoded
                self.served[flight.number].prefill = -1
                job = flight.then.add(flight.number, self.trace.asks[flight.number], self.now)
                decoding = replace(flight, pod=flight.then, job=job, response=Response(), then=None)
                self._flights[flight.then][job.id] = decoding
                self._step_later(flight.then)
                continue
            begun = self.served[flight.number].first >= 0
            flight.response.status = 200 if begun else 503
            self._tell_all(flight, "finished")
            if begun:
                self._ended(flight.number, failed=True)
            else:
                self._lost(flight.number)
        for replica in self.replicas:
            self._at(self.now + self.conditions.notice, self._noticed, replica, pod)

    def _revive(self, pod: VirtualPod) -> None:
        pod.revive()
        for replica in self.replicas:
            self._at(self.now + self.conditions.event_lag, self._restarted, replica, pod)
            self._at(self.now + self.conditions.notice, self._noticed, replica, pod)

    def _restarted(self, replica: Replica, pod: VirtualPod) -> None:
        replica.restarted(pod)

    def _noticed(self, replica: Replica, pod: VirtualPod) -> None:
        if pod.alive:
            replica.join(pod, self.now)
        else:
            replica.leave(pod)
