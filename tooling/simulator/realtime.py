"""Runs an engine in real time: one task steps it, sleeps out each step, and wakes those who wait for tokens."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from math import inf
from typing import Any, NamedTuple

from tooling.simulator.engine import Change, Engine, Job, Step, Transfer
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
    keeps: bool = False
    transfer: Transfer | None = None
    """As of `Job`."""
    on_first: Callable[[], None] | None = None
    """Called with its first token."""


class Live:
    """A job whose tokens somebody waits for."""

    __slots__ = ("given", "job", "last_at", "on_first", "reason", "wake")

    def __init__(self, job: Job, reason: str, wake: asyncio.Event, on_first: Callable[[], None] | None) -> None:
        self.job = job
        self.on_first = on_first
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
        self._tasks: asyncio.TaskGroup | None = None

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
                    keeps=order.keeps,
                    transfer=order.transfer,
                )
                self._lives[order.id] = live = Live(job, order.reason, wake, order.on_first)
                lives.append(live)
            self._work.set()
            yield lives
        finally:
            for live in lives:
                if self._lives.pop(live.job.id, None) is not None:
                    self.engine.abort(live.job.id)
                    self._histograms.finished("abort")

    def fetched(self, request_id: str) -> bool:
        """Another engine has what this one keeps of a request, or it is given up."""
        found = self.engine.fetched(request_id)
        self._work.set()
        return found

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something beside, for as long as the engine runs."""
        assert self._tasks is not None
        self._tasks.create_task(work)

    async def run(self) -> None:
        """Step the engine for ever. The owner cancels it."""
        async with asyncio.TaskGroup() as self._tasks:
            await self._steps()

    async def _steps(self) -> None:
        loop = asyncio.get_running_loop()
        at = loop.time()
        while True:
            step = self.engine.step(at)
            if step is None:
                self._work.clear()
                until = None if self.engine.ready_at == inf else max(0.0, self.engine.ready_at - loop.time())
                with suppress(TimeoutError):  # what is fetched from another engine is there
                    await asyncio.wait_for(self._work.wait(), until)
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
            if live.given == 1 and live.on_first is not None:
                live.on_first()
            self._histograms.token(live.job, live.last_at, at, live.given)
            live.last_at = at
            live.wake.set()
            if live.done:
                del self._lives[job.id]
                self._histograms.finished(live.reason)
