"""Every plugin type we know by name: which class it is, or what is missing. Data only; `epp.configuration.loader` reads
it.

Names are llm-d-router's (v0.10 and later) and GIE's (v1.5.0), so that their configurations load; ours have no such
source. A user's plugin needs no line here: `type: module.Class` or an entry point names it.
"""

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from epp.configuration.schema import SHARED

_FILTERS: Final = "epp.scheduling.filters"
_SCORERS: Final = "epp.scheduling.scorers"
_HEADROOM: Final = "epp.scheduling.headroom"
_PICKERS: Final = "epp.scheduling.pickers"
_FLOW: Final = "epp.flow.policies"
_STAGES: Final = "epp.scheduling.disaggregation"


class Idle(NamedTuple):
    """A setting that is taken and does nothing."""

    why: str
    usual: Any = None
    """The value that asks for nothing else than what happens here."""


EXTRACTOR: Final = "core-metrics-extractor"
"""Always on, declared or not."""

CLASSES: Final = {
    "label-selector-filter": f"{_FILTERS}.LabelSelectorFilter",
    "by-label": f"{_FILTERS}.ByLabelFilter",
    "decode-filter": f"{_FILTERS}.DecodeFilter",
    "prefill-filter": f"{_FILTERS}.PrefillFilter",
    "encode-filter": f"{_FILTERS}.EncodeFilter",
    "prefix-cache-affinity-filter": f"{_FILTERS}.PrefixCacheAffinityFilter",
    "previous-response-filter": "epp.scheduling.bindings.PreviousResponseFilter",
    "session-affinity-filter": f"{_FILTERS}.SessionAffinityFilter",
    "context-length-aware": f"{_FILTERS}.ContextLengthAware",
    "topology-affinity-filter": f"{_FILTERS}.TopologyAffinityFilter",
    "topology-affinity-scorer": f"{_FILTERS}.TopologyAffinityScorer",
    "endpoint-attribute-filter": "epp.scheduling.attributes.EndpointAttributeFilter",
    "endpoint-attribute-scorer": "epp.scheduling.attributes.EndpointAttributeScorer",
    "dcgm-data-source": "epp.scheduling.attributes.DcgmDataSource",
    "utilization-filter": f"{_FILTERS}.UtilizationFilter",
    "slo-headroom-tier-filter": f"{_HEADROOM}.SloHeadroomTierFilter",
    "header-based-testing-filter": f"{_FILTERS}.HeaderBasedTestingFilter",
    "queue-scorer": f"{_SCORERS}.QueueScorer",
    "kv-cache-utilization-scorer": f"{_SCORERS}.KvCacheUtilizationScorer",
    "running-requests-size-scorer": f"{_SCORERS}.RunningRequestsSizeScorer",
    "prefix-cache-scorer": f"{_SCORERS}.PrefixCacheScorer",
    "active-request-scorer": f"{_SCORERS}.ActiveRequestScorer",
    "load-aware-scorer": f"{_SCORERS}.LoadAwareScorer",
    "token-load-scorer": f"{_SCORERS}.TokenLoadScorer",
    "session-affinity-scorer": f"{_SCORERS}.SessionAffinityScorer",
    "agent-identity": "epp.scheduling.sessions.AgentIdentity",
    "session-id-producer": "epp.scheduling.sessions.SessionIdProducer",
    "session-state-producer": "epp.scheduling.session_state.SessionStates",
    "header-label-affinity-scorer": f"{_SCORERS}.HeaderLabelAffinityScorer",
    "lora-affinity-scorer": f"{_SCORERS}.LoraAffinityScorer",
    "p2p-source-producer": "epp.scheduling.kv_source.P2pSource",
    "no-hit-lru-scorer": f"{_SCORERS}.NoHitLruScorer",
    "precise-prefix-cache-scorer": f"{_SCORERS}.PrecisePrefixCacheScorer",
    "latency-scorer": f"{_HEADROOM}.LatencyScorer",
    "expected-ttft": "epp.scheduling.cost.ExpectedTtft",
    "max-score-picker": f"{_PICKERS}.MaxScorePicker",
    "random-picker": f"{_PICKERS}.RandomPicker",
    "weighted-random-picker": f"{_PICKERS}.WeightedRandomPicker",
    "round-robin-picker": f"{_PICKERS}.RoundRobinPicker",
    "single-profile-handler": f"{_PICKERS}.SingleProfileHandler",
    "header-profile-handler": f"{_PICKERS}.HeaderProfileHandler",
    "role-profile-handler": f"{_STAGES}.RoleProfileHandler",
    "disagg-profile-handler": f"{_STAGES}.DisaggProfileHandler",
    "pd-profile-handler": f"{_STAGES}.PdProfileHandler",
    "data-parallel-profile-handler": f"{_STAGES}.DataParallelProfileHandler",
    "disagg-headers-handler": f"{_STAGES}.DisaggHeadersHandler",
    "expected-ttft-pd-decider": f"{_STAGES}.ExpectedTtftPdDecider",
    "always-disagg-pd-decider": f"{_STAGES}.AlwaysDisaggPdDecider",
    "prefix-based-pd-decider": f"{_STAGES}.PrefixBasedPdDecider",
    "always-disagg-multimodal-decider": f"{_STAGES}.AlwaysDisaggMultimodalDecider",
    "approx-prefix-cache-producer": "epp.prefix.approximate.ApproximatePrefixCache",
    "burst-prefix-cache-producer": "epp.prefix.approximate.BurstPrefixCache",
    "precise-prefix-cache-producer": "epp.prefix.precise.PrecisePrefixCache",
    "mm-embeddings-cache-producer": "epp.prefix.media.EncoderCaches",
    "mm-embeddings-cache-scorer": "epp.prefix.media.EncoderCacheScorer",
    "approx-cache-room-producer": "epp.prefix.approximate.ApproximateCacheRoom",
    "failure-share-producer": "epp.scheduling.failures.FailureShares",
    "failing-endpoint-filter": "epp.scheduling.failures.FailingEndpointFilter",
    "inflight-load-producer": "epp.scheduling.inflight.InFlightLoad",
    EXTRACTOR: "epp.configuration.engines.CoreMetricsExtractor",
    "probabilistic-admitter": "epp.flow.saturation.ProbabilisticAdmitter",
    "predicted-latency-producer": f"{_HEADROOM}.PredictedLatency",
    "latency-slo-admitter": f"{_HEADROOM}.LatencySloAdmitter",
    "utilization-detector": "epp.flow.saturation.UtilizationDetector",
    "concurrency-detector": "epp.flow.saturation.ConcurrencyDetector",
    "fcfs-ordering-policy": f"{_FLOW}.FirstComeFirstServed",
    "edf-ordering-policy": f"{_FLOW}.EarliestDeadlineFirst",
    "slo-deadline-ordering-policy": f"{_FLOW}.SloDeadline",
    "global-strict-fairness-policy": f"{_FLOW}.GlobalStrict",
    "round-robin-fairness-policy": f"{_FLOW}.RoundRobin",
    "round-robin-with-room-fairness-policy": f"{_FLOW}.RoundRobinWithRoom",
    "program-aware-fairness": f"{_FLOW}.ProgramAware",
    "strict-band-selection-policy": f"{_FLOW}.StrictBands",
    "static-usage-limit-policy": f"{_FLOW}.StaticLimit",
    "priority-holdback-policy": f"{_FLOW}.PriorityHoldback",
    "soft-reflective-ceiling-policy": f"{_FLOW}.SoftReflectiveCeiling",
}
"""Type -> class, imported when a configuration names it."""

ALIASES: Final = {
    "by-label-selector": "label-selector-filter",
    "active-request-filter": "utilization-filter",
    "prefill-header-handler": "disagg-headers-handler",
    "tokenizer": "token-producer",
}
"""Older type name -> the one above or below."""

MODULES: Final = {"epp.rivals": "tooling.policies"}
"""Older name of a module of ours -> the one that has its plugins."""

_PLAIN: Final = Idle("pages are read over plain HTTP")
_PAGES: Final[Mapping[str, tuple[Any, ...] | Idle]] = {
    "scheme": ("http",),
    "insecureSkipVerify": (True,),
    **dict.fromkeys(("caCertPath", "clientCertPath", "clientKeyPath"), _PLAIN),
}
"""Parameters of what reads pages of endpoints."""
_TOKENS: Final = Idle("tokens come from the files of --tokenizer, else from a pod's own /tokenize")
BUILT_IN: Final[Mapping[str, Mapping[str, tuple[Any, ...] | Idle]]] = {
    "openai-parser": {},
    "anthropic-parser": {},
    "vllmhttp-parser": {},
    "sglanghttp-parser": {},
    "vllmgrpc-parser": {},
    "vertexai-parser": {},
    "passthrough-parser": {},
    "metrics-data-source": {
        **_PAGES,
        "path": ("/metrics",),
        "interval": Idle("--refresh-metrics-interval says how often"),
    },
    "models-data-source": {
        **_PAGES,
        "path": ("/v1/models",),
        "interval": Idle("models are read every ten seconds"),
    },
    "models-data-extractor": {},
    "dcgm-extractor": {},
    "token-producer": {
        "backend": ("estimate", "vllm"),
        "modelName": _TOKENS,
        "vllm": _TOKENS,
        "udsTokenizerConfig": _TOKENS,
        "tokenizersPoolConfig": _TOKENS,
        "estimate": Idle("tokens of a prompt are estimated by a ratio that is learned for each model"),
    },
    "file-discovery": {
        "path": Idle(""),
        "watchFile": Idle("the file is always followed", True),
    },
    "endpoint-notification-source": {},
    "topology-extractor": {
        "hostname": ("kubernetes.io/hostname",),
        "rack": ("topology.kubernetes.io/rack",),
        "zone": ("topology.kubernetes.io/zone",),
        "region": ("topology.kubernetes.io/region",),
    },
    "destination-endpoint-served-verifier": {},  # with --conformance-testing
    "k8s-notification-source": {},
    "sheddable-eviction-filter": {},
    "priority-then-time-eviction-order-policy": {},
    "local-syncer": {},
    "redis-syncer": {},
}
"""Type of what is always on and has no plugin here -> its parameters: the values that are built in, or why any does
nothing."""

_EVICTION: Final = "requests in flight are not evicted"
NOTHING: Final[Mapping[str, str]] = {
    "k8s-notification-source": "nothing here waits for notifications: pods and pools are always followed",
    "sheddable-eviction-filter": _EVICTION,
    "priority-then-time-eviction-order-policy": _EVICTION,
    "local-syncer": SHARED,
    "redis-syncer": SHARED,
}
"""Type of those that does nothing here at all, whatever its parameters -> why."""

_ROLLOUT: Final = "prefill and decode rolled out in step; remove it, and give each revision an InferencePool of its own"
_CLUSTERS: Final = (
    "pools over several clusters; remove it, give each cluster a picker of its own, and divide requests before them"
)

MISSING: Final = {
    "disaggregatedset-rollout-screener": _ROLLOUT,
    "disaggregatedset-rollout-pod-extractor": _ROLLOUT,
    "request-attribute-reporter": "what an answer used told to the gateway; remove it: /metrics and /decisions say it",
    "multicluster-approx-prefix-cache-producer": _CLUSTERS,
    "multicluster-file-discovery": _CLUSTERS,
    "multicluster-kv-cache-utilization-scorer": _CLUSTERS,
    "multicluster-metrics-data-source": _CLUSTERS,
    "multicluster-metrics-extractor": _CLUSTERS,
    "multicluster-prefix-cache-scorer": _CLUSTERS,
    "multicluster-queue-scorer": _CLUSTERS,
    "multicluster-session-affinity-filter": _CLUSTERS,
}
"""Type of llm-d or GIE that is not there yet -> what it would need, and what to do."""

REMOVED: Final[Mapping[str, tuple[str, str]]] = {
    "kv-cache-scorer": ("kv-cache-utilization-scorer", "the same under its newer name"),
    "least-kv-cache-filter": ("kv-cache-utilization-scorer", "a preference with a weight instead of a filter"),
    "least-queue-filter": ("queue-scorer", "a preference with a weight instead of a filter"),
    "lora-affinity-filter": ("lora-affinity-scorer", "a preference with a weight instead of a filter"),
    "low-queue-filter": ("utilization-filter", "conditions: [{metric: waiting-queue, maxValue: 128}]"),
    "decision-tree-filter": (
        "utilization-filter",
        "filters of a profile run in order, then scorers with weights decide",
    ),
    "predicted-latency-scorer": ("latency-scorer", "with slo-headroom-tier-filter and latency-slo-admitter beside it"),
    "lmetric-scorer": ("tooling.policies.Lmetric", "never in a release of llm-d; this is the published policy"),
}
"""Type of GIE before v1 or of a branch -> (type that does its work now, how). Source: GIE v0.5.1."""

_MOVED: Final = {
    ("prefix-cache-scorer", "approx-prefix-cache-producer"): (
        "autoTune",
        "blockSizeTokens",
        "maxPrefixBlocksToMatch",
        "maxPrefixTokensToMatch",
        "lruCapacityPerServer",
    ),
    ("precise-prefix-cache-scorer", "precise-prefix-cache-producer"): (
        "kvEventsConfig",
        "tokenProcessorConfig",
        "indexerConfig",
        "speculativeIndexing",
        "speculativeTTL",
    ),
}
BELONGS: Final = {(type_, key): owner for (type_, owner), keys in _MOVED.items() for key in keys}
"""(type, parameter) as GIE v1.5 or an older llm-d has it -> the type that has the parameter now; it is moved there."""

IMPLIES: Final = {"precise-prefix-cache-scorer": "precise-prefix-cache-producer"}
"""Type -> the one that works behind it, whether or not it is named (llm-d before v0.10 had them in one)."""

_POOL_KNOWS: Final = "which pods there are, the pool says"
_SWEEP: Final = {"sessionIdConfig.evictionSweepSeconds": Idle("a session's end is exact, without sweeps")}
_UNREAD: Final = Idle("without effect in llm-d too; prefixMatchInfoProducerName says it")
_AT_ONCE: Final = Idle("no window is waited for: a prompt on its way counts as held at once")
_HEADERS: Final = Idle("the profile handler sets the headers of the endpoints that it picked")
_DECIDERS: Final = Idle("its decider says what it reads")
_LABELS: Final = Idle("labels say where an endpoint is")
_SIDECAR: Final = Idle("no sidecar is trained or asked")
_ONE_PREDICTOR: Final = {
    "latencyPredictionInfoProducerName": Idle("the one predicted-latency-producer of the configuration answers")
}
IDLE: Final[Mapping[str, Mapping[str, Idle]]] = {
    "topology-affinity-filter": {"topologyProducerName": _LABELS},
    "topology-affinity-scorer": {"topologyProducerName": _LABELS},
    "burst-prefix-cache-producer": {
        "windowDurationMs": _AT_ONCE,
        "maxBatchSize": _AT_ONCE,
        "balanceBy": _AT_ONCE,
        "minColocateBlocks": Idle("a prompt counts as held as far as it is the same, whatever its length"),
        "maxPerReplica": Idle("how many of a group an endpoint gets, the other scorers say", -1),
    },
    "precise-prefix-cache-producer": {
        "indexerConfig": Idle("one index in this process holds the events; no backends and no tokenizers belong to it"),
        "tokenProcessorConfig": Idle("blocks are the engines' own, and no hash seed has to agree"),
        "speculativeIndexing": Idle("a prompt in flight always counts as held", True),
        "kvEventsConfig.concurrency": Idle("one loop reads all events"),
        "kvEventsConfig.podDiscoveryConfig.podLabelSelector": Idle(_POOL_KNOWS),
        "kvEventsConfig.podDiscoveryConfig.podNamespace": Idle(_POOL_KNOWS),
    },
    "no-hit-lru-scorer": {"prefixPluginType": _UNREAD, "prefixPluginName": _UNREAD},
    "active-request-scorer": {"requestTimeout": Idle("a request's end is seen, so none is given up after a time")},
    "pd-profile-handler": {
        "prefixPluginType": _DECIDERS,
        "prefixPluginName": _DECIDERS,
        "prefixMatchInfoProducerName": _DECIDERS,
    },
    "disagg-headers-handler": {"prefillProfile": _HEADERS, "encodeProfile": _HEADERS},
    "predicted-latency-producer": {
        "contextTTL": _SIDECAR,
        "samplingMean": _SIDECAR,
        "maxDecodeTokenSamplesForPrediction": _SIDECAR,
        "useEncoderCacheFeatures": Idle("what images and video take is not modelled", False),
        "encoderCacheMatchInfoProducerName": Idle("what images and video take is not modelled"),
        "prefixMatchInfoProducerName": Idle("it reads the first prefix producer of the configuration"),
        "inFlightLoadProducerName": Idle("it counts what is in flight itself"),
    },
    "latency-scorer": _ONE_PREDICTOR,
    "slo-headroom-tier-filter": _ONE_PREDICTOR,
    "latency-slo-admitter": _ONE_PREDICTOR,
    "prefix-cache-affinity-filter": _ONE_PREDICTOR,
    "concurrency-detector": {"inFlightLoadProducerName": Idle("it counts what is in flight itself")},
    "session-affinity-filter": _SWEEP,
    "session-affinity-scorer": _SWEEP,
    "session-state-producer": {"evictionSweepSeconds": Idle("a session's end is exact, without sweeps")},
    "p2p-source-producer": {"prefillProfileName": Idle("it is known who computes the prompt")},
    "dcgm-data-source": {"insecureSkipVerify": _PLAIN._replace(usual=True)},
    "program-aware-fairness": {"evictionSweepSeconds": Idle("a program is forgotten in time, without sweeps")},
}
"""Type -> its parameters that are taken from llm-d's files and do nothing."""

NOTES: Final = {
    "predicted-latency-producer": "predicts by this process's cost model, fitted to the pool; no sidecar is used, and "
    "none has to run (docs/slo.md)",
}
"""Type -> what `warmpath check` says of it, where it works in another way than llm-d's."""

LISTENERS: Final = frozenset({"precise-prefix-cache-scorer", "dcgm-data-source", EXTRACTOR})
"""Types, beside producers, that need llm-d's data layer to be configured for them; here they get their data themselves.
"""
