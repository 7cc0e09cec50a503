"""Policies that hash a request to an endpoint: KubeAI's bounded-load prefix hash, production-stack's sessions."""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from xxhash import xxh3_64_intdigest

from epp.plugin import Endpoint, InFlight, Request, Scorer, least
from tooling.policies.by_prefix import Rates


class Ring:
    """Consistent hashing: each endpoint at `replicas` places of a ring, made anew when the endpoints change."""

    def __init__(self, replicas: int) -> None:
        self._replicas = replicas
        self._members: frozenset[Endpoint] = frozenset()
        self._places: list[tuple[int, Endpoint]] = []

    def walk(self, key: bytes, endpoints: Sequence[Endpoint]) -> Iterator[Endpoint]:
        """Each endpoint once, from the key's place on."""
        members = frozenset(endpoints)
        if members != self._members:
            self._members = members
            self._places = sorted(
                ((xxh3_64_intdigest(f"{e.name}{n}".encode()), e) for e in endpoints for n in range(self._replicas)),
                key=lambda place: place[0],
            )
        start = bisect_left(self._places, xxh3_64_intdigest(key), key=lambda place: place[0])
        seen = set()
        for _, endpoint in (*self._places[start:], *self._places[:start]):
            if endpoint not in seen:
                seen.add(endpoint)
                yield endpoint


@dataclass(eq=False)
class KubeAiPrefixHash(Scorer):
    """`PrefixHash` of KubeAI 0.21: consistent hashing with bounded loads of the first characters of what is asked.

    `prefix_char_length` (100) of a chat's first user message, else of the prompt. From its place on a ring of
    `replication` (256) places an endpoint the first one wins whose requests in flight stay within
    `mean_load_percentage` (125) of the mean, this request included; if none does, the first.
    """

    needs = (InFlight,)

    mean_load_percentage: int = 125
    replication: int = 256
    prefix_char_length: int = 100
    _ring: Ring = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ring = Ring(self.replication)

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        load = request.signal(InFlight)
        bound = (sum(load[e].requests for e in endpoints) + 1) / len(endpoints) * self.mean_load_percentage / 100
        order = list(self._ring.walk(self._prefix(request), endpoints))
        chosen = next((e for e in order if load[e].requests <= bound), order[0])
        return [float(endpoint is chosen) for endpoint in endpoints]

    def _prefix(self, request: Request) -> bytes:
        size = self.prefix_char_length
        if request.api == "chat":
            try:
                messages = msgspec.json.decode(request.prompt, type=list[_Message])
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                messages = []
            for message in messages:
                if message.role == "user" and isinstance(message.content, str):
                    return message.content[:size].encode("utf-8", "surrogatepass")
        return request.prompt[:size]


class _Message(msgspec.Struct):
    role: str
    content: Any = None


@dataclass(eq=False)
class SessionHash(Scorer):
    """`session` of vLLM production-stack (August 2026): a session's id on a hash ring; it moves with the ring alone.

    `header` ("x-session-id") carries the id; a request without goes where the fewest were sent in the last 60 s.
    `replication` (40 places an endpoint).
    """

    header: str = "x-session-id"
    replication: int = 40
    _ring: Ring = field(init=False, repr=False)
    _rates: Rates = field(default_factory=Rates, init=False, repr=False)

    def __post_init__(self) -> None:
        self._ring = Ring(self.replication)

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        session = request.header(self.header.lower())
        if not session:
            return least(self._rates.counts(endpoints, self.clock()))
        chosen = next(self._ring.walk(session.encode("utf-8", "surrogatepass"), endpoints))
        return [float(endpoint is chosen) for endpoint in endpoints]

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self._rates.add(endpoint, self.clock())

    def on_removed(self, endpoint: Endpoint) -> None:
        self._rates.forget(endpoint)
