"""`Bindings`: endpoints by an id; and `PreviousResponseFilter`, whose ids are those of answers."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Final

from epp.plugin import Endpoint, Filter, Request, Response

_PIECE: Final = 500
"""Bindings in a piece of a snapshot."""


def hashed(id: str) -> int:
    """An id in eight bytes, the same at all replicas, so that long ids cost no memory and none is kept."""
    return int.from_bytes(blake2b(id.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


class Bindings:
    """Endpoints by the hash of an id, for `seconds` each since it was bound last; at most `most`, beyond which those
    bound longest ago go first. They keep no endpoint alive. `now` is on the plugins' clock.
    """

    def __init__(self, most: int, seconds: float) -> None:
        self._most = most
        self._seconds = seconds
        self._bound: dict[int, tuple[weakref.ref[Endpoint], float]] = {}
        """With when it expires; bound longest ago first."""

    def __len__(self) -> int:
        return len(self._bound)

    def find(self, key: int, endpoints: Sequence[Endpoint], now: float) -> Endpoint | None:
        """The one of `endpoints` that is bound to it."""
        bound = self._bound.get(key)
        if bound is None or bound[1] <= now:
            return None
        endpoint = bound[0]()
        return endpoint if endpoint is not None and endpoint in endpoints else None

    def bind(self, key: int, endpoint: Endpoint, now: float) -> None:
        self._bind(key, endpoint, now, now + self._seconds)

    def _bind(self, key: int, endpoint: Endpoint, now: float, until: float) -> None:
        self._bound.pop(key, None)
        self._bound[key] = weakref.ref(endpoint), until
        # Two out for one in: what has expired goes soon, and no single request pays for a mass expiry.
        for _ in range(2):
            oldest = next(iter(self._bound))
            if len(self._bound) > self._most or self._bound[oldest][1] <= now:
                del self._bound[oldest]

    def snapshot(self, now: float) -> Iterator[Any]:
        """In pieces: [hash, endpoint, seconds left] ..., bound longest ago first."""
        bound = [(key, ref(), until - now) for key, (ref, until) in self._bound.items()]
        alive = [(key, endpoint.name, left) for key, endpoint, left in bound if endpoint is not None]
        for start in range(0, len(alive), _PIECE):
            yield alive[start : start + _PIECE]

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint], now: float) -> None:
        """Take over a piece of another's; what is bound here is newer."""
        for key, name, left in piece:
            if name in endpoints and key not in self._bound and left > 0:
                self._bind(key, endpoints[name], now, now + left)


@dataclass(eq=False)
class PreviousResponseFilter(Filter):
    """`previous-response-filter`: of a request that names an answer of `/v1/responses`, keeps who gave that; all of any
    other request, and where it is not known who did.

    An engine that keeps answers has them in its own memory, so every other one says 404 to `previous_response_id` and
    to GET, DELETE and cancel of an answer. Known are answers that the gateway showed, to this replica or another.

    `ttl_seconds` (86400): for how long. `max_responses` (100,000): how many; beyond it those given longest ago go
    first. Source: vLLM 0.11, VLLM_ENABLE_RESPONSES_API_STORE.
    """

    ttl_seconds: float = 86_400.0
    max_responses: int = 100_000

    def __post_init__(self) -> None:
        if self.ttl_seconds <= 0:
            raise ValueError(f"ttlSeconds: expected more than 0, got {self.ttl_seconds:g}")
        if self.max_responses < 1:
            raise ValueError(f"maxResponses: expected 1 or more, got {self.max_responses}")
        self._gave = Bindings(self.max_responses, self.ttl_seconds)

    def applies(self, request: Request) -> bool:
        return request.previous != ""

    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        gave = self._gave.find(hashed(request.previous), endpoints, self.clock())
        return endpoints if gave is None else [gave]

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if response.id and request.stage in ("", "decode"):
            self._gave.bind(hashed(response.id), endpoint, self.clock())

    def snapshot(self) -> Iterator[Any]:
        return self._gave.snapshot(self.clock())

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        self._gave.restore(piece, endpoints, self.clock())

    def statistics(self) -> Mapping[str, float]:
        """`responses`: answers of which is known who gave them."""
        return {"responses": len(self._gave)}
