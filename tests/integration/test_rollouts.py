"""Pickers are replaced behind an Envoy that neither asks them for their health nor retries, through a Service."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from epp.extproc.server import AGE, ExtProcServer, Settings
from epp.telemetry.metrics import Metrics
from tests.support.ext_proc.server import LOOPBACK, Route
from tests.support.gateway import envoy
from tests.support.process import web_server

pytestmark = [pytest.mark.envoy]

LINGER = 1.5


class Service:
    """As kube-proxy does it: a new connection leads to the picker that is ready, one that stands stays where it is."""

    def __init__(self) -> None:
        self.to = 0
        self.port = 0
        self.connections = 0

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self.to)
        async with asyncio.TaskGroup() as both:
            both.create_task(_copy(reader, there_writer))
            both.create_task(_copy(there_reader, writer))

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._relay, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


@asynccontextmanager
async def upstream() -> AsyncIterator[str]:
    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.json_response({})

    app = web.Application()
    app.router.add_post("/{path:.*}", answer)
    async with web_server.serving(app) as address:
        yield address


async def replaced(
    service: Service, old: ExtProcServer | None, route: Route, drains: asyncio.TaskGroup
) -> ExtProcServer:
    """A new picker that new connections lead to; the old one, if there is one, is told to go."""
    new = ExtProcServer(route, Metrics(), Settings(listen=LOOPBACK, health=LOOPBACK, connection_age=AGE * LINGER))
    await new.start()
    new.set_ready(True)
    service.to = new.ports[0]
    if old is not None:
        drains.create_task(old.drain(30, LINGER))
    return new


@pytest.mark.parametrize("wiring", ["lean", "full-duplex"])
async def test_rollouts_lose_nothing_where_the_gateway_neither_looks_nor_retries(tmp_path: Path, wiring: str) -> None:
    service, statuses, over = Service(), Counter[int](), asyncio.Event()
    async with AsyncExitStack() as stack:
        route = Route(await stack.enter_async_context(upstream()))
        await stack.enter_async_context(service.listening())
        drains = await stack.enter_async_context(asyncio.TaskGroup())
        server = await replaced(service, None, route, drains)
        ports = await stack.enter_async_context(envoy.running(service.port, [route.destination], tmp_path))
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))

        async def ask() -> None:
            while not over.is_set():
                async with http.post(f"http://127.0.0.1:{ports[wiring]}/", data=b"{}") as answer:
                    await answer.read()
                    statuses[answer.status] += 1

        async with asyncio.TaskGroup() as clients:
            for _ in range(24):
                clients.create_task(ask())
            for _ in range(6):
                before = statuses[200]
                server = await replaced(service, server, route, drains)
                await asyncio.sleep(LINGER)
                while statuses[200] < before + 200:
                    await asyncio.sleep(0.01)
            over.set()
        await server.drain(0)
    assert statuses == {200: statuses[200]}
