"""Simulated pods behind one port, as vLLM's data-parallel ranks are."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from epp.pool.engines import ENGINES, Places, page_of_each, parse
from epp.prefix.events.sources import sources_on
from tests.support.engines.simulated import HELLO, post, sse
from tooling.simulator.publisher import KvEventsConfig
from tooling.simulator.ranks import DataParallelPod
from tooling.simulator.server import SimulatedPod

FREE = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")


@asynccontextmanager
async def serving(first: int = 0) -> AsyncIterator[tuple[DataParallelPod, aiohttp.ClientSession]]:
    ranks = [SimulatedPod(name="pod", time_scale=100.0, kv_events=FREE) for _ in range(2)]
    async with DataParallelPod("pod", "127.0.0.1", 0, ranks, first) as pod, aiohttp.ClientSession(pod.url) as client:
        yield pod, client


async def test_a_request_names_its_rank_or_goes_where_least_is_under_way() -> None:
    async with serving() as (_, client):
        for given, expected in (("1", "1"), ("0", "0"), ("x", "0"), ("", "0")):
            body = {**HELLO, "model": "sim"}
            async with client.post(
                "/v1/chat/completions", json=body, headers={"X-data-parallel-rank": given}
            ) as answer:
                assert (answer.status, answer.headers["x-sim-rank"], answer.headers["x-sim-pod"]) == (
                    200,
                    expected,
                    "pod",
                )
        events = await sse(client, "/v1/chat/completions", HELLO)
        assert events[-1] == ("", "[DONE]")


@pytest.mark.parametrize("rank", ["2", "-1"])
async def test_a_rank_that_is_not_there_is_refused(rank: str) -> None:
    async with serving() as (_, client):
        headers = {"x-data-parallel-rank": rank}
        async with client.post("/v1/chat/completions", json=HELLO, headers=headers) as answer:
            assert answer.status == 400
            error = (await answer.json())["error"]
        assert error["message"] == f"data_parallel_rank {rank} is out of range [0, 2)."
        assert error["type"] == "BadRequestError"


async def test_one_page_has_the_series_of_all_engines() -> None:
    async with serving(first=4) as (pod, client):
        await post(client, "/v1/chat/completions", HELLO)
        async with client.get("/metrics") as answer:
            page = await answer.read()
        apart = page_of_each(page, 2)
        assert list(apart) == [4, 5]
        loads = [parse(each, ENGINES["vllm"], 0.0, Places()) for each in apart.values()]
        assert [load is not None and load.prompt_tokens > 0 for load in loads] == [True, False]
        assert page.count(b"# TYPE vllm:num_requests_running ") == 1
        assert page.count(b"# TYPE python_info ") <= 1
        async with client.get("/kv_event_sources") as answer:
            sources = sources_on(await answer.read(), pod.address)
        assert [source.rank for source in sources] == [4, 5]
        assert len({source.publisher for source in sources}) == 2
