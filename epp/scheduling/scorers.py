"""Built-in scorers under llm-d's and GIE's type names. Each says its formula, its parameters and its source.

Scores are 0..1, more is better. "Waiting", "running" and "KV usage" are scraped from the engine (`Endpoint.load`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from epp.plugin import Endpoint, InFlight, ReadsPrefixMatch, Request, Scorer, Slot, least
from epp.scheduling.sessions import SessionAffinity


class QueueScorer(Scorer):
    """`queue-scorer`: (max - waiting) / (max - min) over the candidates; 1 when all are equal. Source: GIE v1.5."""

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return least([endpoint.load.waiting for endpoint in endpoints])


class RunningRequestsSizeScorer(Scorer):
    """`running-requests-size-scorer`: (max - running) / (max - min); 1 when all are equal. Source: GIE v1.5."""

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return least([endpoint.load.running for endpoint in endpoints])


class KvCacheUtilizationScorer(Scorer):
    """`kv-cache-utilization-scorer`: 1 - KV usage. Source: GIE v1.5."""

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [1.0 - endpoint.load.kv_usage for endpoint in endpoints]


@dataclass(eq=False)
class PrefixCacheScorer(ReadsPrefixMatch, Scorer):
    """`prefix-cache-scorer`: w * min(1, held tokens / scale)^2 + (1 - w) * held blocks / blocks of the prompt.

    w: `match_length_weight` (0..1, 0); scale: `match_length_scale_tokens` (tokens, 8192).
    `prefix_match_info_producer_name`: see `ReadsPrefixMatch`. Source: GIE v1.5 (w = 0), llm-d-router.
    """

    match_length_weight: float = 0.0
    match_length_scale_tokens: int = 8192

    def __post_init__(self) -> None:
        if not 0.0 <= self.match_length_weight <= 1.0:
            raise ValueError(f"matchLengthWeight: expected 0 to 1, got {self.match_length_weight}")
        if self.match_length_scale_tokens < 1:
            raise ValueError(f"matchLengthScaleTokens: expected 1 or more, got {self.match_length_scale_tokens}")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        match = request.signal(self.prefix_match)
        weight = self.match_length_weight
        if not weight:
            return [match[endpoint].share for endpoint in endpoints]
        scale = self.match_length_scale_tokens
        return [
            weight * min(1.0, match[endpoint].tokens / scale) ** 2 + (1.0 - weight) * match[endpoint].share
            for endpoint in endpoints
        ]


class PrecisePrefixCacheScorer(PrefixCacheScorer):
    """`precise-prefix-cache-scorer`: the same behind a precise producer, which comes with it. Source: llm-d."""


@dataclass(eq=False)
class ActiveRequestScorer(Scorer):
    """`active-request-scorer`: 1 up to `idle_threshold`, else (max - n) / max * `max_busy_score`.

    n: requests we have in flight to the endpoint; max: the most of any candidate. `idle_threshold` (requests, 0);
    `max_busy_score` (0..1, 1.0); `request_timeout`: of older files, without effect there too. Source: llm-d-router.
    """

    needs = (InFlight,)

    idle_threshold: int = 0
    max_busy_score: float = 1.0
    request_timeout: str = ""

    def __post_init__(self) -> None:
        if self.idle_threshold < 0:
            raise ValueError(f"idleThreshold: expected 0 or more, got {self.idle_threshold}")
        if not 0.0 <= self.max_busy_score <= 1.0:
            raise ValueError(f"maxBusyScore: expected 0 to 1, got {self.max_busy_score}")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        load = request.signal(InFlight)
        counts = [load[endpoint].requests for endpoint in endpoints]
        most = max(counts)
        return [1.0 if n <= self.idle_threshold else (most - n) / most * self.max_busy_score for n in counts]


@dataclass(eq=False)
class LoadAwareScorer(Scorer):
    """`load-aware-scorer`: 0.5 * (1 - min(waiting, threshold) / threshold), so at most 0.5.

    `threshold` (requests, 128). Source: llm-d-router.
    """

    threshold: float = 128.0

    def __post_init__(self) -> None:
        if not self.threshold > 0.0:
            raise ValueError(f"threshold: expected more than 0, got {self.threshold}")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [0.5 * (1.0 - min(e.load.waiting, self.threshold) / self.threshold) for e in endpoints]


@dataclass(eq=False)
class TokenLoadScorer(Scorer):
    """`token-load-scorer`: 1 - min(1, uncached tokens in flight / `queue_threshold_tokens`).

    `queue_threshold_tokens` (tokens, 4194304 = 128 prompts of 32k). Source: GIE v1.5, llm-d-router.
    """

    needs = (InFlight,)

    queue_threshold_tokens: int = 4_194_304

    def __post_init__(self) -> None:
        if self.queue_threshold_tokens < 1:
            raise ValueError(f"queueThresholdTokens: expected 1 or more, got {self.queue_threshold_tokens}")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        load = request.signal(InFlight)
        return [1.0 - min(1.0, load[e].uncached_tokens / self.queue_threshold_tokens) for e in endpoints]


@dataclass(eq=False)
class SessionAffinityScorer(SessionAffinity, Scorer):
    """`session-affinity-scorer`: 1 for the endpoint the session lives on, 0 for the others.

    Parameters: see `SessionAffinity`. Source: llm-d-router.
    """

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        home = self.home(request, endpoints)
        return [1.0 if endpoint is home else 0.0 for endpoint in endpoints]


@dataclass(eq=False)
class HeaderLabelAffinityScorer(Scorer):
    """`header-label-affinity-scorer`: 1 where the label `label_key` has the value of the header `header_name`, else 0.

    It says who is preferred, so a client's own header counts. Source: llm-d-router.
    """

    header_name: str
    label_key: str

    def __post_init__(self) -> None:
        for name, key, what in (("headerName", self.header_name, "a header"), ("labelKey", self.label_key, "a label")):
            if not key:
                raise ValueError(f"{name}: expected the name of {what}, got nothing")
        self.header_name = self.header_name.lower()

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        wanted = request.header(self.header_name)
        return [1.0 if wanted and e.labels.get(self.label_key) == wanted else 0.0 for e in endpoints]


class LoraAffinityScorer(Scorer):
    """`lora-affinity-scorer`: 1 where the request's adapter runs, 0.8 where a slot is free, 0.6 where it waits, else 0.

    The adapter is the request's model. A slot is free while adapters running or waiting are fewer than the engine's
    max_lora; an adapter that does both takes one slot. Source: GIE v1.5.
    """

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        adapter = request.model
        scores = []
        for endpoint in endpoints:
            load = endpoint.load
            if adapter in load.lora_running:
                scores.append(1.0)
            elif len(load.lora_running | load.lora_waiting) < load.lora_max:
                scores.append(0.8)
            else:
                scores.append(0.6 if adapter in load.lora_waiting else 0.0)
        return scores


@dataclass(eq=False)
class NoHitLruScorer(ReadsPrefixMatch, Scorer):
    """`no-hit-lru-scorer`: a cold prompt goes to the endpoint that took one longest ago, so that caches grow evenly.

    Cold = no candidate holds a block of it. Then 1 - rank / (n - 1): first the n candidates that never took a cold
    prompt, in order, then the others, longest ago first; one candidate scores 1. A warm prompt: 0.5 for all.
    `lru_size` (endpoints, 1024): how many are remembered. `prefix_plugin_type` and `prefix_plugin_name` are accepted
    for llm-d's files, where they have no effect either. `prefix_match_info_producer_name`: see `ReadsPrefixMatch`.
    Source: llm-d-router.
    """

    lru_size: int = 1024
    prefix_plugin_type: str = ""
    prefix_plugin_name: str = ""
    _count: int = field(default=0, init=False, repr=False)
    _last: dict[Endpoint, int] = field(default_factory=dict, init=False, repr=False)
    """When each endpoint took its last cold prompt, longest ago first."""
    _cold: Slot[bool] = field(default_factory=Slot, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.lru_size < 1:
            raise ValueError(f"lruSize: expected 1 or more, got {self.lru_size}")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        match = request.signal(self.prefix_match)
        cold = not any(match[endpoint].blocks for endpoint in endpoints)
        self._cold.set(request, cold)
        if not cold:
            return [0.5] * len(endpoints)
        if len(endpoints) == 1:
            return [1.0]
        scores = [0.0] * len(endpoints)
        last = [self._last.get(endpoint, 0) for endpoint in endpoints]
        for rank, i in enumerate(sorted(range(len(endpoints)), key=last.__getitem__)):
            scores[i] = 1.0 - rank / (len(endpoints) - 1)
        return scores

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """Whether no endpoint held anything of its prompt."""
        return self._cold.get(request) or None

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        self._cold.set(request, bool(state))
        self.on_picked(request, endpoint)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if not self._cold.get(request):
            return
        self._count += 1
        self._last.pop(endpoint, None)
        self._last[endpoint] = self._count
        if len(self._last) > self.lru_size:
            del self._last[next(iter(self._last))]

    def on_removed(self, endpoint: Endpoint) -> None:
        self._last.pop(endpoint, None)
