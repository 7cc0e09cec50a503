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
from tests.support.engines.real_engines import following
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
            async with fleet.http.post(f"{pod.url}/v1/completions", json=body) as answer:
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

    async def ask() -> None:
        prompt = text(random, random.randrange(150, 900))
        stream = await client.completions.create(model="tiny", prompt=prompt, max_tokens=32, stream=True)
        async for _ in stream:
            pass

    async def work(requests: int) -> None:
        for _ in range(requests):
            await ask()

    async def look(clients: int) -> dict[str, float]:
        """What is learned of `LEARNING` requests, so many at once, and how right it is of the next."""
        for requests in (LEARNING, PREDICTED):
            await asyncio.gather(*(work(-(-requests // clients)) for _ in range(clients)))
        learned = await statistics(fleet)
        prefill, step = 1e3 * learned["prefill_seconds_per_token"], 1e3 * learned["step_seconds"]
        errors = learned.get("prefill_error", inf), learned.get("step_error", inf)
        print(f"{clients} at once: median error of predicted TTFT {learned['ttft_error']:.0%}")
        print(f"prefill {prefill:.3f} ms a token ± {errors[0]:.0%}, a step {step:.1f} ms ± {errors[1]:.0%}")
        assert learned["prefill_seconds_per_token"] < configured / 3
        assert learned["speed_observations"] >= 4
        assert 0 < learned["ttft_error"] < 1
        return learned

    alone = await look(1)
    crowded = await look(8)
    assert crowded["speed_observations"] > alone["speed_observations"]
