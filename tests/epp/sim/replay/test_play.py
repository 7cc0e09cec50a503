"""Laws of a replay: nothing is lost, nothing is left, equal arguments give equal results."""

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.scheduling.cost import ExpectedTtft
from epp.sim.presets import pods
from epp.sim.replay.generators import WORKLOADS
from epp.sim.replay.play import ATTEMPTS, Conditions, Failure, Play
from epp.sim.replay.policies import policy
from epp.sim.replay.trace import Ask, Piece, Trace
from tests.support.replaying import asks, play, steady, waits

CALM = Conditions()


def books_are_closed(made: Play) -> None:
    """Every account of every replica is closed, and the pods are empty."""
    for replica in made.replicas:
        assert replica.scheduler._open == {}
        for plugin in replica.scheduler.plugins:
            figures = plugin.statistics()
            for name in ("pending_seconds", "decodes", "requests", "uncached_tokens", "pinned_tokens"):
                assert figures.get(name, 0) == 0, f"{plugin.name} still counts {name}"
    for pod in made.pods:
        pod.engine.check()
        assert pod.engine.free_blocks == pod.kind.parameters.blocks


FAILURES = st.lists(
    st.builds(Failure, st.integers(0, 2), st.floats(0, 8), st.floats(0.1, 6)),
    max_size=4,
    unique_by=lambda failure: failure.pod,
)


@settings(max_examples=40, deadline=None)
@given(
    failures=FAILURES,
    name=st.sampled_from(["prefix-aware", "kv-aware", "least-load", "round-robin", "oracle"]),
    sees_answer=st.booleans(),
    foreign=st.sampled_from([0.0, 0.3, 1.0]),
    replicas=st.sampled_from([1, 3]),
    exchange=st.sampled_from([None, 0.0, 0.01]),
    gap=st.sampled_from([0.02, 0.2]),
)
def test_every_request_ends_once_and_no_account_stays_open(
    failures: list[Failure],
    name: str,
    sees_answer: bool,
    foreign: float,
    replicas: int,
    exchange: float | None,
    gap: float,
) -> None:
    conditions = Conditions(
        failures=tuple(failures), sees_answer=sees_answer, foreign=foreign, replicas=replicas, exchange=exchange
    )
    trace = steady(50, gap)
    made = play(trace, name=name, conditions=conditions)
    again = play(trace, name=name, conditions=conditions)
    assert made.served == again.served, "equal arguments, equal results"
    books_are_closed(made)
    for ask, served in zip(trace.asks, made.served, strict=True):
        assert served.sent == ask.at
        assert 1 <= served.attempts <= ATTEMPTS
        if served.failed:
            assert failures
        else:
            assert served.sent < served.first <= served.ended
            assert 0 <= served.cached < ask.tokens
    if not failures:
        assert sum(pod.engine.totals.generation_tokens for pod in made.pods) == sum(ask.output for ask in trace.asks)


def test_progress_counts_each_request_once() -> None:
    seen: list[int] = []
    trace = steady(20)
    Play(trace, pods("2*laptop"), policy("round-robin").build, CALM, 0, seen.append).run()
    assert seen == list(range(1, 21))


def test_seeds_decide_what_is_left_to_chance() -> None:
    trace, mixed = steady(40), Conditions(foreign=0.5)
    places = [[served.pod for served in play(trace, seed=seed, conditions=mixed).served] for seed in (1, 1, 2)]
    assert places[0] == places[1]
    assert places[0] != places[2]


def test_a_turn_comes_its_pause_after_the_last_of_those_before_it() -> None:
    trace = Trace(
        "turns",
        [
            Ask(0.0, (Piece(1, 100),), 30, answer=2),
            Ask(0.0, (Piece(3, 100),), 5),
            Ask(0.0, (Piece(1, 100), Piece(2, 30), Piece(4, 20)), 5, after=(0, 1), pause=2.5),
        ],
    )
    first, second, third = play(trace).served
    assert third.sent == max(first.ended, second.ended) + 2.5
    assert third.pod == first.pod
    assert third.cached == 128, "the answer was cached too; 150 tokens are eight full blocks and a rest"


def test_a_dead_pod_gets_nothing_once_it_is_noticed_and_clients_try_again() -> None:
    trace = asks(*[0.1 * n for n in range(100)], output=30)
    made = play(trace, name="round-robin", conditions=Conditions(failures=(Failure(0, 3.0, 4.0),), notice=0.5))
    broken = [n for n, served in enumerate(made.served) if served.failed]
    assert all(made.served[n].first >= 0 for n in broken), "only answers that had begun are lost"
    assert 0 < len(broken) < 5
    places = Counter(served.pod for served in made.served if 3.5 < served.sent < 7.0 and not served.failed)
    assert places[0] == 0
    assert any(served.pod == 0 for served in made.served if served.sent > 7.5), "it is back"
    books_are_closed(made)


def test_a_pool_without_pods_fails_requests_in_the_end() -> None:
    conditions = Conditions(failures=(Failure(0, 0.0, 500.0),), notice=0.1)
    made = play(asks(1.0, 2.0), pods="laptop", conditions=conditions)
    assert [(served.failed, served.attempts) for served in made.served] == [(True, ATTEMPTS)] * 2
    books_are_closed(made)


def test_foreign_traffic_takes_room_and_is_none_of_ours() -> None:
    trace = steady(120, 0.1)
    made = play(trace, conditions=Conditions(foreign=0.4))
    foreign = [n for n, served in enumerate(made.served) if served.foreign]
    assert 25 < len(foreign) < 75
    decided = [plugin for plugin in made.replicas[0].scheduler.plugins if isinstance(plugin, ExpectedTtft)]
    assert len(decided) == 1
    alone = play(Trace("ours", [ask for n, ask in enumerate(trace.asks) if n not in foreign]))
    ours = [wait for n, wait in enumerate(waits(made)) if n not in foreign]
    assert fmean(ours) > fmean(waits(alone))


def test_old_metrics_make_those_who_live_on_them_worse() -> None:
    trace = WORKLOADS["independent"](1, 400, "poisson").scaled(4.0)
    fresh = play(trace, name="least-load", pods="4*laptop", conditions=Conditions(scrape=0.1))
    again = play(trace, name="least-load", pods="4*laptop", conditions=Conditions(scrape=0.1))
    assert fresh.served == again.served
    assert fresh.replicas[0].endpoints[0].load.at != play(trace, name="least-load").replicas[0].endpoints[0].load.at


def test_four_replicas_that_speak_are_as_good_as_one() -> None:
    trace = WORKLOADS["documents-8k"](1, 300, "poisson").scaled(6.0)
    one = play(trace, pods="4*h100-8b")
    spoken = play(trace, pods="4*h100-8b", conditions=Conditions(replicas=4))
    silent = play(trace, pods="4*h100-8b", conditions=Conditions(replicas=4, exchange=None))
    assert fmean(waits(spoken)) == pytest.approx(fmean(waits(one)), rel=0.03)
    assert fmean(waits(silent)) > 1.5 * fmean(waits(one))


def test_saturating_keeps_pods_busy_and_stops_when_it_has_seen_enough() -> None:
    trace = WORKLOADS["independent"](1, 6000, "poisson")
    made = Play(trace, pods("2*laptop"), policy("round-robin").build, replace(CALM, saturate=True), 0)
    served = made.run()
    ended = [one for one in served if one.ended >= 0]
    assert 2000 <= len(ended) < len(trace.asks)
    for pod in made.pods:
        assert pod.busy > 0.95 * made.now
