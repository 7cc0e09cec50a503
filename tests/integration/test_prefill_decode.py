"""Prefill and decode apart through a real Envoy: headers, sidecars, accounts, and what happens without a prefiller."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateway.chain import Laptop, eventually, laptop
from tooling.laptop.chain import write_endpoints
from tooling.laptop.engines import Simulated

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

ALWAYS = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
- type: role-profile-handler
  parameters: {decider: always-disagg-pd-decider}
"""
DECODERS = {"pod-b", "pod-c"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    engine = Simulated(flags=("--time-scale", "5"), roles=("prefill", "decode", "decode"))
    async with laptop(tmp_path_factory.mktemp("roles"), engine=engine, wiring="full-duplex") as made:
        await made.chain.reconfigure(made.config, ALWAYS)
        yield made


async def engine_figure(chain: Laptop, url: str, name: str) -> float:
    async with chain.http.get(f"{url}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name))


async def newest(chain: Laptop) -> dict[str, Any]:
    _, decisions = await chain.chain.seen(1)
    found: dict[str, Any] = decisions[0]
    return found


async def test_one_pod_prefills_and_another_decodes(chain: Laptop) -> None:
    prefiller = chain.pod("pod-a")
    before = await engine_figure(chain, prefiller.url, "vllm:prompt_tokens_total")
    answer = await chain.chat("tell me all of it " * 100, max_tokens=7)
    assert answer.status == 200
    assert answer.headers["x-sim-pod"] in DECODERS
    assert (await answer.json())["usage"]["completion_tokens"] == 7
    decision = await newest(chain)
    assert decision["prefill"] == ["default/pod-a"]
    assert decision["endpoint"] in ("default/pod-b", "default/pod-c")
    assert await engine_figure(chain, prefiller.url, "vllm:prompt_tokens_total") > before + 300
    served = chain.pod(decision["endpoint"].removeprefix("default/"))
    by_itself = 'vllm:prompt_tokens_by_source_total{engine="0",model_name="sim",source="local_compute"}'
    assert await engine_figure(chain, served.url, by_itself) <= 16


async def test_answers_are_what_one_engine_would_say(chain: Laptop) -> None:
    body = {"model": "sim", "prompt": "the same from both " * 60, "max_tokens": 12, "stream": True}
    said = []
    for url in (chain.url, chain.pod("pod-a").url):
        async with chain.http.post(f"{url}/v1/completions", json=body) as answer:
            events = [line[6:] for line in (await answer.text()).splitlines() if line.startswith("data: {")]
        said.append([json.loads(event)["choices"] for event in events])
    assert said[0] == said[1]
    assert len(said[0]) >= 12


async def test_no_prefiller_ever_decodes_and_all_accounts_end(chain: Laptop) -> None:
    for turn in range(12):
        answer = await chain.chat(f"{turn} and some more words " * (1 + 20 * (turn % 3)))
        assert (answer.status, answer.headers["x-sim-pod"] in DECODERS) == (200, True)
    await chain.idle()
    for figure in ("pending_seconds", "decodes"):
        labels = {"plugin": "expected-ttft", "statistic": figure}
        assert await chain.metric("warmpath_plugin_statistic", **labels) == 0
    assert (
        await chain.metric("warmpath_plugin_statistic", plugin="role-profile-handler", statistic="prefill-decode") >= 12
    )
    labels = {"plugin_type": "role-profile-handler", "model_name": "sim", "decision_type": "prefill-decode"}
    assert await chain.metric("llm_d_epp_disagg_decision_total", **labels) >= 12


async def test_what_the_prefiller_fails_at_is_done_where_it_is_decoded(chain: Laptop) -> None:
    await chain.faults(chain.pod("pod-a"), status=500)
    answer = await chain.chat("computed where it is decoded " * 50)
    assert (answer.status, answer.headers["x-prefill-fallback"]) == (200, "status")
    await chain.idle()
    (found,) = [each for each in await chain.endpoints() if each["name"] == "default/pod-a"]
    assert found["plugins"]["failure-share-producer"]["failure_share"] > 0
    async with chain.http.delete(f"{chain.pod('pod-a').url}/admin/faults") as cleared:
        assert cleared.status == 200
    answer = await chain.chat("and apart again " * 50)
    assert (answer.status, "x-prefill-fallback" in answer.headers) == (200, False)


async def test_a_client_cannot_name_a_prefiller(chain: Laptop) -> None:
    answer = await chain.chat("somewhere else " * 50, headers={"x-prefiller-host-port": "127.0.0.1:1"})
    assert (answer.status, "x-prefill-fallback" in answer.headers) == (200, False)


async def test_without_a_prefiller_it_is_said(chain: Laptop) -> None:
    entries = [pod for pod in chain.chain.pods if pod.role == "decode"]
    write_endpoints(entries, chain.chain.endpoints_file)
    await eventually(chain.endpoints, lambda found: len(found) == 2)
    answer = await chain.chat("nobody prefills " * 50)
    assert (answer.status, answer.headers["x-sim-pod"] in DECODERS) == (200, True)
    assert await chain.metric("warmpath_degraded_total", reason="no-prefiller") >= 1
