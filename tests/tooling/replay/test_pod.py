"""A pod in virtual time does what the simulator does in real time, leaps or not."""

import asyncio
import selectors
from dataclasses import replace
from math import inf

import pytest
from prometheus_client import CollectorRegistry

from tests.support.scheduling.replaying import asks, play, steady
from tooling.replay.pod import VirtualPod
from tooling.replay.trace import Piece, Trace, TraceRequest
from tooling.simulator.engine import LAPTOP, Engine
from tooling.simulator.metrics import Histograms
from tooling.simulator.presets import preset
from tooling.simulator.realtime import Order, RealTimeEngine

KIND = preset("laptop")


def one(id: int, tokens: int, output: int) -> TraceRequest:
    return TraceRequest(0.0, (Piece(id, tokens),), output)


class Skipping(selectors.DefaultSelector):
    """Instead of waiting for a time it lets that time come."""

    skipped = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout:
            self.skipped += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._skips = Skipping()
        super().__init__(self._skips)

    def time(self) -> float:
        return self._skips.skipped


async def served_in_real_time(trace: Trace) -> list[tuple[float | None, float | None, int]]:
    """First token, end and cached tokens of each request on the simulator's own clockwork."""
    engine = Engine(LAPTOP)
    clock = RealTimeEngine(engine, Histograms(CollectorRegistry(), {"engine": "0", "model_name": "m"}), 1.0)
    loop = asyncio.get_running_loop()

    async def ask(number: int) -> tuple[float | None, float | None, int]:
        wanted = trace.asks[number]
        await asyncio.sleep(wanted.at - loop.time())
        with clock.serve([Order(str(number), wanted.chain(16), wanted.tokens, wanted.output)], "") as (live,):
            while not live.done:
                await live.wake.wait()
                live.wake.clear()
        return live.job.first_token_at, live.job.ended_at, live.job.cached

    async with asyncio.TaskGroup() as group:
        runner = group.create_task(clock.run())
        asking = [group.create_task(ask(number)) for number in range(len(trace.asks))]
        results = await asyncio.gather(*asking)
        runner.cancel()
    return results


@pytest.mark.parametrize(
    "trace",
    [
        asks(0.0, 0.5, 0.9),
        asks(*[0.1 * n for n in range(40)], tokens=900, output=60, shared=500),
        steady(60, 0.15, documents=6),
        steady(60, 0.05, documents=8),
    ],
)
def test_virtual_time_equals_real_time(trace: Trace) -> None:
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        real = runner.run(served_in_real_time(trace))
    virtual = play(trace, pods="laptop", name="round-robin")
    for (first, ended, cached), served in zip(real, virtual.served, strict=True):
        assert served.first == pytest.approx(first, abs=1e-6)
        assert served.ended == pytest.approx(ended, abs=1e-6)
        assert served.cached == cached


def test_an_idle_pod_has_nothing_due() -> None:
    pod = VirtualPod("p", KIND)
    pod.begin(1.0)
    assert pod.due == inf
    assert pod.end() is None


def test_a_request_that_comes_during_a_leap_is_looked_at_when_the_step_in_progress_ends() -> None:
    pod = VirtualPod("p", KIND)
    pod.add(1, one(1, 100, 50), 0.0)
    pod.begin(0.0)
    pod.end()
    pod.begin(pod.due)
    start, far = pod.due, pod.due
    assert far > 40 * LAPTOP.base, "a leap over most of the answer"
    pod.add(2, one(2, 100, 5), 0.2)
    assert 0.2 < pod.due < 0.2 + 2 * LAPTOP.base
    assert start != pod.due
    assert pod.end() is None
    pod.begin(pod.due)
    step = pod.end()
    assert step is not None
    assert step.prefill == 100


def test_the_load_is_what_it_is_now_not_at_the_end_of_the_leap() -> None:
    pod = VirtualPod("p", KIND)
    pod.add(1, one(1, 160, 300), 0.0)
    pod.begin(0.0)
    pod.end()
    pod.begin(pod.due)
    early, late = pod.load(0.1), pod.load(2.0)
    assert (early.running, early.waiting, early.blocks, early.at) == (1, 0, LAPTOP.blocks, 0.1)
    assert 0 < early.kv_usage < late.kv_usage
    assert late.prompt_tokens == 160


def test_adapters_are_reported_once_one_was_asked_for() -> None:
    pod = VirtualPod("p", KIND)
    assert pod.load(0.0).lora_max == 0
    for number, adapter in enumerate("abcdee"):
        pod.add(number, replace(one(number + 1, 100, 50), adapter=adapter), 0.0)
    pod.begin(0.0)
    load = pod.load(0.0)
    assert load.lora_max == LAPTOP.adapter_slots == 4
    assert (load.lora_running, load.lora_waiting) == (frozenset("abcd"), frozenset("e"))


def test_a_pod_that_dies_has_lost_everything_and_works_again_when_it_is_back() -> None:
    pod = VirtualPod("p", KIND)
    pod.add(1, one(1, 160, 300), 0.0)
    pod.begin(0.0)
    pod.die(0.01)
    assert (pod.alive, pod.due) == (False, inf)
    assert pod.busy == pytest.approx(0.01)
    pod.revive()
    assert pod.load(1.0).prompt_tokens == 0
    job = pod.add(2, one(1, 160, 2), 1.0)
    pod.begin(1.0)
    pod.end()
    assert job.cached == 0
