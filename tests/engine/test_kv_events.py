"""Real vLLM's KV events: what they tell beside the requests that we sent, and a process that is another."""

import signal

import pytest

from epp.configuration.loader import strategy_text
from tests.engine.conftest import BLOCK
from tests.support.engines.real_engines import asked_directly, blocks_stored, eventually, received, started
from tests.support.engines.talk import Talk, ask
from tests.support.gateway.chain import Laptop

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def strategy() -> str:
    """Events alone: nobody asks LMCache."""
    return strategy_text("kv-aware")


async def restarts(fleet: Laptop) -> float:
    return await fleet.metric("warmpath_degraded_total", reason="kv-events-restart")


async def test_traffic_past_the_picker_is_known_to_the_block(fleet: Laptop, talk: Talk) -> None:
    pod = fleet.pod("pod-b")
    messages = [{"role": "user", "content": talk.words(300)}]
    before = await blocks_stored(fleet)
    usage = await asked_directly(pod, messages)
    whole = usage.prompt_tokens // BLOCK
    await blocks_stored(fleet, before + whole)
    turn = await ask(fleet, talk.client, messages)
    assert turn.endpoint == pod.name
    assert turn.predicted == turn.cached == (turn.prompt - 1) // BLOCK * BLOCK


async def test_a_salt_keeps_what_it_should_apart(talk: Talk) -> None:
    before = await blocks_stored(talk.fleet)
    first = await talk.say(talk.words(300))
    whole = first.prompt // BLOCK
    await blocks_stored(talk.fleet, before + whole)
    again = await ask(talk.fleet, talk.client, talk.messages)
    assert again.predicted == again.cached >= first.prompt // BLOCK * BLOCK
    salted = {"cache_salt": "tenant"}
    other = await talk.client.chat.completions.create(
        model="tiny", messages=talk.messages, max_tokens=1, extra_body=salted, extra_headers={"x-request-id": "salted"}
    )
    decision = await talk.fleet.chain.get(f"{talk.fleet.chain.replicas[0].admin}/decisions/salted")
    assert decision["predicted_cached_tokens"] == 0
    assert other.usage is not None
    details = other.usage.prompt_tokens_details
    assert not (details and details.cached_tokens)


async def test_another_process_is_noticed_and_received(fleet: Laptop, talk: Talk) -> None:
    first = await talk.say(talk.words(300))
    before = await restarts(fleet)
    await fleet.chain.processes.stop(first.endpoint, how=signal.SIGKILL)  # it stays in the pool
    await received(fleet, 1)
    await started(fleet, first.endpoint)
    await received(fleet, 2)
    await eventually(lambda: restarts(fleet), lambda count: count == before + 1)
    assert await fleet.metric("warmpath_kv_events_total", outcome="malformed") == 0
