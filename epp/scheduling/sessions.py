"""`SessionAffinity`: which endpoint a session lives on. Shared by the filter (a must) and the scorer (a wish).

Beside it the guards that find whose session a request is: `AgentIdentity`, `SessionIdProducer`.
"""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from epp.plugin import AGENT_IDENTITY, Endpoint, Guard, Plugin, Request, Slot, annotated
from epp.scheduling.bindings import Bindings, hashed


@dataclass(frozen=True)
class EncodedEndpointHeader:
    """`header`: carries base64 of the endpoint's `namespace/name`, on the request and on the answer."""

    header: str = "x-session-token"


SESSION_ID: Final = "SessionIDDataKey"
"""What llm-d calls the attribute of `session-id-producer`."""
_AGENT_HEADERS: Final = ("x-claude-code-session-id", "x-session-affinity", "session-id", "session_id")
"""Claude Code, OpenCode, Codex, and Codex before 0.131. Source: llm-d-router, agent identity."""
_LONGEST: Final = 256
"""Characters of a session's id that tell it from others."""
PREVIOUS: Final = "previous_response_id"
CACHE_KEY: Final = "prompt_cache_key"


@dataclass(frozen=True)
class SessionSource:
    """Where a session's id is: one of the three.

    `header`: a request header. `attribute`: what another plugin finds: `agent-identity`, or `SessionIDDataKey` with
    `producer`, the name of the `session-id-producer`. `field` (ours): `prompt_cache_key` of the body, by
    which OpenAI's clients say which requests share a prefix; or, of `session-state-producer`, `previous_response_id`,
    which names the answer that a request to `/v1/responses` goes on from.

    Without `sources` these are looked at, in this order: what `agent-identity` and a `session-id-producer` of that name
    found, `x-session-id`, the headers of Claude Code, OpenCode and Codex, and of `session-state-producer` the two
    fields.
    """

    header: str = ""
    attribute: str = ""
    producer: str = ""
    field: str = ""

    def __post_init__(self) -> None:
        if sum(map(bool, (self.header, self.attribute, self.field))) != 1:
            raise ValueError("sessionIdConfig.sources: expected header, attribute or field in each, one of them")
        if self.attribute not in ("", AGENT_IDENTITY, SESSION_ID):
            expected = f"expected {AGENT_IDENTITY} or {SESSION_ID}, got {self.attribute!r}"
            raise ValueError(f"sessionIdConfig.sources[].attribute: {expected}")
        if self.field not in ("", CACHE_KEY, PREVIOUS):
            expected = f"expected {CACHE_KEY} or {PREVIOUS}, got {self.field!r}"
            raise ValueError(f"sessionIdConfig.sources[].field: {expected}")

    def of(self, request: Request) -> str | None:
        """The id that `request` carries there."""
        if self.header:
            return request.headers.get(self.header.lower())
        if self.attribute:
            return request.attributes.get(_key(self.attribute, self.producer))
        return request.previous if self.field == PREVIOUS else request.cache_key


def _key(attribute: str, producer: str) -> str:
    return f"{attribute}/{producer}" if producer else attribute


SOURCES: Final = (
    SessionSource(attribute=AGENT_IDENTITY),
    SessionSource(attribute=SESSION_ID, producer="session-id-producer"),
    SessionSource("x-session-id"),
    *map(SessionSource, _AGENT_HEADERS),
    SessionSource(field=PREVIOUS),
    SessionSource(field=CACHE_KEY),
)
"""Where a session's id is looked for unless a configuration says it."""
BINDING: Final = tuple(source for source in SOURCES if not source.field)
"""Those of them by which a session is kept at one endpoint. `previous-response-filter` knows who has an answer; and a
`prompt_cache_key` may be the same in all requests of an application, which one endpoint could not serve."""


@dataclass(frozen=True)
class SessionId:
    """`sources`: tried in order, the first that is not empty wins. `eviction_ttl_seconds`: life of an unused binding.

    `eviction_sweep_seconds` is accepted for llm-d's files; expiry is exact here and needs no sweep.
    """

    sources: Sequence[SessionSource] = BINDING
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
    `profile_name` (llm-d's): `prefill` where it is to follow the endpoint that prefills, beside another that follows
    the one that decodes.
    `max_sessions` (100,000; ours): bindings kept; beyond it the ones unused longest go first.
    Source: llm-d-router, session affinity filter and scorer.
    """

    strategy: Literal["encoded_endpoint_header", "session_id"] = "encoded_endpoint_header"
    encoded_endpoint_header_config: EncodedEndpointHeader = field(default_factory=EncodedEndpointHeader)
    session_id_config: SessionId = field(default_factory=SessionId)
    profile_name: Literal["", "prefill", "decode"] = ""
    max_sessions: int = 100_000
    _sessions: Slot[int] = field(default_factory=Slot, init=False, repr=False)
    """A request's session."""
    _prefills: Slot[list[Endpoint]] = field(default_factory=Slot, init=False, repr=False)
    """Where a request's prompt was computed last; one list for all of its stages."""

    def __post_init__(self) -> None:
        if self.strategy not in ("encoded_endpoint_header", "session_id"):
            raise ValueError(f"strategy: expected encoded_endpoint_header or session_id, got {self.strategy!r}")
        if not self.session_id_config.sources:
            raise ValueError("sessionIdConfig.sources: expected at least one")
        if any(source.field == PREVIOUS for source in self.session_id_config.sources):
            raise ValueError(f"sessionIdConfig.sources[].field: {PREVIOUS}: use previous-response-filter")
        if self.max_sessions < 1:
            raise ValueError(f"maxSessions: expected 1 or more, got {self.max_sessions}")
        self._bound = Bindings(self.max_sessions, self.session_id_config.eviction_ttl_seconds)
        self._follows_prefill = self.profile_name == "prefill"
        self._token_header = self.encoded_endpoint_header_config.header.lower()

    def home(self, request: Request, endpoints: Sequence[Endpoint]) -> Endpoint | None:
        """The candidate this request's session lives on, if any. It is one that decodes."""
        if self.strategy == "session_id":
            session = self._session(request)
            return None if session is None else self._bound.find(session, endpoints, self.clock())
        if self._follows_prefill and self._prefills.get(request) is None:
            self._prefills.set(request, [])
        token = request.headers.get(self._token_header)
        if not token:
            return None
        try:
            name = base64.b64decode(token, validate=True).decode()
        except ValueError:  # the client's own bytes: never a reason to fail
            return None
        return next((endpoint for endpoint in endpoints if endpoint.name == name), None)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if request.stage == "encode" or (request.stage == "prefill") != self._follows_prefill:
            return
        if (prefills := self._prefills.get(request)) is not None:
            prefills.append(endpoint)
        if self.strategy != "session_id" or (session := self._session(request)) is None:
            return
        self._bound.bind(session, endpoint, self.clock())

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """The session's hash."""
        return self._session(request) if self.strategy == "session_id" else None

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        if state is not None:
            self._sessions.set(request, int(state))
        self.on_picked(request, endpoint)

    def snapshot(self) -> Iterator[Any]:
        return self._bound.snapshot(self.clock())

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        self._bound.restore(piece, endpoints, self.clock())

    def answer_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        if self.strategy == "session_id":
            return {}
        if self._follows_prefill:
            prefills = self._prefills.get(request)
            if not prefills:
                return {}
            endpoint = prefills[-1]
        return {self._token_header: base64.b64encode(endpoint.name.encode()).decode()}

    def statistics(self) -> Mapping[str, float]:
        """`sessions`: bindings kept."""
        return {"sessions": len(self._bound)}

    def _session(self, request: Request) -> int | None:
        """Its hash; a collision shares an endpoint, no more."""
        session = self._sessions.get(request)
        if session is not None or request.elsewhere:
            return session
        for source in self.session_id_config.sources:
            if value := source.of(request):
                return self._sessions.set(request, hashed(value))
        return None


@dataclass(eq=False)
class AgentIdentity(Guard):
    """`agent-identity`: whose session a coding agent's request is, by the header that the agent sends.

    It looks in `additional_session_headers` (none), then in those of Claude Code, OpenCode and Codex; the first that is
    not empty counts. Flow control takes it for the fairness id of a request that says none, where clients' control
    headers are trusted; `session-affinity-filter` and `-scorer` find it as the attribute `agent-identity`. Source:
    llm-d-router.
    """

    additional_session_headers: Sequence[str] = ()

    def __post_init__(self) -> None:
        self._headers = (*(name.lower() for name in self.additional_session_headers), *_AGENT_HEADERS)

    def check(self, request: Request) -> Request | None:
        for name in self._headers:
            if value := request.headers.get(name):
                return annotated(request, attributes={AGENT_IDENTITY: value[:_LONGEST]})
        return None


@dataclass(eq=False)
class SessionIdProducer(Guard):
    """`session-id-producer`: whose session a request is, by the header `header_name` or the cookie `cookie_name`.

    One of the two is to be given. `session-affinity-filter` and `-scorer` find it as the attribute `SessionIDDataKey`
    of the producer with this plugin's name. Source: llm-d-router.
    """

    header_name: str = ""
    cookie_name: str = ""

    def __post_init__(self) -> None:
        if bool(self.header_name.strip()) == bool(self.cookie_name.strip()):
            raise ValueError("headerName, cookieName: expected one of the two")

    def check(self, request: Request) -> Request | None:
        if header := self.header_name.strip().lower():
            value = request.headers.get(header, "").strip()
        else:
            value = _cookie(request.headers.get("cookie", ""), self.cookie_name.strip())
        return annotated(request, attributes={_key(SESSION_ID, self.name): value[:_LONGEST]}) if value else None


def _cookie(header: str, name: str) -> str:
    """The cookie's value; "" where there is none."""
    for pair in header.split(";"):
        given, found, value = pair.partition("=")
        if found and given.strip() == name:
            return value.strip()
    return ""
