"""Mutated streams against the ext_proc server's own objects, and its HTTP/2 beside h2's. 1,000,000 take some minutes.

Conversations of a gateway (several streams each, with everything that a gateway may send) are cut, repeated, spliced
and overwritten, and given in pieces to the server's connection over a transport in memory: connection and streams are
the real ones. At the end nothing may be held or open. One conversation in a hundred goes to h2 too: where both
take all of it, they must have seen the same streams, the same bytes and the same ends.
"""

import argparse
import asyncio
import gc
import logging
import random
import resource
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, Self, cast

from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import DataReceived, RequestReceived, StreamEnded, StreamReset
from h2.exceptions import ProtocolError

from epp.extproc import http2
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.server import PROCESS, ExtProcServer, GatewayConnection, Settings
from epp.parsing.request import NO_HEADERS, RawRequest
from epp.route import RoutedRequest
from epp.telemetry.metrics import Metrics

SERVER_LOG: Final = logging.getLogger("warmpath.extproc")
HEADERS = [
    *((":method", "POST"), (":scheme", "http"), (":path", PROCESS.decode()), (":authority", "epp"), ("te", "trailers")),
    ("content-type", "application/grpc"),
]


class Routed(RoutedRequest):
    """Goes to one place; nothing is kept of its answer."""

    def __init__(self) -> None:
        self.destination = "127.0.0.1:1"
        self.renamed = self.body = None
        self.watched = False

    headers = property(lambda self: NO_HEADERS)

    def answered(
        self, status: int, served: str, content_type: str = "", prefill_fallback: str = ""
    ) -> Mapping[str, str]:
        return NO_HEADERS

    def answer_chunk(self, chunk: bytes, *, end: bool) -> None:
        """Nobody looks."""


class Errors(logging.Handler):
    """What the server calls its own mistakes, while the block runs."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())

    def __enter__(self) -> Self:
        SERVER_LOG.addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        SERVER_LOG.removeHandler(self)


class Routes:
    """Counts what enters and leaves."""

    def __init__(self) -> None:
        self.entered = self.left = 0

    @asynccontextmanager
    async def __call__(self, raw: RawRequest) -> AsyncIterator[RoutedRequest]:
        self.entered += 1
        try:
            yield Routed()
        finally:
            self.left += 1


class Memory(asyncio.Transport):
    """Takes what is written and forgets it."""

    def __init__(self, protocol: GatewayConnection) -> None:
        super().__init__()
        self._protocol = protocol
        self.closed = False
        self.written = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        self.written += len(data)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """There is no buffer."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._protocol.connection_lost(None)

    abort = close


def header(name: str, value: str) -> pb.HeaderValue:
    return pb.HeaderValue(key=name.encode(), raw_value=value.encode())


def metadata(chance: random.Random) -> pb.Metadata | None:
    """What comes with all messages of a stream's one direction: Envoy sends some even where there are none."""
    if chance.random() < 0.3:
        return None
    made = pb.Metadata()
    if chance.random() < 0.5:
        fields = made.filter_metadata.add(key=b"envoy.lb").value.fields
        fields.add(key=b"served").value.string_value = chance.randbytes(chance.choice((4, 200, 600)))
    return made


def messages(chance: random.Random) -> list[bytes]:
    """What a gateway says on one stream, as gRPC frames it."""
    said = pb.ProcessingRequest()
    said.request_headers.end_of_stream = chance.random() < 0.3
    for name, value in ((":method", "POST"), (":path", "/v1/chat/completions"), ("x-request-id", "1")):
        said.request_headers.headers.headers.append(header(name, value))
    found = [said]
    if not said.request_headers.end_of_stream:
        for end in (False, True):
            body = pb.ProcessingRequest()
            body.request_body.body = chance.randbytes(chance.choice((0, 5, 300, 20_000)))
            body.request_body.end_of_stream = end
            found.append(body)
    if chance.random() < 0.7:
        answer = pb.ProcessingRequest()
        answer.response_headers.headers.headers.append(header(":status", "200"))
        found.append(answer)
        for end in (False, True):
            piece = pb.ProcessingRequest()
            piece.response_body.body = chance.randbytes(chance.choice((0, 40, 400)))
            piece.response_body.end_of_stream = end
            found.append(piece)
    for with_it, direction in ((metadata(chance), "request"), (metadata(chance), "response")):
        for each in found:
            if with_it is not None and (each.WhichOneof("request") or "").startswith(direction):
                each.metadata_context.CopyFrom(with_it)
    return [http2.framed(each.SerializeToString()) for each in found]


def conversation(chance: random.Random) -> tuple[bytes, int]:
    """A good gateway's bytes, and the streams in them."""
    peer = H2Connection(H2Configuration(client_side=True))
    peer.initiate_connection()
    out = bytearray(peer.data_to_send())
    count = chance.randint(1, 6)
    for number in range(1, 2 * count, 2):
        extra = [("x-request-id", f"{chance.getrandbits(64):x}")] if chance.random() < 0.5 else []
        if chance.random() < 0.05:
            extra += [(f"x-{n}", "y" * 900) for n in range(30)]
        peer.send_headers(number, [*HEADERS, *extra])
        said = messages(chance)
        for at, message in enumerate(said):
            for piece in range(0, len(message), 16_384):
                last = at == len(said) - 1 and piece + 16_384 >= len(message)
                if peer.local_flow_control_window(number) < 20_000:
                    break
                peer.send_data(number, message[piece : piece + 16_384], end_stream=last and chance.random() < 0.8)
        if chance.random() < 0.1:
            peer.ping(bytes(8))
        if chance.random() < 0.1:
            peer.reset_stream(number, ErrorCodes.CANCEL)
        if chance.random() < 0.05:
            peer.update_settings({})
        out += peer.data_to_send()
    return bytes(out), count


def mutated(data: bytes, others: list[bytes], chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(0, 4)):
        at, size = chance.randrange(len(changed)), chance.choice((1, 2, 9, 30, 200))
        kind = chance.randrange(6)
        if kind == 0:
            changed[at] = chance.randrange(256)
        elif kind == 1 and len(changed) > size + 50:
            del changed[at : at + size]
        elif kind == 2:
            changed[at:at] = changed[at : at + size]
        elif kind == 3:
            changed[at:at] = chance.randbytes(size)
        elif kind == 4:
            other = chance.choice(others)
            where = chance.randrange(len(other))
            changed[at:at] = other[where : where + size]
        else:
            changed[at] ^= 1 << chance.randrange(8)
    return bytes(changed)


def pieces(data: bytes, chance: random.Random) -> Iterator[bytes]:
    step = chance.choice((1 << 20, 4096, 100, 7)) if len(data) < 4000 else chance.choice((1 << 20, 16_384, 1000))
    for at in range(0, len(data), step):
        yield data[at : at + step]


Seen = dict[int, tuple[bytes, str]]
"""Stream -> the data that came, and how it ended."""


def ours_sees(data: bytes) -> Seen | None:
    """None: it broke the connection."""
    seen: dict[int, tuple[bytes, str]] = {}
    made = http2.Connection()
    for event in made.receive(data):
        if isinstance(event, http2.Opened):
            seen[event.number] = b"", "end" if event.end else ""
        elif isinstance(event, http2.Message):
            seen[event.number] = seen[event.number][0] + http2.framed(event.payload), ""
        elif isinstance(event, http2.Data):
            seen[event.number] = seen[event.number][0] + event.payload, "end" if event.end else ""
        elif isinstance(event, http2.Reset) and event.number in seen:
            seen[event.number] = seen[event.number][0], "reset"
    return None if made.broken is not None else seen


def h2_sees(data: bytes) -> Seen | None:
    seen: dict[int, tuple[bytes, str]] = {}
    made = H2Connection(H2Configuration(client_side=False, header_encoding=None))
    made.initiate_connection()
    made.increment_flow_control_window((1 << 24) - 65_535)
    try:
        events = made.receive_data(data)
    except (ProtocolError, ValueError, IndexError, KeyError):
        return None
    for event in events:
        number = getattr(event, "stream_id", None) or 0
        if isinstance(event, RequestReceived):
            seen[number] = b"", ""
        elif isinstance(event, DataReceived):
            seen[number] = seen[number][0] + (event.data or b""), seen[number][1]
        elif isinstance(event, StreamEnded):
            seen[number] = seen[number][0], "end"
        elif isinstance(event, StreamReset) and number in seen:
            seen[number] = seen[number][0], "reset"
    return seen


def judged(data: bytes) -> str:
    """How ours and h2 compare on the same bytes. Raises AssertionError where both take them and see another thing."""
    ours, theirs = ours_sees(data), h2_sees(data)
    if ours is None or theirs is None:
        return {
            (True, True): "both broke off",
            (True, False): "ours alone broke off",
            (False, True): "h2 alone broke off",
        }[ours is None, theirs is None]
    for number in {*ours, *theirs}:
        if (one := ours.get(number)) != (other := theirs.get(number)) and "reset" not in (one or ("", "reset"))[1:]:
            raise AssertionError(f"stream {number}: ours {one!r}, h2 {other!r}: {data.hex()}")
    return "both took it"


async def throw(streams: int, seed: int, every: int, say: Callable[[str], None]) -> Counter[str]:
    with Errors() as errors:
        found = await _throw(streams, seed, every, say)
    assert not errors.said, f"{len(errors.said)} streams failed by a bug: {errors.said[0]}"
    return found


async def _throw(streams: int, seed: int, every: int, say: Callable[[str], None]) -> Counter[str]:
    chance = random.Random(seed)
    routes, found = Routes(), Counter[str]()
    server = ExtProcServer(routes, Metrics(), Settings(max_body=1 << 20))
    known = [conversation(chance) for _ in range(400)]
    others = [data for data, _ in known]
    thrown, started = 0, time.monotonic()
    while thrown < streams:
        data, count = chance.choice(known)
        thrown += count
        data = mutated(data, others, chance)
        connection = GatewayConnection(server, processes=True)
        transport = Memory(connection)
        connection.connection_made(cast(asyncio.BaseTransport, transport))
        for piece in pieces(data, chance):
            if transport.closed:
                break
            connection.data_received(piece)
            if chance.random() < 0.2:
                await asyncio.sleep(0)
        await asyncio.sleep(0)
        broken = connection.http.broken
        found[f"ended by error {broken.code}" if broken is not None else "went on to the end"] += 1
        transport.close()
        if chance.randrange(every) == 0:
            found[judged(data)] += 1
        if thrown // 50_000 != (thrown - count) // 50_000:
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
            rate = thrown / (time.monotonic() - started)
            figures = f"{rate:,.0f} a second, {routes.entered:,} routed, at most {memory} MB"
            say(f"{thrown:>9,} streams, {figures}, {len(gc.get_objects()):,} objects")
    while routes.left != routes.entered:
        await asyncio.sleep(0)
    gc.collect()
    memory_held = server.memory.held, server.memory.streams, len(server.connections), len(server.lingering)
    assert memory_held == (0, 0, 0, 0), f"held, streams, connections, lingering: {memory_held}"
    found["requests routed, and left"] = routes.left
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/bench http2_fuzz", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--streams", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--every", type=int, default=100, help="one conversation in so many goes to h2 too")
    given = parser.parse_args()
    found = asyncio.run(throw(given.streams, given.seed, given.every, lambda line: print(line, flush=True)))
    for what, count in sorted(found.items()):
        print(f"{count:>9,}  {what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
