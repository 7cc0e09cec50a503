"""A real ext_proc server with a route that does as it is configured to, and the gateway's end of a stream over a
socket.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Self

import grpc
from grpc import aio

from epp import protocol
from epp.errors import EppError
from epp.extproc.grpc_server import GrpcServer
from epp.extproc.server import ExtProcServer, Settings
from epp.extproc.server import Route as AnyRoute
from epp.extproc.stream import AnswerChunk, Answered
from epp.parsing.request import RawRequest
from epp.route import RoutedRequest
from epp.telemetry.metrics import Metrics
from tests.support.ext_proc.messages import words

LOOPBACK = ("127.0.0.1:0",)
KIND: list[type[ExtProcServer | GrpcServer]] = [ExtProcServer]
"""The class of the servers that `ext_proc_server` makes: a test that is run for both changes it."""


class Scope(RoutedRequest):
    """What became of one request. Where it goes and what the answer gets is as told, without a scheduler."""

    def __init__(self, raw: RawRequest, route: "Route") -> None:
        self.raw = raw
        self.body = route.body
        self.destination = route.destination
        self.renamed, self.watched = route.renamed, route.watched
        self._deliver = (route.headers, route.answer_headers, route.watch)
        self.seen: list[Answered | AnswerChunk] = []
        self.left = asyncio.Event()
        self.error: BaseException | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        return self._deliver[0]

    def answered(
        self, status: int, served: str, content_type: str = "", prefill_fallback: str = ""
    ) -> Mapping[str, str]:
        self._deliver[2]()
        self.seen.append(Answered(status, served, content_type, prefill_fallback))
        return self._deliver[1]

    def answer_chunk(self, chunk: bytes, *, end: bool) -> None:
        self._deliver[2]()
        self.seen.append(AnswerChunk(chunk, end))


class Route:
    """Counts what enters and leaves. `entering` runs before the decision: it may wait or raise."""

    def __init__(self, destination: str = "127.0.0.1:1") -> None:
        self._news = asyncio.Event()
        self.reset(destination)

    def reset(self, destination: str) -> None:
        """As if made anew."""
        self.destination = destination
        self.headers: Mapping[str, str] = {}
        self.body: bytes | None = None
        self.answer_headers: Mapping[str, str] = {}
        self.renamed: tuple[str, str] | None = None
        self.error: BaseException | None = None
        self.watch: Callable[[], None] = lambda: None
        self.watched = False
        self.wait: asyncio.Event | None = None
        self.entered = 0
        self.left = 0
        self.ways: list[Scope] = []

    @asynccontextmanager
    async def __call__(self, raw: RawRequest) -> AsyncIterator[Scope]:
        self.entered += 1
        self._tell()
        try:
            if self.wait is not None:
                await self.wait.wait()
            if self.error is not None:
                raise self.error
            way = Scope(raw, self)
            self.ways.append(way)
            self._tell()
            try:
                yield way
            except BaseException as error:
                way.error = error
                raise
            finally:
                way.left.set()
        finally:
            self.left += 1
            self._tell()

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def until(self, true: Callable[[], bool]) -> None:
        """Wait for something to be true of what entered and left."""
        try:
            async with asyncio.timeout(10):
                while not true():
                    await self._news.wait()
        except TimeoutError:
            raise AssertionError(f"{self.entered} entered, {self.left} left") from None

    async def way(self, number: int = 0) -> Scope:
        """The request of this number, once it was routed."""
        await self.until(lambda: len(self.ways) > number)
        return self.ways[number]


@asynccontextmanager
async def ext_proc_server(
    route: AnyRoute, settings: Settings | None = None, metrics: Metrics | None = None
) -> AsyncIterator[ExtProcServer | GrpcServer]:
    """A server of the class in `KIND`."""
    made = KIND[0](route, metrics or Metrics(), settings or Settings(listen=LOOPBACK, health=LOOPBACK))
    await made.start()
    made.set_ready(True)
    try:
        yield made
    finally:
        await made.drain(0)


class Call:
    """The gateway's end of one stream."""

    def __init__(self, call: "aio.StreamStreamCall[bytes, bytes]") -> None:
        self._call = call
        self.write = call.write
        self.cancel = call.cancel
        self.code = call.code

    async def said(self) -> str:
        """The next reply, in words."""
        reply = await self._call.read()
        assert isinstance(reply, bytes), "the server ended the stream"
        return words(reply)

    async def rest(self) -> list[str]:
        """Half-close, then everything that still comes."""
        await self._call.done_writing()
        replies = []
        while isinstance(reply := await self._call.read(), bytes):
            replies.append(words(reply))
        return replies

    async def ended(self) -> grpc.StatusCode:
        """The status of a stream that the server ends without another word."""
        with suppress(aio.AioRpcError):
            assert not isinstance(await self._call.read(), bytes)
        return await self._call.code()


class Gateway:
    """One channel to a server. What is not read stays there, but for 64 KB of each stream (HTTP/2's first window)."""

    def __init__(self, port: int, host: str = "127.0.0.1") -> None:
        options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
        options += [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65_535)]
        self.channel: Any = aio.insecure_channel(f"{host}:{port}", options=options)

    def stream(self) -> Call:
        return Call(self.channel.stream_stream(f"/{protocol.EXT_PROC_SERVICE}/Process")())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.channel.close()


def failing(error: EppError) -> Route:
    route = Route()
    route.error = error
    return route
