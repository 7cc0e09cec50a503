"""One ext_proc stream, from the gateway's end."""

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final

import grpc
from grpc import aio

from epp import protocol
from epp.extproc.proto import ext_proc_pb2 as pb
from tooling.conformance import wire
from tooling.conformance.replies import Forwarded, Refused, Reply, decoded, kind, refused, streamed
from tooling.conformance.target import Target
from tooling.conformance.verdict import Failed, Skipped

_METHOD: Final = f"/{protocol.EXT_PROC_SERVICE}/Process"
_OF_THE_CLIENT: Final = "Internal error from Core"
"""Details of the status that grpc.aio's client makes up when a write fails (grpcio 1.85, `aio/_call.py`)."""
_UNREAD: Final = 4096
"""Replies kept until they are looked at; beyond that the target has to wait."""
CHAT_PATH: Final = "/v1/chat/completions"
BODILESS: Final = "/v1/files"
"""A path of requests without a body that no picker answers by itself, as some do `/v1/models`."""


class Talk:
    """Sends messages in any order; replies are read as they come and looked at when asked for."""

    def __init__(self, target: Target, call: "aio.StreamStreamCall[Any, Any]") -> None:
        self.target = target
        self._call = call
        self._replies: asyncio.Queue[bytes | None] = asyncio.Queue(_UNREAD)
        self._ended = False
        self._status_lost = False
        """A message of ours met the end of the stream: grpc's client then puts an error of its own for the status."""

    async def read(self) -> None:
        """Collect replies until the stream ends."""
        with suppress(aio.AioRpcError):
            while isinstance(data := await self._call.read(), bytes):
                await self._replies.put(data)
        await self._replies.put(None)

    async def send(self, *messages: wire.Message) -> None:
        """Messages to a stream that has ended are lost, as they are for a gateway."""
        for message in messages:
            await self.send_raw(message.SerializeToString())

    async def send_raw(self, message: bytes) -> None:
        """The same with a message's bytes."""
        try:
            await self._call.write(message)
        except asyncio.InvalidStateError:
            pass
        except aio.AioRpcError as error:
            self._status_lost = error.details() == _OF_THE_CLIENT

    async def half_close(self) -> None:
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            await self._call.done_writing()

    def cancel(self) -> None:
        """As a gateway whose client has gone."""
        self._call.cancel()

    # --- replies -----------------------------------------------------------------------------------------------------

    async def _next(self, expected: str, seconds: float) -> bytes | None:
        if self._ended:
            return None
        try:
            async with asyncio.timeout(seconds):
                data = await self._replies.get()
        except TimeoutError:
            raise Failed(expected, f"nothing for {seconds:g} s") from None
        self._ended = data is None
        return data

    async def reply(self, expected: str) -> Reply:
        """The next one. Raises Failed if none comes; `expected` says what was waited for."""
        data = await self._next(expected, self.target.options.reply_timeout)
        if data is None:
            raise Failed(expected, await self._how_it_ended())
        return decoded(data)

    async def silence(self, instead_of: str) -> None:
        """Nothing may come for a while, nor before a later request is answered. `instead_of`: what should come first.

        The later request is for machines that stand still: there time passes, and nobody had a chance to break the
        silence.
        """
        await asyncio.sleep(self.target.options.quiet)
        with suppress(Failed):
            await asked(self.target)
        if self._replies.empty() and not self._ended:
            return
        data = await self._next(instead_of, self.target.options.reply_timeout)
        raise Failed(instead_of, await self._how_it_ended() if data is None else kind(decoded(data)))

    async def end(self) -> None:
        """The EPP ends the stream, without an error and without another word."""
        expected = "the end of the stream"
        data = await self._next(expected, self.target.options.reply_timeout)
        if data is not None:
            raise Failed(expected, kind(decoded(data)))
        if not await self._ended_well():
            raise Failed(f"{expected} with status OK", await self._how_it_ended())

    async def over(self) -> None:
        """The EPP ends the stream, in whatever way."""
        expected = "the end of the stream"
        while await self._next(expected, self.target.options.reply_timeout) is not None:
            pass

    async def _ended_well(self) -> bool:
        """With status OK, as far as we can know: where the status was lost, no EPP is to blame."""
        return self._status_lost or await self._call.code() is grpc.StatusCode.OK

    async def _how_it_ended(self) -> str:
        if await self._ended_well():
            return "the end of the stream"
        code = await self._call.code()
        return f"the gRPC error {code.name} {await self._call.details() or ''!r}"

    # --- the request -------------------------------------------------------------------------------------------------

    def headers(self, method: str = "POST", path: str = CHAT_PATH, length: int | None = None) -> dict[str, str | bytes]:
        """Of a request, as a gateway shows them."""
        found: dict[str, str | bytes] = {
            ":method": method,
            ":path": path,
            ":scheme": "http",
            ":authority": "conformance.test",
            protocol.REQUEST_ID: str(uuid.uuid4()),
        }
        if method == "POST":
            found["content-type"] = "application/json"
        if length is not None:
            found["content-length"] = str(length)
        return {**found, **self.target.options.headers}

    async def ask(
        self,
        *pieces: bytes,
        headers: wire.Headers | None = None,
        context: pb.Metadata | None = None,
        config: pb.ProtocolConfiguration | None = wire.DUPLEX,
    ) -> None:
        """Send a whole request, its body in these pieces; without any, a GET that has no body."""
        if headers is None:
            sizes = sum(map(len, pieces))
            headers = self.headers(length=sizes) if pieces else self.headers("GET", BODILESS)
        await self.send(wire.request_headers(headers, end=not pieces, context=context, config=config))
        await self.send_body(pieces, context)

    async def send_body(self, pieces: Sequence[bytes], context: pb.Metadata | None = None) -> None:
        """All of it, the last piece with the end."""
        for number, piece in enumerate(pieces, 1):
            await self.send(wire.request_body(piece, end=number == len(pieces), context=context))

    async def outcome(self, *, body: bool = True) -> Forwarded | Refused:
        """What the EPP makes of a whole request; `body`: it has one, without trailers."""
        first = await self.reply("a reply to the request's headers")
        if first.WhichOneof("response") == "immediate_response":
            return refused(first)
        if first.WhichOneof("response") != "request_headers":
            raise Failed("a reply to the request's headers before any other", kind(first))
        forwarded, end = Forwarded(first), not body
        while not end:
            reply = await self.reply("the rest of the request's body")
            if reply.WhichOneof("response") == "immediate_response":
                return refused(reply)
            piece = streamed(reply, "request_body")
            forwarded.chunks.append(piece.body)
            end = piece.end_of_stream
        return forwarded

    async def forwarded(self, *, body: bool = True) -> Forwarded:
        """The same where nothing else will do."""
        outcome = await self.outcome(body=body)
        if isinstance(outcome, Refused):
            raise Failed("a destination", str(outcome))
        return outcome

    # --- the answer --------------------------------------------------------------------------------------------------

    async def answer(self, headers: wire.Headers, *, served: str = "", end: bool = False) -> Reply:
        """Show the answer's headers; the EPP's reply. Raises Skipped if it has ended the stream by then, in order."""
        await self.send(wire.answer_headers(headers, served=served, end=end))
        expected = "a reply to the answer's headers, at once"
        data = await self._next(expected, self.target.options.reply_timeout)
        if data is None:
            if await self._ended_well():
                raise Skipped("this EPP ends its stream after the request, so gateways show it no answer")
            raise Failed(expected, await self._how_it_ended())
        reply = decoded(data)
        if reply.WhichOneof("response") != "response_headers":
            raise Failed(expected, kind(reply))
        return reply

    async def answer_piece(self) -> pb.StreamedBodyResponse:
        """The next piece of the answer's body that the EPP hands on."""
        return streamed(await self.reply("the rest of the answer's body"), "response_body")

    async def answer_chunks(self) -> list[bytes]:
        """All of them, to the one that ends the body."""
        chunks, end = [], False
        while not end:
            piece = await self.answer_piece()
            chunks.append(piece.body)
            end = piece.end_of_stream
        return chunks


@asynccontextmanager
async def talk(target: Target, channel: aio.Channel | None = None) -> AsyncIterator[Talk]:
    """A stream to the target, cancelled in the end."""
    carrier: Any = channel or target.channel  # grpc-stubs demand serializers where there are none
    made = Talk(target, carrier.stream_stream(_METHOD)())
    reading = target.tasks.create_task(made.read())
    try:
        yield made
    finally:
        made.cancel()
        reading.cancel()
        await asyncio.wait([reading])


async def asked(target: Target, *pieces: bytes, context: pb.Metadata | None = None) -> Forwarded | Refused:
    """What becomes of one request on a stream of its own."""
    async with talk(target) as one:
        await one.ask(*pieces, context=context)
        return await one.outcome(body=bool(pieces))


async def routed(target: Target, *pieces: bytes, context: pb.Metadata | None = None) -> Forwarded:
    """The same where it has to be routed."""
    async with talk(target) as one:
        await one.ask(*pieces, context=context)
        return await one.forwarded(body=bool(pieces))
