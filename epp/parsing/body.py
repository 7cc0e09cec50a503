"""A JSON body read once and shallowly: top-level fields stay raw bytes, nothing below them is built.

The formats are OpenAI's as vLLM serves them (chat completions, completions, responses, embeddings), Anthropic's
messages, vLLM's and SGLang's own for token ids, and vLLM's for pooling models.
"""

from math import inf
from typing import ClassVar, TypeVar

import msgspec
from msgspec import Raw

from epp.errors import UNREADABLE, BadRequest
from epp.parsing.request import Api, short_salt

T = TypeVar("T")

ABSENT = Raw()
NO_MESSAGES = Raw(b"[]")
MAX_MODEL = 1024
"""Longest model name taken, in characters: it becomes a label and a key in several maps."""

_MOST_TOKENS = 1_000_000_000
_LONGEST_NUMBER = 400
_DIGITS = 9
"""Of a count of answers; a longer one is cut, and larger than any that is served all the same."""
_LONGEST_KEY = 256
"""Characters of a `prompt_cache_key` that tell it from others."""

_TEXT = msgspec.json.Decoder(str)
_ARRAY = msgspec.json.Decoder(list[Raw])
_HEAD = 64
"""Bytes of an array in which its first value is looked for."""


class Body(msgspec.Struct):
    """The fields we read of every format; a subclass adds its prompt. Raw: the value's bytes as they came.

    With a key given twice the last one counts, as in Python's `json`, which is what the engines read with. Fields that
    only the engine needs are not checked here: it knows better, and its message is better.
    """

    api: ClassVar[Api]

    model: Raw = ABSENT
    stream: Raw = ABSENT
    max_tokens: Raw = ABSENT
    cache_salt: Raw = ABSENT
    prompt_cache_key: Raw = ABSENT
    n: Raw = ABSENT
    best_of: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        """What the prompt is made of, in the order the engine reads it. BadRequest if the request has none."""
        raise NotImplementedError

    def conversation(self) -> Raw:
        """The part of the prompt that may have images, video and audio; none of other formats."""
        return NO_MESSAGES

    def output_limit(self) -> Raw:
        """The field that bounds the answer's tokens."""
        return self.max_tokens

    def prompt_tokens(self, prompt: bytes) -> int | None:
        """How many tokens the prompt has, where the body itself says so: a prompt of token ids. Else None."""
        return None

    def previous(self) -> str:
        """The answer that it goes on from; "" where it says none, or none that is a name."""
        return ""

    def model_name(self) -> str:
        """`model`; BadRequest if it is missing, empty, too long or no string."""
        expected = "expected the name of a model, a non-empty string"
        if self.model is ABSENT:
            raise BadRequest(f"model: missing; {expected}", param="model")
        try:
            name = _TEXT.decode(self.model)
        except ValueError:
            raise BadRequest(f"model: got {shown(self.model)}; {expected}", param="model") from None
        if not name or len(name) > MAX_MODEL:
            raise BadRequest(
                f"model: got {shown(self.model)}; {expected} of at most {MAX_MODEL} characters", param="model"
            )
        return name

    def salt(self) -> str:
        """`cache_salt`, shortened if it is long; or "" where it is none the engine would take."""
        return short_salt(_text(self.cache_salt))

    def answers(self) -> int:
        """How many answers are made of a prompt."""
        if self.n is ABSENT and self.best_of is ABSENT:
            return 1
        return max(1, *(_count(bytes(given)) for given in (self.n, self.best_of)))

    def cache_key(self) -> str:
        """`prompt_cache_key`; "" where it is none, or no string."""
        return _text(self.prompt_cache_key)[:_LONGEST_KEY]

    def streams(self) -> bool:
        return bytes(self.stream) == b"true"

    def answer_tokens(self) -> int | None:
        """The answer's bound in tokens, or None: not given, or not a number an engine would take."""
        limit = bytes(self.output_limit())
        return int(limit) if limit.isdigit() and len(limit) <= 9 else _unusual_number(limit)


class _Named(msgspec.Struct):
    model: Raw = ABSENT


_NAMED = msgspec.json.Decoder(_Named)


def model_in(body: bytes) -> str:
    """The model that a body of a format we do not know names; "" where it is no JSON object, or names none."""
    try:
        name = _text(_NAMED.decode(body).model)
    except UNREADABLE:
        return ""
    return name if len(name) <= MAX_MODEL else ""


def decode(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode, or BadRequest with the place of the fault."""
    if not body:
        raise BadRequest("the body is empty, or the gateway does not show it; expected a JSON object")
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise BadRequest(f"the body is not a JSON object: {_lower_first(str(error))}") from None
    except msgspec.DecodeError as error:
        raise BadRequest(f"the body is not valid JSON: {_fault(str(error), body)}") from None
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body is not valid JSON: it holds bytes that are not UTF-8 ({error.reason})") from None
    except RecursionError:
        raise BadRequest("the body is nested too deeply: expected at most some hundred levels") from None


def require(value: Raw, field: str, starts: bytes, expected: str) -> Raw:
    """`value`, if its first byte is one of `starts` (`[` an array, `"` a string); else BadRequest."""
    view = memoryview(value)
    if view and view[0] in starts:
        return value
    got = f"got {shown(value)}" if view else "missing"
    raise BadRequest(f"{field}: {got}; expected {expected}", param=field)


def ids_in(prompt: bytes) -> int | None:
    """How many token ids an array holds, or arrays of them; None where it is text."""
    head = prompt[:_HEAD].translate(None, b" \t\r\n[")
    return prompt.count(b",") + 1 if head[:1].isdigit() else None


def shown(value: Raw, limit: int = 60) -> str:
    """A value as a message may show it: short, printable."""
    view = memoryview(value)
    text = bytes(view[:limit]).decode("utf-8", "backslashreplace")
    return text if len(view) <= limit else f"{text}… ({len(view)} bytes)"


def _unusual_number(text: bytes) -> int | None:
    """A whole number that is not written as one, as engines take it: `5e3`, `64.0`, `"64"`; at most `_MOST_TOKENS`."""
    if not text or len(text) > _LONGEST_NUMBER:
        return None
    try:
        value = float(text.strip(b'"'))
    except ValueError:
        return None
    return int(min(value, _MOST_TOKENS)) if value >= 0 and (value == inf or value.is_integer()) else None


def _text(given: Raw) -> str:
    """A string; "" where it is absent or is none, as null is."""
    if given is ABSENT:
        return ""
    try:
        return _TEXT.decode(given)
    except ValueError:
        return ""


def _count(text: bytes) -> int:
    return int(text[:_DIGITS]) if text.isdigit() else 0


def _fault(message: str, body: bytes) -> str:
    if body.startswith(b"\xef\xbb\xbf"):
        return "it begins with a byte order mark (byte 0)"
    if message == "Input data was truncated":  # msgspec says this of a lone surrogate too, wherever it stands
        return f"it ends too soon (byte {len(body)}), or a \\u escape names half a surrogate pair"
    return _lower_first(message.removeprefix("JSON is malformed: "))


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


class Chat(Body):
    """`/v1/chat/completions`. Chat templates put tool definitions before the conversation."""

    api: ClassVar[Api] = "chat"

    messages: Raw = ABSENT
    tools: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        messages = require(self.messages, "messages", b"[", "an array of messages")
        return self.tools, messages

    def conversation(self) -> Raw:
        return self.messages

    def output_limit(self) -> Raw:
        newer = bytes(self.max_completion_tokens)
        return self.max_tokens if newer in (b"", b"null") else self.max_completion_tokens


class ChatBatch(Chat):
    """vLLM's `/v1/chat/completions/batch`: several conversations in `messages`, each with an answer.

    Source: vLLM 0.33.
    """

    def answers(self) -> int:
        return max(1, len(_ARRAY.decode(self.messages))) * super().answers()


class Completion(Body, rename={"text": "prompt"}):
    """`/v1/completions`. The prompt is text, token ids, or several of either; vLLM also takes `prompt_embeds`."""

    api: ClassVar[Api] = "completions"

    text: Raw = ABSENT
    prompt_embeds: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        if not memoryview(self.text) and memoryview(self.prompt_embeds):
            return (self.prompt_embeds,)
        return (require(self.text, "prompt", b'"[', "a string, an array of strings or an array of token ids"),)

    def prompt_tokens(self, prompt: bytes) -> int | None:
        return ids_in(prompt)


class Responses(Body):
    """`/v1/responses`. Instructions become the system message."""

    api: ClassVar[Api] = "responses"

    input: Raw = ABSENT
    instructions: Raw = ABSENT
    tools: Raw = ABSENT
    max_output_tokens: Raw = ABSENT
    previous_response_id: Raw = ABSENT

    def previous(self) -> str:
        return _text(self.previous_response_id)  # what is wrong with it the engine says better

    def parts(self) -> tuple[Raw, ...]:
        given = require(self.input, "input", b'"[', "a string or an array of items")
        return self.instructions, self.tools, given

    def conversation(self) -> Raw:
        return self.input

    def output_limit(self) -> Raw:
        return self.max_output_tokens


class Embeddings(Body):
    """`/v1/embeddings`. vLLM also takes a conversation, in `messages`."""

    api: ClassVar[Api] = "embeddings"

    input: Raw = ABSENT
    messages: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        if not memoryview(self.input) and memoryview(self.messages):
            return (require(self.messages, "messages", b"[", "an array of messages"),)
        return (require(self.input, "input", b'"[', "a string, an array of strings or an array of token ids"),)

    def conversation(self) -> Raw:
        return self.messages


class _Sampling(msgspec.Struct):
    max_tokens: Raw = ABSENT
    max_new_tokens: Raw = ABSENT


_SAMPLING = msgspec.json.Decoder(_Sampling)


class _ForOneModel(Body):
    """The model may be left out, where a server has one only."""

    def model_name(self) -> str:
        return "" if self.model in (ABSENT, Raw(b"null")) else super().model_name()


class _Ids(_ForOneModel):
    """A prompt of token ids."""

    api: ClassVar[Api] = "generate"

    sampling_params: Raw = ABSENT

    def output_limit(self) -> Raw:
        try:
            found = _SAMPLING.decode(self.sampling_params)
        except UNREADABLE:
            return ABSENT
        return found.max_tokens if memoryview(found.max_tokens) else found.max_new_tokens

    def prompt_tokens(self, prompt: bytes) -> int | None:
        return ids_in(prompt)


class Generate(_Ids):
    """vLLM's `/inference/v1/generate`. Source: vLLM 0.33."""

    token_ids: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        return (require(self.token_ids, "token_ids", b"[", "an array of token ids"),)


class NativeGenerate(_Ids):
    """SGLang's `/generate`: token ids or a text, one or several. Source: SGLang 0.5."""

    input_ids: Raw = ABSENT
    text: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        if not memoryview(self.input_ids) and memoryview(self.text):
            return (require(self.text, "text", b'"[', "a string or an array of strings"),)
        return (require(self.input_ids, "input_ids", b"[", "an array of token ids"),)


class Pooling(_ForOneModel):
    """What vLLM answers without generating: `/rerank`, `/score`, `/classify`, `/pooling`, `/generative_scoring` and
    Cohere's `/v2/embed`, texts in one field or in two, the query first; `/v1/decisions` and `/v1/systemone`, questions
    on a text. Source: vLLM 0.33.
    """

    api: ClassVar[Api] = "pooling"

    query: Raw = ABSENT
    queries: Raw = ABSENT
    text_1: Raw = ABSENT
    texts: Raw = ABSENT
    inputs: Raw = ABSENT
    input: Raw = ABSENT
    state: Raw = ABSENT
    messages: Raw = ABSENT
    data: Raw = ABSENT
    data_1: Raw = ABSENT
    instructions: Raw = ABSENT
    questions: Raw = ABSENT
    documents: Raw = ABSENT
    items: Raw = ABSENT
    text_2: Raw = ABSENT
    data_2: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        return (
            self.query,
            self.queries,
            self.text_1,
            self.texts,
            self.inputs,
            self.input,
            self.state,
            self.messages,
            self.data,
            self.data_1,
            self.instructions,
            self.questions,
            self.documents,
            self.items,
            self.text_2,
            self.data_2,
        )

    def conversation(self) -> Raw:
        return self.messages


class Messages(Body):
    """`/v1/messages`. The system prompt is a field of its own."""

    api: ClassVar[Api] = "messages"

    messages: Raw = ABSENT
    system: Raw = ABSENT
    tools: Raw = ABSENT

    def parts(self) -> tuple[Raw, ...]:
        messages = require(self.messages, "messages", b"[", "an array of messages")
        return self.system, self.tools, messages

    def conversation(self) -> Raw:
        return self.messages
