"""Replicas of the endpoint picker come and go behind a real Envoy, under load that notices every lost byte."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from gateway.wiring import Wiring
from tests.support.gateway.steady_load import SteadyLoad, steady_load, steady_rate
from tests.support.process.waiting import until
from tooling.laptop.chain import Chain, Shape, running_chain

pytestmark = [pytest.mark.envoy]

POOL = "cluster.epp.default.sim."


@asynccontextmanager
async def chain(folder: Path, wiring: Wiring = "lean") -> AsyncIterator[Chain]:
    async with running_chain(Shape(pods=2, replicas=2, port=0, wiring=wiring), folder) as running:
        yield running


async def until_healthy(running: Chain, replicas: int) -> None:
    """Return once Envoy counts that many healthy replicas."""
    async with asyncio.timeout(20):
        while await healthy(running) != replicas:
            await asyncio.sleep(0.02)


async def healthy(running: Chain) -> int | str:
    """Replicas that Envoy counts as healthy now."""
    return (await running.envoy.stats(f"^{POOL}membership_healthy$"))[POOL + "membership_healthy"]


async def until_streaming(load: SteadyLoad) -> None:
    async with asyncio.timeout(20):
        while not load.streaming:
            await asyncio.sleep(0.02)


async def until_answered(load: SteadyLoad, kinds: tuple[str, ...] = ("plain", "large", "stream")) -> None:
    """Return once another answer of each kind has come."""
    before = dict(load.answered)
    async with asyncio.timeout(30):
        while any(load.answered[kind] <= before.get(kind, 0) for kind in kinds):
            await asyncio.sleep(0.02)


async def restart_in_turn(running: Chain, load: SteadyLoad, times: int) -> None:
    for number in range(times):
        replica = running.replicas[number % 2]
        await until_streaming(load)
        assert await running.processes.stop(replica.name) == [0]
        await running.start_again(replica)
        await until_answered(load, ("plain", "large"))
        assert load.lost == []


async def test_no_request_is_lost_while_replicas_restart(tmp_path: Path) -> None:
    async with chain(tmp_path) as running:
        async with steady_load(running.url) as load:
            await until_answered(load)
            await restart_in_turn(running, load, 4)
            await until_answered(load)
        assert load.lost == []


async def test_in_full_duplex_answers_are_waited_for(tmp_path: Path) -> None:
    async with chain(tmp_path, "full-duplex") as running:
        async with steady_load(running.url, plain=3, streams=4, large=2) as load:
            await until_answered(load)
            await restart_in_turn(running, load, 2)
        assert load.lost == []


async def test_after_a_kill_only_what_was_in_flight_is_lost(tmp_path: Path) -> None:
    """Envoy cuts off every answer whose picker breaks the stream, whatever the failure mode; what comes after the kill
    is retried elsewhere, unless it is too large to be kept for that and Envoy does not know of the kill yet."""
    async with chain(tmp_path) as running:
        killed = running.replicas[0]
        async with steady_load(running.url) as load:
            await until_answered(load)
            await until_streaming(load)
            assert load.lost == []
            assert await running.processes.stop(killed.name, how=signal.SIGKILL) == [-signal.SIGKILL]
            load.era = 1
            await until_healthy(running, 1)
            await until_answered(load, ("plain",))
            load.era = 2
            await running.start_again(killed)
            await until_healthy(running, 2)
            await until_answered(load)
        assert [lost for lost in load.lost if lost.era == 2] == []
        assert [lost for lost in load.lost if lost.era == 1 and lost.kind != "large"] == []


async def test_the_only_replica_is_used_as_soon_as_it_is_back(tmp_path: Path) -> None:
    """Envoy still takes it for unhealthy then."""
    async with running_chain(Shape(pods=1, replicas=1, port=0), tmp_path) as running:
        [only] = running.replicas
        for _ in range(3):
            await running.processes.stop(only.name)
            await until_healthy(running, 0)
            await running.start_again(only)
            async with running.http.get(f"{running.url}/v1/models") as answer:
                assert answer.status == 200, await answer.text()


async def test_a_replica_that_is_stopped_is_left(tmp_path: Path) -> None:
    """What began before Envoy knew is asked again elsewhere; what begins two seconds later never meets it."""
    async with chain(tmp_path) as running:
        stopped = running.processes.pid(running.replicas[0].name)
        await until_healthy(running, 2)
        async with steady_rate(f"{running.url}/v1/completions", per_second=50) as load:
            await until(lambda: load.answered[0] > 50, 30)
            os.kill(stopped, signal.SIGSTOP)
            try:
                load.era = 1
                await asyncio.sleep(3)
                assert await healthy(running) == 1
                load.era = 2
                await until(lambda: load.answered[2] > 150, 30)
                await until(lambda: load.under_way[0] == load.under_way[1] == 0, 30)
            finally:
                os.kill(stopped, signal.SIGCONT)
        assert load.lost[2] == 0
        assert load.lost[0] + load.lost[1] <= 5, "few are too far on their way to be asked again"
