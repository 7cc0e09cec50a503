"""How full is the pool? Detectors answer for admission; named in a profile they also drop endpoints that are full."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Literal

from epp.plugin import Detector, Endpoint, Filter, Guard, Refusal, Request, Response, Services


@dataclass(eq=False)
class UtilizationDetector(Detector, Filter):
    """`utilization-detector`: the mean over endpoints of max(waiting / threshold, KV usage / threshold), as scraped.

    `queue_depth_threshold` (requests, 5) and `kv_cache_util_threshold` (0..1, 0.8): an endpoint at either is full.
    `metrics_staleness_threshold` (5s; 200ms in llm-d, which scrapes every 50 ms and we every second): older metrics,
    or none, say nothing. As a filter: drops endpoints beyond a threshold times (1 + `headroom`) (0); keeps all when
    that would leave none.

    `staleness_policy`: with `ignore` an endpoint with stale metrics is left out of the mean, and a pool of which
    nothing is known is not full: a scraper that stops must not stop the pool. llm-d's default is `saturated`, which
    counts it as full. Source: GIE v1.5, llm-d-router #2492.
    """

    queue_depth_threshold: int = 5
    kv_cache_util_threshold: float = 0.8
    metrics_staleness_threshold: timedelta = timedelta(seconds=5)
    staleness_policy: Literal["ignore", "saturated"] = "ignore"
    headroom: float = 0.0
    _stale: int = field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.queue_depth_threshold < 1:
            raise ValueError(f"queueDepthThreshold: expected 1 or more, got {self.queue_depth_threshold}")
        if not 0.0 < self.kv_cache_util_threshold <= 1.0:
            raise ValueError(f"kvCacheUtilThreshold: expected more than 0, up to 1, got {self.kv_cache_util_threshold}")
        if not self.metrics_staleness_threshold:
            raise ValueError("metricsStalenessThreshold: expected more than 0s")
        if self.headroom < 0.0:
            raise ValueError(f"headroom: expected 0 or more, got {self.headroom}")

    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        if not endpoints:
            return 1.0
        known = [full for endpoint in endpoints if (full := self._fullness(endpoint)) is not None]
        self._stale = len(endpoints) - len(known)
        if self.staleness_policy == "saturated":
            return (sum(known) + self._stale) / len(endpoints)
        return sum(known) / len(known) if known else 0.0

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        limit = 1.0 + self.headroom
        return [endpoint for endpoint in endpoints if (self._fullness(endpoint) or 0.0) <= limit] or endpoints

    def statistics(self) -> Mapping[str, float]:
        """`stale_endpoints`: left out of the last answer, because their metrics were old or missing."""
        return {"stale_endpoints": self._stale}

    def _fullness(self, endpoint: Endpoint) -> float | None:
        load = endpoint.load
        if load.at is None or self.clock() - load.at > self.metrics_staleness_threshold.total_seconds():
            return None
        return max(load.waiting / self.queue_depth_threshold, load.kv_usage / self.kv_cache_util_threshold)


@dataclass(eq=False)
class ProbabilisticAdmitter(Guard):
    """`probabilistic-admitter`: of requests of negative priority it refuses the more (429) the fuller the pool is.

    Refused is a share of min(1, `k` * saturation ** `power`) (300, 5.0): 2 % at 0.15, all from 0.32 on. Saturation is
    `utilization-detector`'s, by `queue_depth_threshold` (requests, 5) and `kv_cache_util_threshold` (0..1, 0.8); an
    endpoint with old metrics or none is left out of it, where llm-d counts it as full. Source: llm-d-router.
    """

    queue_depth_threshold: int = 5
    kv_cache_util_threshold: float = 0.8
    power: float = 5.0
    k: float = 300.0
    _detector: UtilizationDetector = field(init=False, repr=False)
    _endpoints: Callable[[], Sequence[Endpoint]] = field(default=tuple, init=False, repr=False)

    def __post_init__(self) -> None:
        for name, value in (("power", self.power), ("k", self.k)):
            if not value > 0.0:
                raise ValueError(f"{name}: expected more than 0, got {value}")
        self._detector = UtilizationDetector(self.queue_depth_threshold, self.kv_cache_util_threshold)

    def start(self, services: Services) -> None:
        self._endpoints, self._detector.clock = services.endpoints, self.clock

    def check(self, request: Request) -> Refusal | None:
        endpoints = self._endpoints() if request.priority < 0 else ()
        if not endpoints:
            return None
        saturation = self._detector.saturation(endpoints)
        if self.random.random() >= self.k * saturation**self.power:
            return None
        return Refusal(
            429, f"the pool fills (saturation {saturation:.2f}) and requests of priority {request.priority} wait for "
            "better times; retry later",
        )  # fmt: skip


@dataclass(eq=False)
class ConcurrencyDetector(Detector, Filter):
    """`concurrency-detector`: what we have in flight to the endpoints, over what they may have.

    `concurrency_mode`: `requests` (default), `tokens` (of prompts), or `hybrid`, the fuller of both. `max_concurrency`
    (requests, 100) and `max_token_concurrency` (tokens, 1,000,000) are for each endpoint. As a filter: drops endpoints
    that have reached their limit times (1 + `headroom`) (0); keeps all when that would leave none.
    `in_flight_load_producer_name` is accepted for llm-d's files: the accounts are the detector's own, exact and
    instant, from the pick to the request's end. Source: GIE v1.5, llm-d-router.
    """

    max_concurrency: int = 100
    max_token_concurrency: int = 1_000_000
    concurrency_mode: Literal["requests", "tokens", "hybrid"] = "requests"
    headroom: float = 0.0
    in_flight_load_producer_name: str = ""
    _in_flight: dict[Endpoint, tuple[int, int]] = field(default_factory=dict, init=False, repr=False)
    """Requests and prompt tokens; an endpoint with none is not in it."""

    def __post_init__(self) -> None:
        if self.max_concurrency < 1:
            raise ValueError(f"maxConcurrency: expected 1 or more, got {self.max_concurrency}")
        if self.max_token_concurrency < 1:
            raise ValueError(f"maxTokenConcurrency: expected 1 or more, got {self.max_token_concurrency}")
        if self.headroom < 0.0:
            raise ValueError(f"headroom: expected 0 or more, got {self.headroom}")
        by_mode: Mapping[str, Callable[[int, int], float]] = {
            "requests": lambda requests, tokens: requests / self.max_concurrency,
            "tokens": lambda requests, tokens: tokens / self.max_token_concurrency,
            "hybrid": lambda requests, tokens: max(
                requests / self.max_concurrency, tokens / self.max_token_concurrency
            ),
        }
        self._full = by_mode[self.concurrency_mode]

    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        if not endpoints:
            return 1.0
        return sum(map(self._fullness, endpoints)) / len(endpoints)

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        limit = 1.0 + self.headroom
        return [endpoint for endpoint in endpoints if self._fullness(endpoint) < limit] or endpoints

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        requests, tokens = self._in_flight.get(endpoint, (0, 0))
        self._in_flight[endpoint] = (requests + 1, tokens + request.tokens)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        requests, tokens = self._in_flight[endpoint]
        if requests == 1:
            del self._in_flight[endpoint]
        else:
            self._in_flight[endpoint] = (requests - 1, tokens - request.tokens)

    def statistics(self) -> Mapping[str, float]:
        """`requests`, `tokens`: in flight, over all endpoints."""
        counts = self._in_flight.values()
        return {"requests": sum(count[0] for count in counts), "tokens": sum(count[1] for count in counts)}

    def _fullness(self, endpoint: Endpoint) -> float:
        return self._full(*self._in_flight.get(endpoint, (0, 0)))
