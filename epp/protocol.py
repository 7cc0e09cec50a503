"""Names on the wire: headers, paths, metadata namespaces, drop reasons. Constants only.

Sources: GIE endpoint picker protocol (docs/proposals/004-endpoint-picker-protocol, v1.0.0) and llm-d's
api-reference/epp-http-headers. Where both projects have a name, the first of a tuple wins when both are sent.
"""

from typing import Final

# --- EPP -> proxy: where the request goes (header and dynamic metadata must be equal) -----------------------------
DESTINATION: Final = "x-gateway-destination-endpoint"
"""Value: `ip:port`, or `ip:port,ip:port,…` in order of preference; IPv6 in brackets."""
LB_NAMESPACE: Final = "envoy.lb"

# --- proxy -> EPP -------------------------------------------------------------------------------------------------
SUBSET_NAMESPACE: Final = "envoy.lb.subset_hint"
SUBSET: Final = "x-gateway-destination-endpoint-subset"
"""In request metadata: list (or comma list) of `ip:port` the gateway restricts us to. Present and empty: none."""
SERVED: Final = "x-gateway-destination-endpoint-served"
"""In response metadata: the `ip:port` that really served, after the gateway's retries."""

# --- client -> EPP: control headers, honoured only where the setting says so -----------------------------------------
OBJECTIVE: Final = ("x-llm-d-inference-objective", "x-gateway-inference-objective")
FAIRNESS_ID: Final = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
REQUEST_TTL: Final = "x-llm-d-inference-ttl"
"""How long the request may wait in flow control, as Go writes durations."""
SLO_TTFT_MS: Final = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
SLO_TPOT_MS: Final = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
"""Milliseconds until the first token, and for each after it; 0 or empty: none is asked for."""
EXPLAIN: Final = "x-warmpath-explain"
"""Anything but empty, `0` or `false`: the answer is to say in a header where the request went and why."""
EXPLAINED_AUTHORIZATION: Final = "x-warmpath-authorization"
"""On what is posted to `/explain`: the Authorization of the request that is asked about; the poster's own is for us."""
MODEL_REWRITE: Final = ("x-llm-d-model-name-rewrite", "x-gateway-model-name-rewrite")
SESSION_TOKEN: Final = "x-session-token"
SESSION_ID: Final = "x-session-id"
REQUEST_ID: Final = "x-request-id"
PREFILLER: Final = "x-prefiller-host-port"
"""`ip:port` of the endpoint that is to prefill, for the sidecar of the one that decodes."""
DIVIDED: Final = frozenset(
    ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/inference/v1/generate")
)
"""Paths of requests whose prompts sidecars have computed elsewhere, llm-d's of v0.10 and ours; others they pass on."""
PREFILL_FALLBACK: Final = "x-prefill-fallback"
"""On an answer of our sidecar: why the prompt was computed where it is decoded after all, in one of these words."""
PREFILLER_FAULTS: Final = frozenset({"unreachable", "timeout", "status", "no-params"})
"""Those of them that are the prefiller's own fault."""
ENCODERS: Final = "x-encoder-hosts-ports"
"""The same of those that encode images, separated by commas."""
KV_SOURCE: Final = "x-kv-cache-source-host-port"
"""`ip:port` of an endpoint whose KV cache holds more of the prompt, for llm-d's sidecar."""
DATA_PARALLEL: Final = "x-data-parallel-host-port"
"""`ip:port` of the data-parallel rank, where requests go to another port of its pod."""
DATA_PARALLEL_RANK: Final = "x-data-parallel-rank"
"""Which data-parallel rank behind a port is to answer: a number from 0, vLLM's (0.32, `--data-parallel-size`)."""

SYSTEM_OWNED: Final = frozenset(
    {
        DESTINATION,
        SUBSET,
        SERVED,
        *OBJECTIVE,
        *FAIRNESS_ID,
        REQUEST_TTL,
        *SLO_TTFT_MS,
        *SLO_TPOT_MS,
        EXPLAIN,
        *MODEL_REWRITE,
        PREFILLER,
        ENCODERS,
        DATA_PARALLEL,
        KV_SOURCE,
    }
)
"""Headers only the EPP or the gateway may set towards an endpoint: a client's own are removed before forwarding."""

# --- EPP -> client ------------------------------------------------------------------------------------------------
EXPLANATION: Final = "x-warmpath-decision"
"""One line, see `epp.scheduling.decision.summary`, where the request asked for it and may."""
DROP_REASON: Final = "x-llm-d-request-dropped-reason"
DROP_SATURATED: Final = "rejected-saturated"
DROP_SLO: Final = "rejected-slo"
DROP_NO_ENDPOINTS: Final = "rejected-no-endpoints"
DROP_TTL_EXPIRED: Final = "rejected-ttl-expired"
DROP_SHUTTING_DOWN: Final = "rejected-shutting-down"
DROP_GUARD: Final = "rejected-guard"
DROP_LIMIT: Final = "rejected-limit"

# --- GIE's Gateway conformance suite, only with --conformance-testing -----------------------------------------------
TEST_SELECTION: Final = "test-epp-endpoint-selection"
"""Of a request: the endpoints it may go to, `ip` or `ip:port`, separated by commas."""
TEST_SERVED: Final = "x-conformance-test-served-endpoint"
TEST_SELECTED: Final = "x-conformance-test-selected-endpoint"
TEST_POOL: Final = "x-conformance-test-epp-pool"
TEST_SEEN: Final = "x-went-into-resp-headers"

# --- services, ports ----------------------------------------------------------------------------------------------
EXT_PROC_SERVICE: Final = "envoy.service.ext_proc.v3.ExternalProcessor"
HEALTH_SERVICE: Final = "inference-extension"
GRPC_PORT: Final = 9002
HEALTH_PORT: Final = 9003
METRICS_PORT: Final = 9090
REPLICA_PORT: Final = 9004

MAX_CHUNK: Final = 62_000
"""Most bytes in one streamed body response: some Envoy-based proxies cap a chunk at 64 KB (GIE chunking constant)."""

# --- Kubernetes ---------------------------------------------------------------------------------------------------
POOL_GROUP: Final = "inference.networking.k8s.io"
OBJECTIVE_GROUPS: Final = ("llm-d.ai", "inference.networking.x-k8s.io")
CONFIG_VERSIONS: Final = ("llm-d.ai/v1", "llm-d.ai/v1alpha1", "inference.networking.x-k8s.io/v1alpha1")
ROLE_LABEL: Final = "llm-d.ai/role"
TOPOLOGY_LABELS: Final = ("topology.kubernetes.io/zone", "topology.kubernetes.io/region")
ENGINE_LABELS: Final = ("llm-d.ai/engine-type", "inference.networking.k8s.io/engine-type")
ACTIVE_PORTS: Final = ("llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports")
"""Pod annotation: which of the pool's target ports this pod serves, separated by commas; the first wins."""
DATA_PARALLEL_SIZE_LABEL: Final = "warmpath/data-parallel-size"
"""How many data-parallel ranks one port of this endpoint has, where requests are to name one of them."""
OWN_ANNOTATIONS: Final = "warmpath/"
SLO_TTFT_ANNOTATION: Final = "warmpath/slo-ttft-ms"
SLO_TPOT_ANNOTATION: Final = "warmpath/slo-tpot-ms"
"""Annotations of an InferenceObjective, whose CRD has no field for it: what its requests are to be served within."""

# --- client -> model server ---------------------------------------------------------------------------------------
MODEL_SERVER_IDLE: Final = 2.0
"""Seconds without a request after which a client lets go of a connection: vLLM and SGLang close theirs after five, and
a request that meets that is lost."""
