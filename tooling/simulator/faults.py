"""What goes wrong on purpose: set by `POST /admin/faults`, cleared by `DELETE`, shown by `GET`.

`GET` says with them how many requests are `hanging` now.

Faults hit the pod's own endpoints, never `/admin/*`. `/metrics` has its own fault and is spared by the others.
"""

import random
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from msgspec import Meta, Struct

MetricsFault = Literal["normal", "huge", "endless", "binary", "half", "hang", "off"]

HUGE = 32 << 20
"""Bytes of a `huge` page: far more than any scraper should read."""
_PIECE = 64 << 10


class Faults(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The faults in force. The body of `POST /admin/faults` replaces all of them; what it leaves out is normal."""

    status: Annotated[int, Meta(ge=400, le=599)] | None = None
    """Answer with this status and an error body."""
    hang: bool = False
    """Accept the request and never answer."""
    refuse: bool = False
    """Cut the connection as soon as the request is read, as a dying process does."""
    drop_after: Annotated[int, Meta(ge=0)] | None = None
    """Cut the connection after this many events of a stream (0: its headers still come); an answer that is not
    streamed is cut after as many tokens, so before its first byte."""
    rate: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the requests that `status`, `hang`, `refuse` and `drop_after` hit, by seeded chance."""
    slow: Annotated[float, Meta(gt=0, le=1000)] = 1.0
    """Factor on the time of every engine step."""
    mute: bool = False
    """KV events are counted and kept, but not sent: subscribers see a gap when it ends."""
    metrics: MetricsFault = "normal"
    """`huge`: a valid page of 32 MiB. `endless`: valid lines for ever. `binary`: bytes that are no text. `half`: the
    connection is cut in the middle of the page. `hang`: no answer. `off`: 404."""


def hits(faults: Faults, chance: random.Random) -> bool:
    """Whether this request is one of the unlucky. Draws only where that is in question, so seeds stay comparable."""
    return faults.rate >= 1 or chance.random() < faults.rate


async def bad_page(kind: MetricsFault, page: bytes, chance: random.Random) -> AsyncIterator[bytes]:
    """The pieces of a wrong metrics page. After the last piece of `half` the connection must be cut."""
    if kind == "half":
        yield page[: len(page) // 2]
    elif kind == "binary":
        yield chance.randbytes(_PIECE)
    else:
        sent = 0
        yield page
        line = b'vllm:filler{engine="0",model_name="filler"} 1.0\n'
        piece = line * (_PIECE // len(line))
        while kind == "endless" or sent < HUGE:
            yield piece
            sent += len(piece)
