"""A simulated pod in virtual time: an engine that is stepped, or leaps over steps in which it only decodes."""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from math import inf
from typing import Final

from epp.plugin import Load
from epp.prefix.tokens.block_hashes import chain_of_tokens
from tooling.replay.trace import TraceRequest
from tooling.simulator.engine import Engine, Job, Step, Transfer
from tooling.simulator.presets import PodKind
from tooling.simulator.tiers import CHUNK, Lower

_WATCHED_LEAP: Final = 16
"""Steps; an engine reports each one when it ends, so what is reported at the end of a leap must not be old by then."""


class VirtualPod:
    """One pod. `due` is when its step in progress ends, or the last of a leap; inf while it has nothing to do.

    The driver calls `end` at `due`, then `begin`; `add` in between keeps all steps that have begun, as a real engine
    does. Times given never go back.
    """

    def __init__(self, name: str, kind: PodKind, node: str = "", lower: Lower | None = None, *, role: str = "") -> None:
        self.name = name
        self.kind = kind
        self.role = role
        """Its label `llm-d.ai/role`; "" where it has none."""
        self.node = node
        """Whose memory is its L1; "" where no lower tiers are simulated."""
        self.lower = lower
        self.engine = Engine(kind.parameters, lower)
        self._watched = False
        self.alive = True
        self.errors = 0.0
        """Share of its requests that it answers with an error at once."""
        self.due = inf
        self.busy = 0.0
        """Seconds in which a step was in progress."""
        self._preempted = 0
        self._step: Step | None = None
        self._ends: Sequence[float] = ()
        """Ends of a leap's steps; those before `_done` are done in the engine. Neither that nor a step: while `due` is
        finite, all it does is to wait for what is being loaded."""
        self._done = 0

    def watch(self) -> None:
        """Have its engines write down what becomes of their prefix caches."""
        self._watched = True
        self.engine.watch()
        for tier in (self.lower.l1, self.lower.l2) if self.lower is not None else ():
            if tier is not None:
                tier.watch()

    def begin(self, now: float) -> None:
        """Start the next step, or leap, if there is anything to do."""
        self._ends = self.engine.leap(now, _WATCHED_LEAP) if self._watched else self.engine.leap(now)
        if self._ends:
            self._done = 0
            self.due = self._ends[-1]
        elif (step := self.engine.step(now)) is not None:
            self._step = step
            self.due = step.ends_at
        else:
            self.due = self.engine.ready_at
            return
        self.busy += self.due - now

    def end(self) -> Step | None:
        """What the step that ends at `due` has done; None after a leap, in which nothing happens but decoding."""
        if self._ends:
            self._commit(len(self._ends))
            self._ends = ()
        step, self._step = self._step, None
        self.engine.settle()
        return step

    def add(
        self, number: int, ask: TraceRequest, now: float, *, prefills: bool = False, transfer: Transfer | None = None
    ) -> Job:
        """Queue a request; it is looked at when the step in progress ends. Raises NeverFits.

        `prefills`: its prompt alone, which is kept for another pod. `transfer`: it comes from another pod.
        """
        engine, size = self.look(now), self.kind.parameters.block_size
        about = ask.ids() if self._watched else None
        chunks = () if self.lower is None else self.chunks(ask) if about is None else _named(about, ask)
        job = engine.add(
            str(number),
            ask.chain(size),
            prompt=ask.tokens,
            output=1 if prefills else ask.output,
            now=now,
            adapter=ask.adapter,
            about=about,
            chunks=chunks,
            keeps=prefills,
            transfer=transfer,
        )
        if self._step is None and not self._ends and self.due < inf:
            self.due = now
        if self._ends:
            begun = self._ends[: self._done]
            self.busy -= self.due - begun[-1]
            self._ends, self.due = begun, begun[-1]
        return job

    def chunks(self, ask: TraceRequest) -> Sequence[int]:
        """Names of a prompt's full chunks: where somebody listens, those he would make of its tokens."""
        return _named(ask.ids(), ask) if self._watched else ask.chain(CHUNK)[: ask.tokens // CHUNK]

    def look(self, now: float) -> Engine:
        """The engine as it is `now`, with all steps done that have begun."""
        if self._ends:
            self._commit(1 + bisect_left(self._ends, now, 0, len(self._ends) - 1))
        return self.engine

    def load(self, now: float) -> Load:
        """What a scrape of its metrics says. A step is counted when it ends; the engine has it done when it begins."""
        engine, parameters = self.look(now), self.kind.parameters
        totals, step = engine.totals, self._step
        first = () if step is None else step.first
        return Load(
            waiting=len(engine.waiting),
            running=len(engine.running),
            kv_usage=engine.kv_usage,
            block_size=parameters.block_size,
            blocks=parameters.blocks,
            prefix_queries=totals.prefix_queries,
            prefix_hits=totals.prefix_hits,
            prompt_tokens=totals.prompt_tokens,
            first_tokens=totals.first_tokens - len(first),
            computed_tokens=totals.computed_tokens - sum(job.prompt - job.cached for job in first),
            generated_tokens=totals.generation_tokens - (0 if step is None else len(step.tokens)),
            steps=totals.steps - (step is not None),
            lora_running=_adapters(engine.running),
            lora_waiting=_adapters(engine.waiting),
            lora_max=parameters.adapter_slots if totals.adapters_loaded else 0,
            at=now,
        )

    def die(self, now: float) -> None:
        """Everything in it is lost, but not what is in its node's memory; its counters are at 0 when it is back."""
        self.alive = False
        if self._step is not None or self._ends:
            self.busy -= self.due - now
        self._step, self._ends, self.due = None, (), inf
        self._preempted = self.preemptions
        self.engine = Engine(self.kind.parameters, self.lower)
        if self._watched:
            self.engine.watch()

    @property
    def preemptions(self) -> int:
        """Since the replay began, restarts or not."""
        return self._preempted + self.engine.totals.preemptions

    def revive(self) -> None:
        """It is back, with empty memory."""
        self.alive = True

    def _commit(self, count: int) -> None:
        if count > self._done:
            self.engine.leapt(count - self._done)
            self._done = count


def _adapters(jobs: Iterable[Job]) -> frozenset[str]:
    return frozenset(job.adapter for job in jobs if job.adapter)


def _named(ids: "array[int]", ask: TraceRequest) -> Sequence[int]:
    return chain_of_tokens(ids[: ask.tokens], CHUNK)
