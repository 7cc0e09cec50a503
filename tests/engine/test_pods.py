"""Real vLLM behind a real Envoy and our picker: what clients, the scraper and the page see."""

from itertools import pairwise
from typing import Any

import aiohttp
import openai
import pytest

from epp.pool.engines import ENGINES, Places, parse
from epp.pool.store import Load
from tests.engine.conftest import BLOCK, DEVICE_BLOCKS
from tests.support.engines.real_engines import eventually
from tests.support.engines.talk import Talk
from tests.support.gateway.chain import Laptop

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO: Any = [{"role": "user", "content": "Say hello"}]


async def test_the_official_client_streams_a_chat(fleet: Laptop, client: openai.AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="tiny",
        messages=HELLO,
        max_tokens=12,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = [chunk async for chunk in stream]
    reported = chunks[-1].usage
    assert reported is not None
    assert reported.completion_tokens == 12
    whole = await client.chat.completions.create(
        model="tiny", messages=HELLO, max_tokens=12, temperature=0, extra_body={"ignore_eos": True}
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content != ""


async def test_an_unknown_model_is_refused_by_the_pod(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="nothing-like-it"):
        await client.chat.completions.create(model="nothing-like-it", messages=HELLO)


async def test_a_conversation_returns_to_its_pod(talk: Talk) -> None:
    turns = [await talk.say(talk.words(300)) for _ in range(4)]
    bills = await talk.fleet.chain.get(f"{talk.fleet.chain.replicas[0].admin}/decisions?limit=4")
    assert len({turn.endpoint for turn in turns}) == 1, bills
    assert turns[0].cached < BLOCK * 2
    for before, turn in pairwise(turns):
        assert turn.cached >= before.prompt // BLOCK * BLOCK
        # The picker counts bytes, in blocks of 256: it knows shares, and tokens once it has learned the ratio.
        assert abs(turn.predicted / turn.estimated - turn.cached / turn.prompt) < 0.15


async def test_the_scraper_reads_the_real_page(fleet: Laptop, talk: Talk) -> None:
    turn = await talk.say(talk.words(200))
    pod = fleet.pod(turn.endpoint)

    async def read() -> Load | None:
        async with aiohttp.ClientSession() as http, http.get(f"{pod.url}/metrics") as answer:
            return parse(await answer.read(), ENGINES["vllm"], 1.0, Places())

    # vLLM answers first and counts then.
    load = await eventually(read, lambda seen: seen and seen.prompt_tokens >= turn.prompt and not seen.running)
    assert load is not None
    assert (load.block_size, load.blocks) == (BLOCK, DEVICE_BLOCKS)
    assert load.prompt_tokens >= turn.prompt
    assert load.prefix_queries >= turn.prompt
    assert (load.running, load.waiting) == (0, 0)
    # What speeds are learned from: each request begins with a token, and each step gives one at most.
    assert 0 < load.first_tokens <= load.steps <= load.generated_tokens
    assert 0 < load.computed_tokens <= load.prompt_tokens

    async def shown() -> list[Any]:
        return [endpoint["load"] for endpoint in await fleet.endpoints()]

    await eventually(shown, lambda loads: all(load and load["blocks"] == DEVICE_BLOCKS for load in loads))


async def test_the_pods_tokenize_with_the_chat_template(fleet: Laptop, talk: Talk) -> None:
    async with aiohttp.ClientSession() as http:
        body = {"model": "tiny", "messages": HELLO}
        async with http.post(f"{fleet.pod('pod-a').url}/tokenize", json=body) as answer:
            reported = await answer.json()
        assert reported["count"] == len(reported["tokens"])
        async with http.post(f"{fleet.pod('pod-a').url}/detokenize", json={"tokens": reported["tokens"]}) as answer:
            assert (await answer.json())["prompt"] == "<|user|>Say hello<|end|>\n<|assistant|>"
