"""A conversation with a fleet of real engines, and what became of each of its turns."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any, Final

import openai
from openai.types import CompletionUsage

from tests.support.gateway.chain import Laptop

_numbers: Final = itertools.count(1)
_SYLLABLES: Final = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class Turn:
    """One request and its answer."""

    endpoint: str
    """Name of the pod it was sent to."""
    prompt: int
    """Tokens, by the engine."""
    cached: int
    """Of those, as the engine tells: from its device and from the tiers behind."""
    predicted: int
    """As the picker expected before, out of `estimated`."""
    estimated: int
    """Tokens of the prompt, as the picker thought."""
    text: str

    @classmethod
    def of(cls, text: str, usage: CompletionUsage | None, decision: Mapping[str, Any]) -> "Turn":
        """From an answer and what the picker says it decided for it."""
        assert usage is not None
        return cls(
            endpoint=decision["endpoint"].rpartition("/")[2],
            prompt=usage.prompt_tokens,
            cached=cached_of(usage),
            predicted=decision["predicted_cached_tokens"],
            estimated=decision["tokens"],
            text=text,
        )

    @property
    def read(self) -> bool:
        """Whether the picker had the prompt's ids. Where a machine has other things to do they may come too late; then
        what it predicts is a guess."""
        return self.estimated == self.prompt


def cached_of(usage: CompletionUsage) -> int:
    """Tokens of the prompt that were cached, as the engine tells."""
    details = usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details else 0


@dataclass
class Talk:
    """Messages pile up; each `say` sends them all. Words are random, so nobody has said them before."""

    fleet: Laptop
    client: openai.AsyncOpenAI
    number: int = field(default_factory=_numbers.__next__)
    messages: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._chance = Random(self.number)

    def words(self, count: int) -> str:
        """`count` words, of about two tokens each, that only this conversation has."""
        return " ".join("".join(self._chance.choices(_SYLLABLES, k=2)) for _ in range(count))

    async def say(self, text: str, *, answer: int = 8, **more: Any) -> Turn:
        """Send `text` as the user's next message; `answer` is how many tokens are generated, `more` as of `ask`."""
        self.messages.append({"role": "user", "content": text})
        turn = await ask(self.fleet, self.client, self.messages, answer=answer, **more)
        self.messages.append({"role": "assistant", "content": turn.text})
        return turn


async def ask(
    fleet: Laptop,
    client: openai.AsyncOpenAI,
    messages: list[Any],
    *,
    answer: int = 8,
    stream: bool = False,
    **more: Any,
) -> Turn:
    """One request through the gateway, with what the picker decided for it. AssertionError if the answer ends early.

    `answer` in tokens; `stream`: it comes piece by piece.
    """
    request_id = f"talk-{next(_numbers)}"
    asked: dict[str, Any] = {
        "model": fleet.chain.shape.engine.model,
        "messages": messages,
        "max_tokens": answer,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
        "extra_headers": {"x-request-id": request_id, **more.pop("headers", {})},
        **more,
    }
    text, finish, usage = "", None, None
    if stream:
        async for piece in await client.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        ):
            usage = piece.usage or usage
            for choice in piece.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    else:
        reported = await client.chat.completions.create(**asked)
        text, finish = reported.choices[0].message.content or "", reported.choices[0].finish_reason
        usage = reported.usage
    assert usage is not None
    assert (finish, usage.completion_tokens) == ("length", answer)
    decision = await fleet.chain.get(f"{fleet.chain.replicas[0].admin}/decisions/{request_id}")
    return Turn.of(text, usage, decision)
