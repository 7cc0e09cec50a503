"""Plays a workload against a gateway in real time, as its users would, and measures what they feel."""

import asyncio
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from statistics import quantiles
from typing import Any

import aiohttp

from tooling.simulator.workloads import Session

ANSWER_SECONDS = 120.0
"""Longest wait for one answer before it counts as lost."""


@dataclass
class Outcome:
    """What came of a workload. Times in seconds, counts in tokens."""

    requests: int = 0
    """Of the workload; what would have followed a failed one was not sent."""
    ttfts: list[float] = field(default_factory=list)
    """Of each answered request: from sending it to the first piece of text."""
    completion_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    seconds: float = 0.0
    """From the first request to the last answer's end."""
    failures: list[str] = field(default_factory=list)
    """One sentence for each request that was sent and got no whole answer."""

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return self.completion_tokens / self.seconds if self.seconds else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of the prompts' tokens that the pods found in their caches, as they reported it."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def ttft(self, percent: int) -> float:
        """A percentile (1..99) of the times to first token; 0 without answers."""
        if len(self.ttfts) < 2:
            return self.ttfts[0] if self.ttfts else 0.0
        return quantiles(self.ttfts, n=100, method="inclusive")[percent - 1]


async def play(
    sessions: Iterable[Session], url: str, model: str, on_answer: Callable[[], None] = lambda: None
) -> Outcome:
    """Send `sessions` to the OpenAI API at `url` (no path), each turn after the answer before it.

    `on_answer` is called after each request, answered or failed. A failed turn ends its session: what would follow
    depends on the answer.
    """
    outcome = Outcome()
    clock = asyncio.get_running_loop().time
    start = clock()
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def converse(session: Session) -> None:
            await asyncio.sleep(max(0.0, start + session.starts_at - clock()))
            answers: list[str] = []
            for number, turn in enumerate(session.turns):
                if number:
                    await asyncio.sleep(turn.pause)
                body = {
                    "model": model,
                    "messages": session.messages(answers),
                    "max_tokens": turn.max_tokens,
                    "ignore_eos": True,  # vLLM's: answers of exactly max_tokens, so that runs compare
                    "stream": True,
                    "stream_options": {"include_usage": True},
                }
                try:
                    answers.append(await _ask(client, f"{url}/v1/chat/completions", body, outcome, clock))
                except (aiohttp.ClientError, TimeoutError, ValueError) as error:
                    outcome.failures.append(f"{session.id}, turn {number + 1}: {str(error) or type(error).__name__}")
                    return
                finally:
                    on_answer()

        async with asyncio.TaskGroup() as group:
            for session in sessions:
                outcome.requests += len(session.turns)
                group.create_task(converse(session))
    outcome.seconds = clock() - start
    return outcome


async def _ask(
    client: aiohttp.ClientSession, url: str, body: dict[str, Any], outcome: Outcome, clock: Callable[[], float]
) -> str:
    """The answer's text. ValueError if it is not a whole one."""
    sent = clock()
    first: float | None = None
    text: list[str] = []
    usage: dict[str, Any] | None = None
    done = False
    async with client.post(url, json=body) as response:
        if response.status != 200:
            raise ValueError(f"HTTP {response.status}: {(await response.text())[:200]}")
        async for line in response.content:
            if not line.startswith(b"data: "):
                continue
            if line.startswith(b"data: [DONE]"):
                done = True
                continue
            event = json.loads(line[6:])
            usage = event.get("usage") or usage
            for choice in event["choices"]:
                if piece := choice["delta"].get("content"):
                    first = clock() if first is None else first
                    text.append(piece)
    if not done or first is None or usage is None:
        raise ValueError("the answer's stream ended too soon")
    outcome.ttfts.append(first - sent)
    outcome.prompt_tokens += usage["prompt_tokens"]
    outcome.completion_tokens += usage["completion_tokens"]
    outcome.cached_tokens += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    return "".join(text)
