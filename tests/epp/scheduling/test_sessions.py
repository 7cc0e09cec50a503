import base64
import gc
import weakref
from typing import Any, Literal

import pytest
from msgspec.structs import replace

from epp.plugin import Endpoint, Guard, Request, Response
from epp.protocol import SESSION_ID, SESSION_TOKEN
from epp.scheduling.filters import SessionAffinityFilter
from epp.scheduling.session_state import SessionStates
from epp.scheduling.sessions import (
    AgentIdentity,
    EncodedEndpointHeader,
    SessionId,
    SessionIdProducer,
    SessionSource,
)
from tests.support.scheduling.schedulers import ask, pod, pods, scheduler


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def by_id(**settings: object) -> SessionAffinityFilter:
    return SessionAffinityFilter(strategy="session_id", **settings)  # type: ignore[arg-type]


def session(id: str) -> Request:
    return ask(headers={SESSION_ID: id})


def test_the_answer_names_the_endpoint_and_the_token_brings_it_back() -> None:
    a, b = pod("default/a"), pod("default/b")
    s = scheduler(filters=[SessionAffinityFilter()])
    s.choose(ask(), [a, b])
    decision = s.choose(ask(), [a, b])
    headers = s.answer_headers(decision)
    assert headers == {SESSION_TOKEN: base64.b64encode(b"default/b").decode()}
    for _ in range(3):
        assert s.choose(ask(headers=headers), [a, b]).endpoint is b


def test_after_a_retry_the_answer_names_who_served() -> None:
    a, b = pod("default/a"), pod("default/b")
    s = scheduler(filters=[SessionAffinityFilter()])
    decision = s.choose(ask(), [a, b])
    s.moved(decision, b, Response())
    assert s.answer_headers(decision) == {SESSION_TOKEN: base64.b64encode(b"default/b").decode()}


@pytest.mark.parametrize(
    "token", ["", "%%%", "é", "\\xff", base64.b64encode(b"\xff\xfe").decode(), base64.b64encode(b"gone/pod").decode()]
)
def test_a_token_of_nobody_is_no_preference(token: str) -> None:
    endpoints = pods("ab")
    assert SessionAffinityFilter().filter(ask(headers={SESSION_TOKEN: token}), endpoints) == endpoints


def test_another_header_carries_the_token() -> None:
    (a,) = pods("a")
    affinity = SessionAffinityFilter(encoded_endpoint_header_config=EncodedEndpointHeader("X-Sticky"))
    assert list(affinity.answer_headers(ask(), a)) == ["x-sticky"]
    assert affinity.home(ask(headers={"x-sticky": base64.b64encode(b"a").decode()}), [a]) is a


def test_a_session_stays_where_it_was_sent() -> None:
    endpoints = pods("abc")
    s = scheduler(filters=[by_id()])
    homes = {id: s.choose(session(id), endpoints).endpoint for id in "xyz"}
    assert len(set(homes.values())) == 3
    for id in "zyx":
        assert s.choose(session(id), endpoints).endpoint is homes[id]
    assert s.answer_headers(s.choose(session("x"), endpoints)) == {}


def test_a_session_follows_a_retry() -> None:
    a, b = pods("ab")
    s = scheduler(filters=[by_id()])
    decision = s.choose(session("x"), [a, b])
    assert decision.endpoint is a
    s.moved(decision, b, Response())
    assert s.choose(session("x"), [a, b]).endpoint is b


def test_a_session_whose_endpoint_is_no_candidate_goes_elsewhere_and_stays_there() -> None:
    a, b = pods("ab")
    s = scheduler(filters=[by_id()])
    assert s.choose(session("x"), [a]).endpoint is a
    assert s.choose(session("x"), [b]).endpoint is b
    assert s.choose(session("x"), [a, b]).endpoint is b


def test_a_new_endpoint_under_the_old_name_is_not_the_session_s() -> None:
    affinity = by_id()
    old, new = pod("a"), pod("a")
    affinity.on_picked(session("x"), old)
    assert affinity.home(session("x"), [new]) is None


def test_no_session_is_no_preference_and_is_not_remembered() -> None:
    endpoints = pods("ab")
    affinity = by_id()
    for headers in ({}, {SESSION_ID: ""}):
        affinity.on_picked(ask(headers=headers), endpoints[0])
        assert affinity.filter(ask(headers=headers), endpoints) == endpoints
    assert affinity.statistics() == {"sessions": 0}


def test_sources_are_tried_in_order_and_empty_ones_passed_over() -> None:
    a, b = pods("ab")
    affinity = by_id(session_id_config=SessionId(sources=[SessionSource("X-First"), SessionSource("x-second")]))
    affinity.on_picked(ask(headers={"x-first": "1", "x-second": "2"}), a)
    assert affinity.home(ask(headers={"x-first": "1", "x-second": "9"}), [a, b]) is a
    assert affinity.home(ask(headers={"x-first": "", "x-second": "1"}), [a, b]) is a
    assert affinity.home(ask(headers={"x-second": "2"}), [a, b]) is None


def test_an_unused_session_expires_and_use_keeps_it() -> None:
    a, b = pods("ab")
    clock = Clock()
    affinity = by_id(session_id_config=SessionId(eviction_ttl_seconds=10))
    affinity.clock = clock
    affinity.on_picked(session("x"), a)
    clock.now = 9.0
    affinity.on_picked(session("x"), a)
    clock.now = 18.9
    assert affinity.home(session("x"), [a, b]) is a
    clock.now = 19.0
    assert affinity.home(session("x"), [a, b]) is None


def test_expired_sessions_leave_the_table_as_others_come() -> None:
    (a,) = pods("a")
    clock = Clock()
    affinity = by_id(session_id_config=SessionId(eviction_ttl_seconds=10))
    affinity.clock = clock
    for i in range(100):
        affinity.on_picked(session(f"old {i}"), a)
    clock.now = 11.0
    for i in range(100):
        affinity.on_picked(session(f"new {i}"), a)
    assert affinity.statistics() == {"sessions": 100}
    assert affinity.home(session("new 0"), [a]) is a


def test_the_table_is_bounded_and_the_longest_unused_goes_first() -> None:
    (a,) = pods("a")
    affinity = by_id(max_sessions=3)
    for id in ("1", "2", "3", "1", "4"):
        affinity.on_picked(session(id), a)
    assert affinity.statistics() == {"sessions": 3}
    assert [id for id in "1234" if affinity.home(session(id), [a]) is a] == ["1", "3", "4"]


def test_bindings_keep_no_endpoint_alive() -> None:
    affinity, endpoint = by_id(), Endpoint("a", "a:1")
    affinity.on_picked(session("x"), endpoint)
    kept = weakref.ref(endpoint)
    del endpoint
    gc.collect()
    assert kept() is None
    assert affinity.home(session("x"), pods("ab")) is None


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"strategy": "cookie"}, "strategy"),
        ({"session_id_config": SessionId(sources=[])}, "sources"),
        ({"max_sessions": 0}, "maxSessions"),
    ],
)
def test_nonsense_is_refused(wrong: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        SessionAffinityFilter(**wrong)  # type: ignore[arg-type]


def test_a_session_that_a_peer_bound_is_bound_here_too() -> None:
    a, b = pod("default/a"), pod("default/b")
    here, there = by_id(), by_id()
    request = session("s1")
    here.on_picked(request, b)
    sent = ask(elsewhere=True)
    there.from_peer(sent, b, here.to_peers(request, b))
    assert there.filter(session("s1"), [a, b]) == [b]
    assert there.filter(session("s2"), [a, b]) == [a, b]


def test_a_peer_s_bindings_are_taken_over_but_none_that_is_known() -> None:
    a, b = pod("default/a"), pod("default/b")
    here, there = by_id(), by_id()
    for number in range(1200):
        here.on_picked(session(f"s{number}"), b)
    there.on_picked(session("s7"), a)
    pieces = [*here.snapshot()]
    assert [len(piece) for piece in pieces] == [500, 500, 200]
    for piece in pieces:
        there.restore(piece, {"default/b": b})
    assert there.filter(session("s7"), [a, b]) == [a]
    assert there.filter(session("s1199"), [a, b]) == [b]
    assert there.statistics() == {"sessions": 1200}


# --- whose session it is --------------------------------------------------------------------------------------------


def attributes(guard: Guard, **headers: str) -> dict[str, str]:
    made = ask(headers={name.replace("_", "-"): value for name, value in headers.items()})
    passed = guard.check(made) or made
    assert isinstance(passed, Request)
    return dict(passed.attributes)


def test_coding_agents_say_their_session_in_headers_of_their_own() -> None:
    guard = AgentIdentity()
    assert attributes(guard) == {}
    assert attributes(guard, session_id="c") == {"agent-identity": "c"}
    assert attributes(guard, session_id="c", x_session_affinity="o") == {"agent-identity": "o"}
    assert attributes(guard, x_session_affinity="o", x_claude_code_session_id="a") == {"agent-identity": "a"}
    assert attributes(guard, x_claude_code_session_id="", session_id="c") == {"agent-identity": "c"}
    own = AgentIdentity(additional_session_headers=["X-My-Agent"])
    assert attributes(own, x_my_agent="m", x_claude_code_session_id="a") == {"agent-identity": "m"}
    assert len(attributes(guard, session_id="c" * 10_000)["agent-identity"]) == 256
    legacy = guard.check(ask(headers={"session_id": "old"}))
    assert isinstance(legacy, Request)
    assert legacy.attributes["agent-identity"] == "old"


@pytest.mark.parametrize(
    ("cookie", "found"),
    [("llm=s1", "s1"), ("a=b; llm = s1 ; c=d", "s1"), ("xllm=s1", None), ("llm", None), ("llm=", None), ("", None)],
)
def test_a_session_is_known_by_a_cookie(cookie: str, found: str | None) -> None:
    guard = SessionIdProducer(cookie_name="llm")
    guard.name = "session-id-producer"
    wanted = {} if found is None else {"SessionIDDataKey/session-id-producer": found}
    assert attributes(guard, cookie=cookie) == wanted


def test_a_session_id_is_in_a_header_or_a_cookie() -> None:
    guard = SessionIdProducer(header_name="X-Chat")
    guard.name = "chats"
    assert attributes(guard, x_chat=" s1 ") == {"SessionIDDataKey/chats": "s1"}
    for wrong in ({}, {"header_name": "a", "cookie_name": "b"}):
        with pytest.raises(ValueError, match="one of the two"):
            SessionIdProducer(**wrong)


@pytest.mark.parametrize(
    ("source", "fields"),
    [
        (SessionSource(attribute="agent-identity"), {"attributes": {"agent-identity": "s"}}),
        (
            SessionSource(attribute="SessionIDDataKey", producer="chats"),
            {"attributes": {"SessionIDDataKey/chats": "s"}},
        ),
        (SessionSource(field="prompt_cache_key"), {"cache_key": "s"}),
    ],
)
def test_a_session_is_bound_by_whatever_names_it(source: SessionSource, fields: dict[str, Any]) -> None:
    endpoints = pods("ab")
    affinity = by_id(session_id_config=SessionId((SessionSource("x-session-id"), source)))
    first = ask(**fields)
    assert affinity.home(first, endpoints) is None
    affinity.on_picked(first, endpoints[1])
    assert affinity.home(ask(**fields), endpoints) is endpoints[1]
    assert affinity.home(ask(), endpoints) is None
    affinity.on_picked(replace(first, body=b""), endpoints[0])
    assert affinity.home(ask(**fields), endpoints) is endpoints[0], "a retry, when the body is gone"


@pytest.mark.parametrize(
    "fields",
    [
        {"attributes": {"agent-identity": "s"}},
        {"attributes": {"SessionIDDataKey/session-id-producer": "s"}},
        *({"headers": {name: "s"}} for name in ("x-session-id", "x-claude-code-session-id", "x-session-affinity")),
        *({"headers": {name: "s"}} for name in ("session-id", "session_id")),
    ],
)
def test_a_session_is_known_wherever_it_is_usually_named(fields: dict[str, Any]) -> None:
    endpoints = pods("ab")
    affinity, states = by_id(), SessionStates()
    affinity.on_picked(ask(**fields), endpoints[1])
    assert affinity.home(ask(**fields), endpoints) is endpoints[1]
    assert endpoints[0] in states.produce(ask(**fields), endpoints), "the same for what is learned of sessions"


def test_requests_that_share_a_prefix_alone_are_not_kept_together() -> None:
    endpoints = pods("ab")
    affinity = by_id()
    affinity.on_picked(ask(cache_key="everybody"), endpoints[1])
    assert affinity.home(ask(cache_key="everybody"), endpoints) is None


def test_an_answer_is_no_session_to_stay_with() -> None:
    sources = [SessionSource(field="previous_response_id"), SessionSource(SESSION_ID)]
    with pytest.raises(ValueError, match="previous_response_id: use previous-response-filter"):
        by_id(session_id_config=SessionId(sources=sources))


@pytest.mark.parametrize(
    "wrong", [{}, {"header": "a", "attribute": "agent-identity"}, {"attribute": "agent"}, {"field": "user"}]
)
def test_a_source_is_one_place_that_exists(wrong: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="expected"):
        SessionSource(**wrong)


@pytest.mark.parametrize("strategy", ["session_id", "encoded_endpoint_header"])
def test_prefill_and_decode_have_a_session_each(strategy: Literal["session_id", "encoded_endpoint_header"]) -> None:
    a, b = pods("ab")
    made = session("s")
    decode, prefill = (SessionAffinityFilter(strategy=strategy, profile_name=name) for name in ("", "prefill"))
    for one in (decode, prefill):
        one.filter(made, [a, b])
        one.on_picked(replace(made, stage="prefill", kept=dict(made.kept)), a)
        one.on_picked(replace(made, stage="decode"), b)
    tokens = [one.answer_headers(made, b).get(SESSION_TOKEN) for one in (decode, prefill)]
    if strategy == "session_id":
        assert tokens == [None, None]
        homes = [one.home(session("s"), [a, b]) for one in (decode, prefill)]
    else:
        homes = [
            one.home(ask(headers={SESSION_TOKEN: token or ""}), [a, b])
            for one, token in zip((decode, prefill), tokens, strict=True)
        ]
    assert homes == [b, a]
