"""Endpoints that fail: what counts as failing, how it fades, trials, and picks by every built-in strategy."""

from collections import Counter
from collections.abc import Callable
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.configuration.loader import load_strategy
from epp.plugin import Endpoint, FailureShare, PrefixMatch, Request, Response
from epp.prefix.approximate import ApproximatePrefixCache
from epp.scheduling.cost import ExpectedTtft
from epp.scheduling.decision import Decision
from epp.scheduling.failures import FailingEndpointFilter, FailureShares
from epp.testing import services
from tests.support.scheduling.schedulers import ask, fail, pods
from tests.support.scheduling.signals import with_signal

OK, ERROR, GONE = Response(status=200), Response(status=500), Response()
STRATEGIES = ("prefix-aware", "session", "least-load", "round-robin")


class World:
    """Requests that are answered at once, by a scheduler of a built-in strategy or by a producer alone."""

    def __init__(self, names: str = "abc", strategy: str = "") -> None:
        self.now = 100.0
        self.endpoints = pods(names)
        self.shares = FailureShares()
        self.reported: list[str] = []
        self._count = 0
        if strategy:
            pipeline = load_strategy(strategy, clock=lambda: self.now, random=Random(1))
            self.scheduler = pipeline.scheduler(wall_clock=lambda: self.now, on_error=fail)
            self.shares = next(each for each in pipeline.producers if isinstance(each, FailureShares))
            self.plugins = pipeline.plugins
        self.shares.clock = lambda: self.now
        self.shares.start(services(degraded=self._degraded, recovered=self._recovered))

    def _degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        assert (reason, lasting) == ("endpoint-failing", True)
        self.reported.append(detail)

    def _recovered(self, reason: str) -> None:
        assert reason == "endpoint-failing"
        self.reported.append("recovered")

    def answer(self, endpoint: Endpoint, *responses: Response, waited: float = 0.0) -> None:
        """The endpoint is sent a request for each of these, and this comes of it."""
        for response in responses:
            request = ask(stream=True)
            self.shares.on_picked(request, endpoint)
            self.now += waited
            self.shares.on_finished(request, endpoint, response)

    def look(self, endpoint: Endpoint) -> FailureShare:
        return self.shares.produce(ask(), self.endpoints)[endpoint]

    def ask(self, prompt: bytes = b"", session: str = "") -> Decision:
        """A new request is given to somebody."""
        self._count += 1
        headers = {"x-session-id": session} if session else {}
        text = prompt or f"{self._count} is a prompt of its own ".encode() * 40
        request = ask(id=str(self._count), prompt=text, tokens=len(text) // 4, stream=True, headers=headers)
        preparing = self.scheduler.prepare(request)
        with pytest.raises(StopIteration):
            preparing.send(None)
        return self.scheduler.choose(request, self.endpoints)

    def serve(self, decision: Decision, response: Response) -> None:
        self.scheduler.answered(decision, response)
        self.scheduler.finished(decision, response)

    def run(
        self, seconds: float, rate: float, answers: Callable[[Endpoint], int], lasting: float = 1.0
    ) -> "Counter[str]":
        """Picks by endpoint. Errors come at once; other answers begin at once and take `lasting` seconds."""
        picks: Counter[str] = Counter()
        open_: list[tuple[float, Decision]] = []
        end = self.now + seconds
        while self.now < end:
            while open_ and open_[0][0] <= self.now:
                self.scheduler.finished(open_.pop(0)[1], OK)
            decision = self.ask()
            picks[decision.endpoint.name] += 1
            status = answers(decision.endpoint)
            self.scheduler.answered(decision, Response(status=status))
            if status < 400:
                open_.append((self.now + lasting, decision))
            else:
                self.scheduler.finished(decision, Response(status=status))
            self.now += 1 / rate
        for _, decision in open_:
            self.scheduler.finished(decision, OK)
        return picks


@pytest.mark.parametrize(
    ("response", "failed"),
    [
        (Response(status=500), True),
        (Response(status=502), True),
        (Response(status=503), True),
        (Response(status=504), True),
        (Response(served="10.9.9.9:80"), True),
        (Response(status=501), False),
        (Response(status=400), False),
        (Response(status=404), False),
        (Response(status=413), False),
        (Response(status=422), False),
        (Response(status=429), False),
        (Response(status=200), False),
        (Response(), False),
    ],
)
def test_what_is_the_endpoints_own_fault(response: Response, failed: bool) -> None:
    world = World()
    a = world.endpoints[0]
    world.answer(a, OK, *[response] * 30)
    assert response.failed is failed
    assert world.look(a).suspended is failed
    assert world.reported == (["a"] if failed else [])


def test_a_single_failure_costs_nothing_and_several_do() -> None:
    world = World()
    a, b, _ = world.endpoints
    cost = ExpectedTtft()
    world.answer(a, *[OK] * 5, ERROR)
    world.answer(b, ERROR)
    costs = []
    for _ in range(3):
        costs.append([cost._failing(world.look(e), 0.05) for e in (a, b)])
        world.answer(a, ERROR)
    assert costs[0] == [0, 0]
    assert 0.01 < costs[1][0] < costs[2][0] < 1, "and more with each"


def test_a_full_endpoint_costs_more_but_is_not_suspended() -> None:
    world = World()
    a = world.endpoints[0]
    world.answer(a, *[Response(status=429)] * 50)
    assert not world.look(a).suspended
    assert 0.05 < ExpectedTtft()._failing(world.look(a), 0.05) < 1


def test_one_whom_the_gateway_does_not_know_yet_costs_more_and_is_suspended_when_that_lasts() -> None:
    """A new endpoint may be ready before the gateway's DNS has it: others serve what it was sent."""
    world = World()
    a, elsewhere = world.endpoints[0], Response(served="10.9.9.9:80")
    world.answer(a, *[elsewhere] * 20)
    assert not world.look(a).suspended
    assert 0.05 < ExpectedTtft()._failing(world.look(a), 0.05) < 1
    world.now += 30
    world.answer(a, *[elsewhere] * 4)
    assert world.look(a).suspended
    b = world.endpoints[1]
    world.answer(b, OK, *[elsewhere] * 4)
    assert world.look(b).suspended, "one that has answered is known"


def test_failures_fade() -> None:
    world = World()
    a = world.endpoints[0]
    world.answer(a, ERROR, ERROR)
    before = world.look(a).share
    world.now += 5
    assert world.look(a).share == pytest.approx(before / 2)
    assert world.shares.endpoint_statistics()[a] == {"failure_share": pytest.approx(before / 2), "suspended": 0}
    world.now += 60
    assert world.look(a) == FailureShare()
    assert not world.shares.endpoint_statistics()


def test_one_who_never_answers_those_who_give_up_fails() -> None:
    world = World()
    a, b, _ = world.endpoints
    world.answer(b, OK)
    world.answer(a, *[GONE] * 9, waited=1)
    assert world.look(a) == FailureShare(), "clients go away"
    world.answer(a, *[GONE] * 9, waited=6)
    assert world.look(a).suspended
    assert not world.look(b).suspended


def test_clients_who_leave_one_that_answers_others_tell_nothing() -> None:
    world = World()
    a = world.endpoints[0]
    for _ in range(9):
        leaving = ask(stream=True)
        world.shares.on_picked(leaving, a)
        world.now += 6
        world.answer(a, OK)
        world.shares.on_finished(leaving, a, GONE)
    assert world.look(a) == FailureShare()


def test_a_gateway_that_shows_no_status_suspends_nobody() -> None:
    world = World()
    world.answer(world.endpoints[0], *[GONE] * 9, waited=60)
    assert world.look(world.endpoints[0]) == FailureShare()


def test_trials_come_one_at_a_time_and_three_good_ones_end_it() -> None:
    world = World()
    a, b, _ = world.endpoints
    world.answer(a, *[ERROR] * 6)
    assert world.look(a).suspended
    world.now += 5
    assert world.look(a).suspended, "nobody else was asked meanwhile, so a trial would be much of the traffic"
    world.answer(b, *[OK] * 25)
    assert world.look(a).trial
    trial = ask()
    world.shares.on_picked(trial, a)
    assert world.look(a).suspended, "one is on its way"
    world.shares.on_answered(trial, a, OK)
    for _ in range(2):
        assert world.look(a).trial, "the next comes at once"
        world.answer(a, OK)
    assert world.look(a) == FailureShare()
    assert world.reported == ["a", "recovered"]


def test_a_trial_that_fails_is_followed_by_a_pause_and_a_bad_request_is_none() -> None:
    world = World()
    a, b, _ = world.endpoints
    world.answer(a, *[ERROR] * 6)
    world.answer(b, *[OK] * 25)
    world.now += 5
    world.answer(a, Response(status=400))
    assert world.look(a).trial
    world.answer(a, OK, ERROR)
    assert world.look(a).suspended


def test_where_few_requests_come_a_trial_comes_after_a_minute() -> None:
    world = World()
    a = world.endpoints[0]
    world.answer(a, *[ERROR] * 6)
    world.now += 61
    assert world.look(a).trial


def test_what_was_sent_before_tells_of_another_time() -> None:
    world = World()
    a = world.endpoints[0]
    early = [ask() for _ in range(9)]
    for request in early:
        world.shares.on_picked(request, a)
    world.now += 1
    world.answer(a, *[ERROR] * 6)
    for request in early:
        world.shares.on_finished(request, a, OK)
    assert world.look(a).suspended, "they were sent when it was well"
    hanging = [ask() for _ in range(9)]
    for request in hanging:
        world.shares.on_picked(request, a)
    world.now += 61
    world.answer(a, OK, OK, OK)
    for request in hanging:
        world.shares.on_finished(request, a, Response(status=504))
    assert world.look(a) == FailureShare(), "they were sent when it was not"


def test_an_endpoint_that_left_is_forgotten_with_its_requests() -> None:
    world = World()
    a = world.endpoints[0]
    open_ = [ask() for _ in range(9)]
    for request in open_:
        world.shares.on_picked(request, a)
    world.answer(a, *[ERROR] * 6)
    world.shares.on_removed(a)
    for request in open_:
        world.shares.on_finished(request, a, ERROR)
    assert world.reported == ["a", "recovered"]
    assert not world.shares._records
    assert not world.shares._failing


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from((200, 500, 429, 400, 0)), st.floats(0, 30)), max_size=80))
def test_somebody_is_always_left(events: list[tuple[int, int, float]]) -> None:
    world = World()
    kept = FailingEndpointFilter()
    for place, status, seconds in events:
        world.answer(world.endpoints[place], Response(status=status))
        world.now += seconds
        made = ask()
        found = world.shares.produce(made, world.endpoints)
        made = with_signal(made, FailureShare, found)
        assert kept.filter(made, world.endpoints)
        assert not all(found[endpoint].suspended for endpoint in world.endpoints)
        assert all(0 <= found[endpoint].share <= 1 for endpoint in world.endpoints)
        for endpoint in world.endpoints:
            assert kept.filter(made, [endpoint]) == [endpoint] or tuple(kept.filter(made, [endpoint])) == (endpoint,)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_of_three_that_answers_errors_at_once_gets_little_and_its_share_when_it_is_well(strategy: str) -> None:
    world = World(strategy=strategy)
    world.run(5, 30, lambda endpoint: 200)
    errs = lambda endpoint: 500 if endpoint.name == "a" else 200  # noqa: E731
    first = world.run(1, 30, errs)
    assert first["a"] <= 10
    after = world.run(20, 30, errs)
    assert after["a"] / after.total() < 0.02
    world.run(10, 30, lambda endpoint: 200)
    well = world.run(10, 30, lambda endpoint: 200)
    assert well["a"] / well.total() > 0.25
    assert world.reported == ["a", "recovered"]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("lasting", [0.05, 3.0])
def test_where_all_fail_requests_are_spread_evenly_and_it_ends_when_they_are_well(
    strategy: str, lasting: float
) -> None:
    world = World(strategy=strategy)
    world.run(5, 30, lambda endpoint: 200, lasting)
    world.run(5, 30, lambda endpoint: 503, lasting)
    picks = world.run(20, 30, lambda endpoint: 503, lasting)
    assert min(picks.values()) > 0.25 * picks.total()
    world.run(2, 30, lambda endpoint: 200, lasting)
    picks = world.run(20, 30, lambda endpoint: 200, lasting)
    assert min(picks.values()) > 0.25 * picks.total()


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("percent", "least", "most"), [(1, 0.25, 0.4), (50, 0.0, 0.12)])
def test_few_failures_cost_little_and_many_much(strategy: str, percent: int, least: float, most: float) -> None:
    world, chance = World(strategy=strategy), Random(7)
    answers = lambda e: 500 if e.name == "a" and chance.random() < percent / 100 else 200  # noqa: E731
    world.run(5, 30, answers)
    picks = world.run(120, 30, answers)
    assert least <= picks["a"] / picks.total() <= most


def test_a_failed_prompt_is_held_by_nobody_and_teaches_no_speed() -> None:
    world = World("ab", "prefix-aware")
    prompt = b"a prompt that is long enough to be held in blocks " * 100
    first = world.ask(prompt)
    failing = first.endpoint
    world.now += 0.001
    world.serve(first, ERROR)
    again = world.ask(prompt)
    assert all(match.tokens == 0 for match in again.request.signal(PrefixMatch).values())
    world.serve(again, OK)
    cache = next(each for each in world.plugins if isinstance(each, ApproximatePrefixCache))
    assert cache.shadow(failing).pinned == 0
    cost = next(each for each in world.plugins if isinstance(each, ExpectedTtft))
    for _ in range(50):
        decision = world.ask()
        world.now += 0.001
        world.serve(decision, ERROR)
    assert cost.statistics()["speed_observations"] == 0


def test_the_bill_says_why() -> None:
    world = World("ab", "prefix-aware")
    world.run(60, 30, lambda endpoint: 500 if endpoint.name == "a" else 200)
    (run,) = world.ask().as_dict()["profiles"]
    bills = {row["endpoint"]: row["bill_ms"] for row in run["endpoints"]}
    assert bills["a"]["failing"] > 60_000
    assert bills["b"]["failing"] == 0


def test_a_session_moves_on_and_stays_there() -> None:
    world = World("abc", "session")
    home = world.ask(session="s")
    failing = home.endpoint
    world.serve(home, ERROR)
    for _ in range(40):
        decision = world.ask(session="s")
        world.serve(decision, ERROR if decision.endpoint is failing else OK)
    late = [world.ask(session="s").endpoint for _ in range(5)]
    assert failing not in late
    assert len(set(late)) == 1


def test_the_filter_lets_a_request_pass_where_nobody_fails() -> None:
    endpoints = pods("ab")
    request: Request = ask()
    assert FailingEndpointFilter().filter(request, endpoints) is endpoints


def test_what_a_peer_knows_of_failures_is_taken_over() -> None:
    old, new = World(), World()
    a, b, c = old.endpoints
    old.answer(a, *[ERROR] * 4)
    old.answer(b, ERROR, ERROR)
    old.answer(c, OK)
    [piece] = old.shares.snapshot()
    new.shares.restore(piece, {endpoint.name: endpoint for endpoint in new.endpoints})
    for before, after in zip(old.endpoints, new.endpoints, strict=True):
        assert old.look(before) == new.look(after)
    assert new.look(new.endpoints[0]).suspended
    assert new.reported == ["a"]


def test_a_request_of_a_replica_that_fell_silent_is_no_failure() -> None:
    world = World()
    a, *_ = world.endpoints
    world.answer(a, OK)
    world.answer(a, *[Response(lost=True)] * 6, waited=6.0)
    assert world.look(a) == FailureShare()
    world.answer(a, *[GONE] * 6, waited=6.0)
    assert world.look(a).suspended
