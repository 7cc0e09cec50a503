"""A slow model server: an answer of `CHUNKS` server-sent events, `PAUSE_S` apart; or one piece, as late, where the
request does not ask for a stream.
"""

import argparse
import asyncio
import re
from typing import cast

import uvloop

CHUNKS = 100
PAUSE_S = 0.002
TEXT = b"word " * 28
EVENT = b'data: {"id":"cmpl-1","object":"text_completion","choices":[{"index":0,"text":"%s"}]}\n\n' % TEXT
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
WHOLE = b'{"object":"text_completion","choices":[{"index":0,"text":"%s"}]}' % (TEXT * CHUNKS)
PLAIN = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(WHOLE), WHOLE)
STREAMED = re.compile(rb'"stream": ?true')
"""Pickers may write the body anew, without spaces."""
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)


class Streaming(asyncio.Protocol):
    """One connection: requests with a Content-Length, one after the other."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is none by name
        self._loop = asyncio.get_running_loop()
        self._received = b""

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = LENGTH.search(head)
        wanted = int(length[1]) if length else 0
        if len(body) >= wanted:
            self._received = body[wanted:]
            if STREAMED.search(body, 0, wanted):
                self._transport.write(HEAD)
                self._next(CHUNKS)
            else:
                self._loop.call_later(CHUNKS * PAUSE_S, self._whole)

    def _whole(self) -> None:
        if not self._transport.is_closing():
            self._transport.write(PLAIN)

    def _next(self, left: int) -> None:
        if self._transport.is_closing():
            return
        if left == 0:
            self._transport.write(DONE)
            return
        self._transport.write(CHUNK)
        self._loop.call_later(PAUSE_S, self._next, left - 1)


async def start(port: int) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(Streaming, "127.0.0.1", port)


async def _serve(port: int) -> None:
    server = await start(port)
    await server.serve_forever()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    uvloop.run(_serve(parser.parse_args().port))
