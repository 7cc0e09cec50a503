"""Load that does not end until it is told to, of three kinds of request; every answer is checked to its last byte."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import aiohttp

PATH = "/v1/chat/completions"
TOKENS = 150
"""Of a streamed answer: about three seconds of a simulated pod."""
LARGE = 256 << 10
"""Bytes of the large bodies, most of them in a field that pods ignore."""


class Lost(NamedTuple):
    """A request without its whole answer."""

    kind: str
    era: int
    """In which it began."""
    why: str


@dataclass
class SteadyLoad:
    """What became of the requests."""

    url: str
    era: int = 0
    """To be counted up by a test that wants to know what was lost since something happened."""
    answered: Counter[str] = field(default_factory=Counter)
    """By kind."""
    pods: dict[int, set[str]] = field(default_factory=dict)
    """Which began an answer, by the era in which they did."""
    lost: list[Lost] = field(default_factory=list)
    streaming: int = 0
    """Streams of which the first event came and the last did not."""

    async def plain(self, http: aiohttp.ClientSession, number: int) -> None:
        await self._whole(http, _body(f"What is {number}?", 2))

    async def large(self, http: aiohttp.ClientSession, number: int) -> None:
        await self._whole(http, _body(f"Where is {number}?", 2) | {"metadata": {"note": "x" * LARGE}})

    async def stream(self, http: aiohttp.ClientSession, number: int) -> None:
        body = _body(f"Tell me of {number}.", TOKENS) | {"stream": True, "stream_options": {"include_usage": True}}
        events: list[bytes] = []
        async with http.post(self.url + PATH, json=body) as answer:
            if answer.status != 200:
                raise ValueError(f"{answer.status} {await answer.text()}")
            pod = self._begun(answer)
            self.streaming += 1
            try:
                async for line in answer.content:
                    if line.startswith(b"data: "):
                        events.append(line[6:].strip())
            except aiohttp.ClientError as error:
                raise ValueError(f"cut by {pod}: {error}") from error
            finally:
                self.streaming -= 1
        if events[-1:] != [b"[DONE]"] or json.loads(events[-2])["usage"]["completion_tokens"] != TOKENS:
            raise ValueError(f"the stream ended after {len(events)} events")

    async def _whole(self, http: aiohttp.ClientSession, body: dict[str, Any]) -> None:
        async with http.post(self.url + PATH, json=body) as answer:
            text = await answer.text()
            if answer.status == 200:
                self._begun(answer)
        if answer.status != 200 or json.loads(text)["usage"]["completion_tokens"] != body["max_tokens"]:
            raise ValueError(f"{answer.status} {text}")

    def _begun(self, answer: aiohttp.ClientResponse) -> str:
        pod = answer.headers["x-sim-pod"]
        self.pods.setdefault(self.era, set()).add(pod)
        return pod


def _body(prompt: str, tokens: int) -> dict[str, Any]:
    messages = [{"role": "user", "content": prompt}]
    return {"model": "sim", "messages": messages, "max_tokens": tokens, "ignore_eos": True}


@asynccontextmanager
async def steady_load(url: str, *, plain: int = 6, streams: int = 4, large: int = 2) -> AsyncIterator[SteadyLoad]:
    """Clients that send one request after another until the block ends; then the last answers are waited for."""
    load = SteadyLoad(url)
    over = asyncio.Event()

    async def client(kind: str, number: int, send: Callable[[aiohttp.ClientSession, int], Awaitable[None]]) -> None:
        while not over.is_set():
            number += 1000
            era = load.era
            try:
                await send(http, number)
                load.answered[kind] += 1
            except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                load.lost.append(Lost(kind, era, f"{type(error).__name__} {error}"[:300]))

    timeout = aiohttp.ClientTimeout(total=60)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        async with asyncio.TaskGroup() as clients:
            for kind, count, send in (
                ("plain", plain, load.plain),
                ("stream", streams, load.stream),
                ("large", large, load.large),
            ):
                for number in range(count):
                    clients.create_task(client(kind, number, send))
            try:
                yield load
            finally:
                over.set()


@dataclass
class SteadyRate:
    """Short requests that begin at a steady rate, whatever becomes of others; counted by the era they began in."""

    url: str
    era: int = 0
    answered: Counter[int] = field(default_factory=Counter)
    lost: Counter[int] = field(default_factory=Counter)
    under_way: Counter[int] = field(default_factory=Counter)

    async def one(self, http: aiohttp.ClientSession, number: int) -> None:
        era = self.era
        self.under_way[era] += 1
        body = {"model": "sim", "prompt": f"What is {number}?", "max_tokens": 2}
        try:
            async with http.post(self.url, json=body) as answer:
                await answer.read()
            (self.answered if answer.status == 200 else self.lost)[era] += 1
        except (aiohttp.ClientError, TimeoutError):
            self.lost[era] += 1
        finally:
            self.under_way[era] -= 1


@asynccontextmanager
async def steady_rate(url: str, *, per_second: float) -> AsyncIterator[SteadyRate]:
    """Requests until the block ends; then the last answers are waited for."""
    rate = SteadyRate(url)
    over = asyncio.Event()

    async def send(http: aiohttp.ClientSession, requests: asyncio.TaskGroup) -> None:
        number = 0
        while not over.is_set():
            requests.create_task(rate.one(http, number))
            number += 1
            await asyncio.sleep(1 / per_second)

    timeout = aiohttp.ClientTimeout(total=30)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as http:
        async with asyncio.TaskGroup() as requests:
            requests.create_task(send(http, requests))
            try:
                yield rate
            finally:
                over.set()
