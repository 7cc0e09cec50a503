"""Pods that answer errors at once, behind a real Envoy: few requests find them, and they are tried again."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from itertools import count as counting
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from epp.configuration.loader import strategy_text
from tests.support.engines.real_engines import following
from tests.support.gateway.chain import Laptop, eventually, laptop
from tooling.laptop.engines import LaptopPod

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

RATE = 30
"""Requests a second."""
_number = counting()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    async with laptop(tmp_path_factory.mktemp("failing")) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def chain(running: Laptop) -> AsyncIterator[Laptop]:
    yield running
    await well(running, *running.chain.pods)


async def well(chain: Laptop, *pods: LaptopPod) -> None:
    """Return when these pods are well and each has its share again."""
    for pod in pods:
        async with chain.http.delete(f"{pod.url}/admin/faults") as answer:
            assert answer.status == 200
    await eventually(
        lambda: answers(chain, 60),
        lambda seen: seen["failed"] == 0 and all(seen[pod.name] >= 10 for pod in pods),
    )


async def answers(chain: Laptop, count: int, stream: bool = True, timeout: float = 5.0) -> "Counter[str]":
    """Answers by pod, and those that failed, of so many requests sent at `RATE`, of 60 tokens; each is given up after
    `timeout` seconds.
    """
    most = aiohttp.ClientTimeout(total=timeout)

    async def one() -> str:
        prompt = f"{next(_number)} is a prompt of its own"
        body: dict[str, Any] = {"model": "sim", "prompt": prompt, "max_tokens": 60, "stream": stream}
        try:
            async with chain.http.post(f"{chain.url}/v1/completions", json=body, timeout=most) as answer:
                await answer.read()
                return answer.headers["x-sim-pod"] if answer.status == 200 else "failed"
        except (aiohttp.ClientError, TimeoutError):
            return "failed"

    asked = []
    for _ in range(count):
        asked.append(asyncio.ensure_future(one()))
        await asyncio.sleep(1 / RATE)
    return Counter(await asyncio.gather(*asked))


async def trouble(chain: Laptop, ill: LaptopPod, stream: bool = True) -> None:
    """`ill` answers errors for a while, then no more."""
    await answers(chain, RATE)
    await chain.faults(ill, status=500)
    first = await answers(chain, RATE, stream)
    after = await answers(chain, 150, stream)
    assert first["failed"] <= RATE / 2
    assert after["failed"] <= 9, after
    [reported] = [each for each in await chain.endpoints() if each["name"].endswith(ill.name)]
    assert reported["failures"] >= 2
    assert reported["plugins"]["failure-share-producer"]["failure_share"] > 0
    await well(chain, ill)
    assert await chain.metric("warmpath_degraded_now", reason="endpoint-failing") == 0


@pytest.mark.parametrize("strategy", ["prefix-aware", "least-load"])
async def test_one_that_answers_errors_gets_few_requests_and_its_share_when_it_is_well(
    chain: Laptop, strategy: str
) -> None:
    await following(chain, strategy_text(strategy))
    await trouble(chain, chain.chain.pods[0], stream=strategy != "least-load")


@pytest.mark.parametrize("fault", [{"refuse": True}, {"status": 503}])
async def test_who_is_answered_for_by_another_is_found_out_and_nobody_notices(
    chain: Laptop, fault: dict[str, Any]
) -> None:
    await following(chain, strategy_text("least-load"))
    ill = chain.chain.pods[0]
    await chain.faults(ill, **fault)
    before = await asked(chain, ill)
    seen = await answers(chain, 120)
    assert seen["failed"] == seen[ill.name] == 0
    assert await chain.metric("warmpath_degraded_now", reason="endpoint-failing") == 1
    assert await asked(chain, ill) - before <= 20


@pytest.mark.parametrize("strategy", ["prefix-aware", "least-load"])
async def test_one_that_hangs_gets_nothing_until_its_metrics_are_read_again(chain: Laptop, strategy: str) -> None:
    await following(chain, strategy_text(strategy))
    ill = chain.chain.pods[0]
    seen = await answers(chain, RATE)
    assert seen[ill.name] > 0
    await chain.faults(ill, hang=True, metrics="hang")
    unanswered = asyncio.ensure_future(answers(chain, RATE, timeout=600))
    try:
        await eventually(
            lambda: chain.metric("warmpath_degraded_now", reason="endpoint-hanging"), lambda now: now == 1, seconds=240
        )
        before = await asked(chain, ill)
        assert before >= seen[ill.name] + 1
        seen = await answers(chain, 60)
        assert seen["failed"] == seen[ill.name] == 0
        assert await asked(chain, ill) == before
        unanswered.cancel()  # what it never answers would count against it
        await well(chain, ill)
        assert await chain.metric("warmpath_degraded_now", reason="endpoint-hanging") == 0
    finally:
        unanswered.cancel()


async def asked(chain: Laptop, pod: LaptopPod) -> int:
    """Requests the picker has given to a pod."""
    [reported] = [each for each in await chain.endpoints() if each["name"].endswith(pod.name)]
    return int(reported["decisions"])


async def test_where_all_fail_all_are_asked_alike(chain: Laptop) -> None:
    await following(chain, strategy_text("prefix-aware"))
    for pod in chain.chain.pods:
        await chain.faults(pod, status=500)
    await answers(chain, 30)
    before = [await asked(chain, pod) for pod in chain.chain.pods]
    assert await answers(chain, 90) == {"failed": 90}
    for pod, begun in zip(chain.chain.pods, before, strict=True):
        assert await asked(chain, pod) - begun >= 15


async def test_where_answers_pass_through_the_picker_too(tmp_path: Path) -> None:
    async with laptop(tmp_path, wiring="full-duplex") as chain:
        await trouble(chain, chain.chain.pods[0])
