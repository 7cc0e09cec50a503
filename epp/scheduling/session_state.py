"""`SessionStates`: what is known of the session a request belongs to: its turns, and how soon the next one comes."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any, ClassVar, Final

from epp.plugin import Endpoint, Producer, Request, Response, SessionState, Slot
from epp.scheduling.bindings import hashed
from epp.scheduling.sessions import PREVIOUS, SOURCES, SessionSource

_WEIGHT: Final = 0.3
"""Of a session's latest pause in its mean."""
_POOL_WEIGHT: Final = 0.02
"""Of one more pause in the mean of all sessions: the last fifty or so count."""
_PIECE: Final = 500
"""Sessions in a piece of a snapshot."""


class _Session:
    """`began`, `ended`: of its first request, and of its last answer, on the plugins' clock."""

    __slots__ = ("began", "ended", "in_flight", "input_tokens", "key", "output_tokens", "think", "turns", "used")

    def __init__(self, key: int, now: float) -> None:
        self.key = key
        self.began = self.ended = self.used = now
        self.turns = self.in_flight = self.input_tokens = self.output_tokens = 0
        self.think: float | None = None


@dataclass(eq=False)
class SessionStates(Producer[SessionState]):
    """Turns, tokens and pauses of the session that a request belongs to, as `SessionState`: for plugins, `/decisions`.

    A session is known by the first of `sources` that a request has: what `agent-identity` or `session-id-producer`
    (a cookie) found, the headers `x-session-id` and those of coding agents, `previous_response_id`, where the answer
    that this names belongs to a session or began one, or `prompt_cache_key`. Sub-agents that send the session of their
    caller are part of it.

    llm-d has `agent-identity` as the one source, and each of its replicas counts for itself; here they share.
    `eviction_ttl_seconds`: life of an unused session; 0: without end. `max_sessions` (ours): sessions kept; beyond it
    those unused longest go first. As many answers are kept that a request may name. `eviction_sweep_seconds` is
    accepted for llm-d's files. Source: llm-d-router #2531.
    """

    produces: ClassVar[type[Any]] = SessionState
    waits: ClassVar[bool] = False

    sources: Sequence[SessionSource] = SOURCES
    eviction_ttl_seconds: float = 3600.0
    eviction_sweep_seconds: float = 300.0
    max_sessions: int = 50_000

    _sessions: OrderedDict[int, _Session] = field(default_factory=OrderedDict, init=False, repr=False)
    """By the hash of the id; used longest ago first."""
    _answers: OrderedDict[int, int] = field(default_factory=OrderedDict, init=False, repr=False)
    """Hash of an answer's id -> session."""
    _keys: Slot[int] = field(default_factory=Slot, init=False, repr=False)
    _taken: Slot[_Session] = field(default_factory=Slot, init=False, repr=False)
    """The session in which a request counts as a turn already."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise ValueError("sources: expected at least one")
        if self.eviction_ttl_seconds < 0:
            raise ValueError(f"evictionTtlSeconds: {self.eviction_ttl_seconds}, expected 0 or more")
        if self.max_sessions < 1:
            raise ValueError(f"maxSessions: expected 1 or more, got {self.max_sessions}")
        self._follows_answers = any(source.field == PREVIOUS for source in self.sources)
        self._turns = 0
        self._think: float | None = None
        """Mean of the pauses of all sessions."""

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, SessionState]:
        """The same for each of `endpoints`; none of a request without session."""
        key = self._key(request)
        if key is None:
            return {}
        now, known = self.clock(), self._known(key)
        if known is None:
            return dict.fromkeys(endpoints, SessionState())
        return dict.fromkeys(
            endpoints,
            SessionState(
                known.turns,
                now - known.began,
                0.0 if known.in_flight else now - known.ended,
                known.in_flight,
                known.input_tokens,
                known.output_tokens,
                known.think,
            ),
        )

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if request.stage not in ("", "decode"):
            return
        if (session := self._taken.get(request)) is None:  # else it was moved by a retry, and its turn counts already
            key = self._key(request)
            if key is None:
                return
            session = self._taken.set(request, self._known(key) or self._new(key))
            if session.turns and not session.in_flight:
                self._pause(session, max(0.0, self.clock() - request.waited - session.ended))
            session.turns += 1
            self._turns += 1
        session.in_flight += 1
        self._use(session)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if request.stage not in ("", "decode"):
            return
        now, session = self.clock(), self._taken.get(request)
        if session is not None:
            session.in_flight -= 1
            session.ended = now
        elif response.id and self._follows_answers:
            session = self._new(hashed(response.id))
            session.turns += 1
            self._turns += 1
        if session is None:
            return
        if (usage := response.usage) is not None:
            session.input_tokens += max(0, usage.prompt)
            session.output_tokens += max(0, usage.completion)
        if response.id and self._follows_answers:
            self._answers[hashed(response.id)] = session.key
            if len(self._answers) > self.max_sessions:
                self._answers.popitem(last=False)
        self._use(session)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """The session's hash."""
        return self._key(request)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        if state is not None:
            self._keys.set(request, int(state))
        self.on_picked(request, endpoint)

    def snapshot(self) -> Iterator[Any]:
        """Sessions, used longest ago first, with their answers: [[hash, turns, seconds since the first request and
        since the last answer ended, tokens read and generated, mean pause] ...], [[answer, session] ...].
        """
        now, sessions, answers = self.clock(), list(self._sessions.values()), list(self._answers.items())
        for start in range(0, max(len(sessions), len(answers)), _PIECE):
            rows = [
                (s.key, s.turns, now - s.began, now - s.ended, s.input_tokens, s.output_tokens, s.think)
                for s in sessions[start : start + _PIECE]
            ]
            yield rows, answers[start : start + _PIECE]

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        rows, answers = piece
        now = self.clock()
        for key, turns, age, idle, input_tokens, output_tokens, think in rows:
            if key in self._sessions or not (turns >= 0 and isfinite(age) and isfinite(idle)):
                continue
            session = self._new(int(key))
            session.turns, session.began, session.ended = int(turns), now - age, now - idle
            session.input_tokens, session.output_tokens = int(input_tokens), int(output_tokens)
            session.think = None if think is None else float(think)
            session.used = now - idle
            self._turns += session.turns
        self._trim()
        for answer, key in answers[: self.max_sessions - len(self._answers)]:
            self._answers.setdefault(int(answer), int(key))

    def statistics(self) -> Mapping[str, float]:
        """`sessions` that are known, `turns` of one in the mean so far, `answers` that a request may name, and
        `think_seconds`: from an answer's end to the next request, in the mean of the last fifty or so.
        """
        count = len(self._sessions)
        return {
            "sessions": count,
            "turns": self._turns / count if count else 0.0,
            "answers": len(self._answers),
            **({} if self._think is None else {"think_seconds": self._think}),
        }

    def _key(self, request: Request) -> int | None:
        key = self._keys.get(request)
        if key is not None or request.elsewhere:
            return key
        for source in self.sources:
            if value := source.of(request):
                key = hashed(value)
                return self._keys.set(request, self._answers.get(key, key) if source.field == PREVIOUS else key)
        return None

    def _known(self, key: int) -> _Session | None:
        session = self._sessions.get(key)
        return None if session is None or self._expired(session) else session

    def _expired(self, session: _Session) -> bool:
        ttl = self.eviction_ttl_seconds
        return bool(ttl) and not session.in_flight and self.clock() - session.used >= ttl

    def _new(self, key: int) -> _Session:
        if (old := self._sessions.pop(key, None)) is not None:
            self._turns -= old.turns
        session = self._sessions[key] = _Session(key, self.clock())
        return session

    def _use(self, session: _Session) -> None:
        session.used = self.clock()
        if self._sessions.get(session.key) is session:  # else there were too many
            self._sessions.move_to_end(session.key)
        self._trim()

    def _trim(self) -> None:
        # Two out for one in: what has expired goes soon, and no single request pays for a mass expiry.
        for _ in range(2):
            oldest = next(iter(self._sessions.values()), None)
            if oldest is not None and (len(self._sessions) > self.max_sessions or self._expired(oldest)):
                self._turns -= oldest.turns
                del self._sessions[oldest.key]

    def _pause(self, session: _Session, seconds: float) -> None:
        session.think = seconds if session.think is None else session.think + _WEIGHT * (seconds - session.think)
        self._think = seconds if self._think is None else self._think + _POOL_WEIGHT * (seconds - self._think)
