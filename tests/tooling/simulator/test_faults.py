"""Each fault does what it says, and nothing else."""

import asyncio

import aiohttp
import pytest

from tests.support.engines.simulated import HELLO, LONG, metric, post, until
from tooling.simulator.engine import LAPTOP
from tooling.simulator.server import SimulatedPod


async def test_a_fault_status_hits_the_share_it_is_given(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"status": 503, "rate": 0.5})
    statuses = []
    for _ in range(40):
        async with client.get("/health") as response:
            statuses.append(response.status)
    assert set(statuses) == {200, 503}
    assert 8 <= statuses.count(503) <= 32
    async with client.delete("/admin/faults") as response:
        assert (await response.json())["status"] is None
    async with client.get("/health") as response:
        assert response.status == 200


async def test_a_hanging_pod_says_nothing(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"hang": True})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.get("/health")
    async with client.get("/metrics") as response:
        assert response.status == 200


async def test_a_pod_tells_how_many_requests_hang(client: aiohttp.ClientSession) -> None:
    async def hanging() -> int:
        async with client.get("/admin/faults") as response:
            return int((await response.json())["hanging"])

    await post(client, "/admin/faults", {"hang": True})
    asking = [asyncio.ensure_future(client.get("/health")) for _ in range(2)]
    async with asyncio.timeout(60):
        while await hanging() < len(asking):
            await asyncio.sleep(0.01)
    await post(client, "/admin/faults", {})
    assert await hanging() == len(asking), "they go on hanging"
    for task in asking:
        task.cancel()
    async with asyncio.timeout(60):
        while await hanging():
            await asyncio.sleep(0.01)


async def test_a_refusing_pod_cuts_the_connection(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"refuse": True})
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(client, "/v1/chat/completions", HELLO)


async def collect(response: aiohttp.ClientResponse, received: list[bytes]) -> None:
    async for line in response.content:
        received.append(line)


@pytest.mark.parametrize("chunks", [0, 3])
async def test_a_stream_is_cut_after_so_many_chunks(
    pod: SimulatedPod, client: aiohttp.ClientSession, chunks: int
) -> None:
    await post(client, "/admin/faults", {"drop_after": chunks})
    received: list[bytes] = []
    async with client.post("/v1/chat/completions", json=LONG) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await collect(response, received)
    assert len(received) == 2 * chunks, "a line of data and an empty one each"
    await until(lambda: not pod.engine.running)


async def test_an_answer_that_is_not_streamed_is_cut_too(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"drop_after": 2})
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(client, "/v1/chat/completions", HELLO)


async def test_a_slow_pod_takes_longer(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"slow": 50})
    await post(client, "/v1/chat/completions", HELLO)
    waited = await metric(client, "vllm:inter_token_latency_seconds_sum")
    assert waited >= 5 * LAPTOP.base * 50 / 20, "five gaps, on a pod that is twenty times faster than the preset"


@pytest.mark.parametrize("kind", ["huge", "endless", "binary", "half", "hang", "off"])
async def test_bad_metrics_pages(client: aiohttp.ClientSession, kind: str) -> None:
    async with client.get("/metrics") as response:
        good = await response.read()
    await post(client, "/admin/faults", {"metrics": kind})
    if kind == "hang":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.get("/metrics")
        return
    async with client.get("/metrics") as response:
        assert response.status == (404 if kind == "off" else 200)
        if kind == "half":
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        elif kind == "binary":
            with pytest.raises(UnicodeDecodeError):
                (await response.read()).decode()
        elif kind in ("huge", "endless"):
            assert len(await response.content.readexactly(1 << 20)) > len(good)
    async with client.get("/health") as response:
        assert response.status == 200
