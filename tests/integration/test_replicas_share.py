"""Four replicas behind one real Envoy: together they pick as one, and what one knows outlives it."""

import os
import signal
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateway.chain import Laptop, eventually, laptop
from tests.support.gateway.steady_load import steady_rate
from tests.support.process.waiting import until
from tooling.laptop.chain import Replica
from tooling.laptop.load import play
from tooling.simulator.workloads import demo

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

REPLICAS = 4
PROMPTS = [f"{n} " + f"word{n} " * 800 for n in range(6)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    async with laptop(tmp_path_factory.mktemp("replicas"), replicas=REPLICAS) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def chain(running: Laptop) -> AsyncIterator[Laptop]:
    """All replicas are there and agree."""
    yield running
    for replica in running.chain.replicas:
        if not await speaks(running, replica):
            await running.chain.start_again(replica)
    await eventually(lambda: states(running), lambda seen: seen == [["live"] * (REPLICAS - 1)] * REPLICAS)


async def speaks(chain: Laptop, replica: Replica) -> bool:
    try:
        await chain.chain.get(f"{replica.admin}/ready")
    except OSError:
        return False
    return True


async def shown(chain: Laptop, replica: Replica) -> Mapping[str, Any]:
    """What a replica says of itself and its peers."""
    found: Mapping[str, Any] = (await chain.chain.get(f"{replica.admin}/endpoints"))["replicas"]
    return found


async def states(chain: Laptop) -> list[list[str]]:
    """Of each replica, how its peers are."""
    seen = [await shown(chain, replica) for replica in chain.chain.replicas]
    return [[peer["state"] for peer in each["peers"]] for each in seen]


async def open_of(chain: Laptop, replica: Replica) -> int:
    return int((await shown(chain, replica))["in_flight"])


async def kill(chain: Laptop, replica: Replica) -> None:
    assert await chain.chain.processes.stop(replica.name, how=signal.SIGKILL) == [-signal.SIGKILL]


async def pods_of(chain: Laptop) -> dict[str, str]:
    """Which pod answers each prompt now."""
    found = {}
    for prompt in PROMPTS:
        answer = await chain.chat(prompt)
        assert answer.status == 200, await answer.text()
        found[prompt] = answer.headers["x-sim-pod"]
    return found


async def test_each_replica_knows_all_others(chain: Laptop) -> None:
    await eventually(lambda: states(chain), lambda seen: seen == [["live"] * (REPLICAS - 1)] * REPLICAS)
    for replica in chain.chain.replicas:
        assert (await shown(chain, replica))["joined"] is True


async def test_four_replicas_hit_as_often_as_one(chain: Laptop, tmp_path: Path) -> None:
    async with laptop(tmp_path, replicas=1) as alone:
        one = await play(demo(3), alone.url, "sim")
    four = await play(demo(3), chain.url, "sim")
    assert (one.failures, four.failures) == ([], [])
    assert four.hit_rate >= 0.97 * one.hit_rate > 0


async def test_a_killed_replica_takes_no_knowledge_with_it(chain: Laptop) -> None:
    before = await pods_of(chain)
    first, *others = chain.chain.replicas
    await kill(chain, first)
    assert await pods_of(chain) == before
    await chain.chain.start_again(first)
    await eventually(lambda: states(chain), lambda seen: seen == [["live"] * (REPLICAS - 1)] * REPLICAS)
    for other in others:  # from here on the restarted one picks alone: what it knows came by its snapshot
        await kill(chain, other)
    assert await pods_of(chain) == before


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
async def test_what_a_lost_replica_had_in_flight_leaves_the_others_accounts(chain: Laptop, how: signal.Signals) -> None:
    first, *others = chain.chain.replicas
    pid = chain.chain.processes.pid(first.name)
    async with steady_rate(f"{chain.url}/v1/completions", per_second=30) as load:
        await until(lambda: load.answered[0] > 60, 30)
        if how == signal.SIGKILL:
            await kill(chain, first)
        else:
            os.kill(pid, signal.SIGSTOP)
        try:
            load.era = 1
            for other in others:
                await eventually(
                    lambda other=other: shown(chain, other),  # type: ignore[misc]
                    lambda seen: "silent" in [peer["state"] for peer in seen["peers"]],
                )
            load.era = 2
            await until(lambda: load.answered[2] > 60, 30)
            await until(lambda: load.under_way[0] == load.under_way[1] == 0, 30)
        finally:
            if how == signal.SIGSTOP:
                os.kill(pid, signal.SIGCONT)
    assert load.lost[2] == 0
    for other in others:
        await eventually(lambda other=other: open_of(chain, other), lambda count: count == 0)  # type: ignore[misc]
