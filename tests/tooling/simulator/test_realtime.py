"""The engine in real time: tokens come at their time, requests leave cleanly."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from tooling.simulator.engine import LAPTOP, Engine, NeverFits
from tooling.simulator.metrics import Histograms
from tooling.simulator.realtime import Live, Order, RealTimeEngine

LABELS = {"engine": "0", "model_name": "m"}


def clockwork(pace: float = 0.1) -> tuple[RealTimeEngine, Engine, CollectorRegistry]:
    registry = CollectorRegistry()
    engine = Engine(replace(LAPTOP, blocks=64))
    return RealTimeEngine(engine, Histograms(registry, LABELS), pace), engine, registry


@asynccontextmanager
async def running(clock: RealTimeEngine) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        runner = group.create_task(clock.run())
        yield
        runner.cancel()


async def finish(live: Live) -> list[int]:
    """Wait for the last token; what was seen at each wake-up."""
    seen = []
    while not live.done:
        await live.wake.wait()
        live.wake.clear()
        seen.append(live.given)
    return seen


async def test_tokens_are_given_when_their_step_has_ended() -> None:
    clock, engine, _ = clockwork()
    now = asyncio.get_running_loop().time
    started = now()
    async with running(clock):
        with clock.serve([Order("a", [], 100, 5)], "") as (live,):
            seen = await finish(live)
    assert now() - started >= 0.1 * (5 * LAPTOP.base + 100 * LAPTOP.linear), "never ahead of the model"
    assert seen[-1] == 5
    assert seen == sorted(seen)
    assert clock.live == 0
    assert engine.free_blocks == 64


async def test_a_slow_engine_takes_its_factor() -> None:
    clock, _, registry = clockwork(0.01)
    clock.slow = 10
    async with running(clock):
        with clock.serve([Order("a", [], 100, 5)], "") as (live,):
            await finish(live)
    measured = registry.get_sample_value("vllm:e2e_request_latency_seconds_sum", LABELS)
    assert measured is not None
    assert measured >= 0.1 * (5 * LAPTOP.base + 100 * LAPTOP.linear)


async def test_leaving_early_takes_the_jobs_out() -> None:
    clock, engine, registry = clockwork()
    async with running(clock):
        with clock.serve([Order("a", [], 10, 500), Order("b", [], 10, 500)], "") as (first, second):
            assert first.wake is second.wake, "one request, one alarm"
            await first.wake.wait()
            assert len(engine.running) == 2
        assert not engine.running
    assert clock.live == 0
    assert registry.get_sample_value("vllm:request_success_total", {**LABELS, "finished_reason": "abort"}) == 2


async def test_an_order_that_never_fits_leaves_nothing_behind() -> None:
    clock, engine, _ = clockwork()
    with pytest.raises(NeverFits), clock.serve([Order("a", [], 10, 5), Order("b", [], 2000, 5)], ""):
        pass
    assert not engine.waiting
    assert clock.live == 0
