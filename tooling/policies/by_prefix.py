"""Policies that send a prompt where its beginning was sent before: SGLang, production-stack, AIBrix."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, pstdev
from typing import Any

from epp.plugin import Endpoint, InFlight, Request, Scorer, least
from tooling.policies.sent_prompts import SentPrompts

_BOUND = 2_000_000
"""Blocks kept for an endpoint where the project itself keeps all: memory must end somewhere."""


class _ByRouted(Scorer):
    """Remembers what it sent where. The score is 1 for the endpoint wanted; equals take turns in the picker."""

    needs = (InFlight,)
    routed: SentPrompts

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.routed.add(request, endpoint)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        return self.routed.chain(request)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        self.routed.take(request, state)
        self.on_picked(request, endpoint)

    def on_removed(self, endpoint: Endpoint) -> None:
        self.routed.forget(endpoint)


@dataclass(eq=False)
class SglangCacheAware(_ByRouted):
    """`cache_aware` of sglang-router 0.3.2, its default.

    In flight max - min > `balance_abs_threshold` (64) and max > `balance_rel_threshold` (1.5) * min: fewest in flight.
    Else the longest prefix match, if it is more than `cache_threshold` (0.3) of the prompt; else the smallest tree.
    `max_tree_size` (67,108,864 characters an endpoint), the least recently used go first; checked at each request
    instead of every 60 s. Prefixes are compared in steps of 256 characters instead of one.
    """

    cache_threshold: float = 0.3
    balance_abs_threshold: int = 64
    balance_rel_threshold: float = 1.5
    max_tree_size: int = 67_108_864
    routed: SentPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.routed = SentPrompts(256, self.max_tree_size // 256)

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        counts = _in_flight(request, endpoints)
        most, fewest = max(counts), min(counts)
        if most - fewest > self.balance_abs_threshold and most > self.balance_rel_threshold * fewest:
            return least(counts)
        shares = self.routed.match(request, endpoints)
        if (best := max(shares)) > self.cache_threshold:
            return [1.0 if share == best else 0.0 for share in shares]
        return least(self.routed.size(endpoint) for endpoint in endpoints)


@dataclass(eq=False)
class ProductionStackPrefixAware(_ByRouted):
    """`prefixaware` of vLLM production-stack (August 2026): any endpoint with the longest match, whatever its load.

    Chunks of 128 characters, no eviction there (here 2,000,000 chunks an endpoint). A match shorter than
    `prefix_min_match_length` (characters, 0): the fewest requests a second, in a window of 60 s.
    """

    prefix_min_match_length: int = 0
    routed: SentPrompts = field(init=False)
    _rates: "Rates" = field(init=False)

    def __post_init__(self) -> None:
        self.routed = SentPrompts(128, _BOUND)
        self._rates = Rates()

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        shares = self.routed.match(request, endpoints)
        best = max(shares)
        if best * len(self.routed.chain(request)) * 128 < self.prefix_min_match_length:
            return least(self._rates.counts(endpoints, self.clock()))
        return [1.0 if share == best else 0.0 for share in shares]

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self.routed.add(request, endpoint)
        self._rates.add(endpoint, self.clock())

    def on_removed(self, endpoint: Endpoint) -> None:
        self.routed.forget(endpoint)
        self._rates.forget(endpoint)


@dataclass(eq=False)
class ProductionStackLoadAware(_ByRouted):
    """`loadaware` of vLLM production-stack (August 2026): the highest share matched - `beta` * spread wins.

    spread = (in flight - mean) / max(1, mean) over the candidates; `beta` (1). Chunks as in `prefixaware`.
    """

    beta: float = 1.0
    routed: SentPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.routed = SentPrompts(128, _BOUND)

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        counts = _in_flight(request, endpoints)
        mean = fmean(counts)
        shares = self.routed.match(request, endpoints)
        return least(
            self.beta * (count - mean) / max(1.0, mean) - share for count, share in zip(counts, shares, strict=True)
        )


@dataclass(eq=False)
class AibrixPrefixCache(_ByRouted):
    """`prefix-cache` of AIBrix 0.7: the longest match among endpoints that are not far above the mean load.

    In flight max - min > `imbalance` (16): fewest in flight. Else those that match, by share and then by load: the
    first with in flight <= mean + `deviations` (2) * standard deviation. None: fewest in flight. Blocks of
    `block` (128) characters, `capacity` (200,000) an endpoint.
    """

    imbalance: int = 16
    deviations: float = 2.0
    block: int = 128
    capacity: int = 200_000
    routed: SentPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.routed = SentPrompts(self.block, self.capacity)

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        counts = _in_flight(request, endpoints)
        if max(counts) - min(counts) <= self.imbalance:
            bound = fmean(counts) + self.deviations * pstdev(counts)
            shares = self.routed.match(request, endpoints)
            matched = [(-share, count) for share, count in zip(shares, counts, strict=True) if share and count <= bound]
            if matched:
                wanted = min(matched)
                return [float((-share, count) == wanted) for share, count in zip(shares, counts, strict=True)]
        return least(counts)


class Rates:
    """Requests sent to each endpoint in the last `window` seconds, counted in sixths of it."""

    def __init__(self, window: float = 60.0) -> None:
        self._slot = window / 6
        self._sent: dict[Endpoint, dict[int, int]] = {}

    def add(self, endpoint: Endpoint, now: float) -> None:
        slots = self._sent.setdefault(endpoint, {})
        at = int(now / self._slot)
        slots[at] = slots.get(at, 0) + 1
        if len(slots) > 6:
            del slots[min(slots)]

    def counts(self, endpoints: Sequence[Endpoint], now: float) -> list[int]:
        oldest = int(now / self._slot) - 5
        return [sum(n for at, n in self._sent.get(e, {}).items() if at >= oldest) for e in endpoints]

    def forget(self, endpoint: Endpoint) -> None:
        self._sent.pop(endpoint, None)


def _in_flight(request: Request, endpoints: Sequence[Endpoint]) -> list[int]:
    load = request.signal(InFlight)
    return [load[endpoint].requests for endpoint in endpoints]
