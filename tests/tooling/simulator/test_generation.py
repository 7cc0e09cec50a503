"""Generating over real sockets: caching, lengths, bounds, clients that leave."""

import asyncio

import aiohttp
import pytest

from tests.support.engines.simulated import HELLO, LONG, metric, post, sse, until
from tooling.simulator.engine import LAPTOP
from tooling.simulator.server import SimulatedPod


async def test_a_second_turn_finds_the_first_and_its_answer_in_the_cache(client: aiohttp.ClientSession) -> None:
    turn: list[dict[str, str]] = [{"role": "user", "content": "x" * 400}]
    first = await post(client, "/v1/chat/completions", {"messages": turn, "max_tokens": 32, "ignore_eos": True})
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    turn += [first["choices"][0]["message"], {"role": "user", "content": "and?"}]
    second = await post(client, "/v1/chat/completions", {"messages": turn, "max_tokens": 1})
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16
    assert await metric(client, "vllm:prefix_cache_hits_total") == computed // 16 * 16


@pytest.mark.parametrize("other", [{"cache_salt": "tenant"}, {"model": "poet"}])
async def test_salt_and_adapter_share_nothing(client: aiohttp.ClientSession, other: dict[str, str]) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 1}
    for extra, cached in (({}, 0), (other, 0), (other, 96), ({}, 96)):
        answer = await post(client, "/v1/completions", {**body, **extra})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_the_prefix_cache_can_be_reset_while_idle(client: aiohttp.ClientSession, pod: SimulatedPod) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 1}
    await post(client, "/v1/completions", body)
    async with client.post("/v1/chat/completions", json=LONG) as streaming:
        await streaming.content.readline()
        error = (await post(client, "/reset_prefix_cache", {}, 409))["error"]
        assert "in use" in error["message"]
    await until(lambda: pod.engine.free_blocks == LAPTOP.blocks)
    async with client.post("/reset_prefix_cache") as response:
        assert response.status == 200
    assert (await post(client, "/v1/completions", body))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_stop_strings_cut_the_answer(client: aiohttp.ClientSession) -> None:
    body = {"prompt": "tell me", "max_tokens": 20, "ignore_eos": True}
    text = (await post(client, "/v1/completions", body))["choices"][0]["text"]
    stop = text[18:22]
    cut = await post(client, "/v1/completions", {**body, "stop": [stop]})
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == -(-(text.index(stop) + 4) // 4)
    streamed = await sse(client, "/v1/completions", {**body, "stop": stop})
    assert "".join(data["choices"][0]["text"] for _, data in streamed[:-1]) == text[: text.index(stop)]


async def test_lengths_asked_for_are_kept(client: aiohttp.ClientSession) -> None:
    for extra, tokens in (({"max_completion_tokens": 3}, 3), ({"max_tokens": 200, "min_tokens": 200}, 200)):
        body = {"messages": HELLO["messages"], **extra}
        assert (await post(client, "/v1/chat/completions", body))["usage"]["completion_tokens"] == tokens


async def test_live_requests_are_bounded(client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tooling.simulator.generation.MAX_LIVE", 1)
    async with client.post("/v1/chat/completions", json=LONG):
        error = (await post(client, "/v1/chat/completions", HELLO, 503))["error"]
        assert error["type"] == "ServiceUnavailableError"


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_taken_out_of_the_engine(
    pod: SimulatedPod, client: aiohttp.ClientSession, stream: bool
) -> None:
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(post(client, "/v1/chat/completions", {**LONG, "stream": stream}))
        await until(lambda: len(pod.engine.running) == 1)
        asking.cancel()
    await until(lambda: not pod.engine.running)
    assert pod.engine.free_blocks == LAPTOP.blocks
    assert await metric(client, "vllm:request_success_total", finished_reason="abort") == 1
