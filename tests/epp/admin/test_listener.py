"""Connections of the admin port from raw sockets, on both event loops: silent ones, slow ones, too many of them."""

import asyncio
import contextlib
import resource
import ssl
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
import uvloop

from epp.admin import listener, server
from epp.admin.recorder import Decisions
from epp.admin.server import AdminServer, AdminSettings
from epp.extproc.tls import make_pair
from epp.telemetry.metrics import Metrics

Loop = Callable[[], asyncio.AbstractEventLoop]
LOOPS = pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
HEALTHY = b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


class Peer:
    """A raw client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def says(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def hears(self) -> str:
        """One answer."""
        head = (await self.reader.readuntil(b"\r\n\r\n")).decode()
        length = next(int(line[16:]) for line in head.splitlines() if line.lower().startswith("content-length: "))
        return head + (await self.reader.readexactly(length)).decode()

    async def ended(self) -> bool:
        """Whether the server ends the connection, within some seconds."""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(5):
                while await self.reader.read(65536):
                    pass
        return True


PEERS: list[Peer] = []
"""All there are; they are closed with their server."""


async def peer(port: int, tls: ssl.SSLContext | None = None) -> Peer:
    PEERS.append(Peer(*await asyncio.open_connection("127.0.0.1", port, ssl=tls)))
    return PEERS[-1]


def running(loop: Loop, play: Callable[[AdminServer], Awaitable[None]], tls: ssl.SSLContext | None = None) -> None:
    async def whole() -> None:
        made = AdminServer(Metrics(), [], Decisions(), list, lambda: "x" * (32 << 20), AdminSettings(port=0, tls=tls))
        try:
            async with asyncio.timeout(30), made:
                await play(made)
        finally:
            for each in PEERS:
                each.writer.transport.abort()
            await asyncio.sleep(0.01)
            PEERS.clear()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(whole())


@LOOPS
def test_idle_connections_make_room_for_new_ones_the_longest_idle_first(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 4)

    async def play(made: AdminServer) -> None:
        silent = [await peer(made.port) for _ in range(3)]
        kept = await peer(made.port)
        await kept.says(HEALTHY)
        assert "200 OK" in await kept.hears()
        for _ in range(3):  # as many again: the silent ones go, the one that asked last stays
            late = await peer(made.port)
            await late.says(HEALTHY)
            assert "200 OK" in await late.hears()
            late.writer.close()
            await late.ended()
            silent.append(await peer(made.port))
        assert all([await each.ended() for each in silent[:3]])
        assert len(made._runner.server.connections) <= 4 if made._runner.server else False

    running(loop, play)


@LOOPS
def test_a_thousand_silent_connections_do_not_keep_a_probe_out(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 8)

    async def play(made: AdminServer) -> None:
        silent: list[Peer] = []
        for _ in range(200):
            with contextlib.suppress(ConnectionError):
                silent.append(await peer(made.port))
        probe = await peer(made.port)
        await probe.says(HEALTHY)
        assert "200 OK" in await probe.hears()
        assert made._runner.server is not None
        assert len(made._runner.server.connections) <= 8 + 1  # one may be on its way out
        for each in silent:
            each.writer.close()

    running(loop, play)


@LOOPS
@pytest.mark.parametrize("said", [b"", b"GET /healthz HT", b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-A: "])
def test_headers_that_do_not_come_end_the_connection(loop: Loop, said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "REQUEST_S", 0.2)

    async def play(made: AdminServer) -> None:
        slow = await peer(made.port)
        await slow.says(said)

        async def drip() -> None:
            with contextlib.suppress(ConnectionError):
                while said:
                    await slow.says(b"a")
                    await asyncio.sleep(0.02)

        dripping = asyncio.ensure_future(drip())
        assert await slow.ended()
        dripping.cancel()

    running(loop, play)


@LOOPS
def test_a_connection_that_is_kept_ends_when_the_next_request_does_not_come(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "IDLE_S", 0.2)

    async def play(made: AdminServer) -> None:
        kept = await peer(made.port)
        for _ in range(2):
            await kept.says(HEALTHY)
            assert "200 OK" in await kept.hears()
        await kept.says(b"GET /")
        assert await kept.ended()

    running(loop, play)


ASK = b"GET /config HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"


@LOOPS
def test_answers_that_are_not_taken_are_few(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SENDING", 48 << 20)

    async def play(made: AdminServer) -> None:
        deaf = await peer(made.port)
        await deaf.says(ASK)
        while not made._sending:
            await asyncio.sleep(0.01)
        other = await peer(made.port)
        await other.says(ASK)
        answer = await other.hears()
        assert " 503 " in answer
        assert "Retry-After: 5" in answer

    running(loop, play)


@LOOPS
def test_who_does_not_take_an_answer_loses_it(loop: Loop, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "SEND_S", 0.2)

    async def play(made: AdminServer) -> None:
        deaf = await peer(made.port)
        await deaf.says(ASK)
        while not made._sending:
            await asyncio.sleep(0.01)
        while made._sending:
            await asyncio.sleep(0.01)
        assert await deaf.ended()

    running(loop, play)


@LOOPS
@pytest.mark.parametrize(
    "request_",
    [
        b"GET /" + b"a" * 20_000 + b" HTTP/1.1\r\nHost: a\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nX-Long: " + b"a" * 20_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"X-Many: a\r\n" * 1000 + b"\r\n",
        b"\x16\x03\x01\x02\x00 not http\r\n\r\n",
    ],
)
def test_requests_beyond_the_bounds_are_refused_without_a_trace(
    loop: Loop, request_: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    async def play(made: AdminServer) -> None:
        asking = await peer(made.port)
        await asking.says(request_)
        assert " 400 " in (await asking.reader.readline()).decode()
        assert await asking.ended()

    running(loop, play)
    assert not caplog.records


@LOOPS
def test_a_body_that_never_ends_is_not_waited_for(loop: Loop) -> None:
    async def play(made: AdminServer) -> None:
        asking = await peer(made.port)
        await asking.says(b"GET /healthz HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n" + b"a" * 1000)
        assert "200 OK" in await asking.hears()
        assert await asking.ended()

    running(loop, play)


@LOOPS
def test_a_handshake_that_does_not_come_takes_no_place_for_long(
    loop: Loop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "most_connections", lambda: 4)
    for name, content in zip(("tls.key", "tls.crt"), make_pair(), strict=True):
        (tmp_path / name).write_bytes(content)
    ours = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    ours.load_cert_chain(tmp_path / "tls.crt", tmp_path / "tls.key")
    theirs = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    theirs.check_hostname = False
    theirs.verify_mode = ssl.CERT_NONE

    async def play(made: AdminServer) -> None:
        silent = [await peer(made.port) for _ in range(10)]
        wrong = await peer(made.port)
        await wrong.says(HEALTHY)  # no TLS
        for _ in range(3):
            probe = await peer(made.port, theirs)
            await probe.says(HEALTHY)
            assert "200 OK" in await probe.hears()
        assert all([await each.ended() for each in silent[:6]])

    running(loop, play, ours)


def test_a_share_of_the_file_descriptors_is_for_these_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for allowed in (16, 128, 1024, resource.RLIM_INFINITY):
        monkeypatch.setattr(resource, "getrlimit", lambda _, allowed=allowed: (allowed, allowed))
        found.append(listener.most_connections())
    assert found == [4, 16, 64, 64]
