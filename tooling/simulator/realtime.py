"""Runs an engine in real time: one task steps it, sleeps out each step, and wakes those who wait for tokens."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from tooling.simulator.engine import Change, Engine, Job, Step
from tooling.simulator.metrics import Histograms

CATCH_UP = 0.25
"""Seconds the engine may lag behind the clock and still make up for it; beyond, the lag is forgotten."""


class Order(NamedTuple):
    """One sequence to be generated."""

    id: str
    hashes: Sequence[int]
    prompt: int
    """Tokens."""
    output: int
    """Tokens."""
    reason: str = "stop"
    """Why it will end there, for the metrics."""
    about: Any = None
    """What `Job.about` is to be."""


class Live:
    """A job whose tokens somebody waits for."""

    __slots__ = ("given", "job", "last_at", "reason", "wake")

    def __init__(self, job: Job, reason: str, wake: asyncio.Event) -> None:
        self.job = job
        self.reason = reason
        self.given = 0
        """Tokens whose time has come; `job.generated` runs ahead by the step in progress."""
        self.last_at = job.arrived_at
        self.wake = wake
        """Set at each new token; one request's jobs share it."""

    @property
    def done(self) -> bool:
        return self.given == self.job.output


class RealTimeEngine:
    """The engine's clock. `pace` is real seconds per second of the engine's step times."""

    def __init__(self, engine: Engine, histograms: Histograms, pace: float) -> None:
        self.engine = engine
        self.slow = 1.0
        """Factor on all step times, for faults."""
        self.on_changes: Callable[[Sequence[Change]], None] | None = None
        """Called with what became of the prefix cache at the end of a step that changed it, just before its tokens
        come.
        """
        self._pace = pace
        self._histograms = histograms
        self._lives: dict[str, Live] = {}
        self._work = asyncio.Event()

    @property
    def live(self) -> int:
        """Requests in the engine whose tokens somebody waits for."""
        return len(self._lives)

    @contextmanager
    def serve(self, orders: Sequence[Order], adapter: str) -> Iterator[list[Live]]:
        """Put one request's orders into the engine; on leaving, take out what is not done. Raises as `Engine.add`."""
        now = asyncio.get_running_loop().time()
        wake = asyncio.Event()
        lives: list[Live] = []
        try:
            for order in orders:
                job = self.engine.add(
                    order.id,
                    order.hashes,
                    prompt=order.prompt,
                    output=order.output,
                    now=now,
                    adapter=adapter,
                    about=order.about,
                )
                self._lives[order.id] = live = Live(job, order.reason, wake)
                lives.append(live)
            self._work.set()
            yield lives
        finally:
            for live in lives:
                if self._lives.pop(live.job.id, None) is not None:
                    self.engine.abort(live.job.id)
                    self._histograms.finished("abort")

    async def run(self) -> None:
        """Step the engine for ever. The owner cancels it."""
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            step = self.engine.step(at)
            if step is None:
                self._work.clear()
                await self._work.wait()
                at = loop.time()
                continue
            at += step.duration * self._pace * self.slow
            await asyncio.sleep(max(0.0, at - loop.time()))
            self._deliver(step, at)
            if loop.time() - at > CATCH_UP:
                at = loop.time()

    def _deliver(self, step: Step, at: float) -> None:
        if self.on_changes is not None and (changes := self.engine.changes()):
            self.on_changes(changes)
        for job in step.tokens:
            live = self._lives.get(job.id)
            if live is None:  # aborted while the step ran
                continue
            live.given += 1
            self._histograms.token(live.job, live.last_at, at, live.given)
            live.last_at = at
            live.wake.set()
            if live.done:
                del self._lives[job.id]
                self._histograms.finished(live.reason)
