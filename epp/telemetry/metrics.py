"""Prometheus metrics, one object per process; names and meanings are in `epp.telemetry.metrics_table`.

A request touches it two or three times, each time a few plain additions; everything else is put together when a scrape
is answered: labels, existing names, gauges of endpoints, statistics of plugins.
"""

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from epp import __version__
from epp.telemetry.metrics_table import (
    ANSWER,
    ENGINE,
    FAMILIES,
    MAX_MODELS,
    MAX_OBJECTIVES,
    OVERHEAD,
    RATIO,
    SHARE,
    STATUSES,
    WATCHED,
    Family,
)
from epp.telemetry.series import (
    LONGEST_MODEL,
    OTHER,
    AnswerSeries,
    EndpointSeries,
    FlowFigures,
    FlowSeries,
    Histogram,
    KvEventFigures,
    LimitSeries,
    Models,
    ModelSeries,
    PoolSeries,
    PrioritySeries,
    ReplicaFigures,
    ShadowSeries,
    Waits,
)

log = logging.getLogger("warmpath")

QUIET_S = 60.0
"""A reason of degradation is logged at most once in so many seconds; it is always counted."""
SLICE = 150
"""Samples handed out at once: about a millisecond of encoding."""

_Row = TypeVar("_Row")
Rows = Iterable[tuple[tuple[str, ...], "float | Histogram"]]
Statistics = Callable[[], Mapping[str, Mapping[str, float]]]
"""Name of a plugin -> name of a figure -> value."""
TIMES = (ANSWER, WATCHED, ENGINE)
"""Sources of a figure of answers, the one that the existing names show first: a sample is nearer to what clients wait
than what the engine measured."""
TOKENS = (ANSWER, ENGINE, WATCHED)
"""The engine counts all tokens, not those of a sample."""
EndpointStatistics = Callable[[], Mapping[str, Mapping[Any, Mapping[str, float]]]]
"""Name of a plugin -> endpoint -> name of a figure -> value."""


class _Load(Protocol):
    @property
    def waiting(self) -> int: ...
    @property
    def running(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...
    @property
    def at(self) -> float | None: ...


class _Endpoint(Protocol):
    """`epp.pool.store.Endpoint`, as far as telemetry may know it."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> str: ...
    @property
    def load(self) -> _Load: ...


class _Pool(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def endpoints(self) -> Sequence[_Endpoint]: ...


class Metrics:
    """Every metric of the EPP, in a registry of its own, so that two EPPs in one process (tests) do not meet.

    Used on the event loop only. `clock`: seconds, monotonic, the same that stamps `Load.at`.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.registry = CollectorRegistry()
        self._clock = clock
        self._pools: list[_Pool] = []
        self._sources: list[tuple[str, Statistics]] = []
        self._endpoint_sources: dict[str, EndpointStatistics] = {}
        self._kv_events: list[tuple[str, Callable[[], KvEventFigures | None]]] = []
        self._replicas: Callable[[], ReplicaFigures] | None = None
        self._flows: dict[str, tuple[FlowSeries, Callable[[], FlowFigures | None]]] = {}
        """Pool -> what waited in its flow control, and what waits."""
        self._waiting: Sequence[tuple[str, FlowSeries, FlowFigures]] = ()
        """Pools with flow control, and what waited there when a scrape began last."""
        self._limits: dict[str, LimitSeries] = {}
        self._of_pool: dict[str, PoolSeries] = {}
        self._handlers: dict[str, Callable[[], tuple[str, str]]] = {}
        """Pool -> name and type of its profile handler."""
        self._scrape_failures: dict[str, int] = {}
        self._models = Models(clock)
        self._engines: dict[str, AnswerSeries] = {}
        """Model, as the engines name it -> what their own histograms say."""
        self._running: dict[str, int] = {}
        """Any model's requests that were given to an endpoint, while there are any."""
        self._endpoints: WeakKeyDictionary[Any, EndpointSeries] = WeakKeyDictionary()
        self._shadows: dict[tuple[str, str], ShadowSeries] = {}
        """(pool, profile) -> what that profile would have done."""
        self._decision = Histogram(OVERHEAD)
        self._hit_ratio = Histogram(SHARE)
        self._ttft_ratio = Histogram(RATIO)
        self._tpot_ratio = Histogram(RATIO)
        self._slos: dict[tuple[str, str, str], int] = {}
        """(pool, objective, outcome) -> requests with an SLO."""
        self._objectives: set[str] = set()
        """Those that have labels."""
        self._refused: dict[tuple[int, str], int] = {}
        self._degraded: dict[str, int] = {}
        self._lasting: dict[str, bool] = {}
        """Reason of a degradation that has an end -> whether it goes on."""
        self._logged: dict[str, tuple[float, int]] = {}
        """Reason -> when it was last logged, and how often it was counted and not logged since."""
        self.registry.register(_Exported(self))
        ProcessCollector(registry=self.registry)

    # --- set-up

    def add_pool(self, pool: _Pool) -> None:
        """Show this pool's endpoints from now on; they are read at scrape time."""
        self._pools.append(pool)

    def add_source(self, statistics: Statistics, pool: str = "") -> None:
        """Show what this returns at scrape time, such as `Scheduler.statistics` of a pool."""
        self._sources.append((pool, statistics))

    def add_endpoint_source(self, statistics: EndpointStatistics, pool: str) -> None:
        """Show what this returns at scrape time of the endpoints in `pool`."""
        self._endpoint_sources[pool] = statistics

    def add_kv_events(self, pool: str, figures: Callable[[], KvEventFigures | None]) -> None:
        """Show what this returns at scrape time; None: the pool's configuration has no use for KV events."""
        self._kv_events.append((pool, figures))

    def add_replicas(self, figures: Callable[[], ReplicaFigures]) -> None:
        """Show what this returns at scrape time."""
        self._replicas = figures

    def add_flow(self, pool: str, figures: Callable[[], FlowFigures | None]) -> FlowSeries:
        """Show what this returns at scrape time (None: flow control is off), and what is counted in the result."""
        series = FlowSeries(self._models)
        self._flows[pool] = series, figures
        return series

    def add_limits(self, pool: str) -> LimitSeries:
        """Show what is counted in the result."""
        series = self._limits[pool] = LimitSeries()
        return series

    def add_pool_series(self, pool: str) -> PoolSeries:
        """Show what is counted in the result."""
        series = self._of_pool[pool] = PoolSeries()
        return series

    def add_handler(self, pool: str, handler: Callable[[], tuple[str, str]]) -> None:
        """Show this name and type of the pool's profile handler beside what it decided."""
        self._handlers[pool] = handler

    # --- one request

    def request_decided(
        self, endpoint: _Endpoint, model: str, seconds: float, tokens: int, predicted: int | None
    ) -> None:
        """A request was given to `endpoint`, `seconds` after it was complete.

        `tokens`: estimated length of its prompt; `predicted`: how many of these the endpoint is predicted to hold, None
        where no plugin looked. Each request that was decided is to be finished, once.
        """
        self._decision.observe(seconds)
        self._running[model] = self._running.get(model, 0) + 1
        at_endpoint = self.endpoint(endpoint)
        at_endpoint.decisions += 1
        at_endpoint.in_flight += 1
        at_endpoint.tokens += tokens
        if predicted is not None:
            at_endpoint.predicted += predicted
            if tokens:
                self._hit_ratio.observe(predicted / tokens)

    # Each argument is a figure of one request: an object to carry them would cost every request its making.
    def request_finished(  # noqa: PLR0913
        self,
        endpoint: _Endpoint,
        model: str,
        status: int,
        seconds: float,
        *,
        size: int = 0,
        source: str | None = ANSWER,
        ttft: float | None = None,
        prompt: int = -1,
        completion: int = -1,
        cached: int = -1,
        predicted: int | None = None,
        stages: tuple[str, str] | None = None,
    ) -> None:
        """It has left `endpoint` (the one it was decided for). Token counts as the answer reported them, -1 = not.

        `size`: bytes of its body. `source`: what its answer counts as, if it was shown; None: as nothing. `predicted`
        as at the decision; None also where another endpoint served it. `stages`: its pool and which stages had
        endpoints of their own, where a handler divides requests.
        """
        if (running := self._running.pop(model, 1) - 1) > 0:
            self._running[model] = running
        at_model = self._models.answered(model) if 200 <= status < 300 else self._models.of(model)
        at_model.size.observe(size)
        if status not in STATUSES:
            status = status // 100 * 100 if 100 <= status <= 599 else 0
        at_model.statuses[status] = at_model.statuses.get(status, 0) + 1
        at_model.duration.observe(seconds)
        if stages is not None:
            at_model.stages[stages] = at_model.stages.get(stages, 0) + 1
        at_endpoint = self.endpoint(endpoint)
        at_endpoint.in_flight -= 1
        if ttft is None and prompt < 0 and completion < 0:
            if 200 <= status < 300 and at_endpoint.counts_answers is False and WATCHED not in at_model.answers:
                self.degraded("answer-unknown", f"neither the gateway nor {endpoint.name} says how it answers")
            return
        if cached >= 0 and predicted is not None:
            at_endpoint.checked_cached += cached
            at_endpoint.checked_predicted += predicted
        if source is None:
            return
        answers = at_model.of(source)
        if ttft is not None:
            answers.ttft.observe(ttft)
        if prompt >= 0:
            answers.prompt.observe(prompt)
        if completion >= 0:
            answers.completion.observe(completion)
            if completion > 0:
                answers.ntpot.observe(seconds / completion)
            if completion > 1 and ttft is not None:
                answers.tpot.observe(max(0.0, seconds - ttft) / (completion - 1))
        if cached >= 0:
            answers.cached.observe(cached)

    def engine_counts_answers(self, endpoint: _Endpoint, *, counts: bool) -> None:
        """Whether this endpoint's engine has histograms of its answers."""
        self.endpoint(endpoint).counts_answers = counts

    def engine_answered(
        self, model: str, figure: str, buckets: Iterable[tuple[float, float, int]], total: float
    ) -> None:
        """What came to an engine's own histogram: lowest and highest value and how many, and their sum.

        `figure`: a histogram of `AnswerSeries`. `model`: as the engine names it, the same for all adapters.
        """
        if model not in self._engines and (len(self._engines) >= MAX_MODELS or len(model) > LONGEST_MODEL):
            model = OTHER
        histogram: Histogram = getattr(self._engines.setdefault(model, AnswerSeries()), figure)
        for low, high, count in buckets:
            histogram.spread(low, high, count)
        histogram.add_to_total(total)

    def predicted(self, ttft_ratio: float, tpot_ratio: float | None) -> None:
        """What was measured of a request, over what was predicted; None: not seen."""
        self._ttft_ratio.observe(ttft_ratio)
        if tpot_ratio is not None:
            self._tpot_ratio.observe(tpot_ratio)

    def slo_ended(self, pool: str, objective: str, outcome: str) -> None:
        """A request with an SLO came to its end. `objective`: "" = its own headers'; the pool's own are few."""
        if objective not in self._objectives:
            if len(self._objectives) >= MAX_OBJECTIVES:
                objective = OTHER
            self._objectives.add(objective)
        key = pool, objective or "(headers)", outcome
        self._slos[key] = self._slos.get(key, 0) + 1

    def endpoint_failed(self, endpoint: _Endpoint) -> None:
        """A request failed by this endpoint's fault."""
        self.endpoint(endpoint).failures += 1

    def scrape_failed(self, pool: str) -> None:
        """A scrape of one of the pool's endpoints brought nothing of use."""
        self._scrape_failures[pool] = self._scrape_failures.get(pool, 0) + 1

    def request_failed(self, status: int, reason: str) -> None:
        """A request got its answer from us. `reason` is from a small fixed set: a drop reason or an error's kind."""
        self._refused[status, reason] = self._refused.get((status, reason), 0) + 1

    def degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        """Count a degradation and log it, at most once a minute. `reason` is a fixed word; `detail` is only logged.

        `lasting`: it goes on until `recovered` is called, and `warmpath_degraded_now` says so.
        """
        self._degraded[reason] = self._degraded.get(reason, 0) + 1
        if lasting:
            self._lasting[reason] = True
        now = self._clock()
        said = self._logged.get(reason)
        if said is not None and now - said[0] < QUIET_S:
            self._logged[reason] = (said[0], said[1] + 1)
            return
        self._logged[reason] = (now, 0)
        more = f" (and {said[1]} more since this was last logged)" if said is not None and said[1] else ""
        log.warning("degraded: %s%s%s", reason, f": {detail[:500]}" if detail else "", more)

    def shadow_compared(self, pool: str, profile: str, agreed: bool, regret: float, failed: bool) -> None:
        """The shadow profile picked for a request too; its pick would have cost `regret` seconds more."""
        series = self._shadows.setdefault((pool, profile), ShadowSeries())
        if failed:
            series.failed += 1
            return
        series.same += agreed
        series.other += not agreed
        series.dearer += max(0.0, regret)
        series.cheaper += max(0.0, -regret)

    def recovered(self, reason: str) -> None:
        """A lasting degradation is over; of one that was not there nothing is said."""
        if self._lasting.get(reason):
            self._lasting[reason] = False
            log.info("recovered: %s", reason)

    # --- figures

    def shadows(self, pool: str) -> dict[str, ShadowSeries]:
        """Every shadow profile this pool had since the start."""
        return {profile: series for (of, profile), series in self._shadows.items() if of == pool}

    def endpoint(self, endpoint: _Endpoint) -> EndpointSeries:
        """What was counted for this endpoint; forgotten with the object."""
        series = self._endpoints.get(endpoint)
        if series is None:
            series = self._endpoints[endpoint] = EndpointSeries()
        return series

    def endpoint_statistics(self, pool: _Pool) -> dict[Any, dict[str, dict[str, float]]]:
        """What plugins report of each endpoint in the pool: endpoint -> plugin -> figure -> value."""
        found: dict[Any, dict[str, dict[str, float]]] = {endpoint: {} for endpoint in pool.endpoints}
        for plugin, figures in self._reported(pool).items():
            for endpoint, values in figures.items():
                if endpoint in found:
                    found[endpoint][plugin] = self._numbers(plugin, values)
        return found

    def endpoint_figure(self, pool: _Pool, figure: str) -> dict[Any, float]:
        """One of these by endpoint, of the last plugin that reports a number under this name."""
        return {
            endpoint: value
            for figures in self._reported(pool).values()
            for endpoint, values in figures.items()
            if isinstance(value := values.get(figure), (int, float))
        }

    def _reported(self, pool: _Pool) -> Mapping[str, Mapping[Any, Mapping[str, float]]]:
        """Plugin -> endpoint -> figure -> value, as plugins report it."""
        source = self._endpoint_sources.get(pool.name)
        return source() if source is not None else {}

    def statistics(self, pool: _Pool) -> dict[str, dict[str, float]]:
        """What plugins report of themselves: plugin -> figure -> value."""
        return {
            plugin: self._numbers(plugin, figures)
            for name, source in self._sources
            if name == pool.name
            for plugin, figures in source().items()
        }

    def flow(self, pool: str) -> FlowFigures | None:
        """What waits in the pool's flow control; None: it has none."""
        return self._flows[pool][1]() if pool in self._flows else None

    @property
    def refusals(self) -> int:
        """Requests that got their answer from us."""
        return sum(self._refused.values())

    @property
    def degraded_now(self) -> list[str]:
        """Reasons of degradations that go on."""
        return [reason for reason, on in self._lasting.items() if on]

    def kv_events(self, pool: str) -> dict[str, tuple[str, float | None, float]]:
        """Name of an endpoint -> state of its KV events, lag in seconds, trust; empty where no plugin subscribes to
        them.
        """
        sources = [source() for name, source in self._kv_events if name == pool]
        return {each[0]: each[1:] for figures in sources if figures is not None for each in figures.endpoints}

    def look_at_flows(self) -> None:
        """A scrape begins: all rows of flow control are of this moment, and what waits is counted once for them."""
        self._waiting = [
            (pool, series, figures)
            for pool, (series, source) in self._flows.items()
            if (figures := source()) is not None
        ]

    def rows(self, name: str) -> Rows:
        """The rows of a family of `FAMILIES` as they stand: label values and a number or a histogram."""
        return _ROWS[name](self)

    # --- rows, one method for each shape

    def _of_models(self, of: Callable[[ModelSeries], float | Histogram]) -> Rows:
        return [((model,), of(series)) for model, series in self._models]

    def _of_answers(self, of: Callable[[AnswerSeries], Histogram], sources: tuple[str, ...]) -> Rows:
        """By model and source, of each model those first that something was counted in."""
        known = dict(self._models)
        for model in dict.fromkeys((*known, *self._engines)):
            found = dict(known[model].answers) if model in known else {}
            if model in self._engines:
                found[ENGINE] = self._engines[model]
            rows = [((model, source), of(found[source])) for source in sources if source in found]
            yield from sorted(rows, key=lambda row: not any(row[1].counts))

    def _running_of_models(self) -> Rows:
        for model, _ in self._models:
            if model != OTHER:
                yield (model,), self._running.get(model, 0)
        others = sum(count for model, count in self._running.items() if model not in self._models)
        if others or self._models.other.statuses:
            yield (OTHER,), others

    def _of_endpoints(self, of: Callable[[EndpointSeries], int]) -> Rows:
        for pool in self._pools:
            for endpoint in pool.endpoints:
                yield (pool.name, endpoint.name), of(self.endpoint(endpoint))

    def _of_loads(self, of: Callable[[_Load], float]) -> Rows:
        for pool in self._pools:
            for endpoint in pool.endpoints:
                if endpoint.load.at is not None:
                    yield (pool.name, endpoint.name), of(endpoint.load)

    def _of_pools(self, of: Callable[[_Load], float], summary: Callable[[list[float]], float]) -> Rows:
        for pool in self._pools:
            scraped = [of(endpoint.load) for endpoint in pool.endpoints if endpoint.load.at is not None]
            yield (pool.name,), summary(scraped) if scraped else 0.0

    def _load_age(self, load: _Load) -> float:
        return max(0.0, self._clock() - (load.at or 0.0))

    def _statuses(self) -> Rows:
        for model, series in self._models:
            for status, count in series.statuses.items():
                yield (model, str(status)), count

    def _errors(self) -> Rows:
        for model, series in self._models:
            for status, count in series.statuses.items():
                if status >= 400:
                    yield (model, model, str(status)), count
        by_status: dict[int, int] = {}
        for (status, _), count in self._refused.items():
            by_status[status] = by_status.get(status, 0) + count
        for status, count in by_status.items():
            yield ("", "", str(status)), count

    def _attempts(self) -> Rows:
        for pool in self._pools:
            for endpoint in pool.endpoints:
                namespace, _, pod = endpoint.name.rpartition("/")
                port = endpoint.address.rpartition(":")[2]
                yield ("success", pod, namespace, port), self.endpoint(endpoint).decisions
        yield (
            ("failure", "", "", ""),
            sum(count for (status, _), count in self._refused.items() if status in (429, 503)),
        )

    def _stage_decisions(self) -> Rows:
        for model, series in self._models:
            for (pool, stages), count in series.stages.items():
                yield (*self._handlers[pool](), model, stages), count

    def _in_flight_of_pods(self) -> Rows:
        for pool in self._pools:
            for endpoint in pool.endpoints:
                namespace, _, pod = endpoint.name.rpartition("/")
                yield (pod, namespace), self.endpoint(endpoint).in_flight

    def _predicted_by_tier(self) -> Rows:
        for pool, series in self._of_pool.items():
            yield from (((pool, tier), getattr(series, tier)) for tier in ("device", "l1", "l2"))

    def _of_priorities(self, of: Callable[[PrioritySeries], Histogram]) -> Rows:
        for pool, pool_series in self._of_pool.items():
            for priority, series in pool_series.priorities.items():
                yield (pool, OTHER if priority is None else str(priority)), of(series)

    def _of_kv_events(self, of: Callable[[KvEventFigures], Rows]) -> Rows:
        for pool, source in self._kv_events:
            if (figures := source()) is not None:
                for labels, value in of(figures):
                    yield (pool, *labels), value

    def _of_replicas(self, of: Callable[[ReplicaFigures], Rows]) -> Rows:
        return [] if self._replicas is None else of(self._replicas())

    def _flow_waits(self) -> Rows:
        for pool, (series, _) in self._flows.items():
            for labels, histogram in series.waits.items():
                yield (pool, *labels), histogram

    def _flow_ends(self) -> Rows:
        for pool, (series, _) in self._flows.items():
            for (_, priority, outcome, _), histogram in series.waits.items():
                yield (outcome, priority, pool), sum(histogram.counts)

    def _limit_refusals(self) -> Rows:
        for pool, series in self._limits.items():
            for labels, count in series.refusals.items():
                yield (pool, *labels), count

    def _of_flows(self, of: Callable[[Waits], int]) -> Rows:
        for pool, series, figures in self._waiting:
            for row in figures.waiting:
                labels = series.label(row.fairness_id), series.priority(row.priority), series.model(row.model)
                yield (pool, *labels), of(row)

    def _of_bands(self, of: Callable[[tuple[int, float, float]], float]) -> Rows:
        for pool, _, figures in self._waiting:
            for band in figures.bands:
                yield (str(band[0]), pool), of(band)

    def _of_all_bands(self, at: int) -> Rows:
        for pool, _, figures in self._waiting:
            if (share := figures.whole[at]) is not None:
                yield (pool,), share

    def _stale_endpoints(self) -> Rows:
        for _, source in self._sources:
            for plugin, figures in source().items():
                if "stale_endpoints" in figures:
                    yield (plugin,), self._numbers(plugin, figures).get("stale_endpoints", 0)

    def _saturations(self) -> Rows:
        for pool, _, figures in self._waiting:
            yield (pool,), figures.saturation

    def _statistics(self) -> Rows:
        for pool, source in self._sources:
            for plugin, figures in source().items():
                for name, value in self._numbers(plugin, figures).items():
                    yield (pool, plugin, name), value

    def _shadow_picks(self) -> Rows:
        for (pool, profile), series in self._shadows.items():
            for outcome in ("same", "other", "failed"):
                yield (pool, profile, outcome), getattr(series, outcome)

    def _of_plugins_and_endpoints(self) -> Rows:
        for pool in self._pools:
            for endpoint, reported in self.endpoint_statistics(pool).items():
                for plugin, figures in reported.items():
                    for name, value in figures.items():
                        yield (pool.name, plugin, endpoint.name, name), value

    def _numbers(self, plugin: str, figures: Mapping[str, float]) -> dict[str, float]:
        """Those that are numbers: a user's plugin must not cost us the page."""
        numbers = {}
        for name, value in figures.items():
            if isinstance(value, int | float):
                numbers[name] = value
            else:
                self.degraded("statistic-no-number", f"{plugin}: {name} is a {type(value).__name__}")
        return numbers


_ROWS: dict[str, Callable[[Metrics], Rows]] = {
    "warmpath_requests_total": Metrics._statuses,
    "warmpath_refused_total": lambda m: [((str(s), r), n) for (s, r), n in m._refused.items()],
    "inference_objective_request_error_total": Metrics._errors,
    "warmpath_requests_running": Metrics._running_of_models,
    "warmpath_request_bytes": lambda m: m._of_models(lambda s: s.size),
    "warmpath_request_duration_seconds": lambda m: m._of_models(lambda s: s.duration),
    "warmpath_ttft_seconds": lambda m: m._of_answers(lambda s: s.ttft, TIMES),
    "warmpath_priority_duration_seconds": lambda m: m._of_priorities(lambda s: s.duration),
    "warmpath_priority_ttft_seconds": lambda m: m._of_priorities(lambda s: s.ttft),
    "warmpath_tpot_seconds": lambda m: m._of_answers(lambda s: s.tpot, TIMES),
    "warmpath_ntpot_seconds": lambda m: m._of_answers(lambda s: s.ntpot, TIMES),
    "warmpath_prompt_tokens": lambda m: m._of_answers(lambda s: s.prompt, TOKENS),
    "warmpath_completion_tokens": lambda m: m._of_answers(lambda s: s.completion, TOKENS),
    "warmpath_cached_tokens": lambda m: m._of_answers(lambda s: s.cached, TOKENS),
    "warmpath_decision_seconds": lambda m: [((), m._decision)],
    "warmpath_prefix_hit_ratio": lambda m: [((), m._hit_ratio)],
    "warmpath_slo_requests_total": lambda m: m._slos.items(),
    "warmpath_ttft_prediction_ratio": lambda m: [((), m._ttft_ratio)],
    "warmpath_tpot_prediction_ratio": lambda m: [((), m._tpot_ratio)],
    "warmpath_flow_wait_seconds": Metrics._flow_waits,
    "llm_d_epp_flow_control_requests_total": Metrics._flow_ends,
    "warmpath_flow_waiting": lambda m: m._of_flows(lambda row: row.requests),
    "warmpath_flow_waiting_bytes": lambda m: m._of_flows(lambda row: row.bytes),
    "warmpath_pool_saturation": Metrics._saturations,
    "llm_d_epp_flow_control_capacity_utilization_requests": lambda m: m._of_bands(lambda band: band[1]),
    "llm_d_epp_flow_control_capacity_utilization_bytes": lambda m: m._of_bands(lambda band: band[2]),
    "llm_d_epp_flow_control_global_capacity_utilization_requests": lambda m: m._of_all_bands(0),
    "llm_d_epp_flow_control_global_capacity_utilization_bytes": lambda m: m._of_all_bands(1),
    "llm_d_epp_flow_control_stale_endpoints": Metrics._stale_endpoints,
    "warmpath_limit_refused_total": Metrics._limit_refusals,
    "warmpath_endpoint_decisions_total": lambda m: m._of_endpoints(lambda s: s.decisions),
    "inference_extension_scheduler_attempts_total": Metrics._attempts,
    "llm_d_epp_disagg_decision_total": Metrics._stage_decisions,
    "warmpath_predicted_cached_tokens_total": Metrics._predicted_by_tier,
    "warmpath_endpoint_prompt_tokens_total": lambda m: m._of_endpoints(lambda s: s.tokens),
    "warmpath_endpoint_predicted_cached_tokens_total": lambda m: m._of_endpoints(lambda s: s.predicted),
    "warmpath_endpoint_checked_predicted_tokens_total": lambda m: m._of_endpoints(lambda s: s.checked_predicted),
    "warmpath_endpoint_checked_cached_tokens_total": lambda m: m._of_endpoints(lambda s: s.checked_cached),
    "warmpath_endpoint_failures_total": lambda m: m._of_endpoints(lambda s: s.failures),
    "warmpath_endpoint_in_flight": lambda m: m._of_endpoints(lambda s: s.in_flight),
    "llm_d_epp_inflight_requests": Metrics._in_flight_of_pods,
    "warmpath_endpoint_waiting": lambda m: m._of_loads(lambda load: load.waiting),
    "warmpath_endpoint_running": lambda m: m._of_loads(lambda load: load.running),
    "warmpath_endpoint_kv_usage": lambda m: m._of_loads(lambda load: load.kv_usage),
    "warmpath_endpoint_load_age_seconds": lambda m: m._of_loads(m._load_age),
    "warmpath_scrape_failures_total": lambda m: [
        ((pool.name,), m._scrape_failures.get(pool.name, 0)) for pool in m._pools
    ],
    "warmpath_endpoint_kv_events": lambda m: m._of_kv_events(lambda f: [((e[0], e[1]), 1) for e in f.endpoints]),
    "warmpath_endpoint_kv_events_lag_seconds": lambda m: m._of_kv_events(
        lambda f: [((name,), lag) for name, _, lag, _ in f.endpoints if lag is not None]
    ),
    "warmpath_endpoint_prefix_trust": lambda m: m._of_kv_events(lambda f: [((e[0],), e[3]) for e in f.endpoints]),
    "warmpath_kv_events_total": lambda m: m._of_kv_events(lambda f: [((o,), n) for o, n in f.counts.items()]),
    "warmpath_replica_peers": lambda m: m._of_replicas(
        lambda f: [((state,), count) for state, count in Counter(peer[1] for peer in f.peers).items()]
    ),
    "warmpath_replica_lag_seconds": lambda m: m._of_replicas(
        lambda f: [((peer,), lag) for peer, _, lag, _ in f.peers if lag is not None]
    ),
    "warmpath_replica_agreement": lambda m: m._of_replicas(
        lambda f: [((peer,), share) for peer, _, _, share in f.peers if share is not None]
    ),
    "warmpath_replica_in_flight": lambda m: m._of_replicas(lambda f: [((), f.in_flight)]),
    "warmpath_replica_frames_total": lambda m: m._of_replicas(lambda f: [((o,), n) for o, n in f.frames.items()]),
    "warmpath_endpoints": lambda m: [((pool.name,), len(pool.endpoints)) for pool in m._pools],
    "inference_pool_average_kv_cache_utilization": lambda m: m._of_pools(lambda load: load.kv_usage, fmean),
    "llm_d_epp_std_dev_kv_cache_utilization": lambda m: m._of_pools(lambda load: load.kv_usage, pstdev),
    "inference_pool_average_queue_size": lambda m: m._of_pools(lambda load: load.waiting, fmean),
    "llm_d_epp_std_dev_queue_size": lambda m: m._of_pools(lambda load: load.waiting, pstdev),
    "inference_pool_average_running_requests": lambda m: m._of_pools(lambda load: load.running, fmean),
    "llm_d_epp_std_dev_running_requests": lambda m: m._of_pools(lambda load: load.running, pstdev),
    "warmpath_plugin_statistic": Metrics._statistics,
    "warmpath_plugin_endpoint_statistic": Metrics._of_plugins_and_endpoints,
    "warmpath_shadow_picks_total": Metrics._shadow_picks,
    "warmpath_shadow_dearer_seconds_total": lambda m: [(key, series.dearer) for key, series in m._shadows.items()],
    "warmpath_shadow_cheaper_seconds_total": lambda m: [(key, series.cheaper) for key, series in m._shadows.items()],
    "warmpath_degraded_total": lambda m: [((reason,), count) for reason, count in m._degraded.items()],
    "warmpath_degraded_now": lambda m: [((reason,), float(on)) for reason, on in m._lasting.items()],
    "warmpath_info": lambda m: [((__version__,), 1)],
}


class _Exported(Collector):
    """Our rows as `prometheus_client` wants them, family by family, each followed by its existing names.

    A large family comes in slices, one after the other under the same name.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterator[Metric]:
        self._metrics.look_at_flows()
        for family in FAMILIES:
            rows = list(self._metrics.rows(family.name))
            yield from _exported(family, family.name, family.labels, rows)
            for name, labels, first, fixed in family.aliases:
                columns = [family.labels.index(ours) for _, ours in labels]
                chosen = rows if not first else _firsts(rows, family.labels.index(first))
                values = tuple(value for _, value in fixed)
                renamed = [(tuple(row[column] for column in columns) + values, value) for row, value in chosen]
                yield from _exported(family, name, tuple(theirs for theirs, _ in (*labels, *fixed)), renamed)


def _firsts(rows: Rows, column: int) -> Rows:
    """Of rows that differ in this column alone the first."""
    found: dict[tuple[str, ...], tuple[tuple[str, ...], float | Histogram]] = {}
    for row, value in rows:
        found.setdefault(row[:column] + row[column + 1 :], (row, value))
    return found.values()


def _exported(family: Family, name: str, labels: tuple[str, ...], rows: Rows) -> Iterator[Metric]:
    if family.kind == "histogram":
        for some in _slices(list(rows), max(1, SLICE // (len(family.bounds) + 3))):
            histogram = HistogramMetricFamily(name, family.help, labels=labels)
            for row, value in some:
                assert isinstance(value, Histogram)
                histogram.add_metric(row, value.cumulative(), value.total)
            yield histogram
        return
    numbers: dict[tuple[str, ...], float] = {}
    for row, value in rows:
        assert not isinstance(value, Histogram)
        numbers[row] = numbers.get(row, 0.0) + value
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    for part in _slices(list(numbers.items()), SLICE):
        exported = kind(name, family.help, labels=labels)
        for row, number in part:
            exported.add_metric(row, number)
        yield exported


def _slices(rows: Sequence[_Row], size: int) -> Iterator[Sequence[_Row]]:
    """At least one, even of nothing: a family without rows is named too."""
    for start in range(0, max(1, len(rows)), size):
        yield rows[start : start + size]
