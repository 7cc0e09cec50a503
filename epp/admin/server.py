"""The admin server, for people and their tools: metrics, readiness, endpoints, decisions, configuration, a page."""

import asyncio
import logging
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Self

import msgspec
from aiohttp import web

from epp import protocol
from epp.admin import views
from epp.admin.access import Access
from epp.admin.history import History
from epp.admin.hosts import Hosts
from epp.admin.listener import IDLE_S, Connection, Listener, most_connections
from epp.admin.overview import Overview
from epp.admin.profile import LONGEST, Profiler
from epp.admin.recorder import Decisions
from epp.admin.screens import Explain, Screens, wants_page
from epp.admin.turns import Busy, Turns
from epp.errors import BadRequest, ConfigError, EppError, RequestTimeout, cannot_listen
from epp.parsing.request import RawRequest
from epp.telemetry import exposition
from epp.telemetry.metrics import Metrics
from epp.telemetry.pace import Pace
from epp.telemetry.text import printable

log = logging.getLogger("warmpath")
unlogged = logging.getLogger("warmpath.admin.http")
"""aiohttp's, of what is wrong with a request: a traceback for each is too much to say."""
unlogged.setLevel(logging.CRITICAL)

SHOWN = 20
"""Decisions of `/decisions` without a limit."""
MOST = 1000
"""Largest `limit`: the answer is made on the event loop that also picks."""
SECONDS = 5
"""Of a profile without a number."""
OPEN = frozenset({"/ready", "/healthz", "/static"})
"""For probes, and what every page of every picker looks like: it is no secret."""
LIGHT = OPEN | {"/", "/metrics", "/decisions", "/debug/profile", "/explain"}
"""What takes no turn: next to nothing is made on the event loop for them; or it takes one when there is something to
make."""
LARGEST_BODY = 4 << 20
"""Bytes of a request to explain."""
EXPLAINING = 4
"""Requests to explain that may be on their way to us at once."""
READ_S = 10.0
"""Within which one has to arrive."""
MOST_BYTES = 16 << 20
"""Of the decisions shown at once."""
SENDING = 64 << 20
"""Bytes of answers on their way to readers, all together."""
SEND_S = 20.0
"""Within which a reader has to take an answer."""
LONGEST_HEADER = 8 << 10
"""Bytes of a request's line, and of one header; there may be `MOST_HEADERS` of them."""
MOST_HEADERS = 64
RETRY_S = 5
"""After which a reader who was sent away may ask again."""
KINDS = {401: "authentication_error", 403: "permission_error", 503: "service_unavailable_error"}
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
}


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class AdminSettings:
    """Where the admin server listens, and to whom it answers."""

    host: str = "127.0.0.1"
    port: int = protocol.METRICS_PORT
    """0 takes a free one."""
    access: Access | None = None
    """Who may read; None: everybody who reaches it."""
    names: Sequence[str] = ()
    """Host names by which it may be called beside IP addresses and loopback's; without `access` only."""
    tls: ssl.SSLContext | None = None
    profiles: bool = False
    """Whether there is `/debug/profile`."""


DEFAULTS: Final = AdminSettings()


class AdminServer:
    """Serves while used as a context manager. It reads what it is given and changes nothing.

    `ready()` returns the reasons not to send us traffic, none when ready; `describe()` the active pipeline as text.
    With `access` every path but `/ready` and `/healthz` wants the token of who may get it; without, there is no login:
    bind it to an address only operators and Prometheus reach, and a request's Host has to be an IP address, a name of
    loopback, the `host` of its settings or one of `names`. Raises ConfigError if it cannot bind.
    """

    def __init__(
        self,
        metrics: Metrics,
        pools: Sequence[views.PoolView],
        decisions: Decisions,
        ready: Callable[[], list[str]],
        describe: Callable[[], str],
        settings: AdminSettings = DEFAULTS,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._pools = pools
        self._decisions = decisions
        self._ready = ready
        self._describe = describe
        self._clock = clock
        self._explain: Explain | None = None
        self._explaining = 0
        self._tls = settings.tls
        self.host = settings.host
        self.port = settings.port
        """Where it listens; for 0, the port it got."""
        self._access = settings.access
        self._hosts = None if settings.access is not None else Hosts(settings.host, settings.names)
        self._turns = Turns(clock)
        self._history = History(metrics, pools, decisions, clock)
        self._overview = Overview(metrics, pools, self._history, ready, clock)
        self._screens = Screens(metrics, pools, decisions, self._overview, self._turns)
        self._listener = Listener(most_connections())
        self._stack = AsyncExitStack()
        self._sending = 0
        app = web.Application(middlewares=[self._guarded()], client_max_size=LARGEST_BODY)
        app.router.add_get("/", self._screens.index)
        app.router.add_get("/static/{file}", self._screens.static)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/ready", self._readiness)
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/endpoints", self._endpoints)
        app.router.add_get("/decisions", self._last_decisions)
        app.router.add_get("/decisions/{request_id:.+}", self._decision)
        app.router.add_get("/config", self._config)
        app.router.add_get("/explain", self._form)
        app.router.add_post("/explain", self._explained)
        app.router.add_post("/explain/{path:.*}", self._explained)
        if settings.profiles:
            app.router.add_get("/debug/profile", self._profile)
        self._profiler = Profiler()
        self._runner = web.AppRunner(app, handle_signals=False, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        try:
            self._listener.bind(self.host, self.port)
        except OSError as error:
            raise ConfigError("--metrics-port", cannot_listen(f"{self.host}:{self.port}", error)) from error
        self.port = self._listener.port
        await self._runner.setup()
        tasks = await self._stack.enter_async_context(asyncio.TaskGroup())
        self._stack.callback(tasks.create_task(self._listener.serve(self._connection, self._tls)).cancel)
        self._stack.callback(tasks.create_task(self._history.run()).cancel)
        return self

    def show_replicas(self, replicas: Callable[[], dict[str, Any]]) -> None:
        """Show what this returns beside the endpoints: this replica and its peers."""
        self._overview.replicas = replicas

    def explain_by(self, explain: Explain) -> None:
        """Answer what would be decided for a request with this."""
        self._explain = explain

    def _connection(self) -> Connection:
        assert self._runner.server is not None
        return Connection(
            self._listener,
            self._runner.server,
            access_log=None,
            logger=unlogged,
            keepalive_timeout=IDLE_S,
            lingering_time=1.0,
            max_line_size=LONGEST_HEADER,
            max_field_size=LONGEST_HEADER,
            max_headers=MOST_HEADERS,
            auto_decompress=False,
        )

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.stop()
        await self._stack.aclose()
        self._listener.close()
        await self._runner.cleanup()

    def _guarded(self) -> Any:
        @web.middleware
        async def guarded(request: web.Request, handler: Handler) -> web.StreamResponse:
            connection = request.protocol
            assert isinstance(connection, Connection)
            connection.answering()
            try:
                answer = await self._answer(request, handler)
                await self._send(request, answer, connection)
            finally:
                connection.answered()
            return answer

        return guarded

    async def _answer(self, request: web.Request, handler: Handler) -> web.Response:
        """Readers without access get an error, which is as the OpenAI API words them, and headers keep browsers from
        doing more than show.
        """
        answer: web.Response | None
        try:
            answer = self._misdirected(request)
            if answer is None and self._access is not None:
                answer = await _refusal(self._access, request)
            answer = await self._page(request, handler) if answer is None else answer
            if self._sending and self._sending + _size(answer) > SENDING:
                answer = self._busy("readers do not take what they asked for")
        except Busy:
            answer = self._busy("too many readers of this port at once")
        except EppError as error:
            answer = _error(error.status, error.kind, error.message, error.param)
        except web.HTTPException as error:
            said = f"{request.method} {request.path[:200]}: {error.reason}"
            answer = _error(error.status, "invalid_request_error", said)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
        except Exception:
            log.exception("GET %s failed", _path(request))
            answer = _error(500, "api_error", "internal error")
        answer.headers.update(HEADERS)
        return answer

    async def _page(self, request: web.Request, handler: Handler) -> web.Response:
        path = _path(request)
        if path is None or path in LIGHT:
            answer = await handler(request)
        else:
            async with self._turns.turn():
                answer = await handler(request)
        assert isinstance(answer, web.Response)
        return answer

    def _misdirected(self, request: web.Request) -> web.Response | None:
        if self._hosts is None or _path(request) in OPEN:
            return None
        refusal = self._hosts.refusal(request.headers.getall("Host", []))
        return _error(421, "invalid_request_error", refusal, "Host") if refusal else None

    async def _send(self, request: web.Request, answer: web.Response, connection: Connection) -> None:
        """Within bounds: what readers do not take lies in our memory."""
        size = _size(answer)
        self._sending += size
        try:
            async with asyncio.timeout(SEND_S):
                await answer.prepare(request)
                await answer.write_eof()
        except TimeoutError:
            connection.abort()
        finally:
            self._sending -= size

    def _busy(self, why: str) -> web.Response:
        self._metrics.degraded("admin-busy", why)
        answer = _error(503, KINDS[503], f"{why}; try again in {RETRY_S} s")
        answer.headers["Retry-After"] = str(RETRY_S)
        return answer

    async def _metrics_page(self, request: web.Request) -> web.Response:
        accept = request.headers.get("Accept", "")
        _, kind = exposition.encoder(accept)
        body, content_type = await self._turns.shared(kind, lambda: exposition.render(self._metrics.registry, accept))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _readiness(self, request: web.Request) -> web.Response:
        reasons = self._ready()
        return _json({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _endpoints(self, request: web.Request) -> web.Response:
        shown: dict[str, Any] = {"pools": await views.pools_view(self._pools, self._metrics, self._clock())}
        if self._overview.replicas is not None:
            shown["replicas"] = self._overview.replicas()
        return _json(shown)

    async def _last_decisions(self, request: web.Request) -> web.Response:
        limit = _number("limit", request.query.get("limit", str(SHOWN)), MOST)
        if wants_page(request):
            return await self._screens.decisions(request, limit)
        async with self._turns.turn():
            return await self._decisions_as_json(limit)

    async def _decisions_as_json(self, limit: int) -> web.Response:
        records = [*self._decisions.newest(limit)]
        shown: list[bytes] = []
        room = MOST_BYTES
        pace = Pace()
        for record in records:
            one = msgspec.json.encode(record.as_dict())
            if (room := room - len(one)) < 0:
                break
            shown.append(one)
            await pace.rest()
        left_out = b'],"left_out":%d}' % (len(records) - len(shown))
        return web.Response(
            body=b"".join((b'{"decisions":[', b",".join(shown), left_out)), content_type="application/json"
        )

    async def _decision(self, request: web.Request) -> web.Response:
        request_id, page = request.match_info["request_id"], wants_page(request)
        async with self._turns.turn():
            if (record := self._decisions.find(request_id)) is None:
                known = f"no decision of request '{request_id[:100]}' among the last {len(self._decisions)}"
                return _error(404, "not_found_error", known, "request_id")
            return self._screens.decision(record.as_dict()) if page else _json(record.as_dict())

    async def _form(self, request: web.Request) -> web.Response:
        return self._screens.form()

    async def _explained(self, request: web.Request) -> web.Response:
        """Of a request as a client sends it, to its path below `/explain`."""
        if self._explain is None:
            raise web.HTTPNotFound
        if request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
            raise web.HTTPForbidden(reason="a page of another site may not ask this")
        if self._explaining >= EXPLAINING:
            raise Busy
        self._explaining += 1
        try:
            async with asyncio.timeout(READ_S):
                body = await request.read()
            if request.content_type == "application/x-www-form-urlencoded" and wants_page(request):
                return await self._screens.explained(request, self._explain)
            path = f"/{request.match_info['path']}" if request.match_info.get("path") else ""
            headers = {name.lower(): printable(value) for name, value in request.headers.items()}
            headers.pop("authorization", None)  # ours
            if theirs := headers.pop(protocol.EXPLAINED_AUTHORIZATION, ""):
                headers["authorization"] = theirs
            raw = RawRequest("POST" if path else "", path, headers, body)
            async with self._turns.turn():
                return _json(await self._explain(request.query.get("pool", ""), raw))
        except TimeoutError:
            raise RequestTimeout(f"the request was not complete within {READ_S:g} s") from None
        finally:
            self._explaining -= 1

    async def _profile(self, request: web.Request) -> web.Response:
        seconds = _number("seconds", request.query.get("seconds", str(SECONDS)), LONGEST)
        return web.Response(text=await asyncio.to_thread(self._profiler.folded, seconds))

    async def _config(self, request: web.Request) -> web.Response:
        return web.Response(text=self._describe())


def _path(request: web.Request) -> str | None:
    """Which page is asked for, of one decision `/decisions`; None: there is no such page."""
    resource = request.match_info.route.resource
    return None if resource is None else resource.canonical.partition("/{")[0]


async def _refusal(access: Access, request: web.Request) -> web.Response | None:
    """What to answer instead of a page that this reader may not get."""
    path = _path(request)
    if path is None or path in OPEN:  # there is no such page, or nothing in it
        return None
    verdict = await access.check(request.headers.get("Authorization", ""), path)
    if verdict.status == 200:
        return None
    answer = _error(verdict.status, KINDS[verdict.status], verdict.message)
    if verdict.status == 401:
        scheme = "Basic" if wants_page(request) else "Bearer"  # which browsers ask people for
        answer.headers["WWW-Authenticate"] = f'{scheme} realm="warmpath"'
    return answer


def _size(answer: web.Response) -> int:
    return len(answer.body) if isinstance(answer.body, bytes) else 0


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise BadRequest(f"{name}: '{text[:50]}' is not a whole number from 1 to {most}", param=name)
    return int(text)


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": None}}, status=status)
