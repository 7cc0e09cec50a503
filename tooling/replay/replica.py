"""One endpoint picker of the replay: the production scheduler, its own view of the pods, its own accounts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, ClassVar, Final, NamedTuple

from msgspec import Raw

from epp import protocol
from epp.configuration.loader import Pipeline
from epp.errors import ConfigError, EppError, NoEndpoint, Rejected
from epp.extproc.stream import Sampler
from epp.flow.control import FlowControl, Later, Outcome
from epp.flow.queues import Entry
from epp.plugin import Endpoint, Load, Plugin, Replicas, Request, Services, Slot
from epp.prefix.events.wire import Batch
from epp.replicas import wire
from epp.replicas.exchange import BEAT
from epp.replicas.unreported import Unreported
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Adopted
from tooling.replay.kv_events import TierLog, at_once, delivery_to, ids_of, tiers_of
from tooling.replay.pod import VirtualPod
from tooling.replay.trace import TraceRequest

Build = Callable[[Callable[[], float], Random], Pipeline]
"""Makes a policy's pipeline from a clock and a source of randomness."""


ASKED: Final = Slot[TraceRequest]()
"""What the trace says of a request, for plugins that may know it."""


@dataclass(frozen=True, kw_only=True)
class VirtualServices(Services):
    """What a replay gives to plugins. `pods`: those behind the endpoints, which no real picker can look into."""

    pods: Mapping[Endpoint, VirtualPod]


class SeesPods(Plugin):
    """A plugin that may look into the pods themselves: no real one can. The oracle is one."""

    sees_pods: ClassVar[bool] = True
    pods: Mapping[Endpoint, VirtualPod]

    def start(self, services: Services) -> None:
        """Raises ConfigError outside of a replay."""
        if not isinstance(services, VirtualServices):
            raise ConfigError(f"plugin {self.name}", "looks into simulated pods; it works in a replay only")
        self.pods = services.pods


class Told(NamedTuple):
    """Which one it is of `total` replicas that tell each other what they pick, `lag` seconds later."""

    number: int = 0
    total: int = 1
    lag: float = 0.0


_ALONE: Final = Told()


class Replica:
    """What `route` drives in production, driven by the replay; nothing in here decides anything."""

    def __init__(
        self,
        build: Build,
        pods: Sequence[VirtualPod],
        clock: Callable[[], float],
        random: Random,
        *,
        watched: float,
        later: Later,
        tier_log: TierLog | None = None,
        told: Told = _ALONE,
    ) -> None:
        self._told = told
        self._clock = clock
        self._elsewhere = Unreported(clock())
        """What the other replicas have sent."""
        pipeline = build(clock, random)
        self.flow: FlowControl | None = None
        """Where the policy has requests wait."""
        if pipeline.flow is not None:
            self.flow = FlowControl(
                pipeline.flow,
                lambda group: self.endpoints,
                lambda group: "no pod is ready",
                later,
                _unwatched,
                _fail,
                clock=clock,
                trusted=True,
            )
        others = () if self.flow is None else (self.flow,)
        self.scheduler = pipeline.scheduler(wall_clock=clock, on_error=_fail, fallbacks=1, others=others)
        self.endpoints: tuple[Endpoint, ...] = ()
        self.endpoint_of: dict[VirtualPod, Endpoint] = {}
        self.pod_of: dict[Endpoint, VirtualPod] = {}
        self._order = list(pods)
        self._sampler: Sampler | None = None
        """None: all answers are shown."""
        if watched < 1:
            self._sampler = Sampler(watched, clock, random)
            self._sampler.shown()  # the gateway shows what it is asked for
        self.services = VirtualServices(
            endpoints=lambda: self.endpoints,
            for_each_endpoint=_never,
            tokens=ids_of,
            samples=_nowhere,
            degraded=_unreported,
            recovered=lambda reason: None,
            wall_clock=clock,
            engine_of=pipeline.engines.of,
            replicas=lambda: Replicas(told.number, told.total, self._elsewhere.requests),
            instead=tiers_of(tier_log),
            pods=self.pod_of,
        )
        for plugin in pipeline.plugins:  # started, not run: what `run` would hear from outside is delivered here
            plugin.start(self.services)
        self.delivery = delivery_to(pipeline.plugins, tier_log)
        for pod in pods:
            self.join(pod, clock())

    def join(self, pod: VirtualPod, now: float) -> None:
        """The pod is ready: it is an endpoint from now on, a new one if it was one before."""
        if pod in self.endpoint_of:
            return
        number = self._order.index(pod)
        endpoint = Endpoint(
            f"default/{pod.name}",
            f"10.0.{number >> 8}.{number & 255}:8000",
            {"kind": pod.kind.name} | ({protocol.ROLE_LABEL: pod.role} if pod.role else {}),
            pod.load(now),
            pod.node,
        )
        self.endpoint_of[pod] = endpoint
        self.pod_of[endpoint] = pod
        if self.delivery is not None:
            self.delivery.join(endpoint)
        self._arrange()

    def leave(self, pod: VirtualPod) -> None:
        """The pod was found not ready."""
        endpoint = self.endpoint_of.pop(pod, None)
        if endpoint is not None:
            self._arrange()
            self.scheduler.removed(endpoint)
            del self.pod_of[endpoint]

    def scraped(self, pod: VirtualPod, load: Load) -> None:
        if (endpoint := self.endpoint_of.get(pod)) is not None:
            endpoint.load = load
            self.scheduler.scraped(endpoint)
            if self.flow is not None:
                self.flow.changed()

    def hear(self, pod: VirtualPod, batch: Batch, now: float) -> None:
        """The pod's KV events arrive."""
        if self.delivery is not None and (endpoint := self.endpoint_of.get(pod)) is not None:
            self.delivery.hear(endpoint, batch, now)

    def restarted(self, pod: VirtualPod) -> None:
        """The pod's KV events begin anew."""
        if self.delivery is not None and (endpoint := self.endpoint_of.get(pod)) is not None:
            self.delivery.restarted(endpoint)

    def request(self, number: int, ask: TraceRequest) -> Request:
        """A request as the parser would have made it of the client's, its prefix chain known."""
        sampler = self._sampler
        shown = sampler is None or sampler.wants()
        request = Request(
            id=str(number),
            model=ask.adapter or "sim",
            prompt=ask.bytes(),
            tokens=ask.tokens,
            stream=True,
            headers=_headers(ask),
            priority=ask.priority,
            slo=ask.slo,
            sees_answer=shown,
            watched="" if sampler is None or not shown else "sampled",
            watchable=0.0 if sampler is None or shown else sampler.beside,
        )
        ASKED.set(request, ask)
        return at_once(self.scheduler.prepare(request))

    def choose(self, number: int, ask: TraceRequest) -> Decision:
        """Pick and account, as production does without flow control."""
        return self.scheduler.choose(self.request(number, ask), self.endpoints)

    def enter(
        self,
        number: int,
        ask: TraceRequest,
        decided: Callable[[Decision], None],
        refused: Callable[[EppError], None],
    ) -> None:
        """The same, at once or when flow control lets the request go."""
        if self.flow is None:
            try:
                decision = self.choose(number, ask)
            except (NoEndpoint, Rejected) as error:
                refused(error)
            else:
                decided(decision)
            return
        request, flow = self.request(number, ask), self.flow
        entry = Entry(
            request,
            None,
            len(request.prompt),
            self.scheduler.look,
            self.scheduler.stages,
            lambda endpoints: decided(self.scheduler.choose(entry.ready(flow.clock()), endpoints)),
            refused,
        )
        try:
            self.flow.enter(entry)
        except EppError as error:
            refused(error)

    def announce(self, number: int, decision: Decision) -> list[tuple[VirtualPod, bytes]]:
        """What the other replicas are told of a decision, as it goes over their connection in production: of each
        endpoint that got a part, the decode first.
        """
        return [
            (
                self.pod_of[endpoint],
                wire.encode(wire.decided(number, "sim", request, endpoint, self.scheduler.to_peers(request, endpoint))),
            )
            for request, endpoint in ((decision.request, decision.endpoint), *decision.parts)
        ]

    def adopt(self, ask: TraceRequest, pod: VirtualPod, announced: bytes) -> Adopted | None:
        """Another replica has sent this request to `pod`; None if that is no endpoint here."""
        endpoint, now = self.endpoint_of.get(pod), self._clock()
        self._elsewhere.add()
        if now - self._elsewhere.looked >= BEAT:
            self._elsewhere.look(self._told.lag, now)
        if endpoint is None:
            return None
        sent = wire.decode_decided(Raw(announced))
        request = wire.request_of(sent, str(sent.number))
        ASKED.set(request, ask)
        return self.scheduler.adopt(request, endpoint, sent.states)

    def _arrange(self) -> None:
        self.endpoints = tuple(self.endpoint_of[pod] for pod in self._order if pod in self.endpoint_of)
        if self.flow is not None:
            self.flow.endpoints_changed()


def _headers(ask: TraceRequest) -> dict[str, str]:
    """What a client would send."""
    # At least a nanosecond: 0 would stand for no limit.
    ttl = "" if ask.ttl is None else f"{max(1, round(ask.ttl * 1e9))}ns"
    said = {protocol.SESSION_ID: ask.session, protocol.FAIRNESS_ID[0]: ask.tenant, protocol.REQUEST_TTL: ttl}
    return {name: value for name, value in said.items() if value}


def _unwatched(fairness_id: str, priority: int, outcome: Outcome, seconds: float, model: str) -> None:
    """The replay measures waits itself."""


async def _nowhere(address: str, path: str, metric: str) -> Sequence[tuple[Mapping[str, str], float]]:
    raise OSError("virtual pods have no pages")


async def _never(*what: Any) -> None:
    """Virtual time has no tasks."""
    raise ConfigError("policy", "a plugin has work for each endpoint; such a plugin cannot be replayed")


def _unreported(reason: str, detail: str = "", *, lasting: bool = False) -> None:
    """A replay reports what became of the requests, not how."""


def _fail(plugin: str, error: Exception) -> None:
    """Production counts a broken plugin and goes on; whoever replays one wants to know."""
    raise ConfigError(f"plugin {plugin}", f"{type(error).__name__}: {error}") from error
