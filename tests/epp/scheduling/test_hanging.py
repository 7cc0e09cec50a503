"""Endpoints that owe answers: which of them hang, by their metrics or for want of them, and which only take long."""

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from epp.plugin import Endpoint, FailureShare, Request, Response
from epp.scheduling.failures import FailingEndpointFilter, FailureShares
from epp.testing import services
from tests.support.scheduling.schedulers import ask, pods
from tests.support.scheduling.signals import with_signal

OK, GONE = Response(status=200), Response()


class World:
    """Endpoints that are scraped once a second (`every`), each with a page that moves as long as it works."""

    def __init__(self, names: str = "abc", sees_status: bool = True, every: float = 1.0) -> None:
        self.now = 100.0
        self.every = every
        self.endpoints = pods(names)
        self.shares = FailureShares()
        self.shares.clock = lambda: self.now
        self.reported: list[str] = []
        self.shares.start(services(degraded=self._degraded, recovered=self._recovered))
        self.unread: set[Endpoint] = set()
        """Those whose metrics cannot be read."""
        self.still: set[Endpoint] = set()
        """Those in whose metrics nothing moves."""
        self.pass_(3)
        if sees_status:
            for endpoint in self.endpoints:
                self.end(self.send(endpoint), endpoint, OK)

    def _degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        assert lasting
        self.reported.append(f"{reason}: {detail}")

    def _recovered(self, reason: str) -> None:
        self.reported.append(f"{reason} is over")

    def load(self, endpoint: Endpoint, **figures: int) -> None:
        endpoint.load = replace(endpoint.load, **figures)

    def pass_(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += self.every
            for endpoint in self.endpoints:
                if endpoint in self.unread:
                    continue
                if endpoint not in self.still:
                    self.load(endpoint, steps=endpoint.load.steps + 1)
                self.shares.on_scraped(endpoint)

    def send(self, endpoint: Endpoint, **fields: Any) -> Request:
        request = ask(stream=True, **fields)
        self.shares.on_picked(request, endpoint)
        return request

    def end(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self.shares.on_finished(request, endpoint, response)

    def suspended(self, endpoints: Sequence[Endpoint] = ()) -> set[str]:
        found = self.shares.produce(ask(), endpoints or self.endpoints)
        return {endpoint.name for endpoint in endpoints or self.endpoints if found[endpoint].suspended}


def test_one_whose_metrics_and_answers_do_not_come_is_suspended_until_its_metrics_do() -> None:
    world = World()
    a, *_ = world.endpoints
    world.unread = {a}
    for _ in range(3):
        world.send(a)
    world.pass_(5)
    assert world.suspended() == set()
    world.pass_(2)
    assert world.suspended() == {"a"}
    assert world.reported == ["endpoint-hanging: a: no answer to 3 requests for 6 s, and its metrics cannot be read"]
    assert world.shares.statistics() == {"suspended": 1, "hanging": 1}
    world.unread = set()
    world.pass_(1)
    assert world.suspended() == set()
    assert world.reported[1:] == ["endpoint-hanging is over"]
    assert world.shares.produce(ask(), world.endpoints)[a] == FailureShare()


@pytest.mark.parametrize("sees_status", [True, False])
def test_an_answer_to_what_was_sent_before_ends_it_where_its_status_is_seen(sees_status: bool) -> None:
    world = World(sees_status=sees_status)
    a, *_ = world.endpoints
    request = world.send(a)
    world.unread = {a}
    world.pass_(7)
    assert world.suspended() == {"a"}
    world.end(request, a, OK if sees_status else GONE)
    assert world.suspended() == (set() if sees_status else {"a"})


def test_one_that_answers_while_its_metrics_cannot_be_read_is_well() -> None:
    """As where a network policy keeps the picker from them."""
    world = World()
    a, *_ = world.endpoints
    world.unread = {a}
    for _ in range(10):
        request = world.send(a)
        world.pass_(2)
        world.end(request, a, OK)
    world.send(a)
    world.pass_(60)
    assert world.suspended() == set()


def test_metrics_of_all_that_cannot_be_read_suspend_nobody_then_or_when_they_come_back() -> None:
    world = World()
    for endpoint in world.endpoints:
        world.send(endpoint)
    world.unread = set(world.endpoints)
    world.pass_(60)
    assert world.suspended() == set()
    world.unread = set(world.endpoints[1:])
    world.pass_(4)
    assert world.suspended() == set(), "they come back one after the other"
    world.pass_(3)
    assert world.suspended() == {"b", "c"}


def test_what_a_picker_that_stood_still_did_not_see_is_nobody_s_silence() -> None:
    world = World()
    a, b, _ = world.endpoints
    world.send(a)
    world.now += 30
    world.shares.on_scraped(b)
    world.now += 0.5
    world.shares.on_scraped(b)
    assert world.suspended() == set()


def test_rare_scrapes_are_not_late() -> None:
    world = World(every=50.0)
    a, *_ = world.endpoints
    world.send(a)
    world.unread = {a}
    world.pass_(2)
    assert world.suspended() == set()
    world.pass_(2)
    assert world.suspended() == {"a"}


def test_one_that_was_never_scraped_is_not_known_by_its_metrics() -> None:
    world = World()
    a, *_ = world.endpoints
    world.shares.on_removed(a)
    world.unread = {a}
    world.send(a)
    world.pass_(60)
    assert world.suspended() == set()


def test_where_all_hang_all_are_asked() -> None:
    world = World("ab")
    a, b = world.endpoints
    for endpoint in (a, b):
        world.send(endpoint)
    world.still = {a, b}
    world.pass_(25)
    made = ask()
    found = world.shares.produce(made, world.endpoints)
    assert world.shares.statistics()["hanging"] == 2
    assert not any(share.suspended for share in found.values())
    made = with_signal(made, FailureShare, found)
    assert FailingEndpointFilter().filter(made, world.endpoints) == world.endpoints
    assert FailingEndpointFilter().filter(made, [a]) == [a]


def test_an_engine_that_knows_of_no_request_although_some_are_there_hangs_until_something_moves() -> None:
    world = World()
    a, *_ = world.endpoints
    world.still = {a}
    world.send(a, tokens=10)
    world.pass_(10)
    assert world.suspended() == set()
    world.pass_(5)
    assert world.suspended() == {"a"}
    assert "no answer to 1 requests for" in world.reported[0]
    assert "nothing moves in its metrics" in world.reported[0]
    world.still = set()
    world.pass_(1)
    assert world.suspended() == set()


def test_an_engine_that_runs_requests_and_makes_no_step_hangs_after_half_a_minute() -> None:
    world = World()
    a, *_ = world.endpoints
    world.load(a, running=3)
    world.pass_(1)
    world.still = {a}
    world.send(a, tokens=10)
    world.pass_(30)
    assert world.suspended() == set()
    world.pass_(5)
    assert world.suspended() == {"a"}


def test_an_engine_that_counts_neither_steps_nor_tokens_may_run_long() -> None:
    world = World()
    a, *_ = world.endpoints
    world.still = {a}
    world.load(a, running=3, steps=0)
    world.send(a, tokens=10)
    world.pass_(600)
    assert world.suspended() == set()


@pytest.mark.parametrize("running", [0, 1])
def test_a_long_prompt_on_a_slow_pod_may_take_minutes(running: int) -> None:
    """300 tokens a second, and a page on which nothing moves before the one long step is made."""
    world = World()
    a, *_ = world.endpoints
    for _ in range(100):
        world.load(a, running=1, computed_tokens=a.load.computed_tokens + 300)
        request = world.send(a, tokens=300)
        world.pass_(1)
        world.end(request, a, OK)
    world.load(a, running=running)
    world.pass_(1)
    world.still = {a}
    world.send(a, tokens=128_000)
    world.pass_(128_000 // 300)
    assert world.suspended() == set()


def test_many_prompts_on_a_fast_pod_are_no_long_step() -> None:
    world = World()
    a, *_ = world.endpoints
    for _ in range(60):
        world.load(a, running=1, computed_tokens=a.load.computed_tokens + 20_000)
        world.pass_(1)
    world.still = {a}
    for _ in range(200):
        world.send(a, tokens=1000)
    world.pass_(40)
    assert world.suspended() == {"a"}


def test_one_that_decodes_may_wait_for_who_prefills() -> None:
    world = World()
    a, *_ = world.endpoints
    world.still = {a}
    world.send(a, tokens=10, stage="decode")
    world.pass_(600)
    assert world.suspended() == set()


def test_one_that_works_for_others_is_alive() -> None:
    world = World()
    a, *_ = world.endpoints
    world.send(a)
    world.pass_(600)
    assert world.suspended() == set()


def test_one_that_hangs_costs_few_trials() -> None:
    world = World()
    a, b, _ = world.endpoints
    world.still = {a}
    world.send(a, tokens=10)
    world.pass_(15)

    def is_tried() -> bool:
        for _ in range(25):
            world.end(world.send(b), b, OK)
        return world.shares.produce(ask(), world.endpoints)[a].trial

    world.pass_(5)
    assert is_tried()
    trial = world.send(a, tokens=10)
    world.pass_(20)
    assert not is_tried(), "one is there"
    world.end(trial, a, GONE)
    assert is_tried()
    world.end(world.send(a), a, GONE)
    assert not is_tried(), "one that left at once tells nothing, and the next may leave too"
    world.pass_(5)
    assert is_tried()


def test_one_whose_metrics_cannot_be_read_is_tried_once_a_minute() -> None:
    world = World()
    a, b, _ = world.endpoints
    world.unread = {a}
    world.send(a)
    world.pass_(10)
    for _ in range(50):
        world.end(world.send(b), b, OK)
        world.pass_(1)
        assert world.suspended() == {"a"}
    world.pass_(10)
    assert world.shares.produce(ask(), world.endpoints)[a].trial


def test_requests_of_other_replicas_are_theirs_to_watch() -> None:
    world = World()
    a, *_ = world.endpoints
    world.still = {a}
    world.send(a, elsewhere=True)
    world.pass_(60)
    assert world.suspended() == set()


def test_one_that_left_is_forgotten_and_a_joining_replica_sees_for_itself() -> None:
    world = World()
    a, *_ = world.endpoints
    world.unread = {a}
    request = world.send(a)
    world.pass_(10)
    [piece] = world.shares.snapshot()
    assert piece == [("a", 0.0, False)]
    world.endpoints.remove(a)
    world.shares.on_removed(a)
    world.end(request, a, GONE)
    assert world.reported[1:] == ["endpoint-hanging is over"]
    assert not world.shares._failing
    assert a not in world.shares._contacts


def test_one_that_fails_and_one_that_hangs_are_told_apart() -> None:
    world = World()
    a, b, _ = world.endpoints
    for _ in range(4):
        world.end(world.send(b), b, Response(status=500))
    world.unread = {a}
    world.send(a)
    world.pass_(10)
    assert world.suspended() == {"a", "b"}
    world.unread = set()
    world.pass_(1)
    assert [each.partition(": a: ")[0] for each in world.reported] == [
        "endpoint-failing: b",
        "endpoint-hanging",
        "endpoint-hanging is over",
    ]
    assert world.suspended() == {"b"}


@pytest.mark.parametrize(
    ("unread", "waited", "suspended"),
    [(2, 0.01, True), (2, 1.5, False), (1, 0.01, False), (0, 0.01, False)],
    ids=["refused", "given up", "not yet overdue", "read"],
)
def test_who_ends_requests_at_once_without_a_word_while_nobody_reads_it_is_gone(
    unread: int, waited: float, suspended: bool
) -> None:
    """agentgateway does not show the picker its 503 for a connection that was refused."""
    world = World()
    a, b, _ = world.endpoints
    world.unread |= {a} if unread else set()
    world.now += 0.5
    world.end(world.send(a), a, OK)
    world.now -= 0.5
    world.pass_(max(1, unread))
    for _ in range(4):
        request = world.send(a)
        world.now += waited
        world.end(request, a, GONE)
        world.end(world.send(b), b, OK)
    assert world.suspended() == ({"a"} if suspended else set())
    if suspended:
        assert world.reported == ["endpoint-failing: a"]
        world.now += 60
        for _ in range(3):
            assert world.shares.produce(ask(), world.endpoints)[a].trial
            world.end(world.send(a), a, OK)
        assert world.suspended() == set()


def test_who_answers_while_nobody_reads_its_metrics_is_not_gone() -> None:
    world = World()
    a = world.endpoints[0]
    world.unread.add(a)
    world.pass_(2)
    for _ in range(9):
        world.end(world.send(a), a, GONE)
        world.end(world.send(a), a, OK)
        world.now += 0.1
    assert world.suspended() == set()


def test_where_no_statuses_are_shown_nobody_is_gone() -> None:
    world = World(sees_status=False)
    a = world.endpoints[0]
    world.unread.add(a)
    world.pass_(2)
    for _ in range(9):
        world.end(world.send(a), a, GONE)
    assert world.suspended() == set()
