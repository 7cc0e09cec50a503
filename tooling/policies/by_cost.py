"""Policies with a cost for each endpoint, lowest wins: NVIDIA Dynamo's KV router, LMetric."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from epp.plugin import Endpoint, InFlight, PrefixMatch, Request, Response, Scorer, Slot, least
from tooling.policies.sent_prompts import chain_of

_CUT: Final = 4
"""Of Dynamo's blocks: prompts in flight are distinguished in steps of so many."""

_NOTHING: Final[Counter[int]] = Counter()


@dataclass(eq=False)
class DynamoKv(Scorer):
    """`--router-mode kv` of NVIDIA Dynamo 1.6.1, in blocks of `block_size` (16) tokens:

        prefill_load_scale * max(prefill in flight + prompt - overlap_weight * held, 0) + blocks it would have in use

    Prefill in flight: uncached tokens of requests without a first token. Blocks in use: those of the prompts in
    flight, a common prefix counted once, and this prompt's. `prefill_load_scale` (1), `overlap_weight` (1),
    temperature 0. What an endpoint holds comes from `PrefixMatch`; Dynamo has it from KV events.
    """

    needs = (InFlight, PrefixMatch)

    prefill_load_scale: float = 1.0
    overlap_weight: float = 1.0
    block_size: int = 16
    _used: dict[Endpoint, Counter[int]] = field(default_factory=dict, init=False, repr=False)
    """Prompts in flight: cuts of them, and how many requests use each."""
    _chains: Slot[list[int]] = field(default_factory=Slot, init=False, repr=False)

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        load, match, size = request.signal(InFlight), request.signal(PrefixMatch), self.block_size
        cuts = self._cuts(request)
        costs = []
        for endpoint in endpoints:
            held = self.overlap_weight * match[endpoint].tokens
            prefill = max(0.0, load[endpoint].uncached_tokens + request.tokens - held) / size
            used = self._used.get(endpoint, _NOTHING)
            blocks = _CUT * (len(used) + sum(cut not in used for cut in cuts))
            costs.append(self.prefill_load_scale * prefill + blocks)
        return least(costs)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        return self._cuts(request)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        self._chains.set(request, list(state or ()))
        self.on_picked(request, endpoint)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if cuts := self._cuts(request):
            self._used.setdefault(endpoint, Counter()).update(cuts)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if not (cuts := self._cuts(request)):
            return
        used = self._used[endpoint]
        for cut in cuts:
            used[cut] -= 1
            if not used[cut]:
                del used[cut]
        if not used:
            del self._used[endpoint]

    def _cuts(self, request: Request) -> list[int]:
        found = self._chains.get(request)
        return self._chains.set(request, chain_of(request, _CUT * self.block_size * 4)) if found is None else found


@dataclass(eq=False)
class Lmetric(Scorer):
    """LMetric (arXiv 2603.15202): prefill tokens times batch size, lowest wins; nothing to tune.

    Prefill tokens: those of this prompt that the endpoint does not hold, and with `queued` (true) those it has in
    flight without a first token; batch size: requests in flight and this one. llm-d's `lmetric-scorer` (pull request
    2351, August 2026) is the same without the queue.
    """

    needs = (InFlight, PrefixMatch)

    queued: bool = True

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        load, match = request.signal(InFlight), request.signal(PrefixMatch)
        return least(
            (request.tokens - match[e].tokens + self.queued * load[e].uncached_tokens) * (load[e].requests + 1)
            for e in endpoints
        )
