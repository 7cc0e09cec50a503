"""Requests of several kinds at a steady rate, whatever becomes of others; each is checked to its last byte."""

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, Final, Literal, NamedTuple

import aiohttp

Kind = Literal["chat", "document", "stream", "abort", "malformed"]
Outcome = Literal["answered", "refused", "failed"]
SHARES: Final[Mapping[Kind, float]] = {"chat": 0.5, "document": 0.1, "stream": 0.25, "abort": 0.1, "malformed": 0.05}
"""Of all requests."""
CHAT: Final = "/v1/chat/completions"
DOCUMENTS: Final = [f"Document {n}. " + f"Clause {n} of it says what the others do not. " * 900 for n in range(8)]
"""Of 40 KB, each asked about again and again."""
STREAMED: Final = 40
"""Tokens of a streamed answer."""
LONGEST: Final = 20.0
"""Seconds after which a client gives up, and the request has failed."""
MALFORMED: Final[list[tuple[str, bytes]]] = [
    (CHAT, b'{"model": "sim", "messages": '),
    (CHAT, b'{"model": 5, "messages": []}'),
    (CHAT, b"[" * 5000),
    (CHAT, b'{"messages": "hello"}'),
    (CHAT, b"\xff\xfe\x00"),
    ("/v1/completions", b'{"model": "sim", "prompt": {"a": 1}}'),
]


class Request(NamedTuple):
    """What became of one. Times in seconds: `at` on the monotonic clock, `took` until its first byte or refusal."""

    kind: Kind
    at: float
    took: float
    outcome: Outcome
    why: str = ""


class Broken(Exception):
    """Half an answer, or another than was asked for."""


@dataclass
class MixedLoad:
    """`done`: the requests that ended, in the order of their end."""

    url: str
    seed: int = 1
    shares: Mapping[Kind, float] = field(default_factory=lambda: SHARES)
    sent: int = 0
    done: list[Request] = field(default_factory=list)

    def count(self, since: float = 0.0) -> Counter[Outcome]:
        return Counter(each.outcome for each in self.done if each.at >= since)

    async def one(self, http: aiohttp.ClientSession, kind: Kind, number: int) -> None:
        self.sent += 1
        at = time.monotonic()
        why, took = "", 0.0
        outcome: Outcome = "failed"
        try:
            outcome, took = await getattr(self, f"_{kind}")(http, number, at)
        except (aiohttp.ClientError, TimeoutError, Broken) as error:
            why, took = f"{type(error).__name__} {error}"[:200], time.monotonic() - at
        self.done.append(Request(kind, at, took, outcome, why))

    async def _chat(self, http: aiohttp.ClientSession, number: int, at: float) -> tuple[Outcome, float]:
        return await self._whole(http, _chat(f"You are brief. What is {number % 5000}?", 4), at)

    async def _document(self, http: aiohttp.ClientSession, number: int, at: float) -> tuple[Outcome, float]:
        return await self._whole(http, _chat(f"{DOCUMENTS[number % 8]} Clause {number}?", 4), at)

    async def _whole(self, http: aiohttp.ClientSession, body: Mapping[str, Any], at: float) -> tuple[Outcome, float]:
        async with http.post(self.url + CHAT, json=body) as answer:
            text = await answer.text()
        if answer.status == 200 and json.loads(text)["usage"]["completion_tokens"] != body["max_tokens"]:
            raise Broken(text)
        return _outcome(answer.status, text), time.monotonic() - at

    async def _stream(self, http: aiohttp.ClientSession, number: int, at: float) -> tuple[Outcome, float]:
        body = _chat(f"Tell me of {number}.", STREAMED) | {"stream": True}
        async with http.post(self.url + CHAT, json=body) as answer:
            if answer.status != 200:
                return _outcome(answer.status, await answer.text()), time.monotonic() - at
            first = await answer.content.readline()
            took = time.monotonic() - at
            rest = await answer.content.read()
        if not (first + rest).rstrip().endswith(b"data: [DONE]"):
            raise Broken(f"a stream ended after {(first + rest).count(b'data: ')} events")
        return "answered", took

    async def _abort(self, http: aiohttp.ClientSession, number: int, at: float) -> tuple[Outcome, float]:
        """Leaves at the first event, or, every other one, before there is an answer."""
        body = _chat(f"Nobody waits for {number}.", STREAMED) | {"stream": True}
        limit = aiohttp.ClientTimeout(total=0.005 if number % 2 else LONGEST)
        try:
            async with http.post(self.url + CHAT, json=body, timeout=limit) as answer:
                if answer.status != 200:
                    return _outcome(answer.status, await answer.text()), time.monotonic() - at
                await answer.content.readline()
        except TimeoutError:
            if not number % 2:
                raise
        return "answered", time.monotonic() - at

    async def _malformed(self, http: aiohttp.ClientSession, number: int, at: float) -> tuple[Outcome, float]:
        path, body = MALFORMED[number % len(MALFORMED)]
        async with http.post(self.url + path, data=body, headers={"content-type": "application/json"}) as answer:
            text = await answer.text()
        if answer.status == 200:
            raise Broken(f"{body[:60]!r} was answered")
        return _outcome(answer.status, text), time.monotonic() - at


def _outcome(status: int, text: str) -> Outcome:
    """A refusal is one that says why, as OpenAI's errors do."""
    if status == 200:
        return "answered"
    try:
        error = json.loads(text)["error"]
    except (ValueError, LookupError, TypeError):
        raise Broken(f"{status} {text}") from None
    if status in (500, 501):
        raise Broken(f"{status} {error}")
    return "refused"


def _chat(prompt: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "sim", "messages": messages, "max_tokens": tokens, "ignore_eos": True}


@asynccontextmanager
async def mixed_load(load: MixedLoad, per_second: float, at_once: float = inf) -> AsyncIterator[MixedLoad]:
    """Requests until the block ends; then the last are waited for. They come at times that are not even (Poisson), and
    while `at_once` are under way none does.
    """
    over = asyncio.Event()
    chance = Random(load.seed)
    kinds, weights = list(load.shares), list(load.shares.values())

    async def send(http: aiohttp.ClientSession, requests: asyncio.TaskGroup) -> None:
        number, due = 0, time.monotonic()
        while not over.is_set():
            due += chance.expovariate(per_second)
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            while load.sent - len(load.done) >= at_once and not over.is_set():
                await asyncio.sleep(0.01)
            requests.create_task(load.one(http, chance.choices(kinds, weights)[0], number))
            number += 1

    timeout = aiohttp.ClientTimeout(total=LONGEST)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        async with asyncio.TaskGroup() as requests:
            requests.create_task(send(http, requests))
            try:
                yield load
            finally:
                over.set()
