"""WebSockets, as that of vLLM's /v1/realtime, through a real Envoy: picked by load, and passed on both ways.

Envoy's handshake waits for the picker, and the client for the handshake, so who waits for a body waits for ever.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from gateway.wiring import Wiring
from tests.support.gateway.chain import Laptop, eventually, laptop
from tests.support.process.web_server import serving

pytestmark = pytest.mark.envoy

POOL = {"x-pool": "raw"}


async def realtime(request: web.Request) -> web.WebSocketResponse:
    """Speaks first, as vLLM does, answers each message with its length, and ends when it is told to."""
    socket = web.WebSocketResponse()
    await socket.prepare(request)
    await socket.send_json({"model": request.query.get("model")})
    async for message in socket:
        if message.data == "end":
            break
        await socket.send_json({"length": len(message.data)})
    return socket


async def there(request: web.Request) -> web.Response:
    return web.Response()


@asynccontextmanager
async def chain(folder: Path, wiring: Wiring, server: str) -> AsyncIterator[Laptop]:
    app = web.Application()
    app.router.add_get("/v1/realtime", realtime)
    app.router.add_get("/there", there)
    flags = ("--ext-proc-server", server)
    async with serving(app) as address, laptop(folder, wiring=wiring, pods=1, flags=flags) as made:

        async def status() -> int:
            async with made.http.get(f"{made.url}/there", headers=POOL) as answer:
                return answer.status

        assert await status() == 503, "nobody is there who answers, and whoever watches the files has begun"
        host, _, port = address.rpartition(":")
        entry = f"{{name: ws, address: '{host}', port: {port}, labels: {{app: raw}}}}"
        (made.manifests / "raw.yaml").write_text(f"endpoints: [{entry}]\n")
        await eventually(status, lambda now: now == 200)  # Envoy knows it
        await eventually(lambda: made.endpoints("raw"), lambda seen: [each["name"] for each in seen] == ["default/ws"])
        yield made


@pytest.mark.parametrize(
    ("wiring", "server"),
    [("lean", "http2"), ("full-duplex", "http2"), ("streamed", "http2"), ("full-duplex", "grpc")],
)
async def test_a_websocket_goes_both_ways_and_is_on_account_while_it_is_open(
    tmp_path: Path, wiring: Wiring, server: str
) -> None:
    async with chain(tmp_path, wiring, server) as made, asyncio.timeout(60):
        async with made.http.ws_connect(f"{made.url}/v1/realtime?model=m", headers=POOL) as socket:
            assert await socket.receive_json() == {"model": "m"}
            assert await made.in_flight() == 1
            for size in (1, 70_000, 3_000_000):
                await socket.send_bytes(b"x" * size)
                assert await socket.receive_json() == {"length": size}
            await socket.send_str("end")
            assert (await socket.receive()).type is aiohttp.WSMsgType.CLOSE
        await made.idle()
        _, [decision] = await made.chain.seen(1)
        assert (decision["endpoint"], decision["outcome"]["status"]) == ("default/ws", 101)
        assert decision["outcome"]["ttft_ms"] is None, "what comes by it first is no token"

        with pytest.raises(aiohttp.WSServerHandshakeError, match="404"):
            await made.http.ws_connect(f"{made.url}/v1/elsewhere", headers=POOL)
        await made.idle()
        assert await made.metric("warmpath_degraded_total", reason="internal-error") == 0
