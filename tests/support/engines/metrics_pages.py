"""A page of `/metrics` with the names, labels and order that vLLM 0.32 has, and the figures a test wants."""

import random


def vllm_page(
    waiting: float = 2,
    running: float = 3,
    kv_usage: float = 0.25,
    *,
    engines: int = 1,
    lora: str = "",
    buckets: int = 20,
) -> bytes:
    """`engines` data-parallel engines with the same figures; `lora` are lines put where vLLM has its adapter series."""
    lines: list[str] = []

    def series(name: str, kind: str, value: float, labels: str = "") -> None:
        lines.append(f"# HELP {name} Text about {name}.")
        lines.append(f"# TYPE {name} {kind}")
        lines.extend(f'{name}{{engine="{e}",model_name="meta/x"{labels}}} {value}' for e in range(engines))

    lines += ["# HELP python_info Python.", "# TYPE python_info gauge", 'python_info{version="3.12"} 1.0']
    series("vllm:num_requests_running", "gauge", running)
    series("vllm:num_requests_waiting_by_reason", "gauge", 77.0, ',reason="capacity"')
    series("vllm:num_requests_waiting", "gauge", waiting)
    series("vllm:kv_cache_usage_perc", "gauge", kv_usage)
    rng = random.Random(1)
    histograms = {"time_to_first_token_seconds": 40, "iteration_tokens_total": 300, "e2e_request_latency_seconds": 40}
    for name, count in histograms.items():
        lines.append(f"# TYPE vllm:{name} histogram")
        for e in range(engines):
            labels = f'engine="{e}",model_name="meta/x"'
            lines.extend(f'vllm:{name}_bucket{{{labels},le="{b}"}} {rng.randrange(9)}.0' for b in range(buckets))
            lines += [f"vllm:{name}_count{{{labels}}} {count}.0", f"vllm:{name}_sum{{{labels}}} 12.5"]
    series("vllm:prefix_cache_queries_total", "counter", 1000.0)
    series("vllm:prefix_cache_hits_total", "counter", 600.0)
    series("vllm:external_prefix_cache_hits_total", "counter", 9.0)
    series("vllm:prompt_tokens_total", "counter", 5000.0)
    series("vllm:prompt_tokens_by_source_total", "counter", 2000.0, ',source="local_compute"')
    series("vllm:prompt_tokens_by_source_total", "counter", 3000.0, ',source="local_cache_hit"')
    series("vllm:generation_tokens_total", "counter", 700.0)
    series("vllm:prompt_tokens_cached_total", "counter", 600.0)
    lines += lora.splitlines()
    info = ',block_size="16",num_gpu_blocks="1000",prefix_caching_hash_algo="sha256",kv_offloading_backend="None"'
    series("vllm:cache_config_info", "gauge", 1.0, info)
    return ("\n".join(lines) + "\n").encode()
