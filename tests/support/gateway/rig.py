"""A real Envoy on configuration from YAML, between small upstreams and real ext_proc servers with constant answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from epp.documents.addresses import address_of
from epp.extproc.server import ExtProcServer, Settings
from gateway.envoy import Envoy, running_envoy
from gateway.load import load
from gateway.translate import TranslateOptions, translate
from gateway.xds import Rendering
from tests.support.ext_proc.server import Route, ext_proc_server
from tooling.laptop.ports import free_ports

FIRST_EVENT, LAST_EVENT = b"data: 1\n\n", b"data: [DONE]\n\n"


@dataclass
class Upstream:
    """Says who it is and what it was asked."""

    name: str
    address: str
    status: int = 200
    asked: int = 0
    silent: asyncio.Event | None = None
    """Set when an answer may go."""
    streams: bool = False
    """Its answer begins with an event before it is silent."""

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        body = await request.read()
        if self.streams:
            return await self._stream(request)
        if self.silent is not None:
            await self.silent.wait()
        said = {"name": self.name, "path": request.raw_path, "size": len(body), "headers": dict(request.headers)}
        return web.json_response(said, status=self.status, headers={"x-pod": self.name})

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(FIRST_EVENT)
        if self.silent is not None:
            await self.silent.wait()
        await response.write(LAST_EVENT)
        return response


@asynccontextmanager
async def upstream(name: str, host: str = "127.0.0.1") -> AsyncIterator[Upstream]:
    [port] = free_ports(1, host)
    made = Upstream(name, address_of(host, port))
    server = web.Application(client_max_size=1 << 26)
    server.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(server)
    await runner.setup()
    await web.TCPSite(runner, host, port).start()
    try:
        yield made
    finally:
        await runner.cleanup()


GATEWAY = """
apiVersion: gateway.networking.k8s.io/v1
kind: Gateway
metadata: {{name: gate}}
spec:
  gatewayClassName: warmpath
  listeners: [{{name: http, port: {port}, protocol: HTTP}}]
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: route}}
spec:
  parentRefs: [{{name: gate}}]
  rules: {rules}
"""
POOL = """
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {{name: {name}}}
spec:
  selector: {{matchLabels: {{pool: {name}}}}}
  targetPorts: [{{number: 8000}}]
  appProtocol: {app_protocol}
  endpointPickerRef: {{name: {name}-epp, port: {{number: 9002}}, failureMode: {failure_mode}}}
"""


def to(*pools: str | tuple[str, int]) -> list[dict[str, Any]]:
    """backendRefs to pools, or to (pool, weight)."""
    pairs = [(pool, 1) if isinstance(pool, str) else pool for pool in pools]
    group = "inference.networking.k8s.io"
    return [{"group": group, "kind": "InferencePool", "name": name, "weight": weight} for name, weight in pairs]


@dataclass
class Rig:
    """`a` and `b`: two pools of two upstreams each, `a-0` … `b-1`; the picker of each names its first."""

    folder: Path
    port: int
    upstreams: Mapping[str, Upstream]
    pickers: Mapping[str, Route]
    servers: Mapping[str, Sequence[ExtProcServer]]
    options: TranslateOptions
    failure_mode: str
    app_protocol: str
    host: str
    session: aiohttp.ClientSession
    envoy: Envoy = field(init=False)
    members: dict[str, list[str]] = field(default_factory=lambda: {pool: [f"{pool}-0", f"{pool}-1"] for pool in "ab"})

    async def use(self, rules: Sequence[Mapping[str, Any]]) -> None:
        await self.envoy.update(render(self, routed(self.port, rules)))

    async def healthy(self, pool: str, count: int) -> None:
        """Return when Envoy finds `count` pickers of a pool healthy; a starved machine can miss its first check."""
        gauge = f"cluster.epp.default.{pool}.membership_healthy"
        async with asyncio.timeout(30):
            while (await self.envoy.stats(f"^{gauge}$"))[gauge] != count:
                await asyncio.sleep(0.02)

    async def use_documents(self, gateway: str) -> None:
        """`gateway`: YAML of Gateways and HTTPRoutes."""
        await self.envoy.update(render(self, gateway))

    async def ask(self, path: str = "/", method: str = "POST", **more: Any) -> tuple[int, Mapping[str, str], Any]:
        """Status, headers and JSON (or text) of the answer."""
        if method == "POST":
            more.setdefault("data", b'{"model": "m", "prompt": "hello"}')
        url = f"http://127.0.0.1:{self.port}{path}"
        async with self.session.request(method, url, allow_redirects=False, **more) as response:
            text = await response.text()
            as_json = response.content_type == "application/json"
            return response.status, response.headers, json.loads(text) if as_json else text

    async def served(self, path: str = "/", method: str = "POST", **more: Any) -> str:
        """Name of the upstream that answered; the picker of its pool, and no other, was asked once."""
        before = {pool: picker.entered for pool, picker in self.pickers.items()}
        status, _, said = await self.ask(path, method, **more)
        assert status == 200, said
        asked = [pool for pool, picker in self.pickers.items() if picker.entered != before[pool]]
        assert asked == [said["name"][0]]
        return str(said["name"])


def routed(port: int, rules: Sequence[Mapping[str, Any]]) -> str:
    return GATEWAY.format(port=port, rules=json.dumps(list(rules)))


def render(rig: Rig, gateway: str) -> Rendering:
    options = {"failure_mode": rig.failure_mode, "app_protocol": rig.app_protocol}
    text = gateway + "".join(POOL.format(name=pool, **options) for pool in "ab")
    entries = []
    for pool, names in rig.members.items():
        for name in names:
            host, _, port = rig.upstreams[name].address.rpartition(":")
            entries.append({"name": name, "address": host.strip("[]"), "port": port, "labels": {"pool": pool}})
    (rig.folder / "gateway.yaml").write_text(text)
    (rig.folder / "endpoints.yaml").write_text(json.dumps({"endpoints": entries}))
    pickers = {
        f"default/{pool}": [address_of(rig.host, each.ports[0]) for each in servers]
        for pool, servers in rig.servers.items()
    }
    return translate(load([rig.folder]), pickers, rig.options)


@asynccontextmanager
async def rig(
    folder: Path,
    rules: Sequence[Mapping[str, Any]],
    *,
    options: TranslateOptions | None = None,
    failure_mode: str = "FailClose",
    app_protocol: str = "http",
    host: str = "127.0.0.1",
    replicas: int = 1,
    concurrency: int = 1,
) -> AsyncIterator[Rig]:
    """The whole chain; `host` of upstreams and pickers, `replicas`: endpoint pickers of each pool."""
    async with AsyncExitStack() as stack:
        names = [f"{pool}-{index}" for pool in "ab" for index in range(2)]
        upstreams = {name: await stack.enter_async_context(upstream(name, host)) for name in names}
        pickers = {pool: Route(upstreams[f"{pool}-0"].address) for pool in "ab"}
        listen = Settings(listen=(address_of(host, 0),), health=(address_of(host, 0),))
        servers = {
            pool: [await stack.enter_async_context(ext_proc_server(picker, listen)) for _ in range(replicas)]
            for pool, picker in pickers.items()
        }
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        [port] = free_ports(1)
        made = Rig(
            folder,
            port,
            upstreams,
            pickers,
            servers,
            options or TranslateOptions(),
            failure_mode,
            app_protocol,
            host,
            session,
        )
        made.envoy = await stack.enter_async_context(
            running_envoy(render(made, routed(port, rules)), directory=folder / "envoy", concurrency=concurrency)
        )
        for pool in "ab":
            await made.healthy(pool, replicas)
        yield made
