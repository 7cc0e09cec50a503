import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from epp.pool.http import MAX_BODY, MAX_HEAD, AnswerReader, BadAnswer, Connection, Kept, TooLarge, host_and_port
from tests.support.process.waiting import until

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Length: 5\r\n\r\nhello"
CHUNKED = OK + b"Transfer-Encoding: chunked\r\n\r\n3;x=y\r\nhel\r\n02\r\nlo\r\n0\r\nTrailer: t\r\n\r\n"


def read(answer: bytes, size: int = 1 << 30) -> bytes | None:
    reader = AnswerReader()
    body = None
    for at in range(0, len(answer), size):
        assert body is None, "complete before its end"
        body = reader.feed(answer[at : at + size])
    return body


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("answer", [PLAIN, CHUNKED, CHUNKED.replace(b"Trailer: t\r\n", b"")])
def test_answers_cut_anywhere(answer: bytes, size: int) -> None:
    assert read(answer, size) == b"hello"


def test_an_answer_may_end_with_its_connection() -> None:
    reader = AnswerReader()
    assert reader.feed(OK + b"\r\nhel") is None
    assert reader.feed(b"lo") is None
    assert reader.eof() == b"hello"
    assert not reader.keep_alive


def test_an_empty_body_is_a_body() -> None:
    assert read(OK + b"Content-Length: 0\r\n\r\n") == b""
    assert read(OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n") == b""


@pytest.mark.parametrize(
    ("head", "kept"),
    [
        (OK, True),
        (OK + b"Connection: close\r\n", False),
        (b"HTTP/1.0 200 OK\r\n", False),
        (b"HTTP/1.0 200 OK\r\nConnection: Keep-Alive\r\n", True),
    ],
)
def test_whether_the_connection_is_kept(head: bytes, kept: bool) -> None:
    reader = AnswerReader()
    reader.feed(head + b"Content-Length: 0\r\n\r\n")
    assert reader.keep_alive is kept


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (b"HTTP/1.1 500 Oops\r\n\r\n", "status 500 Oops"),
        (b"HTTP/1.1 302 Found\r\nLocation: /x\r\n\r\n", "status 302"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP/1.1"),
        (b"SSH-2.0-x\r\n\r\n", "not HTTP/1.1"),
        (b"\x00" * (MAX_HEAD + 1), "a head of more than"),
        (OK + b"Content-Length: x\r\n\r\n", "content-length x"),
        (OK + b"Content-Length: -5\r\n\r\n", "content-length -5"),
        (OK + b"Content-Length: 99999999999999999999\r\n\r\n", "a body of more than"),
        (OK + b"Content-Length: 1\r\n\r\nhello", "more bytes than its content-length"),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 1\r\n\r\n", "content-encoding gzip"),
        (OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n", "transfer-encoding"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nxyz\r\n", "chunk size xyz"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n", "chunk size -1"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n\r\n", "chunk size"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\nfffffffffff\r\n", "a body of more than"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1" * 2000, "a chunk's size line"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc", "a chunk without its line end"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"t" * (MAX_HEAD + 10), "endless trailers"),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nmore", "bytes after its last chunk"),
    ],
)
def test_what_is_not_a_whole_good_answer_is_refused(answer: bytes, says: str) -> None:
    with pytest.raises(BadAnswer, match=says):
        read(answer)


@pytest.mark.parametrize("head", [b"", b"Transfer-Encoding: chunked\r\n"])
def test_an_endless_body_is_cut_at_the_bound(head: bytes) -> None:
    piece = b"x" * 65536
    if head:
        piece = b"10000\r\n" + piece + b"\r\n"
    reader = AnswerReader()
    reader.feed(OK + head + b"\r\n")
    for _ in range(MAX_BODY // 65536):
        assert reader.feed(piece) is None
    with pytest.raises(BadAnswer, match="a body of more than"):
        reader.feed(piece)


@pytest.mark.parametrize("rest", [b"Content-Length: 1001\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n3e9\r\n"])
def test_a_caller_may_allow_less(rest: bytes) -> None:
    with pytest.raises(TooLarge, match="a body of more than 1000 bytes"):
        AnswerReader(1000).feed(OK + rest)


def test_small_chunks_are_bounded_by_their_number() -> None:
    reader = AnswerReader()
    with pytest.raises(BadAnswer, match="more than 4096 chunks"):
        reader.feed(OK + b"Transfer-Encoding: chunked\r\n\r\n" + b"1\r\nx\r\n" * 5000)


def test_a_connection_that_ends_too_soon_is_refused() -> None:
    for part in (b"", OK, OK + b"Content-Length: 5\r\n\r\nhel"):
        reader = AnswerReader()
        reader.feed(part)
        with pytest.raises(BadAnswer, match="closed before the answer's end"):
            reader.eof()


@given(st.sampled_from([PLAIN, CHUNKED]), st.data())
def test_mutated_answers_are_read_or_refused(answer: bytes, data: st.DataObject) -> None:
    mutated = bytearray(answer)
    at = data.draw(st.integers(0, len(mutated)))
    mutated[at : at + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    size = data.draw(st.integers(1, 40))
    reader = AnswerReader()
    try:
        for start in range(0, len(mutated), size):
            if (body := reader.feed(bytes(mutated[start : start + size]))) is not None:
                break
        else:
            body = reader.eof()
    except BadAnswer:
        return
    assert len(body) <= len(mutated)


Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def connected(handler: Handler) -> AsyncIterator[Connection]:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await handler(reader, writer)
        except ConnectionError:
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    _, connection = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", port)
    try:
        async with asyncio.timeout(5):
            yield connection
    finally:
        connection.abort()
        server.close()
        await server.wait_closed()


async def used_again() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for number in range(3):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(OK + b"Content-Length: 1\r\n\r\n%d" % number)
        await reader.read()

    async with connected(serve) as connection:
        assert [await connection.exchange(b"GET / HTTP/1.1\r\n\r\n") for _ in range(3)] == [b"0", b"1", b"2"]
        assert connection.open


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_connection_is_used_again_and_again_on_either_loop(run: Callable[[Coroutine[Any, Any, None]], None]) -> None:
    run(used_again())


async def test_a_failed_or_cancelled_get_closes_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()

    async with connected(serve) as connection:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await connection.exchange(b"GET / HTTP/1.1\r\n\r\n")
        assert not connection.open
        with pytest.raises(BadAnswer, match="is closed"):
            await connection.exchange(b"GET / HTTP/1.1\r\n\r\n")


async def test_bytes_nobody_asked_for_close_the_connection() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\n")
        await reader.read()
        closed.set()

    closed = asyncio.Event()
    async with connected(serve) as connection:
        await closed.wait()
        assert not connection.open


class Server:
    """Answers each connection with as many numbered pages as `script` says for it, then hangs up; then waits."""

    def __init__(self, *script: int) -> None:
        self.script = list(script)
        self.requests: list[int] = []
        """The connection each request came over."""
        self.gone = asyncio.Event()
        """Set when a connection was closed at this side."""
        self.port = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number, pages = len(self.script), self.script.pop(0)
        try:
            for _ in range(pages):
                await reader.readuntil(b"\r\n\r\n")
                self.requests.append(number)
                writer.write(OK + b"Content-Length: 1\r\n\r\n%d" % (len(self.requests) % 10))
            await self.hang_up(reader)
        except asyncio.IncompleteReadError:
            pass
        finally:
            writer.close()
            self.gone.set()

    async def hang_up(self, reader: asyncio.StreamReader) -> None:
        """Hang up at once."""


class AfterReading(Server):
    async def hang_up(self, reader: asyncio.StreamReader) -> None:
        """Hang up on the next request instead of answering it."""
        await reader.readuntil(b"\r\n\r\n")
        self.requests.append(0)


class InTheMiddle(Server):
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PLAIN)
        await reader.readuntil(b"\r\n\r\n")
        self.requests.append(1)
        writer.write(PLAIN[:-2])
        writer.close()


@asynccontextmanager
async def kept_at(server: Server) -> AsyncIterator[Kept]:
    listening = await asyncio.start_server(server.serve, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    kept = Kept("127.0.0.1", server.port)
    try:
        async with asyncio.timeout(5):
            yield kept
    finally:
        kept.close()
        listening.close()
        await listening.wait_closed()


GET = b"GET / HTTP/1.1\r\n\r\n"


async def test_a_kept_connection_is_made_when_it_is_needed_and_used_again() -> None:
    server = Server(3)
    async with kept_at(server) as kept:
        assert not kept.open
        assert [await kept.exchange(GET) for _ in range(2)] == [b"1", b"2"]
        assert kept.open
        kept.close()
        assert not kept.open
    assert server.requests == [1, 1]


async def test_a_connection_that_was_closed_while_kept_is_replaced() -> None:
    server = Server(1, 1)
    async with kept_at(server) as kept:
        assert await kept.exchange(GET) == b"1"
        await until(lambda: not kept.open)
        assert await kept.exchange(GET) == b"2"
    assert server.requests == [2, 1]


async def test_a_connection_that_is_closed_as_it_is_asked_is_replaced_once() -> None:
    server = AfterReading(1, 0, 1)
    async with kept_at(server) as kept:
        assert await kept.exchange(GET) == b"1"
        with pytest.raises(BadAnswer, match="closed before the answer's end"):
            await kept.exchange(GET)
        assert server.requests == [3, 0, 0], "the kept one and one new one, no more"
        assert await kept.exchange(GET) == b"4"


class Refusing(Server):
    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.requests.append(0)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(PLAIN)
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n")
        writer.close()


async def test_an_answer_that_is_refused_for_its_head_is_not_asked_for_again() -> None:
    server = Refusing()
    async with kept_at(server) as kept:
        await kept.exchange(GET)
        with pytest.raises(BadAnswer, match="status 500"):
            await kept.exchange(GET)
        assert server.requests == [0], "no other connection"


async def test_an_answer_that_began_is_not_asked_for_again() -> None:
    server = InTheMiddle()
    async with kept_at(server) as kept:
        assert await kept.exchange(GET) == b"hello"
        with pytest.raises(BadAnswer, match="closed before the answer's end"):
            await kept.exchange(GET)
        assert server.requests == [1]
        assert not kept.open


async def test_a_server_that_is_not_there_is_an_os_error() -> None:
    server = Server(1)
    async with kept_at(server) as kept:
        assert await kept.exchange(GET) == b"1"
    with pytest.raises(ConnectionRefusedError):
        await kept.exchange(GET)


async def test_a_deadline_closes_what_it_interrupts_and_the_next_request_is_not_answered_with_its_answer() -> None:
    class Slow(Server):
        async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            if not self.requests:
                self.requests.append(1)
                await reader.read()  # until the other side closes
                writer.close()
                self.gone.set()
            else:
                await super().serve(reader, writer)

    server = Slow(1)
    async with kept_at(server) as kept:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await kept.exchange(GET)
        assert not kept.open
        await server.gone.wait()
        assert await kept.exchange(GET) == b"2"


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("10.0.0.1:8000", ("10.0.0.1", 8000)),
        ("[2001:db8::1]:8000", ("2001:db8::1", 8000)),
        ("localhost:1", ("localhost", 1)),
    ],
)
def test_an_address_has_a_host_and_a_port(address: str, parts: tuple[str, int]) -> None:
    assert host_and_port(address) == parts


@pytest.mark.parametrize("address", ["10.0.0.1", "10.0.0.1:", "10.0.0.1:http"])
def test_an_address_without_a_port_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="invalid literal"):
        host_and_port(address)
