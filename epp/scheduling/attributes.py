"""Figures of endpoints beyond the engines' load: GPUs, by DCGM's exporter, and metrics that a configuration names.

`endpoint-attribute-filter` and `endpoint-attribute-scorer` read either: of the `customMetrics` of
`core-metrics-extractor` (`Load.custom`), or of `dcgm-data-source`.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from operator import eq, ge, gt, le, lt, ne
from typing import Final, Literal

from epp.plugin import Endpoint, Filter, Plugin, Reference, Request, Scorer, Services

_GPU_METRIC: Final = "DCGM_FI_DEV_GPU_UTIL"
_GPU: Final = "GPUUtilization"
_DCGM: Final = "dcgm-extractor"
_CORE: Final = "core-metrics-extractor"
_STALE: Final = 5.0
"""Seconds after which a figure is none any more, at the least."""
_LARGEST_PORT: Final = 65535

_OPERATORS: Final[Mapping[str, Callable[[float, float], bool]]] = {
    "LessThan": lt,
    "LessThanOrEqual": le,
    "GreaterThan": gt,
    "GreaterThanOrEqual": ge,
    "Equal": eq,
    "NotEqual": ne,
}


@dataclass(eq=False)
class DcgmDataSource(Plugin):
    """`dcgm-data-source`: reads how busy each endpoint's GPUs are, from NVIDIA's DCGM exporter beside it.

    Of the GPUs whose `pod` label is the endpoint's, or that have none, the busiest counts, 0 to 1. An endpoint without
    an answer for 5 s, or three intervals, has none: `warmpath_degraded_total{reason="gpu-metrics"}`. Parameters:
      port              9400
      path              `/metrics`
      scheme            `http`
      use_node_address  (false) the exporter of the endpoint's node, instead of one in its pod
      interval          how often: `1s`
    Source: llm-d-router.
    """

    port: int = 9400
    path: str = "/metrics"
    scheme: Literal["http"] = "http"
    insecure_skip_verify: bool = True
    use_node_address: bool = False
    interval: timedelta = timedelta(seconds=1)
    _services: Services = field(init=False, repr=False)
    _found: dict[Endpoint, tuple[float, float]] = field(default_factory=dict, init=False, repr=False)
    """When it was read, and what."""

    def __post_init__(self) -> None:
        if not 0 < self.port <= _LARGEST_PORT:
            raise ValueError(f"port: expected 1 to {_LARGEST_PORT}, got {self.port}")
        self._seconds = max(0.05, self.interval.total_seconds())
        self._stale = max(_STALE, 3 * self._seconds)

    def value(self, endpoint: Endpoint) -> float | None:
        """Share of the time that its busiest GPU works; None: that is not known."""
        at, found = self._found.get(endpoint, (-1.0, 0.0))
        return found if at >= 0 and self.clock() - at <= self._stale else None

    def endpoint_statistics(self) -> Mapping[Endpoint, Mapping[str, float]]:
        """`gpu_utilization`."""
        return {e: {"gpu_utilization": value} for e in self._found if (value := self.value(e)) is not None}

    def on_removed(self, endpoint: Endpoint) -> None:
        self._found.pop(endpoint, None)

    async def run(self, services: Services) -> None:
        self._services = services
        await services.for_each_endpoint("GPU metrics of", self._follow, self.on_removed)

    async def _follow(self, endpoint: Endpoint) -> None:
        since = self.clock()
        while True:
            error = await self._read(endpoint)
            now = self.clock()
            if error and now - self._found.get(endpoint, (since, 0.0))[0] > self._stale:
                self._services.degraded("gpu-metrics", f"{endpoint.name}: {error}")
            await asyncio.sleep(self._seconds * self.random.uniform(0.9, 1.1))

    async def _read(self, endpoint: Endpoint) -> str:
        """Read once; what went wrong, or ""."""
        host = endpoint.address.rpartition(":")[0]
        if self.use_node_address:
            host = endpoint.node_address
            if not host:
                return "the address of its node is not known"
        try:
            samples = await self._services.samples(f"{host}:{self.port}", self.path, _GPU_METRIC)
        except (OSError, TimeoutError) as error:
            return f"{host}:{self.port}{self.path}: {str(error) or 'no answer in time'}"
        pod = endpoint.name.partition("/")[2]
        own = [value for labels, value in samples if labels.get("pod") in (None, "", pod, pod.rpartition("-rank-")[0])]
        if not own:
            return f"{host}:{self.port}{self.path} has no {_GPU_METRIC} of this pod"
        self._found[endpoint] = self.clock(), min(1.0, max(own) / 100.0)
        return ""


@dataclass(eq=False)
class _ReadsAttribute(Plugin):
    """What the two have in common: where the attribute is."""

    producer: str | None = None
    _source: DcgmDataSource | None = field(default=None, init=False, repr=False)

    def refers(self) -> Mapping[str, Reference]:
        return {"producer": Reference("dcgm-data-source", DcgmDataSource, add=True)} if self.producer == _DCGM else {}

    def connect(self, plugins: Mapping[str, DcgmDataSource]) -> None:
        self._source = plugins.get("producer")

    def _check_attribute(self, name: str, parameter: str) -> None:
        if not name:
            raise ValueError(f"{parameter}: expected the name of an attribute, got nothing")
        if self.producer not in (None, _CORE, _DCGM):
            raise ValueError(f"producer: expected {_CORE} or {_DCGM}, got {self.producer!r}")
        if self.producer == _DCGM and name != _GPU:
            raise ValueError(f"{parameter}: {_DCGM} finds {_GPU}, got {name!r}")

    def _value(self, endpoint: Endpoint, name: str) -> float | None:
        return endpoint.load.custom.get(name) if self._source is None else self._source.value(endpoint)


@dataclass(frozen=True)
class Threshold:
    """What a value is compared with, and how."""

    operator: str
    value: float

    def __post_init__(self) -> None:
        if self.operator not in _OPERATORS:
            raise ValueError(f"operator: expected one of {', '.join(_OPERATORS)}, got {self.operator!r}")


@dataclass(frozen=True)
class FilterAlgorithm:
    """`threshold` is the only type there is."""

    type: Literal["threshold"]
    threshold: Threshold


@dataclass(eq=False, kw_only=True)
class EndpointAttributeFilter(_ReadsAttribute, Filter):
    """`endpoint-attribute-filter`: keeps endpoints with a figure on the right side of a threshold.

    Parameters:
      attribute          name of the figure: an `attributeKey` of the `customMetrics` of `core-metrics-extractor`, or
                         `GPUUtilization`
      producer           `core-metrics-extractor` (default), or `dcgm-extractor` for the second
      on_missing         `Pass` (default): keep an endpoint without the figure; `Fail`: drop it
      fallback_on_empty  (false) keep all where none would be left
      algorithm          `type: threshold`, and `threshold` with `operator` (`LessThan`, `LessThanOrEqual`,
                         `GreaterThan`, `GreaterThanOrEqual`, `Equal`, `NotEqual`) and `value`
    Source: llm-d-router.
    """

    attribute: str
    algorithm: FilterAlgorithm
    on_missing: Literal["Pass", "Fail", ""] = "Pass"
    fallback_on_empty: bool = False

    def __post_init__(self) -> None:
        self._check_attribute(self.attribute, "attribute")

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        kept = [endpoint for endpoint in endpoints if self._keeps(endpoint)]
        return endpoints if not kept and self.fallback_on_empty else kept

    def _keeps(self, endpoint: Endpoint) -> bool:
        if (value := self._value(endpoint, self.attribute)) is None:
            return self.on_missing != "Fail"
        threshold = self.algorithm.threshold
        return _OPERATORS[threshold.operator](value, threshold.value)


@dataclass(frozen=True)
class FixedRange:
    """The values that score 0 and 1, or 1 and 0."""

    min: float
    max: float

    def __post_init__(self) -> None:
        if self.min >= self.max:
            raise ValueError(f"max: expected more than min ({self.min:g}), got {self.max:g}")


@dataclass(frozen=True)
class AdaptiveRange:
    """From the least to the largest value of the candidates."""


@dataclass(frozen=True)
class Normalization:
    """One of the two; neither: adaptive."""

    fixed_range: FixedRange | None = None
    adaptive_range: AdaptiveRange | None = None

    def __post_init__(self) -> None:
        if self.fixed_range is not None and self.adaptive_range is not None:
            raise ValueError("expected fixedRange or adaptiveRange, got both")


@dataclass(frozen=True)
class ScorerAlgorithm:
    """Which end of the range is the better one."""

    type: Literal["linear_lower_is_better", "linear_higher_is_better"]
    normalization: Normalization = field(default_factory=Normalization)


@dataclass(eq=False, kw_only=True)
class EndpointAttributeScorer(_ReadsAttribute, Scorer):
    """`endpoint-attribute-scorer`: a figure of each endpoint, scaled to 0..1; 0 for one without it.

    Parameters:
      attribute_key  name of the figure, as of `endpoint-attribute-filter`
      producer       the same
      algorithm      `type: linear_lower_is_better` or `linear_higher_is_better`, and `normalization`: `adaptiveRange`
                     (default: of the candidates; all 1 where all are the same) or `fixedRange` with `min` and `max`
    Source: llm-d-router.
    """

    attribute_key: str
    algorithm: ScorerAlgorithm

    def __post_init__(self) -> None:
        self._check_attribute(self.attribute_key, "attributeKey")

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        values = [self._value(endpoint, self.attribute_key) for endpoint in endpoints]
        known = [value for value in values if value is not None]
        if not known:
            return [0.0] * len(values)
        fixed = self.algorithm.normalization.fixed_range
        low, high = (min(known), max(known)) if fixed is None else (fixed.min, fixed.max)
        if low == high:
            return [0.0 if value is None else 1.0 for value in values]
        lower = self.algorithm.type == "linear_lower_is_better"
        ends = (high, low) if lower else (low, high)
        return [
            0.0 if value is None else min(1.0, max(0.0, (value - ends[0]) / (ends[1] - ends[0]))) for value in values
        ]
