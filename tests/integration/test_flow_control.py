"""Requests that wait in the picker while the pool is full, through a real Envoy."""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any, Self, cast

import aiohttp
import pytest
import pytest_asyncio

from epp.configuration.loader import strategy_text
from epp.protocol import DROP_REASON
from gateway.wiring import Wiring
from tests.support.gateway.chain import Laptop, eventually, laptop

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

FLAGS = ("--trust-client-headers", "--refresh-metrics-interval", "0.2", "--decision-deadline", "1")
HEAD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"
ONE_EACH = f"""{HEAD}
featureGates: [flowControl]
plugins:
- type: concurrency-detector
  parameters: {{maxConcurrency: 1}}
- type: round-robin-picker
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: round-robin-picker}}]
flowControl:
  saturationDetector: {{pluginRef: concurrency-detector}}
  defaultPriorityBand: {{fairnessPolicyRef: round-robin-fairness-policy}}
  defaultNegativePriorityBand: {{maxRequests: 2}}
"""
OFF = ONE_EACH.replace("featureGates: [flowControl]\n", "")


def control(objective: str = "", tenant: str = "", ttl: str = "") -> dict[str, str]:
    said = {"objective": objective, "fairness-id": tenant, "ttl": ttl}
    return {f"x-llm-d-inference-{name}": value for name, value in said.items() if value}


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["lean", "full-duplex", "full-duplex, grpc"])
async def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    wiring, _, server = request.param.partition(", ")
    flags = (*FLAGS, "--ext-proc-server", server or "http2")
    folder = tmp_path_factory.mktemp(wiring)
    async with laptop(folder, wiring=cast(Wiring, wiring), flags=flags, pods=2) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def chain(started: Laptop) -> AsyncIterator[Laptop]:
    if started.config.read_text() != ONE_EACH:
        await started.chain.reconfigure(started.config, ONE_EACH)
    yield started
    for pod in started.chain.pods:
        await started.faults(pod)
    await eventually(lambda: waiting(started), lambda count: count == 0)
    await started.idle()


async def waiting(chain: Laptop, **labels: str) -> float:
    return await chain.metric("warmpath_flow_waiting", pool="sim", **labels)


class Full:
    """While the block runs every pod has one request, which `free` takes from it."""

    def __init__(self, chain: Laptop) -> None:
        self.chain = chain
        self._holding: list[asyncio.Task[Any]] = []

    async def __aenter__(self) -> Self:
        for pod in self.chain.chain.pods:
            await self.chain.faults(pod, hang=True)
        self._holding = [asyncio.ensure_future(self.chain.chat("hold a place")) for _ in self.chain.chain.pods]
        await eventually(self.chain.hanging, lambda count: count == len(self._holding))
        for pod in self.chain.chain.pods:
            await self.chain.faults(pod)
        return self

    async def free(self) -> None:
        self._holding.pop().cancel()

    async def __aexit__(self, *error: object) -> None:
        for task in self._holding:
            task.cancel()
        await asyncio.gather(*self._holding, return_exceptions=True)


async def test_the_highest_priority_goes_first_then_tenants_take_turns(chain: Laptop) -> None:
    ends: list[str] = []

    async def ask(name: str, **said: str) -> None:
        answer = await chain.chat(f"prompt of {name}", headers=control(**said))
        assert answer.status == 200, await answer.text()
        ends.append(name)

    async with Full(chain) as full:
        tasks: list[asyncio.Task[None]] = []
        for name, said in {
            "batch": {"objective": "batch"},
            "a1": {"tenant": "a"},
            "a2": {"tenant": "a"},
            "b1": {"tenant": "b"},
            "chat": {"objective": "interactive"},
        }.items():
            tasks.append(asyncio.ensure_future(ask(name, **said)))
            await eventually(lambda: waiting(chain), lambda count: count == len(tasks))
        assert await waiting(chain, fairness_id="a", priority="0") == 2
        labels = {"inference_pool": "sim", "fairness_id": "a", "target_model_name": "sim"}
        assert await chain.metric("llm_d_epp_flow_control_queue_size", **labels) == 2
        assert await chain.metric("warmpath_pool_saturation", pool="sim") == 1
        await full.free()
        await asyncio.gather(*tasks)
    assert ends == ["chat", "a1", "b1", "a2", "batch"]
    labels = {"pool": "sim", "priority": "5", "outcome": "Dispatched"}
    assert await chain.metric("warmpath_flow_wait_seconds_count", **labels) >= 1
    async with chain.http.get(f"{chain.chain.replicas[0].admin}/decisions?limit=1") as page:
        newest = (await page.json())["decisions"][0]
    assert newest["priority"] == -1
    assert newest["waited_ms"] > newest["decision_ms"]


async def test_who_waits_too_long_or_finds_too_many_gets_429(chain: Laptop) -> None:
    async with Full(chain):
        late = await chain.chat("no time", headers=control(ttl="300ms"))
        assert late.status == 429
        assert late.headers["x-llm-d-request-dropped-reason"] == "rejected-ttl-expired"
        assert 1 <= int(late.headers["retry-after"]) <= 60
        assert re.search(r"has waited \d+\.\d s", (await late.json())["error"]["message"])
        batch = [asyncio.ensure_future(chain.chat("batch", headers=control("batch"))) for _ in range(2)]
        await eventually(lambda: waiting(chain, priority="-1"), lambda count: count == 2)
        refused = await chain.chat("one more", headers=control("batch"))
        assert refused.status == 429
        assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert "2 requests of its priority wait already" in (await refused.json())["error"]["message"]
    assert [(await one).status for one in batch] == [200, 200], "once there is room"
    assert await chain.metric("warmpath_degraded_total", reason="flow-control-refused") >= 2


async def test_a_client_that_leaves_waits_no_more(chain: Laptop) -> None:
    async with Full(chain):
        gone = asyncio.ensure_future(chain.chat("never mind"))
        await eventually(lambda: waiting(chain), lambda count: count == 1)
        gone.cancel()
        await eventually(lambda: waiting(chain), lambda count: count == 0)
    labels = {"pool": "sim", "outcome": "EvictedContextCancelled"}
    assert await chain.metric("warmpath_flow_wait_seconds_count", **labels) >= 1


async def test_a_long_wait_is_no_decision_that_takes_too_long(chain: Laptop) -> None:
    """The deadline of a decision, here 1 s, is none of a wait."""
    async with Full(chain) as full:
        patient = asyncio.ensure_future(chain.chat("take your time"))
        await eventually(lambda: waiting(chain), lambda count: count == 1)
        await asyncio.sleep(2.0)
        assert await waiting(chain) == 1
        await full.free()
        assert (await patient).status == 200


async def test_a_configuration_without_flow_control_lets_go_what_waits(chain: Laptop) -> None:
    async with Full(chain):
        waits = asyncio.ensure_future(chain.chat("wait"))
        await eventually(lambda: waiting(chain), lambda count: count == 1)
        await chain.chain.reconfigure(chain.config, OFF)
        assert (await waits).status == 200


async def test_a_pool_without_endpoints_is_a_waiting_room(chain: Laptop) -> None:
    target = f"{chain.url}/v1/completions"
    body = {"model": "sim", "prompt": "anybody?", "max_tokens": 1}
    headers = {"x-pool": "nobody"}
    entry = chain.manifests / "late.yaml"

    async def ask() -> aiohttp.ClientResponse:
        answer = await chain.http.post(target, json=body, headers=headers)
        await answer.read()
        return answer

    early = asyncio.ensure_future(ask())

    async def queued() -> float:
        if early.done():  # then it waits no more: why is better than how long that was looked for
            raise AssertionError(f"{(await early).status}: {await (await early).text()}")
        return await chain.metric("warmpath_flow_waiting", pool="nobody", model="sim")

    await eventually(queued, lambda count: count == 1)
    host, _, port = chain.chain.pods[0].url.removeprefix("http://").rpartition(":")
    entry.write_text(
        f"endpoints: [{{name: late, address: '{host.strip('[]')}', port: {port}, labels: {{app: nobody}}}}]\n"
    )
    try:
        answer = await early
        async with chain.http.get(f"{chain.chain.replicas[0].admin}/decisions?limit=1") as page:
            newest = (await page.json())["decisions"][0]
        assert newest["endpoint"] == "default/late"
        assert newest["waited_ms"] > 0
        # Picker and gateway read the same files, each in its own time: for a moment only one may know the endpoint.
        assert answer.status == 200 or DROP_REASON not in answer.headers
        await eventually(ask, lambda asked: asked.status == 200)
    finally:
        entry.unlink()


async def test_the_default_waits_by_its_own_accounts(chain: Laptop) -> None:
    """With the picker's own cost as the detector, many at once are all answered, and no engine has many waiting."""
    await chain.chain.reconfigure(chain.config, strategy_text("prefix-aware") + "featureGates: [flowControl]\n")
    answers = await asyncio.gather(*(chain.chat(f"{n} " + "long " * 1500) for n in range(24)))
    assert {answer.status for answer in answers} == {200}
    async with chain.http.get(f"{chain.chain.replicas[0].admin}/decisions?limit={len(answers)}") as page:
        waited = [each["waited_ms"] for each in (await page.json())["decisions"]]
    assert len(waited) == len(answers)
    assert max(waited) > 50, "some waited here, for a prompt to be computed"
