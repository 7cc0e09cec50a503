"""The second door, for people and their tools: metrics, readiness, endpoints, decisions, configuration, a page."""

import asyncio
import errno
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Self

import msgspec
from aiohttp import web

from epp import protocol
from epp.admin import page, views
from epp.admin.access import Access
from epp.admin.decisions import Decisions
from epp.admin.profile import LONGEST, Profiler
from epp.errors import BadRequest, ConfigError, EppError
from epp.telemetry import exposition
from epp.telemetry.metrics import Metrics

SHOWN = 20
"""Decisions on the page, and of `/decisions` without a limit."""
MOST = 1000
"""Largest `limit`: the answer is made on the event loop that also picks."""
SECONDS = 5
"""Of a profile without a number."""
OPEN = frozenset({"/ready", "/healthz"})
"""For probes: what they tell is no secret."""
KINDS = {401: "authentication_error", 403: "permission_error", 503: "service_unavailable_error"}
HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; frame-ancestors 'none'",
}


class AdminServer:
    """Serves while used as a context manager. It reads what it is given and changes nothing.

    `ready()` returns the reasons not to send us traffic, none when ready; `describe()` the active pipeline as text.
    With `access` every path but `/ready` and `/healthz` wants the token of who may get it; without, there is no login:
    bind it to an address only operators and Prometheus reach. Raises ConfigError if it cannot bind.
    """

    def __init__(
        self,
        metrics: Metrics,
        pools: Sequence[views.PoolView],
        decisions: Decisions,
        ready: Callable[[], list[str]],
        describe: Callable[[], str],
        host: str = "127.0.0.1",
        port: int = protocol.METRICS_PORT,
        *,
        access: Access | None = None,
        tls: ssl.SSLContext | None = None,
        profiles: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._metrics = metrics
        self._pools = pools
        self._decisions = decisions
        self._ready = ready
        self._describe = describe
        self._clock = clock
        self._tls = tls
        self.host = host
        self.port = port
        """Where it listens; for 0, the port it got."""
        app = web.Application(middlewares=[_guard(access)])
        app.router.add_get("/", self._index)
        app.router.add_get("/metrics", self._metrics_page)
        app.router.add_get("/ready", self._readiness)
        app.router.add_get("/healthz", self._alive)
        app.router.add_get("/endpoints", self._endpoints)
        app.router.add_get("/decisions", self._last_decisions)
        app.router.add_get("/decisions/{request_id:.+}", self._decision)
        app.router.add_get("/config", self._config)
        if profiles:
            app.router.add_get("/debug/profile", self._profile)
        self._profiler = Profiler()
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=1.0)

    async def __aenter__(self) -> Self:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.host, self.port, ssl_context=self._tls)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError("--metrics-port", _cannot_bind(self.host, self.port, error)) from error
        self.port = self._runner.addresses[0][1]
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._profiler.stop()
        await self._runner.cleanup()

    async def _index(self, request: web.Request) -> web.Response:
        shown = views.pools_view(self._pools, self._metrics, self._clock())
        text = page.page(shown, self._decisions.newest(SHOWN), self._ready())
        return web.Response(text=text, content_type="text/html")

    async def _metrics_page(self, request: web.Request) -> web.Response:
        body, content_type = await exposition.render(self._metrics.registry, request.headers.get("Accept", ""))
        return web.Response(body=body, headers={"Content-Type": content_type})

    async def _readiness(self, request: web.Request) -> web.Response:
        reasons = self._ready()
        return _json({"ready": not reasons, "reasons": reasons}, status=503 if reasons else 200)

    async def _alive(self, request: web.Request) -> web.Response:
        return web.Response(text="ok\n")

    async def _endpoints(self, request: web.Request) -> web.Response:
        return _json({"pools": views.pools_view(self._pools, self._metrics, self._clock())})

    async def _last_decisions(self, request: web.Request) -> web.Response:
        limit = _number("limit", request.query.get("limit", str(SHOWN)), MOST)
        return _json({"decisions": [record.as_dict() for record in self._decisions.newest(limit)]})

    async def _decision(self, request: web.Request) -> web.Response:
        request_id = request.match_info["request_id"]
        if (record := self._decisions.find(request_id)) is None:
            known = f"no decision of request '{request_id[:100]}' among the last {len(self._decisions)}"
            return _error(404, "not_found_error", known, "request_id")
        return _json(record.as_dict())

    async def _profile(self, request: web.Request) -> web.Response:
        seconds = _number("seconds", request.query.get("seconds", str(SECONDS)), LONGEST)
        return web.Response(text=await asyncio.to_thread(self._profiler.folded, seconds))

    async def _config(self, request: web.Request) -> web.Response:
        return web.Response(text=self._describe())


Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _guard(access: Access | None) -> Any:
    """A middleware: who may not read is told so, errors are as the OpenAI API words them, and headers keep browsers
    from doing more than show.
    """

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        answer: web.StreamResponse | None
        try:
            answer = None if access is None else await _refusal(access, request)
            answer = await handler(request) if answer is None else answer
        except EppError as error:
            answer = _error(error.status, error.kind, error.message, error.param)
        except web.HTTPException as error:
            said = f"{request.method} {request.path[:200]}: {error.reason}"
            answer = _error(error.status, "invalid_request_error", said)
            if "Allow" in error.headers:
                answer.headers["Allow"] = error.headers["Allow"]
        answer.headers.update(HEADERS)
        return answer

    return guard


async def _refusal(access: Access, request: web.Request) -> web.Response | None:
    """What to answer instead of a page that this reader may not get."""
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical.partition("/{")[0]  # of one decision: `/decisions`
    if resource is None or path in OPEN:  # there is no such page, or nothing in it
        return None
    verdict = await access.check(request.headers.get("Authorization", ""), path)
    if verdict.status == 200:
        return None
    answer = _error(verdict.status, KINDS[verdict.status], verdict.message)
    if verdict.status == 401:
        answer.headers["WWW-Authenticate"] = 'Bearer realm="warmpath"'
    return answer


def _number(name: str, text: str, most: int) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 10 and 1 <= int(text) <= most):
        raise BadRequest(f"{name}: '{text[:50]}' is not a whole number from 1 to {most}", param=name)
    return int(text)


def _json(value: dict[str, Any], status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(status: int, kind: str, message: str, param: str | None = None) -> web.Response:
    return _json({"error": {"message": message, "type": kind, "param": param, "code": None}}, status=status)


def _cannot_bind(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"{host}:{port} is in use by another process; choose another port"
    if error.errno == errno.EACCES:
        return f"no permission to listen on {host}:{port}; choose a port above 1023"
    return f"cannot listen on {host}:{port}: {error.strerror or error}"
