"""Real vLLM on CPUs, of which the configuration says what is ten times wrong: what the picker learns of it."""

import asyncio
from itertools import chain
from math import inf
from random import Random
from statistics import median
from time import monotonic

import aiohttp
import openai
import pytest

from hack.benches.predictions import configuration
from tests.support.engines.real_engines import TIMEOUT, following
from tests.support.gateway.chain import Laptop
from tooling.laptop.engines import LaptopPod

pytestmark = pytest.mark.asyncio(loop_scope="session")

LEARNING, PREDICTED = 200, 100
"""Requests from which is learned, and those after them, as many as are predicted."""


def text(random: Random, words: int) -> str:
    return " ".join(random.choices(["bade", "fiko", "lumo", "nari", "posu", "tevi"], k=words))


async def measured(fleet: Laptop, random: Random) -> float:
    """Seconds of a token's prefill on this machine, while all pods compute: the median of a few prompts."""

    async def compute(pod: LaptopPod) -> list[float]:
        found = []
        for _ in range(4):
            body = {"model": "tiny", "prompt": text(random, 900), "max_tokens": 1}
            at = monotonic()
            async with fleet.http.post(f"{pod.url}/v1/completions", json=body, timeout=TIMEOUT) as answer:
                usage = (await answer.json())["usage"]
            found.append((monotonic() - at) / usage["prompt_tokens"])
        return found

    return median(chain.from_iterable(await asyncio.gather(*map(compute, fleet.chain.pods))))


async def statistics(fleet: Laptop) -> dict[str, float]:
    """What `expected-ttft` says of itself."""
    async with aiohttp.ClientSession() as http, http.get(f"{fleet.chain.replicas[0].admin}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    found = {}
    for line in lines:
        if line.startswith('warmpath_plugin_statistic{plugin="expected-ttft",pool="sim",'):
            labels, _, value = line.rpartition(" ")
            found[labels.partition('statistic="')[2].partition('"')[0]] = float(value)
    return found


async def test_the_constants_of_real_engines_are_learned(fleet: Laptop, client: openai.AsyncOpenAI) -> None:
    random = Random(1)
    configured = 10 * await measured(fleet, random)
    print(f"prefill measured {100 * configured:.3f} ms a token, configured ten times that")
    await following(fleet, configuration(configured))

    async def ask() -> tuple[float, int]:
        """Its TTFT in seconds, and the tokens of its prompt."""
        prompt = text(random, random.randrange(150, 900))
        began = monotonic()
        stream = await client.completions.create(
            model="tiny", prompt=prompt, max_tokens=32, stream=True, stream_options={"include_usage": True}
        )
        await anext(stream)
        ttft = monotonic() - began
        *_, last = [part async for part in stream]
        assert last.usage is not None
        return ttft, last.usage.prompt_tokens

    async def work(requests: int) -> list[tuple[float, int]]:
        return [await ask() for _ in range(requests)]

    async def look(clients: int) -> dict[str, float]:
        """What is learned of `LEARNING` requests, so many at once, and how right it is of the next.

        A machine that others use may be several times as fast a minute later, so what is learned is compared with what
        the same requests took, and not with what was measured before.
        """
        began, ttfts, tokens = monotonic(), [], 0
        for requests in (LEARNING, PREDICTED):
            each = list(
                chain.from_iterable(await asyncio.gather(*(work(-(-requests // clients)) for _ in range(clients))))
            )
            ttfts.append(median(ttft for ttft, _ in each))
            tokens += sum(prompt for _, prompt in each)
        most = min(clients, len(fleet.chain.pods)) * (monotonic() - began) / tokens
        learned = await statistics(fleet)
        prefill, step = learned["prefill_seconds_per_token"], 1e3 * learned["step_seconds"]
        errors = learned.get("prefill_error", inf), learned.get("step_error", inf)
        print(f"{clients} at once: median error of predicted TTFT {learned['ttft_error']:.0%}")
        print(f"prefill {1e3 * prefill:.3f} ms a token ± {errors[0]:.0%}, a step {step:.1f} ms ± {errors[1]:.0%}")
        print(
            f"all the pods' time is {1e3 * most:.3f} ms a token; median TTFTs {ttfts[0]:.3f} s, then {ttfts[1]:.3f} s"
        )
        assert prefill < most
        assert learned["speed_observations"] >= 4
        assert 0 < learned["ttft_error"] < max(1.0, ttfts[0] / ttfts[1])
        return learned

    alone = await look(1)
    crowded = await look(8)
    assert crowded["speed_observations"] > alone["speed_observations"]
