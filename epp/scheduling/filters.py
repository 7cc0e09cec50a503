"""Built-in filters under llm-d's and GIE's type names. Each says what it keeps, its parameters and its source."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, Literal

from epp.plugin import (
    Endpoint,
    Filter,
    InFlight,
    PrefixMatch,
    ReadsPrefixMatch,
    Request,
    Scorer,
    Stage,
    apart,
    serves,
)
from epp.scheduling.headroom import LatencyHeadroom
from epp.scheduling.sessions import SessionAffinity

_OPERATORS = ("In", "NotIn", "Exists", "DoesNotExist")


@dataclass(frozen=True)
class Requirement:
    """One of Kubernetes' label selector requirements; a missing label satisfies NotIn and DoesNotExist."""

    key: str
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.operator not in _OPERATORS:
            raise ValueError(f"operator: expected one of {', '.join(_OPERATORS)}, got {self.operator!r}")
        if (self.operator in ("In", "NotIn")) != bool(self.values):
            raise ValueError(f"values: {self.operator} takes {'no' if self.values else 'at least one'} value")

    def met(self, labels: Mapping[str, str]) -> bool:
        if self.operator == "In":
            return labels.get(self.key) in self.values
        if self.operator == "NotIn":
            return labels.get(self.key) not in self.values
        return (self.key in labels) == (self.operator == "Exists")


@dataclass(eq=False)
class LabelSelectorFilter(Filter):
    """`label-selector-filter`: keeps endpoints whose labels a Kubernetes selector matches.

    `match_labels` (label -> value) and `match_expressions` (key, operator, values): all must hold; none = all kept.
    Source: llm-d-router.
    """

    match_labels: Mapping[str, str] = field(default_factory=dict)
    match_expressions: Sequence[Requirement] = ()

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [endpoint for endpoint in endpoints if self._matches(endpoint.labels)]

    def _matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            requirement.met(labels) for requirement in self.match_expressions
        )


@dataclass(eq=False)
class ByLabelFilter(Filter):
    """`by-label`: keeps endpoints whose `label` has one of `valid_values`.

    `allows_no_label` (false): keeps unlabelled ones too. Source: llm-d-router (deprecated there).
    """

    label: str
    valid_values: Sequence[str]
    allows_no_label: bool = False

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [e for e in endpoints if _labelled(e, self.label, self.valid_values, self.allows_no_label)]


class _RoleFilter(Filter):
    """Keeps endpoints whose label `llm-d.ai/role` has the `stage`. No parameters. Source: llm-d-router."""

    stage: ClassVar[Stage]

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        return [endpoint for endpoint in endpoints if serves(endpoint, self.stage)]


class DecodeFilter(_RoleFilter):
    """`decode-filter`: roles that decode, and endpoints without one. `both` is llm-d's old name of prefill-decode."""

    stage = "decode"


class PrefillFilter(_RoleFilter):
    """`prefill-filter`: roles that prefill. `both` is llm-d's old name of prefill-decode."""

    stage = "prefill"


class EncodeFilter(_RoleFilter):
    """`encode-filter`: roles that encode."""

    stage = "encode"


@dataclass(eq=False)
class ContextLengthAware(Filter, Scorer):
    """`context-length-aware`: endpoints for the lengths of prompt that their `label` says, as `min-max` in tokens.

    A label is "llm-d.ai/context-length-range" unless named. Score, for a prompt of n tokens: within the range
    0.3 + 0.7 * (0.7 / (1 + width / 10000) + 0.3 * (max - n) / width), 1 for a width of 0; beyond it
    0.3 / (1 + tokens to its nearer end / 1000); 0.5 without the label, 0 with one that is no range.
    `enable_filtering` (false): also drop endpoints whose range does not hold n, or is none. Source: llm-d-router.
    """

    label: str = "llm-d.ai/context-length-range"
    enable_filtering: bool = False

    def __post_init__(self) -> None:
        if not self.label:
            raise ValueError("label: expected the key of a label, got nothing")

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if not self.enable_filtering:
            return endpoints
        return [e for e in endpoints if self._holds(e, request.tokens)]

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return [self._score(endpoint, request.tokens) for endpoint in endpoints]

    def _holds(self, endpoint: Endpoint, tokens: int) -> bool:
        if (text := endpoint.labels.get(self.label)) is None:
            return True
        found = _range(text)
        return found is not None and found[0] <= tokens <= found[1]

    def _score(self, endpoint: Endpoint, tokens: int) -> float:
        if (text := endpoint.labels.get(self.label)) is None:
            return 0.5
        if (found := _range(text)) is None:
            return 0.0
        low, high = found
        if not low <= tokens <= high:
            return 0.3 / (1.0 + (tokens - high if tokens > high else low - tokens) / 1000.0)
        width = high - low
        return 0.3 + 0.7 * (0.7 / (1.0 + width / 10000.0) + 0.3 * (high - tokens) / width) if width else 1.0


def _range(text: str) -> tuple[int, int] | None:
    """`0-2048` as two numbers; None where it is no range."""
    parts = [part.strip() for part in text.split("-")]
    if len(parts) != 2 or not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        return None
    low, high = map(int, parts)
    return (low, high) if low <= high else None


_NEAR: Final = {"host": 0, "rack": 1, "zone": 2, "region": 3}
_PROXIMITY: Final = (1.0, 0.2, 0.05, 0.02)
"""Score of an endpoint on the peer's host, in its rack, its zone, its region. Source: llm-d-router."""


@dataclass(eq=False)
class TopologyAffinityFilter(Filter):
    """`topology-affinity-filter`: keeps endpoints that are near the one chosen for the stage before.

    `min_affinity` (host; rack, zone, region): how near. Where the peer is not known, or says not where it is, or nobody
    is near enough, all are kept. `topology_producer_name`: accepted, labels are read here. Source: llm-d-router.
    """

    min_affinity: Literal["host", "rack", "zone", "region"] = "host"
    topology_producer_name: str = ""

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if (peer := request.peer) is None:
            return endpoints
        most = _NEAR[self.min_affinity]
        return [e for e in endpoints if (far := apart(peer, e)) is not None and far <= most] or endpoints


@dataclass(eq=False)
class TopologyAffinityScorer(Scorer):
    """`topology-affinity-scorer`: 1 on the peer's host, 0.2 in its rack, 0.05 in its zone, 0.02 in its region, else 0.

    The peer is the endpoint chosen for the stage before. `topology_producer_name`: accepted, labels are read here.
    Source: llm-d-router.
    """

    topology_producer_name: str = ""

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        if (peer := request.peer) is None:
            return [0.0] * len(endpoints)
        found = [apart(peer, endpoint) for endpoint in endpoints]
        return [_PROXIMITY[far] if far is not None and far < len(_PROXIMITY) else 0.0 for far in found]


@dataclass(eq=False)
class PrefixCacheAffinityFilter(ReadsPrefixMatch, Filter):
    """`prefix-cache-affinity-filter`: keeps the endpoints that hold the prompt, until they are too busy.

    Sticky = held share of the prompt's blocks >= `affinity_threshold` (0..1, 0.8). None sticky: all are kept.
    With `exploration_probability` (0..1, 0) a request skips the filter. Load gate: the time to first token of an
    endpoint is estimated as uncached tokens in flight / `peak_prefill_throughput` (tokens/s, 15928: Qwen3-32B on two
    H100); when the best sticky one is more than `max_ttft_penalty_ms` (18000; 0 = always stick) later than the best
    other, all are kept. `ttft_source: latencyPredictor` takes what `predicted-latency-producer` predicts instead. A
    signal whose producer failed: all are kept. `prefix_match_info_producer_name`: see `ReadsPrefixMatch`. Source:
    llm-d-router.
    """

    needs: ClassVar[tuple[type[Any], ...]] = (PrefixMatch, InFlight)

    affinity_threshold: float = 0.8
    exploration_probability: float = 0.0
    max_ttft_penalty_ms: float = 18_000.0
    ttft_source: Literal["prefillThroughput", "latencyPredictor"] = "prefillThroughput"
    peak_prefill_throughput: float = 15_928.0
    latency_prediction_info_producer_name: str = ""

    def __post_init__(self) -> None:
        if not 0.0 <= self.affinity_threshold <= 1.0:
            raise ValueError(f"affinityThreshold: expected 0 to 1, got {self.affinity_threshold}")
        if not 0.0 <= self.exploration_probability <= 1.0:
            raise ValueError(f"explorationProbability: expected 0 to 1, got {self.exploration_probability}")
        if not self.max_ttft_penalty_ms >= 0.0:
            raise ValueError(f"maxTTFTPenaltyMs: expected 0 or more, got {self.max_ttft_penalty_ms}")
        if not self.peak_prefill_throughput > 0.0:
            raise ValueError(f"peakPrefillThroughput: expected more than 0, got {self.peak_prefill_throughput}")
        if self.ttft_source == "latencyPredictor":
            self.needs = (PrefixMatch, LatencyHeadroom)  # type: ignore[misc]

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        if self.exploration_probability and self.random.random() < self.exploration_probability:
            return endpoints
        match = self.matches(request)
        if not match:
            return endpoints
        sticky = [endpoint for endpoint in endpoints if match[endpoint].share >= self.affinity_threshold]
        if not sticky or len(sticky) == len(endpoints):
            return endpoints
        return endpoints if self._too_busy(request, sticky, endpoints) else sticky

    def _too_busy(self, request: Request, sticky: Sequence[Endpoint], endpoints: Sequence[Endpoint]) -> bool:
        if not self.max_ttft_penalty_ms:
            return False
        ttft = self._ttfts(request)
        if not ttft:
            return True
        best_sticky, best = min(ttft[endpoint] for endpoint in sticky), min(ttft[endpoint] for endpoint in endpoints)
        return (best_sticky - best) * 1000.0 > self.max_ttft_penalty_ms

    def _ttfts(self, request: Request) -> Mapping[Endpoint, float]:
        """Seconds; empty where nothing is known."""
        if self.ttft_source == "latencyPredictor":
            rooms: Mapping[Endpoint, LatencyHeadroom] = request.signals.get(LatencyHeadroom, {})
            return {endpoint: room.predicted_ttft for endpoint, room in rooms.items()}
        load: Mapping[Endpoint, InFlight] = request.signals.get(InFlight, {})
        return {endpoint: each.uncached_tokens / self.peak_prefill_throughput for endpoint, each in load.items()}


@dataclass(eq=False)
class SessionAffinityFilter(SessionAffinity, Filter):
    """`session-affinity-filter`: keeps only the endpoint the session lives on; all where that is not known.

    Parameters: see `SessionAffinity`. Source: llm-d-router.
    """

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        home = self.home(request, endpoints)
        return endpoints if home is None else [home]


_METRICS: Mapping[str, Callable[[Endpoint, InFlight], float]] = {
    "active-requests": lambda endpoint, in_flight: in_flight.requests,
    "running-requests": lambda endpoint, in_flight: endpoint.load.running,
    "waiting-queue": lambda endpoint, in_flight: endpoint.load.waiting,
    "kv-cache-utilization": lambda endpoint, in_flight: endpoint.load.kv_usage,
}


@dataclass(frozen=True)
class Condition:
    """`metric` is at most `max_value`: requests, or a share 0..1 for kv-cache-utilization."""

    metric: Literal["active-requests", "running-requests", "waiting-queue", "kv-cache-utilization"]
    max_value: float

    def __post_init__(self) -> None:
        if self.metric not in _METRICS:
            raise ValueError(f"metric: expected one of {', '.join(_METRICS)}, got {self.metric!r}")


@dataclass(eq=False)
class UtilizationFilter(Filter):
    """`utilization-filter`: keeps endpoints that satisfy every one of `conditions`; figures unknown count as 0.

    active-requests are our own requests in flight, the others are scraped. `fallback_on_empty` (false): keep all
    instead of failing the request when none is left. Source: llm-d-router.
    """

    needs = (InFlight,)

    conditions: Sequence[Condition]
    fallback_on_empty: bool = False

    def __post_init__(self) -> None:
        if not self.conditions:
            raise ValueError("conditions: expected at least one")

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        load: Mapping[Endpoint, InFlight] = request.signals.get(InFlight, {})
        idle = InFlight(0, 0)
        kept = [
            endpoint
            for endpoint in endpoints
            if all(_METRICS[c.metric](endpoint, load.get(endpoint, idle)) <= c.max_value for c in self.conditions)
        ]
        return endpoints if self.fallback_on_empty and not kept else kept


class HeaderBasedTestingFilter(Filter):
    """`header-based-testing-filter`: keeps the endpoints named in `test-epp-endpoint-selection`, for conformance tests.

    The header's value: a comma list of `ip` (all ports) or `ip:port`, IPv6 with or without brackets. Without the header
    all are kept; with an empty one, none. No parameters. Source: GIE v1.5 and its lwepp.
    """

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        header = request.headers.get("test-epp-endpoint-selection", "")
        wanted = {item for raw in header.split(",") if (item := raw.strip())}
        if not wanted:
            return endpoints
        wanted |= {item.strip("[]") for item in wanted}
        return [e for e in endpoints if e.address in wanted or e.address.rpartition(":")[0].strip("[]") in wanted]


def _labelled(endpoint: Endpoint, label: str, values: Sequence[str], missing: bool) -> bool:
    value = endpoint.labels.get(label)
    return missing if value is None else value in values
