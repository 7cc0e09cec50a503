"""A real Envoy on configuration from YAML, between small upstreams and real ext_proc doors with constant answers."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from epp.extproc.server import Door
from gateway.envoy import Envoy, running_envoy
from gateway.load import load
from gateway.translate import Options, translate
from gateway.xds import Rendering
from laptop.ports import free_ports
from tests.support.ext_proc_door import Route, door


@dataclass
class Upstream:
    """Says who it is and what it was asked."""

    name: str
    address: str
    status: int = 200
    asked: int = 0
    silent: asyncio.Event | None = None
    """Set when an answer may go."""

    async def answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        body = await request.read()
        if self.silent is not None:
            await self.silent.wait()
        said = {"name": self.name, "path": request.raw_path, "size": len(body), "headers": dict(request.headers)}
        return web.json_response(said, status=self.status, headers={"x-pod": self.name})


@asynccontextmanager
async def upstream(name: str) -> AsyncIterator[Upstream]:
    [port] = free_ports(1)
    made = Upstream(name, f"127.0.0.1:{port}")
    server = web.Application(client_max_size=1 << 26)
    server.router.add_route("*", "/{path:.*}", made.answer)
    runner = web.AppRunner(server)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
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
    doors: Mapping[str, Sequence[Door]]
    options: Options
    failure_mode: str
    session: aiohttp.ClientSession
    envoy: Envoy = field(init=False)
    members: dict[str, list[str]] = field(default_factory=lambda: {pool: [f"{pool}-0", f"{pool}-1"] for pool in "ab"})

    async def use(self, rules: Sequence[Mapping[str, Any]]) -> None:
        await self.envoy.update(render(self, rules))

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


def render(rig: Rig, rules: Sequence[Mapping[str, Any]]) -> Rendering:
    text = GATEWAY.format(port=rig.port, rules=json.dumps(list(rules)))
    text += "".join(POOL.format(name=pool, failure_mode=rig.failure_mode) for pool in "ab")
    entries = []
    for pool, names in rig.members.items():
        for name in names:
            host, _, port = rig.upstreams[name].address.rpartition(":")
            entries.append({"name": name, "address": host, "port": port, "labels": {"pool": pool}})
    (rig.folder / "gateway.yaml").write_text(text)
    (rig.folder / "endpoints.yaml").write_text(json.dumps({"endpoints": entries}))
    pickers = {f"default/{pool}": [f"127.0.0.1:{each.ports[0]}" for each in doors] for pool, doors in rig.doors.items()}
    return translate(load([rig.folder]), pickers, rig.options)


@asynccontextmanager
async def rig(
    folder: Path,
    rules: Sequence[Mapping[str, Any]],
    *,
    options: Options | None = None,
    failure_mode: str = "FailClose",
    replicas: int = 1,
) -> AsyncIterator[Rig]:
    """The whole chain; `replicas`: endpoint pickers of each pool."""
    async with AsyncExitStack() as stack:
        names = [f"{pool}-{index}" for pool in "ab" for index in range(2)]
        upstreams = {name: await stack.enter_async_context(upstream(name)) for name in names}
        pickers = {pool: Route(upstreams[f"{pool}-0"].address) for pool in "ab"}
        doors = {
            pool: [await stack.enter_async_context(door(picker)) for _ in range(replicas)]
            for pool, picker in pickers.items()
        }
        session = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        [port] = free_ports(1)
        made = Rig(folder, port, upstreams, pickers, doors, options or Options(), failure_mode, session)
        made.envoy = await stack.enter_async_context(running_envoy(render(made, rules), directory=folder / "envoy"))
        yield made
