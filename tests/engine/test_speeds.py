"""Real vLLM on CPUs, whose speed the configuration does not know: what the picker learns of it."""

import asyncio
from random import Random

import aiohttp
import openai
import pytest

from tests.support.gateway.chain import Laptop

pytestmark = pytest.mark.asyncio(loop_scope="session")

WRONG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
  parameters: {prefillSecondsPerToken: 5.0e-4, attentionSecondsPerTokenPair: 1.65e-8, stepSeconds: 6.5e-2}
- type: max-score-picker
schedulingProfiles:
- name: default
  plugins: [{pluginRef: expected-ttft}, {pluginRef: max-score-picker}]
"""
REQUESTS, AT_ONCE = 200, 8


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


async def test_the_speed_of_real_engines_is_learned(fleet: Laptop, client: openai.AsyncOpenAI) -> None:
    random = Random(1)

    async def ask() -> None:
        text = " ".join(random.choices(["bade", "fiko", "lumo", "nari", "posu", "tevi"], k=random.randrange(50, 400)))
        stream = await client.completions.create(model="tiny", prompt=text, max_tokens=32, stream=True)
        async for _ in stream:
            pass

    async def work() -> None:
        for _ in range(REQUESTS // AT_ONCE):
            await ask()

    await asyncio.gather(*(work() for _ in range(AT_ONCE)))
    learned = await statistics(fleet)
    print(f"speed of the pool: {learned['pool_speed']:.2f} of what was configured; ", end="")
    print(f"median error of predicted TTFT after {REQUESTS} requests: {learned['ttft_error']:.0%}")
    assert learned["speed_observations"] >= 4
    assert learned["pool_speed"] != 1
    assert 0 < learned["ttft_error"] < 3
