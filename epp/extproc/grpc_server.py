"""The ext_proc server on grpc.aio (`--ext-proc-server grpc`): the reference that `server` is compared with."""

import asyncio
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from epp import protocol
from epp.errors import ConfigError, DeadlineExceeded, EppError, InternalError, RequestTimeout
from epp.extproc import messages
from epp.extproc.server import LIVENESS, MOST_WATCHES, Reports, Route, Settings, log, log_bug, most_connections
from epp.extproc.stream import LARGE, AnswerChunk, Answered, Full, Memory, Stream
from epp.parsing.request import NO_HEADERS, RawRequest
from epp.route import RoutedRequest
from epp.telemetry.metrics import Metrics

Context = aio.ServicerContext[bytes, bytes]
Task = asyncio.Task[object]
MAX_PENDING: Final = 20_000


class TaskDeadlines:
    """How long a stream may stay as it is: cancels each task that does not `stop` within `seconds` of its `start`
    (None = never), and all at `end`.

    One timer for all: they wait equally long, so they come due in the order they came. `asyncio.timeout` would make,
    move and cancel one for each stream.
    """

    def __init__(self, seconds: float | None = None) -> None:
        self._seconds = seconds
        self._due: dict[Task, float] = {}
        self._lost: set[Task] = set()
        self._timer: asyncio.TimerHandle | None = None

    def start(self, task: Task) -> None:
        if self._seconds is None:
            self._due[task] = 0.0
            return
        loop = task.get_loop()
        due = self._due[task] = loop.time() + self._seconds
        if self._timer is None:
            self._timer = loop.call_at(due, self._look)

    def stop(self, task: Task) -> None:
        """The task went on, or ends: to be called however it ends. A second call does nothing."""
        self._due.pop(task, None)
        self._lost.discard(task)

    def lost(self, task: Task) -> bool:
        """Whether the cancellation that `task` has just caught is ours, and no other party wants it cancelled too."""
        if task not in self._lost:
            return False
        self._lost.remove(task)
        return task.uncancel() == 0

    def end(self) -> None:
        """Cancel those who wait now."""
        for task in list(self._due):
            self._lose(task)

    def _look(self) -> None:
        self._timer = None
        for task, due in list(self._due.items()):
            loop = task.get_loop()
            if due > loop.time():
                self._timer = loop.call_at(due, self._look)
                return
            self._lose(task)

    def _lose(self, task: Task) -> None:
        del self._due[task]
        self._lost.add(task)
        task.cancel()


class GrpcServer:
    """Serves ext_proc. Each complete request enters `route` once and leaves it once, however its stream ends."""

    def __init__(self, route: Route, metrics: Metrics, settings: Settings, memory: Memory | None = None) -> None:
        self.ports: list[int] = []
        """Bound ext_proc ports, in the order of `Settings.listen`."""
        self.health_ports: list[int] = []
        self._route = route
        self._reports = Reports(metrics)
        self._sampler = self._reports.sampler(settings.watch_answers)
        self._settings = settings
        self.memory = memory or Memory(settings.max_held, settings.max_streams)
        self._ready = False
        self._draining = False
        self._leaving = False
        """Draining, and no gateway is waited for any more."""
        self._incomplete = TaskDeadlines(settings.incomplete)
        self._undecided = TaskDeadlines(settings.deadline)
        self._untaken = TaskDeadlines(settings.incomplete)
        """With streams whose gateways do not read what was sent to them."""
        self._unneeded = TaskDeadlines()
        """With streams that only wait for the answer's end: their gateways can do without us from now on."""
        self._deadlines = (self._incomplete, self._undecided, self._untaken, self._unneeded)
        self._news = asyncio.Event()
        """Set, and replaced, when health changes."""
        self._watches = 0
        self._server = aio.server(options=_options(settings))
        self._health_server = aio.server(options=_options(settings))

    async def start(self) -> None:
        """Bind and serve. Health says NOT_SERVING until `set_ready(True)`. Raises ConfigError for a taken port."""
        process = grpc.stream_stream_rpc_method_handler(self._process)
        check = grpc.unary_unary_rpc_method_handler(
            self._check,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        watch = grpc.unary_stream_rpc_method_handler(
            self._watch,
            request_deserializer=health_pb2.HealthCheckRequest.FromString,
            response_serializer=health_pb2.HealthCheckResponse.SerializeToString,
        )
        health = grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": check, "Watch": watch})
        ext_proc = grpc.method_handlers_generic_handler(protocol.EXT_PROC_SERVICE, {"Process": process})
        self._server.add_generic_rpc_handlers((ext_proc, health))
        self._health_server.add_generic_rpc_handlers((health,))
        certificate = self._settings.certificate
        tls = None if certificate is None else certificate.credentials()
        self.ports = [_bind(self._server, address, "--grpc-port", tls) for address in self._settings.listen]
        self.health_ports = [
            _bind(self._health_server, address, "--grpc-health-port", None) for address in self._settings.health
        ]
        await self._server.start()
        await self._health_server.start()

    def set_ready(self, ready: bool) -> None:
        """What health answers from now on; after `drain` it stays NOT_SERVING."""
        self._ready = ready
        self._tell_watches()

    def _tell_watches(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def drain(self, grace: float, linger: float = 0.0) -> None:
        """Say NOT_SERVING, take no new streams, let those in flight end (at most `grace` seconds), then stop.

        For `linger` seconds after NOT_SERVING new streams are still served, so that gateways that look at health go
        elsewhere first: a stream that arrives after `stop` is cancelled by grpc and has to be retried. Gateways that
        do not look, but reach us through a Service, go elsewhere when their connection has reached its age.
        Streams of the lean wiring that wait for nothing but the end of an answer end at once: a picker that ends has no
        use for the accounts they would close.
        """
        self._draining = True
        self._tell_watches()
        await asyncio.sleep(linger)
        self._leaving = True
        self._tell_watches()
        self._unneeded.end()
        await self._server.stop(grace)
        await self._health_server.stop(0)

    async def _check(self, request: Any, context: Context) -> Any:
        return self._health(request.service)

    def _health(self, service: str) -> Any:
        serving = (self._ready and not self._draining) or service == LIVENESS
        status = health_pb2.HealthCheckResponse
        return status(status=status.SERVING if serving else status.NOT_SERVING)

    async def _watch(self, request: Any, context: Context) -> None:
        if self._watches >= MOST_WATCHES:
            what = f"{MOST_WATCHES} calls watch already, which is the most"
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, what)
        self._watches += 1
        said = None
        try:
            while True:
                news = self._news
                if (status := self._health(request.service)) != said:
                    said = status
                    await context.write(status)
                if self._leaving:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "draining")
                if news is self._news:
                    await news.wait()
        finally:
            self._watches -= 1

    # --- one stream --------------------------------------------------------------------------------------------------

    async def _process(self, _: Any, context: Context) -> None:
        memory = self.memory
        stream = Stream(self._settings.max_body, memory, self._sampler)
        memory.streams += 1
        try:
            if memory.streams > memory.most:
                most = f"{memory.most} requests are served, which is the most"
                error: EppError | None = Full("too many requests at once; try again later", most)
            else:
                error = await self._serve(stream, context)
            if error is not None:
                for message in stream.failed(error):
                    await context.write(message)
            if (refused := stream.refused) is not None:
                self._reports.refused(refused)
                if stream.too_late:
                    context.set_code(grpc.StatusCode.INVALID_ARGUMENT)
                    context.set_details(refused.message)
        except aio.BaseError:
            log.debug("the gateway left in the middle of a stream")
        finally:
            memory.streams -= 1
            stream.release()

    async def _serve(self, stream: Stream, context: Context) -> EppError | None:
        task = asyncio.current_task()
        assert task is not None
        try:
            self._incomplete.start(task)
            raw = await _request(stream, context)
            self._incomplete.stop(task)
            if raw is None:
                return None
            self._undecided.start(task)
            scope = self._route(raw)
            if hasattr(scope, "queued"):
                scope.queued = lambda: self._undecided.stop(task)
            async with scope as routed:
                self._undecided.stop(task)
                del raw  # it may be large and the answer long
                self._untaken.start(task)
                await _forward(stream, routed, context)
                self._untaken.stop(task)
                if stream.sees_answer:
                    await self._answer(stream, routed, context)
                elif not self._leaving:
                    self._unneeded.start(task)
                    await self._answer(stream, routed, context)
        except EppError as refused:
            return refused
        except asyncio.CancelledError:
            if self._incomplete.lost(task):
                return RequestTimeout(f"the request was not complete within {self._settings.incomplete:g} s")
            if self._undecided.lost(task):
                return DeadlineExceeded(f"no endpoint was chosen within {self._settings.deadline:g} s")
            if self._untaken.lost(task):
                self._reports.not_reading(self._settings.incomplete)
                context.set_code(grpc.StatusCode.DEADLINE_EXCEEDED)
            elif not self._unneeded.lost(task):
                raise
        except aio.BaseError:
            raise
        except Exception as bug:
            log_bug("a request failed", bug)
            return InternalError("internal error")
        finally:
            for deadlines in self._deadlines:
                deadlines.stop(task)
        return None

    async def _answer(self, stream: Stream, routed: RoutedRequest, context: Context) -> None:
        watched = True
        task = asyncio.current_task()
        assert task is not None
        while isinstance(data := await context.read(), bytes):
            large = len(data) > LARGE
            if large:
                self._untaken.start(task)
            for action in stream.receive(data):
                if isinstance(action, bytes):
                    await context.write(action)
                elif isinstance(action, Answered):
                    headers = self._reports.show(routed, action) if watched else NO_HEADERS
                    watched = watched and headers is not None
                    await context.write(stream.answered(headers or NO_HEADERS))
                elif isinstance(action, AnswerChunk) and watched:
                    watched = self._reports.show(routed, action) is not None
            if large:
                self._untaken.stop(task)
                stream.sent()
            if stream.finished:
                return


async def _request(stream: Stream, context: Context) -> RawRequest | None:
    """The stream's request once it is complete; None if the stream ended first."""
    while isinstance(data := await context.read(), bytes):
        for action in stream.receive(data):
            if isinstance(action, RawRequest):
                return action
            if isinstance(action, bytes):
                await context.write(action)
        if stream.finished:
            break
    return None


async def _forward(stream: Stream, routed: RoutedRequest, context: Context) -> None:
    """Send the decision and whatever the gateway wants back; a body is let go of as a whole, once all of it is sent."""
    body, routed.body = routed.body, None
    for message in stream.routed(routed.destination, routed.headers, body, routed.renamed, watched=routed.watched):
        await context.write(message)
    stream.sent()


def _bind(server: aio.Server, address: str, flag: str, tls: grpc.ServerCredentials | None) -> int:
    try:
        return server.add_insecure_port(address) if tls is None else server.add_secure_port(address, tls)
    except RuntimeError as error:
        raise ConfigError(flag, f"cannot listen on {address}: is the port in use?") from error


def _options(settings: Settings) -> list[tuple[str, int]]:
    age = [("grpc.max_connection_age_ms", round(settings.connection_age * 1000))] if settings.connection_age else []
    return [
        *age,
        ("grpc.max_receive_message_length", settings.max_body + messages.MAX_HEADERS_BYTES),
        ("grpc.max_send_message_length", settings.max_body + messages.MAX_HEADERS_BYTES),
        ("grpc.max_concurrent_streams", settings.max_connection_streams),
        ("grpc.max_allowed_incoming_connections", most_connections()),
        # Streams that are not yet served. Beyond grpc's own 1,000 it drops some of all connections by chance, so
        # that one that opens and resets streams fast takes the others' with it.
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MAX_PENDING),
        ("grpc.so_reuseport", 0),  # two servers on one port would share requests silently
        # A gateway that died without a word is noticed, so that its requests' accounts are returned.
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        # Gateways ping too, ours once a second; grpc's default takes more than one in five minutes for abuse.
        ("grpc.http2.min_recv_ping_interval_without_data_ms", 500),
        ("grpc.http2.max_ping_strikes", 5),
    ]
