"""Real vLLM on CPUs, of which the configuration says what is ten times wrong: what the picker learns of it."""

import asyncio
from math import inf
from random import Random

import aiohttp
import openai
import pytest

from tests.support.gateway.chain import Laptop

pytestmark = pytest.mark.asyncio(loop_scope="session")

CONFIGURED = 7e-4
"""Seconds of a token's prefill: ten times what two busy cores take for the tiny model, as are the others."""
WRONG = f"""
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
  parameters:
    prefillSecondsPerToken: {CONFIGURED}
    attentionSecondsPerTokenPair: 5.0e-8
    stepSeconds: 0.03
    stepSecondsPerDecode: 0.003
    stepSecondsPerContextToken: 3.0e-6
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: expected-ttft}}, {{pluginRef: max-score-picker}}]
"""
LEARNING, PREDICTED, AT_ONCE = 200, 100, 8
"""Requests from which is learned; those after them, as many as `ttft_error` is the median of; clients."""


@pytest.fixture
def strategy() -> str:
    return WRONG


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

    async def ask() -> None:
        text = " ".join(random.choices(["bade", "fiko", "lumo", "nari", "posu", "tevi"], k=random.randrange(150, 900)))
        stream = await client.completions.create(model="tiny", prompt=text, max_tokens=32, stream=True)
        async for _ in stream:
            pass

    async def work(requests: int) -> None:
        for _ in range(-(-requests // AT_ONCE)):
            await ask()

    for requests in (LEARNING, PREDICTED):
        await asyncio.gather(*(work(requests) for _ in range(AT_ONCE)))
        learned = await statistics(fleet)
        prefill, step = 1e3 * learned["prefill_seconds_per_token"], 1e3 * learned["step_seconds"]
        errors = learned.get("prefill_error", inf), learned.get("step_error", inf)
        print(f"median error of predicted TTFT in {requests} requests: {learned['ttft_error']:.0%}")
        print(f"prefill {prefill:.3f} ms a token ± {errors[0]:.0%}, a step {step:.1f} ms ± {errors[1]:.0%}")
    assert learned["prefill_seconds_per_token"] < CONFIGURED / 3
    assert learned["speed_observations"] >= 4
    assert 0 < learned["ttft_error"] < 1
