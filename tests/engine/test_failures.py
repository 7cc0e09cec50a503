"""What is behind the picker is killed, one after the other: requests go on, and what is known recovers."""

import asyncio

import openai
import pytest

from tests.engine.conftest import BLOCK
from tests.support.engines.mounted import Mount
from tests.support.engines.real_engines import (
    asked_directly,
    eventually,
    in_l1,
    killed,
    kv_aware,
    loaded,
    received,
    remembered,
    restored,
    settled,
    started,
    statistic,
    well,
)
from tests.support.engines.talk import Talk, Turn
from tests.support.gateway.chain import Laptop

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def strategy(running: Laptop) -> str:
    return kv_aware(running)


async def degraded(fleet: Laptop, reason: str) -> float:
    return await fleet.metric("warmpath_degraded_total", reason=reason)


async def test_the_coordinator(fleet: Laptop, talk: Talk) -> None:
    await talk.say(talk.words(200))
    await settled(fleet)
    before = await degraded(fleet, "tiers-away")
    await killed(fleet, "coordinator")
    await eventually(lambda: statistic(fleet, "tier_reached"), lambda reached: not reached)
    assert await statistic(fleet, "tier_chunks") == 0
    assert await degraded(fleet, "tiers-away") > before
    on_device = await talk.say(talk.words(30))
    assert on_device.predicted == on_device.cached > 0
    await started(fleet, "coordinator")
    await eventually(lambda: statistic(fleet, "tier_reached"), bool)
    await remembered(fleet, on_device.endpoint)  # the new coordinator learns what is stored from now on
    await eventually(lambda: statistic(fleet, "tier_chunks"), bool)
    await well(fleet, talk)


async def test_a_pod(fleet: Laptop, talk: Talk) -> None:
    first = await talk.say(talk.words(400))
    await settled(fleet)
    await killed(fleet, first.endpoint)
    again = await talk.say(talk.words(30))
    assert again.endpoint != first.endpoint
    # From L2. What the directory says of it is a hint: the last chunk may not have arrived when it is asked for.
    assert abs(again.predicted - again.cached) <= BLOCK
    assert again.cached >= first.prompt // BLOCK * BLOCK - BLOCK
    await received(fleet, 1)
    await started(fleet, first.endpoint)
    await received(fleet, 2)
    await restored(fleet)
    await well(fleet, talk)


async def test_an_lmcache_server(fleet: Laptop, talk: Talk) -> None:
    first = await talk.say(talk.words(400))
    server = f"lmcache-{first.endpoint}"
    await killed(fleet, server)
    for _ in range(3):
        turn = await talk.say(talk.words(30))
        assert turn.cached > 0  # what the device holds is not lost
    await eventually(lambda: in_l1(fleet, fleet.pod(first.endpoint).node), lambda chunks: chunks == 0)
    await started(fleet, server)
    await remembered(fleet, first.endpoint)
    await well(fleet, talk)


async def loaded_elsewhere(fleet: Laptop, talk: Talk, first: Turn) -> None:
    """Another pod is asked for a conversation; return when its node has found the whole blocks of the first turn in L2.

    LMCache counts a moment after the pod answers.
    """
    other = next(pod for pod in fleet.chain.pods if pod.name != first.endpoint)
    _, before = await loaded(fleet, other.name)
    await asked_directly(other, talk.messages)
    whole = first.prompt // BLOCK * BLOCK
    await eventually(lambda: loaded(fleet, other.name), lambda now: now[1] - before >= whole)


async def test_the_volume_of_l2_under_load(fleet: Laptop, client: openai.AsyncOpenAI, talk: Talk, l2: Mount) -> None:
    first = await talk.say(talk.words(400))
    await settled(fleet)
    enough = asyncio.Event()

    async def asking() -> int:
        answers = 0
        while not enough.is_set():
            other = Talk(fleet, client)
            await other.say(other.words(200))
            answers += 1
        return answers

    async with asyncio.TaskGroup() as group:
        asked = [group.create_task(asking()) for _ in range(3)]
        try:
            l2.kill()
            for _ in range(3):
                unstored = Talk(fleet, client)
                await unstored.say(unstored.words(400))
        finally:
            l2.start()
        await Talk(fleet, client).say("And now?")
        enough.set()
    assert all(each.result() for each in asked)  # no request failed: that would have been an exception
    # Nothing else was started again. What L2 had it still has, and it takes what is new.
    await loaded_elsewhere(fleet, talk, first)
    fresh = Talk(fleet, client)
    second = await fresh.say(fresh.words(400))
    await settled(fleet)
    await loaded_elsewhere(fleet, fresh, second)
    await well(fleet, talk)
