"""The ext_proc server: sockets, TLS, deadlines, health and drain around `http2.Connection` and `Stream`.

A request takes no task of its own: what comes on a connection is handled where it comes, and what that gives is written
at once. Only a request whose route may wait (a plugin that asks outside, a pool that is not loaded yet) gets a task,
until it is decided.

`grpc_server` does the same on grpc.aio, for comparison (`--ext-proc-server grpc`).
"""

import asyncio
import logging
import random
import resource
import ssl
import time
import traceback
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Generator, Hashable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Generic, Protocol, TypeVar, cast
from urllib.parse import quote

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from epp import protocol
from epp.errors import (
    ConfigError,
    DeadlineExceeded,
    EppError,
    InternalError,
    OwnAnswer,
    RequestTimeout,
    cannot_listen,
)
from epp.extproc import http2, messages
from epp.extproc.http2 import Data, Message, framed
from epp.extproc.stream import LARGE, AnswerChunk, Answered, Full, Memory, Sampler, Stream
from epp.extproc.tls import Certificate
from epp.parsing.request import NO_HEADERS, RawRequest
from epp.route import RoutedRequest
from epp.telemetry.metrics import Metrics

log = logging.getLogger("warmpath.extproc")

LIVENESS: Final = "liveness"
MAX_CONNECTIONS: Final = 4096
"""Of gateways, on one port; more are closed as they come."""
AGE: Final = 0.6
"""Of the drain's linger: the age of a connection at which gateways are asked to open another. The rest is for those
that take a while."""
KEEPALIVE: Final = 30.0
"""Seconds of silence after which a gateway is pinged: one that died without a word is noticed, so that its requests'
accounts are returned."""
UNANSWERED: Final = 10.0
"""Seconds a ping may take."""
TICK: Final = 1.0
"""Seconds between looks at how long connections have been silent."""
LEAVING: Final = 1.0
"""Seconds for which streams that crossed our GOAWAY are taken, where the gateway does not answer a ping sooner."""
UNREAD: Final = 1 << 20
"""Bytes that wait in a socket for a gateway to read them; beyond, they wait in their streams."""

_PARTIAL: Final = 1.125
"""Of what all streams may hold, the share at which those are refused that are in the middle of a message. `Stream`
refuses whole ones sooner, which gateways take better."""

PROCESS: Final = f"/{protocol.EXT_PROC_SERVICE}/Process".encode()
CHECK: Final = b"/grpc.health.v1.Health/Check"
WATCH: Final = b"/grpc.health.v1.Health/Watch"
MOST_WATCHES: Final = 1024
"""Calls of `Watch` that are open at once; more are refused."""
OK, INVALID_ARGUMENT, RESOURCE_EXHAUSTED, UNIMPLEMENTED, UNAVAILABLE = 0, 3, 8, 12, 14
"""gRPC status codes."""

Route = Callable[[RawRequest], AbstractAsyncContextManager[RoutedRequest]]
"""Its context managers may have an attribute `waits`: False where entering never waits. Leaving never does."""


class AnyServer(Protocol):
    """What both ext_proc servers do."""

    ports: list[int]
    health_ports: list[int]

    async def start(self) -> None: ...
    def set_ready(self, ready: bool) -> None: ...
    async def drain(self, grace: float, linger: float = 0.0) -> None: ...


T = TypeVar("T", bound=Hashable)
V = TypeVar("V")


@dataclass(frozen=True)
class Settings:
    """Where the ext_proc server listens and what it bounds. Times in seconds, sizes in bytes."""

    listen: tuple[str, ...] = (f"127.0.0.1:{protocol.GRPC_PORT}",)
    """Addresses for ext_proc (`host:port`, port 0 = any); health answers there too."""
    certificate: Certificate | None = None
    """TLS on `listen`; None = plaintext. Health's own port is always plaintext, as probes expect."""
    health: tuple[str, ...] = (f"127.0.0.1:{protocol.HEALTH_PORT}",)
    deadline: float = 10.0
    """Longest a complete request may wait for a decision: Envoy has no timer of its own in full duplex."""
    incomplete: float = 30.0
    """Longest a request may take to arrive whole, and the gateway to take its body back."""
    max_body: int = 16 << 20
    max_held: int = 1 << 30
    """Request bytes held by all streams together: bodies until they are forwarded, headers until the stream ends. This
    and the next hold for all servers that share a `Memory`."""
    max_streams: int = 16_384
    """Requests served at once, answers under way among them: in the lean wiring a stream is open until its end."""
    connection_age: float = 0.0
    """How long a gateway may use a connection for new requests, give or take a tenth; those under way on it go on. With
    `AGE` of the drain's linger none sends new ones when that is over. 0 = for ever."""
    watch_answers: float = 0.0
    """Share of the answers that are asked for where the gateway shows none by itself, and can be asked."""
    max_connection_streams: int = 1024
    """The same of one connection, announced to the gateway in HTTP/2's SETTINGS. Envoy opens another one then."""


class Deadlines(Generic[T]):
    """Calls `lost` with each thing that does not `stop` within `seconds` of its `start`.

    One timer for all: they wait equally long, so they come due in the order they came.
    """

    def __init__(self, seconds: float, lost: Callable[[T], None]) -> None:
        self._seconds = seconds
        self._lost = lost
        self._due: dict[T, float] = {}
        self._timer: asyncio.TimerHandle | None = None

    def start(self, one: T) -> None:
        loop = asyncio.get_running_loop()
        due = self._due[one] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)

    def stop(self, one: T) -> None:
        """It went on, or ends. A second call does nothing."""
        self._due.pop(one, None)

    def _look(self) -> None:
        self._timer = None
        loop = asyncio.get_running_loop()
        for one, due in [*self._due.items()]:
            if due > loop.time():
                self._timer = loop.call_at(due, self._look)
                return
            if self._due.pop(one, None) is not None:
                self._lost(one)


class Reports:
    """What both ext_proc servers report of requests and answers."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics
        self._lists_work = False
        """An endpoint answered a request for which several were named."""

    def refused(self, error: EppError) -> None:
        if isinstance(error, OwnAnswer):
            return
        self.metrics.request_failed(error.status, error.reason or error.kind)
        if isinstance(error, Full):
            self.metrics.degraded("too-much-at-once", error.what)
        elif isinstance(error, RequestTimeout):
            self.metrics.degraded("request-incomplete", error.message)

    def sampler(self, share: float) -> Sampler:
        """Of answers, where gateways show none by themselves."""
        return Sampler(share, time.monotonic, random.Random(), self._answers_not_shown, self._answers_held_back)

    def _answers_not_shown(self) -> None:
        detail = "the gateway shows none of the answers that --watch-answers asks for; does it allow mode_override?"
        self.metrics.degraded("answers-not-shown", detail)

    def _answers_held_back(self) -> None:
        detail = "the gateway passes on streamed answers when they are whole: its response body mode is BUFFERED"
        self.metrics.degraded("answers-held-back", f"{detail}; let it allow mode_override, or choose another mode")

    def not_reading(self, seconds: float) -> None:
        self.metrics.degraded("gateway-not-reading", f"what was sent to it {seconds:g} s ago is not read yet")

    def show(self, routed: RoutedRequest, action: AnswerChunk | Answered) -> Mapping[str, str] | None:
        """Headers to add to the answer. None: the observer failed; the answer goes on without being watched."""
        try:
            if type(action) is Answered:
                if not self._lists_work and "," in routed.destination:
                    self._look_at_list(action)
                return routed.answered(action.status, action.served, action.content_type, action.prefill_fallback)
            if type(action) is AnswerChunk:
                routed.answer_chunk(action.chunk, end=action.end)
            return NO_HEADERS
        except Exception as bug:
            self.not_watched(bug)
            return None

    def not_watched(self, bug: Exception) -> None:
        log_bug("an answer could not be watched", bug)
        self.metrics.degraded("answer-not-watched", type(bug).__name__)

    def _look_at_list(self, answer: Answered) -> None:
        """Whether the gateway takes a list of endpoints: one that takes a single address answers each 503 by itself."""
        if answer.served or 0 < answer.status < 500:
            self._lists_work = True
        elif answer.status == 503:
            detail = "the gateway answered 503 to a list of endpoints and has not taken one yet: does it take lists?"
            self.metrics.degraded("fallbacks-not-taken", f"{detail} if not, leave --fallbacks away")


def log_bug(what: str, bug: Exception) -> None:
    """Where it happened, without its message: that may quote a prompt."""
    log.error("%s: %s\n%s", what, type(bug).__qualname__, "".join(traceback.format_tb(bug.__traceback__)))


def most_connections() -> int:
    """At most half of the files this process may have open: the rest is for endpoints, readers and logs."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(1, min(MAX_CONNECTIONS, soft // 2))


class ExtProcServer:
    """Serves ext_proc. Each complete request enters `route` once and leaves it once, however its stream ends."""

    def __init__(self, route: Route, metrics: Metrics, settings: Settings, memory: Memory | None = None) -> None:
        self.ports: list[int] = []
        """Bound ext_proc ports, in the order of `Settings.listen`."""
        self.health_ports: list[int] = []
        self.route = route
        self.settings = settings
        self.memory = memory or Memory(settings.max_held, settings.max_streams)
        self.reports = Reports(metrics)
        self.sampler = self.reports.sampler(settings.watch_answers)
        self.leaving = False
        """Draining, and no gateway is waited for any more."""
        self.incomplete = Deadlines(settings.incomplete, Call.not_complete)
        self.undecided = Deadlines(settings.deadline, Call.not_decided)
        self.untaken = Deadlines(settings.incomplete, Call.not_read)
        self.lingering: dict[Call, None] = {}
        """Streams that only wait for the answer's end: their gateways can do without us from now on."""
        self.watches: dict[_Health, None] = {}
        """Calls that are to be told what becomes of our health."""
        self.connections: dict[GatewayConnection, None] = {}
        self._most = most_connections()
        self._ready = False
        self._draining = False
        self._idle = asyncio.Event()
        """Set while no connection is open on which ext_proc is served."""
        self._idle.set()
        self._listeners: list[tuple[asyncio.Server, bool]] = []
        """And whether ext_proc is served there."""
        self._ticking: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        """Bind and serve. Health says NOT_SERVING until `set_ready(True)`. Raises ConfigError for a taken port."""
        certificate = self.settings.certificate
        tls = None if certificate is None else certificate.context()
        try:
            for address in self.settings.listen:
                self.ports.append(await self._listen(address, "--grpc-port", tls, processes=True))
            for address in self.settings.health:
                self.health_ports.append(await self._listen(address, "--grpc-health-port", None, processes=False))
        except BaseException:
            self._stop_listening(processes=True)
            self._stop_listening(processes=False)
            raise
        self._tick()

    async def _listen(self, address: str, flag: str, tls: ssl.SSLContext | None, *, processes: bool) -> int:
        host, _, port = address.rpartition(":")
        loop = asyncio.get_running_loop()

        def connected() -> GatewayConnection:
            return GatewayConnection(self, processes=processes)

        try:
            listener = await loop.create_server(connected, host.strip("[]"), int(port), ssl=tls, backlog=1024)
        except OSError as error:
            raise ConfigError(flag, cannot_listen(address, error)) from error
        self._listeners.append((listener, processes))
        return int(listener.sockets[0].getsockname()[1])

    def set_ready(self, ready: bool) -> None:
        """What health answers from now on; after `drain` it stays NOT_SERVING."""
        self._ready = ready
        self._tell_watches()

    def _tell_watches(self) -> None:
        for watch in [*self.watches]:
            watch.tell()

    def serving(self, service: str) -> bool:
        """What health says of a service: all are one, but the process's own life."""
        return (self._ready and not self._draining) or service == LIVENESS

    async def drain(self, grace: float, linger: float = 0.0) -> None:
        """Say NOT_SERVING, take no new streams, let those in flight end (at most `grace` seconds), then stop.

        For `linger` seconds after NOT_SERVING new streams are still served, so that gateways that look at health go
        elsewhere first. Gateways that do not look, but reach us through a Service, go elsewhere when their connection
        has reached its age. Then each connection is asked to leave: streams that cross our GOAWAY are still served.
        Streams of the lean wiring that wait for nothing but the end of an answer end at once: a picker that ends has no
        use for the accounts they would close.
        """
        self._draining = True
        self._tell_watches()
        await asyncio.sleep(linger)
        self.leaving = True
        self._stop_listening(processes=True)
        for watch in [*self.watches]:
            watch.end()
        for call in [*self.lingering]:
            call.finish()
        for connection in [*self.connections]:
            if connection.processes:
                connection.leave("draining")
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            pass
        finally:
            self._stop_listening(processes=False)
            for connection in [*self.connections]:
                connection.end()
            if self._ticking is not None:
                self._ticking.cancel()

    def joined(self, connection: "GatewayConnection") -> bool:
        """Whether it may stay: there may be so many."""
        if sum(other.processes is connection.processes for other in self.connections) >= self._most:
            return False
        self.connections[connection] = None
        if connection.processes:
            self._idle.clear()
        return True

    def left(self, connection: "GatewayConnection") -> None:
        self.connections.pop(connection, None)
        if not any(other.processes for other in self.connections):
            self._idle.set()

    def _stop_listening(self, *, processes: bool) -> None:
        for listener, serves in self._listeners:
            if serves is processes:
                listener.close()

    def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        self._ticking = loop.call_later(TICK, self._tick)
        now = loop.time()
        for connection in [*self.connections]:
            connection.tick(now)


class GatewayConnection(asyncio.Protocol):
    """One connection of a gateway, or of a probe. `processes`: ext_proc is served here, beside health."""

    def __init__(self, server: ExtProcServer, *, processes: bool) -> None:
        self.http = http2.Connection(streams=server.settings.max_connection_streams)
        self.calls: dict[int, Call | _Health] = {}
        self._server = server
        self.processes = processes
        self._transport: asyncio.Transport | None = None
        self._heard = False
        """Something came since the last tick."""
        self._last = self._pinged = 0.0
        """When something came last, to a tick, and when a ping was sent since (0: none was)."""
        self._final: asyncio.TimerHandle | None = None
        self._closing: asyncio.TimerHandle | None = None
        self.leaves = False
        """The gateway was asked to use another."""
        self._why = ""
        self._flushing = False

    # --- asyncio.Protocol ---------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        transport = cast(asyncio.Transport, transport)  # uvloop's is none by its class
        self._transport = transport
        if not self._server.joined(self):
            self._transport = None
            transport.abort()
            return
        transport.set_write_buffer_limits(high=UNREAD)
        self._last = asyncio.get_running_loop().time()
        if age := self._server.settings.connection_age:
            asyncio.get_running_loop().call_later(age * random.uniform(0.9, 1.1), self.leave, "max_age")
        self.flush()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        for timer in (self._final, self._closing):
            if timer is not None:
                timer.cancel()
        for call in [*self.calls.values()]:
            call.reset()
        self.calls.clear()
        self._server.left(self)

    def eof_received(self) -> bool:
        return False

    def pause_writing(self) -> None:
        self.http.paused = True

    def resume_writing(self) -> None:
        self._handle(self.http.resume())
        self.flush()

    def data_received(self, data: bytes) -> None:
        http = self.http
        self._heard = self._flushing = True
        try:
            self._handle(http.receive(data))
        finally:
            self._flushing = False
        if self._transport is not None and (out := http.take()):
            self._transport.write(out)
        if (broken := http.broken) is not None:
            if broken.code == http2.ENHANCE_YOUR_CALM:
                self._server.reports.metrics.degraded("gateway-floods", str(broken))
            elif isinstance(broken, http2.NotHttp2):
                self._server.reports.metrics.degraded("gateway-not-http2", str(broken))
            log.debug("a connection was ended: %s", broken)
            self.end()

    # --- for calls ----------------------------------------------------------------------------------------------------

    def flush(self) -> None:
        """Write what there is, unless more is about to come."""
        if not self._flushing:
            self._write()

    def _write(self) -> None:
        if self._transport is not None and (out := self.http.take()):
            self._transport.write(out)

    def closed(self, number: int) -> None:
        """The call of this stream is over."""
        self.calls.pop(number, None)
        if self.leaves and not self.calls and self._final is None:
            self._close_soon()

    # --- leaving ------------------------------------------------------------------------------------------------------

    def leave(self, why: str) -> None:
        """Ask the gateway to use another connection; close when all that it sent before is answered."""
        if self.leaves or self._transport is None:
            return
        self.leaves = True
        self._why = why
        for call in [*self.calls.values()]:
            if isinstance(call, _Health):
                call.end()  # of itself it never would
        self.http.leave(why, finally_=False)
        self.http.ping(b"leaving!")
        self._final = asyncio.get_running_loop().call_later(LEAVING, self._leave_finally)
        self.flush()

    def _leave_finally(self) -> None:
        if self._final is None or self._transport is None:
            return
        self._final.cancel()
        self._final = None
        self.http.leave(self._why, finally_=True)
        self.flush()
        if not self.calls:
            self._close_soon()

    def _close_soon(self) -> None:
        """The gateway closes when it has read that all is said. Closing first, while it still writes, would make the
        kernel reset the connection and take the last replies with it; so that is for gateways that stay.
        """
        if self._transport is not None and self._closing is None:
            self._write()
            self._closing = asyncio.get_running_loop().call_later(LEAVING, self._transport.close)

    def end(self) -> None:
        """Close now; what is open is reset."""
        for number in self.http.numbers():
            self.http.reset(number)
        for call in [*self.calls.values()]:
            call.reset()
        if self._transport is not None:
            self._write()
            self._transport.close()
            if self._transport is not None and self.http.paused:
                self._transport.abort()

    def tick(self, now: float) -> None:
        """Some time went by."""
        self.http.rested()
        if self._heard:
            self._heard, self._last, self._pinged = False, now, 0.0
        elif self._pinged:
            if now - self._pinged > UNANSWERED and self._transport is not None:
                self._transport.abort()
        elif now - self._last > KEEPALIVE:
            self._pinged = now
            self.http.ping(b"warmpath")
            self.flush()

    # --- what comes ---------------------------------------------------------------------------------------------------

    def _handle(self, events: list[http2.Event]) -> None:
        calls = self.calls
        for event in events:
            if type(event) is Message:
                if (call := calls.get(event.number)) is not None:
                    try:
                        call.message(event.payload)
                    except Exception as bug:
                        self._failed(event.number, call, bug)
            elif type(event) is Data:
                if (call := calls.get(event.number)) is not None:
                    try:
                        call.data(event)
                    except Exception as bug:
                        self._failed(event.number, call, bug)
            elif isinstance(event, http2.Opened):
                self._open(event)
            elif isinstance(event, http2.Drained):
                # an event before this one, out of the same bytes, may have made the call write more
                if (call := self.calls.get(event.number)) is not None and not self.http.pending(event.number):
                    call.drained()
            elif isinstance(event, http2.Reset):
                if (call := self.calls.pop(event.number, None)) is not None:
                    call.reset()
                    self.closed(event.number)
            elif event.payload == b"leaving!":
                self._leave_finally()

    def _failed(self, number: int, call: "Call | _Health", bug: Exception) -> None:
        """It harms no other stream."""
        log_bug("a stream failed", bug)
        self.http.reset(number, http2.INTERNAL_ERROR)
        call.reset()

    def _open(self, event: http2.Opened) -> None:
        if event.path == PROCESS and self.processes and event.kind.startswith(GRPC):
            call: Call | _Health = Call(self._server, self, event.number)
        elif event.path in (CHECK, WATCH) and event.kind.startswith(GRPC):
            call = _Health(self._server, self, event.number, watches=event.path == WATCH)
        elif event.kind.startswith(GRPC):
            path = event.path[:100].decode("ascii", "backslashreplace")
            self.http.send_headers(event.number, failure(UNIMPLEMENTED, f"no method {path}"), end=True)
            return
        else:
            self.http.send_headers(event.number, NOT_GRPC)
            self.http.send_data(event.number, b"expected gRPC: content-type application/grpc\n")
            self.http.send_trailers(event.number, b"")
            return
        self.calls[event.number] = call
        call.opened()
        if event.end:
            call.data(Data(event.number, b"", True))


# --- gRPC ------------------------------------------------------------------------------------------------------------


def _literal(name: bytes, value: bytes) -> bytes:
    """A header that enters no table (RFC 7541 6.2.2). Both are shorter than 127 bytes."""
    return b"\x00" + bytes((len(name),)) + name + bytes((len(value),)) + value


GRPC: Final = b"application/grpc"
NOT_GRPC: Final = _literal(b":status", b"415") + _literal(b"content-type", b"text/plain")
HEAD: Final = b"\x88" + _literal(b"content-type", b"application/grpc")
GOOD: Final = _literal(b"grpc-status", b"0")


def status(code: int, message: str = "") -> bytes:
    """Trailers that say how a call ended; of the message what fits."""
    if not code:
        return GOOD
    text = quote(message[:120], safe=" !#$&'()*+,/:;=?@[]^`{|}~<>")[:120]
    return _literal(b"grpc-status", str(code).encode()) + _literal(b"grpc-message", text.encode())


def failure(code: int, message: str) -> bytes:
    """A response that is trailers alone."""
    return HEAD + status(code, message)


class Incoming:
    """gRPC's messages out of a stream's data: a byte that says whether it is compressed, four with its length."""

    __slots__ = ("_have", "_memory", "_most", "_need", "parts")

    def __init__(self, most: int, memory: Memory) -> None:
        self._most = most
        self._memory = memory
        self.parts: list[bytes] = []
        """Of an incomplete message."""
        self._have = 0
        """Bytes of `parts`; they are on account."""
        self._need = 0
        """Bytes of the message they belong to; 0 = not known yet."""

    def feed(self, data: bytes, take: Callable[[bytes], None]) -> str:
        """Call `take` with each message that is complete; returns what is wrong, or nothing."""
        if self.parts:
            missing = self._need - self._have - len(data)
            if missing > 0:
                self._keep(data)
                return ""
            if not missing:  # so most end; without joining what stands before the message first
                message = b"".join((memoryview(self.parts[0])[5:], *self.parts[1:], data))
                self.release()
                take(message)
                return ""
            data = b"".join((*self.parts, data))
            self.release()
        at = 0
        while len(data) - at >= 5:
            size = 5 + int.from_bytes(data[at + 1 : at + 5], "big")
            if data[at]:
                return "a compressed message"
            if size > self._most:
                return f"a message of {size} bytes"
            if len(data) - at < size:
                self._need = size
                break
            take(data[at + 5 : at + size])
            at += size
        if at < len(data):
            self._keep(data[at:])
        return ""

    def _keep(self, data: bytes) -> None:
        self.parts.append(data)
        self._have += len(data)
        self._memory.held += len(data)

    def release(self) -> None:
        """Let go of what is there of an incomplete message."""
        self._memory.held -= self._have
        self.parts, self._have, self._need = [], 0, 0


class _Health:
    """A call of `grpc.health.v1.Health`: of `Check`, or of `Watch`, which is told each change until one side leaves."""

    def __init__(self, server: ExtProcServer, connection: GatewayConnection, number: int, *, watches: bool) -> None:
        self._server = server
        self._connection = connection
        self._number = number
        self._watches = watches
        self._message: bytes | None = None
        self._incoming = Incoming(4096, server.memory)
        self._service = ""
        self._said: bool | None = None

    def opened(self) -> None:
        """Nothing is to be done yet."""

    def message(self, message: bytes) -> None:
        """Data that is one message."""
        self.data(Data(self._number, framed(message), False))

    def data(self, data: Data) -> None:
        wrong = self._incoming.feed(data.payload, self._take)
        if not wrong and not data.end:
            return
        if wrong or self._message is None:
            self._fail(INVALID_ARGUMENT, wrong or "no message")
            return
        try:
            self._service = health_pb2.HealthCheckRequest.FromString(self._message).service
        except DecodeError:
            self._fail(INVALID_ARGUMENT, "not a HealthCheckRequest")
            return
        server, http = self._server, self._connection.http
        if self._watches and len(server.watches) >= MOST_WATCHES:
            self._fail(RESOURCE_EXHAUSTED, f"{MOST_WATCHES} calls watch already, which is the most")
            return
        http.send_headers(self._number, HEAD)
        self.tell()
        if not self._watches:
            self._close(GOOD)
        elif server.leaving or self._connection.leaves:
            self.end()
        else:
            server.watches[self] = None

    def _take(self, message: bytes) -> None:
        self._message = message

    def tell(self) -> None:
        """Say what our health is, where that was not said last: at once, or when what was said before is read."""
        http, good = self._connection.http, self._server.serving(self._service)
        if good is not self._said and not http.pending(self._number):
            self._said = good
            http.send_message(self._number, b"\x08\x01" if good else b"\x08\x02")
            self._connection.flush()

    def end(self) -> None:
        """We leave: it is to be watched elsewhere."""
        if self._said is None:  # its request is not complete, and is answered when it is
            return
        self._close(status(UNAVAILABLE, "draining"))
        self._connection.flush()

    def _fail(self, code: int, message: str) -> None:
        self._connection.http.send_headers(self._number, failure(code, message), end=True)
        self.reset()
        self._connection.closed(self._number)

    def _close(self, trailers: bytes) -> None:
        self._connection.http.send_trailers(self._number, trailers)
        self.reset()
        self._connection.closed(self._number)

    def drained(self) -> None:
        if self._watches:
            self.tell()

    def reset(self) -> None:
        self._server.watches.pop(self, None)
        self._incoming.release()


class Call:
    """One ext_proc stream: what comes for it, its request's way through `route`, and what it is answered."""

    __slots__ = (
        "_connection", "_ended", "_half_closed", "_incoming", "_low", "_number", "_over", "_replied", "_routed",
        "_scope", "_server", "_stream", "_task", "_too_many", "_unread", "_waiting", "_watched",
    )  # fmt: skip

    def __init__(self, server: ExtProcServer, connection: GatewayConnection, number: int) -> None:
        self._server = server
        self._connection = connection
        self._number = number
        self._stream = Stream(server.settings.max_body, server.memory, server.sampler)
        self._incoming: Incoming | None = None
        """Once messages came in pieces."""
        self._scope: AbstractAsyncContextManager[RoutedRequest] | None = None
        self._routed: RoutedRequest | None = None
        self._task: asyncio.Task[None] | None = None
        self._waiting: deque[bytes] | None = None
        """Messages that came while the request waits for its decision."""
        self._too_many = False
        self._half_closed = False
        self._low = False
        """The gateway may soon send no more."""
        self._watched = True
        self._replied = False
        self._unread = False
        self._ended = False
        """Trailers are sent, or the stream was reset."""
        self._over = False

    def opened(self) -> None:
        memory = self._server.memory
        memory.streams += 1
        self._too_many = memory.streams > memory.most
        self._server.incomplete.start(self)

    # --- what comes ---------------------------------------------------------------------------------------------------

    def message(self, message: bytes) -> None:
        """Data that is one message, unless it goes on with another."""
        if self._incoming is not None and self._incoming.parts:
            self.data(Data(self._number, framed(message), False))
        elif self._ended:
            return
        elif self._waiting is not None:
            self._waiting.append(message)
            self._server.memory.held += len(message)
        elif (routed := self._routed) is None:
            self._request(message)
        elif (tail := self._stream.tail) is None or (chunk := messages.piece(message, messages.ANSWER, tail)) is None:
            self._answer(message, routed)
        else:
            self._pass(chunk, routed)

    def data(self, data: Data) -> None:
        """Several messages, or pieces of some, or what may be the last."""
        if self._ended:
            return
        if self._too_many:
            self._full()
            return
        if data.end:
            self._half_closed = True
        if data.low:
            self._low = True
        if data.payload and not self._pieces(data.payload):
            return
        if (self._half_closed or self._low) and not self._ended:
            self._go_on()

    def _pieces(self, data: bytes) -> bool:
        """Whether the stream can go on."""
        memory = self._server.memory
        if (incoming := self._incoming) is None:
            most = self._server.settings.max_body + messages.MAX_HEADERS_BYTES
            incoming = self._incoming = Incoming(most, memory)
        wrong = incoming.feed(data, self.message)
        if self._ended:
            incoming.release()  # of what followed the message that ended it
        elif wrong:
            self._end(RESOURCE_EXHAUSTED, wrong)
        elif incoming.parts and memory.held > memory.limit * _PARTIAL:
            what = f"{memory.limit} bytes of requests are held, which is the most"
            self._fail(Full("too many large requests at once; try again later", what))
        else:
            return True
        return False

    def _go_on(self) -> None:
        """After what came was handled: ask for more, or end what is over."""
        if self._waiting is None:
            if self._low and not self._unread:
                self._low = False
                self._connection.http.consumed(self._number)
            if self._half_closed:
                self.finish()

    def _pass(self, chunk: bytes, routed: RoutedRequest) -> None:
        """A piece of an answer, as `_answer` treats it."""
        if self._watched:
            try:
                routed.answer_chunk(chunk, end=False)
            except Exception as bug:
                self._watched = False
                self._server.reports.not_watched(bug)
        if not self._connection.http.send_message(self._number, messages.before_answer_chunk(len(chunk)), chunk):
            self._wait_for_reader()

    def _full(self) -> None:
        """Said now, not when it opened: a gateway may take a reply to nothing for a failure."""
        most = f"{self._server.memory.most} requests are served, which is the most"
        self._fail(Full("too many requests at once; try again later", most))

    def _request(self, message: bytes) -> None:
        if self._too_many:
            self._full()
            return
        stream = self._stream
        for action in stream.receive(message):
            if type(action) is bytes:
                self._write(action)
            elif type(action) is RawRequest:
                self._server.incomplete.stop(self)
                self._route(action)
                return
        if stream.finished:
            self._refused()

    def _answer(self, message: bytes, routed: RoutedRequest) -> None:
        stream, http, all_sent = self._stream, self._connection.http, True
        for action in stream.receive(message):
            if type(action) is bytes:
                all_sent = http.send_message(self._number, action)
            elif type(action) is Answered:
                headers = self._server.reports.show(routed, action) if self._watched else NO_HEADERS
                self._watched = self._watched and headers is not None
                all_sent = http.send_message(self._number, stream.answered(headers or NO_HEADERS))
            elif type(action) is AnswerChunk and self._watched:
                self._watched = self._server.reports.show(routed, action) is not None
        if not all_sent:
            self._wait_for_reader()
        elif len(message) > LARGE:
            stream.sent()
        if stream.finished:
            self._refused()

    # --- the decision -------------------------------------------------------------------------------------------------

    def _route(self, raw: RawRequest) -> None:
        scope = self._scope = self._server.route(raw)
        entering = scope.__aenter__()
        if getattr(scope, "waits", True):
            self._server.undecided.start(self)
            if hasattr(scope, "queued"):
                scope.queued = lambda: self._server.undecided.stop(self)
            self._enter_later(entering)
            return
        try:
            first = entering.send(None)
        except StopIteration as end:
            self._decided(end.value)
        except Exception as error:
            self._scope = None
            self._fail(_as_answer(error))
        else:
            self._enter_later(Begun(entering, first))

    def _enter_later(self, entering: "Coroutine[Any, Any, RoutedRequest] | Begun[RoutedRequest]") -> None:
        self._waiting = deque()
        self._task = asyncio.get_running_loop().create_task(self._enter(entering))
        # A task that is cancelled before its first step awaits nothing, so would never end what was to be awaited.
        self._task.add_done_callback(lambda _: entering.close())

    async def _enter(self, entering: Awaitable[RoutedRequest]) -> None:
        try:
            routed = await entering
        except Exception as error:
            self._scope = self._task = None
            self._let_through()
            if not self._ended:
                self._fail(_as_answer(error))
        except asyncio.CancelledError:
            self._scope = None
            raise
        else:
            self._task = None
            if self._ended:  # it was reset in the same moment
                self._routed = routed
                self._leave()
                return
            self._decided(routed)
            for message in self._let_through():
                self.message(message)
            if not self._ended:
                self._go_on()
        finally:
            self._task = None
            self._server.undecided.stop(self)
        self._connection.flush()

    def _let_through(self) -> list[bytes]:
        """What came meanwhile; from now on nothing waits."""
        waiting, self._waiting = [*(self._waiting or ())], None
        self._server.memory.held -= sum(map(len, waiting))
        return waiting

    def _decided(self, routed: RoutedRequest) -> None:
        """Send the decision and whatever the gateway wants back; a body is let go of once all of it is sent."""
        self._routed = routed
        stream = self._stream
        body, routed.body = routed.body, None
        all_sent = True
        for message in stream.routed(routed.destination, routed.headers, body, routed.renamed, watched=routed.watched):
            all_sent = self._write(message)
        if all_sent:
            stream.sent()
        else:
            self._wait_for_reader()
        if not stream.sees_answer:
            if self._server.leaving:
                self.finish()
            else:
                self._server.lingering[self] = None

    def _wait_for_reader(self) -> None:
        if not self._unread:
            self._unread = True
            self._server.untaken.start(self)

    def drained(self) -> None:
        """All that was written has left us."""
        if self._unread:
            self._unread = False
            self._server.untaken.stop(self)
            if not self._ended:
                self._stream.sent()
                self._go_on()
        if self._ended:
            self._done()

    # --- ends ---------------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """The stream came to its end."""
        self._end(OK)
        self._connection.flush()

    def not_complete(self) -> None:
        self._fail(RequestTimeout(f"the request was not complete within {self._server.settings.incomplete:g} s"))
        self._connection.flush()

    def not_decided(self) -> None:
        self._cancel()
        self._fail(DeadlineExceeded(f"no endpoint was chosen within {self._server.settings.deadline:g} s"))
        self._connection.flush()

    def not_read(self) -> None:
        self._server.reports.not_reading(self._server.settings.incomplete)
        self._connection.http.reset(self._number)
        connection = self._connection
        self.reset()
        connection.closed(self._number)
        connection.flush()

    def reset(self) -> None:
        """Nothing more can be sent: the gateway left, or the stream was reset."""
        self._ended = True
        self._cancel()
        self._done()

    def _cancel(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _fail(self, error: EppError) -> None:
        for message in self._stream.failed(error):
            self._write(message)
        self._refused()

    def _refused(self) -> None:
        """The stream is to be closed from our side."""
        refused = self._stream.refused
        if refused is not None:
            self._server.reports.refused(refused)
        if refused is not None and self._stream.too_late:
            self._end(INVALID_ARGUMENT, refused.message)
        else:
            self._end(OK)

    def _end(self, code: int, message: str = "") -> None:
        if self._ended:
            return
        self._ended = True
        self._cancel()
        http, number = self._connection.http, self._number
        if self._replied:
            http.send_trailers(number, status(code, message))
        else:
            http.send_headers(number, HEAD + status(code, message), end=True)
        if not self._unread:
            self._done()
        else:
            self._leave()

    def _done(self) -> None:
        """Everything is returned, once."""
        if self._over:
            return
        self._over = True
        server = self._server
        if self._scope is None or self._waiting is not None:  # it was not complete, or not decided
            server.incomplete.stop(self)
            server.undecided.stop(self)
            self._let_through()
        if self._unread:
            server.untaken.stop(self)
        if self._incoming is not None:
            self._incoming.release()
        self._leave()
        self._stream.release()
        server.memory.streams -= 1
        self._connection.closed(self._number)

    def _leave(self) -> None:
        self._server.lingering.pop(self, None)
        scope, self._scope = self._scope, None
        if scope is None or self._routed is None:
            return
        try:
            at_once(scope.__aexit__(None, None, None))
        except Exception as bug:
            log_bug("a request could not be ended", bug)

    def _write(self, message: bytes) -> bool:
        """Whether all that was written has left us."""
        http = self._connection.http
        if not self._replied:
            self._replied = True
            http.send_headers(self._number, HEAD)
        return http.send_message(self._number, message)


def _as_answer(error: Exception) -> EppError:
    if isinstance(error, EppError):
        return error
    log_bug("a request failed", error)
    return InternalError("internal error")


def at_once(waiting: Coroutine[Any, Any, V]) -> V:
    """Run what never waits, without a task."""
    try:
        waiting.send(None)
    except StopIteration as end:
        done: V = end.value
        return done
    waiting.close()
    raise RuntimeError("what was said never to wait has waited")


class Begun(Generic[V]):
    """A coroutine that has run up to its first wait without a task, and goes on in the one that awaits this.

    Until then it must not ask which task it is in.
    """

    def __init__(self, coroutine: Coroutine[Any, Any, V], first: Any) -> None:
        self._coroutine = coroutine
        self._first = first
        """What it waits for."""

    def close(self) -> None:
        """End it where it waits; nothing happens where it has ended."""
        self._coroutine.close()

    def __await__(self) -> Generator[Any, Any, V]:
        waits_for = self._first
        while True:
            try:
                sent = yield waits_for
            except BaseException as error:
                step = partial(self._coroutine.throw, error)
            else:
                step = partial(self._coroutine.send, sent)
            try:
                waits_for = step()
            except StopIteration as end:
                done: V = end.value
                return done
