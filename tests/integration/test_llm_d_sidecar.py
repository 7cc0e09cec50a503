"""llm-d's own sidecar, `pd-sidecar`, between our picker behind a real Envoy and simulated pods: as it is, unchanged.

`PD_SIDECAR` names the program, or it is on the PATH; `go build ./cmd/pd-sidecar` in llm-d-router makes it.
"""

import asyncio
import json
import os
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.gateway.chain import Laptop, laptop
from tooling.laptop.engines import Simulated

PROGRAM = os.environ.get("PD_SIDECAR") or shutil.which("pd-sidecar")
pytestmark = [
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PROGRAM, reason="llm-d's pd-sidecar: neither PD_SIDECAR nor the PATH has it"),
]

ALWAYS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: always-disagg-pd-decider}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
- {type: decode-filter}
- {type: prefill-filter}
- {type: queue-scorer}
- {type: max-score-picker}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}
"""
DECODERS = {"pod-b", "pod-c"}
BY_ITSELF = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_compute"}'


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    sidecar = (str(PROGRAM), "--secure-proxy=false", "--kv-connector=nixlv2")
    engine = Simulated(flags=("--time-scale", "5"), roles=("prefill", "decode", "decode"), sidecar=sidecar)
    async with laptop(tmp_path_factory.mktemp("llm-d"), engine=engine, wiring="full-duplex") as made:
        await made.chain.reconfigure(made.config, ALWAYS)
        yield made


async def figure(chain: Laptop, url: str, name: str) -> float:
    async with chain.http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def test_the_prompt_is_computed_where_the_picker_says(chain: Laptop) -> None:
    prefiller = chain.pod("pod-a").url
    before = await figure(chain, prefiller, "vllm:prompt_tokens_total")
    answer = await chain.chat("tell me all of it " * 100, max_tokens=7)
    assert (answer.status, answer.headers["x-sim-pod"] in DECODERS) == (200, True)
    assert (await answer.json())["usage"]["completion_tokens"] == 7
    _, (decision,) = await chain.chain.seen(1)
    assert decision["prefill"] == ["default/pod-a"]
    assert await figure(chain, prefiller, "vllm:prompt_tokens_total") > before + 300
    served = chain.pod(decision["endpoint"].removeprefix("default/"))
    assert await figure(chain, served.url, BY_ITSELF) <= 16


async def test_streamed_answers_are_what_one_engine_would_say(chain: Laptop) -> None:
    body = {"model": "sim", "prompt": "the same from both " * 60, "max_tokens": 12, "stream": True}
    said = []
    for url in (chain.url, chain.pod("pod-a").url):
        async with chain.http.post(f"{url}/v1/completions", json=body) as answer:
            events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: {")]
        said.append([json.loads(event)["choices"] for event in events])
    assert said[0] == said[1]
    assert len(said[0]) >= 12


async def test_many_at_once_and_all_accounts_end(chain: Laptop) -> None:
    answers = await asyncio.gather(*(chain.chat(f"{turn} and some more words " * 60) for turn in range(24)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["x-sim-pod"] for answer in answers} == DECODERS
    await chain.idle()
    labels = {"plugin": "disagg-profile-handler", "statistic": "prefill-decode"}
    assert await chain.metric("warmpath_plugin_statistic", **labels) >= 24


async def test_a_prefiller_that_fails_is_an_error_to_the_client_and_counts_against_it(chain: Laptop) -> None:
    # llm-d's sidecar passes the prefiller's error on; ours would compute the prompt itself.
    await chain.faults(chain.pod("pod-a"), status=500)
    answer = await chain.chat("nobody computes this " * 50)
    assert answer.status == 500
    await chain.idle()
    async with chain.http.delete(f"{chain.pod('pod-a').url}/admin/faults") as cleared:
        assert cleared.status == 200
    assert (await chain.chat("and apart again " * 50)).status == 200
