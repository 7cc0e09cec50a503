"""Both ext_proc servers over real sockets: the same scripts, and everything a socket adds."""

import asyncio
import logging
import random
import resource
import tracemalloc
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing, suppress

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2
from h2.connection import H2Connection

from epp import protocol
from epp.errors import BadRequest, ConfigError, NoEndpoint
from epp.extproc import server
from epp.extproc.grpc_server import GrpcServer
from epp.extproc.server import Deadlines, ExtProcServer, Settings
from epp.extproc.stream import AnswerChunk, Memory
from epp.telemetry.metrics import Metrics
from tests.support.ext_proc.hostile import mutated
from tests.support.ext_proc.messages import (
    DUPLEX,
    HEADERS,
    LEAN,
    TO,
    Script,
    answer_body,
    answer_headers,
    request_body,
    request_headers,
    short,
)  # fmt: skip
from tests.support.ext_proc.scripts import BIG, SCRIPTS
from tests.support.ext_proc.server import LOOPBACK, Call, Gateway, Route, ext_proc_server, failing
from tests.support.scheduling.degradations import RecordedMetrics

ROUTED = f"request headers to {TO}"
AnyServer = ExtProcServer | GrpcServer


@pytest.fixture(autouse=True, params=[ExtProcServer, GrpcServer], ids=["http2", "grpc"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> type[AnyServer]:
    monkeypatch.setattr("tests.support.ext_proc.server.KIND", [request.param])
    made: type[AnyServer] = request.param
    return made


def settings(**changes: float) -> Settings:
    return Settings(listen=LOOPBACK, health=LOOPBACK, **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def serving(route: Route, **changes: float) -> AsyncIterator[tuple[AnyServer, Gateway]]:
    async with asyncio.timeout(20), ext_proc_server(route, settings(**changes)) as served:
        async with Gateway(served.ports[0]) as gateway:
            yield served, gateway


async def routed(gateway: Gateway, *, config: object = LEAN) -> Call:
    """A stream whose request is on its way."""
    call = gateway.stream()
    await call.write(request_headers(config=config))  # type: ignore[arg-type]
    await call.write(request_body(b"{}", end=True))
    assert "request headers to" in await call.said()
    assert await call.said() == "request body echo '{}' end"
    return call


async def test_the_scripts_over_a_socket() -> None:
    for script in SCRIPTS:
        await play(script)


async def play(script: Script) -> None:
    route = Route(TO)
    route.headers, route.body, route.error = script.headers, script.body, script.error
    route.answer_headers = script.answer_headers
    async with serving(route, max_body=1 << 20) as (_, gateway):
        call = gateway.stream()
        for message, expected in script.steps:
            await call.write(message)
            got = [await call.said() for _ in expected]
            assert got == expected, script.name
        if script.ends:
            await call.ended()
        else:
            assert await call.rest() == [], script.name
            assert await call.code() is grpc.StatusCode.OK
        assert (route.entered, route.left) == (script.routes, script.routes), script.name
        if script.seen is not None and route.ways:
            assert route.ways[0].seen == script.seen, script.name


# --- leaving the route -----------------------------------------------------------------------------------------------


async def test_half_close_after_the_request_ends_the_answer() -> None:
    route = Route(TO)
    async with serving(route) as (_, gateway):
        call = await routed(gateway)
        assert (route.entered, route.left) == (1, 0)
        assert await call.rest() == []
        assert await call.code() is grpc.StatusCode.OK
        assert (route.entered, route.left) == (1, 1)
        assert route.ways[0].error is None


async def test_half_close_together_with_the_request_still_gets_the_decision() -> None:
    route = Route(TO)
    async with serving(route) as (_, gateway):
        call = gateway.stream()
        await call.write(request_headers(config=None))
        await call.write(request_body(BIG, end=True))
        assert (await call.rest())[0] == ROUTED
        assert route.left == 1


async def test_a_gateway_that_cancels_ends_the_request() -> None:
    route = Route(TO)
    async with serving(route) as (_, gateway):
        call = await routed(gateway)
        call.cancel()
        await (await route.way()).left.wait()
        assert (route.entered, route.left) == (1, 1)


async def test_a_gateway_that_cancels_while_it_waits_ends_the_decision() -> None:
    route = Route(TO)
    route.wait = asyncio.Event()
    async with serving(route) as (_, gateway):
        call = gateway.stream()
        await call.write(request_headers(end=True))
        await route.until(lambda: route.entered == 1)
        call.cancel()
        await route.until(lambda: route.left == 1)
        assert route.ways == []


async def test_a_connection_that_breaks_ends_all_its_requests() -> None:
    route = Route(TO)
    async with serving(route) as (served, _):
        gateway = Gateway(served.ports[0])
        calls = [await routed(gateway) for _ in range(5)]
        await gateway.channel.close()
        for number in range(5):
            await (await route.way(number)).left.wait()
        assert len(calls) == route.left == 5


async def test_a_stream_that_ends_before_its_request_is_complete_is_never_routed() -> None:
    route = Route(TO)
    async with serving(route) as (served, gateway):
        call = gateway.stream()
        await call.write(request_headers())
        await call.write(request_body(b"{"))
        assert await call.rest() == []
        assert route.entered == 0
        assert served.memory.held == 0


async def test_a_broken_stream_harms_no_other() -> None:
    route = Route(TO)
    async with serving(route) as (_, gateway):
        good = await routed(gateway)
        bad = [gateway.stream() for _ in range(20)]
        for call in bad:
            await call.write(b"\xff\xff")
        assert {await call.said() for call in bad} == {"refused 400 invalid_request_error"}
        await good.write(answer_headers())
        assert await good.said() == "answer headers"


# --- errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (BadRequest("no model", param="model"), "refused 400 invalid_request_error"),
        (NoEndpoint("nobody"), "refused 503 service_unavailable_error rejected-no-endpoints"),
    ],
)
async def test_an_error_of_the_route_is_the_answer(error: BadRequest, answer: str) -> None:
    async with serving(failing(error)) as (_, gateway):
        call = gateway.stream()
        await call.write(request_headers(end=True))
        assert await call.said() == answer
        assert await call.ended() is grpc.StatusCode.OK


async def test_refusals_are_counted_by_status_and_reason_wherever_they_come_from() -> None:
    metrics = Metrics()
    async with (
        ext_proc_server(failing(NoEndpoint("nobody")), metrics=metrics) as served,
        Gateway(served.ports[0]) as gateway,
    ):
        for message in (request_headers(end=True), b"\xff"):
            call = gateway.stream()
            await call.write(message)
            assert (await call.said()).startswith("refused ")
            await call.ended()
    counted = dict(metrics.rows("warmpath_refused_total"))
    assert counted == {("503", "rejected-no-endpoints"): 1, ("400", "invalid_request_error"): 1}


async def test_a_bug_is_a_500_once_and_logged_without_its_words(caplog: pytest.LogCaptureFixture) -> None:
    route = Route()
    route.error = ValueError("the prompt: my password is hunter2")
    async with serving(route) as (_, gateway):
        call = gateway.stream()
        await call.write(request_headers(end=True))
        assert await call.said() == "refused 500 api_error"
        assert await call.ended() is grpc.StatusCode.OK
        assert (route.entered, route.left) == (1, 1)
    assert "ValueError" in caplog.text
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("fails_at", [1, 4])
async def test_a_bug_while_watching_an_answer_does_not_touch_it(
    caplog: pytest.LogCaptureFixture, fails_at: int
) -> None:
    route, metrics, looks = Route(TO), Metrics(), 0

    def bug() -> None:
        nonlocal looks
        looks += 1
        if looks == fails_at:
            raise KeyError("x")

    route.watch = bug
    async with (
        asyncio.timeout(20),
        ext_proc_server(route, metrics=metrics) as served,
        Gateway(served.ports[0]) as gateway,
    ):
        call = await routed(gateway, config=None)
        await call.write(answer_headers())
        assert await call.said() == "answer headers"
        for _ in range(6):
            await call.write(answer_body(b"x"))
            assert await call.said() == "answer body echo 'x'"
        assert await call.rest() == []
        assert route.left == 1
    assert looks == fails_at, "nothing is shown to it any more"
    count = metrics.registry.get_sample_value("warmpath_degraded_total", {"reason": "answer-not-watched"})
    assert count == 1
    assert [record.levelno for record in caplog.records].count(logging.ERROR) == 1


async def test_an_answer_of_many_pieces_is_watched_and_passed_on_whatever_comes_with_each() -> None:
    route, pieces = Route(TO), [b"some", b"words", b"x" * 300, b"", b"more", b"\x10\x01", b"y" * 62_001, b"z", b"last"]
    async with serving(route) as (served, gateway):
        call = await routed(gateway, config=DUPLEX)
        await call.write(answer_headers())
        assert await call.said() == "answer headers"
        for number, piece in enumerate(pieces):
            await call.write(answer_body(piece, served="" if number < 2 else TO.split(",")[number % 5 > 3]))
        await call.write(answer_body(b"", end=True, served=TO))
        said = [await call.said() for _ in range(len(pieces) + 2)]
        assert await call.rest() == []
        assert served.memory.held == 0
    way = await route.way()
    assert [each.chunk for each in way.seen if isinstance(each, AnswerChunk)] == [*pieces, b""]
    echoes = [*pieces[:6], b"y" * 62_000, b"y", *pieces[7:]]
    assert said == [f"answer body echo {short(each)}" for each in echoes] + ["answer body echo '' end"]


async def test_no_decision_in_time_is_a_503() -> None:
    route = Route(TO)
    route.wait = asyncio.Event()
    async with serving(route, deadline=0.05) as (_, gateway):
        call = gateway.stream()
        await call.write(request_headers(end=True))
        assert await call.said() == "refused 503 service_unavailable_error rejected-ttl-expired"
        assert await call.ended() is grpc.StatusCode.OK
        assert (route.entered, route.left) == (1, 1)


async def test_the_deadline_does_not_bound_the_answer() -> None:
    route = Route(TO)
    async with serving(route, deadline=0.4, incomplete=0.4) as (_, gateway):
        call = await routed(gateway)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.6):
                await route.ways[0].left.wait()
        await call.write(answer_headers())
        assert await call.said() == "answer headers"


async def test_a_request_that_never_becomes_complete_is_refused() -> None:
    route = Route(TO)
    metrics = RecordedMetrics()
    async with (
        ext_proc_server(route, settings(incomplete=0.05), metrics) as served,
        Gateway(served.ports[0]) as gateway,
    ):
        call = gateway.stream()
        await call.write(request_headers())
        await call.write(request_body(b"{"))
        assert await call.said() == "refused 408 invalid_request_error"
        assert await call.ended() is grpc.StatusCode.OK
        assert route.entered == 0
        assert served.memory.held == 0
    assert metrics.reasons() == ["request-incomplete"]


async def test_a_message_that_breaks_the_protocol_late_ends_the_stream_with_a_status() -> None:
    route = Route(TO)
    async with serving(route) as (_, gateway):
        call = await routed(gateway)
        await call.write(b"\xff")
        assert await call.ended() is grpc.StatusCode.INVALID_ARGUMENT
        assert route.left == 1


# --- size ------------------------------------------------------------------------------------------------------------


async def test_a_body_of_many_megabytes_in_one_message() -> None:
    route = Route(TO)
    body = bytes(9 << 20)
    async with serving(route) as (_, gateway):
        call = gateway.stream()
        await call.write(request_headers())
        await call.write(request_body(body, end=True))
        replies = await call.rest()
        assert len(replies) == 1 + -(-len(body) // protocol.MAX_CHUNK)
        assert route.ways[0].raw.body == body


async def test_a_message_beyond_the_bound_fails_its_stream_only() -> None:
    route = Route(TO)
    async with serving(route, max_body=1 << 20) as (_, gateway):
        good, bad = await routed(gateway), gateway.stream()
        await bad.write(request_headers())
        await bad.write(request_body(bytes(3 << 20)))
        assert await bad.ended() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await good.write(answer_headers())
        assert await good.said() == "answer headers"


async def test_a_gateway_that_takes_no_list_of_endpoints_is_reported_of() -> None:
    route, metrics = Route(TO), RecordedMetrics()
    async with ext_proc_server(route, settings(), metrics) as served, Gateway(served.ports[0]) as gateway:

        async def answered(status: str, to: str) -> list[str]:
            route.destination = to
            call = await routed(gateway)
            await call.write(answer_headers({":status": status}))
            assert await call.said() == "answer headers"
            await call.rest()
            return metrics.reasons()

        assert await answered("503", TO.partition(",")[0]) == []
        assert await answered("503", TO) == ["fallbacks-not-taken"]
        assert "--fallbacks" in metrics.degradations[0][1]
        for status in ("200", "503"):
            assert await answered(status, TO) == ["fallbacks-not-taken"]


# --- what all streams together may hold ------------------------------------------------------------------------------

FULL = "refused 429 rate_limit_error rejected-saturated"
MIB = 1 << 20
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


async def until(true: Callable[[], bool]) -> None:
    """Wait for something to be true of what nobody tells about."""
    async with asyncio.timeout(10):
        while not true():
            await asyncio.sleep(0.01)


async def send(gateway: Gateway, body: bytes, headers: Mapping[str, str] = HEADERS, *, end: bool = True) -> Call:
    """A stream that a request was written to and of which nothing was read."""
    call = gateway.stream()
    with suppress(aio.AioRpcError, asyncio.InvalidStateError):  # it may be refused before all of it is written
        await call.write(request_headers(headers, config=LEAN))
        await call.write(request_body(body, end=end))
    return call


async def test_bodies_are_held_until_their_gateway_has_read_them() -> None:
    route, metrics = Route(TO), RecordedMetrics()
    limits = settings(max_body=MIB, max_held=8 * MIB, incomplete=60)
    async with (
        asyncio.timeout(60),
        ext_proc_server(route, limits, metrics) as served,
        Gateway(served.ports[0]) as gateway,
    ):
        tracemalloc.start()
        try:
            calls = [await send(gateway, random.randbytes(MIB - 2000)) for _ in range(64)]
            await until(lambda: metrics.reasons().count("too-much-at-once") == 64 - route.entered)
            size, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert route.entered == 8
        assert size < 24 * MIB
        assert served.memory.held <= 8 * MIB
        assert await calls[-1].said() == FULL
        assert len(await calls[0].rest()) == 1 + -(-(MIB - 2000) // protocol.MAX_CHUNK)
        assert len(await (await send(gateway, bytes(MIB - 2000))).rest()) > 1


async def test_a_gateway_that_does_not_read_is_left() -> None:
    route, metrics = Route(TO), RecordedMetrics()
    limits = settings(incomplete=2.0)
    async with (
        asyncio.timeout(60),
        ext_proc_server(route, limits, metrics) as served,
        Gateway(served.ports[0]) as gateway,
    ):
        await send(gateway, bytes(4 * MIB))
        await route.until(lambda: route.left == 1)
        assert served.memory.held == 0
        assert metrics.reasons() == ["gateway-not-reading"]
        assert len(await (await send(gateway, b"{}")).rest()) == 2


async def test_a_gateway_that_does_not_read_an_answer_is_left() -> None:
    route, metrics = Route(TO), RecordedMetrics()
    limits = settings(incomplete=1.0)
    async with (
        asyncio.timeout(60),
        ext_proc_server(route, limits, metrics) as served,
        Gateway(served.ports[0]) as gateway,
    ):
        call = await routed(gateway, config=DUPLEX)
        await call.write(answer_headers())
        await call.write(answer_body(bytes(4 * MIB)))
        await route.until(lambda: route.left == 1)
        assert served.memory.held == 0
        assert metrics.reasons() == ["gateway-not-reading"]


@pytest.mark.parametrize("kind", [ExtProcServer], indirect=True)
async def test_a_piece_that_comes_with_the_window_for_what_was_written_before_is_waited_for() -> None:
    """One read of the socket brings the answer's piece, then the window that lets the request's body leave."""
    route, metrics = Route(TO), RecordedMetrics()
    async with asyncio.timeout(20), ext_proc_server(route, settings(incomplete=0.5), metrics) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.ports[0])
        with closing(writer):
            peer = H2Connection()
            peer.initiate_connection()
            peer.update_settings({4: 15_000})  # INITIAL_WINDOW_SIZE
            peer.increment_flow_control_window(1 << 20)
            writer.write(peer.data_to_send())
            peer.receive_data(await reader.read(4096))
            peer.send_headers(1, OPEN)
            send_messages(peer, request_headers(config=DUPLEX), request_body(bytes(30_000), end=True))
            writer.write(peer.data_to_send())
            await route.way()
            send_messages(peer, answer_headers(), answer_body(bytes(100_000)))
            peer.increment_flow_control_window(40_000, 1)
            writer.write(peer.data_to_send())
            await route.until(lambda: route.left == 1)
            assert metrics.reasons() == ["gateway-not-reading"]
            assert served.memory.held == 0


@pytest.mark.parametrize("like_one", [b"\0\0\0\0\5hello", bytes(5)], ids=["five bytes", "empty"])
async def test_a_piece_of_a_message_may_look_like_one(like_one: bytes) -> None:
    route = Route(TO)
    async with asyncio.timeout(20), ext_proc_server(route, settings()) as served:
        _, writer = await asyncio.open_connection("127.0.0.1", served.ports[0])
        with closing(writer):
            peer = H2Connection()
            peer.initiate_connection()
            peer.send_headers(1, OPEN)
            send_messages(peer, request_headers(config=DUPLEX))
            body = b"x" * 7 + like_one + b"y" * 9
            before, after = framed(request_body(body, end=True)).split(like_one)
            for piece in (before, like_one, after):
                peer.send_data(1, piece)
            writer.write(peer.data_to_send())
            assert (await route.way()).raw.body == body


async def test_messages_are_the_same_in_whatever_frames_they_come() -> None:
    """Frames of a few bytes, most of them zero, so that many of them look like messages."""
    route, draw = Route(TO), random.Random(7)
    async with asyncio.timeout(50), ext_proc_server(route, settings()) as served:
        reader, writer = await asyncio.open_connection("127.0.0.1", served.ports[0])
        with closing(writer):
            peer = H2Connection()
            peer.initiate_connection()
            writer.write(peer.data_to_send())
            peer.receive_data(await reader.read(4096))
            for number in range(150):
                stream, body = 2 * number + 1, bytes(draw.choices((0, 1, 5), (20, 1, 1), k=draw.randint(0, 60)))
                peer.send_headers(stream, OPEN)
                sent = framed(request_headers(config=DUPLEX)) + framed(request_body(body, end=True))
                while sent:
                    size = draw.choice((1, 4, 5, 5, 5, 6, 10, 500))
                    peer.send_data(stream, sent[:size])
                    sent = sent[size:]
                writer.write(peer.data_to_send())
                assert (await route.way(number)).raw.body == body


def framed(message: bytes) -> bytes:
    """As gRPC sends it."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def send_messages(peer: H2Connection, *messages: bytes) -> None:
    """On stream 1."""
    for message in map(framed, messages):
        for at in range(0, len(message), 16_384):
            peer.send_data(1, message[at : at + 16_384])


async def test_pieces_of_answers_are_on_account_too() -> None:
    route, metrics = Route(TO), RecordedMetrics()
    limits = settings(max_held=8 * MIB, incomplete=60)
    async with (
        asyncio.timeout(60),
        ext_proc_server(route, limits, metrics) as served,
        Gateway(served.ports[0]) as gateway,
    ):
        calls = [await routed(gateway, config=DUPLEX) for _ in range(12)]
        for call in calls:
            await call.write(answer_headers())
            with suppress(aio.AioRpcError, asyncio.InvalidStateError):
                await call.write(answer_body(bytes(MIB - 2000)))
        await route.until(lambda: route.left == 4)
        assert served.memory.held <= 8 * MIB
        assert metrics.reasons() == ["too-much-at-once"] * 4


async def test_headers_are_held_until_the_stream_ends() -> None:
    route = Route(TO)
    headers = {**HEADERS, "x-large": "x" * 50_000}
    async with serving(route, max_held=MIB) as (served, gateway):
        slow = [await send(gateway, b"{", headers, end=False) for _ in range(18)]
        sent = await routed(gateway)
        await (await send(gateway, b"{}", headers)).rest()
        waiting = await send(gateway, b"{}", headers)
        await route.until(lambda: route.entered == 3)
        held = served.memory.held
        assert held > 19 * 50_000
        late = [gateway.stream() for _ in range(2)]
        for call in late:  # nothing after the headers: a write to a stream that was refused is an error of its own
            await call.write(request_headers(headers, config=LEAN))
        assert await late[-1].said() == FULL
        for call in (*slow, sent, waiting, *late):
            call.cancel()
        await route.until(lambda: route.left == 3)
        await until(lambda: served.memory.held == 0)


async def test_no_more_streams_than_that(kind: type[AnyServer]) -> None:
    route, metrics = Route(TO), RecordedMetrics()
    async with ext_proc_server(route, settings(max_streams=3), metrics) as served, Gateway(served.ports[0]) as gateway:
        calls = [await routed(gateway) for _ in range(3)]
        late = gateway.stream()
        if kind is ExtProcServer:  # the other refuses unread, and a write to a stream that has ended is an error
            await late.write(request_headers())
        assert await late.said() == FULL
        assert await late.ended() is grpc.StatusCode.OK
        assert metrics.degradations == [("too-much-at-once", "3 requests are served, which is the most")]
        assert dict(metrics.rows("warmpath_refused_total")) == {("429", "rejected-saturated"): 1}
        assert await ask(served.ports[0], "") == STATUS.SERVING
        await calls[0].rest()
        await routed(gateway)


async def test_pools_of_one_process_share_what_they_may_hold() -> None:
    memory, route = Memory(MIB, most=2), Route(TO)
    async with AsyncExitStack() as stack:
        gateways = []
        for _ in range(2):
            served = ExtProcServer(route, Metrics(), settings(), memory)
            await served.start()
            stack.push_async_callback(served.drain, 0)
            gateways.append(await stack.enter_async_context(Gateway(served.ports[0])))
        for gateway in gateways:
            await routed(gateway)
        late = gateways[0].stream()
        await late.write(request_headers())
        assert await late.said() == FULL


async def test_another_body_is_let_go_of_once_it_is_sent() -> None:
    route = Route(TO)
    route.body = bytes(MIB)
    async with serving(route) as (served, gateway):
        call = await send(gateway, b"{}")
        way = await route.way()
        assert served.memory.held >= MIB
        while "end" not in await call.said():
            pass
        await until(lambda: served.memory.held < MIB)
        assert way.body is None


# --- health, drain, addresses ----------------------------------------------------------------------------------------

STATUS = health_pb2.HealthCheckResponse


async def ask(port: int, service: str) -> int:
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        check = channel.unary_unary(
            "/grpc.health.v1.Health/Check",
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=STATUS.FromString,
        )
        answer = await check(health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)


@pytest.mark.parametrize(
    "service", ["", "inference-extension", "readiness", "liveness", protocol.EXT_PROC_SERVICE, "anything"]
)
async def test_health_on_both_ports(service: str) -> None:
    async with serving(Route()) as (served, _):
        served.set_ready(False)
        for port in (*served.ports, *served.health_ports):
            assert await ask(port, service) == (STATUS.SERVING if service == "liveness" else STATUS.NOT_SERVING)
        served.set_ready(True)
        for port in (*served.ports, *served.health_ports):
            assert await ask(port, service) == STATUS.SERVING


Watched = aio.UnaryStreamCall[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]


def watch(channel: aio.Channel, service: str = "") -> Watched:
    call = channel.unary_stream(
        "/grpc.health.v1.Health/Watch",
        request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
        response_deserializer=STATUS.FromString,
    )
    made: Watched = call(health_pb2.HealthCheckRequest(service=service))
    return made


async def told(call: Watched) -> int:
    answer = await call.read()
    assert isinstance(answer, STATUS)
    return int(answer.status)


@pytest.mark.parametrize("port", ["ports", "health_ports"])
async def test_who_watches_health_is_told_each_change_until_the_drain(port: str) -> None:
    async with serving(Route()) as (served, _):
        served.set_ready(False)
        async with aio.insecure_channel(f"127.0.0.1:{getattr(served, port)[0]}") as channel:
            ready, life = watch(channel), watch(channel, "liveness")
            assert (await told(ready), await told(life)) == (STATUS.NOT_SERVING, STATUS.SERVING)
            served.set_ready(True)
            assert await told(ready) == STATUS.SERVING
            served.set_ready(True)  # which is no change
            change = asyncio.ensure_future(told(ready))  # a read that begins when the call has ended raises at once
            await asyncio.sleep(0.1)  # so it has to have begun in the client's library, which takes several turns
            draining = asyncio.ensure_future(served.drain(10))
            assert await change == STATUS.NOT_SERVING
            for call in (ready, life):
                with pytest.raises(aio.AioRpcError):
                    await call.read()
                assert await call.code() is grpc.StatusCode.UNAVAILABLE
            await draining


async def test_no_more_watch_health_than_that(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("server", "grpc_server"):
        monkeypatch.setattr(f"epp.extproc.{module}.MOST_WATCHES", 2)
    async with serving(Route()) as (served, _), aio.insecure_channel(f"127.0.0.1:{served.ports[0]}") as channel:
        first, second = watch(channel), watch(channel)
        assert (await told(first), await told(second)) == (STATUS.SERVING, STATUS.SERVING)
        third = watch(channel)
        assert await third.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        answer = None
        while answer is None:  # until the server knows that the first one left
            with suppress(aio.AioRpcError):
                answer = await told(watch(channel))
        assert answer == STATUS.SERVING


async def test_drain_says_so_takes_nothing_new_and_lets_streams_end() -> None:
    route = Route(TO)
    async with serving(route) as (served, gateway):
        call = await routed(gateway, config=DUPLEX)
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(served.drain(10))
            while await ask(served.health_ports[0], "readiness") != STATUS.NOT_SERVING:
                pass
            with pytest.raises(aio.AioRpcError) as refused:
                await ask(served.ports[0], "")
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            await call.write(answer_headers())
            assert await call.said() == "answer headers"
            assert not draining.done()
            assert await call.rest() == []
        assert route.left == 1


async def test_drain_may_linger_for_gateways_that_look_at_health() -> None:
    route = Route(TO)
    async with serving(route) as (served, gateway):
        async with asyncio.TaskGroup() as tasks:
            draining = tasks.create_task(served.drain(10, linger=60))
            while await ask(served.health_ports[0], "readiness") != STATUS.NOT_SERVING:
                pass
            call = await routed(gateway)
            assert await call.rest() == []
            draining.cancel()


async def test_drain_lets_go_of_lean_streams_at_once() -> None:
    route = Route(TO)
    async with serving(route) as (served, gateway):
        before, after = await routed(gateway), await routed(gateway)
        await after.write(answer_headers())
        assert await after.said() == "answer headers"
        await served.drain(30)
        assert [await before.code(), await after.code()] == [grpc.StatusCode.OK] * 2
        assert route.left == 2


async def test_drain_waits_for_decisions_but_not_for_their_lean_answers() -> None:
    route = Route(TO)
    route.wait = asyncio.Event()
    async with serving(route) as (served, gateway):
        call = gateway.stream()
        await call.write(request_headers(config=LEAN))
        await call.write(request_body(b"{}", end=True))
        await route.until(lambda: route.entered == 1)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(served.drain(30))
            while await ask(served.health_ports[0], "readiness") != STATUS.NOT_SERVING:
                pass
            route.wait.set()
            assert "request headers to" in await call.said()
            assert await call.said() == "request body echo '{}' end"
            assert await call.ended() is grpc.StatusCode.OK
        assert route.left == 1


async def test_drain_ends_what_outlives_its_grace() -> None:
    route = Route(TO)
    async with serving(route) as (served, gateway):
        call = await routed(gateway, config=DUPLEX)
        await served.drain(0.05)
        await route.ways[0].left.wait()
        assert await call.code() is not grpc.StatusCode.OK


async def test_a_taken_port_is_a_clear_error() -> None:
    async with serving(Route()) as (served, _):
        taken = f"127.0.0.1:{served.ports[0]}"
        second = ExtProcServer(Route(), Metrics(), Settings(listen=(taken,), health=LOOPBACK))
        with pytest.raises(
            ConfigError, match=f"--grpc-port: {taken} is in use by another process; choose another port"
        ):
            await second.start()
        await second.drain(0)


async def test_ipv6_and_several_addresses() -> None:
    async with ext_proc_server(Route(TO), Settings(listen=("127.0.0.1:0", "[::1]:0"), health=LOOPBACK)) as served:
        async with Gateway(served.ports[1], "[::1]") as gateway:
            call = gateway.stream()
            await call.write(request_headers(end=True))
            assert await call.said() == ROUTED


# --- deadlines ------------------------------------------------------------------------------------------------------


async def test_what_does_not_stop_in_time_is_called_for_once() -> None:
    lost: list[str] = []
    deadlines = Deadlines(0.01, lost.append)
    for each in ("a", "b", "c"):
        deadlines.start(each)
    deadlines.stop("b")
    deadlines.stop("b")
    await until(lambda: lost == ["a", "c"])
    await until(lambda: deadlines._timer is None)
    deadlines.start("d")
    await until(lambda: len(lost) == 3)
    assert lost == ["a", "c", "d"]


# --- hostile gateways ------------------------------------------------------------------------------------------------


async def test_mutated_streams_over_sockets_leave_as_often_as_they_enter() -> None:
    rnd = random.Random(5)
    route = Route(TO)
    streams = [mutated(rnd) for _ in range(400)]
    async with serving(route, max_body=1 << 20, incomplete=5.0) as (served, gateway):
        async with asyncio.TaskGroup() as tasks:
            for number in range(8):
                tasks.create_task(_throw(gateway, streams[number::8], rnd))
        await route.until(lambda: route.left == route.entered)
        assert len(streams) > route.entered > 100
        await until(lambda: served.memory.held == 0)  # streams that never entered have until `incomplete`
        good = await routed(gateway)
        await good.write(answer_headers())
        assert await good.said() == "answer headers"


OPEN = [
    *((":method", "POST"), (":scheme", "http"), (":path", f"/{protocol.EXT_PROC_SERVICE}/Process")),
    *((":authority", "x"), ("content-type", "application/grpc"), ("te", "trailers")),
]


async def _open_and_reset(port: int, times: int, streams: int) -> dict[int, int]:
    """A connection that opens streams and resets each at once; the server's settings."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    peer = H2Connection()
    peer.initiate_connection()
    writer.write(peer.data_to_send())
    peer.receive_data(await reader.read(4096))
    reported = {int(code): value for code, value in peer.remote_settings.items()}
    for _ in range(times):
        for _ in range(streams):
            number = peer.get_next_available_stream_id()
            peer.send_headers(number, OPEN)
            peer.reset_stream(number, 8)
        writer.write(peer.data_to_send())
        await asyncio.sleep(0.05)
    writer.close()
    return reported


async def test_streams_that_are_reset_at_once_harm_no_other_connection() -> None:
    route = Route(TO)
    async with asyncio.timeout(60), ext_proc_server(route, settings()) as served:
        async with asyncio.TaskGroup() as tasks:
            attacks = [tasks.create_task(_open_and_reset(served.ports[0], 4, 4000)) for _ in range(4)]
            while not all(attack.done() for attack in attacks):
                async with Gateway(served.ports[0]) as gateway:
                    for call in [await send(gateway, b"{}") for _ in range(4)]:
                        assert [await call.said() for _ in range(2)] == [ROUTED, "request body echo '{}' end"]
                        await call.rest()
        assert {attack.result()[3] for attack in attacks} == {Settings.max_connection_streams}


async def test_connections_beyond_the_bound_are_closed_as_they_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 3)
    async with asyncio.timeout(20), ext_proc_server(Route(TO), settings()) as served, AsyncExitStack() as stack:
        received = []
        for _ in range(5):
            reader, writer = await asyncio.open_connection("127.0.0.1", served.ports[0])
            stack.callback(writer.close)
            writer.write(PREFACE)
            received.append(bool(await reader.read(9)))
        assert received == [True, True, True, False, False]
        assert await ask(served.health_ports[0], "") == STATUS.SERVING


def test_connections_leave_half_of_the_files_to_others() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1000, hard))
        assert server.most_connections() == 500
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


async def _throw(gateway: Gateway, streams: list[list[bytes]], rnd: random.Random) -> None:
    for stream in streams:
        call = gateway.stream()
        with suppress(aio.AioRpcError, asyncio.InvalidStateError):
            for message in stream:
                await call.write(message)
            if rnd.random() < 0.2:
                call.cancel()
            else:
                await call.rest()
