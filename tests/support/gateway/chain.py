"""A running chain for tests: simulated pods, replicas and Envoy, a raw upstream of fixed bytes, and what they tell."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from epp.configuration.loader import strategy_text
from gateway.wiring import Wiring
from tooling.laptop.chain import Chain, Shape, running_chain
from tooling.laptop.engines import Engine, LaptopPod, Simulated
from tooling.laptop.ports import is_free
from tooling.laptop.watch import watch

LIMIT = 60.0
"""Seconds that anything may take on a machine that has other things to do."""

PATIENT: Final = ("--tokenizer-timeout=30s", "--decision-deadline=60s")
"""Of a picker whose picks are to be exact: tokens of prompts, which may come late on such a machine, are waited for."""

MANIFESTS = """
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {name: here}
spec:
  gatewayClassName: warmpath
  listeners: [{name: http, port: 8080, protocol: HTTP}]
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: sim}
spec:
  selector: {matchLabels: {app: sim}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: warmpath, port: {number: 9002}}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: raw}
spec:
  selector: {matchLabels: {app: raw}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: warmpath, port: {number: 9002}}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: nobody}
spec:
  selector: {matchLabels: {app: nobody}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: warmpath, port: {number: 9002}}
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {name: by-header}
spec:
  parentRefs: [{name: here}]
  rules:
  - matches: [{headers: [{name: x-pool, value: raw}]}]
    backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: raw}]
  - matches: [{headers: [{name: x-pool, value: nobody}]}]
    backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: nobody}]
  - backendRefs: [{group: inference.networking.k8s.io, kind: InferencePool, name: sim}]
---
apiVersion: inference.networking.x-k8s.io/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {priority: -1, poolRef: {name: sim}}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: interactive}
spec: {priority: 5, poolRef: {name: sim}}
"""
"""Three pools by header: `sim` (the simulated pods; default), `raw` (bytes of the test), `nobody` (empty)."""


class RawUpstream:
    """Answers every request but a scrape with the bytes it is told, and remembers what it was sent."""

    def __init__(self) -> None:
        self.answer = b""
        self.asked: list[bytes] = []
        """Head and body of each request, as they came."""
        self.address = ("", 0)

    @asynccontextmanager
    async def listening(self, host: str) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._serve, host, 0)
        self.address = server.sockets[0].getsockname()[:2]
        async with server:
            yield

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET /metrics "):
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            else:
                self.asked.append(head + await _body(reader, head.lower()))
                writer.write(self.answer)
            await writer.drain()
        writer.close()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    if b"content-length: " in head:
        return await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r\n")[0]))
    body = b""
    while b"transfer-encoding: chunked" in head:
        size = int(await reader.readline(), 16)
        body += (await reader.readexactly(size + 2))[:-2]
        if not size:
            break
    return body


@dataclass
class Laptop:
    """A chain that is watched, and everything around it."""

    chain: Chain
    raw: RawUpstream
    manifests: Path
    config: Path
    """The EndpointPickerConfig all replicas follow."""
    reported: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.chain.url

    @property
    def http(self) -> aiohttp.ClientSession:
        return self.chain.http

    def pod(self, name: str) -> LaptopPod:
        return next(pod for pod in self.chain.pods if pod.name == name)

    def service(self, name: str) -> str:
        """Where one of the engine's services is, `host:port`."""
        ready = next(each.ready for each in self.chain.layout.services if each.name == name)
        return ready.split("/")[2]

    async def chat(self, content: str, **more: Any) -> aiohttp.ClientResponse:
        """One chat through the gateway, read whole. `headers` go beside, all else into the body."""
        headers = more.pop("headers", {})
        body = {
            "model": self.chain.shape.engine.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": 4,
            **more,
        }
        answer = await self.http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        await answer.read()
        return answer

    async def faults(self, pod: LaptopPod, **faults: Any) -> None:
        async with self.http.post(f"{pod.url}/admin/faults", json=faults) as answer:
            assert answer.status == 200, await answer.text()

    async def hanging(self) -> int:
        """Requests that hang in pods. The picker has those on account that are still on their way there, too."""
        counts = []
        for pod in self.chain.pods:
            async with self.http.get(f"{pod.url}/admin/faults") as answer:
                counts.append((await answer.json())["hanging"])
        return sum(counts)

    async def endpoints(self, pool: str = "sim") -> list[Any]:
        """TimeoutError where the picker is so busy that it does not tell."""
        pools, _ = await self.chain.seen(1)
        for each in pools:
            if each["name"] == pool:
                found: list[Any] = each["endpoints"]
                return found
        raise TimeoutError(f"the picker tells of no pool {pool!r}")

    async def in_flight(self) -> int:
        """Of all pools, by the first replica's accounts."""
        pools, _ = await self.chain.seen(1)
        return sum(endpoint["in_flight"] for pool in pools for endpoint in pool["endpoints"])

    async def metric(self, name: str, *, at: str = "", **labels: str) -> float:
        """Sum of the samples of that name whose labels include these, of the first replica or of the server `at`."""
        async with self.http.get(f"{at or self.chain.replicas[0].admin}/metrics") as answer:
            families = text_string_to_metric_families(await answer.text())
        samples = [sample for family in families for sample in family.samples if sample.name == name]
        return sum(sample.value for sample in samples if labels.items() <= sample.labels.items())

    async def idle(self) -> None:
        """Return when no request is in flight any more."""
        await eventually(self.in_flight, lambda count: count == 0)


async def eventually(
    look: Callable[[], Any], true: Callable[[Any], bool], seconds: float = LIMIT, every: float = 0.05
) -> Any:
    """What `look` (async) returns as soon as it is `true` of it. A server that does not answer is asked again."""
    seen: Any = None
    try:
        async with asyncio.timeout(seconds):
            while True:
                try:
                    if true(seen := await look()):
                        return seen
                except (aiohttp.ClientError, TimeoutError) as error:
                    seen = error
                await asyncio.sleep(every)
    except TimeoutError:
        raise AssertionError(f"still {seen!r} after {seconds:g} s") from None


@asynccontextmanager
async def laptop(
    directory: Path,
    *,
    wiring: Wiring = "lean",
    pods: int = 3,
    replicas: int = 1,
    flags: tuple[str, ...] = (),
    engine: Engine | None = None,
) -> AsyncIterator[Laptop]:
    """A chain in `directory` that is watched while the block runs. `flags` are more of `warmpath serve`."""
    raw, manifests, config = RawUpstream(), directory / "manifests", directory / "config.yaml"
    manifests.mkdir()
    config.write_text(strategy_text("prefix-aware"))
    (manifests / "all.yaml").write_text(MANIFESTS)
    shape = Shape(
        pods=pods,
        replicas=replicas,
        port=0,
        picking=("--config", str(config), *flags),
        manifests=manifests,
        wiring=wiring,
        engine=engine or Simulated(flags=("--time-scale", "5")),
    )
    async with raw.listening("::1" if is_free(0, "::1") else "127.0.0.1"):
        host, port = raw.address
        entry = f"{{name: raw, address: '{host}', port: {port}, labels: {{app: raw}}}}"
        (manifests / "raw.yaml").write_text(f"endpoints: [{entry}]\n")
        async with running_chain(shape, directory) as chain, asyncio.TaskGroup() as tasks:
            made = Laptop(chain, raw, manifests, config)
            watching = tasks.create_task(watch(chain, made.reported.append))
            try:
                yield made
            finally:
                watching.cancel()
