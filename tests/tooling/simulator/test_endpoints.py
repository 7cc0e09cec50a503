"""The endpoints that do not generate, headers, bounds."""

import asyncio
import json

import aiohttp
import pytest

from tests.support.engines.simulated import HELLO, LONG, post
from tooling.simulator.engine import LAPTOP
from tooling.simulator.server import SimulatedPod


async def test_tokenize_and_back(client: aiohttp.ClientSession) -> None:
    chat = await post(client, "/tokenize", {"messages": HELLO["messages"]})
    answer = await post(client, "/v1/chat/completions", HELLO)
    assert chat["count"] == len(chat["tokens"]) == answer["usage"]["prompt_tokens"]
    assert chat["max_model_len"] == LAPTOP.capacity
    text = await post(client, "/tokenize", {"prompt": "grüße"})
    assert await post(client, "/detokenize", {"tokens": text["tokens"]}) == {"prompt": "grüße"}


async def test_headers_come_before_the_first_token_and_ids_are_echoed(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"slow": 1000})
    async with client.post("/v1/chat/completions", json=LONG, headers={"x-request-id": "qü7"}) as response:
        assert response.headers["x-request-id"] == "q?7"
        assert response.headers["x-sim-pod"] == "pod-a"
        assert not response.content.is_eof()


async def test_an_id_that_is_no_text_harms_nothing(pod: SimulatedPod) -> None:
    reader, writer = await asyncio.open_connection(*pod.address.split(":"))
    body = json.dumps(HELLO).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    writer.write(head + b"x-request-id: a\xff\xfeb\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.0 200")
    assert b'"id":"chatcmpl-a??b"' in answer


async def test_plain_endpoints(client: aiohttp.ClientSession) -> None:
    for path in ("/health", "/ping"):
        async with client.get(path) as response:
            assert (response.status, await response.read()) == (200, b"")
    async with client.get("/version") as response:
        assert (await response.json())["version"].startswith("0.")
    async with client.get("/load") as response:
        assert await response.json() == {"server_load": 0}
    assert await post(client, "/v1/audio/transcriptions", {}, 404) == {"detail": "Not Found"}


async def test_a_body_beyond_the_bound_is_refused(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tooling.simulator.endpoints.MAX_BODY", 1000)
    async with SimulatedPod() as small, aiohttp.ClientSession(small.url) as client:
        assert (await post(client, "/v1/completions", b" " * 2000, 413))["error"]["code"] == 413
