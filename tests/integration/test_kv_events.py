"""The strategy kv-aware on a whole chain: what pods say reaches the picks, and what pods forget is not believed."""

import asyncio
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from epp.configuration.loader import strategy_text
from tests.support.gateway.chain import PATIENT, Laptop, eventually, laptop
from tooling.laptop.engines import LaptopPod

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    async with laptop(tmp_path_factory.mktemp("chain"), wiring="full-duplex", flags=PATIENT) as made:
        await made.chain.reconfigure(made.config, strategy_text("kv-aware"))
        await eventually(lambda: live(made), lambda count: count == 3)
        yield made


async def live(chain: Laptop) -> float:
    return await chain.metric("warmpath_endpoint_kv_events", pool="sim", state="live")


async def count(chain: Laptop, outcome: str) -> float:
    return await chain.metric("warmpath_kv_events_total", outcome=outcome)


async def degraded(chain: Laptop, reason: str) -> float:
    return await chain.metric("warmpath_degraded_total", reason=reason)


def prompt(name: str) -> str:
    """About 500 tokens of the simulator."""
    return f"{name} has something to say. " * 70


async def predicted(chain: Laptop, content: str) -> tuple[str, int, int]:
    """Ask through the gateway: who answered, what was predicted to be cached there, and what was."""
    answer = await chain.chat(content)
    assert answer.status == 200
    body = await answer.json()
    details: dict[str, Any] = body["usage"]["prompt_tokens_details"] or {}
    request = answer.headers["x-request-id"]

    async def record() -> Any:
        _, decisions = await chain.chain.seen(50)
        return next((each for each in decisions if each["request_id"] == request), None)

    found = await eventually(record, lambda seen: seen is not None)
    return answer.headers["x-sim-pod"], found["predicted_cached_tokens"], details.get("cached_tokens", 0)


async def past_us(chain: Laptop, pod: LaptopPod, content: str) -> None:
    """Ask a pod directly, and wait until its events have come."""
    before = await count(chain, "stored")
    body = {"model": "sim", "messages": [{"role": "user", "content": content}], "max_tokens": 4}
    async with chain.http.post(f"{pod.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
    await eventually(lambda: count(chain, "stored"), lambda now: now > before)


async def test_what_was_cached_is_predicted_to_the_block(chain: Laptop) -> None:
    first, guess, truth = await predicted(chain, prompt("Ada"))
    assert (guess, truth) == (0, 0)
    again, guess, truth = await predicted(chain, prompt("Ada") + "Again.")
    assert again == first
    assert guess == truth > 400
    for reason in ("no-tokenizer", "late", "unsupported", "failed", "events-stale", "events-silent"):
        assert await degraded(chain, f"approximate-{reason}") == 0


async def test_traffic_past_the_picker_is_known(chain: Laptop) -> None:
    pod = chain.pod("pod-b")
    await past_us(chain, pod, prompt("Bob"))
    name, guess, truth = await predicted(chain, prompt("Bob") + "Again.")
    assert name == pod.name
    assert guess == truth > 400


async def test_a_cache_that_was_emptied_is_not_believed(chain: Laptop) -> None:
    name, _, _ = await predicted(chain, prompt("Cy"))
    pod = chain.pod(name)
    async with chain.http.post(f"{pod.url}/reset_prefix_cache") as answer:
        assert answer.status == 200
    before = await count(chain, "cleared")
    await past_us(chain, pod, prompt("Dee"))  # as in vLLM, an idle engine tells it with its next step
    assert await count(chain, "cleared") == before + 1
    # What was answered counts as held until its events should have come, whatever else they say.
    await eventually(lambda: in_flight(chain), lambda blocks: blocks == 0)
    _, guess, truth = await predicted(chain, prompt("Cy") + "Again.")
    assert guess == truth < 100


async def in_flight(chain: Laptop) -> float:
    return await chain.metric("warmpath_plugin_statistic", statistic="in_flight_blocks")


async def test_what_was_missed_is_asked_for(chain: Laptop) -> None:
    pod, gaps = chain.pod("pod-c"), await degraded(chain, "kv-events-gap")
    await past_us(chain, pod, prompt("Dot"))  # a gap is between two messages
    await chain.faults(pod, mute=True)
    body = {"model": "sim", "messages": [{"role": "user", "content": prompt("Eve")}], "max_tokens": 4}
    async with chain.http.post(f"{pod.url}/v1/chat/completions", json=body) as answer:
        assert answer.status == 200
    await chain.faults(pod)
    await past_us(chain, pod, prompt("Flo"))
    await eventually(lambda: degraded(chain, "kv-events-gap"), lambda now: now == gaps + 1)
    name, guess, truth = await predicted(chain, prompt("Eve") + "Again.")
    assert name == pod.name
    assert guess == truth > 400


async def test_a_pod_that_was_restarted_is_not_believed_to_remember(chain: Laptop) -> None:
    pod = chain.pod("pod-a")
    await past_us(chain, pod, prompt("Gus"))
    name, guess, _ = await predicted(chain, prompt("Gus") + "Again.")
    assert (name, guess > 400) == (pod.name, True)
    await eventually(lambda: in_flight(chain), lambda blocks: blocks == 0)
    await chain.chain.processes.stop(pod.name, how=signal.SIGKILL)
    await eventually(lambda: live(chain), lambda count: count == 2)
    program = chain.chain.layout.programs[pod.name]
    await chain.chain.start(program)
    await chain.chain.ready(program.ready, program.name)
    await eventually(lambda: live(chain), lambda count: count == 3)
    assert await degraded(chain, "kv-events-restart") == 1
    _, guess, truth = await predicted(chain, prompt("Gus") + "Once more.")
    assert guess == truth < 100


async def test_a_reload_that_does_not_concern_it_forgets_nothing(chain: Laptop) -> None:
    name, _, _ = await predicted(chain, prompt("Hal"))
    await eventually(lambda: in_flight(chain), lambda blocks: blocks == 0)
    text = strategy_text("kv-aware").replace("- type: expected-ttft", "- type: expected-ttft\n  parameters: {g: 2.5}")
    await chain.chain.reconfigure(chain.config, text)
    again, guess, truth = await predicted(chain, prompt("Hal") + "Again.")
    assert (again, guess > 400) == (name, True)
    assert guess == truth
    await chain.chain.reconfigure(chain.config, strategy_text("prefix-aware"))
    await eventually(lambda: live(chain), lambda count: count == 0)
    await chain.chain.reconfigure(chain.config, strategy_text("kv-aware"))
    await eventually(lambda: live(chain), lambda count: count == 3)
    _, guess, truth = await predicted(chain, prompt("Hal") + "Once more.")
    assert guess == truth > 400


@pytest.mark.parametrize("flags", [("--tokenizer-timeout=1us",), ("--tokenizer-timeout=30s", "--decision-deadline=1s")])
async def test_tokens_that_take_longer_than_is_said_are_not_waited_for(tmp_path: Path, flags: tuple[str, ...]) -> None:
    async with laptop(tmp_path, flags=flags) as made:
        await made.chain.reconfigure(made.config, strategy_text("kv-aware"))
        await eventually(lambda: live(made), lambda count: count == 3)  # before, nobody reads a prompt's tokens
        for pod in made.chain.pods:
            await made.faults(pod, hang=True)
        asking = asyncio.ensure_future(made.chat(prompt("Flo")))
        await eventually(lambda: degraded(made, "approximate-late"), lambda count: count == 1)
        _, decisions = await eventually(lambda: made.chain.seen(1), lambda seen: len(seen[1]) == 1)
        assert decisions[0]["predicted_cached_tokens"] == 0
        asking.cancel()
