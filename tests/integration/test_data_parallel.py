"""Pods with two data-parallel ranks behind one port, behind a real Envoy: each rank is picked and named by itself."""

import asyncio
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import pytest
import pytest_asyncio

from epp.configuration.loader import strategy_text
from tests.support.engines.real_engines import received
from tests.support.gateway.chain import Laptop, eventually, laptop
from tooling.laptop.chain import write_endpoints
from tooling.laptop.engines import Simulated

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

RANKS = [f"default/pod-{pod}-rank-{rank}" for pod in "ab" for rank in range(2)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    engine = Simulated(flags=("--time-scale", "5"), ranks=2)
    folder = tmp_path_factory.mktemp("chain")
    flags = ("--refresh-metrics-interval", "0.2")
    async with laptop(folder, wiring="full-duplex", pods=2, flags=flags, engine=engine) as made:
        await eventually(lambda: scraped(made), lambda names: names == RANKS)
        yield made


async def scraped(chain: Laptop) -> list[str]:
    return [each["name"] for each in await chain.endpoints() if each["load"]]


def prompt(name: str) -> str:
    """About 500 tokens of the simulator."""
    return f"{name} has something to say. " * 70


@dataclass(frozen=True)
class Turn:
    picked: str
    """By its decision."""
    served: str
    """By its answer."""
    prompt: int
    cached: int


async def asked(chain: Laptop, *contents: str, headers: Mapping[str, str] | None = None) -> list[Turn]:
    """Chats that are sent at once, and answered well."""
    answers = await asyncio.gather(*(chain.chat(each, headers=headers or {}) for each in contents))
    assert Counter(answer.status for answer in answers) == {200: len(contents)}
    ids = [answer.headers["x-request-id"] for answer in answers]

    async def decisions() -> dict[str, str]:
        _, found = await chain.chain.seen(200)
        return {each["request_id"]: each["endpoint"] for each in found}

    picked = await eventually(decisions, lambda found: set(ids) <= set(found))
    turns = []
    for answer in answers:
        usage = (await answer.json())["usage"]
        served = f"default/{answer.headers['x-sim-pod']}-rank-{answer.headers['x-sim-rank']}"
        cached = (usage["prompt_tokens_details"] or {}).get("cached_tokens", 0)
        turns.append(Turn(picked[answer.headers["x-request-id"]], served, usage["prompt_tokens"], cached))
    return turns


async def test_the_rank_that_is_picked_answers(chain: Laptop) -> None:
    found = await asked(chain, *(prompt(f"{n} Ada") for n in range(40)))
    assert all(turn.picked == turn.served for turn in found)
    assert sorted({turn.served for turn in found}) == RANKS
    computed = {name: sum(turn.prompt for turn in found if turn.served == name) for name in RANKS}

    async def loads() -> dict[str, int]:
        return {each["name"]: each["load"]["prompt_tokens"] for each in await chain.endpoints()}

    await eventually(loads, lambda seen: seen == computed)
    turns = [(await asked(chain, prompt("Bob") + "Again. " * n))[0] for n in range(4)]
    assert len({turn.served for turn in turns}) == 1
    assert all(turn.cached > 400 for turn in turns[1:])


async def test_a_clients_own_word_does_not_count(chain: Laptop) -> None:
    for rank in ("0", "1", "9", "-1", "x"):
        [turn] = await asked(chain, prompt(f"{rank} Eve"), headers={"X-data-parallel-rank": rank})
        assert turn.picked == turn.served


async def test_the_events_of_each_rank_are_its_own(chain: Laptop) -> None:
    await chain.chain.reconfigure(chain.config, strategy_text("kv-aware"))
    await received(chain, 4)
    try:
        past_us = {"model": "sim", "messages": [{"role": "user", "content": prompt("Mia")}], "max_tokens": 4}
        url, headers = f"{chain.pod('pod-b').url}/v1/chat/completions", {"x-data-parallel-rank": "1"}
        async with chain.http.post(url, json=past_us, headers=headers) as answer:
            assert answer.status == 200
        [turn] = await asked(chain, prompt("Mia") + "Again.")
        assert turn.picked == turn.served == "default/pod-b-rank-1"
        assert turn.cached > 400
    finally:
        await chain.chain.reconfigure(chain.config, strategy_text("prefix-aware"))


async def test_a_label_that_says_too_much_names_no_rank(chain: Laptop) -> None:
    """vLLM would refuse a rank that it has not."""
    pods = list(chain.chain.pods)
    reported = partial(chain.metric, "warmpath_degraded_total", reason="metrics-stale")
    before = await reported()
    try:
        write_endpoints([replace(pod, ranks=3) for pod in pods], chain.chain.endpoints_file)
        await eventually(lambda: chain.endpoints(), lambda seen: len(seen) == 6)
        await asked(chain, *(prompt(f"{n} Kim") for n in range(12)))
        await eventually(reported, lambda count: count >= before + 6)
        assert await scraped(chain) == []
    finally:
        write_endpoints(pods, chain.chain.endpoints_file)
        await eventually(lambda: scraped(chain), lambda names: names == RANKS)


async def test_when_a_pod_dies_its_requests_go_to_the_same_ranks_elsewhere(chain: Laptop) -> None:
    texts = [prompt(f"{n} Zoe") for n in range(40)]
    kept = {turn.picked: text for turn, text in zip(await asked(chain, *texts), texts, strict=True)}
    assert sorted(kept) == RANKS
    os.kill(chain.chain.processes.pid("pod-a"), signal.SIGKILL)
    turns = await asked(chain, *(text + "Again." for text in kept.values() for _ in range(5)))
    assert all(turn.picked == turn.served and turn.served in RANKS[2:] for turn in turns)
    await eventually(lambda: scraped(chain), lambda names: names == RANKS[2:])
    await chain.idle()
