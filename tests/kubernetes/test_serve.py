"""`warmpath serve` on a real API server: pods on loopback addresses, a real Envoy in front, requests that arrive; and
argument lists of other pickers' charts, with which it starts.
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.configuration.loader import strategy_text
from gateway.envoy import Envoy, running_envoy
from gateway.load import load
from gateway.translate import TranslateOptions, translate
from tests.support.kubernetes.cluster import POOL_GROUP, Cluster
from tests.support.process.charts import CHARTS
from tooling.laptop.ports import free_ports
from tooling.laptop.processes import Processes
from tooling.simulator.server import SimulatedPod

GATEWAY = """
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {{name: g}}
spec:
  gatewayClassName: warmpath
  listeners: [{{name: http, port: {port}, protocol: HTTP}}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: r}}
spec:
  parentRefs: [{{name: g}}]
  rules:
  - backendRefs: [{{group: inference.networking.k8s.io, kind: InferencePool, name: p}}]
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {{name: p}}
spec:
  selector: {{matchLabels: {{app: x}}}}
  targetPorts: [{{number: {target}}}]
  endpointPickerRef: {{name: warmpath, port: {{number: 9002}}}}
---
endpoints:
- {{name: a, address: 127.1.0.1, port: {target}, labels: {{app: x}}}}
- {{name: b, address: 127.1.0.2, port: {target}, labels: {{app: x}}}}
"""


class Served:
    """The picker's process, an Envoy before it, and pods that the API server knows or not."""

    def __init__(self, http: aiohttp.ClientSession, port: int, metrics: int) -> None:
        self._http = http
        self._url = f"http://127.0.0.1:{port}/v1/chat/completions"
        self._admin = f"http://127.0.0.1:{metrics}"

    async def ask(self, text: str = "hello") -> tuple[int, str]:
        """Status, and the pod that answered."""
        body = {"model": "sim", "messages": [{"role": "user", "content": text}], "max_tokens": 2}
        async with self._http.post(self._url, json=body) as answer:
            await answer.read()
            return answer.status, answer.headers.get("x-sim-pod", "")

    async def until_endpoints(self, names: set[str]) -> None:
        async with asyncio.timeout(30):
            while await self._endpoints() != names:
                await asyncio.sleep(0.05)

    async def until_ready(self, status: int) -> None:
        async with asyncio.timeout(60):
            while await self._status() != status:
                await asyncio.sleep(0.05)

    async def _endpoints(self) -> set[str]:
        async with self._http.get(f"{self._admin}/endpoints") as answer:
            pools: list[Any] = (await answer.json())["pools"]
        return {endpoint["name"].rpartition("/")[2] for pool in pools for endpoint in pool["endpoints"]}

    async def until_going_on(self, *reasons: str) -> None:
        """Until these and no other lasting degradations go on."""
        async with asyncio.timeout(30):
            while await self.going_on() != {*reasons}:
                await asyncio.sleep(0.01)

    async def going_on(self) -> set[str]:
        async with self._http.get(f"{self._admin}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        samples = [each for family in families if family.name == "warmpath_degraded_now" for each in family.samples]
        return {sample.labels["reason"] for sample in samples if sample.value}

    async def _status(self) -> int:
        return await self.admin_status("/ready")

    async def admin_status(self, path: str) -> int:
        """0: nobody listens."""
        try:
            async with self._http.get(f"{self._admin}{path}") as answer:
                return answer.status
        except aiohttp.ClientConnectionError:
            return 0


@asynccontextmanager
async def serving(cluster: Cluster, folder: Path, target: int) -> AsyncIterator[Served]:
    port, grpc, health, metrics = free_ports(4)
    command = [sys.executable, "-m", "epp.cli", "--pool-name", "p", "--pool-namespace", cluster.namespace]
    command += ["--secure-serving=false", "--grpc-port", str(grpc), "--grpc-health-port", str(health)]
    command += ["--metrics-port", str(metrics), "--drain-linger", "0", "--metrics-endpoint-auth=false"]
    (folder / "gateway.yaml").write_text(GATEWAY.format(port=port, target=target))
    rendering = translate(load([folder / "gateway.yaml"]), {"default/p": [f"127.0.0.1:{grpc}"]}, TranslateOptions())
    async with AsyncExitStack() as stack:
        for number, name in enumerate("ab", 1):
            await stack.enter_async_context(SimulatedPod(host=f"127.1.0.{number}", port=target, name=name))
        processes = await stack.enter_async_context(Processes(folder))
        await processes.start("epp", command)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        served = Served(http, port, metrics)
        await served.until_ready(503)
        envoy: Envoy = await stack.enter_async_context(running_envoy(rendering))
        assert envoy.pid
        yield served


@pytest.mark.envoy
async def test_requests_follow_what_the_api_server_says(cluster: Cluster, tmp_path: Path) -> None:
    [target] = free_ports(1)
    async with serving(cluster, tmp_path, target) as served:
        assert (await served.ask())[0] == 503
        await cluster.create_pool("p", target)
        await cluster.create_pods([("a", "127.1.0.1")])
        await served.until_ready(200)
        await served.until_endpoints({"a"})
        async with asyncio.timeout(20):  # Envoy looks at health, four times a second
            while (await served.ask()) != (200, "a"):
                await asyncio.sleep(0.05)
        await cluster.create_pods([("b", "127.1.0.2")])
        await served.until_endpoints({"a", "b"})
        answers = await asyncio.gather(*(served.ask(f"question {number}") for number in range(12)))
        assert {pod for status, pod in answers if status == 200} == {"a", "b"}
        await cluster.set_ready("a", False)
        await served.until_endpoints({"b"})
        assert {await served.ask(f"later {number}") for number in range(6)} == {(200, "b")}


AWAY = 60.0


@pytest.mark.envoy
async def test_a_minute_without_the_api_server_costs_no_request_and_what_changes_after_it_is_soon_known(
    cluster: Cluster, tmp_path: Path, took: list[tuple[str, float]]
) -> None:
    [target] = free_ports(1)
    await cluster.create_pool("p", target)
    await cluster.create_pods([("a", "127.1.0.1"), ("b", "127.1.0.2")])
    async with serving(cluster, tmp_path, target) as served:
        await served.until_ready(200)
        await served.until_endpoints({"a", "b"})
        async with asyncio.timeout(20):
            while (await served.ask())[0] != 200:
                await asyncio.sleep(0.05)
        async with asking(served) as answers:
            cluster.plane.stop_api()
            try:
                await served.until_going_on("kubernetes-away")
                before = len(answers)
                await asyncio.sleep(AWAY)
                assert len(answers) > before + 10
                assert await served.going_on() == {"kubernetes-away"}
            finally:
                await asyncio.to_thread(cluster.plane.start_api)
            await change_the_pool(cluster, served, took)
        assert (await served.ask("after")) == (200, "b")
        assert {status for status, _ in answers} == {200}


@asynccontextmanager
async def asking(served: Served) -> AsyncIterator[list[tuple[int, str]]]:
    """The answers to what somebody asks all the time."""
    answers: list[tuple[int, str]] = []

    async def ask() -> None:
        while True:
            answers.append(await served.ask(f"question {len(answers)}"))
            await asyncio.sleep(0.1)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(ask())
        yield answers
        task.cancel()


async def change_the_pool(cluster: Cluster, served: Served, took: list[tuple[str, float]]) -> None:
    """The first thing the API server is asked for; the picker's watches may be back or not."""
    change = {"spec": {"selector": {"matchLabels": {"app": "y"}}}}
    await cluster.patch("api/v1", "pods", "b", {"metadata": {"labels": {"app": "y"}}})
    await cluster.patch(POOL_GROUP, "inferencepools", "p", change)
    changed = time.monotonic()
    await served.until_going_on()
    back = time.monotonic()
    await served.until_endpoints({"b"})
    took.append(("a change after a minute's absence, from the change,", time.monotonic() - changed))
    took.append(("the same, from the watches' return,", time.monotonic() - back))


@pytest.mark.parametrize("chart", CHARTS)
async def test_it_starts_with_the_arguments_of_a_chart(cluster: Cluster, tmp_path: Path, chart: str) -> None:
    """On other ports, and with files of its own where the chart mounts some."""
    grpc, health, metrics = map(str, free_ports(3))
    (tmp_path / "config.yaml").write_text(strategy_text("least-load"))
    arguments = started(CHARTS[chart], str(tmp_path / "config.yaml"), cluster.namespace)
    flags = {"grpc-port": grpc, "grpc-health-port": health, "metrics-port": metrics, "drain-timeout": "0"}
    for flag, value in flags.items():
        arguments = [*without(arguments, flag), f"--{flag}={value}"]
    await cluster.create_pool(POOL_OF.get(chart, "vllm"), 8000)
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes(tmp_path))
        await processes.start("epp", [sys.executable, "-m", "epp.cli", *arguments])
        http = await stack.enter_async_context(aiohttp.ClientSession())
        served = Served(http, 0, int(metrics))
        await served.until_ready(200)
        protected = "--metrics-endpoint-auth=false" not in arguments
        assert await served.admin_status("/metrics") == (401 if protected else 200)


POOL_OF = {
    "GIE v1.5 inferencepool, SGLang, three replicas": "sglang",
    "GIE v1.5 inferencepool, Triton": "triton",
    "GIE v1.5 conformance": "primary-inference-pool",
    "GIE v1.6 conformance": "primary-inference-pool",
    "lwepp, everything": "p",
    "llm-d-router v0.10 gateway": "llm",
}


def started(arguments: list[str], config: str, namespace: str) -> list[str]:
    """The arguments with our configuration file and namespace."""
    arguments = [config if each.startswith("/config/") else each for each in arguments]
    return [*without(arguments, "pool-namespace"), f"--pool-namespace={namespace}"]


def without(arguments: list[str], flag: str) -> list[str]:
    """The arguments without a flag and its value, however it is spelt."""
    found: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument.lstrip("-").partition("=")[0] != flag:
            found.append(argument)
        skip = argument.lstrip("-") == flag
    return found
