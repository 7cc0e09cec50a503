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
from tests.support.process.waiting import until
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
async def chain(folder: Path, wiring: Wiring, address: str, server: str = "http2") -> AsyncIterator[Laptop]:
    """With the endpoint at `address`."""
    async with laptop(folder, wiring=wiring, pods=1, flags=("--ext-proc-server", server)) as made:

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


@asynccontextmanager
async def speaking() -> AsyncIterator[str]:
    """The address of an endpoint that speaks WebSockets."""
    app = web.Application()
    app.router.add_get("/v1/realtime", realtime)
    app.router.add_get("/there", there)
    async with serving(app) as address:
        yield address


@pytest.mark.parametrize(
    ("wiring", "server"),
    [("lean", "http2"), ("full-duplex", "http2"), ("streamed", "http2"), ("full-duplex", "grpc")],
)
async def test_a_websocket_goes_both_ways_and_is_on_account_while_it_is_open(
    tmp_path: Path, wiring: Wiring, server: str
) -> None:
    async with speaking() as address, chain(tmp_path, wiring, address, server) as made, asyncio.timeout(60):
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


HANDSHAKE = (
    b"GET /v1/realtime HTTP/1.1\r\nhost: a\r\nx-pool: raw\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n"
)
HIDDEN = b"POST /v1/load_lora_adapter HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{}"


@pytest.mark.parametrize("wiring", ["lean", "full-duplex"])
async def test_what_comes_with_a_handshake_is_no_request_to_who_refuses_it(tmp_path: Path, wiring: Wiring) -> None:
    """It would pass routes, guards and limits."""
    asked: list[bytes] = []

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keeps the connection, and reads what comes by it until its other end closes it."""
        head = await reader.readuntil(b"\r\n\r\n")
        if head.startswith(b"GET /v1/realtime "):
            writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n")
            asked.append(head.split(b"\r\n")[0] + await reader.read())
        else:
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(refuse, "127.0.0.1", 0) as server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with chain(tmp_path, wiring, address) as made, asyncio.timeout(60):
            host, _, port = made.url.removeprefix("http://").partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(HANDSHAKE + HIDDEN)
            assert (await reader.read()).startswith(b"HTTP/1.1 404 ")
            writer.close()
            await made.idle()
            await until(lambda: asked == [b"GET /v1/realtime HTTP/1.1"])
