"""`previous-response-filter`: who gave an answer of /v1/responses is asked to go on from it."""

from typing import Any

import pytest

from epp.configuration.loader import strategies, strategy_text
from epp.plugin import Endpoint, Request, Response
from epp.scheduling.bindings import PreviousResponseFilter
from tests.support.scheduling.pipelines import loaded
from tests.support.scheduling.schedulers import ask, fail, pods, scheduler


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def after(answer: str, **fields: Any) -> Request:
    return ask(api="responses", previous=answer, **fields)


def gave(follows: PreviousResponseFilter, answer: str, endpoint: Endpoint, **fields: Any) -> None:
    follows.on_finished(ask(api="responses", **fields), endpoint, Response(status=200, id=answer))


def test_a_request_goes_to_who_gave_the_answer_that_it_names() -> None:
    a, b = pods("ab")
    s = scheduler(filters=[PreviousResponseFilter()])
    given = []
    for n in range(4):
        decision = s.choose(ask(api="responses"), [a, b])
        given.append(decision.endpoint)
        s.finished(decision, Response(status=200, id=f"resp_{n}"))
    assert given == [a, b, a, b]
    for n in (3, 0, 0, 1, 2):
        decision = s.choose(after(f"resp_{n}"), [a, b])
        assert decision.endpoint is given[n]
        s.finished(decision, Response(status=200, id=f"resp_{n}_next"))
        assert s.choose(after(f"resp_{n}_next"), [a, b]).endpoint is given[n]


def test_an_answer_that_a_retry_moved_is_where_it_was_served() -> None:
    a, b = pods("ab")
    follows = PreviousResponseFilter()
    s = scheduler(filters=[follows])
    decision = s.choose(ask(api="responses"), [a, b])
    s.moved(decision, b, Response(served=b.address))
    s.finished(decision, Response(status=200, id="resp_1"))
    assert follows.filter(after("resp_1"), [a, b]) == [b]


def test_all_are_kept_where_it_is_not_known_who_gave_it_or_who_did_is_gone() -> None:
    a, b, c = pods("abc")
    follows = PreviousResponseFilter()
    assert follows.filter(after("resp_1"), [a, b]) == [a, b]
    gave(follows, "resp_1", c)
    assert follows.filter(after("resp_1"), [a, b]) == [a, b]
    assert follows.filter(after("resp_1"), [a, b, c]) == [c]


def test_other_requests_are_not_looked_at() -> None:
    follows = PreviousResponseFilter()
    assert not follows.applies(ask())
    assert follows.applies(after("resp_1"))


def test_an_answer_another_replica_saw_is_known_here() -> None:
    a, b = pods("ab")
    follows = PreviousResponseFilter()
    s = scheduler(filters=[follows])
    s.adopt(ask(api="responses", elsewhere=True), b, {}).finished(Response(status=200, id="resp_1"))
    assert follows.filter(after("resp_1"), [a, b]) == [b]


def test_who_joins_takes_over_what_is_known() -> None:
    a, b = pods("ab")
    clock = Clock()
    old, new = PreviousResponseFilter(ttl_seconds=10), PreviousResponseFilter(ttl_seconds=10)
    old.clock = new.clock = clock
    gave(old, "resp_1", b)
    clock.now = 4.0
    for piece in old.snapshot():
        new.restore(piece, {b.name: b})
    assert new.filter(after("resp_1"), [a, b]) == [b]
    clock.now = 10.0
    assert new.filter(after("resp_1"), [a, b]) == [a, b], "its time goes on"


def test_who_decodes_has_the_answer() -> None:
    a, b = pods("ab")
    follows = PreviousResponseFilter()
    gave(follows, "resp_1", a, stage="prefill")
    assert follows.filter(after("resp_1"), [a, b]) == [a, b]
    gave(follows, "resp_1", b, stage="decode")
    assert follows.filter(after("resp_1"), [a, b]) == [b]


def test_so_many_answers_are_known_and_no_more() -> None:
    [a] = pods("a")
    follows = PreviousResponseFilter(max_responses=3)
    for n in range(5):
        gave(follows, f"resp_{n}", a)
    assert follows.statistics() == {"responses": 3}


@pytest.mark.parametrize(
    ("wrong", "said"),
    [({"ttl_seconds": 0}, "ttlSeconds: expected more"), ({"max_responses": 0}, "maxResponses: expected 1 or more")],
)
def test_bounds_are_positive(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        PreviousResponseFilter(**wrong)


@pytest.mark.parametrize("strategy", strategies())
def test_every_strategy_goes_on_from_an_answer_where_it_was_given(strategy: str) -> None:
    endpoints = pods("abc")
    s = loaded(strategy_text(strategy)).scheduler(wall_clock=lambda: 0.0, on_error=fail)
    for n, endpoint in enumerate(endpoints):
        s.adopt(ask(api="responses", elsewhere=True), endpoint, {}).finished(Response(status=200, id=f"resp_{n}"))
    for n, endpoint in enumerate(endpoints):
        assert s.choose(after(f"resp_{n}"), endpoints).endpoint is endpoint
