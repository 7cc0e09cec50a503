"""What replicas cost each other: a request of one's own, telling of it, and taking in a peer's, in CPU time.

In process, in turns, on the real objects: a request is routed (parsed, chosen, put on account, recorded, ended) as the
ext_proc server has it done, whose own work for each request comes on top of that and is not in these figures.
"""

import argparse
import asyncio
import json
import time
from collections import deque
from collections.abc import Callable
from random import Random

from epp.admin.recorder import Decisions, Recorder
from epp.configuration.loader import load_strategy
from epp.parsing.parser import Parser
from epp.parsing.request import RawRequest
from epp.plugin import Endpoint, Load
from epp.pool.store import Pool
from epp.prefix.token_ratio import TokenRatio
from epp.process.memory import rarely_collect
from epp.replicas import wire
from epp.replicas.announcer import Announcer
from epp.replicas.exchange import Exchange, SharedPool
from epp.route import Admission, Policy, Router
from epp.telemetry.metrics import Metrics

NAME = "default/llm"
BATCH = 50


class Kept:
    """Keeps what is published."""

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()

    def publish(self, frame: bytes) -> None:
        self.frames.append(frame)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """There is no event loop to wait for: the benchmark flushes."""

    def subscribe(self, address: str, topic: bytes) -> None:
        """There is no wire."""

    def unsubscribe(self, address: str, topic: bytes) -> None:
        """There is no wire."""


class Replica:
    """A router with or without an exchange beside it."""

    def __init__(self, endpoints: int, instance: int, *, tells: bool) -> None:
        self.kept = Kept()
        pool = Pool("llm", random=Random(1))
        load = Load(block_size=16, blocks=31_250, at=time.monotonic())
        pool.replace(
            [Endpoint(f"default/pod-{n}", f"10.0.{n >> 8}.{n & 255}:8000", load=load) for n in range(endpoints)]
        )
        self.exchange = Exchange(instance, self.kept, time.monotonic, _fail, lambda reason: None)
        pipeline = load_strategy("prefix-aware", clock=time.monotonic, random=Random(1))
        ratio = TokenRatio()
        announcer = Announcer(self.exchange, NAME, lambda *sent: self.scheduler.to_peers(*sent))
        self.scheduler = pipeline.scheduler(
            wall_clock=time.monotonic, on_error=_raise, others=(ratio.learner(), *([announcer] if tells else []))
        )
        self.exchange.add_pool(SharedPool(NAME, lambda: True, lambda: pool.by_name, lambda: self.scheduler))
        policy = Policy(Admission(pipeline.detector), self.scheduler)
        observer = Recorder(
            "llm", Metrics(time.monotonic), Decisions(), None, clock=time.monotonic, wall_clock=time.monotonic
        )
        pool.ready = True
        pool._first.set()
        self.router = Router(pool, Parser(pool, ratio.tokens, trusted=False), policy, observer, time.monotonic)

    async def serve(self, raw: RawRequest) -> None:
        async with self.router.route(raw) as routed:
            routed.answered(200, "", "text/event-stream")
            routed.answer_chunk(b'data: {"choices": [{"text": "a"}]}\n\n', end=False)
            routed.answer_chunk(b"data: [DONE]\n\n", end=True)


def _fail(reason: str, detail: str = "", *, lasting: bool = False) -> None:
    raise RuntimeError(f"{reason}: {detail}")


def _raise(plugin: str, error: Exception) -> None:
    raise error


def requests(size: int, random: Random) -> list[RawRequest]:
    """Chats of `size` bytes that share a system prompt of half their size."""
    shared = "".join(random.choices("abcdefgh ", k=size // 2))
    made = []
    for _ in range(BATCH):
        own = "".join(random.choices("abcdefgh ", k=size // 2))
        messages = [{"role": "system", "content": shared}, {"role": "user", "content": own}]
        body = json.dumps({"model": "llama", "stream": True, "messages": messages}).encode()
        made.append(RawRequest("POST", "/v1/chat/completions", {}, body, sees_answer=True))
    return made


async def compare(size: int, endpoints: int, rounds: int) -> list[float]:
    """Microseconds a request: routed alone, routed and told, taken in; and bytes told. The least of the rounds counts:
    what else runs on the machine only adds.
    """
    random = Random(size)
    alone, telling = (Replica(endpoints, n, tells=n == 2) for n in (1, 2))
    taking = Replica(endpoints, 3, tells=True)
    taking.exchange.found(["peer:1"])
    figures: list[list[float]] = [[], [], [], []]
    for _ in range(rounds):
        batch = requests(size, random)
        for column, replica in enumerate((alone, telling)):
            start = time.process_time()
            for raw in batch:
                await replica.serve(raw)
                replica.exchange.flush()
            figures[column].append((time.process_time() - start) / BATCH * 1e6)
        frames = [*telling.kept.frames]
        telling.kept.frames.clear()
        start = time.process_time()
        for frame in frames:
            taking.exchange.received("peer:1", frame)
        figures[2].append((time.process_time() - start) / BATCH * 1e6)
        figures[3].append(sum(map(len, frames)) / BATCH)
        taking.kept.frames.clear()
    assert taking.exchange.counts["received"] == BATCH * rounds, "decision, first token and end in one frame"
    return [min(column[1:]) for column in figures]


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench replicas", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    rarely_collect()  # as `warmpath serve` does
    print("prompt  endpoints   routed  + told  taken in  of routed   bytes")
    for size in (2 << 10, 32 << 10, 256 << 10):
        for endpoints in (8, 64):
            routed, told, taken, sent = asyncio.run(compare(size, endpoints, options.rounds))
            shown = f"{size >> 10:4d} KB  {endpoints:9d}  {routed:4.0f} us  {told - routed:3.0f} us  {taken:5.1f} us"
            print(f"{shown}  {taken / routed:8.0%}  {sent:6.0f}")
    print(f"frames are at most {wire.MAX_FRAME >> 10} KB; the ext_proc server's own work comes on top of `routed`")


if __name__ == "__main__":
    main()
