"""SLOs by header and by objective, through a real Envoy with simulated pods."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import aiohttp
import pytest
import pytest_asyncio

from epp.configuration.loader import strategy_text
from gateway.wiring import Wiring
from tests.support.gateway.chain import Laptop, eventually, laptop

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

FLAGS = ("--trust-client-headers", "--refresh-metrics-interval", "0.2", "--watch-answers", "1")
BEST_EFFORT = strategy_text("prefix-aware")
SHED = BEST_EFFORT.replace("- type: expected-ttft\n", "- type: expected-ttft\n  parameters: {slo: shed}\n", 1)
OBJECTIVE = """
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata:
  name: chat
  annotations: {warmpath/slo-ttft-ms: "30000", warmpath/slo-tpot-ms: "9000"}
spec: {priority: 1, poolRef: {name: sim}}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["lean", "full-duplex"])
async def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    wiring = cast(Wiring, request.param)
    async with laptop(tmp_path_factory.mktemp(wiring), wiring=wiring, flags=FLAGS, pods=2) as made:
        (made.manifests / "chat.yaml").write_text(OBJECTIVE)
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def chain(started: Laptop) -> AsyncIterator[Laptop]:
    if started.config.read_text() != BEST_EFFORT:
        await started.chain.reconfigure(started.config, BEST_EFFORT)
    yield started
    for pod in started.chain.pods:
        await started.faults(pod)
    await started.idle()


async def ask(chain: Laptop, content: str = "hello", **headers: str) -> aiohttp.ClientResponse:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return await chain.chat(content, headers=named, stream=True, stream_options={"include_usage": True})


async def newest(chain: Laptop) -> dict[str, Any]:
    async with chain.http.get(f"{chain.chain.replicas[0].admin}/decisions?limit=1") as page:
        found: dict[str, Any] = (await page.json())["decisions"][0]
    return found


async def ended(chain: Laptop) -> dict[str, Any]:
    return cast("dict[str, Any]", await eventually(lambda: newest(chain), lambda one: one["outcome"] is not None))


async def test_what_is_wanted_predicted_and_measured_is_shown_and_counted(chain: Laptop) -> None:
    kept = await ask(chain, x_slo_ttft_ms="30000", x_llm_d_slo_tpot_ms="9000")
    assert kept.status == 200
    shown = await ended(chain)
    assert shown["slo"] == {"ttft_ms": 30000.0, "tpot_ms": 9000.0}
    assert 0 < shown["predicted"]["ttft_ms"] < 30000
    rows = shown["profiles"][0]["endpoints"]
    assert len([row["predicted"]["tpot_ms"] for row in rows]) == 2, "of each that was looked at"
    assert shown["outcome"]["slo"] == "met"
    assert 0 < shown["outcome"]["ttft_ms"] < 30000
    assert shown["outcome"]["tpot_ms"] > 0
    missed = await ask(chain, x_slo_ttft_ms="0.001")
    assert missed.status == 200, "best effort"
    assert (await ended(chain))["outcome"]["slo"] == "missed-ttft"
    for outcome in ("met", "missed-ttft"):
        labels = {"pool": "sim", "objective": "(headers)", "outcome": outcome}
        assert await chain.metric("warmpath_slo_requests_total", **labels) >= 1
    for figure in ("ttft", "tpot"):
        assert await chain.metric(f"warmpath_{figure}_prediction_ratio_count") >= 2


async def test_an_objective_of_a_file_says_it_too(chain: Laptop) -> None:
    async def asked() -> dict[str, Any]:
        answer = await ask(chain, x_llm_d_inference_objective="chat")
        assert answer.status == 200
        return await ended(chain)

    shown = await eventually(asked, lambda one: "slo" in one)
    assert shown["slo"] == {"ttft_ms": 30000.0, "tpot_ms": 9000.0, "objective": "chat"}
    labels = {"pool": "sim", "objective": "chat", "outcome": "met"}
    assert await chain.metric("warmpath_slo_requests_total", **labels) >= 1


async def test_an_endpoint_that_would_miss_it_is_left_alone(chain: Laptop) -> None:
    for pod in chain.chain.pods:
        await chain.faults(pod, hang=True)
    long = asyncio.ensure_future(chain.chat("long " * 20_000))
    await eventually(chain.hanging, lambda count: count == 1)
    busy = (await newest(chain))["endpoint"]
    for pod in chain.chain.pods:
        await chain.faults(pod)
    for turn in range(4):
        answer = await ask(chain, f"quick {turn}", x_slo_ttft_ms="500")
        assert answer.status == 200
        shown = await ended(chain)
        assert shown["endpoint"] != busy
        bills = {row["endpoint"]: row["bill_ms"]["slo"] for row in shown["profiles"][0]["endpoints"]}
        assert bills[busy] >= 10_000 > bills[shown["endpoint"]]
    long.cancel()
    await asyncio.gather(long, return_exceptions=True)


async def test_where_none_would_keep_it_the_answer_may_be_no(chain: Laptop) -> None:
    await chain.chain.reconfigure(chain.config, SHED)
    refused = await ask(chain, x_llm_d_slo_ttft_ms="0.001")
    assert refused.status == 429
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-slo"
    error = (await refused.json())["error"]
    assert error["type"] == "rate_limit_error"
    assert error["message"].startswith("no endpoint would keep the SLO (TTFT 0.001 ms) of this request")
    labels = {"pool": "sim", "objective": "(headers)", "outcome": "shed"}
    assert await chain.metric("warmpath_slo_requests_total", **labels) == 1
    assert await chain.metric("warmpath_refused_total", status="429", reason="rejected-slo") == 1
    assert (await ask(chain, x_llm_d_slo_ttft_ms="30000")).status == 200
    assert (await ask(chain)).status == 200


async def test_an_slo_that_is_no_time_is_refused(chain: Laptop) -> None:
    refused = await ask(chain, x_slo_tpot_ms="fast")
    assert refused.status == 400
    error = (await refused.json())["error"]
    assert error["param"] == "x-llm-d-slo-tpot-ms"
    assert error["message"] == "x-llm-d-slo-tpot-ms: got 'fast'; expected milliseconds, 0 to 1e+09"
