from collections.abc import Mapping
from typing import Any

import pytest

from epp.plugin import AGENT_IDENTITY, Endpoint, Request, Response, SessionState, Usage
from epp.protocol import SESSION_ID
from epp.scheduling.session_state import SessionStates
from epp.scheduling.sessions import SessionIdProducer, SessionSource
from tests.support.scheduling.schedulers import ask, pod, pods, scheduler


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def states(**settings: Any) -> tuple[SessionStates, Clock]:
    found, clock = SessionStates(**settings), Clock()
    found.clock = clock
    return found, clock


def of(session: str, **fields: Any) -> Request:
    return ask(headers={SESSION_ID: session}, **fields)


def after(answer: str) -> Request:
    return ask(api="responses", previous=answer)


def seen(producer: SessionStates, request: Request) -> SessionState | None:
    endpoint = pod("a")
    return producer.produce(request, [endpoint]).get(endpoint)


def known(producer: SessionStates, request: Request) -> SessionState:
    found = seen(producer, request)
    assert found is not None
    return found


def turn(producer: SessionStates, request: Request, endpoint: Endpoint, **response: Any) -> None:
    producer.on_picked(request, endpoint)
    producer.on_finished(request, endpoint, Response(status=200, complete=True, **response))


def test_turns_tokens_and_pauses_are_those_before_the_request() -> None:
    (a,) = pods("a")
    producer, clock = states()
    assert seen(producer, of("x")) == SessionState()
    first = of("x")
    producer.on_picked(first, a)
    clock.now = 3.0
    assert seen(producer, of("x")) == SessionState(turns=1, seconds=3.0, in_flight=1)
    producer.on_finished(first, a, Response(status=200, usage=Usage(100, 20)))
    clock.now = 5.0
    assert seen(producer, of("x")) == SessionState(1, 5.0, 2.0, 0, 100, 20)
    turn(producer, of("x"), a, usage=Usage(150, -1))
    clock.now = 6.0
    assert seen(producer, of("x")) == SessionState(2, 6.0, 1.0, 0, 250, 20, think=2.0)
    assert seen(producer, of("y")) == SessionState()
    assert seen(producer, ask()) is None


def test_the_latest_pauses_count_most_and_time_in_flow_control_is_none() -> None:
    (a,) = pods("a")
    producer, clock = states()
    turn(producer, of("x"), a)
    clock.now = 10.0
    turn(producer, of("x"), a)
    clock.now = 12.0
    turn(producer, of("x", waited=2.0), a)
    found = known(producer, of("x"))
    assert found.think == pytest.approx(7.0)
    assert producer.statistics() == {"sessions": 1, "turns": 3, "answers": 0, "think_seconds": pytest.approx(9.8)}


def test_sub_agents_side_by_side_are_one_session_that_pauses_when_none_is_in_flight() -> None:
    (a,) = pods("a")
    producer, clock = states()
    one, other = (ask(attributes={AGENT_IDENTITY: "agent"}) for _ in range(2))
    producer.on_picked(one, a)
    producer.on_picked(other, a)
    clock.now = 4.0
    producer.on_finished(one, a, Response(status=200))
    clock.now = 6.0
    producer.on_picked(ask(attributes={AGENT_IDENTITY: "agent"}), a)
    producer.on_finished(other, a, Response(status=200))
    found = known(producer, ask(attributes={AGENT_IDENTITY: "agent"}))
    assert (found.turns, found.in_flight, found.think) == (3, 1, None)


def test_a_turn_that_a_retry_moved_is_one_turn() -> None:
    a, b = pods("ab")
    producer, _ = states()
    s = scheduler(producers=[producer])
    decision = s.choose(of("x"), [a, b])
    s.moved(decision, b, Response(served=b.address))
    s.finished(decision, Response(status=200))
    found = known(producer, of("x"))
    assert (found.turns, found.in_flight) == (1, 0)


def test_stages_of_a_request_are_one_turn() -> None:
    a, b = pods("ab")
    producer, _ = states()
    decoded = of("x", stage="decode")
    producer.on_picked(decoded, a)
    producer.on_picked(of("x", stage="prefill"), b)
    found = known(producer, of("x"))
    assert (found.turns, found.in_flight) == (1, 1)


def test_a_chain_of_answers_is_one_session() -> None:
    (a,) = pods("a")
    producer, clock = states()
    turn(producer, ask(api="responses", body=b'{"input":"x"}'), a, id="resp_1", usage=Usage(10, 5))
    clock.now = 2.0
    assert seen(producer, after("resp_1")) == SessionState(1, 2.0, 2.0, 0, 10, 5)
    turn(producer, after("resp_1"), a, id="resp_2")
    clock.now = 5.0
    turn(producer, after("resp_2"), a, id="resp_3")
    for answer in ("resp_1", "resp_2", "resp_3"):
        found = known(producer, after(answer))
        assert found.turns == 3
    assert producer.statistics()["sessions"] == 1


def test_an_answer_to_a_session_belongs_to_it() -> None:
    (a,) = pods("a")
    producer, _ = states()
    turn(producer, of("x"), a, id="resp_1")
    found = known(producer, after("resp_1"))
    assert found.turns == 1


def test_an_unknown_answer_begins_a_session() -> None:
    (a,) = pods("a")
    producer, _ = states()
    assert seen(producer, after("resp_0")) == SessionState()
    turn(producer, after("resp_0"), a, id="resp_1")
    found = known(producer, after("resp_1"))
    assert found.turns == 1


def test_an_unused_session_is_forgotten_one_in_flight_is_not() -> None:
    (a,) = pods("a")
    producer, clock = states(eviction_ttl_seconds=10)
    turn(producer, of("ended"), a)
    producer.on_picked(of("in flight"), a)
    clock.now = 10.0
    assert seen(producer, of("ended")) == SessionState()
    found = known(producer, of("in flight"))
    assert found.turns == 1
    turn(producer, of("ended"), a)
    assert producer.statistics() == {"sessions": 2, "turns": 1, "answers": 0}


def test_without_a_life_sessions_stay() -> None:
    (a,) = pods("a")
    producer, clock = states(eviction_ttl_seconds=0)
    turn(producer, of("x"), a)
    clock.now = 1e9
    found = known(producer, of("x"))
    assert found.turns == 1


def test_tables_are_bounded_and_what_is_unused_longest_goes_first() -> None:
    (a,) = pods("a")
    producer, _ = states(max_sessions=3)
    lost = of("0")
    producer.on_picked(lost, a)
    for n in range(1, 6):
        turn(producer, of(str(n)), a, id=f"resp_{n}")
    producer.on_finished(lost, a, Response(status=200))
    assert producer.statistics() == {"sessions": 3, "turns": 1, "answers": 3}
    assert [seen(producer, of(str(n))) == SessionState() for n in range(6)] == [True] * 3 + [False] * 3


def test_a_request_of_another_replica_is_a_turn() -> None:
    (a,) = pods("a")
    here, there = scheduler(producers=[states()[0]]), states()[0]
    other = scheduler(producers=[there])
    request = of("x")
    decision = here.choose(request, [a])
    adopted = other.adopt(ask(elsewhere=True), a, here.to_peers(decision.request, a))
    adopted.finished(Response(status=200, id="resp_1"))
    for next_one in (of("x"), after("resp_1")):
        found = known(there, next_one)
        assert found.turns == 1


def test_a_replica_that_joins_takes_over_sessions_and_answers() -> None:
    (a,) = pods("a")
    producer, clock = states()
    for n in range(600):
        turn(producer, of(str(n)), a, id=f"resp_{n}", usage=Usage(7, 3))
    clock.now = 4.0
    turn(producer, of("0"), a)
    joined, later = states()
    later.now = 100.0
    pieces = list(producer.snapshot())
    assert len(pieces) == 2
    for piece in pieces:
        joined.restore(piece, {})
        joined.restore(piece, {})
    assert seen(joined, of("0")) == SessionState(2, 4.0, 0.0, 0, 7, 3, 4.0)
    assert seen(joined, after("resp_599")) == SessionState(1, 4.0, 4.0, 0, 7, 3)
    assert joined.statistics()["sessions"] == 600


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"sources": []}, "sources: expected at least one"),
        ({"eviction_ttl_seconds": -1}, "evictionTtlSeconds: -1, expected 0 or more"),
        ({"max_sessions": 0}, "maxSessions: expected 1 or more, got 0"),
    ],
)
def test_settings_that_cannot_be_are_refused(settings: Mapping[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        SessionStates(**settings)


def test_a_session_is_known_by_its_cookie_or_by_what_openais_clients_say() -> None:
    (a,) = pods("a")
    producer, _ = states()
    cookies = SessionIdProducer(cookie_name="sid")
    cookies.name = "session-id-producer"
    first = cookies.check(ask(headers={"cookie": "theme=dark; sid=x"}))
    assert first is not None
    turn(producer, first, a)
    assert known(producer, of("x")).turns == 1, "the cookie's value is the session"
    turn(producer, ask(cache_key="k"), a)
    assert known(producer, ask(cache_key="k")).turns == 1
    assert seen(producer, ask()) is None


def test_without_the_source_answers_are_no_sessions() -> None:
    (a,) = pods("a")
    producer, _ = states(sources=[SessionSource(SESSION_ID)])
    turn(producer, ask(api="responses"), a, id="resp_1")
    assert producer.statistics() == {"sessions": 0, "turns": 0, "answers": 0}
    assert seen(producer, after("resp_1")) is None


def test_the_decision_shows_it() -> None:
    (a,) = pods("a")
    producer, clock = states()
    s = scheduler(producers=[producer])
    s.finished(s.choose(of("x"), [a]), Response(status=200, usage=Usage(10, 2)))
    clock.now = 1.5
    shown = s.choose(of("x"), [a]).as_dict()["session"]
    assert shown == {"turn": 2, "in_flight": 0, "idle_ms": 1500.0, "input_tokens": 10, "output_tokens": 2}
    assert s.choose(of("x"), [a]).as_dict()["session"]["think_ms"] == 1500.0
    assert "session" not in s.choose(ask(), [a]).as_dict()
