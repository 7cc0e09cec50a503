"""A conversation's KV memory through device, L1 and L2, as kv-aware knows it, and as the engines then use it."""

import asyncio

import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.engine.conftest import BLOCK, DEVICE_BLOCKS
from tests.support.chain import Laptop
from tests.support.fleet import fill, kv_aware, saturated, settled
from tests.support.talk import Talk, Turn

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def strategy(running: Laptop) -> str:
    return kv_aware(running)


def exact(turn: Turn) -> bool:
    return turn.predicted == turn.cached


async def loaded(fleet: Laptop, pod: str) -> tuple[float, float]:
    """Tokens that the LMCache server of a pod's node has found so far: in its L1, in L2."""
    async with fleet.http.get(f"http://{fleet.service(f'lmcache-{pod}')}/metrics") as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = {sample.name: sample.value for family in families for sample in family.samples}
    l1, l2 = (samples.get(f"lmcache_mp_lookup_hit_{tier}_tokens_total", 0.0) for tier in ("l1", "l2"))
    return l1, l2


async def test_what_is_predicted_is_what_is_cached(fleet: Laptop, client: openai.AsyncOpenAI) -> None:
    talks = [Talk(fleet, client) for _ in range(6)]
    told: list[Turn] = []
    for _ in range(5):
        told += await asyncio.gather(*(talk.say(talk.words(60)) for talk in talks))
    assert len({turn.endpoint for turn in told}) == 2
    for first in range(len(talks)):
        assert len({turn.endpoint for turn in told[first :: len(talks)]}) == 1
    # On a machine that has other things to do the tokens may come too late: then they are a guess.
    known = [turn for turn in told if turn.estimated == turn.prompt]
    assert len(known) > 0.8 * len(told)
    right = [turn for turn in known if exact(turn)]
    assert len(right) >= 0.99 * len(known), [(turn.predicted, turn.cached) for turn in known if not exact(turn)]
    assert sum(turn.cached for turn in told) > 0.5 * sum(turn.prompt for turn in told)


async def test_after_device_eviction_it_is_known_to_be_in_l1(
    fleet: Laptop, client: openai.AsyncOpenAI, talk: Talk
) -> None:
    first = await talk.say(talk.words(600))
    assert first.prompt < DEVICE_BLOCKS * BLOCK / 3
    await fill(fleet, client, first.endpoint)
    await settled(fleet)
    before = await loaded(fleet, first.endpoint)
    again = await talk.say(talk.words(20))
    assert again.endpoint == first.endpoint
    l1, l2 = await loaded(fleet, first.endpoint)
    assert l1 - before[0] >= first.prompt // BLOCK * BLOCK
    assert l2 == before[1]
    assert again.cached >= first.prompt // BLOCK * BLOCK
    assert exact(again)


async def test_a_saturated_owner_is_left_and_the_other_loads_from_l2(
    fleet: Laptop, client: openai.AsyncOpenAI, talk: Talk
) -> None:
    first = await talk.say(talk.words(600))
    await settled(fleet)
    other = next(pod.name for pod in fleet.chain.pods if pod.name != first.endpoint)
    before = await loaded(fleet, other)
    async with saturated(fleet, first.endpoint):
        again = await talk.say(talk.words(20))
    assert again.endpoint == other
    assert (await loaded(fleet, other))[1] - before[1] >= first.prompt // BLOCK * BLOCK
    assert again.cached >= first.prompt // BLOCK * BLOCK
    assert exact(again)
