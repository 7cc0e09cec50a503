"""The pod's HTTP endpoints: a request in, an answer or an error in vLLM's shape out."""

import asyncio
import base64
import random
import re
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from aiohttp import web

from epp import protocol
from epp.sim import tokens
from epp.sim.answers import Answer, Wish, answer, embedding
from epp.sim.asked import (
    MAX_CHOICES,
    Body,
    Chat,
    Completion,
    Detokenize,
    Embeddings,
    Messages,
    Refused,
    Responses,
    Tokenize,
    bad,
    parse,
)
from epp.sim.clockwork import Clockwork, Live, Order
from epp.sim.engine import EngineParameters
from epp.sim.faults import Faults, bad_page, hits
from epp.sim.metrics import Adapters, Page
from epp.sim.shapes import ChatShape, Choice, CompletionShape, Counted, Frame, MessagesShape, ResponsesShape, Shape
from epp.sim.tokens import Tokens

VERSION = "0.32.0"
"""The vLLM release whose wire formats and metrics are followed."""
MAX_BODY = 64 << 20
"""Bytes."""
MAX_LIVE = 8192
"""Sequences a pod holds at once, waiting or running; more are refused with 503."""
MAX_DIMENSIONS = 4096
METRICS_TYPE = "text/plain; version=1.0.0; charset=utf-8"

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DROP_AFTER = web.RequestKey("drop_after", int)


@dataclass(frozen=True)
class Identity:
    """Who this pod is."""

    name: str
    model: str
    seed: int
    parameters: EngineParameters
    max_model_len: int
    """Most tokens of prompt and answer together."""
    adapters: Adapters = field(default_factory=Adapters)


class Endpoints:
    """All handlers of one pod. `wall` gives Unix seconds, for `created` fields only."""

    def __init__(self, identity: Identity, clockwork: Clockwork, page: Page, wall: Callable[[], float]) -> None:
        self._identity = identity
        self._clockwork = clockwork
        self._page = page
        self._wall = wall
        self._faults = Faults()
        self._chance = random.Random(identity.seed)
        self._requests = 0
        self._load = 0

    def application(self) -> web.Application:
        """The aiohttp application that serves this pod."""
        app = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY)
        app.on_response_prepare.append(self._sign)
        get, post = app.router.add_get, app.router.add_post
        post("/v1/chat/completions", self._generating(Chat, ChatShape))
        post("/v1/completions", self._generating(Completion, CompletionShape))
        post("/v1/responses", self._generating(Responses, ResponsesShape))
        post("/v1/messages", self._generating(Messages, MessagesShape))
        post("/v1/messages/count_tokens", self._count_tokens)
        post("/v1/embeddings", self._embeddings)
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
            if request.path != "/metrics" and not request.path.startswith("/admin/"):
                await self._misbehave(request)
            return await handler(request)
        except Refused as refused:
            return _error(request, refused)
        except web.HTTPRequestEntityTooLarge:
            return _error(request, Refused(413, "BadRequestError", f"body: more than {MAX_BODY} bytes"))
        except (web.HTTPNotFound, web.HTTPMethodNotAllowed) as error:
            return _json({"detail": error.reason}, error.status)
        finally:
            self._load -= 1

    async def _sign(self, request: web.Request, response: web.StreamResponse) -> None:
        response.headers["x-sim-pod"] = self._identity.name
        if given := request.headers.get(protocol.REQUEST_ID):
            response.headers[protocol.REQUEST_ID] = _printable(given)

    async def _misbehave(self, request: web.Request) -> None:
        faults = self._faults
        if faults == Faults() or not hits(faults, self._chance):
            return
        if faults.refuse:
            await _cut(request)
        if faults.hang:
            await asyncio.Event().wait()
        if faults.status is not None:
            raise Refused(faults.status, "InjectedError", f"fault injected into {self._identity.name}")
        if faults.drop_after is not None:
            request[DROP_AFTER] = faults.drop_after

    # --- generating -------------------------------------------------------------------------------------------

    def _generating(self, kind: type[Body], shape: type[Shape]) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            body = parse(await request.read(), kind)
            adapter = self._adapter(body.model)
            prompts = [prompt for prompt in body.prompts() for _ in range(body.copies)]
            answers = [self._answer(prompt, body, index % body.copies) for index, prompt in enumerate(prompts)]
            self._requests += 1
            orders = self._orders(
                prompts, [(answer.generated, answer.reason) for answer in answers], body.cache_salt, adapter
            )
            options = body.stream_options
            frame = Frame(
                id=_printable(request.headers.get(protocol.REQUEST_ID, f"{self._identity.name}-{self._requests}")),
                model=body.model or self._identity.model,
                created=int(self._wall()),
                include_usage=bool(options and options.include_usage),
                limit=body.limit,
            )
            with self._clockwork.serve(orders, adapter) as lives:
                run = _Run(request, shape(frame), lives, answers)
                return await (run.stream() if body.stream else run.whole())

        return handle

    def _adapter(self, model: str | None) -> str:
        """The LoRA adapter a model name stands for, empty for the base model. Raises Refused (404)."""
        if model is None or model == self._identity.model:
            return ""
        if model in self._identity.adapters.names:
            return model
        raise Refused(404, "NotFoundError", f"The model `{model}` does not exist.", "model")

    def _answer(self, prompt: Tokens, body: Body, copy: int) -> Answer:
        asked, length = body.limit, tokens.count(prompt)
        if asked is not None and asked < 1:
            raise bad(f"max_tokens must be at least 1, got {asked}.", "max_tokens")
        self._fits(length, 1 if asked is None else asked)
        limit = self._identity.max_model_len - length if asked is None else asked
        wish = Wish(limit, min(body.min_tokens or 0, limit), bool(body.ignore_eos), body.stops)
        return answer(prompt, wish, (self._identity.seed, body.seed, copy))

    def _fits(self, prompt: int, output: int) -> None:
        most = self._identity.max_model_len
        if prompt < 1:
            raise bad("The prompt is empty, expected at least one token.", "prompt")
        if prompt + output > most:
            raise bad(
                f"This model's maximum context length is {most} tokens. However, you requested {output} output tokens"
                f" and your prompt contains {prompt} input tokens, for a total of {prompt + output} tokens. Please"
                " reduce the length of the input prompt or the number of requested output tokens.",
                "input_tokens",
            )

    def _orders(
        self, prompts: Sequence[Tokens], outputs: Sequence[tuple[Tokens, str]], salt: str | None, adapter: str
    ) -> list[Order]:
        if len(prompts) > MAX_CHOICES:
            raise bad(f"n: {len(prompts)} answers in all, expected at most {MAX_CHOICES}", "n")
        if self._clockwork.live + len(prompts) > MAX_LIVE:
            raise Refused(
                503, "ServiceUnavailableError", f"{self._clockwork.live} requests are live, at most {MAX_LIVE} may be"
            )
        size = self._identity.parameters.block_size
        return [
            Order(
                f"{self._requests}-{index}",
                tokens.hash_chain(prompt + generated, size, salt=salt or "", adapter=adapter),
                tokens.count(prompt),
                tokens.count(generated),
                reason,
            )
            for index, (prompt, (generated, reason)) in enumerate(zip(prompts, outputs, strict=True))
        ]

    async def _embeddings(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), Embeddings)
        adapter, prompts = self._adapter(body.model), body.prompts()
        dimensions = 16 if body.dimensions is None else body.dimensions
        if not 1 <= dimensions <= MAX_DIMENSIONS:
            raise bad(f"dimensions: {dimensions}, expected 1 to {MAX_DIMENSIONS}", "dimensions")
        if body.encoding_format not in (None, "float", "base64"):
            raise bad(f"encoding_format: {body.encoding_format!r}, expected 'float' or 'base64'", "encoding_format")
        for prompt in prompts:
            self._fits(tokens.count(prompt), 1)
        self._requests += 1
        one_token = (b"\0" * 4, "stop")
        with self._clockwork.serve(self._orders(prompts, [one_token] * len(prompts), None, adapter), adapter) as lives:
            await _all_done(lives)
        vectors = [embedding(prompt, dimensions, self._identity.seed) for prompt in prompts]
        packed = body.encoding_format == "base64"
        counted = sum(tokens.count(prompt) for prompt in prompts)
        return _json(
            {
                "id": f"embd-{self._identity.name}-{self._requests}",
                "object": "list",
                "created": int(self._wall()),
                "model": body.model or self._identity.model,
                "data": [
                    {
                        "index": index,
                        "object": "embedding",
                        "embedding": base64.b64encode(array("f", vector).tobytes()).decode() if packed else vector,
                    }
                    for index, vector in enumerate(vectors)
                ],
                "usage": {
                    "prompt_tokens": counted,
                    "total_tokens": counted,
                    "completion_tokens": 0,
                    "prompt_tokens_details": None,
                },
            }
        )

    # --- the rest of vLLM -------------------------------------------------------------------------------------

    async def _count_tokens(self, request: web.Request) -> web.Response:
        return _json({"input_tokens": tokens.count(parse(await request.read(), Messages).prompts()[0])})

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = parse(await request.read(), Tokenize)
        self._adapter(body.model)
        ids = tokens.unpack(body.tokens())
        return _json(
            {"count": len(ids), "max_model_len": self._identity.max_model_len, "tokens": ids, "token_strs": None}
        )

    async def _detokenize(self, request: web.Request) -> web.Response:
        try:
            return _json({"prompt": tokens.decode(tokens.pack(parse(await request.read(), Detokenize).tokens))})
        except ValueError as error:
            raise bad(f"tokens: {error}", "tokens") from None

    async def _reset_prefix_cache(self, request: web.Request) -> web.Response:
        if not self._clockwork.engine.reset_prefix_cache():
            raise Refused(409, "ConflictError", "The prefix cache is in use: requests hold blocks.")
        return web.Response()

    async def _models(self, request: web.Request) -> web.Response:
        identity = self._identity
        parents = {identity.model: None, **dict.fromkeys(identity.adapters.names, identity.model)}
        return _json(
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
        return _json({"version": VERSION})

    async def _show_load(self, request: web.Request) -> web.Response:
        return _json({"server_load": self._load - 1})

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
            await _cut(request)
        return response

    # --- faults -----------------------------------------------------------------------------------------------

    async def _show_faults(self, request: web.Request) -> web.Response:
        return _json(msgspec.to_builtins(self._faults))

    async def _set_faults(self, request: web.Request) -> web.Response:
        return self._put(parse(await request.read(), Faults))

    async def _clear_faults(self, request: web.Request) -> web.Response:
        return self._put(Faults())

    def _put(self, faults: Faults) -> web.Response:
        self._faults = faults
        self._clockwork.slow = faults.slow
        return _json(msgspec.to_builtins(faults))


class _Run:
    """One generating request under way: its tokens as they come, written as its shape says."""

    def __init__(self, request: web.Request, shape: Shape, lives: Sequence[Live], answers: Sequence[Answer]) -> None:
        self._request = request
        self._shape = shape
        self._lives = lives
        self._answers = answers
        self._chunks_left: int = request.get(DROP_AFTER, -1)

    async def whole(self) -> web.StreamResponse:
        async for _ in self._tokens():
            if self._chunks_left >= 0:
                await self._count_chunk()
        return _json(self._shape.whole(self._choices(), self._counted()))

    async def stream(self) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
        await response.prepare(self._request)
        try:
            begun = False
            async for choice, text, reason in self._tokens():
                if not begun:
                    await self._write(response, self._shape.begin(self._counted()))
                    begun = True
                await self._write(response, self._shape.token(choice, text, reason))
            await self._write(response, self._shape.end(self._choices(), self._counted()))
        except ConnectionError:
            pass  # the client has gone; leaving `serve` takes the request out of the engine
        return response

    async def _tokens(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """(choice, text, finish reason at the last) of each token when its time has come."""
        sent = [0] * len(self._lives)
        while not all(live.done and count == live.given for live, count in zip(self._lives, sent, strict=True)):
            await self._lives[0].wake.wait()
            self._lives[0].wake.clear()
            for choice, (live, ready) in enumerate(zip(self._lives, self._answers, strict=True)):
                while sent[choice] < live.given:
                    sent[choice] += 1
                    last = sent[choice] == live.job.output
                    yield choice, ready.pieces[sent[choice] - 1], ready.reason if last else None

    async def _write(self, response: web.StreamResponse, events: Sequence[bytes]) -> None:
        for data in events:
            if self._chunks_left >= 0:
                await self._count_chunk()
            await response.write(data)

    async def _count_chunk(self) -> None:
        if self._chunks_left == 0:
            await _cut(self._request)
        self._chunks_left -= 1

    def _choices(self) -> list[Choice]:
        return [Choice(answer.text, answer.reason) for answer in self._answers]

    def _counted(self) -> Counted:
        jobs = [live.job for live in self._lives]
        return Counted(
            prompt=sum(job.prompt for job in jobs),
            completion=sum(job.output for job in jobs),
            cached=sum(max(0, job.cached) for job in jobs),
        )


async def _all_done(lives: Sequence[Live]) -> None:
    while not all(live.done for live in lives):
        await lives[0].wake.wait()
        lives[0].wake.clear()


async def _cut(request: web.Request) -> None:
    """Reset the client's connection; aiohttp then cancels the handler, so this never returns."""
    if request.transport is not None:
        request.transport.abort()
    await asyncio.Event().wait()


def _json(value: Any, status: int = 200) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def _error(request: web.Request, refused: Refused) -> web.Response:
    """vLLM's error object; Anthropic's on its endpoints."""
    if request.path.startswith("/v1/messages"):
        kind = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}.get(refused.status)
        error = {"type": kind or "api_error", "message": refused.message}
        return _json({"type": "error", "error": error}, refused.status)
    details = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.status}
    return _json({"error": details}, refused.status)


def _printable(text: str) -> str:
    """A client's id, safe in a header and in JSON whatever bytes it was made of."""
    return re.sub(r"[^\x21-\x7e]", "?", text)[:256]
