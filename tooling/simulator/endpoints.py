"""The pod's HTTP application: all of its endpoints, errors in vLLM's shape, faults."""

import asyncio
import random
from collections.abc import Callable

import msgspec
from aiohttp import web

from epp import protocol
from tooling.simulator import tokenizer as tokens
from tooling.simulator.faults import Faults, bad_page, hits
from tooling.simulator.generation import DROP_AFTER, Generation, Handler, Identity
from tooling.simulator.metrics import Page
from tooling.simulator.publisher import Publisher
from tooling.simulator.realtime import RealTimeEngine
from tooling.simulator.replies import cut, error_reply, json_reply, printable
from tooling.simulator.requests import Chat, Completion, Detokenize, Messages, Refused, Responses, Tokenize, bad, parse
from tooling.simulator.shapes import ChatShape, CompletionShape, MessagesShape, ResponsesShape

VERSION = "0.32.0"
"""The vLLM release whose wire formats and metrics are followed."""
MAX_BODY = 64 << 20
"""Bytes."""
GRACE = 0.3
"""Seconds that answers in progress get at shutdown before they are cut; cutting may take as long again."""
_SPARED = frozenset({"/metrics", "/kv_event_sources"})
"""Paths that requests' faults do not hit."""
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"


class Endpoints:
    """All handlers of one pod. `wall` gives Unix seconds, for `created` fields only."""

    def __init__(
        self,
        identity: Identity,
        clockwork: RealTimeEngine,
        page: Page,
        wall: Callable[[], float],
        publisher: Publisher | None = None,
    ) -> None:
        self._publisher = publisher
        self._identity = identity
        self._clockwork = clockwork
        self._page = page
        self._wall = wall
        self._faults = Faults()
        self._generation = Generation(identity, clockwork, wall)
        self._chance = random.Random(identity.seed)
        self._load = 0
        self._hanging = 0

    def application(self) -> web.Application:
        """The aiohttp application that serves this pod."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.on_response_prepare.append(self._sign)
        generation = self._generation
        get, post = app.router.add_get, app.router.add_post
        post("/v1/chat/completions", generation.handler(Chat, ChatShape))
        post("/v1/completions", generation.handler(Completion, CompletionShape))
        post("/v1/responses", generation.handler(Responses, ResponsesShape))
        post("/v1/messages", generation.handler(Messages, MessagesShape))
        post("/v1/messages/count_tokens", self._count_tokens)
        post("/v1/embeddings", generation.embeddings)
        post("/tokenize", self._tokenize)
        post("/detokenize", self._detokenize)
        post("/reset_prefix_cache", self._reset_prefix_cache)
        get("/v1/models", self._models)
        for path in ("/health", "/ping"):
            get(path, self._health)
        post("/ping", self._health)
        get("/version", self._version)
        get("/load", self._show_load)
        get("/metrics", self._metrics)
        get("/kv_event_sources", self._kv_event_sources)
        post("/admin/kv_fetched/{id}", self._kv_fetched)
        get("/admin/faults", self._show_faults)
        post("/admin/faults", self._set_faults)
        app.router.add_delete("/admin/faults", self._clear_faults)
        return app

    # --- around every request ---------------------------------------------------------------------------------

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Count, apply faults, and turn every refusal into vLLM's error shape."""
        self._load += 1
        try:
            if request.path not in _SPARED and not request.path.startswith("/admin/"):
                await self._misbehave(request)
            return await handler(request)
        except Refused as refused:
            return error_reply(request, refused)
        except web.HTTPRequestEntityTooLarge:
            return error_reply(request, Refused(413, "BadRequestError", f"body: more than {MAX_BODY} bytes"))
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            return json_reply({"detail": error.reason}, error.status)
        finally:
            self._load -= 1

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-sim-pod"] = self._identity.name
        if given := request.headers.get(protocol.REQUEST_ID):
            response.headers[protocol.REQUEST_ID] = printable(given)

    async def _misbehave(self, request: web.Request) -> None:
        faults = self._faults
        if faults == Faults() or not hits(faults, self._chance):
            return
        if faults.refuse:
            await cut(request)
        if faults.hang:
            self._hanging += 1
            try:
                await asyncio.Event().wait()
            finally:
                self._hanging -= 1
        if faults.status is not None:
            raise Refused(faults.status, "InjectedError", f"fault injected into {self._identity.name}")
        if faults.drop_after is not None:
            request[DROP_AFTER] = faults.drop_after

    async def _kv_fetched(self, request: web.Request) -> web.Response:
        """In place of NIXL's side channel: another engine has what was kept for it."""
        return json_reply({"released": self._clockwork.fetched(request.match_info["id"])})

    # --- the rest of vLLM -------------------------------------------------------------------------------------

    async def _count_tokens(self, request: web.Request) -> web.Response:
        return json_reply({"input_tokens": tokens.count(parse(await request.read(), Messages).prompts()[0])})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), Tokenize)
        self._generation.adapter(body.model)
        ids = tokens.unpack(body.tokens())
        return json_reply(
            {"count": len(ids), "max_model_len": self._identity.max_model_len, "tokens": ids, "token_strs": None}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        try:
            return json_reply({"prompt": tokens.decode(tokens.pack(parse(await request.read(), Detokenize).tokens))})
        except ValueError as error:
            raise bad(f"tokens: {error}", "tokens") from None

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        if not self._clockwork.engine.reset_prefix_cache():
            raise Refused(409, "ConflictError", "The prefix cache is in use: requests hold blocks.")
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        identity = self._identity
        parents = {identity.model: None, **dict.fromkeys(identity.adapters.names, identity.model)}
        return json_reply(
            {
                "object": "list",
                "data": [
                    {
                        "id": name,
                        "object": "model",
                        "created": int(self._wall()),
                        "owned_by": "vllm",
                        "root": name,
                        "parent": parent,
                        "max_model_len": None if parent else identity.max_model_len,
                        "permission": [],
                    }
                    for name, parent in parents.items()
                ],
            }
        )

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def _version(self, request: web.Request) -> web.Response:
        return json_reply({"version": VERSION})

    async def _show_load(self, request: web.Request) -> web.Response:
        return json_reply({"server_load": self._load - 1})

    async def _kv_event_sources(self, request: web.Request) -> web.Response:
        return json_reply(self._publisher.sources() if self._publisher is not None else {})

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        kind = self._faults.metrics
        if kind == "normal":
            return web.Response(body=self._page.render(), headers={"content-type": METRICS_TYPE})
        if kind == "off":
            raise web.HTTPNotFound
        if kind == "hang":
            await asyncio.Event().wait()
        response = web.StreamResponse(headers={"content-type": METRICS_TYPE})
        await response.prepare(request)
        async for piece in bad_page(kind, self._page.render(), self._chance):
            await response.write(piece)
            await asyncio.sleep(0)
        if kind == "half":
            await cut(request)
        return response

    # --- faults -----------------------------------------------------------------------------------------------

    async def _show_faults(self, request: web.Request) -> web.Response:
        return json_reply({**msgspec.to_builtins(self._faults), "hanging": self._hanging})

    async def _set_faults(self, request: web.Request) -> web.Response:
        return self._put(parse(await request.read(), Faults))

    async def _clear_faults(self, request: web.Request) -> web.Response:
        return self._put(Faults())

    def _put(self, faults: Faults) -> web.Response:
        self._faults = faults
        self._clockwork.slow = faults.slow
        if self._publisher is not None:
            self._publisher.muted = faults.mute
        return json_reply(msgspec.to_builtins(faults))
