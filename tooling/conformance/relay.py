"""A loopback port that speaks TLS to a target whose certificate cannot be verified.

gRPC's Python client cannot skip verification, and endpoint pickers usually serve a certificate of their own making,
without a name in it. Gateways skip verification too.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

_PIECE = 1 << 16


@asynccontextmanager
async def relay(host: str, port: int) -> AsyncIterator[int]:
    """A port of ours whose connections go on to `host:port` over TLS, with ALPN `h2`."""
    trusting = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trusting.check_hostname = False
    trusting.verify_mode = ssl.CERT_NONE
    trusting.set_alpn_protocols(["h2"])

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await asyncio.open_connection(host, port, ssl=trusting)
        except OSError:  # ssl.SSLError too
            writer.transport.abort()
            return
        try:
            async with asyncio.TaskGroup() as both:
                both.create_task(copy(reader, to_writer))
                both.create_task(copy(to_reader, writer))
        except asyncio.CancelledError:
            pass  # the loop ends; asyncio would report a cancelled connection as an error
        finally:
            to_writer.transport.abort()
            writer.transport.abort()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()


async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Until either side is gone; then the other is closed too."""
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            writer.write(piece)
            await writer.drain()
    writer.transport.abort()
