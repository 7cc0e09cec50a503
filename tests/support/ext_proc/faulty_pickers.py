"""A correct endpoint picker, and faulty ones before it that each change one thing, for a conformance suite to
notice.
"""

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, TypeAlias

import grpc
import msgspec
from grpc import aio
from grpc_health.v1 import health_pb2

from epp import protocol
from epp.errors import NoEndpoint
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.parsing.body import Chat, decode
from epp.parsing.request import NO_HEADERS, RawRequest
from epp.route import RoutedRequest
from tests.support.ext_proc.server import Gateway, ext_proc_server
from tooling.conformance.suite import CASES, Result, outcome
from tooling.conformance.target import ConformanceOptions, host_and_port, reach

Request: TypeAlias = pb.ProcessingRequest
Reply: TypeAlias = pb.ProcessingResponse
Status: TypeAlias = health_pb2.HealthCheckResponse
ENDPOINTS: Final = ("127.0.0.11:8000", "127.0.0.11:8001", "127.0.0.12:8000", "[::1]:8000")
ALL: Final = frozenset(case.id for case in CASES)
HEAVY: Final = frozenset({"2.3", "2.10", "2.11", "4.4", "6.2", "8.3"})
LIGHT: Final = ALL - HEAVY - {"6.10"}
"""Without those of many bytes, messages or streams, and that of WebSockets, which most faults break: they run where
they are the point.
"""
_CHAT: Final = msgspec.json.Decoder(Chat)


class Picked(RoutedRequest):
    """A request that goes to `destination` as it came."""

    headers = NO_HEADERS
    renamed = None
    watched = False

    def __init__(self, destination: str) -> None:
        self.destination = destination
        self.body = None

    def answered(
        self, status: int, served: str, content_type: str = "", prefill_fallback: str = ""
    ) -> Mapping[str, str]:
        return NO_HEADERS

    def answer_chunk(self, chunk: bytes, *, end: bool) -> None:
        pass


class ByBody:
    """A route that spreads different bodies over `ENDPOINTS` and refuses chat completions that are none."""

    @asynccontextmanager
    async def __call__(self, raw: RawRequest) -> AsyncIterator[Picked]:
        if raw.path.endswith("/chat/completions"):
            decode(_CHAT, raw.body).model_name()
        fit = [known for known in ENDPOINTS if raw.subset is None or {known, _ip(known)} & set(raw.subset)]
        if not fit:
            raise NoEndpoint("none of the subset is here")
        yield Picked(fit[sum(raw.body) % len(fit)])


def _ip(endpoint: str) -> str:
    address = host_and_port(endpoint)
    assert address is not None
    return address[0]


class Broken(Exception):
    """The faulty picker ends the stream with a gRPC error."""


class Left(Exception):
    """The faulty picker ends the stream in order."""


class Bend:
    """What a faulty picker does to one stream; this one, nothing. A subclass changes one thing."""

    obeys_half_close = True
    server_options: tuple[tuple[str, int], ...] = (("grpc.max_receive_message_length", -1),)

    def asked(self, message: Request) -> Iterable[Request]:
        """Instead of a message to the correct EPP."""
        yield message

    def early(self, message: Request) -> Iterable[Reply]:
        """Said at once when a message comes."""
        return ()

    def said(self, reply: Reply) -> Iterable[Reply]:
        """Instead of a reply of the correct EPP."""
        yield reply

    @staticmethod
    def health(service: str) -> Any:
        return Status.SERVING


class BentDoor:
    def __init__(self, bend: type[Bend], inner: aio.Channel) -> None:
        self._bend = bend
        self._inner: Any = inner

    async def process(self, _: Any, context: Any) -> None:
        bend = self._bend()
        call = self._inner.stream_stream(f"/{protocol.EXT_PROC_SERVICE}/Process")()
        try:
            async with asyncio.TaskGroup() as tasks:
                asking = tasks.create_task(self._ask(bend, call, context))
                while isinstance(data := await call.read(), bytes):
                    for reply in bend.said(Reply.FromString(data)):
                        await context.write(reply.SerializeToString())
                if bend.obeys_half_close or not asking.done():
                    asking.cancel()
                else:
                    await asyncio.Event().wait()
        except* Broken:
            context.set_code(grpc.StatusCode.INTERNAL)
        except* (Left, aio.BaseError):
            pass
        finally:
            call.cancel()

    async def _ask(self, bend: Bend, call: Any, context: Any) -> None:
        with suppress(asyncio.InvalidStateError, aio.AioRpcError):
            while isinstance(data := await context.read(), bytes):
                message = Request.FromString(data)
                for reply in bend.early(message):
                    await context.write(reply.SerializeToString())
                for asked in bend.asked(message):
                    await call.write(asked.SerializeToString())
            await call.done_writing()

    async def check(self, request: Any, context: Any) -> Any:
        return Status(status=self._bend.health(request.service))


@asynccontextmanager
async def bent(bend: type[Bend]) -> AsyncIterator[int]:
    """The port of a faulty picker; health answers there too."""
    async with ext_proc_server(ByBody()) as correct, Gateway(correct.ports[0]) as inner:
        made = BentDoor(bend, inner.channel)
        server = aio.server(options=bend.server_options)
        check = grpc.unary_unary_rpc_method_handler(
            made.check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=Status.SerializeToString,
        )
        process = {"Process": grpc.stream_stream_rpc_method_handler(made.process)}
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(protocol.EXT_PROC_SERVICE, process),
                grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check}),
            )
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield port
        finally:
            await server.stop(0)


async def results(bend: type[Bend], cases: frozenset[str] = LIGHT) -> list[Result]:
    """All cases at once, so that those that wait for what does not come wait together, and long enough for a machine
    that does much besides.
    """
    async with bent(bend) as port:
        at = f"127.0.0.1:{port}"
        async with reach(ConformanceOptions(at, endpoints=ENDPOINTS, health=at, reply_timeout=6, quiet=0.5)) as target:
            return await asyncio.gather(*(outcome(case, target) for case in CASES if case.id in cases))


async def failing(bend: type[Bend], cases: frozenset[str] = LIGHT) -> set[str]:
    """Ids of the cases that fail before a faulty picker; nothing may be skipped."""
    found = await results(bend, cases)
    assert [result for result in found if result.outcome == "skip"] == []
    return {result.case.id for result in found if result.outcome == "fail"}


# --- bends that several groups notice, and tools for others ----------------------------------------------------------


def set_header(reply: Reply, name: str) -> pb.HeaderValueOption | None:
    """Of a reply to the request's headers."""
    if not reply.HasField("request_headers"):
        return None
    options = reply.request_headers.response.header_mutation.set_headers
    return next((option for option in options if option.header.key == name.encode()), None)


def subset_of(message: Request) -> pb.Value | None:
    """The restriction in a request's metadata."""
    for entry in message.metadata_context.filter_metadata:
        if entry.key == protocol.SUBSET_NAMESPACE.encode():
            return entry.value.fields[0].value
    return None


class Together(Bend):
    """Collects a body's pieces to the last; `changed` makes another body of it."""

    which = "request_body"

    def __init__(self) -> None:
        self.held = b""

    def said(self, reply: Reply) -> Iterable[Reply]:
        if (piece := piece_of(reply, self.which)) is None:
            if self.held and reply.WhichOneof("response") == "request_trailers":
                yield Reply(request_body=pb.BodyResponse(response=streamed(self.changed(self.held))))
            yield reply
            return
        self.held += piece.body
        if piece.end_of_stream:
            piece.body = self.changed(self.held)
            yield reply

    def changed(self, body: bytes) -> bytes:
        return body


def piece_of(reply: Reply, which: str) -> pb.StreamedBodyResponse | None:
    """Of a body in full duplex; None for any other reply."""
    if reply.WhichOneof("response") != which:
        return None
    mutation = getattr(reply, which).response.body_mutation
    return mutation.streamed_response if mutation.HasField("streamed_response") else None


def streamed(body: bytes, *, end: bool = False) -> pb.CommonResponse:
    piece = pb.StreamedBodyResponse(body=body, end_of_stream=end)
    return pb.CommonResponse(body_mutation=pb.BodyMutation(streamed_response=piece))
