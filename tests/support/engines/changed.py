"""A simulated pod one of whose answers is another."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp import web

from tests.support.process import web_server
from tooling.simulator.server import SimulatedPod


@asynccontextmanager
async def changed(
    simulated: SimulatedPod, path: str, change: Callable[[Any], Any], asked: Callable[[bytes], None] | None = None
) -> AsyncIterator[str]:
    """The pod behind a proxy that changes the JSON, or the text, of one path's answers. `asked` is shown what that path
    is sent."""

    async def forward(request: web.Request) -> web.Response:
        url = f"{simulated.url}{request.path}"
        sent = await request.read()
        if asked and request.path == path:
            asked(sent)
        async with (
            aiohttp.ClientSession() as client,
            client.request(request.method, url, data=sent) as answer,
        ):
            body = await answer.read()
            if request.path == path:
                found = change(body.decode() if path == "/metrics" else json.loads(body))
                body = found.encode() if isinstance(found, str) else json.dumps(found).encode()
            return web.Response(status=answer.status, body=body)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", forward)
    async with web_server.serving(app) as address:
        yield address
