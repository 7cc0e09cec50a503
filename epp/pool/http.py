"""A request over a kept connection, in as few steps as HTTP/1.1 takes. For small pages; not a general client.

It is written by hand since scraping is most of what an idle picker does: an exchange takes a third of the CPU of
aiohttp's client (`hack/bench scrape`), and a hundred endpoints once a second are to take 2 % of a core in all.
"""

import asyncio
from typing import Final, cast

MAX_HEAD: Final = 16 * 1024
MAX_BODY: Final = 4 * 1024 * 1024
_MAX_CHUNK_LINE: Final = 1024
_MAX_CHUNKS: Final = 4096
"""Of an answer; each costs a step of ours, however small it is."""


class BadAnswer(Exception):
    """An answer that is not a whole 200 within our limits. The text says what was wrong with it."""


class TooLarge(BadAnswer):
    """Its body is beyond our limit."""


class AnswerReader:
    """Puts one HTTP/1.1 answer together from pieces of any size. Pure; linear time; bounded memory.

    `largest`: bytes of its body.
    """

    def __init__(self, largest: int = MAX_BODY) -> None:
        self._largest = largest
        self._chunks = 0
        self.keep_alive = False
        self.begun = False
        """Whether any byte of the answer came."""
        self._buffer = bytearray()
        self._body: bytearray | None = None  # set once the head was read
        self._left = 0  # bytes to come: of the body, or of the current chunk with its line end
        self._chunked = False
        self._until_close = False

    def feed(self, data: bytes) -> bytes | None:
        """The body once it is complete, else None. BadAnswer for anything but a good answer."""
        self.begun = True
        if self._body is None:
            rest = self._read_head(data)
            if rest is None:
                return None
            data, self._body = rest, bytearray()
        if self._chunked:
            self._buffer += data
            return self._read_chunks(self._body)
        if not self._until_close and not self._body and len(data) == self._left:
            return data  # as it came: a page is some ten kilobytes, which need no copy
        self._body += data
        if self._until_close:
            self._check_size(len(self._body))
            return None
        if len(self._body) > self._left:
            raise BadAnswer("more bytes than its content-length")
        return bytes(self._body) if len(self._body) == self._left else None

    def eof(self) -> bytes:
        """The body of an answer that ends with its connection; BadAnswer if it should not have ended yet."""
        if self._body is None or not self._until_close:
            raise BadAnswer("the connection was closed before the answer's end")
        return bytes(self._body)

    def _read_head(self, data: bytes) -> bytes | None:
        """Read the head, if it is complete, and give what came behind it."""
        if self._buffer or data.find(b"\r\n\r\n", 0, MAX_HEAD) < 0:  # it comes in pieces
            self._buffer += data
            if self._buffer.find(b"\r\n\r\n", 0, MAX_HEAD) < 0:
                if len(self._buffer) >= MAX_HEAD:
                    raise BadAnswer(f"a head of more than {MAX_HEAD} bytes")
                return None
            data = bytes(self._buffer)
            self._buffer.clear()
        head, _, behind = data.partition(b"\r\n\r\n")
        lines = head.split(b"\r\n")
        version, _, rest = lines[0].partition(b" ")
        if version not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise BadAnswer(f"not HTTP/1.1: {_text(lines[0])}")
        if rest[:3] != b"200":
            raise BadAnswer(f"status {_text(rest)}")
        fields = {
            name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines[1:])
        }
        self._plan(version, fields)
        return behind

    def _plan(self, version: bytes, fields: dict[bytes, bytes]) -> None:
        if (coding := fields.get(b"content-encoding", b"identity").lower()) != b"identity":
            raise BadAnswer(f"content-encoding {_text(coding)}, which was not asked for")
        connection = fields.get(b"connection", b"").lower()
        self.keep_alive = connection != b"close" if version == b"HTTP/1.1" else connection == b"keep-alive"
        if (transfer := fields.get(b"transfer-encoding")) is not None:
            if transfer.lower() != b"chunked":
                raise BadAnswer(f"transfer-encoding {_text(transfer)}")
            self._chunked = True
        elif (length := fields.get(b"content-length")) is not None:
            if not length.isdigit():
                raise BadAnswer(f"content-length {_text(length)}")
            self._left = int(length[:18])
            self._check_size(self._left)
        else:
            self._until_close = True
            self.keep_alive = False

    def _read_chunks(self, body: bytearray) -> bytes | None:
        buffer, at = self._buffer, 0
        while True:
            if self._left:  # of the current chunk's bytes and the line end behind them
                taken = min(self._left, len(buffer) - at)
                body += buffer[at : at + taken]
                at, self._left = at + taken, self._left - taken
                if self._left:
                    break
                if not body.endswith(b"\r\n"):
                    raise BadAnswer("a chunk without its line end")
                del body[-2:]
            end = buffer.find(b"\r\n", at, at + _MAX_CHUNK_LINE)
            if end < 0:
                if len(buffer) - at >= _MAX_CHUNK_LINE:
                    raise BadAnswer("a chunk's size line that is too long")
                break
            size = _chunk_size(bytes(buffer[at:end]))
            self._check_size(len(body) + size)
            self._chunks += 1
            if self._chunks > _MAX_CHUNKS:
                raise BadAnswer(f"more than {_MAX_CHUNKS} chunks")
            if size == 0:
                return self._read_trailers(body, at, end)
            at, self._left = end + 2, size + 2
        del buffer[:at]
        return None

    def _check_size(self, size: int) -> None:
        if size > self._largest:
            raise TooLarge(f"a body of more than {self._largest} bytes")

    def _read_trailers(self, body: bytearray, at: int, end: int) -> bytes | None:
        """The last chunk came; an empty line, perhaps after trailers, ends the answer."""
        stop = self._buffer.find(b"\r\n\r\n", end)
        if stop < 0:
            del self._buffer[:at]
            if len(self._buffer) > MAX_HEAD:
                raise BadAnswer("endless trailers")
            return None
        if len(self._buffer) > stop + 4:
            raise BadAnswer("bytes after its last chunk")
        return bytes(body)


class Connection(asyncio.Protocol):
    """One kept connection; one request at a time. After any error, or where the server asks for it, it is closed.

    `largest`: bytes of an answer's body.
    """

    def __init__(self, largest: int = MAX_BODY) -> None:
        self._largest = largest
        self._transport: asyncio.Transport | None = None
        self._reader = AnswerReader(largest)
        self._answer: asyncio.Future[bytes] | None = None

    @property
    def open(self) -> bool:
        return self._transport is not None

    @property
    def begun(self) -> bool:
        """Whether any byte of the last request's answer came."""
        return self._reader.begun

    async def exchange(self, request: bytes) -> bytes:
        """Send a whole request, return the answer's body. BadAnswer if there is no good one.

        A cancelled or failed call closes the connection. There is no deadline here: put one around it.
        """
        if self._transport is None:
            raise BadAnswer("the connection is closed")
        self._reader = AnswerReader(self._largest)
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            body = await self._answer
        except BaseException:
            self.abort()
            raise
        if not self._reader.keep_alive:
            self.abort()
        return body

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()
            self._transport = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def data_received(self, data: bytes) -> None:
        if self._answer is None or self._answer.done():  # no request is open
            self.abort()
            return
        try:
            body = self._reader.feed(data)
        except BadAnswer as error:
            self._answer.set_exception(error)
            return
        if body is not None:
            self._answer.set_result(body)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        if self._answer is None or self._answer.done():
            return
        try:
            self._answer.set_result(self._reader.eof())
        except BadAnswer as error:
            self._answer.set_exception(BadAnswer(f"{error} ({exc})") if exc else error)


class Kept:
    """One server, asked over a connection that is kept; one request at a time. `largest`: bytes of an answer's body."""

    def __init__(self, host: str, port: int, largest: int = MAX_BODY) -> None:
        self._host, self._port, self._largest = host, port, largest
        self._connection: Connection | None = None
        self.connecting = False
        """Whether the last exchange got, or has got yet, no connection."""

    @property
    def open(self) -> bool:
        """Whether the connection can be used again, as far as we know."""
        return self._connection is not None and self._connection.open

    async def exchange(self, request: bytes) -> bytes:
        """Send a whole request, return the answer's body. BadAnswer or OSError if there is no good one.

        That the server closed the kept connection just as we asked is no failure of it: it is asked on a new one.
        There is no deadline here: put one around it.
        """
        kept = self._connection
        if kept is not None and kept.open:
            try:
                return await kept.exchange(request)
            except BadAnswer:
                if kept.begun:
                    raise
        self.connecting = True
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(self._connect, self._host, self._port)
        self.connecting = False
        return await self._connection.exchange(request)

    def _connect(self) -> Connection:
        return Connection(self._largest)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()


def host_and_port(address: str) -> tuple[str, int]:
    """Of `ip:port` or `[ip]:port`."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _chunk_size(line: bytes) -> int:
    digits = line.partition(b";")[0].strip()
    if not 0 < len(digits) <= 15 or digits.lower().strip(b"0123456789abcdef"):
        raise BadAnswer(f"chunk size {_text(line)}")
    return int(digits, 16)


def _text(data: bytes) -> str:
    return data[:60].decode("ascii", "backslashreplace")
