"""The endpoints that keep the engine busy: the four that generate, and embeddings."""

import asyncio
import base64
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp
import msgspec
from aiohttp import web

from epp import protocol
from tooling.simulator import tokenizer as tokens
from tooling.simulator.answers import Answer, Wish, answer, embedding
from tooling.simulator.engine import EngineParameters, Transfer
from tooling.simulator.metrics import Adapters
from tooling.simulator.realtime import Live, Order, RealTimeEngine
from tooling.simulator.replies import cut, json_reply, printable
from tooling.simulator.requests import MAX_CHOICES, Body, Embeddings, Refused, bad, parse
from tooling.simulator.shapes import Choice, Counted, Frame, Shape
from tooling.simulator.tokenizer import Tokens

MAX_LIVE = 8192
"""Sequences a pod holds at once, waiting or running; more are refused with 503."""
MAX_DIMENSIONS = 4096
ABORT = 480.0
"""Seconds after which KV that nobody fetched is given up: vLLM's VLLM_NIXL_ABORT_REQUEST_TIMEOUT."""

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
DROP_AFTER = web.RequestKey("drop_after", int)
"""On a request that a fault hit: chunks until its connection is cut."""


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


class Said(NamedTuple):
    """What a sequence is, beyond its hashes."""

    tokens: Tokens
    """Prompt and answer."""
    salt: str


class Generation:
    """Handlers that put sequences into the engine. `wall` gives Unix seconds, for `created` fields only."""

    def __init__(self, identity: Identity, clockwork: RealTimeEngine, wall: Callable[[], float]) -> None:
        self._identity = identity
        self._clockwork = clockwork
        self._wall = wall
        self._requests = 0

    def handler(self, kind: type[Body], shape: type[Shape]) -> Handler:
        """The handler of an endpoint that takes this body and answers in this shape."""

        async def handle(request: web.Request) -> web.StreamResponse:
            body = parse(await request.read(), kind)
            adapter = self.adapter(body.model)
            prompts = [prompt for prompt in body.prompts() for _ in range(body.copies)]
            if len(prompts) > MAX_CHOICES:
                raise bad(f"n: {len(prompts)} answers in all, expected at most {MAX_CHOICES}", "n")
            answers = [self._answer(prompt, body, index % body.copies) for index, prompt in enumerate(prompts)]
            self._requests += 1
            orders = self._orders(
                prompts, [(answer.generated, answer.reason) for answer in answers], body.cache_salt, adapter
            )
            orders = [self._apart(order, body.kv_transfer_params or {}) for order in orders]
            options = body.stream_options
            frame = Frame(
                id=printable(request.headers.get(protocol.REQUEST_ID, f"{self._identity.name}-{self._requests}")),
                model=body.model or self._identity.model,
                created=int(self._wall()),
                include_usage=bool(options and options.include_usage),
                limit=body.limit,
            )
            with self._clockwork.serve(orders, adapter) as lives:
                run = _Run(request, shape(frame), lives, answers)
                if not orders[0].keeps:
                    return await (run.stream() if body.stream else run.whole())
                found = await run.whole()
                return self._kept(request, found, orders[0].id)

        return handle

    def _apart(self, order: Order, params: Mapping[str, Any]) -> Order:
        """The order as vLLM's NixlConnector has it: prefill for another engine, or decode what one has prefilled."""
        if params.get("do_remote_decode") is True:
            return order._replace(keeps=True)
        if params.get("do_remote_prefill") is not True:
            return order
        where = f"http://{params.get('remote_host')}:{params.get('remote_port')}"
        url = f"{where}/admin/kv_fetched/{params.get('remote_request_id')}"
        return order._replace(transfer=Transfer(), on_first=lambda: self._tell_fetched(url))

    def _kept(self, request: web.Request, answer: web.StreamResponse, order: str) -> web.StreamResponse:
        """The answer to a request whose KV is kept, with where it is."""
        assert isinstance(answer, web.Response)
        assert isinstance(answer.body, bytes)
        host, _, port = request.host.rpartition(":")
        params = {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_block_ids": [],
            "remote_engine_id": self._identity.name,
            "remote_request_id": order,
            "remote_host": host,
            "remote_port": int(port) if port.isdigit() else 80,
            "tp_size": 1,
        }
        asyncio.get_running_loop().call_later(ABORT, self._clockwork.fetched, order)
        return json_reply({**msgspec.json.decode(answer.body), "kv_transfer_params": params})

    def _tell_fetched(self, url: str) -> None:
        """Tell the engine that keeps it; where that does not listen, it gives it up after a time."""

        async def tell() -> None:
            with suppress(aiohttp.ClientError, OSError):
                async with aiohttp.ClientSession() as client, client.post(url):
                    pass

        self._clockwork.spawn(tell())

    def adapter(self, model: str | None) -> str:
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
                Said(prompt + generated, salt or ""),
            )
            for index, (prompt, (generated, reason)) in enumerate(zip(prompts, outputs, strict=True))
        ]

    async def embeddings(self, request: web.Request) -> web.Response:
        """POST /v1/embeddings: a prefill each, seeded vectors of length 1."""
        body = parse(await request.read(), Embeddings)
        adapter, prompts = self.adapter(body.model), body.prompts()
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
        return json_reply(
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
        return json_reply(self._shape.whole(self._choices(), self._counted()))

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
            await cut(self._request)
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
