"""What choosing costs by the number of endpoints: CPU of signals, bills and accounts of one request, in process.

Every request is prepared beforehand; measured are the choice, its first token and its end. In `idle` a request ends
before the next; in `serving` each endpoint has eight in flight, one in four of them without a first token yet; in
`shared` too, and all prompts begin with the same 4 KB, which every endpoint holds; in `adapters` each asks for one of
200 LoRA adapters, of which four fit into an endpoint.
"""

import argparse
import asyncio
import time
from collections import Counter, deque
from random import Random
from statistics import median
from typing import NamedTuple

from epp.configuration.loader import load_strategy
from epp.parsing.request import Request, Response
from epp.plugin import Endpoint, Load
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Scheduler
from epp.testing import services

IN_FLIGHT = 8
BATCH = 100
ENDED = Response(status=200, complete=True)


class State(NamedTuple):
    """What a pool is like. `shared`: bytes that all prompts have in common; `adapters`: how many are asked for."""

    name: str
    in_flight: int
    shared: int = 0
    adapters: int = 0


STATES = (
    State("idle", 0),
    State("serving", IN_FLIGHT),
    State("shared", IN_FLIGHT, 4096),
    State("adapters", IN_FLIGHT, 0, 200),
)


class PoolUnderTest:
    """A pool that serves, on a clock of its own: a request comes every `1 / (endpoints / 2)` s, as half a request a
    second and endpoint.
    """

    def __init__(self, endpoints: int, state: State) -> None:
        self.now = 100.0
        self._state = state
        self._random = Random(endpoints)
        self._shared = self._random.randbytes(state.shared // 2).hex().encode()
        self.endpoints = tuple(
            Endpoint(f"default/pod-{n:04}", f"10.0.{n >> 8}.{n & 255}:8000", load=self._load(0))
            for n in range(endpoints)
        )
        pipeline = load_strategy("prefix-aware", clock=lambda: self.now, random=Random(1))
        self.scheduler: Scheduler = pipeline.scheduler(wall_clock=lambda: self.now, on_error=_raise)
        for plugin in pipeline.plugins:
            plugin.start(services(self.endpoints))
        self._queued: deque[Decision] = deque()
        self._open: deque[Decision] = deque()
        self._running = Counter[Endpoint]()
        self._scraped = 0
        self._sent = 0

    async def batch(self) -> list[Request]:
        return [await self.scheduler.prepare(self._request()) for _ in range(BATCH)]

    def serve(self, requests: list[Request]) -> None:
        """Choose for each; let as many go on and end as the state says."""
        scheduler, state = self.scheduler, self._state
        open_ = state.in_flight * len(self.endpoints)
        for request in requests:
            self.now += 2 / len(self.endpoints)
            self._scrape()
            decision = scheduler.choose(request, self.endpoints)
            self._running[decision.endpoint] += 1
            self._queued.append(decision)
            while len(self._queued) > open_ // 4:
                decision = self._queued.popleft()
                scheduler.first_token(decision)
                self._open.append(decision)
            while len(self._queued) + len(self._open) > open_:
                decision = self._open.popleft()
                self._running[decision.endpoint] -= 1
                scheduler.finished(decision, ENDED)

    def _request(self) -> Request:
        self._sent += 1
        own = self._random.randbytes(1024).hex().encode()
        prompt = self._shared + own
        return Request(
            id=str(self._sent),
            model=self._model(),
            prompt=prompt,
            tokens=len(prompt) // 4,
            stream=True,
            sees_answer=True,
        )

    def _model(self) -> str:
        return f"adapter-{self._random.randrange(self._state.adapters)}" if self._state.adapters else "llama"

    def _scrape(self) -> None:
        """Every endpoint once a second: two of them between two requests."""
        for _ in range(2):
            self._scraped = (self._scraped + 1) % len(self.endpoints)
            endpoint = self.endpoints[self._scraped]
            endpoint.load = self._load(self._running[endpoint])
            self.scheduler.scraped(endpoint)

    def _load(self, running: int) -> Load:
        waiting = frozenset({self._model()}) if self._state.adapters else frozenset()
        slots = 4 if self._state.adapters else 0
        return Load(running=running, block_size=16, blocks=31_250, lora_max=slots, lora_waiting=waiting, at=self.now)


def _raise(plugin: str, error: Exception) -> None:
    raise error


def measure(endpoints: int, state: State, rounds: int) -> float:
    """Median microseconds of CPU a request."""
    pool = PoolUnderTest(endpoints, state)
    warm = max(3, -(-2 * endpoints * max(1, state.in_flight) // BATCH))
    found = []
    for turn in range(warm + rounds):
        requests = asyncio.run(pool.batch())
        start = time.process_time()
        pool.serve(requests)
        if turn >= warm:
            found.append((time.process_time() - start) / BATCH * 1e6)
    return median(found)


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench choose", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--endpoints", type=int, nargs="*", default=[8, 64, 256, 1000])
    options = parser.parse_args()
    print("pool     " + "".join(f"{count:>7} endpoints" for count in options.endpoints) + "   last to first")
    for state in STATES:
        figures = [measure(count, state, options.rounds) for count in options.endpoints]
        cells = "".join(f"{figure:14.1f} us" for figure in figures)
        print(f"{state.name:9}{cells}{figures[-1] / figures[0]:15.2f}", flush=True)


if __name__ == "__main__":
    main()
