"""`warmpath serve` on a real API server: pods on loopback addresses, a real Envoy in front, requests that arrive."""

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epp.sim.server import SimulatedPod
from gateway.envoy import Envoy, running_envoy
from gateway.load import load
from gateway.translate import Options, translate
from laptop.ports import free_ports
from laptop.processes import Processes
from tests.support.cluster import Cluster

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

    async def _status(self) -> int:
        try:
            async with self._http.get(f"{self._admin}/ready") as answer:
                return answer.status
        except aiohttp.ClientConnectionError:
            return 0


@asynccontextmanager
async def serving(cluster: Cluster, folder: Path, target: int) -> AsyncIterator[Served]:
    port, grpc, health, metrics = free_ports(4)
    command = [sys.executable, "-m", "epp.cli", "--pool-name", "p", "--pool-namespace", cluster.namespace]
    command += ["--secure-serving=false", "--grpc-port", str(grpc), "--grpc-health-port", str(health)]
    command += ["--metrics-port", str(metrics), "--drain-linger", "0"]
    (folder / "gateway.yaml").write_text(GATEWAY.format(port=port, target=target))
    rendering = translate(load([folder / "gateway.yaml"]), {"default/p": [f"127.0.0.1:{grpc}"]}, Options())
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
