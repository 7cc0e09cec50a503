"""The shapes a request takes after Envoy's own: `RawRequest` (bytes) and `Request` (what plugins see); `Response`."""

from collections.abc import Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, TypeVar

import msgspec

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


Api = Literal["chat", "completions", "responses", "embeddings", "messages", "other"]
"""Which wire format the body has; `other` is routed by load alone."""

NO_HEADERS: Mapping[str, str] = {}
NO_SIGNALS: Mapping[type[Any], Mapping["Endpoint", Any]] = MappingProxyType({})


class RawRequest(msgspec.Struct, frozen=True, eq=False):
    """One complete HTTP request as the ext_proc server received it.

    `headers` has lower-case names and text values; bytes that are not UTF-8 are already escaped (`\\xNN`), so a value
    may go to a log or a label. `subset` is the gateway's restriction: None = no restriction, empty = no endpoint.
    `sees_answer` says whether the gateway will show us the answer's body (first token and usage are then observed).
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes = b""
    subset: tuple[str, ...] | None = None
    sees_answer: bool = False


class Request(msgspec.Struct, frozen=True, eq=False, kw_only=True):
    """A request as plugins see it: parsed once, shallow, never an Envoy or Kubernetes type.

    `prompt` is the raw JSON (or text) whose *prefix* the engine's KV cache shares between requests, in the order the
    engine reads it: tools or system first, then the messages. `tokens` estimates its length in tokens.

    It never changes; what becomes known later is in a new object, so a hook may get another one than the hook before.
    `prompt` and `body` are there up to the pick and its `on_picked`, and empty afterwards (also for the `on_picked` of
    a request that a retry moved): answers take long, and the prompts of all requests in flight would fill the memory.
    What a plugin needs of a request later it keeps in a `Slot`.
    """

    id: str
    model: str
    """What the endpoint is asked for, after rewrites; names a LoRA adapter too, as in vLLM."""
    asked: str = ""
    """What the client asked for; the same where no rewrite says otherwise."""
    api: Api = "chat"
    prompt: bytes = b""
    tokens: int = 0
    stream: bool = False
    max_tokens: int | None = None
    salt: str = ""
    """vLLM's `cache_salt`: prompts with different salts share nothing. A long one is its digest, see `short_salt`."""
    priority: int = 0
    """From the InferenceObjective; higher first, negative may be shed."""
    headers: Mapping[str, str] = NO_HEADERS
    body: bytes = b""
    """The body as it came, for what a plugin needs deeper; decode lazily."""
    sees_answer: bool = False
    elsewhere: bool = False
    """Another replica picked for it and said so: of it are known model, API, tokens and what plugins share, no more."""
    opaque: str = ""
    """Why a body whose path promises JSON was not read (api `other`); empty = it was, or promised nothing."""
    signals: Mapping[type[Any], Mapping["Endpoint", Any]] = NO_SIGNALS
    """Facts about (request, endpoint), by type; found by producers just before the pick. Read through `signal`."""
    kept: dict["Slot[Any]", Any] = msgspec.field(default_factory=dict)
    """Values of slots. Read and written by `Slot` alone."""

    def signal(self, kind: type[S]) -> Mapping["Endpoint", S]:
        """The signal of type `kind` for every candidate. KeyError if no producer ran: declare it in `needs`."""
        return self.signals[kind]

    def header(self, names: tuple[str, ...] | str) -> str | None:
        """The first of `names` (lower case) that the request carries, or None."""
        for name in (names,) if isinstance(names, str) else names:
            if (value := self.headers.get(name)) is not None:
                return value
        return None


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


class Usage(msgspec.Struct, frozen=True):
    """Token counts as the endpoint reported them. -1 = not reported."""

    prompt: int = -1
    completion: int = -1
    cached: int = -1


class Response(msgspec.Struct, eq=False):
    """What we learned of the answer, filled as it passes. Times are seconds on the EPP's monotonic clock."""

    status: int = 0
    """HTTP status; 0 = no answer was seen (client gone, endpoint dead, or not shown to us)."""
    served: str = ""
    """`ip:port` that really served, where the gateway says so."""
    first_token_at: float | None = None
    usage: Usage | None = None
    complete: bool = False
    """The answer's end was seen."""
    lost: bool = False
    """Nothing is known of the answer: the replica that sent the request fell silent."""

    @property
    def failed(self) -> bool:
        """By the endpoint's own fault: a status of 500 or more, or the gateway's retry was served elsewhere instead.

        501 is none: the request asked for what the server does not do.
        """
        return (self.status >= 500 and self.status != 501) or bool(self.served and not self.status)
