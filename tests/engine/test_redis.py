"""L2 is a real Redis for both nodes: killed, it comes back empty; stopped, it goes on; and requests are answered."""

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import openai
import pytest
import pytest_asyncio

from tests.engine.conftest import BLOCK, two_nodes
from tests.support.engines.real_engines import (
    asked_directly,
    eventually,
    killed,
    kv_aware,
    remembered,
    saturated,
    settled,
    started,
    statistic,
    well,
)
from tests.support.engines.talk import Talk, Turn, cached_of
from tests.support.gateway.chain import Laptop
from tooling.laptop.engines import Tiers

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def running(python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    """A chain as the other modules', with a service `redis` in place of the volume."""
    async with two_nodes(python, Tiers(l2="redis"), tmp_path_factory.mktemp("redis")) as made:
        yield made


@pytest.fixture
def strategy(running: Laptop) -> str:
    return kv_aware(running)


@dataclass
class Asked:
    """What became of the requests of several clients."""

    turns: list[Turn] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    longest: float = 0.0
    """Seconds until a stream was at its end."""

    def row(self, fault: str) -> str:
        """As in docs/faults.md."""
        answered, failed = len(self.turns), len(self.failed)
        return f"| {fault} | {answered + failed} | {answered} | {failed} | {self.longest:.1f} |"


@asynccontextmanager
async def asking(fleet: Laptop, client: openai.AsyncOpenAI, clients: int = 3) -> AsyncIterator[Asked]:
    """While the block runs each client begins conversations, and goes on with one that is so old that the devices may
    have lost it. All is streamed."""
    asked, enough = Asked(), asyncio.Event()

    async def say(talk: Talk, words: int) -> None:
        begun = time.monotonic()
        try:
            asked.turns.append(await talk.say(talk.words(words), stream=True))
        except (openai.OpenAIError, AssertionError) as error:
            asked.failed.append(repr(error))
        asked.longest = max(asked.longest, time.monotonic() - begun)

    async def ask() -> None:
        begun: deque[Talk] = deque()
        while not enough.is_set():
            begun.append(Talk(fleet, client))
            await say(begun[-1], 150)
            if len(begun) > 12:
                await say(begun.popleft(), 30)

    async with asyncio.TaskGroup() as group:
        for _ in range(clients):
            group.create_task(ask())
        try:
            yield asked
        finally:
            enough.set()


async def answered_without_redis(fleet: Laptop, client: openai.AsyncOpenAI) -> None:
    """Return when prompts that began after Redis was away are answered."""
    for _ in range(3):
        unstored = Talk(fleet, client)
        await unstored.say(unstored.words(200), stream=True)


async def cached_elsewhere(fleet: Laptop, talk: Talk, endpoint: str) -> int:
    """Tokens of a conversation that are cached for another pod than `endpoint`, asked past the picker."""
    other = next(pod for pod in fleet.chain.pods if pod.name != endpoint)
    return cached_of(await asked_directly(other, talk.messages))


async def shared(fleet: Laptop, client: openai.AsyncOpenAI) -> bool:
    """Whether what one pod stores now is what the other, which has never seen it, finds."""
    fresh = Talk(fleet, client)
    turn = await fresh.say(fresh.words(200), stream=True)
    await asyncio.sleep(1.0)  # it is stored after the answer
    return await cached_elsewhere(fleet, fresh, turn.endpoint) >= turn.prompt // BLOCK * BLOCK


def whole(fleet: Laptop, asked: Asked) -> None:
    """Nothing was lost, both pods were picked, and nothing but Redis was started again."""
    assert not asked.failed
    assert {turn.endpoint for turn in asked.turns} == {pod.name for pod in fleet.chain.pods}
    assert fleet.chain.gone == []


async def from_l2(fleet: Laptop) -> float:
    """Tokens that picks have counted on in L2 so far."""
    return await fleet.metric("warmpath_predicted_cached_tokens_total", pool="sim", tier="l2")


async def test_redis_is_killed_and_comes_back_empty(fleet: Laptop, client: openai.AsyncOpenAI, talk: Talk) -> None:
    lost = Talk(fleet, client)
    first, second = [await each.say(each.words(400), stream=True) for each in (talk, lost)]
    await settled(fleet)
    async with asking(fleet, client) as asked:
        await killed(fleet, "redis")
        await answered_without_redis(fleet, client)
        await started(fleet, "redis")
        await eventually(lambda: shared(fleet, client), bool)
    print(asked.row("killed (-9), comes back empty"))
    whole(fleet, asked)
    assert await statistic(fleet, "tier_reached")

    # LMCache's coordinator is not told what Redis has lost. Who is sent elsewhere for it computes it, once.
    await settled(fleet)
    async with saturated(fleet, first.endpoint):
        again = await talk.say(talk.words(20), stream=True)
    print(f"of {first.prompt} tokens that Redis lost, {again.predicted} were counted on at the other pod, once")
    assert again.endpoint != first.endpoint, await fleet.chain.seen(2)
    assert again.cached == 0
    await well(fleet, talk)

    # A new coordinator knows nothing of it.
    await killed(fleet, "coordinator")
    await eventually(lambda: statistic(fleet, "tier_chunks"), lambda chunks: not chunks)
    await started(fleet, "coordinator")
    await eventually(lambda: statistic(fleet, "tier_reached"), bool)
    await remembered(fleet, *(pod.name for pod in fleet.chain.pods))
    before = await from_l2(fleet)
    async with saturated(fleet, second.endpoint):
        elsewhere = await lost.say(lost.words(20), stream=True)
    assert elsewhere.endpoint != second.endpoint, await fleet.chain.seen(2)
    assert elsewhere.predicted == elsewhere.cached == 0
    assert await from_l2(fleet) == before


async def test_redis_stops_for_some_seconds(fleet: Laptop, client: openai.AsyncOpenAI, talk: Talk) -> None:
    first = await talk.say(talk.words(400), stream=True)
    await settled(fleet)
    redis = fleet.chain.processes.pid("redis")
    async with asking(fleet, client) as asked:
        os.kill(redis, signal.SIGSTOP)
        try:
            await answered_without_redis(fleet, client)
            await asyncio.sleep(5.0)
        finally:
            os.kill(redis, signal.SIGCONT)
        await eventually(lambda: shared(fleet, client), bool)
    print(asked.row("stopped (SIGSTOP) for more than five seconds"))
    whole(fleet, asked)

    # What it had it has, as the picker knows.
    await settled(fleet)
    before = await from_l2(fleet)
    async with saturated(fleet, first.endpoint):
        again = await talk.say(talk.words(20), stream=True)
    assert again.endpoint != first.endpoint, await fleet.chain.seen(2)
    assert again.predicted == again.cached >= first.prompt // BLOCK * BLOCK
    assert await from_l2(fleet) == before + again.predicted
    await well(fleet, talk)
