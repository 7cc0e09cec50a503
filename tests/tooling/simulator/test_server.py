"""The process and the pod as a context manager."""

import asyncio
import signal
import socket
import sys

import aiohttp
import pytest

from tests.support.engines.simulated import LONG, metric, post
from tooling.simulator.server import SimulatedPod


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "tooling.simulator.server",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_even_under_a_stream(number: signal.Signals) -> None:
    process = await started("--port", "0", "--name", "pod-b")
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("pod-b: simulated vLLM on http://127.0.0.1:")
    async with aiohttp.ClientSession(line.split()[-1]) as client:
        async with client.post("/v1/chat/completions", json=LONG) as response:
            await response.content.readline()
            process.send_signal(number)
            async with asyncio.timeout(10):
                _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_flags_reach_the_pod() -> None:
    flags = "--preset h100-8b --blocks 10 --block-size 8 --model llama --lora poet --max-loras 3 --max-model-len 70"
    process = await started("--port", "0", *flags.split())
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    async with aiohttp.ClientSession(line.split()[-1]) as client:
        async with client.get("/v1/models") as response:
            models = (await response.json())["data"]
        config = {"num_gpu_blocks": "10", "block_size": "8", "kv_cache_size_tokens": "80"}
        assert await metric(client, "vllm:cache_config_info", **config) == 1
        assert await metric(client, "vllm:lora_requests_info", max_lora="3") > 0
    process.terminate()
    await process.communicate()
    assert [(model["id"], model["max_model_len"]) for model in models] == [("llama", 70), ("poet", None)]


async def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await started("--port", str(port))
        output, errors = await process.communicate()
    assert (process.returncode, output) == (2, b"")
    assert errors.decode() == f"pod: cannot listen on 127.0.0.1:{port}: Address already in use\n"


async def test_a_time_scale_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="time_scale"):
        SimulatedPod(time_scale=0)


async def test_two_pods_with_one_seed_answer_alike() -> None:
    async def answers(seed: int) -> list[str]:
        async with SimulatedPod(seed=seed, time_scale=50) as pod, aiohttp.ClientSession(pod.url) as client:
            bodies = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(5)]
            done = await asyncio.gather(*(post(client, "/v1/chat/completions", body) for body in bodies))
            return [answer["choices"][0]["message"]["content"] for answer in done]

    one, two, other = await asyncio.gather(answers(1), answers(1), answers(2))
    assert one == two
    assert one != other
    assert len({len(text) for text in one}) > 1, "lengths differ from prompt to prompt"
