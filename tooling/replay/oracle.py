"""`oracle`: a plain form of the default's formula, on what is really in the pods instead of what a picker can know.

It shows how much of a policy's waiting comes from not knowing. It is no upper bound in the strict sense: a better
formula can beat it, and the default's, which looks further than the pods' present state, does so in places. Like the
default it counts a prefill in progress as a whole until its first token: the rest of a prompt shares its last step with
whoever comes next, so that the time a prefill has had says little of the time it still takes.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple

from epp.plugin import Cost, Endpoint, Request, Response, Slot
from tooling.replay.pod import VirtualPod
from tooling.replay.replica import ASKED, SeesPods
from tooling.replay.trace import TraceRequest
from tooling.simulator.engine import EngineParameters

_G = 2.0
_S = 0.03
_WEIGHT = 0.02


class _Sent(NamedTuple):
    ask: TraceRequest
    tokens: int
    """It needs memory for."""
    work: float
    """Seconds."""


@dataclass(eq=False)
class Oracle(Cost, SeesPods):
    """What is own, shared, stalled and crowded, with every account true: the pod's queue, cache, memory and speed."""

    terms: ClassVar[tuple[str, ...]] = ("pending", "own", "shared", "stall", "crowd", "memory")

    residence: float = 10.0
    """Seconds a request stays at a pod, until the first have been seen."""

    _sent: dict[Endpoint, "OrderedDict[str, _Sent]"] = field(default_factory=dict, init=False, repr=False)
    """By endpoint, in order: requests in flight there."""
    _billed: Slot[dict[Endpoint, tuple[int, float]]] = field(default_factory=Slot, init=False, repr=False)
    """Tokens and seconds of work that a request would be, by endpoint."""
    _picked_at: Slot[float] = field(default_factory=Slot, init=False, repr=False)

    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        ask = _asked(request)
        billed = self._billed.set(request, {})
        now = self.clock()
        rows = []
        chains: dict[int, list[int]] = {}
        chunks: Sequence[int] | None = None
        for endpoint in endpoints:
            pod = self.pods[endpoint]
            parameters = pod.kind.parameters
            size = parameters.block_size
            if size not in chains:
                chains[size] = ask.chain(size)
            u = self._uncached(ask, chains[size], endpoint, now)
            if pod.lower is None:
                work = _work(parameters, u, ask.tokens)
            else:
                if chunks is None:
                    chunks = pod.chunks(ask)
                load = pod.look(now).load(chunks, ask.tokens - u, ask.tokens, now)
                work = load.seconds + _work(parameters, ask.tokens - load.end, ask.tokens)
            rows.append(self._row(pod, parameters, endpoint, u, work, now))
            billed[endpoint] = u, work
        return rows

    def _row(
        self, pod: VirtualPod, parameters: EngineParameters, endpoint: Endpoint, u: int, work: float, now: float
    ) -> tuple[float, ...]:
        engine = pod.look(now)
        pending, needed, decodes, context = 0.0, u, 0, 0
        sent = self._sent.get(endpoint, OrderedDict())
        for job in engine.waiting:
            if job.id in sent:
                _, own, seconds = sent[job.id]
            else:
                own, seconds = job.prompt, _work(parameters, job.prompt, job.prompt)
            pending += seconds
            needed += own
        for job in engine.running:
            if job.first_token_at is not None and job.first_token_at <= now:
                decodes += 1
                context += job.computed
            else:
                pending += _work(parameters, job.prompt - job.cached, job.prompt)
        stall = _S * decodes * work
        step = parameters.base + parameters.per_decode * decodes + parameters.per_context_token * context
        crowd = step / (parameters.linear * parameters.max_batched_tokens)
        over = needed - engine.free_blocks * parameters.block_size
        memory = over / parameters.capacity * self.residence if over > 0 else 0.0
        shared = (_G - 1) * work
        return pending, work, shared, stall, crowd * (pending + work + shared + stall), memory

    def _uncached(self, ask: TraceRequest, chain: Sequence[int], endpoint: Endpoint, now: float) -> int:
        """Tokens it would have to compute there: what is neither cached nor in the prompt of one in flight."""
        pod = self.pods[endpoint]
        size = pod.kind.parameters.block_size
        cached = pod.look(now).cached_blocks(chain, (ask.tokens - 1) // size) * size
        ids = {piece.id for piece in ask.prompt}
        for other, _, _ in self._sent.get(endpoint, {}).values():
            if other.prompt[0].id in ids:
                cached = max(cached, _common(ask, other))
        return ask.tokens - min(cached, (ask.tokens - 1) // size * size)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if (found := (self._billed.get(request) or {}).get(endpoint)) is None:
            n = request.tokens
            found = n, _work(self.pods[endpoint].kind.parameters, n, n)
        u, work = found
        self._sent.setdefault(endpoint, OrderedDict())[request.id] = _Sent(_asked(request), u, work)
        self._picked_at.set(request, self.clock())

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self._sent[endpoint].pop(request.id, None)
        if response.complete:
            self.residence += _WEIGHT * (self.clock() - (self._picked_at.get(request) or 0.0) - self.residence)


def _asked(request: Request) -> TraceRequest:
    ask = ASKED.get(request)
    assert ask is not None, "a request that no replay made"
    return ask


def _work(parameters: EngineParameters, u: int, n: int) -> float:
    return parameters.linear * u + parameters.attention * u * (n - 0.5 * u)


def _common(one: TraceRequest, other: TraceRequest) -> int:
    """Tokens both prompts begin with."""
    tokens = 0
    for mine, its in zip(one.prompt, other.prompt, strict=False):
        if mine.id != its.id:
            break
        tokens += min(mine.tokens, its.tokens)
    return tokens
