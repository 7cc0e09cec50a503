import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from hypothesis import given
from hypothesis import strategies as st

from epp.pool.http import MAX_BODY, MAX_HEAD, AnswerReader, BadAnswer, Connection

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
            if reader.feed(bytes(mutated[start : start + size])) is not None:
                return
        reader.eof()
    except BadAnswer:
        pass


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
