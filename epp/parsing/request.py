"""The shapes a request takes after Envoy's own: `RawRequest` (bytes) and `Request` (what plugins see); `Response`,
and `UsageReader`, which finds token counts in an answer as it passes by.
"""

import json
import re
from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import msgspec

from epp import errors

if TYPE_CHECKING:  # the map's keys are endpoints, which live one floor up: named for the type checker only
    from epp.pool.store import Endpoint

S = TypeVar("S")
T = TypeVar("T")

LONGEST_SALT: Final = 128
"""Characters of a cache salt that are kept as they are. vLLM advises 43: 256 bits in base64."""


def short_salt(salt: str) -> str:
    """A cache salt as it may be kept and be part of keys: one of more than `LONGEST_SALT` characters as its digest.

    Equal salts stay equal and others differ, also when one side was shortened before: digests are short.
    """
    if len(salt) <= LONGEST_SALT:
        return salt
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32).hexdigest()


Api = Literal["chat", "completions", "responses", "embeddings", "messages", "generate", "pooling", "other"]
"""Which wire format the body has; `other` is routed by load alone. `generate`: token ids, as vLLM and SGLang take them;
`pooling`: what vLLM answers without generating, see `epp.parsing.body.Pooling`."""

Stage = Literal["", "prefill", "decode", "encode"]
"""A part of a request's work that has an endpoint of its own; "": all of it."""

Watched = Literal["", "sampled", "asked"]
"""Why the gateway is asked to show an answer that it would not show by itself: as one of a sample, or since a plugin
wants to see it; "": it is not."""

NO_HEADERS: Mapping[str, str] = errors.NO_HEADERS
NO_SIGNALS: Mapping[type[Any], Mapping["Endpoint", Any]] = MappingProxyType({})


class Slo(msgspec.Struct, frozen=True):
    """What a request is to be served within. Seconds; None: as it comes."""

    ttft: float | None = None
    """Until its first token, from the complete request on."""
    tpot: float | None = None
    """For each token after it, in the mean."""
    objective: str = ""
    """The InferenceObjective it belongs to; "" = none that the pool has."""


class Objective(msgspec.Struct, frozen=True):
    """What an InferenceObjective says of its requests."""

    priority: int = 0
    """Higher first, negative may be shed."""
    slo: Slo | None = None


NO_OBJECTIVE: Final = Objective()
"""Of requests that name none, or one that the pool does not have."""


class RawRequest(msgspec.Struct, frozen=True, eq=False):
    """One complete HTTP request as the ext_proc server received it.

    `headers` has lower-case names and text values; bytes that are not UTF-8 are already escaped (`\\xNN`), so a value
    may go to a log or a label. `subset` is the gateway's restriction: None = no restriction, empty = no endpoint.
    `sees_answer` says whether the gateway will show us the answer's body (first token and usage are then observed).
    `watched` and `watchable` are as in `Request`.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    subset: tuple[str, ...] | None = None
    sees_answer: bool = False
    watched: Watched = ""
    watchable: float = 0.0


class Request(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A request as plugins see it: parsed once, shallow, never an Envoy or Kubernetes type.

    `prompt` is the raw JSON (or text) whose *prefix* the engine's KV cache shares between requests, in the order the
    engine reads it: tools or system first, then the messages. `tokens` estimates its length in tokens.

    It never changes; what becomes known later is in a new object, so a hook may get another one than the hook before.
    `prompt` and `body` are there up to the pick and its `on_picked`, and empty afterwards (also for the `on_picked` of
    a request that a retry moved): answers take long, and the prompts of all requests in flight would fill the memory.
    While it waits in flow control `prompt` is empty, and made anew from `body` when its turn comes.
    What a plugin needs of a request later it keeps in a `Slot`.
    """

    id: str
    model: str
    """What the endpoint is asked for, after rewrites; names a LoRA adapter too, as in vLLM."""
    asked: str = ""
    """What the client asked for; the same where no rewrite says otherwise."""
    api: Api = "chat"
    whole: bool = False
    """One endpoint answers it: nothing is decoded, or sidecars pass it on as it is (`epp.parsing.parser`)."""
    prompt: bytes = b""
    tokens: int = 0
    media_tokens: int = 0
    """Those of them that images, video and audio become; each stands as a digest in `prompt`, see `epp.parsing.media`.
    """
    stream: bool = False
    max_tokens: int | None = None
    answers: int = 1
    """That it asks for of each of its prompts (`n`, `best_of`); of a batch of conversations, of all together."""
    previous: str = ""
    """The answer of `/v1/responses` that it goes on from (`previous_response_id`), or asks for by its path. Only the
    endpoint that gave it has it."""
    cache_key: str = ""
    """OpenAI's `prompt_cache_key`: by it clients say which of their requests share a prefix."""
    salt: str = ""
    """vLLM's `cache_salt`: prompts with different salts share nothing. A long one is its digest, see `short_salt`."""
    priority: int = 0
    """From the InferenceObjective; higher first, negative may be shed."""
    slo: Slo | None = None
    """From its headers, else the InferenceObjective."""
    waited: float = 0.0
    """Seconds that it waited in flow control, before it was let go: they count as time until its first token."""
    tenant: str = ""
    """Whose it is, where a guard or the limits of the configuration found that out; flow control takes it for the
    fairness id where no header that counts says one."""
    attributes: Mapping[str, str] = NO_HEADERS
    """What guards found of it, by name."""
    headers: Mapping[str, str] = NO_HEADERS
    body: bytes = b""
    """The body as it came, for what a plugin needs deeper; decode lazily. Of a gRPC request JSON that says the same."""
    parts: tuple[msgspec.Raw, ...] = ()
    """Of `body`, those that make `prompt` when joined; they take no memory of their own. None: it is kept as it is."""
    sees_answer: bool = False
    """The gateway will show its answer, as far as is known."""
    watched: Watched = ""
    watchable: float = 0.0
    """Its answer is shown if a plugin asks for it (`Plugin.asks_for_answer`), and not otherwise: the share of such
    answers that may be asked for. 0: it is shown, or cannot be."""
    elsewhere: bool = False
    """Another replica picked for it and said so: of it are known model, API, tokens and what plugins share, no more."""
    stage: Stage = ""
    """Which part of the work this is, where one endpoint prefills and another decodes. Each part is a request of its
    own to the hooks, at its endpoint: `prefill` ends with the prompt, `decode` begins with a prompt that was computed
    elsewhere, `encode` makes embeddings of images."""
    peer: "Endpoint | None" = None
    """While the endpoint of one stage is chosen: that of the other, which is chosen already."""
    opaque: str = ""
    """Why a body whose path promises JSON was not read (api `other`); empty = it was, or promised nothing."""
    signals: Mapping[type[Any], Mapping["Endpoint", Any]] = NO_SIGNALS
    """Facts about (request, endpoint), by type; found by producers just before the pick. Read through `signal`."""
    kept: dict["Slot[Any]", Any] = msgspec.field(default_factory=dict)
    """Values of slots. Read and written by `Slot` alone."""

    @property
    def is_sample(self) -> bool:
        """What is seen of its answer is as likely to be seen of any other's: plugins ask for those they need."""
        return self.watched != "asked"

    @property
    def is_timed(self) -> bool:
        """Its first token comes by itself, or its SLO is kept whatever comes: else nobody asks when."""
        return self.stream or self.slo is not None

    def signal(self, kind: type[S]) -> Mapping["Endpoint", S]:
        """The signal of type `kind` for every candidate. KeyError if no producer ran: declare it in `needs`."""
        return self.signals[kind]

    def header(self, names: tuple[str, ...] | str) -> str | None:
        """The first of `names` (lower case) that the request carries, or None."""
        for name in (names,) if isinstance(names, str) else names:
            if (value := self.headers.get(name)) is not None:
                return value
        return None


def at_rest(request: Request) -> Request:
    """The request while it waits: without the prompt, which its body has too."""
    return msgspec.structs.replace(request, prompt=b"") if request.parts else request


def whole(request: Request) -> Request:
    """The same with its prompt again."""
    return msgspec.structs.replace(request, prompt=b"".join(request.parts)) if request.parts else request


def forwarded(request: Request) -> Request:
    """The request once it has its endpoint: without prompt and body."""
    return msgspec.structs.replace(request, prompt=b"", body=b"", parts=())


def asked_for(request: Request) -> Request:
    """The request whose answer a plugin wants to see."""
    return msgspec.structs.replace(request, sees_answer=True, watched="asked", watchable=0.0)


class Slot(Generic[T]):
    """What a plugin keeps of each request between its hooks: one value for a request, which the slot's holder reaches.

    A plugin makes its slots in `__init__`, or as dataclass fields by `field(default_factory=Slot, init=False)`: never
    in the class body, where all plugins of the class would share it. A slot's values end with their requests.
    """

    __slots__ = ()

    def __set_name__(self, owner: type, name: str) -> None:
        raise TypeError(
            f"{owner.__name__}.{name}: a Slot belongs to one plugin; make it by field(default_factory=Slot)"
        )

    def get(self, request: Request) -> T | None:
        """Its value for `request`; None if there is none."""
        value: T | None = request.kept.get(self)
        return value

    def set(self, request: Request, value: T) -> T:
        """Keep `value` for `request`, in place of the one before; returns it."""
        request.kept[self] = value
        return value

    def take(self, request: Request) -> T | None:
        """Its value for `request`, which is forgotten; None if there is none."""
        value: T | None = request.kept.pop(self, None)
        return value


class Usage(msgspec.Struct, frozen=True, gc=False):
    """Token counts as the endpoint reported them. -1 = not reported."""

    prompt: int = -1
    completion: int = -1
    cached: int = -1


class Response(msgspec.Struct, eq=False, gc=False):
    """What we learned of the answer, filled as it passes. Times are seconds on the EPP's monotonic clock."""

    status: int = 0
    """HTTP status; 0 = no answer was seen (client gone, endpoint dead, or not shown to us)."""
    served: str = ""
    """`ip:port` that really served, where the gateway says so."""
    first_token_at: float | None = None
    usage: Usage | None = None
    complete: bool = False
    """The answer's end was seen."""
    prefill_failed: bool = False
    """Who was to compute the prompt elsewhere did not, so it was computed where it is decoded, or could not be."""
    lost: bool = False
    """Nothing is known of the answer: the replica that sent the request fell silent."""
    id: str = ""
    """By which the next request may name this answer (`previous_response_id`), where it was seen to its end."""

    @property
    def failed(self) -> bool:
        """By the endpoint's own fault: a status of 500 or more, or the gateway's retry was served elsewhere instead.

        501 is none: the request asked for what the server does not do. Nor is an error that is the prefiller's fault.
        """
        if self.status < 500:
            return bool(self.served and not self.status)
        return self.status != 501 and not self.prefill_failed


_USAGE: Final = re.compile(rb'"usage"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}\{')
_LONGEST_MATCH: Final = len(b'"usage":{') + 32
_LARGEST: Final = 8192
"""Bytes of a usage object; real ones have some hundred."""
_MOST_TOKENS: Final = 1_000_000_000
_DECODER: Final = json.JSONDecoder()


class UsageReader:
    """Reads `usage` from a JSON or SSE answer: OpenAI's chat, completions, embeddings and responses, Anthropic's.

    It looks for the key itself and decodes only the object behind it, so neither events nor the document need to be
    put together and at most `_LARGEST` bytes are kept. Within a JSON string the key's quotes would be escaped, so
    generated text cannot imitate it. Later counts overwrite earlier ones: that joins Anthropic's first and last event
    and is right for running counts. Never raises; an answer without usage gives None.
    """

    __slots__ = ("_counts", "_looks", "_rest")

    def __init__(self, content_type: str) -> None:
        kind = content_type.lower()
        self._looks = not kind or "json" in kind or "event-stream" in kind or "grpc" in kind  # Vertex AI's holds JSON
        self._rest = b""  # the end of the last chunk: where a key, or an object, may have begun
        self._counts: dict[str, int] = {}

    def feed(self, chunk: bytes) -> None:
        """The next piece of the answer's body."""
        if not self._looks:
            return
        data = self._rest + chunk
        if data.find(b"usage") < 0:  # `in` tries first whether it is the number of a byte, and makes an error of it
            self._rest = data[-_LONGEST_MATCH:]
            return
        at = 0
        while (found := _USAGE.search(data, at)) is not None:
            start = found.end() - 1
            size = self._read(data[start : start + _LARGEST])
            if size == 0 and len(data) - start < _LARGEST:
                self._rest = data[found.start() :]
                return
            at = start + max(size, 1)
        self._rest = data[max(at, len(data) - _LONGEST_MATCH) :]

    def finish(self) -> Usage | None:
        """What was found, or None."""
        if not self._counts:
            return None
        return Usage(**self._counts)

    def _read(self, data: bytes) -> int:
        """Take over the counts of the object `data` begins with; returns its length, 0 if it is not all there."""
        if data.find(b"}") < 0:
            return 0
        text = data.decode("latin-1")  # one character a byte: positions stay, and keys are ASCII
        try:
            usage, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return 0
        self._counts.update(_counts(usage))
        return end


_ID: Final = re.compile(rb'"id"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}"([^"\\\x00-\x20\x7f-\xff]{1,256})"')
_ID_WITHIN: Final = 4096
"""Bytes of an answer in which its id stands: servers write it first, streams in their first event."""


class ResponsesReader(UsageReader):
    """Reads from an answer of `/v1/responses` its `id` too: the first one, as vLLM, SGLang and OpenAI write it."""

    __slots__ = ("_head", "id")

    def __init__(self, content_type: str) -> None:
        super().__init__(content_type)
        self.id = ""
        self._head: bytes | None = b""
        """What came so far; None: no id is looked for any more."""

    def feed(self, chunk: bytes) -> None:
        if self._head is not None:
            self._head = (self._head + chunk[:_ID_WITHIN])[:_ID_WITHIN]
            if (found := _ID.search(self._head)) is not None:
                self.id = found[1].decode("ascii")
            if found is not None or len(self._head) == _ID_WITHIN:
                self._head = None
        super().feed(chunk)


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    completion = _first(usage, "completion_tokens", "output_tokens")
    cached = -1
    for field in ("prompt_tokens_details", "input_tokens_details"):
        if isinstance(details := usage.get(field), dict):
            cached = max(cached, _first(details, "cached_tokens"))
    if (read := _first(usage, "cache_read_input_tokens")) >= 0:
        # Anthropic counts cached tokens beside input_tokens, not within them (Messages API, prompt caching).
        cached = read
        prompt = prompt + read + max(0, _first(usage, "cache_creation_input_tokens")) if prompt >= 0 else prompt
    found = {"prompt": prompt, "completion": completion, "cached": cached}
    return {name: count for name, count in found.items() if count >= 0}


def _first(fields: dict[str, Any], *names: str) -> int:
    for name in names:
        if type(value := fields.get(name)) is int and 0 <= value <= _MOST_TOKENS:
            return value
    return -1
