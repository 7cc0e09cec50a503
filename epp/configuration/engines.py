"""`core-metrics-extractor`: which engine an endpoint runs, and under what names the engine reports its figures."""

import re
from dataclasses import dataclass, field
from typing import Final

from epp import protocol
from epp.documents.strict import nearest, short
from epp.plugin import Plugin
from epp.pool.engines import DEFAULT_ENGINE, ENGINES, Engine, Engines, Figure

_SPEC: Final = re.compile(r"\s*([a-zA-Z_:][a-zA-Z0-9_:]*)\s*(?:\{([^{}]*)\})?\s*")
_PAIR: Final = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*(?:"([^"]*)"|([^\s",]+))\s*')
_RESERVED: Final = "default"


@dataclass(frozen=True)
class CustomMetric:
    """A figure for `endpoint-attribute-filter` and `endpoint-attribute-scorer`: its name, and the metric."""

    attribute_key: str = ""
    metric_spec: str = ""


@dataclass(frozen=True)
class EngineConfig:
    """Names of one engine's metrics, as `metric` or `metric{label=value}`; empty: it does not report that."""

    name: str
    queued_requests_spec: str = ""
    running_requests_spec: str = ""
    kv_usage_spec: str = ""
    lora_spec: str = ""
    cache_info_spec: str = ""
    cache_block_size_label_name: str = "block_size"
    cache_num_blocks_label_name: str = "num_gpu_blocks"
    cache_block_size_spec: str = ""
    cache_num_blocks_spec: str = ""
    custom_metrics: list[CustomMetric] = field(default_factory=list)


@dataclass(eq=False)
class CoreMetricsExtractor(Plugin):
    """`core-metrics-extractor`: reads the engines' load from their `/metrics`. Always on; declared, it may say:

      default_engine     of endpoints whose labels name none: `vllm` (default), `sglang`, `trtllm-serve`,
                         `triton-tensorrt-llm`, `triton`, or one of `engine_configs`
      engine_label_key   label of an endpoint that names its engine; by default `llm-d.ai/engine-type` and
                         `inference.networking.k8s.io/engine-type`
      engine_configs     engines of one's own, or other names for the metrics of one that is known: `name`,
                         `queued_requests_spec`, `running_requests_spec`, `kv_usage_spec`, `lora_spec`,
                         `cache_info_spec` with `cache_block_size_label_name` and `cache_num_blocks_label_name`, or
                         `cache_block_size_spec` and `cache_num_blocks_spec`; `custom_metrics`, for
                         `endpoint-attribute-filter` and `-scorer`: `attribute_key` and `metric_spec`

    What is known of an engine beside these (its histograms, its counters of tokens) stays. Source: llm-d-router v0.10.
    """

    default_engine: str = DEFAULT_ENGINE
    engine_label_key: str = ""
    engine_configs: list[EngineConfig] = field(default_factory=list)

    def __post_init__(self) -> None:
        known = dict(ENGINES)
        for at, given in enumerate(self.engine_configs):
            if not given.name or given.name == _RESERVED:
                raise ValueError(f"engineConfigs[{at}].name: expected a name, not {short(given.name)}")
            known[given.name] = _engine(given, f"engineConfigs[{at}]")
        default = self.default_engine or DEFAULT_ENGINE
        if default not in known:
            expected = nearest(default, known) or "; expected one of " + ", ".join(known)
            raise ValueError(f"defaultEngine: no engine is called {short(default)}{expected}")
        labels = (self.engine_label_key,) if self.engine_label_key else protocol.ENGINE_LABELS
        self.engines = Engines(known, default, labels)


def _engine(given: EngineConfig, path: str) -> Engine:
    waiting = _figure(given.queued_requests_spec, f"{path}.queuedRequestsSpec")
    running = _figure(given.running_requests_spec, f"{path}.runningRequestsSpec")
    if waiting is None and running is None:
        raise ValueError(
            f"{path}: expected queuedRequestsSpec or runningRequestsSpec; without both no load can be read"
        )
    lora = _figure(given.lora_spec, f"{path}.loraSpec")
    info = _figure(given.cache_info_spec, f"{path}.cacheInfoSpec")
    size = _figure(given.cache_block_size_spec, f"{path}.cacheBlockSizeSpec")
    blocks = _figure(given.cache_num_blocks_spec, f"{path}.cacheNumBlocksSpec")
    if info is not None:
        size = size or info._replace(label=given.cache_block_size_label_name.encode())
        blocks = blocks or info._replace(label=given.cache_num_blocks_label_name.encode())
    custom = {}
    for at, metric in enumerate(given.custom_metrics):
        where = f"{path}.customMetrics[{at}]"
        figure = _figure(metric.metric_spec, f"{where}.metricSpec")
        if figure is None or not metric.attribute_key:
            raise ValueError(f"{where}: expected attributeKey and metricSpec")
        custom[metric.attribute_key] = figure
    return ENGINES.get(given.name, Engine(None, None))._replace(
        waiting=waiting,
        running=running,
        first_rank=None,
        kv_usage=_figure(given.kv_usage_spec, f"{path}.kvUsageSpec"),
        block_size=size,
        blocks=blocks,
        lora=b"" if lora is None else lora.metric,
        custom=custom,
    )


def _figure(spec: str, path: str) -> Figure | None:
    """Of `metric{label=value,...}`, with quotes or without."""
    if not spec.strip():
        return None
    found = _SPEC.fullmatch(spec)
    pairs = [_PAIR.fullmatch(pair) for pair in found[2].split(",")] if found and found[2] and found[2].strip() else []
    if found is None or None in pairs:
        raise ValueError(f"{path}: expected metric or metric{{label=value}}, got {short(spec)}")
    where = tuple((pair[1].encode(), (pair[2] or pair[3] or "").encode()) for pair in pairs if pair is not None)
    return Figure(found[1].encode(), where)
