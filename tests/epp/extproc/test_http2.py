"""`http2.Connection` against `h2` (the other end) and against what RFC 9113 and RFC 7541 say of broken peers."""

import random
import struct
from collections.abc import Callable, Iterator

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import ConnectionTerminated, DataReceived, ResponseReceived, StreamEnded, StreamReset, TrailersReceived
from h2.settings import SettingCodes
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.extproc import http2
from epp.extproc.http2 import Broken, Connection, Data, Drained, HeaderDecoder, Message, Opened, Pong, Reset

REQUEST = [(":method", "POST"), (":scheme", "http"), (":path", "/a/B"), (":authority", "x"), ("te", "trailers")]
EXTRA = [("content-type", "application/grpc"), ("x-request-id", "7e57")]
HEAD = b"\x88\x00\x01a\x01b"  # :status 200, a: b
TAIL = b"\x00\x0bgrpc-status\x010"


def opening(number: int, kind: bytes = b"", *, end: bool) -> Opened:
    return Opened(number, b"/a/B", kind, end)


def frame(kind: int, flags: int, number: int, payload: bytes = b"") -> bytes:
    return struct.pack(">HBBBL", len(payload) >> 8, len(payload) & 255, kind, flags, number) + payload


def block(*extra: tuple[str, str], of: list[tuple[str, str]] = REQUEST) -> bytes:
    return bytes(Encoder().encode([*of, *extra]))


OPEN = http2.PREFACE + frame(http2.SETTINGS, 0, 0)


def opened(**limits: int) -> Connection:
    """A connection that a peer has begun."""
    made = Connection(**limits)
    assert made.receive(OPEN) == []
    made.take()
    return made


def frames(data: bytes) -> list[tuple[int, int, int, bytes]]:
    """(kind, flags, stream, payload) of each."""
    found, at = [], 0
    while at < len(data):
        high, low, kind, flags, number = struct.unpack_from(">HBBBL", data, at)
        size = high << 8 | low
        found.append((kind, flags, number, data[at + 9 : at + 9 + size]))
        at += 9 + size
    return found


def code(made: Connection) -> int:
    """Of the GOAWAY that ends the connection."""
    kind, _, _, payload = frames(made.take())[-1]
    assert (kind, made.broken is not None) == (http2.GOAWAY, True)
    return int.from_bytes(payload[4:8], "big")


def reset_code(made: Connection, number: int) -> int:
    found = [
        payload for kind, _, stream, payload in frames(made.take()) if (kind, stream) == (http2.RST_STREAM, number)
    ]
    assert found, "no RST_STREAM"
    assert made.broken is None
    return int.from_bytes(found[-1], "big")


# --- with h2 as the peer ----------------------------------------------------------------------------------------------


class Pair:
    """Ours and an h2 client, joined."""

    def __init__(self, **limits: int) -> None:
        self.ours = Connection(**limits)
        self.peer = H2Connection(H2Configuration(client_side=True, header_encoding=None))
        self.peer.initiate_connection()
        self.events: list[http2.Event] = []
        self.seen: list[object] = []
        self.turn()

    def turn(self, step: int = 1 << 30) -> None:
        """Carry bytes both ways until there are none; to us in steps of so many."""
        while True:
            there = self.peer.data_to_send()
            for at in range(0, len(there), step):
                self.events += self.ours.receive(there[at : at + step])
            back = self.ours.take()
            if back:
                self.seen += self.peer.receive_data(back)
            if not there and not back:
                return


def test_a_call_from_end_to_end() -> None:
    pair = Pair()
    pair.peer.send_headers(1, [*REQUEST, *EXTRA])
    pair.peer.send_data(1, b"hello")
    pair.peer.end_stream(1)
    pair.turn()
    assert pair.events == [opening(1, b"application/grpc", end=False), Data(1, b"hello", False), Data(1, b"", True)]
    pair.ours.send_headers(1, HEAD)
    assert pair.ours.send_message(1, b"world")
    assert pair.ours.send_message(1, b"in ", b"two")
    pair.ours.send_trailers(1, TAIL)
    pair.turn()
    response, *data, trailers, ended = (each for each in pair.seen if getattr(each, "stream_id", None) == 1)
    assert isinstance(response, ResponseReceived)
    assert isinstance(trailers, TrailersReceived)
    assert (dict(response.headers or ()), dict(trailers.headers or ())) == (
        {b":status": b"200", b"a": b"b"},
        {b"grpc-status": b"0"},
    )
    assert [getattr(each, "data", None) for each in data] == [b"\0\0\0\0\5world", b"\0\0\0\0\6in two"]
    assert isinstance(ended, StreamEnded)
    assert pair.ours.open == 0


@pytest.mark.parametrize("end", [False, True])
def test_data_that_is_just_one_message_is_told_from_other_data(end: bool) -> None:
    pair = Pair()
    alone = [b"\0\0\0\0\5hello", b"\0\0\0\0\0"]
    others = [b"\0\0\0\0\5hell", b"\0\0\0\0\5hello!", b"\1\0\0\0\5hello", b"\0\0\1\0\5hello", b"\0\0\0\0", alone[0] * 2]
    numbers = range(1, 2 * len(alone + others), 2)
    for number, data in zip(numbers, alone + others, strict=True):
        pair.peer.send_headers(number, REQUEST)
        pair.peer.send_data(number, data, end_stream=end)
    pair.turn()
    seen = [event for event in pair.events if not isinstance(event, Opened)]
    as_data = [Data(number, data, end) for number, data in zip(numbers, alone + others, strict=True)]
    assert seen == (as_data if end else [Message(1, b"hello"), Message(3, b""), *as_data[2:]])
    assert [http2.framed(event.payload) for event in seen if isinstance(event, Message)] == ([] if end else alone)


@pytest.mark.parametrize("step", [1, 7, 9, 100])
def test_bytes_may_come_in_any_pieces(step: int) -> None:
    pair = Pair()
    pair.peer.send_headers(1, [*REQUEST, *EXTRA])
    pair.peer.send_data(1, bytes(1000), end_stream=True)
    pair.turn(step)
    assert pair.events == [opening(1, b"application/grpc", end=False), Data(1, bytes(1000), True)]


def test_what_does_not_fit_the_windows_waits_and_streams_take_turns() -> None:
    pair = Pair()
    pair.peer.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 20_000})
    for number in (1, 3, 5):
        pair.peer.send_headers(number, REQUEST, end_stream=True)
    pair.turn()
    for number in (1, 3, 5):
        pair.ours.send_headers(number, HEAD)
        assert not pair.ours.send_message(number, bytes([number]) * 10_000, bytes([number]) * 40_000)
        pair.ours.send_trailers(number, TAIL)
    got: dict[int, bytes] = {1: b"", 3: b"", 5: b""}
    while pair.ours.open:
        pair.turn()
        pieces = [each for each in pair.seen if isinstance(each, DataReceived)]
        assert pieces, "nothing moves"
        pair.seen = []
        for piece in pieces:
            assert piece.stream_id is not None
            assert piece.data is not None
            got[piece.stream_id] += piece.data
            pair.peer.acknowledge_received_data(piece.flow_controlled_length or 0, piece.stream_id)
    assert {number: (data[:5], set(data[5:]), len(data)) for number, data in got.items()} == {
        number: (b"\0" + (50_000).to_bytes(4, "big"), {number}, 50_005) for number in (1, 3, 5)
    }
    assert {each for each in pair.events if isinstance(each, Drained)} == {Drained(1), Drained(3), Drained(5)}


def test_nothing_is_sent_while_the_socket_is_full() -> None:
    pair = Pair()
    pair.peer.send_headers(1, REQUEST, end_stream=True)
    pair.turn()
    pair.ours.paused = True
    pair.ours.send_headers(1, HEAD)
    assert not pair.ours.send_data(1, b"later")
    assert [kind for kind, *_ in frames(pair.ours.take())] == [http2.HEADERS]
    assert pair.ours.resume() == [Drained(1)]
    assert [kind for kind, *_ in frames(pair.ours.take())] == [http2.DATA]


def test_a_large_body_comes_through_as_its_window_is_given_back() -> None:
    pair = Pair(stream_window=65_535, connection_window=1 << 17)
    pair.peer.send_headers(1, REQUEST)
    sent, came = 0, 0
    while sent < 1 << 20:
        size = min(16_384, pair.peer.local_flow_control_window(1))
        assert size, "the window is never given back"
        pair.peer.send_data(1, bytes(size))
        sent += size
        pair.turn()
        low = [each.low for each in pair.events if isinstance(each, Data)]
        if low[-1]:  # sooner it changes nothing
            pair.ours.consumed(1)
        pair.turn()
    assert 0 < low.count(True) <= len(low) / 2
    came = sum(len(each.payload) for each in pair.events if isinstance(each, Data))
    assert came == sent


def test_a_stream_that_is_not_consumed_is_made_to_wait_and_no_other() -> None:
    pair = Pair(stream_window=65_535)
    for number in (1, 3):
        pair.peer.send_headers(number, REQUEST)
    for _ in range(3):
        pair.peer.send_data(1, bytes(16_384))
    pair.peer.send_data(1, bytes(16_383))
    pair.turn()
    assert pair.peer.local_flow_control_window(1) == 0
    pair.peer.send_data(3, b"free", end_stream=True)
    pair.turn()
    assert pair.events[-1] == Data(3, b"free", True)
    pair.ours.consumed(1)
    pair.turn()
    assert pair.peer.local_flow_control_window(1) > 0


def test_headers_in_many_frames_and_with_a_table() -> None:
    pair = Pair()
    pair.peer.send_headers(1, [*REQUEST, *((f"x-{n}", "v" * 500) for n in range(80))], end_stream=True)
    pair.peer.send_headers(3, REQUEST, end_stream=True)
    pair.turn()
    assert pair.events == [opening(1, end=True), opening(3, end=True)]


def test_a_reset_ends_the_stream_and_what_is_sent_to_it_is_dropped() -> None:
    pair = Pair()
    pair.peer.send_headers(1, REQUEST)
    pair.turn()
    pair.peer.reset_stream(1)
    pair.turn()
    assert pair.events == [opening(1, end=False), Reset(1)]
    pair.ours.send_headers(1, HEAD)
    assert pair.ours.send_data(1, b"late")
    pair.ours.send_trailers(1, TAIL)
    assert pair.ours.take() == b""


def test_a_reset_of_ours_is_seen_by_the_peer() -> None:
    pair = Pair()
    pair.peer.send_headers(1, REQUEST)
    pair.turn()
    pair.ours.reset(1)
    pair.turn()
    assert [each.error_code for each in pair.seen if isinstance(each, StreamReset)] == [http2.CANCEL]


def test_pings_are_answered_and_ours_come_back() -> None:
    pair = Pair()
    pair.peer.ping(b"12345678")
    pair.ours.ping(b"abcdefgh")
    pair.turn()
    assert pair.events == [Pong(b"abcdefgh")]
    assert any(type(each).__name__ == "PingAckReceived" for each in pair.seen)


def test_leaving_serves_what_crossed_it_and_refuses_what_came_after_the_end() -> None:
    pair = Pair()
    pair.ours.leave("", finally_=False)
    late = pair.ours.take()
    pair.peer.send_headers(1, REQUEST, end_stream=True)  # it has not seen it yet
    pair.turn()
    assert pair.events == [opening(1, end=True)]
    assert [payload for kind, _, _, payload in frames(late) if kind == http2.GOAWAY] == [b"\x7f\xff\xff\xff\0\0\0\0"]
    pair.ours.leave("", finally_=True)
    last = pair.ours.take()
    assert frames(last) == [(http2.GOAWAY, 0, 0, b"\0\0\0\1\0\0\0\0")]
    pair.peer.send_headers(3, REQUEST, end_stream=True)
    pair.turn()
    assert pair.events == [opening(1, end=True)]
    refused = [each for each in pair.seen if isinstance(each, StreamReset)]
    assert [(each.stream_id, each.error_code) for each in refused] == [(3, http2.REFUSED_STREAM)]
    assert isinstance(pair.peer.receive_data(late + last)[0], ConnectionTerminated)


def test_after_a_whole_response_the_rest_of_the_request_is_dropped_and_at_last_refused() -> None:
    pair = Pair()
    pair.peer.send_headers(1, REQUEST)
    pair.turn()
    pair.ours.send_headers(1, HEAD, end=True)
    pair.turn()
    pair.peer.send_data(1, b"late")
    pair.turn()
    assert pair.events == [opening(1, end=False)]
    pair.ours.rested()
    assert pair.ours.open == 1
    pair.ours.rested()
    assert (pair.ours.open, reset_code(pair.ours, 1)) == (0, http2.NO_ERROR)


def test_more_streams_than_were_announced_are_refused_one_by_one() -> None:
    made = opened(streams=2)
    for number in (1, 3, 5):
        made.receive(frame(http2.HEADERS, http2.END_HEADERS, number, block()))
    assert (made.open, reset_code(made, 5)) == (2, http2.REFUSED_STREAM)


# --- broken peers -----------------------------------------------------------------------------------------------------

G = http2.END_HEADERS
E = http2.END_STREAM
STREAM_1 = frame(http2.HEADERS, G, 1, block())
BREAKS = {
    "no preface": (b"GET / HTTP/1.1\r\n\r\n", http2.PROTOCOL_ERROR),
    "no settings first": (http2.PREFACE + frame(http2.PING, 0, 0, bytes(8)), http2.PROTOCOL_ERROR),
    "settings of a stream": (OPEN + frame(http2.SETTINGS, 0, 1), http2.PROTOCOL_ERROR),
    "settings cut off": (OPEN + frame(http2.SETTINGS, 0, 0, bytes(5)), http2.FRAME_SIZE_ERROR),
    "settings ack with more": (OPEN + frame(http2.SETTINGS, 1, 0, bytes(6)), http2.FRAME_SIZE_ERROR),
    "push 2": (OPEN + frame(http2.SETTINGS, 0, 0, b"\0\2\0\0\0\2"), http2.PROTOCOL_ERROR),
    "window 2^31": (OPEN + frame(http2.SETTINGS, 0, 0, b"\0\4\x80\0\0\0"), http2.FLOW_CONTROL_ERROR),
    "frame size 1": (OPEN + frame(http2.SETTINGS, 0, 0, b"\0\5\0\0\0\1"), http2.PROTOCOL_ERROR),
    "frame size 2^24": (OPEN + frame(http2.SETTINGS, 0, 0, b"\0\5\1\0\0\0"), http2.PROTOCOL_ERROR),
    "frame too large": (OPEN + b"\0\x40\1\0\0\0\0\0\1", http2.FRAME_SIZE_ERROR),
    "data on 0": (OPEN + frame(http2.DATA, 0, 0, b"x"), http2.PROTOCOL_ERROR),
    "data on idle": (OPEN + frame(http2.DATA, 0, 1, b"x"), http2.PROTOCOL_ERROR),
    "headers on 0": (OPEN + frame(http2.HEADERS, G, 0, block()), http2.PROTOCOL_ERROR),
    "headers on 2": (OPEN + frame(http2.HEADERS, G, 2, block()), http2.PROTOCOL_ERROR),
    "number below": (OPEN + frame(http2.HEADERS, G, 5, block()) + STREAM_1, http2.PROTOCOL_ERROR),
    "headers on what the peer had ended": (
        OPEN + STREAM_1 + frame(http2.RST_STREAM, 0, 1, bytes(4)) + frame(http2.HEADERS, G, 1, block()),
        http2.STREAM_CLOSED,
    ),
    "padding too long": (OPEN + STREAM_1 + frame(http2.DATA, 8, 1, b"\5abc"), http2.PROTOCOL_ERROR),
    "padded headers": (OPEN + frame(http2.HEADERS, G | 8, 1, b"\xff" + block()), http2.PROTOCOL_ERROR),
    "priority cut off": (OPEN + frame(http2.HEADERS, G | 32, 1, b"\0"), http2.FRAME_SIZE_ERROR),
    "priority on 0": (OPEN + frame(http2.PRIORITY, 0, 0, bytes(5)), http2.PROTOCOL_ERROR),
    "reset on 0": (OPEN + frame(http2.RST_STREAM, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
    "reset on idle": (OPEN + frame(http2.RST_STREAM, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "reset of 3 bytes": (OPEN + STREAM_1 + frame(http2.RST_STREAM, 0, 1, bytes(3)), http2.FRAME_SIZE_ERROR),
    "push promise": (OPEN + frame(http2.PUSH_PROMISE, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "ping of 7": (OPEN + frame(http2.PING, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
    "ping of a stream": (OPEN + frame(http2.PING, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "goaway of a stream": (OPEN + frame(http2.GOAWAY, 0, 1, bytes(8)), http2.PROTOCOL_ERROR),
    "goaway cut off": (OPEN + frame(http2.GOAWAY, 0, 0, bytes(7)), http2.FRAME_SIZE_ERROR),
    "window by 0": (OPEN + frame(http2.WINDOW_UPDATE, 0, 0, bytes(4)), http2.PROTOCOL_ERROR),
    "window of 3 bytes": (OPEN + frame(http2.WINDOW_UPDATE, 0, 0, bytes(3)), http2.FRAME_SIZE_ERROR),
    "window of idle": (OPEN + frame(http2.WINDOW_UPDATE, 0, 1, b"\0\0\0\1"), http2.PROTOCOL_ERROR),
    "window too large": (OPEN + frame(http2.WINDOW_UPDATE, 0, 0, b"\x7f\xff\xff\xff"), http2.FLOW_CONTROL_ERROR),
    "continuation of nothing": (OPEN + frame(http2.CONTINUATION, G, 1, block()), http2.PROTOCOL_ERROR),
    "ping in a block": (
        OPEN + frame(http2.HEADERS, 0, 1, block()) + frame(http2.PING, 0, 0, bytes(8)),
        http2.PROTOCOL_ERROR,
    ),
    "a block without end": (
        OPEN + frame(http2.HEADERS, 0, 1) + frame(http2.CONTINUATION, 0, 1) * 40,
        http2.ENHANCE_YOUR_CALM,
    ),
    "a header that is in no table": (OPEN + frame(http2.HEADERS, G, 1, b"\xff\x40"), http2.COMPRESSION_ERROR),
    "a cut off string": (OPEN + frame(http2.HEADERS, G, 1, b"\x40\x0aabc"), http2.COMPRESSION_ERROR),
    "a table too large": (OPEN + frame(http2.HEADERS, G, 1, b"\x3f\xe2\x1f" + block()), http2.COMPRESSION_ERROR),
    "a table size too late": (OPEN + frame(http2.HEADERS, G, 1, block() + b"\x20"), http2.COMPRESSION_ERROR),
    "the end inside a string": (
        OPEN + frame(http2.HEADERS, G, 1, b"\x40\x84\xff\xff\xff\xff\x01b"),
        http2.COMPRESSION_ERROR,
    ),
    "wrong padding of a string": (OPEN + frame(http2.HEADERS, G, 1, b"\x40\x81\x18\x01b"), http2.COMPRESSION_ERROR),
    "an integer without end": (OPEN + frame(http2.HEADERS, G, 1, b"\x7f" + b"\xff" * 20), http2.COMPRESSION_ERROR),
    "a bomb of headers": (
        OPEN + frame(http2.HEADERS, G, 1, b"\x40\x01x\x7f\x81\x1e" + b"y" * 4000 + b"\xbe" * 9000),
        http2.ENHANCE_YOUR_CALM,
    ),
    "pings without end": (OPEN + frame(http2.PING, 1, 0, bytes(8)) * 10_001, http2.ENHANCE_YOUR_CALM),
    "settings without end": (OPEN + frame(http2.SETTINGS, 0, 0) * 10_001, http2.ENHANCE_YOUR_CALM),
    "empty data without end": (OPEN + STREAM_1 + frame(http2.DATA, 0, 1) * 10_001, http2.ENHANCE_YOUR_CALM),
    "unknown frames without end": (OPEN + frame(0x42, 0, 0) * 10_001, http2.ENHANCE_YOUR_CALM),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_the_connection(name: str) -> None:
    data, expected = BREAKS[name]
    made = Connection()
    made.receive(data)
    assert code(made) == expected, made.broken
    assert made.receive(OPEN) == []


BAD_STREAMS = {
    "trailers without end": (STREAM_1 + frame(http2.HEADERS, G, 1, block(of=[("a", "b")])), http2.PROTOCOL_ERROR),
    "pseudo trailers": (STREAM_1 + frame(http2.HEADERS, G | E, 1, block()), http2.PROTOCOL_ERROR),
    "data after the end": (
        frame(http2.HEADERS, G | E, 1, block()) + frame(http2.DATA, 0, 1, b"x"),
        http2.STREAM_CLOSED,
    ),
    "headers after the end": (
        frame(http2.HEADERS, G | E, 1, block()) + frame(http2.HEADERS, G | E, 1, block()),
        http2.STREAM_CLOSED,
    ),
    "a stream that depends on itself": (
        frame(http2.HEADERS, G | 32, 1, b"\0\0\0\1\0" + block()),
        http2.PROTOCOL_ERROR,
    ),
    "a priority of 4 bytes": (STREAM_1 + frame(http2.PRIORITY, 0, 1, bytes(4)), http2.FRAME_SIZE_ERROR),
    "a window by 0": (STREAM_1 + frame(http2.WINDOW_UPDATE, 0, 1, bytes(4)), http2.PROTOCOL_ERROR),
    "a window too large": (
        STREAM_1 + frame(http2.WINDOW_UPDATE, 0, 1, b"\x7f\xff\xff\xff"),
        http2.FLOW_CONTROL_ERROR,
    ),
    "more data than said": (
        frame(http2.HEADERS, G, 1, block(("content-length", "1"))) + frame(http2.DATA, 0, 1, b"xy"),
        http2.PROTOCOL_ERROR,
    ),
    "less data than said": (
        frame(http2.HEADERS, G, 1, block(("content-length", "3"))) + frame(http2.DATA, E, 1, b"xy"),
        http2.PROTOCOL_ERROR,
    ),
    **{
        name: (frame(http2.HEADERS, G, 1, block(of=headers)), http2.PROTOCOL_ERROR)
        for name, headers in {
            "no path": [REQUEST[0], REQUEST[1]],
            "no method": REQUEST[1:],
            "no scheme": [REQUEST[0], REQUEST[2]],
            "an empty path": [*REQUEST[:2], (":path", "")],
            "a path twice": [*REQUEST[:3], (":path", "/")],
            "a pseudo header of answers": [*REQUEST[:3], (":status", "200")],
            "a pseudo header at the end": [*REQUEST, (":authority", "x")],
            "upper case": [*REQUEST, ("X-A", "b")],
            "connection": [*REQUEST, ("connection", "close")],
            "te": [*REQUEST[:4], ("te", "gzip")],
            "a length that is none": [*REQUEST, ("content-length", "x")],
        }.items()
    },
}


@pytest.mark.parametrize("name", BAD_STREAMS)
def test_what_ends_a_stream_and_no_other(name: str) -> None:
    data, expected = BAD_STREAMS[name]
    made = opened()
    made.receive(data)
    assert reset_code(made, 1) == expected
    assert made.receive(frame(http2.HEADERS, G | E, 3, block())) == [opening(3, end=True)]


def test_data_for_a_stream_that_is_closed_is_refused_and_its_window_given_back() -> None:
    made = opened(connection_window=70_000)
    made.receive(STREAM_1)
    made.reset(1)
    made.take()
    made.receive(frame(http2.DATA, 0, 1, bytes(16_000)) * 3)
    sent = frames(made.take())
    assert [kind for kind, *_ in sent].count(http2.RST_STREAM) == 3
    assert http2.WINDOW_UPDATE in {kind for kind, *_ in sent}


def test_streams_that_are_opened_to_be_reset_end_the_connection() -> None:
    made = opened()
    number = 1
    while made.broken is None:
        assert number < 20_000, "no bound"
        made.receive(frame(http2.HEADERS, G, number, block()) + frame(http2.RST_STREAM, 0, number, bytes(4)))
        number += 2
    assert code(made) == http2.ENHANCE_YOUR_CALM


def test_resets_after_a_reply_and_over_time_do_not() -> None:
    made = opened()
    for turn in range(3000):
        number = 2 * turn + 1
        made.receive(frame(http2.HEADERS, G, number, block()))
        if turn % 2:
            made.send_headers(number, HEAD)
        made.receive(frame(http2.RST_STREAM, 0, number, bytes(4)))
        if turn % 500 == 0:
            made.rested()
    assert made.broken is None


def test_a_peer_that_sends_more_than_its_windows_is_ended() -> None:
    made = opened(stream_window=100, connection_window=70_000)
    made.receive(STREAM_1 + frame(http2.DATA, 0, 1, bytes(101)))
    assert reset_code(made, 1) == http2.FLOW_CONTROL_ERROR


# --- headers ----------------------------------------------------------------------------------------------------------


def test_headers_are_read_as_hpack_writes_them() -> None:
    chance = random.Random(7)
    writer, reader = Encoder(), HeaderDecoder()
    for _ in range(2000):
        headers = [(chance.choice([b":path", b"a", b"x-b"]), chance.randbytes(chance.randrange(80))) for _ in range(4)]
        assert [*reader.decode(writer.encode(headers, huffman=chance.random() < 0.7))] == headers
        if chance.random() < 0.02:
            writer.header_table_size = chance.choice([0, 64, 500, 4096])


def test_a_block_that_changes_nothing_is_remembered_and_one_that_does_is_not() -> None:
    reader = HeaderDecoder()
    same = b"\x82\x86"
    assert reader.decode(same) is reader.decode(same)
    new = b"\x40\x01a\x01b"
    assert [*reader.decode(new)] == [*reader.decode(new)] == [(b"a", b"b")]
    assert [*reader.decode(b"\xbe\xbf")] == [(b"a", b"b")] * 2


# --- anything ---------------------------------------------------------------------------------------------------------


def _valid() -> Iterator[bytes]:
    """Frames of a good client, in order."""
    peer = H2Connection()
    peer.initiate_connection()
    yield peer.data_to_send()
    for number in (1, 3, 5):
        peer.send_headers(number, [*REQUEST, *EXTRA])
        yield peer.data_to_send()
        peer.send_data(number, b"\0\0\0\0\3abc", end_stream=number == 3)
        yield peer.data_to_send()
    peer.ping(bytes(8))
    yield peer.data_to_send()
    peer.reset_stream(5)
    yield peer.data_to_send()


VALID = b"".join(_valid())


def _answer(made: Connection, events: list[http2.Event]) -> None:
    for event in events:
        if isinstance(event, Opened):
            made.send_headers(event.number, HEAD)
            made.send_message(event.number, b"x")
        elif isinstance(event, Data) and event.end:
            made.send_trailers(event.number, TAIL)


def _mutations() -> st.SearchStrategy[Callable[[bytearray], None]]:
    at = st.integers(0, len(VALID) - 1)

    def put(data: bytearray, where: int, byte: int) -> None:
        data[where % len(data)] = byte

    def cut(data: bytearray, where: int, size: int) -> None:
        del data[where : where + size]

    def again(data: bytearray, where: int, size: int) -> None:
        data[where:where] = data[where : where + size]

    changed = st.tuples(at, st.integers(0, 255)).map(lambda pair: lambda data: put(data, *pair))
    shorter = st.tuples(at, st.integers(1, 20)).map(lambda pair: lambda data: cut(data, *pair))
    longer = st.tuples(at, st.integers(1, 60)).map(lambda pair: lambda data: again(data, *pair))
    return st.one_of(changed, shorter, longer)


@settings(max_examples=500, deadline=None)
@given(st.lists(_mutations(), min_size=1, max_size=6), st.integers(1, 200))
def test_any_bytes_are_taken_or_end_the_connection(changes: list[Callable[[bytearray], None]], step: int) -> None:
    data = bytearray(VALID)
    for change in changes:
        if data:
            change(data)
    made = Connection()
    for at in range(0, len(data), step):
        _answer(made, made.receive(bytes(data[at : at + step])))
        frames(made.take())
    assert made.open <= 1024


def test_broken_says_why() -> None:
    assert (Broken(1, "why").code, str(Broken(1, "why"))) == (1, "why")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x16\x03\x01\x02\x00\x01", "it speaks TLS, and this port does not"),
        (b"POST /x HTTP/1.1\r\nhost: a\r\n", "it speaks HTTP/1.1"),
        (b"\x00" * 24, "no HTTP/2 preface"),
    ],
)
def test_what_is_no_http2_is_named(data: bytes, why: str) -> None:
    made = Connection()
    made.receive(data)
    assert isinstance(made.broken, http2.NotHttp2)
    assert str(made.broken).startswith(why)
