"""The server's end of an HTTP/2 connection, without sockets and without a clock: bytes in, events and bytes out.

It is complete as far as a server of gRPC needs it (RFC 9113, RFC 7541): every frame is taken or refused as the RFC
says; it sends no pushes and no priorities, and encodes headers without a dynamic table. It is written by hand since the
picker's cost is mostly this: h2 with hpack takes about ten times as long for a stream of five messages, and grpc's core
hands each message from thread to thread (`hack/bench picker`, `--ext-proc-server`).

What a peer can make grow is bounded: streams at once, header bytes, what waits for its window, frames that carry
nothing, and streams that are opened and reset (`CVE-2023-44487`). Who goes beyond gets GOAWAY with ENHANCE_YOUR_CALM.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from struct import Struct as Packed
from typing import Final

import msgspec

PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, PRIORITY, RST_STREAM, SETTINGS, PUSH_PROMISE, PING, GOAWAY, WINDOW_UPDATE, CONTINUATION = range(10)
END_STREAM, ACK, END_HEADERS, PADDED, WITH_PRIORITY = 0x1, 0x1, 0x4, 0x8, 0x20
(
    NO_ERROR, PROTOCOL_ERROR, INTERNAL_ERROR, FLOW_CONTROL_ERROR, SETTINGS_TIMEOUT, STREAM_CLOSED, FRAME_SIZE_ERROR,
    REFUSED_STREAM, CANCEL, COMPRESSION_ERROR, CONNECT_ERROR, ENHANCE_YOUR_CALM,
) = range(12)  # fmt: skip
"""Error codes, RFC 9113 section 7."""
ENABLE_PUSH, MAX_STREAMS, INITIAL_WINDOW, FRAME_SIZE = 0x2, 0x3, 0x4, 0x5

LARGEST_FRAME: Final = 16_384
LONGEST_SENT: Final = (1 << 16) - 1
"""Bytes in a frame of ours, where the peer takes such."""
WINDOW: Final = 65_535
"""Bytes that may be sent to a stream, or on a connection, until the receiver says otherwise."""
MOST: Final = (1 << 31) - 1
LARGEST_HEADERS: Final = 65_536
"""Bytes of a request's headers, encoded, and decoded as RFC 9113 6.5.2 counts them."""
MOST_CONTINUATIONS: Final = 32
TABLE_SIZE: Final = 4096
"""Bytes of the peer's dynamic table: HTTP/2's default."""
IDLE_FRAMES: Final = 10_000
"""Frames without effect (pings, settings, priorities, empty data, for closed streams) between two that have one."""
RESETS: Final = 1_000
"""Streams that a peer may reset before they were replied to, for each that it has not."""
CLOSED_KEPT: Final = 256
"""Closed streams that are remembered as such: later ones cannot be told from streams that were skipped."""

_HEAD: Final = Packed(">BHBBL")
"""Of a frame: its length in three bytes, of which the first is 0 in all that are taken or sent; kind, flags, stream."""
_MESSAGE: Final = Packed(">BHHLBL")
"""The same with kind and flags as one, and what stands in DATA before a gRPC message: whether it is compressed, and its
length."""
_PLAIN_MESSAGE: Final = Packed(">xHxxLxL")
"""The same to send: DATA is 0, no flags, not compressed."""
_PAIR: Final = Packed(">HL")
_U32: Final = Packed(">L")


class Opened(msgspec.Struct, frozen=True, gc=False):
    """A request's headers came; `end` if nothing follows them."""

    number: int
    path: bytes
    kind: bytes
    """Its `content-type`; empty without one."""
    end: bool


class Data(msgspec.Struct, frozen=True, gc=False):
    number: int
    payload: bytes
    end: bool
    low: bool = False
    """The peer may send half of the stream's window at most, until `consumed`."""


class Message(msgspec.Struct, frozen=True, gc=False):
    """Data in one frame that is one gRPC message, as most are: not compressed, not the end, and the peer may send more.

    `payload` is without what gRPC puts before it (`framed`).
    """

    number: int
    payload: bytes


def framed(message: bytes) -> bytes:
    """A gRPC message as it goes on a stream."""
    return b"\0" + len(message).to_bytes(4, "big") + message


class Reset(msgspec.Struct, frozen=True, gc=False):
    """The stream ended early: the peer reset it, or broke the protocol on it."""

    number: int


class Drained(msgspec.Struct, frozen=True, gc=False):
    """All that was to be sent on the stream is sent."""

    number: int


class Pong(msgspec.Struct, frozen=True, gc=False):
    payload: bytes


Event = Opened | Data | Message | Reset | Drained | Pong


class Broken(Exception):
    """The connection cannot go on; `code` of RFC 9113 section 7."""

    def __init__(self, code: int, what: str) -> None:
        super().__init__(what)
        self.code = code


class NotHttp2(Broken):
    """What came first is not how HTTP/2 with prior knowledge begins: a gateway is set up for something else."""

    def __init__(self, data: bytes) -> None:
        if data.startswith(b"\x16\x03"):
            what = "it speaks TLS, and this port does not; expected --secure-serving=true here or no TLS at the gateway"
        elif b"HTTP/1" in data[:_LONGEST_LINE]:
            what = "it speaks HTTP/1.1; expected gRPC, which is HTTP/2 from the start (Envoy: http2_protocol_options)"
        else:
            what = "no HTTP/2 preface"
        super().__init__(PROTOCOL_ERROR, what)


_LONGEST_LINE: Final = 256
"""Bytes of a request line that are looked at."""


class _Bad(Exception):
    """The stream cannot go on."""

    def __init__(self, code: int) -> None:
        self.code = code


class _Stream:
    __slots__ = (
        "announced", "body", "ended", "finished", "given", "number", "pending", "plain", "replied", "trailers",
        "window",
    )  # fmt: skip

    def __init__(self, number: int, window: int, given: int) -> None:
        self.number = number
        self.window = window
        """Bytes we may send."""
        self.given = given
        """Bytes the peer may send; what is missing to the whole window came and was not given back yet."""
        self.announced = -1
        """`content-length`; -1 without one."""
        self.body = 0
        """Bytes of data that came."""
        self.ended = False
        """Nothing more comes."""
        self.plain = True
        """Of what comes no more is to be looked at than whether it fits: nothing ended, and no length was announced."""
        self.replied = False
        self.finished = 0
        """The response is complete: 1, and 2 when some seconds have gone by since."""
        self.pending: list[memoryview] = []
        self.trailers: bytes | None = None
        """They follow what is pending and end the stream."""


class Connection:
    """One connection. `receive` and the methods that send add to what `take` gives: bytes for the peer.

    `streams`: that the peer may have open at once. `stream_window` and `connection_window`: bytes it may send ahead.
    """

    def __init__(self, *, streams: int = 1024, stream_window: int = 1 << 20, connection_window: int = 1 << 24) -> None:
        self.broken: Broken | None = None
        """Why the connection cannot go on: write what `take` gives, and close."""
        self.last = 0
        """Highest stream the peer opened."""
        self.paused = False
        """Nothing is sent but small frames; `resume` ends it."""
        self.peer_leaves = False
        """The peer said GOAWAY."""
        self._most = streams
        self._stream_window = stream_window
        self._connection_window = connection_window
        self._enough = connection_window >> 1
        self._half = stream_window >> 1
        self._out: list[bytes | memoryview] = []
        self._rest = b""
        self._prefaced = False
        self._configured = False
        self._streams: dict[int, _Stream] = {}
        self._closed: OrderedDict[int, bool] = OrderedDict()
        """Streams closed lately, and whether the peer knew: it had ended or reset them."""
        self._refuse_above = MOST
        self._window = WINDOW
        self._given = connection_window
        """Bytes the peer may send on all streams; what is missing to the whole window came."""
        self._first_window = WINDOW
        self._frame_size = LARGEST_FRAME
        self._waiting: dict[int, _Stream] = {}
        """Streams with something pending, those that waited longest first."""
        self._headers = HeaderDecoder()
        self._opening: tuple[Headers, tuple[bytes, bytes, int]] = (), (b"", b"", -1)
        """Headers that opened a stream, and what they say: gateways send the same with each."""
        self._block: list[bytes] = []
        """Header block under way, of `_block_stream`."""
        self._block_stream = 0
        self._block_flags = 0
        self._idle = 0
        self._resets = 0
        self._put_settings((MAX_STREAMS, streams), (INITIAL_WINDOW, stream_window), (0x6, LARGEST_HEADERS))
        self._out.append(_frame(WINDOW_UPDATE, 0, 0, _U32.pack(connection_window - WINDOW)))

    # --- receiving ---------------------------------------------------------------------------------------------------

    def receive(self, data: bytes) -> list[Event]:
        """Bytes from the peer. Never raises: a peer that breaks the protocol ends in `broken`."""
        events: list[Event] = []
        if self._rest:
            data = self._rest + data
        try:
            self._rest = data[self._frames(data, 0, events) if self._prefaced else self._preface(data, events) :]
        except Broken as broken:
            self._break(broken)
        return events

    def _preface(self, data: bytes, events: list[Event]) -> int:
        """The connection's beginning, as `_frames`; also of one that is broken, where nothing is looked at."""
        if self.broken is not None:
            return len(data)
        if not PREFACE.startswith(data[: len(PREFACE)]):
            raise NotHttp2(data)
        if len(data) < len(PREFACE):
            return 0
        self._prefaced = True
        return self._frames(data, len(PREFACE), events)

    def _frames(self, data: bytes, at: int, events: list[Event]) -> int:
        """All from `at` on that are whole; returns where the next begins."""
        size, streams, enough, half = len(data), self._streams, self._enough, self._half
        while size - at >= 9:
            # What comes most: data that calls for no more than to be counted. `_data` knows all the rest. While a
            # header block is under way nothing else may come.
            last = size - 14 if not self._block_stream else -1
            while at <= last:
                large, length, flags, number, compressed, inner = _MESSAGE.unpack_from(data, at)
                end = at + 9 + length
                if large or flags > END_STREAM or end > size or length > LARGEST_FRAME:  # flags with a kind; DATA is 0
                    break
                stream = streams.get(number)
                if stream is None or not stream.plain:
                    break
                left, given = stream.given - length, self._given - length
                if left < 0 or given <= enough or not length:
                    break
                stream.given, self._given, self._idle = left, given, 0
                if inner == length - 5 and left > half and not (compressed or flags):
                    events.append(Message(number, data[at + 14 : end]))
                else:
                    if flags:
                        stream.ended, stream.plain = True, False
                    events.append(Data(number, data[at + 9 : end], flags == END_STREAM, left <= half))
                at = end
            else:
                if size - at < 9:
                    break
            before, at = at, self._frame(data, at, events)
            if at == before:
                break
        return at

    def _frame(self, data: bytes, at: int, events: list[Event]) -> int:
        """Whatever frame begins at `at`; returns its end, or `at` where it is not whole yet."""
        large, length, kind, flags, number = _HEAD.unpack_from(data, at)
        if not (large or length or kind) and flags == END_STREAM and not self._block_stream:  # so most streams end
            stream = self._streams.get(number)
            if stream is not None and stream.plain:
                stream.ended, stream.plain = True, False
                events.append(Data(number, b"", True))
                return at + 9
        length += large << 16
        if length > LARGEST_FRAME:
            raise Broken(FRAME_SIZE_ERROR, f"a frame of {length} bytes")
        end = at + 9 + length
        if end > len(data):
            return at
        self._other(kind, flags, number & MOST, data[at + 9 : end], events)
        return int(end)

    def _other(self, kind: int, flags: int, number: int, payload: bytes, events: list[Event]) -> None:
        if not self._configured and (kind != SETTINGS or flags & ACK):
            raise Broken(PROTOCOL_ERROR, "no SETTINGS first")
        if self._block_stream and (kind != CONTINUATION or number != self._block_stream):
            raise Broken(PROTOCOL_ERROR, "a frame within a header block")
        if kind > CONTINUATION:
            self._without_effect()
            return
        try:
            _FRAMES[kind](self, number, flags, payload, events)
        except _Bad as bad:
            self.reset(number, bad.code)
            events.append(Reset(number))

    def _data(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        length = len(payload)
        if not number or number > self.last:
            raise Broken(PROTOCOL_ERROR, "DATA on no stream")
        self._given -= length
        if self._given < 0:
            raise Broken(FLOW_CONTROL_ERROR, "more data than the connection's window")
        if self._given <= self._enough:
            self._out.append(_frame(WINDOW_UPDATE, 0, 0, _U32.pack(self._connection_window - self._given)))
            self._given = self._connection_window
        stream = self._streams.get(number)
        if stream is None:
            self._on_closed(number)
            return
        if stream.ended:
            raise _Bad(STREAM_CLOSED)
        stream.given -= length
        if stream.given < 0:
            raise _Bad(FLOW_CONTROL_ERROR)
        if flags & PADDED:
            payload = _unpadded(payload)
        stream.body += len(payload)
        end = bool(flags & END_STREAM)
        if end:
            stream.ended, stream.plain = True, False
            if stream.announced >= 0 and stream.announced != stream.body:
                raise _Bad(PROTOCOL_ERROR)
        elif 0 <= stream.announced < stream.body:
            raise _Bad(PROTOCOL_ERROR)
        if stream.finished:
            if end:
                self._close(stream)
            self._without_effect()
            return
        if payload:
            self._idle = 0
        elif not end:
            self._without_effect()
            return
        events.append(Data(number, payload, end, stream.given <= self._half))

    def _headers_frame(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if not number & 1:
            raise Broken(PROTOCOL_ERROR, "HEADERS on a stream that no client may open")
        if flags & PADDED:
            payload = _unpadded(payload)
        if flags & WITH_PRIORITY:
            if len(payload) < 5:
                raise Broken(FRAME_SIZE_ERROR, "HEADERS too short for its priority")
            depends = _U32.unpack_from(payload)[0] & MOST
            payload = payload[5:]
        else:
            depends = 0
        flags &= END_STREAM | END_HEADERS
        if depends == number:
            flags |= WITH_PRIORITY  # refused once the block is decoded: the table must not miss it
        if flags & END_HEADERS:
            self._header_block(number, flags, payload, events)
        else:
            self._block_stream, self._block_flags, self._block = number, flags, [payload]

    def _continuation(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if not self._block_stream:
            raise Broken(PROTOCOL_ERROR, "CONTINUATION of nothing")
        self._block.append(payload)
        if len(self._block) > MOST_CONTINUATIONS or sum(map(len, self._block)) > LARGEST_HEADERS:
            raise Broken(ENHANCE_YOUR_CALM, "headers without end")
        if flags & END_HEADERS:
            block, self._block, self._block_stream = b"".join(self._block), [], 0
            self._header_block(number, self._block_flags, block, events)

    def _header_block(self, number: int, flags: int, block: bytes, events: list[Event]) -> None:
        """`flags`: those of the frame it began with; WITH_PRIORITY only where the stream depends on itself."""
        end = flags & END_STREAM != 0
        headers = self._headers.decode(block)
        stream = self._streams.get(number)
        if stream is not None:
            self._trailers(stream, headers, end, events)
            return
        if number <= self.last:
            by_peer = self._closed.get(number)
            if by_peer is None:
                raise Broken(PROTOCOL_ERROR, "a stream's number is below the one before")
            if by_peer:
                raise Broken(STREAM_CLOSED, "HEADERS on a stream that the peer had ended")
            self._without_effect()  # they were under way when we reset it
            return
        self.last = number
        if number > self._refuse_above or len(self._streams) >= self._most:
            self._remember(number, by_peer=end)
            self._out.append(_frame(RST_STREAM, 0, number, _U32.pack(REFUSED_STREAM)))
            self._without_effect()
            return
        stream = self._streams[number] = _Stream(number, self._first_window, self._stream_window)
        stream.ended = end
        self._idle = 0
        if flags & WITH_PRIORITY:
            raise _Bad(PROTOCOL_ERROR)
        if headers is not self._opening[0]:
            self._opening = headers, _request(headers)
        path, kind, stream.announced = self._opening[1]
        stream.plain = not end and stream.announced < 0
        if end and stream.announced > 0:
            raise _Bad(PROTOCOL_ERROR)
        events.append(Opened(number, path, kind, end))

    def _trailers(self, stream: _Stream, headers: "Headers", end: bool, events: list[Event]) -> None:
        if stream.ended:
            raise _Bad(STREAM_CLOSED)
        if not end or any(name[:1] == b":" or name != name.lower() for name, _ in headers):
            raise _Bad(PROTOCOL_ERROR)
        if stream.announced >= 0 and stream.announced != stream.body:
            raise _Bad(PROTOCOL_ERROR)
        stream.ended, stream.plain = True, False
        if stream.finished:
            self._close(stream)
        else:
            events.append(Data(stream.number, b"", True))

    def _priority(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if not number:
            raise Broken(PROTOCOL_ERROR, "PRIORITY on no stream")
        self._without_effect()
        if len(payload) != 5:
            if number in self._streams:
                raise _Bad(FRAME_SIZE_ERROR)
            raise Broken(FRAME_SIZE_ERROR, "PRIORITY of another length than 5")
        if _U32.unpack_from(payload)[0] & MOST == number:
            if number in self._streams:
                raise _Bad(PROTOCOL_ERROR)
            raise Broken(PROTOCOL_ERROR, "a stream that depends on itself")

    def _reset_frame(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if len(payload) != 4:
            raise Broken(FRAME_SIZE_ERROR, "RST_STREAM of another length than 4")
        if not number or number > self.last:
            raise Broken(PROTOCOL_ERROR, "RST_STREAM on no stream")
        stream = self._streams.get(number)
        if stream is None:
            self._without_effect()
            return
        stream.ended = True
        self._close(stream)
        if stream.finished:
            return
        events.append(Reset(number))
        if not stream.replied:
            self._resets += 1
            if self._resets > RESETS:
                raise Broken(ENHANCE_YOUR_CALM, "streams are opened to be reset")

    def _settings(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if number:
            raise Broken(PROTOCOL_ERROR, "SETTINGS on a stream")
        if len(payload) % 6 or (flags & ACK and payload):
            raise Broken(FRAME_SIZE_ERROR, "SETTINGS of a wrong length")
        self._configured = True
        self._without_effect()
        if flags & ACK:
            return
        for name, value in _PAIR.iter_unpack(payload):
            if name == ENABLE_PUSH and value > 1:
                raise Broken(PROTOCOL_ERROR, f"SETTINGS_ENABLE_PUSH {value}")
            if name == FRAME_SIZE:
                if not LARGEST_FRAME <= value < 1 << 24:
                    raise Broken(PROTOCOL_ERROR, f"SETTINGS_MAX_FRAME_SIZE {value}")
                self._frame_size = min(value, LONGEST_SENT)
            if name == INITIAL_WINDOW:
                if value > MOST:
                    raise Broken(FLOW_CONTROL_ERROR, f"SETTINGS_INITIAL_WINDOW_SIZE {value}")
                self._first_window, before = value, self._first_window
                for stream in self._streams.values():
                    stream.window += value - before
                    if stream.window > MOST:
                        raise Broken(FLOW_CONTROL_ERROR, "a window beyond 2^31-1")
        self._out.append(_frame(SETTINGS, ACK, 0, b""))
        self._send_waiting(events)

    def _push(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        raise Broken(PROTOCOL_ERROR, "PUSH_PROMISE from a client")

    def _ping(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if number:
            raise Broken(PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise Broken(FRAME_SIZE_ERROR, "PING of another length than 8")
        self._without_effect()
        if flags & ACK:
            events.append(Pong(payload))
        else:
            self._out.append(_frame(PING, ACK, 0, payload))

    def _goaway(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if number:
            raise Broken(PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise Broken(FRAME_SIZE_ERROR, "GOAWAY too short")
        self._without_effect()
        self.peer_leaves = True

    def _window_update(self, number: int, flags: int, payload: bytes, events: list[Event]) -> None:
        if len(payload) != 4:
            raise Broken(FRAME_SIZE_ERROR, "WINDOW_UPDATE of another length than 4")
        more = _U32.unpack(payload)[0] & MOST
        if not number:
            if not more:
                raise Broken(PROTOCOL_ERROR, "WINDOW_UPDATE by nothing")
            self._window += more
            if self._window > MOST:
                raise Broken(FLOW_CONTROL_ERROR, "a window beyond 2^31-1")
            if not self._waiting:
                self._without_effect()
            self._send_waiting(events)
            return
        if number > self.last:
            raise Broken(PROTOCOL_ERROR, "WINDOW_UPDATE on no stream")
        stream = self._streams.get(number)
        if stream is None:
            self._without_effect()
            return
        stream.window += more
        if not more or stream.window > MOST:
            raise _Bad(FLOW_CONTROL_ERROR if more else PROTOCOL_ERROR)
        if not stream.pending:
            self._without_effect()
        elif self._send_pending(stream):
            events.append(Drained(number))

    def _on_closed(self, number: int) -> None:
        """Something came for a stream that is closed: late, as all that was under way when we closed it."""
        self._without_effect()
        self._out.append(_frame(RST_STREAM, 0, number, _U32.pack(STREAM_CLOSED)))

    def _without_effect(self) -> None:
        self._idle += 1
        if self._idle > IDLE_FRAMES:
            raise Broken(ENHANCE_YOUR_CALM, "frames without effect")

    # --- sending -----------------------------------------------------------------------------------------------------

    def take(self) -> bytes:
        """What is to be written to the peer now."""
        out = self._out
        if not out:
            return b""
        self._out = []
        return b"".join(out)

    def consumed(self, number: int) -> None:
        """What came on the stream was used: the peer may send as much again."""
        stream = self._streams.get(number)
        if stream is not None and not stream.ended and stream.given <= self._half:
            self._out.append(_frame(WINDOW_UPDATE, 0, number, _U32.pack(self._stream_window - stream.given)))
            stream.given = self._stream_window

    def send_headers(self, number: int, block: bytes, *, end: bool = False) -> None:
        """The response's headers, or all of it."""
        stream = self._streams.get(number)
        if stream is None or stream.finished:
            return
        stream.replied = True
        self._out.append(_frame(HEADERS, END_HEADERS | (END_STREAM if end else 0), number, block))
        if end:
            self._finish(stream)

    def send_data(self, number: int, payload: bytes) -> bool:
        """False if part of it has to wait for its window: `Drained` follows."""
        stream = self._streams.get(number)
        if stream is None or stream.finished:
            return True
        stream.pending.append(memoryview(payload))
        return self._send_pending(stream)

    def send_message(self, number: int, message: bytes, rest: bytes = b"") -> bool:
        """`message` and, if there is one, its `rest`, as gRPC frames them. False as with `send_data`."""
        stream = self._streams.get(number)
        if stream is None or stream.finished:
            return True
        length = len(message) + len(rest)
        size = length + 5
        if stream.pending or self.paused or size > stream.window or size > self._window or size > self._frame_size:
            return self._send_later(stream, length, message, rest)
        stream.window -= size
        self._window -= size
        self._out += _PLAIN_MESSAGE.pack(size, number, length), message, rest
        return True

    def _send_later(self, stream: _Stream, length: int, message: bytes, rest: bytes) -> bool:
        """In several frames, or when its window allows."""
        head = b"\0" + length.to_bytes(4, "big")
        parts = (head + message, rest) if len(message) < 512 else (head, message, rest)
        stream.pending.extend(memoryview(part) for part in parts if part)
        return self._send_pending(stream)

    def send_trailers(self, number: int, block: bytes) -> None:
        """The response's end, after all that is pending."""
        stream = self._streams.get(number)
        if stream is None or stream.finished:
            return
        stream.trailers = block
        if not stream.pending:
            self._send_trailers(stream)

    def reset(self, number: int, code: int = CANCEL) -> None:
        """End the stream now; what is pending is dropped."""
        stream = self._streams.get(number)
        if stream is not None:
            self._close(stream)
        self._out.append(_frame(RST_STREAM, 0, number, _U32.pack(code)))

    def ping(self, payload: bytes) -> None:
        """Eight bytes, which come back as `Pong`."""
        self._out.append(_frame(PING, 0, 0, payload))

    def leave(self, why: str, *, finally_: bool) -> None:
        """Ask the peer to open no more streams here. Those it has sent meanwhile are served until this is final.

        `why` is for the peer's log.
        """
        if finally_:
            self._refuse_above = self.last
        number = self.last if finally_ else MOST
        self._out.append(_frame(GOAWAY, 0, 0, _U32.pack(number) + _U32.pack(NO_ERROR) + why.encode()))

    def resume(self) -> list[Event]:
        """The peer reads again."""
        events: list[Event] = []
        self.paused = False
        self._send_waiting(events)
        return events

    def rested(self) -> None:
        """Some seconds went by: what counts as a flood begins again."""
        self._idle = 0
        self._resets >>= 1
        for stream in [*self._streams.values()]:
            if stream.finished == 2:
                self.reset(stream.number, NO_ERROR)
            elif stream.finished:
                stream.finished = 2

    @property
    def open(self) -> int:
        """Streams that are not closed."""
        return len(self._streams)

    def numbers(self) -> list[int]:
        """Those streams."""
        return [*self._streams]

    def pending(self, number: int) -> bool:
        """Whether something that was given to send on this stream waits for its window."""
        stream = self._streams.get(number)
        return stream is not None and bool(stream.pending)

    def _send_waiting(self, events: list[Event]) -> None:
        for number, stream in [*self._waiting.items()]:
            if self._window <= 0 or self.paused:
                return
            if self._send_pending(stream):
                events.append(Drained(number))

    def _send_pending(self, stream: _Stream) -> bool:
        """Send what the windows allow; whether that was all."""
        pending, number = stream.pending, stream.number
        room = before = 0 if self.paused else min(stream.window, self._window)
        parts: tuple[memoryview, ...]
        while pending and room > 0:
            most, part = min(room, self._frame_size), pending[0]
            if (size := len(part)) > most:
                parts, pending[0], size = (part[:most],), part[most:], most
            elif size == most or len(pending) == 1:
                parts = (pending.pop(0),)
            else:  # with it goes as much of the next as there is room for
                more = pending.pop(1)
                parts = part, more[: most - size]
                if size + len(more) > most:
                    pending[0], size = more[most - size :], most
                else:
                    del pending[0]
                    size += len(more)
            room -= size
            self._out.append(_HEAD.pack(0, size, DATA, 0, number))
            self._out += parts
        stream.window -= before - room
        self._window -= before - room
        if room != before or not pending:
            self._waiting.pop(number, None)  # the next turn is another's
        if pending:
            self._waiting[number] = stream
            return False
        if stream.trailers is not None:
            self._send_trailers(stream)
        return True

    def _send_trailers(self, stream: _Stream) -> None:
        self._out.append(_frame(HEADERS, END_HEADERS | END_STREAM, stream.number, stream.trailers or b""))
        self._finish(stream)

    def _finish(self, stream: _Stream) -> None:
        """The response is complete. What the peer still sends is dropped, and after some seconds refused: a reset at
        once would make grpc's clients forget the response.
        """
        if self._resets:
            self._resets -= 1
        stream.finished, stream.plain = 1, False
        if stream.ended:
            self._close(stream)

    def _close(self, stream: _Stream) -> None:
        del self._streams[stream.number]
        self._waiting.pop(stream.number, None)
        stream.pending.clear()
        self._remember(stream.number, by_peer=stream.ended)

    def _remember(self, number: int, *, by_peer: bool) -> None:
        self._closed[number] = by_peer
        if len(self._closed) > CLOSED_KEPT:
            self._closed.popitem(last=False)

    def _put_settings(self, *pairs: tuple[int, int]) -> None:
        self._out.append(_frame(SETTINGS, 0, 0, b"".join(_PAIR.pack(*pair) for pair in pairs)))

    def _break(self, broken: Broken) -> None:
        self.broken = broken
        self._rest, self._prefaced = b"", False
        self._out.append(_frame(GOAWAY, 0, 0, _U32.pack(self.last) + _U32.pack(broken.code) + str(broken).encode()))


_FRAMES: Final[Sequence[Callable[[Connection, int, int, bytes, list[Event]], None]]] = (
    Connection._data,
    Connection._headers_frame,
    Connection._priority,
    Connection._reset_frame,
    Connection._settings,
    Connection._push,
    Connection._ping,
    Connection._goaway,
    Connection._window_update,
    Connection._continuation,
)


def _frame(kind: int, flags: int, number: int, payload: bytes) -> bytes:
    return _HEAD.pack(0, len(payload), kind, flags, number) + payload


def _unpadded(payload: bytes) -> bytes:
    if not payload or payload[0] >= len(payload):
        raise Broken(PROTOCOL_ERROR, "padding longer than its frame")
    return payload[1 : len(payload) - payload[0]]


# --- headers ---------------------------------------------------------------------------------------------------------

Headers = Sequence[tuple[bytes, bytes]]
_FORBIDDEN: Final = frozenset((b"connection", b"keep-alive", b"proxy-connection", b"transfer-encoding", b"upgrade"))
_PSEUDO: Final = frozenset((b":method", b":scheme", b":path", b":authority"))


def _request(headers: Headers) -> tuple[bytes, bytes, int]:
    """A request's path, content-type (empty without) and content-length (-1 without).

    _Bad for what RFC 9113 8.1 to 8.3 call malformed.
    """
    pseudo: dict[bytes, bytes] = {}
    length, regular, kind = -1, False, b""
    for name, value in headers:
        if name[:1] == b":":
            if regular or name in pseudo or name not in _PSEUDO:
                raise _Bad(PROTOCOL_ERROR)
            pseudo[name] = value
            continue
        regular = True
        if name in _FORBIDDEN or (name == b"te" and value != b"trailers") or name != name.lower() or not name:
            raise _Bad(PROTOCOL_ERROR)
        if name == b"content-type":
            kind = value
        elif name == b"content-length":
            if not value.isdigit() or len(value) > 18:
                raise _Bad(PROTOCOL_ERROR)
            length = int(value)
    path = pseudo.get(b":path", b"")
    if not path or not pseudo.get(b":method") or not pseudo.get(b":scheme"):
        raise _Bad(PROTOCOL_ERROR)
    return path, kind, length


_KNOWN, _KNOWN_BYTES = 64, 512
"""Header blocks that are remembered, and the bytes of the largest."""


class HeaderDecoder:
    """HPACK's decoder (RFC 7541) with a dynamic table of at most `TABLE_SIZE` bytes.

    A block that leaves the table as it is is remembered until the next that does not: gateways send the same headers
    with each stream.
    """

    def __init__(self) -> None:
        self._table: deque[tuple[bytes, bytes]] = deque()
        self._size = 0
        self._limit = TABLE_SIZE
        self._known: dict[bytes, Headers] = {}

    def decode(self, block: bytes) -> Headers:
        """Name and value of each header. Raises Broken: without the right table no later block can be read."""
        known = self._known.get(block)
        if known is not None:
            return known
        try:
            headers, changed = self._decode(block)
        except IndexError:
            raise Broken(COMPRESSION_ERROR, "a header block is cut off") from None
        if changed:
            self._known.clear()
        elif len(self._known) < _KNOWN and len(block) <= _KNOWN_BYTES:
            self._known[block] = headers
        return headers

    def _decode(self, block: bytes) -> tuple[Headers, bool]:
        headers: list[tuple[bytes, bytes]] = []
        at, size, changed = 0, 0, False
        while at < len(block):
            first = block[at]
            if first & 0x80:
                index, at = _integer(block, at, 7)
                header = self._at(index)
            elif first & 0xE0 == 0x20:
                if headers:
                    raise Broken(COMPRESSION_ERROR, "a table size after headers")
                limit, at = _integer(block, at, 5)
                if limit > TABLE_SIZE:
                    raise Broken(COMPRESSION_ERROR, f"a table of {limit} bytes")
                self._limit, changed = limit, True
                self._evict()
                continue
            else:
                indexed = bool(first & 0x40)
                header, at = self._literal(block, at, 6 if indexed else 4)
                if indexed:
                    changed = True
                    self._table.appendleft(header)
                    self._size += _size(header)
                    self._evict()
            size += _size(header)
            if size > LARGEST_HEADERS:
                raise Broken(ENHANCE_YOUR_CALM, f"headers of more than {LARGEST_HEADERS} bytes")
            headers.append(header)
        return headers, changed

    def _literal(self, block: bytes, at: int, bits: int) -> tuple[tuple[bytes, bytes], int]:
        index, at = _integer(block, at, bits)
        if index:
            name = self._at(index)[0]
        else:
            name, at = _string(block, at)
        value, at = _string(block, at)
        return (name, value), at

    def _at(self, index: int) -> tuple[bytes, bytes]:
        if 0 < index <= len(_STATIC):
            return _STATIC[index - 1]
        index -= len(_STATIC) + 1
        if not 0 <= index < len(self._table):
            raise Broken(COMPRESSION_ERROR, "a header that is not in the table")
        return self._table[index]

    def _evict(self) -> None:
        while self._size > self._limit:
            self._size -= _size(self._table.pop())


def _size(header: tuple[bytes, bytes]) -> int:
    return len(header[0]) + len(header[1]) + 32


def _integer(block: bytes, at: int, bits: int) -> tuple[int, int]:
    """RFC 7541 5.1: the integer whose first byte is at `at`, and where the next thing begins."""
    most = (1 << bits) - 1
    value = block[at] & most
    at += 1
    if value < most:
        return value, at
    shift = 0
    while True:
        byte = block[at]
        at += 1
        value += (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
        if shift > 28:
            raise Broken(COMPRESSION_ERROR, "an integer without end")


def _string(block: bytes, at: int) -> tuple[bytes, int]:
    coded = block[at] & 0x80
    length, at = _integer(block, at, 7)
    end = at + length
    if end > len(block):
        raise Broken(COMPRESSION_ERROR, "a string is cut off")
    raw = block[at:end]
    return _huffman(raw) if coded else raw, end


# Lengths of the codes in bits, RFC 7541 appendix B: symbols 0 to 255 and the end of a string. The codes are canonical:
# those of a length follow each other in the order of their symbols.
_LENGTHS: Final[Sequence[int]] = (
    13,
    23,
    28,
    28,
    28,
    28,
    28,
    28,
    28,
    24,
    30,
    28,
    28,
    30,
    28,
    28,
    28,
    28,
    28,
    28,
    28,
    28,
    30,
    28,
    28,
    28,
    28,
    28,
    28,
    28,
    28,
    28,
    6,
    10,
    10,
    12,
    13,
    6,
    8,
    11,
    10,
    10,
    8,
    11,
    8,
    6,
    6,
    6,
    5,
    5,
    5,
    6,
    6,
    6,
    6,
    6,
    6,
    6,
    7,
    8,
    15,
    6,
    12,
    10,
    13,
    6,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    7,
    8,
    7,
    8,
    13,
    19,
    13,
    14,
    6,
    15,
    5,
    6,
    5,
    6,
    5,
    6,
    6,
    6,
    5,
    7,
    7,
    6,
    6,
    6,
    5,
    6,
    7,
    6,
    5,
    5,
    6,
    7,
    7,
    7,
    7,
    7,
    15,
    11,
    14,
    13,
    28,
    20,
    22,
    20,
    20,
    22,
    22,
    22,
    23,
    22,
    23,
    23,
    23,
    23,
    23,
    24,
    23,
    24,
    24,
    22,
    23,
    24,
    23,
    23,
    23,
    23,
    21,
    22,
    23,
    22,
    23,
    23,
    24,
    22,
    21,
    20,
    22,
    22,
    23,
    23,
    21,
    23,
    22,
    22,
    24,
    21,
    22,
    23,
    23,
    21,
    21,
    22,
    21,
    23,
    22,
    23,
    23,
    20,
    22,
    22,
    22,
    23,
    22,
    22,
    23,
    26,
    26,
    20,
    19,
    22,
    23,
    22,
    25,
    26,
    26,
    26,
    27,
    27,
    26,
    24,
    25,
    19,
    21,
    26,
    27,
    27,
    26,
    27,
    24,
    21,
    21,
    26,
    26,
    28,
    27,
    27,
    27,
    20,
    24,
    20,
    21,
    22,
    21,
    21,
    23,
    22,
    22,
    25,
    25,
    24,
    24,
    26,
    23,
    26,
    27,
    26,
    26,
    27,
    27,
    27,
    27,
    27,
    28,
    27,
    27,
    27,
    27,
    27,
    26,
    30,
)


def _codes() -> dict[tuple[int, int], int]:
    """(length, code) -> symbol."""
    codes: dict[tuple[int, int], int] = {}
    code, before = 0, 0
    for length, symbol in sorted((length, symbol) for symbol, length in enumerate(_LENGTHS)):
        code <<= length - before
        before = length
        codes[length, code] = symbol
        code += 1
    return codes


def _numbered(codes: dict[tuple[int, int], int]) -> dict[tuple[int, int], int]:
    """(length, beginning of a code) -> its state; state 0 is the empty one."""
    number = {(0, 0): 0}
    for length, code in codes:
        for short in range(1, length):
            number.setdefault((short, code >> (length - short)), len(number))
    return number


def _states() -> tuple[list[list[tuple[int, bytes] | None]], frozenset[int]]:
    """Row by state, column by four bits: the next state and what they complete; None for the end of a string.

    And the states in which a string may end: within a byte of the end's code, which is all ones.
    """
    codes = _codes()
    number = _numbered(codes)
    rows: list[list[tuple[int, bytes] | None]] = [[] for _ in number]
    for (length, code), state in number.items():
        for four in range(16):
            at, done, over = (length, code), b"", False
            for bit in (3, 2, 1, 0):
                at = at[0] + 1, at[1] << 1 | four >> bit & 1
                if (symbol := codes.get(at)) is not None:
                    over = over or symbol == 256
                    done += bytes((symbol & 255,))
                    at = 0, 0
            rows[state].append(None if over else (number[at], done))
    return rows, frozenset(number[length, (1 << length) - 1] for length in range(8))


_STATES, _ENDS = _states()


def _huffman(raw: bytes) -> bytes:
    state, done = 0, []
    for byte in raw:
        for four in (byte >> 4, byte & 15):
            step = _STATES[state][four]
            if step is None:
                raise Broken(COMPRESSION_ERROR, "a string with its end inside")
            state, symbols = step
            if symbols:
                done.append(symbols)
    if state not in _ENDS:
        raise Broken(COMPRESSION_ERROR, "a string with wrong padding")
    return b"".join(done)


_STATIC: Final[Headers] = (
    (b":authority", b""),
    (b":method", b"GET"),
    (b":method", b"POST"),
    (b":path", b"/"),
    (b":path", b"/index.html"),
    (b":scheme", b"http"),
    (b":scheme", b"https"),
    (b":status", b"200"),
    (b":status", b"204"),
    (b":status", b"206"),
    (b":status", b"304"),
    (b":status", b"400"),
    (b":status", b"404"),
    (b":status", b"500"),
    (b"accept-charset", b""),
    (b"accept-encoding", b"gzip, deflate"),
    (b"accept-language", b""),
    (b"accept-ranges", b""),
    (b"accept", b""),
    (b"access-control-allow-origin", b""),
    (b"age", b""),
    (b"allow", b""),
    (b"authorization", b""),
    (b"cache-control", b""),
    (b"content-disposition", b""),
    (b"content-encoding", b""),
    (b"content-language", b""),
    (b"content-length", b""),
    (b"content-location", b""),
    (b"content-range", b""),
    (b"content-type", b""),
    (b"cookie", b""),
    (b"date", b""),
    (b"etag", b""),
    (b"expect", b""),
    (b"expires", b""),
    (b"from", b""),
    (b"host", b""),
    (b"if-match", b""),
    (b"if-modified-since", b""),
    (b"if-none-match", b""),
    (b"if-range", b""),
    (b"if-unmodified-since", b""),
    (b"last-modified", b""),
    (b"link", b""),
    (b"location", b""),
    (b"max-forwards", b""),
    (b"proxy-authenticate", b""),
    (b"proxy-authorization", b""),
    (b"range", b""),
    (b"referer", b""),
    (b"refresh", b""),
    (b"retry-after", b""),
    (b"server", b""),
    (b"set-cookie", b""),
    (b"strict-transport-security", b""),
    (b"transfer-encoding", b""),
    (b"user-agent", b""),
    (b"vary", b""),
    (b"via", b""),
    (b"www-authenticate", b""),
)
"""RFC 7541 appendix A."""
