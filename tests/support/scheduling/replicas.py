"""Replicas in one process, in virtual time: the real exchange and the real plugins, their frames carried by hand."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from epp.configuration.loader import load_strategy
from epp.plugin import Endpoint, Load, Request, Response
from epp.prefix.approximate import ApproximatePrefixCache
from epp.replicas import wire
from epp.replicas.announcer import Announcer
from epp.replicas.exchange import BEAT, Exchange, SharedPool
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Scheduler
from tests.support.scheduling.schedulers import fail

POOL = "default/llm"
PROMPT = bytes(range(256)) * 16


@dataclass(eq=False)
class Network:
    """Carries frames between replicas in the order they were sent, but those that `loses` says."""

    now: float = 1000.0
    loses: Callable[[bytes], bool] = lambda frame: False
    replicas: dict[str, "Member"] = field(default_factory=dict)
    _on_the_way: deque[tuple[str, str, bytes]] = field(default_factory=deque)

    def clock(self) -> float:
        return self.now

    def deliver(self) -> None:
        """All that is on the way arrives, and what that leads to."""
        while self._on_the_way:
            source, address, frame = self._on_the_way.popleft()
            if not self.loses(frame):
                self.replicas[address].exchange.received(source, frame)

    def run(self, seconds: float) -> None:
        """Time passes. Replicas tick as `ReplicaGroup` has them: ten times as often until they have joined."""
        for step in range(1, round(seconds / BEAT * 10) + 1):
            self.now += BEAT / 10
            for replica in [each for each in self.replicas.values() if each.alive]:
                if step % 10 == 0 or not replica.exchange.joined:
                    replica.exchange.tick()
            self.deliver()

    def send(self, source: str, topic_of: Callable[["Member"], bool], frame: bytes) -> None:
        self._on_the_way.extend(
            (source, address, frame)
            for address, replica in self.replicas.items()
            if replica.alive and topic_of(replica)
        )


class Member:
    """One replica at `address`: a `Link`, the exchange on it, and a scheduler of the default strategy."""

    def __init__(
        self, network: Network, address: str, instance: int = 0, *, pods: int = 4, roles: Sequence[str] = ()
    ) -> None:
        """`roles`: of the pods, instead of so many without any."""
        self.network, self.address, self.alive = network, address, True
        self.degraded: list[str] = []
        self.recovered: list[str] = []
        self._topics: set[tuple[str, bytes]] = set()
        self.endpoints = tuple(
            Endpoint(
                f"default/pod-{n}",
                f"10.0.0.{n}:8000",
                {"llm-d.ai/role": roles[n]} if roles else {},
                load=Load(block_size=16, blocks=10_000, at=network.now),
            )
            for n in range(len(roles) or pods)
        )
        self.ready = True
        instance = instance or len(network.replicas) + 1
        self.exchange = Exchange(instance, self, network.clock, self._report, self.recovered.append)
        pipeline = load_strategy("prefix-aware", clock=network.clock, random=Random(1))
        announcer = Announcer(self.exchange, POOL, lambda *sent: self.scheduler.to_peers(*sent))
        self.scheduler: Scheduler = pipeline.scheduler(wall_clock=network.clock, on_error=fail, others=(announcer,))
        self.exchange.add_pool(SharedPool(POOL, lambda: self.ready, lambda: self.by_name, lambda: self.scheduler))
        network.replicas[address] = self

    def _report(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        self.degraded.append(reason)

    @property
    def by_name(self) -> dict[str, Endpoint]:
        return {endpoint.name: endpoint for endpoint in self.endpoints}

    @property
    def open(self) -> int:
        """Requests that are on its accounts: on those of a plugin that forgets none."""
        return sum(shadow.flights for shadow in self.cache.shadows.values())

    @property
    def cache(self) -> ApproximatePrefixCache:
        return next(each for each in self.scheduler.plugins if isinstance(each, ApproximatePrefixCache))

    def publish(self, frame: bytes) -> None:
        self.network.send(
            self.address,
            lambda other: any(at == self.address and frame.startswith(topic) for at, topic in other._topics),
            frame,
        )

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """There is no event loop to wait for."""
        call()

    def subscribe(self, address: str, topic: bytes) -> None:
        self._topics.add((address, topic))
        peer = self.network.replicas.get(address)
        if peer is not None and peer.alive and len(topic) == wire.TOPIC_BYTES:
            for frame in peer.exchange.snapshot(topic):
                peer.publish(frame)

    def unsubscribe(self, address: str, topic: bytes) -> None:
        self._topics.discard((address, topic))

    async def ask(self, prompt: bytes = PROMPT, **fields: object) -> Decision:
        """A request comes to this replica."""
        request = Request(id="r", model="llama", prompt=prompt, tokens=len(prompt) // 4, stream=True, sees_answer=True)
        return self.scheduler.choose(await self.scheduler.prepare(request), self.endpoints)

    def answer(self, decision: Decision, status: int = 200) -> None:
        """Its answer comes and ends."""
        response = Response(status=status)
        self.scheduler.answered(decision, response)
        if status < 300:
            response.first_token_at = self.network.now
            self.scheduler.first_token(decision)
        self.scheduler.finished(decision, response)

    def chain(self, decision: Decision) -> Sequence[int]:
        """The blocks of a request that came to this replica."""
        return self.cache.chain(decision.request)

    def holds(self, chain: Sequence[int]) -> list[tuple[str, int]]:
        """Which endpoints hold how many blocks of it, as this replica knows."""
        return sorted((e.name, d) for d, mask in self.cache.index.match(chain) for e in self.cache.index.holders(mask))


def together(count: int, roles: Sequence[str] = ()) -> tuple[Network, list[Member]]:
    """A network of replicas that know each other and have joined."""
    network = Network()
    members = [Member(network, f"replica-{n}:9004", roles=roles) for n in range(count)]
    for member in members:
        member.exchange.found(list(network.replicas))
    network.run(2.0)
    assert all(member.exchange.joined for member in members)
    return network, members
