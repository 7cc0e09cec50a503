"""What a request asks an engine to read, before it becomes tokens: a conversation, a text, or token ids.

What vLLM 0.33's HTTP API reads of a body. A body that
vLLM would refuse, and one whose prompt is not made of text alone, is `Unsupported`: its tokens are not needed.
"""

from array import array
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import msgspec

from epp.errors import UNREADABLE
from epp.plugin import Request
from epp.prefix.tokens.anthropic import MessagesBody, as_chat
from epp.prefix.tokens.conversation import Message, Unsupported

MAX_BODY: Final = 4 << 20
"""Bytes of a body that are looked at: some million tokens."""
MAX_VALUES: Final = 300_000
"""Commas and opening brackets of such a body, so no less than its values; 131,072 token ids have half as many. A body
is decoded in one step that lets no other thread run, and its time goes with these: some 20 ms for so many."""
MAX_PAIRS: Final = 50_000
"""Colons, so no less than keys of objects, which take longest: some 20 ms for so many."""
_SMALL: Final = 64 << 10
"""Bytes of a body in which tokens are not counted."""

_NOT_FOR_TEMPLATES: Final = frozenset(
    (
        "chat_template",
        "tokenize",
        "tools",
        "conversation",
        "messages",
        "padding",
        "truncation",
        "max_length",
        "return_tensors",
        "return_dict",
        "return_assistant_tokens_mask",
        "tokenizer_kwargs",
        "self",
    )
)
"""Keys of `chat_template_kwargs` that vLLM refuses, or takes for something other than a template's variable."""


class Text(msgspec.Struct, frozen=True):
    """A text to be read as it is."""

    text: str
    special: bool = True
    """Whether the tokenizer's own special tokens (a BOS) are added."""


class Chat(msgspec.Struct, frozen=True):
    """A conversation for a chat template. `messages` and `tools` as they came; see `conversation` and `tool_list`."""

    messages: list[Message]
    tools: list[Message] | None
    variables: Mapping[str, Any]
    """For the template: `chat_template_kwargs` with what other fields of the body add to it."""
    answer: bool
    """Whether the head of the assistant's turn is added (`add_generation_prompt`)."""
    go_on: bool
    """Whether the last message is left open, to be continued (`continue_final_message`)."""
    special: bool


Prompt: TypeAlias = "Text | Chat | array[int]"
"""The array: the ids themselves."""


class _ChatBody(msgspec.Struct):
    messages: list[Message]
    tools: list[Message] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    truncate_prompt_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _CompletionBody(msgspec.Struct):
    prompt: str | list[str | int | list[int]] | None = None
    prompt_embeds: Any = None
    suffix: str | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


class _GenerateBody(msgspec.Struct):
    token_ids: list[int] | None = None
    input_ids: list[int] | None = None
    features: Any = None
    truncate_prompt_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = None


_GENERATE: Final = msgspec.json.Decoder(_GenerateBody)
_CHAT: Final = msgspec.json.Decoder(_ChatBody)
_COMPLETION: Final = msgspec.json.Decoder(_CompletionBody)
_MESSAGES: Final = msgspec.json.Decoder(MessagesBody)


def prompt_of(request: Request, efforts: Mapping[str, str] = MappingProxyType({})) -> Prompt:
    """The prompt in a request's body. `efforts`: the engine's --reasoning-effort-map. Raises Unsupported."""
    if len(request.body) > MAX_BODY:
        raise Unsupported(f"a body of {len(request.body)} bytes; expected at most {MAX_BODY}")
    if len(request.body) > _SMALL:
        _check_values(request.body)
    try:
        if request.api == "chat":
            return _chat(_CHAT.decode(request.body), efforts)
        if request.api == "messages":
            return _chat(msgspec.convert(as_chat(_MESSAGES.decode(request.body)), _ChatBody), efforts)
        if request.api == "completions":
            return _completion(_COMPLETION.decode(request.body))
        if request.api == "generate":
            return _generate(_GENERATE.decode(request.body))
    except UNREADABLE as error:
        raise Unsupported(f"a body vLLM would refuse: {type(error).__name__}") from None
    raise Unsupported(f"the format {request.api!r} is not rendered; expected chat, completions, messages or generate")


def _check_values(body: bytes) -> None:
    if (values := body.count(b",") + body.count(b"[") + body.count(b"{")) > MAX_VALUES:
        raise Unsupported(f"a body with {values} commas and brackets; expected at most {MAX_VALUES}")
    if (pairs := body.count(b":")) > MAX_PAIRS:
        raise Unsupported(f"a body with {pairs} colons; expected at most {MAX_PAIRS}")


def _chat(body: _ChatBody, efforts: Mapping[str, str]) -> Chat:
    _refuse(body)
    if body.chat_template is not None:
        raise Unsupported("a chat template of the request's own")
    if not body.messages or body.tools == []:
        raise Unsupported("no messages, or an empty array of tools")
    if body.continue_final_message and body.add_generation_prompt:
        raise Unsupported("continue_final_message and add_generation_prompt together")
    given = body.chat_template_kwargs or {}
    if taken := _NOT_FOR_TEMPLATES & given.keys():
        raise Unsupported(f"chat_template_kwargs.{min(taken)}")
    variables = {key: value for key, value in given.items() if key not in ("add_generation_prompt", "documents")}
    if (documents := body.documents if body.documents is not None else given.get("documents")) is not None:
        variables["documents"] = documents
    if body.reasoning_effort is not None:
        effort = efforts.get(body.reasoning_effort, body.reasoning_effort)
        variables["reasoning_effort"] = effort
        variables.setdefault("enable_thinking", effort != "none")
    variables.pop("continue_final_message", None)
    return Chat(
        body.messages,
        body.tools,
        {key: value for key, value in variables.items() if value is not None and value != "auto"},
        body.add_generation_prompt,
        body.continue_final_message,
        body.add_special_tokens,
    )


def _completion(body: _CompletionBody) -> Prompt:
    _refuse(body)
    if body.prompt_embeds is not None or body.suffix is not None:
        raise Unsupported("prompt_embeds or a suffix")
    prompt = body.prompt
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]  # type: ignore[assignment]  # one prompt in an array is one prompt
    if isinstance(prompt, str):
        return Text(prompt, body.add_special_tokens)
    if isinstance(prompt, list) and prompt and all(isinstance(each, int) for each in prompt):
        return _ids(prompt)  # type: ignore[arg-type]
    raise Unsupported("no prompt, or several prompts in one request")


def _generate(body: _GenerateBody) -> Prompt:
    _refuse(body)
    if body.features:
        raise Unsupported("features of images, video or audio")
    if not (ids := body.token_ids or body.input_ids):
        raise Unsupported("no token ids, or several prompts in one request")
    return _ids(ids)


def _ids(ids: Sequence[int]) -> "array[int]":
    try:
        return array("I", ids)
    except OverflowError:
        raise Unsupported("token ids beyond 32 bits") from None


def _refuse(body: _ChatBody | _CompletionBody | _GenerateBody) -> None:
    if body.truncate_prompt_tokens is not None:
        raise Unsupported("truncate_prompt_tokens")
    if body.kv_transfer_params and body.kv_transfer_params.get("prompt_token_ids") is not None:
        raise Unsupported("kv_transfer_params.prompt_token_ids")
