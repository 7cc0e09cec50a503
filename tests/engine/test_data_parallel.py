"""Real vLLM with two data-parallel ranks behind one port, behind a real Envoy: the rank that is picked computes."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from epp.configuration.loader import strategy_text
from tests.engine.conftest import BLOCK, DEVICE_BLOCKS
from tests.support.engines.real_engines import PICKING, TIMEOUT, blocks_stored, eventually, received
from tests.support.gateway.chain import Laptop, laptop
from tooling.laptop.engines import Vllm

pytestmark = pytest.mark.asyncio(loop_scope="module")

RANKS = ["default/pod-a-rank-0", "default/pod-a-rank-1"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    engine = Vllm(python, size="tiny", block=BLOCK, blocks=DEVICE_BLOCKS, context=4096, ranks=2)
    folder = tmp_path_factory.mktemp("ranks")
    async with laptop(folder, wiring="full-duplex", pods=1, flags=PICKING, engine=engine) as made:
        await made.chain.reconfigure(made.config, strategy_text("kv-aware"))
        await received(made, 2)
        yield made


async def computed(chain: Laptop) -> dict[str, int]:
    """Prompt tokens of each rank, as its own metrics count them."""
    return {each["name"]: each["load"]["prompt_tokens"] for each in await chain.endpoints() if each["load"]}


async def counted(chain: Laptop, more: int) -> dict[str, int]:
    """The same when there are so many of them, of all ranks."""
    found: dict[str, int] = await eventually(
        lambda: computed(chain), lambda seen: len(seen) == 2 and sum(seen.values()) == more
    )
    return found


def prompt(name: str) -> str:
    return f"{name} has something to say. " * 60


async def complete(chain: Laptop, text: str, url: str = "", **headers: str) -> tuple[int, int]:
    """(tokens of the prompt, how many of them were cached)"""
    body = {"model": "tiny", "prompt": text, "max_tokens": 2, "temperature": 0}
    asked = f"{url or chain.url}/v1/completions"
    async with chain.http.post(asked, json=body, headers=headers, timeout=TIMEOUT) as answer:
        assert answer.status == 200, await answer.text()
        usage = (await answer.json())["usage"]
    return usage["prompt_tokens"], (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)


async def test_the_picked_rank_computes_and_its_cache_is_known(chain: Laptop) -> None:
    assert sorted(await counted(chain, 0)) == RANKS
    found = await asyncio.gather(*(complete(chain, prompt(f"{n} Ada")) for n in range(10, 22)))
    [size] = {tokens for tokens, _ in found}
    _, decisions = await chain.chain.seen(50)
    picks = Counter(each["endpoint"] for each in decisions)
    assert sorted(picks) == RANKS
    of = {name: picks[name] * size for name in RANKS}
    assert await counted(chain, 12 * size) == of

    # Each rank announces what it holds, also what it was asked past the picker.
    url = chain.pod("pod-a").url
    for rank, name in enumerate(RANKS):
        before = await blocks_stored(chain)
        size, _ = await complete(chain, prompt(f"{rank} Bob"), url, **{"x-data-parallel-rank": str(rank)})
        of[name] += size
        assert await counted(chain, sum(of.values())) == of
        await blocks_stored(chain, before + size // BLOCK)
        again, cached = await complete(chain, prompt(f"{rank} Bob") + "Again.")
        of[name] += again
        assert await counted(chain, sum(of.values())) == of
        assert cached >= (size - 1) // BLOCK * BLOCK


async def test_a_rank_that_it_has_not_is_refused_by_vllm(chain: Laptop) -> None:
    """Why none is named before a page has shown that there is one."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 1}
    headers = {"x-data-parallel-rank": "2"}
    async with aiohttp.ClientSession(timeout=TIMEOUT) as http:
        async with http.post(f"{chain.pod('pod-a').url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 400
        async with http.post(f"{chain.url}/v1/completions", json=body, headers=headers) as answer:
            assert answer.status == 200
