"""The messages between replicas, in msgpack: one for each decision, first token and end.

A frame is a topic, the version of all that follows, and an `Envelope` of what was decided in one turn of the event
loop, with ends that waited for it. All frames of a replica leave by one socket and arrive in the order they left; what
a queue had no space for is seen by the sequence. Topics are what subscribers ask for: `LIVE` goes to all, a snapshot to
the one that asked for it.
"""

from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec

from epp.errors import UNREADABLE
from epp.plugin import Api, Endpoint, Request, Stage

LIVE: Final = b"L"
SNAPSHOT: Final = b"S"
"""Begins the topic of a snapshot: requests in flight and all that plugins know."""
IN_FLIGHT: Final = b"F"
"""Begins the topic of a snapshot of the requests in flight alone."""
TOPIC_BYTES: Final = 17
"""Of a snapshot's topic: one of the above, the instance that asked, and a number of its own."""
MAX_FRAME: Final = 1 << 20
"""Bytes. A larger frame is not sent, and one that arrives ends the connection."""
VERSION: Final = b"\4"
"""Other versions are not read: what is meant by a field may have changed where its form has not."""


class Decided(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=1):
    """A request was sent to an endpoint."""

    number: int
    """Of the sender's own counting: what follows names it."""
    pool: str
    """`namespace/name`."""
    endpoint: str
    """Its name in the pool."""
    model: str
    api: Api
    tokens: int
    stream: bool
    sees_answer: bool
    max_tokens: int | None
    priority: int
    states: dict[str, Any]
    """What plugins share of it: name of the plugin -> its `to_peers`."""
    stage: Stage = ""


class FirstToken(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=2):
    number: int


class Finished(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=3):
    """The request left the endpoint; fields as in `epp.plugin.Response`."""

    number: int
    status: int
    served: str
    complete: bool
    first_token: bool
    """The first token was seen."""
    usage: tuple[int, int, int] | None
    """Tokens of prompt and answer, and those cached; -1 where not reported."""
    id: str = ""
    prefill_failed: bool = False


class Beat(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=4):
    """Sent twice a second, so that silence is seen."""

    sent: float
    """By the sender's clock, in seconds: comes back in `received`."""
    received: dict[int, tuple[float, float]]
    """Instance -> `sent` of the last beat that came from it, and seconds since it came."""
    ready: bool
    """It has joined: it knows what its peers know."""
    open: int
    """Requests in flight that it knows of, those of all replicas together."""


class Begin(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=5):
    """A snapshot begins, with an `Open` for each request in flight."""

    last: int
    """Number of the last decision before it."""


class Open(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=6):
    """A request in flight."""

    decided: msgspec.Raw
    """As sent when it was decided."""
    first_token: bool


class Piece(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=7):
    """A part of what a plugin knows: of a snapshot, or, in a live frame, what it tells beside requests."""

    pool: str
    plugin: str
    piece: Any


class Opened(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=10):
    """All requests in flight were named."""

    requests: int
    """So many `Open` were sent; fewer arrived if a queue was full."""


class End(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=8):
    """The snapshot is complete."""

    pieces: int
    """So many `Piece` were sent; fewer arrived if a queue was full."""


class Leaving(msgspec.Struct, array_like=True, frozen=True, gc=False, tag=9):
    """The replica ends in good order: it will be silent, and nothing of it is in flight."""


AnyMessage = Decided | FirstToken | Finished | Beat | Begin | Open | Opened | Piece | End | Leaving


class Envelope(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """`sender` is the instance, a random number for each start of a process; `sequence` counts its live frames."""

    sender: int
    sequence: int
    messages: list[AnyMessage]


class _Encoded(msgspec.Struct, array_like=True, frozen=True, gc=False):
    sender: int
    sequence: int
    messages: list[msgspec.Raw]


_encoder: Final = msgspec.msgpack.Encoder()
encode: Final[Callable[[AnyMessage], bytes]] = _encoder.encode
_envelopes: Final = msgspec.msgpack.Decoder(Envelope)
_decisions: Final = msgspec.msgpack.Decoder(Decided)


class MalformedFrame(ValueError):
    """What came is no frame of ours. `str()` says why."""


class OtherVersion(MalformedFrame):
    """It may be one of another version of this protocol."""


def decided(number: int, pool: str, request: Request, endpoint: Endpoint, states: dict[str, Any]) -> Decided:
    """What peers are told of a request that was picked here; `states` are what plugins share of it."""
    return Decided(
        number,
        pool,
        endpoint.name,
        request.model,
        request.api,
        request.tokens,
        request.stream,
        request.sees_answer,
        request.max_tokens,
        request.priority,
        states,
        request.stage,
    )


def request_of(sent: Decided, identity: str = "") -> Request:
    """The same as plugins of another replica see it."""
    return Request(
        id=identity,
        model=sent.model,
        asked=sent.model,
        api=sent.api,
        tokens=sent.tokens,
        stream=sent.stream,
        max_tokens=sent.max_tokens,
        priority=sent.priority,
        sees_answer=sent.sees_answer,
        stage=sent.stage,
        elsewhere=True,
    )


def frame(topic: bytes, sender: int, sequence: int, messages: Sequence[bytes]) -> bytes:
    """A whole frame around encoded messages, at least one."""
    return topic + VERSION + _encoder.encode(_Encoded(sender, sequence, [*map(msgspec.Raw, messages)]))


def decode(data: bytes | memoryview, topic_bytes: int) -> Envelope:
    """What `frame` made, its topic being so long. Raises MalformedFrame."""
    if (version := data[topic_bytes : topic_bytes + 1]) != VERSION:
        raise OtherVersion(f"messages of version {int.from_bytes(version)}, expected {int.from_bytes(VERSION)}")
    try:
        return _envelopes.decode(memoryview(data)[topic_bytes + 1 :])
    except UNREADABLE as error:
        raise MalformedFrame(str(error)) from None


def decode_decided(raw: msgspec.Raw) -> Decided:
    """What an `Open` holds. Raises MalformedFrame."""
    try:
        return _decisions.decode(raw)
    except UNREADABLE as error:
        raise MalformedFrame(str(error)) from None


def topic_of(kind: bytes, instance: int, number: int) -> bytes:
    """The topic of a snapshot that `instance` asks for."""
    return kind + instance.to_bytes(8, "little") + number.to_bytes(8, "little")
