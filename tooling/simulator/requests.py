"""What a pod is asked: the bodies of vLLM's endpoints, decoded strictly where the simulator uses a field.

Fields it does not use (temperature, logprobs, …) are accepted and ignored, as their effect is not modelled.
"""

import re
from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from epp.parsing.media import condensed, shows_media
from tooling.simulator import tokenizer as tokens
from tooling.simulator.tokenizer import Tokens

MAX_CHOICES = 64
"""Most answers one request may ask for (prompts times `n`)."""


class Refused(Exception):
    """A request that is answered with an error in vLLM's JSON shape."""

    def __init__(self, status: int, kind: str, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind
        """vLLM's `error.type`: BadRequestError, NotFoundError, …"""
        self.message = message
        self.param = param


def bad(message: str, param: str | None = None) -> Refused:
    return Refused(400, "BadRequestError", message, param)


class StreamOptions(Struct):
    include_usage: bool | None = None


class Body(Struct, kw_only=True):
    """What all generating requests have in common. None is the same as absent, as clients send either."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    cache_salt: str | None = None
    kv_transfer_params: dict[str, Any] | None = None

    def prompts(self) -> list[Tokens]:
        """The token sequences to continue, at least one."""
        raise NotImplementedError

    @property
    def limit(self) -> int | None:
        """Most tokens to generate, None where the request leaves it open."""
        return self.max_tokens

    @property
    def stops(self) -> Sequence[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or ()

    @property
    def copies(self) -> int:
        """Answers wanted for each prompt."""
        return 1


class Several(Body, kw_only=True):
    """A body that may ask for several answers to one prompt."""

    n: int | None = None

    @property
    def copies(self) -> int:
        copies = 1 if self.n is None else self.n
        if not 1 <= copies <= MAX_CHOICES:
            raise bad(f"n: {copies}, expected 1 to {MAX_CHOICES}", "n")
        return copies


def _seen(messages: list[dict[str, Any]], model: str | None) -> list[dict[str, Any]]:
    """The messages with a text in place of each image, video and clip, as long as the tokens that it becomes."""
    raw = msgspec.Raw(msgspec.json.encode(messages))
    found = condensed(bytes(raw), model or "") if shows_media(raw) else None
    if found is None:
        return messages
    shown: list[dict[str, Any]] = msgspec.json.decode(found[0])
    return shown


class Chat(Several, kw_only=True):
    """POST /v1/chat/completions"""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    max_completion_tokens: int | None = None

    def prompts(self) -> list[Tokens]:
        if not self.messages:
            raise bad("messages: expected at least one message", "messages")
        return [tokens.render_chat(_seen(self.messages, self.model), self.tools)]

    @property
    def limit(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class Completion(Several, kw_only=True):
    """POST /v1/completions"""

    prompt: str | list[str | int | list[int]]

    def prompts(self) -> list[Tokens]:
        return text_or_tokens(self.prompt, "prompt")

    @property
    def limit(self) -> int | None:
        return 16 if self.max_tokens is None else self.max_tokens  # OpenAI's default here, which vLLM keeps


class Responses(Body, kw_only=True):
    """POST /v1/responses"""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    max_output_tokens: int | None = None
    previous_response_id: str | None = None

    def prompts(self) -> list[Tokens]:
        if self.previous_response_id is not None:
            raise Refused(
                404,
                "NotFoundError",
                f"Response with id '{self.previous_response_id}' not found.",
                "previous_response_id",
            )
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            messages.append({"role": "user", "content": self.input})
        else:
            items = _seen(self.input, self.model)
            messages += [item if "role" in item else {"role": "tool", "content": [item]} for item in items]
        if not messages:
            raise bad("input: expected text or at least one item", "input")
        return [tokens.render_chat(messages, self.tools)]

    @property
    def limit(self) -> int | None:
        return self.max_output_tokens


class Messages(Body, kw_only=True):
    """POST /v1/messages (Anthropic)"""

    messages: list[dict[str, Any]]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None

    def prompts(self) -> list[Tokens]:
        if not self.messages:
            raise bad("messages: expected at least one message", "messages")
        system = [{"role": "system", "content": self.system}] if self.system else []
        return [tokens.render_chat([*system, *_seen(self.messages, self.model)], self.tools)]

    @property
    def stops(self) -> Sequence[str]:
        return self.stop_sequences or ()


class Embeddings(Struct, kw_only=True):
    """POST /v1/embeddings"""

    input: str | list[str | int | list[int]]
    model: str | None = None
    dimensions: int | None = None
    encoding_format: str | None = None

    def prompts(self) -> list[Tokens]:
        return text_or_tokens(self.input, "input")


class Tokenize(Struct, kw_only=True):
    """POST /tokenize: `prompt` or `messages`"""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True

    def tokens(self) -> Tokens:
        if self.messages is not None:
            return tokens.render_chat(self.messages, self.tools, answer=self.add_generation_prompt)
        if self.prompt is None:
            raise bad("prompt: missing, expected `prompt` or `messages`", "prompt")
        return tokens.encode(self.prompt)


class Detokenize(Struct, kw_only=True):
    """POST /detokenize"""

    model: str | None = None
    tokens: list[int]


B = TypeVar("B")


def parse(body: bytes, kind: type[B]) -> B:
    """Decode a request body. Raises Refused (400) naming the field and what was expected."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        found = re.search(r"field `(\w+)`|`\$\.(\w+)", str(error))
        raise bad(str(error), found and (found[1] or found[2])) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise bad(f"JSON decode error: {error}") from None


def text_or_tokens(value: str | list[str | int | list[int]], param: str) -> list[Tokens]:
    """The four forms of a prompt: a text, its tokens, or a list of either."""
    if isinstance(value, str):
        return [tokens.encode(value)]
    if not value:
        raise bad(f"{param}: expected text or tokens, found an empty list", param)
    try:
        if isinstance(value[0], int):
            return [tokens.pack(value)]  # type: ignore[arg-type]  # pack itself refuses what is no number
        if len(value) > MAX_CHOICES:
            raise bad(f"{param}: {len(value)} prompts, expected at most {MAX_CHOICES}", param)
        return [tokens.encode(item) if isinstance(item, str) else tokens.pack(item) for item in value]  # type: ignore[arg-type]
    except ValueError as error:
        raise bad(f"{param}: {error}", param) from None
