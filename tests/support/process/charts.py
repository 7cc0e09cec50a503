"""Argument lists as the charts and conformance manifests of other pickers write them; flags and values are theirs."""

CHARTS = {
    "GIE v1.5 inferencepool": [
        *("--pool-name", "vllm", "--pool-namespace", "team", "--pool-group", "inference.networking.k8s.io"),
        *("--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml", "--v", "1", "--tracing=false"),
        *("--grpc-health-port", "9003", "--metrics-endpoint-auth=false"),
    ],
    "GIE v1.5 inferencepool, SGLang, three replicas": [
        *("--pool-name", "sglang", "--pool-namespace", "team", "--pool-group", "inference.networking.k8s.io"),
        '--total-queued-requests-metric="sglang:num_queue_reqs"',
        '--total-running-requests-metric="sglang:num_running_reqs"',
        '--kv-cache-usage-percentage-metric="sglang:token_usage"',
        '--cache-info-metric="sglang:cache_config_info"',
        *("--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml", "--ha-enable-leader-election"),
    ],
    "GIE v1.5 inferencepool, Triton": [
        *("--pool-name", "triton", "--pool-namespace", "team"),
        *("--total-queued-requests-metric", "nv_trt_llm_request_metrics{request_type=waiting}"),
        *("--lora-info-metric", "", "--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml"),
    ],
    "GIE v1.5 standalone": [
        *("--endpoint-selector", "app=vllm,tier=gpu", "--endpoint-target-ports", "8000,8001"),
        *("--zap-encoder", "json", "--config-file", "/config/default-plugins.yaml", "--secure-serving=false"),
    ],
    "GIE v1.5 conformance": [
        *("--pool-name", "primary-inference-pool", "--pool-namespace", "inference-conformance-app-backend"),
        *("--v", "4", "--zap-encoder", "json", "--grpc-port", "9002", "--grpc-health-port", "9003"),
        *("--config-file", "/config/conformance-plugins.yaml"),
    ],
    "GIE v1.6 conformance": [
        *("--pool-name", "primary-inference-pool", "--pool-namespace", "inference-conformance-app-backend"),
        *("--zap-encoder", "json", "--grpc-port", "9002", "--grpc-health-port", "9003"),
    ],
    "lwepp, everything": [
        *("--grpc-port=9002", "--pool-group=inference.networking.k8s.io", "--pool-namespace=n", "--pool-name=p"),
        *("--metrics-port=9090", "--endpoint-target-ports=8000", "--grpc-health-port=9003", "--health-checking"),
        *("--secure-serving=true", "--zap-log-level=info", "--zap-devel=false", "--zap-stacktrace-level=error"),
    ],
    "GIE v1.0, Go's flag package": [
        *("-pool-name", "vllm", "-pool-namespace=team", "-v", "4", "-grpc-port", "9002", "-grpc-health-port", "9003"),
        *("-secure-serving=false", "-health-checking", "-refresh-metrics-interval=50ms"),
    ],
    "llm-d-router v0.10 gateway": [
        *("--pool-name", "llm", "--pool-namespace", "team", "--pool-group", "inference.networking.k8s.io"),
        *("--zap-encoder", "json", "--config-file", "/config/plugins.yaml", "--ha-enable-leader-election"),
        *("--grpc-health-port", "9003", "--v=2", "--secure-serving=false", "--tracing=true"),
        *("--metrics-endpoint-auth=false", "--drain-timeout=45s", "--grpc-max-recv-msg-size=10MiB"),
    ],
    "llm-d-router v0.10 standalone": [
        *("--endpoint-selector", "app in (a,b),!c", "--endpoint-target-ports", "8000", "--zap-encoder", "json"),
        *("--config-file", "/config/plugins.yaml", "--grpc-health-port", "9003", "--tracing=false"),
        *("--allow-experimental-plugins=true", "--emit-endpoint-scores=true", "--enable-pprof=false"),
    ],
}
