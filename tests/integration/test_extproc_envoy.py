"""The ext_proc server behind a real Envoy, in every wiring a gateway may have."""

import asyncio
import hashlib
import io
import json
import socket
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from epp.errors import BadRequest, Rejected
from epp.extproc.server import Settings
from tests.support.ext_proc.server import LOOPBACK, Route, ext_proc_server
from tests.support.gateway import envoy

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

EVENTS = [f'data: {{"choices":[{{"delta":{{"content":"wörd {i}"}}}}]}}\n\n'.encode() for i in range(50)]
SSE = b"".join([*EVENTS, b"data: [DONE]\n\n"])


NAMED = b'{"model":"tuned","choices":[{"text":"%s"}],"usage":{}}' % (b"x" * 200_000)
NAMED_EVENTS = b'data: {"model":"tuned","choices":[]}\n\n' * 20 + b"data: [DONE]\n\n"


@dataclass
class Stack:
    """ExtProcServer, upstreams and Envoy."""

    ports: Mapping[str, int]
    route: Route
    first: str
    second: str
    sixth: str
    dead: str
    session: aiohttp.ClientSession
    hanging: asyncio.Event

    def url(self, wiring: str, path: str = "/echo") -> str:
        return f"http://127.0.0.1:{self.ports[wiring]}{path}"

    async def post(self, wiring: str, body: bytes, **headers: str) -> dict[str, Any]:
        async with self.session.post(self.url(wiring), data=io.BytesIO(body), headers=headers) as answer:
            assert answer.status == 200, await answer.text()
            reported: dict[str, Any] = await answer.json()
            return reported


class Upstream:
    """A model server of four paths."""

    def __init__(self, name: str, hanging: asyncio.Event) -> None:
        self.name = name
        self.hanging = hanging
        self.app = web.Application(client_max_size=1 << 30)
        self.app.router.add_route("*", "/echo", self.echo)
        self.app.router.add_post("/sse", self.sse)
        self.app.router.add_post("/hang", self.hang)
        self.app.router.add_post("/fails", self.fails)
        self.app.router.add_post("/named", self.named)
        self.app.router.add_post("/named-events", self.named_events)

    async def echo(self, request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response(
            {
                "by": self.name,
                "size": len(body),
                "sha": hashlib.sha256(body).hexdigest(),
                "headers": {k.lower(): v.encode("utf-8", "surrogateescape").hex() for k, v in request.headers.items()},
            }
        )

    async def sse(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for event in (*EVENTS, b"data: [DONE]\n\n"):
            await answer.write(event)
            await asyncio.sleep(0)
        return answer

    async def hang(self, request: web.Request) -> web.StreamResponse:
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(EVENTS[0])
        await self.hanging.wait()
        return answer

    async def named(self, request: web.Request) -> web.Response:
        return web.Response(body=NAMED, content_type="application/json")

    async def named_events(self, request: web.Request) -> web.StreamResponse:
        """Events in pieces that end in the middle of the name."""
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        for at in range(0, len(NAMED_EVENTS), 17):
            await answer.write(NAMED_EVENTS[at : at + 17])
            await asyncio.sleep(0.001)
        return answer

    async def fails(self, request: web.Request) -> web.Response:
        return web.json_response({"error": {"message": "no such model"}}, status=404)


@asynccontextmanager
async def upstream(name: str, host: str, hanging: asyncio.Event) -> AsyncIterator[str]:
    runner = web.AppRunner(Upstream(name, hanging).app, shutdown_timeout=1)
    await runner.setup()
    site = web.TCPSite(runner, host, 0)
    await site.start()
    port = runner.addresses[0][1]
    try:
        yield f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    finally:
        hanging.set()
        await runner.cleanup()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def everything(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    folder: Path = tmp_path_factory.mktemp("envoy")
    route, hanging = Route(), asyncio.Event()
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # bound and never listening: connections are refused
        dead = f"127.0.0.1:{nobody.getsockname()[1]}"
        async with (
            upstream("first", "127.0.0.1", hanging) as first,
            upstream("second", "127.0.0.1", hanging) as second,
            upstream("sixth", "::1", hanging) as sixth,
            ext_proc_server(route, Settings(listen=LOOPBACK, health=LOOPBACK)) as served,
            ext_proc_server(route, Settings(listen=LOOPBACK, health=LOOPBACK, watch_answers=1.0)) as watching,
            envoy.running(served.ports[0], [first, second, sixth, dead], folder, watching.ports[0]) as ports,
            aiohttp.ClientSession() as session,
        ):
            yield Stack(ports, route, first, second, sixth, dead, session, hanging)


@pytest_asyncio.fixture(loop_scope="module")
async def stack(everything: Stack) -> Stack:
    route = everything.route
    await route.until(lambda: route.left == route.entered)  # the last test's streams may still be closing
    everything.route.reset(everything.first)
    everything.hanging.clear()
    return everything


wirings = pytest.mark.parametrize("wiring", envoy.WIRINGS)


async def done(stack: Stack, requests: int = 1) -> None:
    await stack.route.until(lambda: stack.route.left == requests)
    assert stack.route.entered == requests


@wirings
async def test_an_answer_comes_from_the_destination(stack: Stack, wiring: str) -> None:
    for number, (name, address) in enumerate([("second", stack.second), ("first", stack.first)], 1):
        stack.route.destination = address
        reported = await stack.post(wiring, b'{"model": "m"}')
        assert reported["by"] == name
        await done(stack, number)
        (answered, *_) = stack.route.ways[-1].seen
        assert (answered.status, answered.served) == (200, address)  # type: ignore[union-attr]
        assert stack.route.ways[-1].raw.body == b'{"model": "m"}'


@wirings
async def test_a_large_body_arrives_whole(stack: Stack, wiring: str) -> None:
    body = bytes(range(256)) * (4 << 12)  # 4 MiB
    reported = await stack.post(wiring, body)
    assert (reported["size"], reported["sha"]) == (len(body), hashlib.sha256(body).hexdigest())
    await done(stack)
    assert stack.route.ways[0].raw.body == body


@wirings
async def test_another_body_and_headers_arrive(stack: Stack, wiring: str) -> None:
    body = bytes(range(256)) * 1_000
    stack.route.body, stack.route.headers = body, {"x-more": "1"}
    reported = await stack.post(wiring, bytes(300_000), **{"x-llm-d-inference-objective": "vip"})
    assert (reported["size"], reported["sha"]) == (len(body), hashlib.sha256(body).hexdigest())
    assert reported["headers"]["x-more"] == b"1".hex()
    assert "x-llm-d-inference-objective" not in reported["headers"]


@wirings
async def test_get(stack: Stack, wiring: str) -> None:
    async with stack.session.get(stack.url(wiring)) as answer:
        assert (await answer.json())["by"] == "first"
    await done(stack)
    assert stack.route.ways[0].raw.method == "GET"


@wirings
async def test_events_are_byte_identical(stack: Stack, wiring: str) -> None:
    async with stack.session.post(stack.url(wiring, "/sse"), data=b"{}") as answer:
        assert await answer.read() == SSE
    await done(stack)


@wirings
async def test_an_error_of_the_upstream_passes(stack: Stack, wiring: str) -> None:
    async with stack.session.post(stack.url(wiring, "/fails"), data=b"{}") as answer:
        assert (answer.status, await answer.json()) == (404, {"error": {"message": "no such model"}})
    await done(stack)


@wirings
@pytest.mark.parametrize("error", [Rejected("full"), BadRequest("no model", param="model")])
async def test_an_error_of_ours_is_the_answer(stack: Stack, wiring: str, error: Rejected | BadRequest) -> None:
    stack.route.error = error
    async with stack.session.post(stack.url(wiring), data=b"{}") as answer:
        assert answer.status == error.status
        assert answer.content_type == "application/json"
        assert answer.headers.get("x-llm-d-request-dropped-reason") == error.reason
        assert json.loads(await answer.read())["error"] == {
            "message": error.message, "type": error.kind, "param": error.param, "code": error.reason,
        }  # fmt: skip
    await done(stack)


@wirings
async def test_the_fallback_list_is_walked(stack: Stack, wiring: str) -> None:
    stack.route.destination = f"{stack.dead},{stack.second}"
    assert (await stack.post(wiring, b"{}"))["by"] == "second"
    await done(stack)
    (answered, *_) = stack.route.ways[0].seen
    assert answered.served == stack.second  # type: ignore[union-attr]


@wirings
async def test_ipv6(stack: Stack, wiring: str) -> None:
    stack.route.destination = stack.sixth
    assert (await stack.post(wiring, b"{}"))["by"] == "sixth"
    await done(stack)
    (answered, *_) = stack.route.ways[0].seen
    assert answered.served == stack.sixth  # type: ignore[union-attr]


@wirings
async def test_a_client_that_leaves_ends_the_request(stack: Stack, wiring: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports[wiring])
    writer.write(b"POST /hang HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}")
    way = await stack.route.way()
    if wiring != "buffered":  # there the gateway holds the answer back until it is whole
        await reader.readuntil(b"[{")
    assert stack.route.left == 0
    writer.transport.abort()
    await way.left.wait()
    await done(stack)


@wirings
async def test_a_header_that_is_not_utf8(stack: Stack, wiring: str) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.ports[wiring])
    writer.write(b"POST /fails HTTP/1.1\r\nhost: x\r\nx-odd: \xff\xe9\r\ncontent-length: 2\r\n\r\n{}")
    assert (await reader.readline()).startswith(b"HTTP/1.1 404")
    writer.close()
    await done(stack)
    assert stack.route.ways[0].raw.headers["x-odd"] == "\\xff\\xe9"


async def test_the_answer_is_shown_where_the_gateway_shows_it(stack: Stack) -> None:
    for wiring in ("full-duplex", "streamed", "buffered", "buffered, then streamed"):
        stack.route.reset(stack.first)
        async with stack.session.post(stack.url(wiring, "/sse"), data=b"{}") as answer:
            await answer.read()
        await done(stack)
        way = stack.route.ways[0]
        assert way.raw.sees_answer
        assert b"".join(chunk.chunk for chunk in way.seen[1:]) == SSE  # type: ignore[union-attr]
        ends = [(wiring, chunk.end) for chunk in way.seen[1:]]  # type: ignore[union-attr]
        assert ends.count((wiring, True)) == 1


@pytest.mark.parametrize("wiring", ["overridden", "buffered-lean"])
@pytest.mark.parametrize("path", ["/sse", "/named"])
async def test_an_answer_that_was_asked_for_is_shown_and_arrives(stack: Stack, wiring: str, path: str) -> None:
    for turn in range(2):
        stack.route.reset(stack.first)
        async with stack.session.post(stack.url(f"{wiring}, watched", path), data=b"{}" * 20_000) as answer:
            read = await answer.read()
        assert read == (SSE if path == "/sse" else NAMED)
        await done(stack)
        way = stack.route.ways[0]
        assert way.raw.sees_answer or not turn
        assert b"".join(chunk.chunk for chunk in way.seen[1:]) == read  # type: ignore[union-attr]
        assert [chunk.end for chunk in way.seen[1:]].count(True) == 1  # type: ignore[union-attr]


async def test_an_answer_that_a_plugin_asked_for_is_shown(stack: Stack) -> None:
    for watched in (False, True):
        stack.route.reset(stack.first)
        stack.route.watched = watched
        async with stack.session.post(stack.url("overridden", "/sse"), data=b"{}") as answer:
            assert await answer.read() == SSE
        await done(stack)
        shown = b"".join(chunk.chunk for chunk in stack.route.ways[0].seen[1:])  # type: ignore[union-attr]
        assert shown == (SSE if watched else b"")


async def test_a_gateway_that_does_not_follow_is_not_relied_on(stack: Stack) -> None:
    for _ in range(7):
        stack.route.reset(stack.first)
        async with stack.session.post(stack.url("no override, watched", "/sse"), data=b"{}") as answer:
            assert await answer.read() == SSE
        await done(stack)
        assert len(stack.route.ways[0].seen) == 1
    assert not stack.route.ways[0].raw.sees_answer


@wirings
async def test_headers_for_the_client_arrive(stack: Stack, wiring: str) -> None:
    stack.route.answer_headers = {"x-session-token": "abc"}
    async with stack.session.post(stack.url(wiring), data=b"{}") as answer:
        assert answer.headers["x-session-token"] == "abc"


@pytest.mark.parametrize("wiring", ["full-duplex", "buffered"])
@pytest.mark.parametrize(("path", "body"), [("/named", NAMED), ("/named-events", NAMED_EVENTS)])
@pytest.mark.parametrize("asked", ["a", "the-name-the-client-knows"])
async def test_a_rewritten_model_is_named_as_it_was_asked_for(
    stack: Stack, wiring: str, path: str, body: bytes, asked: str
) -> None:
    stack.route.body, stack.route.renamed = b'{"model":"tuned"}', ("tuned", asked)
    async with stack.session.post(stack.url(wiring, path), data=b"{}") as answer:
        assert answer.status == 200
        assert await answer.read() == body.replace(b"tuned", asked.encode())
    await done(stack)


async def test_where_answers_are_streamed_a_whole_piece_is_renamed(stack: Stack) -> None:
    stack.route.body, stack.route.renamed = b'{"model":"tuned"}', ("tuned", "the-name-the-client-knows")
    async with stack.session.post(stack.url("streamed", "/named"), data=b"{}") as answer:
        assert await answer.read() == NAMED.replace(b"tuned", b"the-name-the-client-knows")
    await done(stack)


async def test_where_answers_are_not_shown_the_endpoints_name_stays(stack: Stack) -> None:
    stack.route.body, stack.route.renamed = b'{"model":"tuned"}', ("tuned", "a")
    async with stack.session.post(stack.url("lean", "/named"), data=b"{}") as answer:
        assert await answer.read() == NAMED
    await done(stack)


async def test_what_is_larger_than_the_gateway_buffers_is_refused_by_the_gateway(stack: Stack) -> None:
    body = io.BytesIO(bytes(envoy.BODY_LIMIT + 1))
    async with stack.session.post(stack.url("buffered"), data=body) as answer:
        assert (answer.status, await answer.text()) == (413, "Payload Too Large")
