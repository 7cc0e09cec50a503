"""The metrics page."""

from dataclasses import replace

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engines.simulated import HELLO, LONG, metric, post, until
from tooling.simulator.engine import LAPTOP
from tooling.simulator.server import SimulatedPod

NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total external_prefix_cache_queries_total external_prefix_cache_hits_total
prompt_tokens_total prompt_tokens_by_source_total prompt_tokens_cached_total prompt_tokens_cached_by_source_total
generation_tokens_total num_preemptions_total request_success_total cache_config_info
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prefill_kv_computed_tokens_bucket request_time_per_output_token_seconds_bucket request_prompt_tokens_bucket
request_generation_tokens_bucket lora_requests_info
"""


async def test_the_metrics_page_has_vllms_names_and_labels(client: aiohttp.ClientSession) -> None:
    await post(client, "/v1/chat/completions", HELLO)
    async with client.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=")
        text = await response.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    names = {sample.name for sample in samples}
    assert {f"vllm:{name}" for name in NAMES.split()} <= names
    for sample in samples:
        if sample.name not in ("vllm:cache_config_info", "vllm:lora_requests_info"):
            assert {"engine": "0", "model_name": "sim"}.items() <= sample.labels.items()
    (config,) = [sample for sample in samples if sample.name == "vllm:cache_config_info"]
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"]) == ("16", "640")
    values = {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 5
    assert values["vllm:generation_tokens_total"] == 6
    assert values["vllm:request_generation_tokens_sum"] == 6
    assert values["vllm:request_time_per_output_token_seconds_count"] == 1
    assert await metric(client, "vllm:request_success_total", finished_reason="length") == 1


async def test_running_waiting_and_adapters_are_reported() -> None:
    parameters = replace(LAPTOP, max_running=1)
    async with SimulatedPod(parameters=parameters, lora=("poet", "cook")) as pod:
        async with aiohttp.ClientSession(pod.url) as client:
            async with client.post("/v1/chat/completions", json={**LONG, "model": "poet"}) as first:
                await first.content.readline()
                async with client.post("/v1/chat/completions", json={**LONG, "model": "cook"}):
                    await until(lambda: len(pod.engine.waiting) == 1)
                    assert await metric(client, "vllm:num_requests_running") == 1
                    assert await metric(client, "vllm:num_requests_waiting") == 1
                    assert 0 < await metric(client, "vllm:kv_cache_usage_perc") < 1
                    lora = {"max_lora": "1", "running_lora_adapters": "poet", "waiting_lora_adapters": "cook"}
                    assert await metric(client, "vllm:lora_requests_info", **lora) > 0


async def test_without_adapters_there_is_no_lora_metric() -> None:
    async with SimulatedPod() as pod, aiohttp.ClientSession(pod.url) as client:
        async with client.get("/metrics") as response:
            assert "lora" not in await response.text()
