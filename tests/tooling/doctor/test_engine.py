"""One endpoint, a simulated one, with each thing wrong that a simulator can have wrong. Real ones: tests/engine."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from tests.support.engines.changed import changed
from tests.support.process import web_server
from tests.support.process.dropped import dropping
from tooling.doctor.engine import ProbedEndpoint, examine, probe
from tooling.doctor.finding import Finding
from tooling.doctor.http import HttpClient
from tooling.simulator.engine import LAPTOP
from tooling.simulator.publisher import KvEventsConfig
from tooling.simulator.ranks import DataParallelPod
from tooling.simulator.server import SimulatedPod

FREE = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")


def pod(**settings: Any) -> SimulatedPod:
    return SimulatedPod(**{"kv_events": FREE, "time_scale": 100.0, **settings})


async def examined(
    address: str, model: str | None = None, event_timeout: float = 5.0, name: str = "pod-a", labelled: str = ""
) -> tuple[ProbedEndpoint, list[Finding]]:
    found = ProbedEndpoint(name, f"http://{address}", address, labelled=labelled)
    async with HttpClient(5.0) as ask:
        return found, await examine(found, ask, model=model, seed=7, event_timeout=event_timeout)


def checks(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.check, finding.level) for finding in findings]


async def test_a_pod_that_is_well_has_no_findings_and_is_known() -> None:
    async with pod() as simulated:
        found, findings = await examined(simulated.address, "sim")
    assert findings == []
    assert found.reachable
    assert (found.models, found.block_size) == (["sim"], LAPTOP.block_size)
    assert set(found.tokens) == {"text", "chat"}
    ((tokens, _),) = found.hashes.items()
    assert len(tokens) == LAPTOP.block_size


async def test_equal_probes_give_equal_hashes_at_every_pod() -> None:
    async with pod() as one, pod() as two:
        assert (await examined(one.address))[0].hashes == (await examined(two.address))[0].hashes


async def test_every_endpoint_is_sent_a_prompt_that_no_other_stores_at_that_moment() -> None:
    async def prompts(name: str) -> set[str]:
        sent: set[bytes] = set()
        async with pod() as simulated, changed(simulated, "/v1/completions", dict, sent.add) as address:
            assert (await examined(address, name=name))[1] == []
        return {json.loads(body)["prompt"] for body in sent}

    one, two = await prompts("pod-a"), await prompts("pod-b")
    assert len(one & two) == 1  # whose blocks' hashes are compared
    assert len(one - two) == len(two - one) == 1


@asynccontextmanager
async def two_ranks() -> AsyncIterator[DataParallelPod]:
    async with DataParallelPod("pod-a", "127.0.0.1", 0, [pod(), pod()]) as made:
        yield made


async def test_ranks_behind_one_port_are_examined_each_by_itself() -> None:
    async with two_ranks() as simulated, HttpClient(5.0) as ask:
        for rank in range(2):
            found = ProbedEndpoint(f"pod-a-rank-{rank}", simulated.url, simulated.address, rank, 2)
            assert await examine(found, ask, model=None, seed=7 + rank, event_timeout=5.0) == []
            assert found.headers == {"x-data-parallel-rank": str(rank)}
            assert found.hashes


@pytest.mark.parametrize(
    ("rank", "ranks", "level", "said", "fix"),
    [
        (None, 1, "hint", "2 data-parallel ranks behind one port", "label warmpath/data-parallel-size: 2, and"),
        (2, 3, "problem", "its label says 3 ranks, its metrics show 2", "label warmpath/data-parallel-size: 2"),
    ],
)
async def test_ranks_that_no_label_counts_well(rank: int | None, ranks: int, level: str, said: str, fix: str) -> None:
    async with two_ranks() as simulated, HttpClient(5.0) as ask:
        found = ProbedEndpoint("pod-a", simulated.url, simulated.address, rank, ranks)
        findings = await examine(found, ask, model=None, seed=7, event_timeout=5.0)
    assert checks(findings) == [("data-parallel", level)]
    (finding,) = findings
    assert said in finding.found
    assert fix in finding.fix


async def test_nobody_there() -> None:
    found, findings = await examined("127.0.0.1:1")
    assert not found.reachable
    assert checks(findings) == [("unreachable", "problem")]
    assert findings[0].fix.endswith("is its port another (the pool's target port, vLLM's --port)?")


async def test_nobody_who_answers() -> None:
    found = ProbedEndpoint("pod-a", "", "")
    with dropping() as port:
        found.url = f"http://127.0.0.1:{port}"
        async with HttpClient(0.2) as ask:
            findings = await examine(found, ask, model=None, seed=7, event_timeout=0.1)
    assert checks(findings) == [("unreachable", "problem")]
    assert findings[0].fix.startswith("let the picker reach it: is a NetworkPolicy or a firewall between")


async def test_another_server_gets_no_prompts() -> None:
    async def answer(request: web.Request) -> web.Response:
        assert request.path in ("/metrics", "/v1/models")
        return web.Response(text="python_info 1.0\n", status=200 if request.path == "/metrics" else 404)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with web_server.serving(app) as address:
        _, findings = await examined(address)
    assert checks(findings) == [("metrics", "problem"), ("model", "problem")]
    assert findings[1].fix == "is it an OpenAI-compatible server, or another port than vLLM's --port?"


async def test_another_model() -> None:
    async with pod(model="llama") as simulated:
        _, findings = await examined(simulated.address, "qwen")
    assert checks(findings) == [("model", "problem")]
    assert (findings[0].found, findings[0].fix) == ("it serves llama; asked for qwen", "--served-model-name qwen")


async def test_an_adapter_is_a_model_too() -> None:
    async with pod(lora=("tuned",)) as simulated:
        found, findings = await examined(simulated.address, "tuned")
    assert findings == []
    assert (set(found.models), found.bases) == ({"sim", "tuned"}, ["sim"])


async def test_no_kv_events() -> None:
    async with pod(kv_events=None) as simulated:
        _, findings = await examined(simulated.address)
    assert checks(findings) == [("kv-events", "problem")]
    assert '"enable_kv_cache_events": true' in findings[0].fix
    assert '"endpoint": "tcp://*:5557"' in findings[0].fix


async def fault(url: str, **faults: Any) -> None:
    async with aiohttp.ClientSession() as client, client.post(f"{url}/admin/faults", json=faults) as answer:
        assert answer.status == 200


async def test_kv_events_that_do_not_come() -> None:
    async with pod() as simulated:
        await fault(simulated.url, mute=True)
        _, findings = await examined(simulated.address, event_timeout=0.05)
    assert checks(findings) == [("kv-events-silent", "problem")]


@pytest.mark.parametrize("kind", ["off", "binary"])
async def test_metrics_that_cannot_be_read(kind: str) -> None:
    async with pod() as simulated:
        await fault(simulated.url, metrics=kind)
        found, findings = await examined(simulated.address)
    assert checks(findings) == [("metrics", "problem")]
    assert found.block_size is None


async def test_a_pod_that_only_errs() -> None:
    async with pod() as simulated:
        await fault(simulated.url, status=500)
        _, findings = await examined(simulated.address)
    assert checks(findings) == [
        ("model", "problem"),
        ("tokenize", "hint"),
        ("prefix-caching", "problem"),
        ("kv-events-silent", "problem"),
    ]


async def test_answers_that_do_not_tell_cached_tokens() -> None:
    def silent(answer: Any) -> Any:
        answer["usage"]["prompt_tokens_details"] = None
        return answer

    async with pod() as simulated, changed(simulated, "/v1/completions", silent) as address:
        _, findings = await examined(address)
    assert checks(findings) == [("prompt-token-details", "hint")]
    assert findings[0].fix == "--enable-prompt-tokens-details"


async def test_a_prompt_that_is_never_cached() -> None:
    def uncached(answer: Any) -> Any:
        answer["usage"]["prompt_tokens_details"] = {"cached_tokens": 0}
        return answer

    async with pod() as simulated, changed(simulated, "/v1/completions", uncached) as address:
        _, findings = await examined(address)
    assert checks(findings) == [("prefix-caching", "problem")]
    assert findings[0].fix == "--enable-prefix-caching"


async def test_prefix_caching_that_metrics_call_off() -> None:
    async with (
        pod() as simulated,
        changed(
            simulated,
            "/metrics",
            lambda page: page.replace('enable_prefix_caching="True"', 'enable_prefix_caching="False"'),
        ) as address,
    ):
        found, findings = await examined(address)
    assert found.caching is False
    assert checks(findings) == [("prefix-caching", "problem")]


async def test_a_publisher_that_connects_instead_of_listening() -> None:
    def connects(sources: Any) -> Any:
        sources["0"]["endpoint"] = "tcp://127.0.0.1:1"
        return sources

    async with pod() as simulated, changed(simulated, "/kv_event_sources", connects) as address:
        _, findings = await examined(address)
    assert checks(findings) == [("kv-events-endpoint", "problem")]
    assert "binds with *, :: or ipc:// only" in findings[0].fix


async def test_a_publisher_that_connects_to_another_host() -> None:
    def elsewhere(sources: Any) -> Any:
        sources["0"]["endpoint"] = "tcp://10.1.2.3:5557"
        return sources

    async with pod() as simulated, changed(simulated, "/kv_event_sources", elsewhere) as address:
        _, findings = await examined(address)
    assert checks(findings) == [("kv-events-endpoint", "problem")]
    assert "10.1.2.3" in findings[0].found


async def test_a_port_that_is_closed_though_the_publisher_listens() -> None:
    def closed(sources: Any) -> Any:
        sources["0"]["endpoint"] = "tcp://*:1"
        return sources

    async with pod() as simulated, changed(simulated, "/kv_event_sources", closed) as address:
        _, findings = await examined(address)
    assert (findings[0].check, findings[0].fix) == ("kv-events-endpoint", "open the port to the picker")


async def test_events_with_another_block_size_than_the_metrics() -> None:
    async with (
        pod(parameters=replace(LAPTOP, block_size=32)) as simulated,
        changed(simulated, "/metrics", lambda page: page.replace('block_size="32"', 'block_size="16"')) as address,
    ):
        _, findings = await examined(address)
    assert checks(findings) == [("block-size", "problem")]


async def test_no_tokenize() -> None:
    async with pod() as simulated, changed(simulated, "/tokenize", lambda _: "nonsense") as address:
        _, findings = await examined(address)
    assert checks(findings) == [("tokenize", "hint")]
    assert "--tokenizer" in findings[0].fix


def test_a_probe_is_new_for_each_seed() -> None:
    assert probe(50, 1) == probe(50, 1)
    assert probe(50, 1) != probe(50, 2)
    assert len(probe(50, 1).split()) == 50


@pytest.mark.parametrize("labelled", ["", "vllm", "sglang"])
async def test_another_engine_is_named_and_left_alone(labelled: str) -> None:
    asked: list[str] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        return web.Response(text="sglang:num_queue_reqs 1.0\nsglang:num_running_reqs 2.0\n")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with web_server.serving(app) as address:
        found, findings = await examined(address, labelled=labelled)
    assert found.reachable
    assert checks(findings) == [("metrics", "hint")]
    assert "those of sglang" in findings[0].found
    assert findings[0].fix == (
        "nothing, it has that label"
        if labelled == "sglang"
        else "its pod's label llm-d.ai/engine-type: sglang, or defaultEngine of core-metrics-extractor"
    )
    assert asked == ["/metrics"]
