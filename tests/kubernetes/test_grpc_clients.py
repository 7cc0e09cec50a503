"""grpc-go and tonic as clients of the ext_proc server. In this lane, since Go and Rust build them."""

import asyncio
import base64
import shutil
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from epp.extproc.server import ExtProcServer, Settings
from epp.telemetry.metrics import Metrics
from tests.support.ext_proc.messages import (
    DUPLEX,
    TO,
    answer_body,
    answer_headers,
    request_body,
    request_headers,
    short,
    words,
)  # fmt: skip
from tests.support.ext_proc.server import LOOPBACK, Route

pytestmark = pytest.mark.kubernetes


class Client:
    """tests/support/grpc_go or tonic, which does one step a line."""

    def __init__(self, process: Process) -> None:
        self._process = process

    def do(self, *steps: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("".join(f"{step}\n" for step in steps).encode())

    def send(self, *messages: bytes) -> None:
        self.do(*(f"send {base64.b64encode(message).decode()}" for message in messages))

    async def said(self, step: str) -> str:
        assert self._process.stdout is not None
        self.do(step)
        return (await self._process.stdout.readline()).decode().strip()

    async def received(self) -> str:
        """The next reply, in words; or how the stream ended."""
        line = await self.said("receive")
        try:
            return words(base64.b64decode(line, validate=True))
        except ValueError:
            return line

    async def routed(self, body: bytes) -> None:
        self.do("open")
        self.send(request_headers(config=DUPLEX), request_body(body, end=True))
        assert await self.received() == f"request headers to {TO}"


@pytest.fixture(params=["grpc-go-client", "tonic-client"])
def program(request: pytest.FixtureRequest) -> str:
    found: str | None = shutil.which(request.param)
    assert found is not None, f"{request.param} is not there; `hack/test kubernetes` builds it"
    return found


@asynccontextmanager
async def serving(program: str, route: Route) -> AsyncIterator[tuple[ExtProcServer, Client]]:
    served = ExtProcServer(route, Metrics(), Settings(listen=LOOPBACK, health=LOOPBACK))
    await served.start()
    served.set_ready(True)
    address = f"127.0.0.1:{served.ports[0]}"
    process = await asyncio.create_subprocess_exec(program, address, stdin=PIPE, stdout=PIPE, limit=1 << 26)
    try:
        async with asyncio.timeout(60):
            yield served, Client(process)
    finally:
        process.kill()
        await process.wait()
        await served.drain(0)


async def test_a_request_and_its_answer_in_pieces(program: str) -> None:
    route = Route(TO)
    async with serving(program, route) as (_, client):
        await client.routed(b"{}")
        assert await client.received() == "request body echo '{}' end"
        client.send(answer_headers())
        assert await client.received() == "answer headers"
        for piece in (b"some", b"words", b"x" * 300, b"more"):
            client.send(answer_body(piece, served=TO))
            assert await client.received() == f"answer body echo {short(piece)}"
        client.send(answer_body(b"", end=True, served=TO))
        assert await client.received() == "answer body echo '' end"
        client.do("close")
        assert await client.received() == "end"
        assert (route.entered, route.left) == (1, 1)


async def test_a_message_of_many_megabytes(program: str) -> None:
    async with serving(program, Route(TO)) as (served, client):
        await client.routed(bytes(10 << 20))
        replies = [await client.received()]
        while not replies[-1].endswith(" end"):
            replies.append(await client.received())
        assert set(replies[:-1]) == {"request body echo 62000 bytes"}
        assert len(replies) == -(-(10 << 20) // 62_000)
        client.do("close")
        assert await client.received() == "end"
        assert served.memory.held == 0


async def test_a_call_that_is_cancelled_ends_the_request(program: str) -> None:
    route = Route(TO)
    async with serving(program, route) as (_, client):
        await client.routed(b"{}")
        client.do("cancel")
        await route.until(lambda: route.left == 1)
        assert await client.said("check ") == "SERVING OK"


async def test_health_is_checked_and_watched(program: str) -> None:
    async with serving(program, Route(TO)) as (served, client):
        assert await client.said("check inference-extension") == "SERVING OK"
        assert await client.said("watch ") == "SERVING OK"
        for ready, status in ((False, "NOT_SERVING OK"), (True, "SERVING OK")):
            served.set_ready(ready)
            assert await client.said("watch ") == status


async def test_a_drain_lets_the_request_end_and_takes_no_other(program: str) -> None:
    async with serving(program, Route(TO)) as (served, client):
        assert await client.said("watch ") == "SERVING OK"
        await client.routed(b"{}")
        assert await client.received() == "request body echo '{}' end"
        draining = asyncio.ensure_future(served.drain(10))
        assert await client.said("watch ") == "NOT_SERVING OK"
        assert await client.said("watch ") == "UNKNOWN Unavailable"
        client.send(answer_headers(), answer_body(b"word", end=True))
        assert await client.received() == "answer headers"
        assert await client.received() == "answer body echo 'word' end"
        assert not draining.done()
        client.do("close")
        assert await client.received() == "end"
        await draining
        assert await client.said("check ") == "UNKNOWN Unavailable"
