"""A chain whose first pod prefills and whose others decode, and what holds of it whichever sidecars it has."""

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.support.gateway.chain import Laptop, laptop
from tooling.laptop.engines import SIDECAR, Simulated

ALWAYS = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
- type: role-profile-handler
  parameters: {decider: always-disagg-pd-decider}
"""
"""Each prompt is computed by the one and decoded by one of the others."""
DECODERS = {"pod-b", "pod-c"}


@asynccontextmanager
async def apart(folder: Path, config: str = ALWAYS, sidecar: Sequence[str] = SIDECAR) -> AsyncIterator[Laptop]:
    engine = Simulated(flags=("--time-scale", "5"), roles=("prefill", "decode", "decode"), sidecar=sidecar)
    async with laptop(folder, engine=engine, wiring="full-duplex") as made:
        await made.chain.reconfigure(made.config, config)
        yield made


async def check_that_one_prefills_and_another_decodes(chain: Laptop) -> None:
    prefiller = chain.pod("pod-a").url
    before = await chain.metric("vllm:prompt_tokens_total", at=prefiller)
    answer = await chain.chat("tell me all of it " * 100, max_tokens=7)
    assert (answer.status, answer.headers["x-sim-pod"] in DECODERS) == (200, True)
    assert (await answer.json())["usage"]["completion_tokens"] == 7
    _, (decision,) = await chain.chain.seen(1)
    assert decision["prefill"] == ["default/pod-a"]
    assert decision["endpoint"].removeprefix("default/") in DECODERS
    assert await chain.metric("vllm:prompt_tokens_total", at=prefiller) > before + 300
    served = chain.pod(decision["endpoint"].removeprefix("default/")).url
    by_itself = {"engine": "0", "model_name": "sim", "source": "local_compute"}
    assert await chain.metric("vllm:prompt_tokens_by_source_total", at=served, **by_itself) <= 16


async def check_that_answers_are_what_one_engine_would_say(chain: Laptop) -> None:
    body = {"model": "sim", "prompt": "the same from both " * 60, "max_tokens": 12, "stream": True}
    said = []
    for url in (chain.url, chain.pod("pod-a").url):
        async with chain.http.post(f"{url}/v1/completions", json=body) as answer:
            events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: {")]
        said.append([json.loads(event)["choices"] for event in events])
    assert said[0] == said[1]
    assert len(said[0]) >= 12
