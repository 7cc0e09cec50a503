"""One endpoint picker of the replay: the production scheduler, its own view of the pods, its own accounts."""

from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import ClassVar

from epp.configuration.loader import Pipeline
from epp.errors import ConfigError
from epp.plugin import Endpoint, Load, Plugin, Request
from epp.prefix.events.wire import Batch
from epp.scheduling.decision import Chain, Decision
from epp.scheduling.scheduler import Scheduler
from tooling.replay.kv_events import TierLog, at_once, delivery_to
from tooling.replay.pod import VirtualPod
from tooling.replay.trace import TraceRequest

Build = Callable[[Callable[[], float], Random], Pipeline]
"""Makes a policy's pipeline from a clock and a source of randomness."""


class SeesPods(Plugin):
    """A plugin that may look into the pods themselves: no real one can. The oracle is one."""

    sees_pods: ClassVar[bool] = True
    pods: Mapping[Endpoint, VirtualPod]
    """Set by the replica."""


class Replica:
    """What `route` drives in production, driven by the replay; nothing in here decides anything."""

    def __init__(
        self,
        build: Build,
        pods: Sequence[VirtualPod],
        clock: Callable[[], float],
        random: Random,
        *,
        sees_answer: bool,
        tier_log: TierLog | None = None,
    ) -> None:
        pipeline = build(clock, random)
        self.scheduler = Scheduler(
            pipeline.producers,
            {name: Chain(name, p.filters, p.scorers, p.picker) for name, p in pipeline.profiles.items()},
            pipeline.handler,
            pipeline.plugins,
            wall_clock=clock,
            on_error=_fail,
            fallbacks=1,
        )
        self.endpoints: tuple[Endpoint, ...] = ()
        self.endpoint_of: dict[VirtualPod, Endpoint] = {}
        self.pod_of: dict[Endpoint, VirtualPod] = {}
        self._order = list(pods)
        self._sees_answer = sees_answer
        for plugin in pipeline.plugins:
            if isinstance(plugin, SeesPods):
                plugin.pods = self.pod_of
        self.delivery = delivery_to(pipeline.plugins, clock, tier_log)
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
            {"kind": pod.kind.name},
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
        request = Request(
            id=str(number),
            model="sim",
            prompt=ask.bytes(),
            tokens=ask.tokens,
            stream=True,
            headers={"x-session-id": ask.session} if ask.session else {},
            sees_answer=self._sees_answer,
            notes={TraceRequest: ask},
        )
        at_once(self.scheduler.prepare(request))
        return request

    def choose(self, number: int, ask: TraceRequest) -> Decision:
        """Pick and account, as production does."""
        return self.scheduler.choose(self.request(number, ask), self.endpoints)

    def adopt(self, number: int, ask: TraceRequest, pod: VirtualPod) -> Decision | None:
        """Another replica has sent this request to `pod`; None if that is no endpoint here."""
        endpoint = self.endpoint_of.get(pod)
        return None if endpoint is None else self.scheduler.adopt(self.request(number, ask), endpoint)

    def _arrange(self) -> None:
        self.endpoints = tuple(self.endpoint_of[pod] for pod in self._order if pod in self.endpoint_of)


def _fail(plugin: str, error: Exception) -> None:
    """Production counts a broken plugin and goes on; whoever replays one wants to know."""
    raise ConfigError(f"plugin {plugin}", f"{type(error).__name__}: {error}") from error
