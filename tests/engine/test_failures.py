"""What is behind the picker is killed, one after the other: requests go on, and what is known mends itself."""

import pytest

from tests.engine.conftest import BLOCK
from tests.support.chain import Laptop
from tests.support.fleet import eventually, heard, killed, settled, started
from tests.support.talk import Talk

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.usefixtures("aware")]


async def statistic(fleet: Laptop, name: str) -> float:
    return await fleet.metric("warmpath_plugin_statistic", pool="sim", statistic=name)


async def degraded(fleet: Laptop, reason: str) -> float:
    return await fleet.metric("warmpath_degraded_total", reason=reason)


async def well(fleet: Laptop, talk: Talk) -> None:
    """The conversation goes on, and the picker knows exactly what of it is cached."""
    await talk.say(talk.words(100))
    await settled(fleet)
    turn = await talk.say(talk.words(30))
    assert turn.predicted == turn.cached > 0


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
    await eventually(lambda: stored(fleet, talk), bool)
    await well(fleet, talk)


async def stored(fleet: Laptop, talk: Talk) -> float:
    """Chunks known after one more turn: the new coordinator hears of what is stored from now on."""
    await talk.say(talk.words(2 * BLOCK))
    return await statistic(fleet, "tier_chunks")


async def test_a_pod(fleet: Laptop, talk: Talk) -> None:
    first = await talk.say(talk.words(400))
    await settled(fleet)
    await killed(fleet, first.endpoint)
    again = await talk.say(talk.words(30))
    assert again.endpoint != first.endpoint
    # From L2. What the directory says of it is a hint: the last chunk may not have arrived when it is asked for.
    assert abs(again.predicted - again.cached) <= BLOCK
    assert again.cached >= first.prompt // BLOCK * BLOCK - BLOCK
    await heard(fleet, 1)
    await started(fleet, first.endpoint)
    await heard(fleet, 2)
    await well(fleet, talk)


async def test_an_lmcache_server(fleet: Laptop, talk: Talk) -> None:
    first = await talk.say(talk.words(400))
    server = f"lmcache-{first.endpoint}"
    await killed(fleet, server)
    for _ in range(3):
        turn = await talk.say(talk.words(30))
        assert turn.cached > 0  # what the device holds is not lost
    await started(fleet, server)
    await eventually(lambda: stored(fleet, talk), bool)
    await well(fleet, talk)


async def test_redis(fleet: Laptop, talk: Talk) -> None:
    first = await talk.say(talk.words(400))
    await settled(fleet)
    await killed(fleet, "redis")
    for _ in range(3):
        turn = await talk.say(talk.words(30))
        assert turn.cached >= first.prompt // BLOCK * BLOCK
    # LMCache 0.5.6 does not connect to a Redis that came back: its servers are started anew too.
    servers = [f"lmcache-{pod.name}" for pod in fleet.chain.pods]
    for server in servers:
        await killed(fleet, server)
    await started(fleet, "redis")
    await started(fleet, *servers)
    await eventually(lambda: stored(fleet, talk), bool)
    await well(fleet, talk)
