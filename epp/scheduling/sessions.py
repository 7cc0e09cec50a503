"""`SessionAffinity`: which endpoint a session lives on. Shared by the filter (a must) and the scorer (a wish)."""

import base64
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Literal

from epp.plugin import Endpoint, Plugin, Request, Slot

_PIECE: Final = 500
"""Sessions in a piece of a snapshot."""


@dataclass(frozen=True)
class EncodedEndpointHeader:
    """`header`: carries base64 of the endpoint's `namespace/name`, on the request and on the answer."""

    header: str = "x-session-token"


@dataclass(frozen=True)
class SessionSource:
    """`header`: a request header that carries the session's id."""

    header: str


@dataclass(frozen=True)
class SessionId:
    """`sources`: tried in order, the first that is not empty wins. `eviction_ttl_seconds`: life of an unused binding.

    `eviction_sweep_seconds` is accepted for llm-d's files; expiry is exact here and needs no sweep.
    """

    sources: Sequence[SessionSource] = (SessionSource("x-session-id"),)
    eviction_ttl_seconds: float = 300.0
    eviction_sweep_seconds: float = 10.0


@dataclass(eq=False)
class SessionAffinity(Plugin):
    """Finds a session's endpoint. No session, an unknown one or an endpoint that is no candidate: no preference.

    `strategy`:
     · `encoded_endpoint_header` (default) keeps nothing: the answer gives the client the endpoint that served, and
       the client's next request brings it back. Settings in `encoded_endpoint_header_config`.
     · `session_id` remembers where each session was sent last, a retry elsewhere included. Settings in
       `session_id_config`. Bindings keep no endpoint alive.
    `max_sessions` (100,000; ours): bindings kept; beyond it the ones unused longest go first.
    Source: llm-d-router, session affinity filter and scorer.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeader = field(default_factory=EncodedEndpointHeader)
    session_id_config: SessionId = field(default_factory=SessionId)
    max_sessions: int = 100_000
    _bound: dict[int, tuple["weakref.ref[Endpoint]", float]] = field(default_factory=dict, init=False, repr=False)
    """Hash of the session's id -> (endpoint, when the binding expires); least recently used first."""
    _sessions: Slot[int] = field(default_factory=Slot, init=False, repr=False)
    """A request's session, where another replica says it."""

    def __post_init__(self) -> None:
        if self.strategy not in ("encoded_endpoint_header", "session_id"):
            raise ValueError(f"strategy: expected encoded_endpoint_header or session_id, got {self.strategy!r}")
        if not self.session_id_config.sources:
            raise ValueError("sessionIdConfig.sources: expected at least one header")
        if self.max_sessions < 1:
            raise ValueError(f"maxSessions: expected 1 or more, got {self.max_sessions}")
        self._headers = [source.header.lower() for source in self.session_id_config.sources]
        self._token_header = self.encoded_endpoint_header_config.header.lower()

    def home(self, request: Request, endpoints: Sequence[Endpoint]) -> Endpoint | None:
        """The candidate this request's session lives on, if any. It is one that decodes."""
        if self.strategy == "session_id":
            session = self._session(request)
            bound = self._bound.get(session) if session is not None else None
            if bound is None or bound[1] <= self.clock():
                return None
            endpoint = bound[0]()
            return endpoint if endpoint is not None and endpoint in endpoints else None
        token = request.headers.get(self._token_header)
        if not token:
            return None
        try:
            name = base64.b64decode(token, validate=True).decode()
        except ValueError:  # the client's own bytes: never a reason to fail
            return None
        return next((endpoint for endpoint in endpoints if endpoint.name == name), None)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if self.strategy != "session_id" or request.stage not in ("", "decode"):
            return
        if (session := self._session(request)) is None:
            return
        self._bind(session, endpoint, self.session_id_config.eviction_ttl_seconds)

    def _bind(self, session: int, endpoint: Endpoint, seconds: float) -> None:
        now = self.clock()
        self._bound.pop(session, None)
        self._bound[session] = (weakref.ref(endpoint), now + seconds)
        # Two out for one in: what has expired goes soon, and no single request pays for a mass expiry.
        for _ in range(2):
            oldest = next(iter(self._bound))
            if len(self._bound) > self.max_sessions or self._bound[oldest][1] <= now:
                del self._bound[oldest]

    def to_peers(self, request: Request) -> Any:
        """The session's hash."""
        return self._session(request) if self.strategy == "session_id" else None

    def from_peer(self, request: Request, state: Any) -> None:
        if state is not None:
            self._sessions.set(request, int(state))

    def snapshot(self) -> Iterator[Any]:
        """The bindings: [hash, endpoint, seconds left] ..., unused longest first."""
        now = self.clock()
        bound = [(session, ref(), until - now) for session, (ref, until) in self._bound.items()]
        alive = [(session, endpoint.name, left) for session, endpoint, left in bound if endpoint is not None]
        for start in range(0, len(alive), _PIECE):
            yield alive[start : start + _PIECE]

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        for session, name, left in piece:
            if name in endpoints and session not in self._bound and left > 0:
                self._bind(session, endpoints[name], left)

    def answer_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        if self.strategy == "session_id":
            return {}
        return {self._token_header: base64.b64encode(endpoint.name.encode()).decode()}

    def statistics(self) -> Mapping[str, float]:
        """`sessions`: bindings kept."""
        return {"sessions": len(self._bound)}

    def _session(self, request: Request) -> int | None:
        """A hash, so that long ids cost no memory, and the same at all replicas; a collision shares an endpoint, no
        more.
        """
        if request.elsewhere:
            return self._sessions.get(request)
        for header in self._headers:
            if value := request.headers.get(header):
                return int.from_bytes(blake2b(value.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")
        return None
