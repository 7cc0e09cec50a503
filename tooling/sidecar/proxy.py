"""`Sidecar`: passes requests on to the engine beside it; those that name a prefiller are computed there first.

Flow (nixlv2): a copy of the request that asks for one token goes to the prefiller, whose answer says where the KV cache
lies; the request itself goes to the engine beside, with these words, and the engine fetches it. With shared storage the
engine finds it by itself. Whatever goes wrong with the prefiller, the engine beside computes the prompt: slower, never
an error. What it answers is passed on byte for byte as it comes; who goes away takes the requests on both sides along.

SGLang (0.5.23, `--disaggregation-mode`) wants both to have the request at once: each is told where the prefiller's
bootstrap server is, and the number of a room in which they meet. Its engines that decode compute no prompts, so what
goes wrong with the prefiller is an error there.
"""

import asyncio
import logging
import random
import ssl
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Literal, Self
from uuid import uuid4

import aiohttp
import msgspec
from aiohttp import web
from multidict import CIMultiDict
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector
from yarl import URL

from epp import protocol
from epp.documents.addresses import address_of

log = logging.getLogger("warmpath")

Connector = Literal["nixlv2", "shared-storage", "sglang"]
_GENERATE: Final = "/inference/v1/generate"
_HOP: Final = frozenset(
    {
        "connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
        "upgrade", "host", "content-length", "expect",
    }
)  # fmt: skip
"""Headers of one connection, and those that are made anew."""
_OURS: Final = frozenset({protocol.PREFILLER, protocol.ENCODERS, protocol.DATA_PARALLEL})
_RETRIED: Final = frozenset({502, 503, 504})
_LIMITS: Final = {
    "/v1/chat/completions": ("max_tokens", "max_completion_tokens"),
    "/v1/responses": ("max_output_tokens",),
}
"""How a path's body says how many tokens are wanted, where not by `max_tokens` alone."""
_LONGEST: Final = 500
"""Bytes of an engine's error that are passed on in one of ours."""
_QUIET: Final = 60.0
"""Seconds between two lines of the log about one reason."""


@dataclass(frozen=True)
class SidecarSettings:
    """What the flags of `warmpath sidecar` say. Times in seconds, sizes in bytes."""

    host: str = "0.0.0.0"
    port: int = 8000
    model_server_port: int = 8200
    kv_connector: Connector = "nixlv2"
    sglang_bootstrap_port: int = 8998
    """Of the engines that prefill: their `--disaggregation-bootstrap-port`."""
    enable_prefiller_sampling: bool = False
    """Of several prefillers that are named, take one by chance instead of the first."""
    prefill_max_retries: int = 0
    prefill_retry_backoff: float = 0.1
    prefill_timeout: float = 120.0
    connect_timeout: float = 2.0
    max_body: int = 64 << 20
    max_requests: int = 4096
    """Served at once; more are answered 503."""
    data_parallel_size: int = 1
    """Ranks: each has its port here and at the engine, counted from the two above."""
    metrics_port: int = 0
    """0: no metrics."""
    enable_tls: frozenset[str] = frozenset()
    """Engines that are reached over TLS: `prefiller`, `decoder`."""
    tls_insecure_skip_verify: frozenset[str] = frozenset()
    """Those of them whose certificates are not verified."""
    drain_timeout: float = 30.0
    tls: ssl.SSLContext | None = None


class _NoPrefill(Exception):
    """The prefiller did not do it. `reason` is a word for metrics and a header."""

    def __init__(self, reason: str, detail: str, status: int = 502, said: str = "") -> None:
        super().__init__(detail)
        self.reason = reason
        self.status = status
        """Of an answer that says so."""
        self.said = said
        """What the prefiller answered, for who asked alone: it may quote the prompt."""


class Sidecar:
    """`async with Sidecar(settings) as sidecar`: it serves until the block ends. OSError where the port is in use."""

    def __init__(self, settings: SidecarSettings) -> None:
        self._settings = settings
        self._ports: list[int] = []
        """Of the ranks, in order."""
        self._live = 0
        self._said: dict[str, float] = {}
        self.counts = Counter[str]()
        """Requests by what became of their prompts: `prefilled` elsewhere, `local`, `fallback-REASON`; `refused`."""

    @property
    def port(self) -> int:
        return self._ports[0]

    @property
    def ports(self) -> Sequence[int]:
        """One for each data-parallel rank."""
        return self._ports

    async def __aenter__(self) -> Self:
        settings = self._settings
        app = web.Application(client_max_size=settings.max_body)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(
            app, handler_cancellation=True, access_log=None, shutdown_timeout=settings.drain_timeout
        )
        metrics = web.Application()
        metrics.router.add_get("/metrics", self._page)
        self._metrics = web.AppRunner(metrics, access_log=None)
        self._client = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=settings.connect_timeout),
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=protocol.MODEL_SERVER_IDLE),
            auto_decompress=False,
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        try:
            await self._runner.setup()
            for rank in range(settings.data_parallel_size):
                port = settings.port and settings.port + rank
                await web.TCPSite(self._runner, settings.host, port, ssl_context=settings.tls).start()
            self._ports = [address[1] for address in self._runner.addresses]
            if settings.metrics_port:
                await self._metrics.setup()
                await web.TCPSite(self._metrics, settings.host, settings.metrics_port).start()
        except BaseException:
            await self.__aexit__(None, None, None)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        await self._metrics.cleanup()
        await self._client.close()

    async def _page(self, request: web.Request) -> web.Response:
        return web.Response(body=page_of(self.counts), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        if self._live >= self._settings.max_requests:
            self.counts["refused"] += 1
            return _error(503, "server_error", f"{self._live} requests are served, which is the most; retry later")
        self._live += 1
        try:
            return await self._serve(request)
        except web.HTTPRequestEntityTooLarge:
            message = f"body: larger than {self._settings.max_body} bytes, which is the most"
            return _error(413, "invalid_request_error", message)
        finally:
            self._live -= 1

    async def _serve(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        headers = _passed(request.headers)
        if (rank := self._rank(request)) is None:
            message = f"{protocol.DATA_PARALLEL}: none of the ranks here; expected one of the ports {self._ports}"
            return _error(400, "invalid_request_error", message)
        engine = self._engine(rank)
        named = request.headers.get(protocol.PREFILLER, "")
        if not named or request.method != "POST" or request.path not in protocol.DIVIDED:
            self.counts["local"] += request.path in protocol.DIVIDED
            return await self._pass_on(request, engine, headers, body)
        headers.setdefault(protocol.REQUEST_ID, str(uuid4()))
        try:
            prefiller = self._prefiller(named)
            if prefiller.partition("://")[2] == _reached(request):  # a gateway's retry
                self.counts["local"] += 1
                return await self._pass_on(request, engine, headers, body)
            if self._settings.kv_connector == "sglang":
                return await self._together(request, engine, prefiller, headers, body)
            fetching = await self._prefilled(request.path, prefiller, headers, body)
        except _NoPrefill as error:
            self._tell(error)
            return await self._pass_on(request, engine, headers, body, {protocol.PREFILL_FALLBACK: error.reason})
        self.counts["prefilled"] += 1
        return await self._pass_on(request, engine, headers, fetching)

    def _rank(self, request: web.Request) -> int | None:
        """The data-parallel rank it is for: by the header, else by the port it came to. None: there is no such one."""
        named = request.headers.get(protocol.DATA_PARALLEL, "").rpartition(":")[2]
        sockname = None if request.transport is None else request.transport.get_extra_info("sockname")
        port = int(named) if named.isdecimal() and len(named) <= 5 else sockname[1] if sockname and not named else None
        return self._ports.index(port) if port in self._ports else None if named else 0

    def _engine(self, rank: int) -> str:
        scheme = "https" if "decoder" in self._settings.enable_tls else "http"
        return f"{scheme}://127.0.0.1:{self._settings.model_server_port + rank}"

    def _verified(self, stage: str) -> bool:
        return stage not in self._settings.tls_insecure_skip_verify

    # --- the prompt, elsewhere --------------------------------------------------------------------------------------

    def _prefiller(self, named: str) -> str:
        """`http://ip:port` of the one to ask, or `https:`. Raises _NoPrefill."""
        all_ = [each.strip() for each in named.split(",") if each.strip()]
        one = random.choice(all_) if self._settings.enable_prefiller_sampling and all_ else all_[0] if all_ else ""
        ip, _, port = one.rpartition(":")
        try:
            scheme = "https" if "prefiller" in self._settings.enable_tls else "http"
            return f"{scheme}://{address_of(ip.strip('[]'), int(port))}"
        except ValueError:
            raise _NoPrefill("malformed", f"{protocol.PREFILLER} is no ip:port") from None

    async def _prefilled(self, path: str, prefiller: str, headers: CIMultiDict[str], body: bytes) -> bytes:
        """The body for the engine beside, once the prefiller has computed the prompt. Raises _NoPrefill."""
        asked = _read(body)
        if _sampling(path, asked).get("n") not in (None, 1):
            raise _NoPrefill("unsupported", "expected one answer to one prompt")
        answer = await self._ask(f"{prefiller}{path}", headers, _one_token(path, asked, self._settings.kv_connector))
        if self._settings.kv_connector == "shared-storage":
            if "cache_hit_threshold" in asked:
                asked["cache_hit_threshold"] = 0  # it is there now
                return msgspec.json.encode(asked)
            return body
        try:
            found = msgspec.json.decode(answer)
            params = found.get("kv_transfer_params")
        except (msgspec.DecodeError, UnicodeDecodeError, AttributeError, RecursionError):
            params = None
        if not isinstance(params, dict):
            raise _NoPrefill("no-params", f"{prefiller} did not say where its KV cache is; is it a kv_producer?")
        return msgspec.json.encode({**asked, "kv_transfer_params": params})

    async def _together(
        self, request: web.Request, engine: str, prefiller: str, headers: CIMultiDict[str], body: bytes
    ) -> web.StreamResponse:
        """SGLang's answer, or what the prefiller did wrong. Raises _NoPrefill for a body that neither can read."""
        asked = _read(body)
        room = {
            "bootstrap_host": URL(prefiller).host,
            "bootstrap_port": self._settings.sglang_bootstrap_port,
            "bootstrap_room": random.getrandbits(62),  # of several prompts the others have the numbers after it
        }
        body = msgspec.json.encode(asked | room)
        for name, value in room.items():  # `/v1/messages` reads them here only
            headers[f"x-override-{name.replace('_', '-')}"] = str(value)
        async with asyncio.TaskGroup() as tasks:
            prefilling = tasks.create_task(self._failure(f"{prefiller}{request.path}", headers, body))
            decoding = tasks.create_task(self._begun(request, engine, headers, body))
            await asyncio.wait((prefilling, decoding), return_when=asyncio.FIRST_COMPLETED)
            failed = None if decoding.done() else await prefilling
            if failed is None:  # an answer begins with its first token: all of the prompt is there then
                response = await self._relayed(request, await decoding, {})
            decoding.cancel()
            prefilling.cancel()
        if failed is None:
            self.counts["prefilled"] += 1
            return response
        self._tell(failed)
        message = f"{failed}{failed.said}"
        if failed.status < 500:  # the request's own fault
            return _error(failed.status, "invalid_request_error", message)
        return _error(failed.status, "server_error", message, {protocol.PREFILL_FALLBACK: failed.reason})

    async def _failure(self, url: str, headers: CIMultiDict[str], body: bytes) -> _NoPrefill | None:
        """What the prefiller did wrong, if anything."""
        try:
            await self._ask(url, headers, body)
        except _NoPrefill as error:
            return error
        return None

    async def _ask(self, url: str, headers: CIMultiDict[str], body: bytes) -> bytes:
        """The prefiller's answer, asked again where that may help. Raises _NoPrefill."""
        settings = self._settings
        headers = headers.copy()
        headers.popall("accept-encoding", None)  # we read it
        for attempt in range(settings.prefill_max_retries + 1):
            if attempt:
                await asyncio.sleep(settings.prefill_retry_backoff)
            try:
                async with asyncio.timeout(settings.prefill_timeout):
                    verified = self._verified("prefiller")
                    async with self._client.post(url, data=body, headers=headers, ssl=verified) as response:
                        answer = await response.read()
            except TimeoutError:
                failed = _NoPrefill("timeout", f"{url} did not answer within {settings.prefill_timeout:g} s", 504)
            except (aiohttp.ClientError, OSError) as error:
                failed = _NoPrefill("unreachable", f"{url}: {type(error).__name__}: {error}")
            else:
                if response.status < 300:
                    return answer
                failed = _NoPrefill("status", f"{url} answered {response.status}", response.status, _said(answer))
                if response.status not in _RETRIED:
                    break
        raise failed

    def _tell(self, error: _NoPrefill) -> None:
        self.counts[f"fallback-{error.reason}"] += 1
        now = time.monotonic()
        if now - self._said.get(error.reason, -_QUIET) >= _QUIET:
            self._said[error.reason] = now
            log.warning("prefilled here: %s: %s", error.reason, error)

    # --- the engine beside ------------------------------------------------------------------------------------------

    async def _pass_on(
        self,
        request: web.Request,
        engine: str,
        headers: CIMultiDict[str],
        body: bytes,
        said: Mapping[str, str] = {},
    ) -> web.StreamResponse:
        return await self._relayed(request, await self._begun(request, engine, headers, body), said)

    async def _begun(
        self, request: web.Request, engine: str, headers: CIMultiDict[str], body: bytes
    ) -> aiohttp.ClientResponse | web.Response:
        """The engine's answer, of which the headers have come; or ours, where it cannot be reached."""
        url = URL(engine + request.raw_path, encoded=True)
        try:
            return await self._client.request(
                request.method,
                url,
                data=body or None,
                headers=headers,
                allow_redirects=False,
                ssl=self._verified("decoder"),
            )
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            return _error(502, "server_error", f"the engine on port {url.port}: {error}")

    async def _relayed(
        self, request: web.Request, upstream: aiohttp.ClientResponse | web.Response, said: Mapping[str, str]
    ) -> web.StreamResponse:
        """The answer, passed on to its end."""
        if isinstance(upstream, web.Response):
            return upstream
        async with upstream:
            response = web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=said)
            response.headers.extend(_passed(upstream.headers))
            if "content-length" in upstream.headers and request.method != "HEAD":
                response.content_length = int(upstream.headers["content-length"])
            await response.prepare(request)
            try:
                async for chunk in upstream.content.iter_any():
                    await response.write(chunk)
            except (aiohttp.ClientError, OSError):
                # Broken off in the middle: so is this side, or it would look whole.
                if request.transport is not None:
                    request.transport.abort()
                return response
            await response.write_eof()
        return response


def _passed(headers: Mapping[str, str]) -> CIMultiDict[str]:
    kept = CIMultiDict[str]()
    for name, value in headers.items():
        if name.lower() not in _HOP and name.lower() not in _OURS:
            kept.add(name, value)
    return kept


def _reached(request: web.Request) -> str:
    """`ip:port` that the request came to; empty once its connection is gone."""
    here = None if request.transport is None else request.transport.get_extra_info("sockname")
    return "" if here is None else address_of(*here[:2])


def _read(body: bytes) -> dict[str, Any]:
    """A request. Raises _NoPrefill."""
    try:
        asked = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise _NoPrefill("unreadable", f"the body is no JSON: {error}") from None
    if not isinstance(asked, dict):
        raise _NoPrefill("unsupported", "expected one answer to one prompt")
    return asked


def _said(answer: bytes) -> str:
    """What an error says, as far as a sentence may be long."""
    text = " ".join(answer[:_LONGEST].decode(errors="replace").split())
    return f": {text}" if text else ""


def _sampling(path: str, asked: Mapping[str, Any]) -> Mapping[str, Any]:
    """What says how it is to be answered, and with how many tokens."""
    if path != _GENERATE:
        return asked
    found = asked.get("sampling_params")
    return found if isinstance(found, dict) else {}


def _unlimited(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Without what would be wrong of an answer of one token that is not streamed."""
    return {name: value for name, value in asked.items() if name not in ("stream_options", "min_tokens")}


def _one_token(path: str, asked: Mapping[str, Any], connector: Connector) -> bytes:
    """A copy of the request of which only the prompt is wanted."""
    limits = dict.fromkeys(_LIMITS.get(path, ("max_tokens",)), 1)
    copy = _unlimited(asked) | {"stream": False}
    copy |= {"sampling_params": _unlimited(_sampling(path, asked)) | limits} if path == _GENERATE else limits
    if connector == "nixlv2":
        copy["kv_transfer_params"] = {
            "do_remote_decode": True,
            "do_remote_prefill": False,
            "remote_engine_id": None,
            "remote_block_ids": None,
            "remote_host": None,
            "remote_port": None,
        }
    return msgspec.json.encode(copy)


def page_of(counts: Mapping[str, int]) -> bytes:
    """What became of the prompts, for Prometheus."""
    family = CounterMetricFamily(
        "warmpath_sidecar_requests", "Requests by what became of their prompts.", labels=["outcome"]
    )
    for outcome, count in sorted(counts.items()):
        family.add_metric([outcome], count)
    registry = CollectorRegistry()
    registry.register(_Families(family))
    return generate_latest(registry)


class _Families(Collector):
    def __init__(self, *families: Metric) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def _error(status: int, kind: str, message: str, headers: Mapping[str, str] = {}) -> web.Response:
    error = {"message": message, "type": kind, "param": None, "code": status}
    body = msgspec.json.encode({"error": error})
    return web.Response(body=body, status=status, content_type="application/json", headers=headers)
