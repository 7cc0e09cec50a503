"""The table of metrics: every name, its labels and what it means. `docs/reference/metrics.md` is made of it.

One canonical set, `warmpath_*`. Beside it the names that dashboards of GIE (`inference_*`, v1.5) and llm-d
(`llm_d_epp_*`, router v0.10) already read: copies made while a scrape is answered, so they cost a request nothing.
"""

from http import HTTPStatus
from typing import Literal, NamedTuple

MAX_MODELS = 100
"""Distinct values of the label `model`, which clients choose; all others count as `other`."""

STATUSES = frozenset({0, 499, 529, *map(int, HTTPStatus)})
"""Values of the label `status`: those that have a meaning, 499 (its client left) and 529 (overloaded) of gateways and
engines among them. Any other counts as the first of its hundred, as clients take it (RFC 9110, section 15)."""

MAX_OBJECTIVES = 100
"""InferenceObjectives with labels of their own; those that come later count as `other`."""
MAX_PRIORITIES = 100
"""Priorities with labels of their own, which InferenceObjectives have; those that come later count as `other`."""
MAX_FLOWS = 100
"""Distinct values of the label `fairness_id`; all others count as `other`."""
MAX_PAIRS = 200
"""Pairs of the labels `fairness_id` and `model` in histograms; the model of all others counts as `other`."""

LATENCY = (
    *(0.005, 0.025, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8, 1.0, 1.25, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 15.0, 20.0),
    *(30.0, 45.0, 60.0, 120.0, 180.0, 240.0, 300.0, 360.0, 480.0, 600.0, 900.0, 1200.0, 1800.0, 2700.0, 3600.0),
)
"""Seconds; the bounds of GIE's request histograms, so that both names give one dashboard the same quantiles."""
OVERHEAD = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
QUEUED = (
    *(0.0001, 0.0005, 0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0),
    *(120.0, 300.0, 600.0),
)
PER_TOKEN = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
TOKENS = (1.0, *(float(2**n) for n in range(3, 21)))
BYTES = tuple(float(2**n) for n in range(6, 31, 2))
RATIO = (0.25, 0.5, 0.67, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
SHARE = tuple(n / 10 for n in range(11))

ANSWER, WATCHED, ENGINE = "answer", "watched", "engine"
"""Values of the label `source`: what a figure of answers was taken from. All answers as the gateway showed them, a
sample of them, or the engines' own histograms."""

Kind = Literal["counter", "gauge", "histogram"]


class Alias(NamedTuple):
    """An existing name for a family. `labels` are (its label, ours); rows that become equal are added up.

    `first`: of rows that differ in our label of this name alone only the first is shown, since they are figures of the
    same requests. `fixed` are (its label, the one value it has here).
    """

    name: str
    labels: tuple[tuple[str, str], ...] = ()
    first: str = ""
    fixed: tuple[tuple[str, str], ...] = ()


class Family(NamedTuple):
    """One metric family. Counters are named with `_total`."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    bounds: tuple[float, ...] = ()
    aliases: tuple[Alias, ...] = ()


MODEL = (("model_name", "model"), ("target_model_name", "model"))
POOL = (("name", "pool"),)
ENDPOINT = ("pool", "endpoint")


def _of_model(gie: str, llmd: str) -> tuple[Alias, ...]:
    return Alias(f"inference_objective_{gie}", MODEL), Alias(f"llm_d_epp_{llmd}", MODEL)


def _answers(name: str, help: str, bounds: tuple[float, ...], gie: str, llmd: str) -> Family:
    """A figure of answers, by what it was taken from."""
    labels = (*MODEL, ("source", "source"))
    aliases = tuple(Alias(old, labels, "source") for old in (f"inference_objective_{gie}", f"llm_d_epp_{llmd}"))
    return Family(name, "histogram", help, ("model", "source"), bounds, aliases)


def _of_flow(name: str, *labels: str, fixed: tuple[tuple[str, str], ...] = ()) -> tuple[Alias, ...]:
    own = tuple(("inference_pool" if label == "pool" else label, label) for label in labels if label != "model")
    own += MODEL if "model" in labels else ()
    families = ("inference_extension", "llm_d_epp")
    return tuple(Alias(f"{family}_flow_control_{name}", own, fixed=fixed) for family in families)


def _average(what: str, help: str) -> tuple[Family, Family]:
    """Averages exist under the old names alone: from ours, `avg by (pool)` and `stddev by (pool)` give them."""
    average = Alias(f"llm_d_epp_average_{what}", (("name", "name"),))
    return (
        Family(f"inference_pool_average_{what}", "gauge", f"Mean {help}", ("name",), aliases=(average,)),
        Family(f"llm_d_epp_std_dev_{what}", "gauge", f"Standard deviation of the {help}", ("name",)),
    )


FAMILIES: tuple[Family, ...] = (
    # --- requests
    Family(
        "warmpath_requests_total",
        "counter",
        "Requests given to an endpoint, at their end, by HTTP status; status 0: no answer was seen",
        ("model", "status"),
        aliases=_of_model("request_total", "request_total"),
    ),
    Family(
        "warmpath_refused_total",
        "counter",
        "Requests answered by Warmpath itself instead of an endpoint, by HTTP status and reason",
        ("status", "reason"),
    ),
    Family(
        "inference_objective_request_error_total",
        "counter",
        "Requests that ended with a status of 400 or more, refused ones included (with an empty model)",
        ("model_name", "target_model_name", "error_code"),
        aliases=(
            Alias(
                "llm_d_epp_request_error_total",
                tuple((label, label) for label in ("model_name", "target_model_name", "error_code")),
            ),
        ),
    ),
    Family(
        "warmpath_requests_running",
        "gauge",
        "Requests given to an endpoint whose end was not seen yet",
        ("model",),
        aliases=(Alias("inference_objective_running_requests", MODEL[:1]), Alias("llm_d_epp_request_running", MODEL)),
    ),
    Family(
        "warmpath_request_bytes",
        "histogram",
        "Size of request bodies in bytes",
        ("model",),
        BYTES,
        _of_model("request_sizes", "request_size_bytes"),
    ),
    Family(
        "warmpath_request_duration_seconds",
        "histogram",
        "From the complete request to the end of its answer",
        ("model",),
        LATENCY,
        _of_model("request_duration_seconds", "request_duration_seconds"),
    ),
    _answers(
        "warmpath_ttft_seconds",
        "From the complete request to the first token; of source `engine` from its arrival there",
        LATENCY,
        "request_ttft_seconds",
        "request_ttft_seconds",
    ),
    Family(
        "warmpath_priority_duration_seconds",
        "histogram",
        "From the complete request to the end of its answer, by the priority of its InferenceObjective (0 without one)",
        ("pool", "priority"),
        LATENCY,
    ),
    Family(
        "warmpath_priority_ttft_seconds",
        "histogram",
        "From the complete request to the first token, of answers that are seen (all or a sample), by priority",
        ("pool", "priority"),
        LATENCY,
    ),
    _answers(
        "warmpath_tpot_seconds",
        "Time per output token after the first",
        PER_TOKEN,
        "request_tpot_seconds",
        "request_streaming_tpot_seconds",
    ),
    _answers(
        "warmpath_ntpot_seconds",
        "Duration of a request divided by its output tokens; of source `engine` means of some seconds",
        PER_TOKEN,
        "normalized_time_per_output_token_seconds",
        "request_ntpot_seconds",
    ),
    _answers(
        "warmpath_prompt_tokens",
        "Prompt tokens as the endpoint reported them",
        TOKENS,
        "input_tokens",
        "request_input_tokens",
    ),
    _answers(
        "warmpath_completion_tokens",
        "Output tokens as the endpoint reported them",
        TOKENS,
        "output_tokens",
        "request_output_tokens",
    ),
    _answers(
        "warmpath_cached_tokens",
        "Prompt tokens the endpoint took from its prefix cache, as it reported them; of source `engine` means of some "
        "seconds",
        TOKENS,
        "prompt_cached_tokens",
        "request_cached_tokens",
    ),
    # --- decisions
    Family(
        "warmpath_decision_seconds",
        "histogram",
        "From the complete request to the decision: parsing, signals, choosing; without the wait in flow control",
        (),
        OVERHEAD,
        (
            Alias("inference_extension_scheduler_e2e_duration_seconds"),
            Alias("llm_d_epp_scheduler_e2e_duration_seconds"),
            Alias("llm_d_epp_request_processing_duration_seconds"),
        ),
    ),
    Family(
        "warmpath_prefix_hit_ratio",
        "histogram",
        "Share of a prompt's tokens the chosen endpoint is predicted to hold",
        (),
        SHARE,
        (Alias("inference_extension_prefix_indexer_hit_ratio"), Alias("llm_d_epp_prefix_indexer_hit_ratio")),
    ),
    Family(
        "warmpath_predicted_cached_tokens_total",
        "counter",
        "Prompt tokens that the chosen endpoint is predicted to hold, by tier: device, l1 (its node's memory), l2 "
        "(shared storage)",
        ("pool", "tier"),
    ),
    Family(
        "warmpath_endpoint_decisions_total",
        "counter",
        "Requests this endpoint was chosen for",
        ENDPOINT,
    ),
    Family(
        "inference_extension_scheduler_attempts_total",
        "counter",
        "Decisions by endpoint (status success), and requests for which there was none (status failure)",
        ("status", "pod_name", "namespace", "port"),
        aliases=(
            Alias(
                "llm_d_epp_scheduler_attempts_total",
                (
                    ("status", "status"),
                    ("endpoint_name", "pod_name"),
                    ("namespace", "namespace"),
                    ("port", "port"),
                ),
            ),
        ),
    ),
    Family(
        "llm_d_epp_disagg_decision_total",
        "counter",
        "Requests given to endpoints by a profile handler that divides them, at their end, by the stages that had "
        "endpoints of their own: decode-only, prefill-decode, encode-decode, encode-prefill-decode",
        ("plugin_name", "plugin_type", "model_name", "decision_type"),
        aliases=(
            Alias(
                "llm_d_inference_scheduler_disagg_decision_total",
                (("model_name", "model_name"), ("decision_type", "decision_type")),
            ),
        ),
    ),
    # --- SLOs and predictions
    Family(
        "warmpath_slo_requests_total",
        "counter",
        "Requests with an SLO, at their end, by InferenceObjective ((headers): by their own headers) and outcome: met; "
        "missed-ttft, missed-tpot, missed-both; failed; shed (no endpoint would have kept it); unseen (not enough of "
        "the answer was shown)",
        ("pool", "objective", "outcome"),
    ),
    Family(
        "warmpath_ttft_prediction_ratio",
        "histogram",
        "Measured TTFT over predicted, of streamed answers that are seen (all or a sample); 1: it was right",
        bounds=RATIO,
    ),
    Family(
        "warmpath_tpot_prediction_ratio",
        "histogram",
        "Measured time per output token over predicted, where usage is seen too; 1: it was right",
        bounds=RATIO,
    ),
    # --- flow control, where it is on
    Family(
        "warmpath_flow_wait_seconds",
        "histogram",
        "How long requests waited in flow control until they were let go (Dispatched) or what else became of them; 0 "
        "for those that did not have to",
        ("pool", "fairness_id", "priority", "outcome", "model"),
        QUEUED,
        _of_flow("request_queue_duration_seconds", "pool", "fairness_id", "priority", "outcome", "model"),
    ),
    Family(
        "warmpath_flow_waiting",
        "gauge",
        "Requests that wait in flow control",
        ("pool", "fairness_id", "priority", "model"),
        aliases=_of_flow("queue_size", "pool", "fairness_id", "priority", "model"),
    ),
    Family(
        "warmpath_flow_waiting_bytes",
        "gauge",
        "Bytes of their bodies",
        ("pool", "fairness_id", "priority", "model"),
        aliases=_of_flow("queue_bytes", "pool", "fairness_id", "priority", "model"),
    ),
    Family(
        "warmpath_pool_saturation",
        "gauge",
        "How full the pool is, as flow control saw it last: 0 idle, 1 and above full",
        ("pool",),
        # In llm-d `effective` is what lets requests go, beside a value for each role; here it is one value.
        aliases=_of_flow("pool_saturation", "pool", fixed=(("stage", "effective"),)),
    ),
    Family(
        "llm_d_epp_flow_control_requests_total",
        "counter",
        "Requests that flow control let go (Dispatched), or what else became of them: those that "
        "`warmpath_flow_wait_seconds` counts, without the flows",
        ("outcome", "priority", "inference_pool"),
    ),
    *(
        Family(
            f"llm_d_epp_flow_control_capacity_utilization_{what}",
            "gauge",
            f"Share of the {what} of a priority that may wait in this replica which do",
            ("priority", "inference_pool"),
        )
        for what in ("requests", "bytes")
    ),
    *(
        Family(
            f"llm_d_epp_flow_control_global_capacity_utilization_{what}",
            "gauge",
            f"Share of the {what} of all priorities that may wait in this replica which do; absent without a limit",
            ("inference_pool",),
        )
        for what in ("requests", "bytes")
    ),
    Family(
        "llm_d_epp_flow_control_stale_endpoints",
        "gauge",
        "Endpoints that `utilization-detector` left out of its last answer, because their metrics were old or missing",
        ("detector",),
    ),
    Family(
        "warmpath_limit_refused_total",
        "counter",
        "Requests refused because of a tenant's limits, by limit: model, prompt-tokens, output-tokens, requests, "
        "tokens, concurrent-requests",
        ("pool", "tenant", "limit"),
    ),
    # --- endpoints; their series end with the endpoint
    Family(
        "warmpath_endpoint_prompt_tokens_total",
        "counter",
        "Prompt tokens sent to this endpoint, estimated",
        ENDPOINT,
    ),
    Family(
        "warmpath_endpoint_predicted_cached_tokens_total",
        "counter",
        "Of those, tokens it was predicted to hold when it was chosen",
        ENDPOINT,
    ),
    Family(
        "warmpath_endpoint_checked_predicted_tokens_total",
        "counter",
        "Of those, the ones whose answer reported the truth (see the next)",
        ENDPOINT,
    ),
    Family(
        "warmpath_endpoint_checked_cached_tokens_total",
        "counter",
        "Cached tokens the endpoint reported for the same requests: the prediction was right where both are equal",
        ENDPOINT,
    ),
    Family(
        "warmpath_endpoint_failures_total",
        "counter",
        "Requests that failed by its fault: status 5xx (501 aside), or the gateway's retry was served elsewhere",
        ENDPOINT,
    ),
    Family(
        "warmpath_endpoint_in_flight",
        "gauge",
        "Our own requests at this endpoint, those among them that it prefills for another",
        ENDPOINT,
    ),
    Family(
        "llm_d_epp_inflight_requests",
        "gauge",
        "The same under llm-d's labels; a pod with several ports has a name for each",
        ("endpoint_name", "namespace"),
    ),
    Family(
        "warmpath_endpoint_waiting",
        "gauge",
        "Requests queued in the engine, as scraped",
        ENDPOINT,
        aliases=(
            Alias("inference_pool_per_pod_queue_size", (("name", "pool"), ("model_server_pod", "endpoint"))),
            Alias("llm_d_epp_per_endpoint_queue_size", (("name", "pool"), ("model_server_endpoint", "endpoint"))),
        ),
    ),
    Family("warmpath_endpoint_running", "gauge", "Requests in the engine's batch, as scraped", ENDPOINT),
    Family("warmpath_endpoint_kv_usage", "gauge", "Share of KV blocks in use, 0..1, as scraped", ENDPOINT),
    Family(
        "warmpath_endpoint_load_age_seconds",
        "gauge",
        "Age of the last successful scrape; absent before the first",
        ENDPOINT,
    ),
    Family(
        "warmpath_scrape_failures_total",
        "counter",
        "Scrapes of endpoints' metrics that brought nothing of use",
        ("pool",),
        aliases=tuple(
            Alias(f"{family}_datalayer_poll_errors_total", fixed=(("source_type", "metrics-data-source"),))
            for family in ("llm_d_epp", "llm_d_inference_scheduler")
        ),
    ),
    # --- KV events, where a precise prefix producer is configured
    Family(
        "warmpath_endpoint_kv_events",
        "gauge",
        "1 for the state an endpoint's KV events are in: off (it publishes none), connecting, replaying, live, lost",
        (*ENDPOINT, "state"),
    ),
    Family(
        "warmpath_endpoint_kv_events_lag_seconds",
        "gauge",
        "From the engine's timestamp of its last batch of events to our having it; two clocks, so it shows their "
        "difference too; absent before the first",
        ENDPOINT,
    ),
    Family(
        "warmpath_endpoint_prefix_trust",
        "gauge",
        "Share of the predicted cached tokens that turn out to be cached, 0..1, as matches are discounted by it",
        ENDPOINT,
    ),
    Family(
        "warmpath_kv_events_total",
        "counter",
        "Blocks stored and removed and caches cleared by KV events; events that were malformed, ignored (kinds of "
        "cache and media that do not count) or unresolved (built upon unknown blocks)",
        ("pool", "outcome"),
    ),
    # --- replicas, where there are several
    Family(
        "warmpath_replica_peers",
        "gauge",
        "Other replicas by state: connecting, live, silent, other-version, left",
        ("state",),
    ),
    Family(
        "warmpath_replica_lag_seconds",
        "gauge",
        "Half of the time a message takes to another replica and back, as measured last",
        ("peer",),
    ),
    Family(
        "warmpath_replica_agreement",
        "gauge",
        "The smaller to the larger of what this and another replica count as requests in flight, 0..1",
        ("peer",),
    ),
    Family("warmpath_replica_in_flight", "gauge", "Requests in flight that other replicas sent to endpoints"),
    Family(
        "warmpath_replica_frames_total",
        "counter",
        "Messages between replicas: sent, received, missing (a queue was full), malformed, of an other-version, "
        "too-large, of an unknown-endpoint; snapshot-sent and snapshot count snapshots given and taken",
        ("outcome",),
    ),
    # --- pools
    Family(
        "warmpath_endpoints",
        "gauge",
        "Endpoints in the pool now",
        ("pool",),
        aliases=(Alias("inference_pool_ready_pods", POOL), Alias("llm_d_epp_ready_endpoints", POOL)),
    ),
    *_average("kv_cache_utilization", "share of KV blocks in use over the pool's endpoints"),
    *_average("queue_size", "requests queued over the pool's endpoints"),
    *_average("running_requests", "running requests over the pool's endpoints"),
    # --- the process
    Family(
        "warmpath_plugin_statistic",
        "gauge",
        "What plugins report about themselves (`Plugin.statistics`)",
        ("pool", "plugin", "statistic"),
    ),
    Family(
        "warmpath_plugin_endpoint_statistic",
        "gauge",
        "What plugins report about single endpoints (`Plugin.endpoint_statistics`), learned speeds among it",
        ("pool", "plugin", "endpoint", "statistic"),
    ),
    # --- the shadow profile, where a configuration has one
    Family(
        "warmpath_shadow_picks_total",
        "counter",
        "Requests the shadow profile picked for as well: `same` endpoint (or as good by its score), `other`, `failed`",
        ("pool", "profile", "outcome"),
    ),
    Family(
        "warmpath_shadow_dearer_seconds_total",
        "counter",
        "Estimated seconds by which its picks would have cost more than those made, where they would",
        ("pool", "profile"),
    ),
    Family(
        "warmpath_shadow_cheaper_seconds_total",
        "counter",
        "Estimated seconds by which its picks would have cost less than those made, where they would",
        ("pool", "profile"),
    ),
    Family(
        "warmpath_degraded_total",
        "counter",
        "Degradations (something worked worse than it should), by reason",
        ("reason",),
    ),
    Family(
        "warmpath_degraded_now",
        "gauge",
        "1 while it goes on and 0 after it, of degradations that have an end: the API server away, readers not checked",
        ("reason",),
    ),
    Family(
        "warmpath_info",
        "gauge",
        "Always 1; the version that runs",
        ("version",),
        aliases=(
            Alias("inference_extension_info", (("build_ref", "version"),)),
            Alias("llm_d_epp_info", (("build_ref", "version"),)),
        ),
    ),
)


def metrics_table() -> str:
    """The table as Markdown, for `docs/reference/metrics.md`."""
    lines = ["| name | kind | labels | meaning | same figures as |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        labels = ", ".join(f"`{label}`" for label in family.labels)
        aliases = "<br>".join(_describe(alias) for alias in family.aliases)
        lines.append(f"| `{family.name}` | {family.kind} | {labels} | {family.help} | {aliases} |")
    return "\n".join(lines) + "\n"


def _describe(alias: Alias) -> str:
    fixed = (f'{name}="{value}"' for name, value in alias.fixed)
    labels = ",".join([*(theirs for theirs, _ in alias.labels), *fixed])
    return f"`{alias.name}{{{labels}}}`" if labels else f"`{alias.name}`"
