"""The pod's `/metrics` page: vLLM 0.32's names, labels, units and buckets (`vllm/v1/metrics/loggers.py`)."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from tooling.simulator.engine import Engine, Job

REASONS = ("stop", "length", "abort", "error")
_SECONDS = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_FIRST = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class Histograms:
    """What is observed per request and token. Times are real seconds, as a client sees them."""

    def __init__(self, registry: CollectorRegistry, labels: dict[str, str]) -> None:
        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            return Histogram(f"vllm:{name}", text, list(labels), buckets=tuple(buckets), registry=registry).labels(
                **labels
            )

        self._first = histogram("time_to_first_token_seconds", "Time to first token.", _FIRST)
        self._between = histogram("inter_token_latency_seconds", "Time between tokens.", _BETWEEN)
        self._whole = histogram("e2e_request_latency_seconds", "Time from arrival to last token.", _SECONDS)
        self._queue = histogram("request_queue_time_seconds", "Time in the waiting queue.", _SECONDS)
        self._prefill = histogram("request_prefill_time_seconds", "Time from admission to first token.", _SECONDS)
        self._decode = histogram("request_decode_time_seconds", "Time from first to last token.", _SECONDS)
        self._each = histogram("request_time_per_output_token_seconds", "Mean time between a job's tokens.", _BETWEEN)
        self._prompt = histogram("request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._output = histogram("request_generation_tokens", "Generated tokens.", _TOKENS)
        self._computed = histogram("request_prefill_kv_computed_tokens", "Prompt tokens not found in a cache.", _TOKENS)
        success = Counter(
            "vllm:request_success", "Requests by how they ended.", [*labels, "finished_reason"], registry=registry
        )
        self._success = {reason: success.labels(**labels, finished_reason=reason) for reason in REASONS}

    def token(self, job: Job, last_at: float, at: float, number: int) -> None:
        """The `number`th token of a job came `at`; the one before (or the request itself) at `last_at`."""
        admitted_at = job.arrived_at if job.admitted_at is None else job.admitted_at
        if number == 1:
            job.first_token_at = at
            self._first.observe(at - job.arrived_at)
            self._queue.observe(max(0.0, admitted_at - job.arrived_at))
            self._prefill.observe(at - admitted_at)
            self._computed.observe(job.prompt - job.cached)
        else:
            self._between.observe(at - last_at)
        if number == job.output:
            decode = at - (at if job.first_token_at is None else job.first_token_at)
            self._whole.observe(at - job.arrived_at)
            self._decode.observe(decode)
            self._each.observe(decode / max(1, job.output - 1))
            self._prompt.observe(job.prompt)
            self._output.observe(job.output)

    def finished(self, reason: str) -> None:
        """A request ended: `stop`, `length`, `abort` or `error`."""
        self._success[reason].inc()


@dataclass(frozen=True)
class Adapters:
    """LoRA: the adapters served. Without one, `lora_requests_info` is absent, as in vLLM."""

    names: tuple[str, ...] = ()


class EngineCollector(Collector):
    """Counters and gauges that live in the engine, read when the page is."""

    def __init__(self, engine: Engine, labels: dict[str, str], adapters: Adapters, wall: Callable[[], float]) -> None:
        self._engine = engine
        self._names, self._values = list(labels), list(labels.values())
        self._adapters = adapters
        self._wall = wall

    def collect(self) -> Iterable[Metric]:
        engine, totals = self._engine, self._engine.totals
        yield self._gauge("num_requests_running", "Requests in the running batch.", len(engine.running))
        yield self._gauge("num_requests_waiting", "Requests waiting.", len(engine.waiting))
        yield self._by(
            GaugeMetricFamily,
            "num_requests_waiting_by_reason",
            "reason",
            {"capacity": len(engine.waiting), "deferred": 0},
        )
        yield self._gauge("kv_cache_usage_perc", "Share of KV blocks in use, 0 to 1.", engine.kv_usage)
        yield self._counter("prefix_cache_queries", "Tokens looked up in the prefix cache.", totals.prefix_queries)
        yield self._counter("prefix_cache_hits", "Tokens found in the prefix cache.", totals.prefix_hits)
        yield self._counter("external_prefix_cache_queries", "Tokens looked up in a connector.", 0)
        yield self._counter("external_prefix_cache_hits", "Tokens found in a connector.", 0)
        yield self._counter("prompt_tokens", "Prompt tokens processed.", totals.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in a cache.", totals.prefix_hits)
        computed = totals.computed_tokens
        sources = {"local_compute": computed, "local_cache_hit": totals.prefix_hits, "external_kv_transfer": 0}
        yield self._by(CounterMetricFamily, "prompt_tokens_by_source", "source", sources)
        tiers = dict.fromkeys(("device", "host", "p2p", "disk", "external_unspecified"), 0)
        tiers["device"] = totals.prefix_hits
        yield self._by(CounterMetricFamily, "prompt_tokens_cached_by_source", "source", tiers)
        yield self._counter("generation_tokens", "Generated tokens.", totals.generation_tokens)
        yield self._steps(totals.steps, computed + totals.generation_tokens)
        yield self._counter("num_preemptions", "Preemptions.", totals.preemptions)
        yield self._cache_config()
        if self._adapters.names:
            yield self._lora()

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _steps(self, steps: int, tokens: int) -> Metric:
        """Of the histogram of tokens a step the number of steps and the sum; their sizes are not kept."""
        family = HistogramMetricFamily("vllm:iteration_tokens_total", "Tokens a step.", labels=self._names)
        family.add_metric(self._values, [("+Inf", steps)], tokens)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=self._names)
        family.add_metric(self._values, value)
        return family

    def _by(
        self, kind: type[GaugeMetricFamily] | type[CounterMetricFamily], name: str, label: str, values: dict[str, int]
    ) -> Metric:
        family = kind(f"vllm:{name}", f"{name} by {label}.", labels=[*self._names, label])
        for value, amount in values.items():
            family.add_metric([*self._values, value], amount)
        return family

    def _cache_config(self) -> Metric:
        parameters = self._engine.parameters
        labels = {
            "block_size": str(parameters.block_size),
            "num_gpu_blocks": str(parameters.blocks),
            "kv_cache_size_tokens": str(parameters.capacity),
            "prefix_caching_hash_algo": "xxhash",
            "enable_prefix_caching": "True",
            "engine": self._values[0],
        }
        family = GaugeMetricFamily("vllm:cache_config_info", "Information of the cache.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _lora(self) -> Metric:
        def names(jobs: Iterable[Job]) -> str:
            return ",".join(sorted({job.adapter for job in jobs if job.adapter}))

        labels = {
            "max_lora": str(self._engine.parameters.adapter_slots),
            "running_lora_adapters": names(self._engine.running),
            "waiting_lora_adapters": names(self._engine.waiting),
        }
        family = GaugeMetricFamily(
            "vllm:lora_requests_info", "Adapters in use; the value is a time.", labels=list(labels)
        )
        family.add_metric(list(labels.values()), self._wall())
        return family


class Page:
    """All metrics of one pod."""

    def __init__(self, engine: Engine, model: str, adapters: Adapters, wall: Callable[[], float]) -> None:
        labels = {"engine": "0", "model_name": model}
        self._registry: Any = CollectorRegistry()
        self._registry.register(EngineCollector(engine, labels, adapters, wall))
        self.histograms = Histograms(self._registry, labels)

    def render(self) -> bytes:
        """The page in Prometheus' text format 1.0.0."""
        return generate_latest(self._registry)
