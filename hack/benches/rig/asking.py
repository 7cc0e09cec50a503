"""Sends the requests of a replay's trace to a real OpenAI API, as token ids, and measures what their users feel.

A piece of a prompt becomes token ids drawn by its number, so that prompts share exactly what the trace says, and their
lengths are exact; an answer that a later prompt contains is the real one.
"""

import asyncio
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import aiohttp

from hack.benches.rig.processes import BenchError
from tooling.replay.trace import Piece, Trace, TraceRequest

ANSWER_SECONDS: Final = 180.0
_IDS: Final = range(256, 4000)
"""Tokens that prompts are made of: of every vocabulary, special in none of the usual ones."""


@dataclass
class Answered:
    """A request that got its whole answer. Times are the event loop's, in seconds."""

    sent: float
    prompt: int
    cached: int
    """Prompt tokens that the engine found in its cache."""
    times: list[float] = field(default_factory=list)
    """When each generated token was here."""
    ids: list[int] = field(default_factory=list)
    """The generated tokens."""

    @property
    def ttft(self) -> float:
        return self.times[0] - self.sent

    @property
    def tpot(self) -> float:
        """Seconds per token after the first; 0 where there is none."""
        return (self.times[-1] - self.times[0]) / (len(self.times) - 1) if len(self.times) > 1 else 0.0


@dataclass(frozen=True)
class EngineClient:
    """An API and how to ask it."""

    client: aiohttp.ClientSession
    url: str
    """Without a path."""
    model: str

    async def ask(
        self, prompt: Sequence[int], output: int, session: str = "", on_first: Callable[[], None] = lambda: None
    ) -> Answered:
        """Generate exactly `output` tokens. Raises BenchError."""
        clock = asyncio.get_running_loop().time
        body = {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": output,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        headers = {"x-session-id": session} if session else {}
        answered = Answered(clock(), len(prompt), 0)
        usage: dict[str, Any] | None = None
        try:
            async with self.client.post(f"{self.url}/v1/completions", json=body, headers=headers) as response:
                if response.status != 200:
                    raise BenchError(f"HTTP {response.status}: {(await response.text())[:200]}")
                async for line in response.content:
                    if not line.startswith(b"data: {"):
                        continue
                    event = json.loads(line[6:])
                    usage = event.get("usage") or usage
                    for choice in event["choices"]:
                        ids = choice.get("token_ids") or []
                        if ids and not answered.ids:
                            on_first()
                        answered.ids += ids
                        answered.times += [clock()] * len(ids)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            raise BenchError(f"no answer from {self.url}: {str(error) or type(error).__name__}") from error
        if usage is None or len(answered.ids) != output:
            raise BenchError(f"{len(answered.ids)} token ids came from {self.url}; expected {output} (vLLM's do)")
        answered.cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return answered


def client() -> aiohttp.ClientSession:
    """For as many requests at a time as there are."""
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0))


def text(name: str, tokens: int) -> list[int]:
    """Token ids that are the same for the same name, and shared with no other name."""
    return Random(name).choices(_IDS, k=tokens)


async def paced(trace: Trace, send: Callable[[int, TraceRequest], Awaitable[None]]) -> None:
    """Send all of it at its times: `send` gets a request's number and the request, and returns when it has ended.

    What `send` raises ends it all, in a group.
    """
    loop = asyncio.get_running_loop()
    start = loop.time()
    done = [asyncio.Event() for _ in trace.asks]

    async def one(number: int, ask: TraceRequest) -> None:
        for earlier in ask.after:
            await done[earlier].wait()
        await asyncio.sleep(ask.pause if ask.after else max(0.0, start + ask.at - loop.time()))
        await send(number, ask)
        done[number].set()

    async with asyncio.TaskGroup() as group:
        for number, ask in enumerate(trace.asks):
            group.create_task(one(number, ask))


async def play(trace: Trace, engine: EngineClient, salt: str) -> list[Answered]:
    """Send all of it at its times; the answers in the order of its requests. Raises BenchError.

    Two salts share nothing: what one left in caches is of no use to the other.
    """
    answers: dict[int, list[int]] = {}
    found: list[Answered | None] = [None] * len(trace.asks)

    async def send(number: int, ask: TraceRequest) -> None:
        prompt = [id for piece in ask.prompt for id in answers.get(piece.id) or _piece(piece, salt)]
        found[number] = answered = await engine.ask(prompt, ask.output, ask.session)
        if ask.answer:
            answers[ask.answer] = answered.ids

    try:
        await paced(trace, send)
    except* BenchError as several:
        raise several.exceptions[0] from None
    return [each for each in found if each is not None]


def _piece(piece: Piece, salt: str) -> list[int]:
    return text(f"{salt} {piece.id}", piece.tokens)
