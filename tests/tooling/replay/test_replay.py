"""Laws of a replay: nothing is lost, nothing is left, equal arguments give equal results."""

from collections import Counter
from dataclasses import replace
from statistics import fmean

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from epp.scheduling.cost import ExpectedTtft
from tests.support.scheduling.replaying import asks, play, steady, waits
from tooling.replay.generators import WORKLOADS
from tooling.replay.policies import policy
from tooling.replay.replay import ATTEMPTS, Conditions, Failure, Replay
from tooling.replay.trace import Piece, Trace, TraceRequest
from tooling.simulator.engine import Engine, Transfer
from tooling.simulator.presets import pods
from tooling.simulator.tiers import TierParameters

CALM = Conditions()


def books_are_closed(made: Replay) -> None:
    """Every account of every replica is closed, and the pods are empty."""
    for replica in made.replicas:
        assert replica.scheduler._open == {}
        for plugin in replica.scheduler.plugins:
            figures = plugin.statistics()
            for name in ("pending_seconds", "decodes", "requests", "uncached_tokens", "pinned_tokens"):
                assert figures.get(name, 0) == 0, f"{plugin.name} still counts {name}"
    for pod in made.pods:
        pod.engine.check()
        assert pod.engine.free_blocks + pod.engine.kept_blocks == pod.kind.parameters.blocks


FAILURES = st.lists(
    st.builds(Failure, st.integers(0, 2), st.floats(0, 8), st.floats(0.1, 6), st.sampled_from([0.0, 0.0, 0.5, 1.0])),
    max_size=4,
    unique_by=lambda failure: failure.pod,
)


@settings(max_examples=40)
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


@settings(max_examples=30)
@example([Failure(0, 1.0, 2.0)], "both both both", "always-apart", False, 1, 0.02)
@given(
    failures=FAILURES,
    roles=st.sampled_from(["prefill decode decode", "prefill prefill decode", "both prefill decode", "both both both"]),
    name=st.sampled_from(["prefix-aware", "kv-aware", "always-apart", "never-apart", "least-load"]),
    sees_answer=st.booleans(),
    replicas=st.sampled_from([1, 3]),
    gap=st.sampled_from([0.02, 0.2]),
)
def test_where_prefill_is_apart_no_account_stays_open_either(
    failures: list[Failure], roles: str, name: str, sees_answer: bool, replicas: int, gap: float
) -> None:
    labels = tuple(roles.split())
    conditions = Conditions(
        failures=tuple(failures), sees_answer=sees_answer, replicas=replicas, roles=labels, strand=5.0
    )
    trace = steady(40, gap)
    made = play(trace, name=name, conditions=conditions)
    assert made.served == play(trace, name=name, conditions=conditions).served
    books_are_closed(made)
    for served in made.served:
        if not served.failed:
            assert labels[served.pod] != "prefill"
            assert served.prefill < 0 or labels[served.prefill] != "decode"
            assert served.prefill != served.pod
    if not failures:
        assert made.stranded == 0
        assert (sum(served.prefill >= 0 for served in made.served) == 40) is (name in ("always-apart", "least-load"))


def test_who_decodes_computes_nothing_that_came() -> None:
    roles = ("prefill", "decode")
    made = play(asks(0.0, tokens=4000), pods="2*laptop", name="always-apart", conditions=Conditions(roles=roles))
    prefill, decode = (pod.engine.totals for pod in made.pods)
    assert (prefill.computed_tokens, prefill.generation_tokens) == (4000, 1)
    assert (decode.computed_tokens, decode.generation_tokens) == (16, 20)
    (served,) = made.served
    assert (served.prefill, served.pod) == (0, 1)
    slower = Conditions(roles=roles, transfer=Transfer(0.01, 4000.0))
    (late,) = play(asks(0.0, tokens=4000), pods="2*laptop", name="always-apart", conditions=slower).served
    assert 0.9 < late.first - served.first < 1.0


def test_what_nobody_fetches_is_given_up() -> None:
    """Who decodes dies while the prompt is computed; the pod that computed it keeps it for a while."""
    conditions = Conditions(
        roles=("prefill", "decode", "decode"), failures=(Failure(1, 0.3, 60.0), Failure(2, 0.3, 2.0)), strand=3.0
    )
    made = play(asks(0.0, 9.0, tokens=4000), name="always-apart", conditions=conditions)
    assert made.stranded == 1
    assert not any(served.failed for served in made.served)
    books_are_closed(made)


def test_a_prefiller_that_dies_leaves_the_prompt_to_who_decodes() -> None:
    conditions = Conditions(roles=("prefill", "decode"), failures=(Failure(0, 0.3, 60.0),))
    made = play(asks(0.0, tokens=4000), pods="2*laptop", name="always-apart", conditions=conditions)
    (served,) = made.served
    assert (served.failed, served.pod, served.prefill, served.attempts) == (False, 1, -1, 1)
    assert made.pods[1].engine.totals.computed_tokens == 4000
    books_are_closed(made)


def test_progress_counts_each_request_once() -> None:
    seen: list[int] = []
    trace = steady(20)
    Replay(trace, pods("2*laptop"), policy("round-robin").build, CALM, 0, seen.append).run()
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
            TraceRequest(0.0, (Piece(1, 100),), 30, answer=2),
            TraceRequest(0.0, (Piece(3, 100),), 5),
            TraceRequest(0.0, (Piece(1, 100), Piece(2, 30), Piece(4, 20)), 5, after=(0, 1), pause=2.5),
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


@pytest.mark.parametrize("name", ["prefix-aware", "kv-aware", "session", "least-load", "round-robin"])
@pytest.mark.parametrize("sees_answer", [True, False])
def test_a_pod_that_answers_errors_at_once_gets_few_requests_and_its_share_again(name: str, sees_answer: bool) -> None:
    trace = asks(*[n / 30 for n in range(1800)], output=60)
    conditions = Conditions(failures=(Failure(0, 10.0, 30.0, 1.0),), sees_answer=sees_answer)
    made = play(trace, name=name, pods="3*h100-8b", conditions=conditions)
    during = [served for served in made.served if 11.0 < served.sent < 40.0]
    assert sum(served.failed for served in during) < 0.02 * len(during)
    assert sum(served.failed for served in made.served if served.sent <= 11.0) <= 12
    after = [served for served in made.served if served.sent > 50.0]
    assert sum(served.pod == 0 for served in after) > 0.25 * len(after)
    assert not any(served.failed for served in after)
    books_are_closed(made)


def test_who_waited_as_long_as_the_trace_lets_it_is_refused() -> None:
    trace = asks(*[0.0] * 150)
    hurried = Trace("test", [replace(ask, ttl=1.0 if number % 2 else None) for number, ask in enumerate(trace.asks)])
    made = play(hurried, pods="laptop", name="prefix-aware+flow-control")
    shed = [number for number, served in enumerate(made.served) if served.shed]
    assert len(shed) > 10
    assert all(number % 2 for number in shed)
    assert {round(made.served[number].ended, 6) for number in shed} == {1.0}
    assert not any(served.shed for served in play(hurried, pods="laptop").served), "nothing waits in the picker"


def test_a_policy_that_looks_at_load_alone_is_attracted_by_errors() -> None:
    trace = asks(*[n / 30 for n in range(600)], output=60)
    made = play(
        trace,
        name="tooling/policies/least-requests.yaml",
        pods="3*h100-8b",
        conditions=Conditions(failures=(Failure(0, 5.0, 60.0, 1.0),)),
    )
    assert fmean(served.failed for served in made.served if served.sent > 6.0) > 0.5


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


def test_replicas_of_a_large_pool_do_not_all_send_to_who_is_idle_before_they_hear_of_each_other() -> None:
    """Without parts (`epp.scheduling.parts`) they wait 1.44 times as long as with one replica."""
    trace = WORKLOADS["independent"](1, 600, "poisson")
    trace = trace.scaled(170 / trace.rate)
    one = play(trace, pods="32*h100-8b")
    four = play(trace, pods="32*h100-8b", conditions=Conditions(replicas=4, exchange=0.002))
    assert fmean(waits(four)) < 1.2 * fmean(waits(one))


def test_saturating_keeps_pods_busy_and_stops_when_it_has_seen_enough() -> None:
    trace = WORKLOADS["independent"](1, 6000, "poisson")
    made = Replay(trace, pods("2*laptop"), policy("round-robin").build, replace(CALM, saturate=True), 0)
    served = made.run()
    ended = [one for one in served if one.ended >= 0]
    assert 2000 <= len(ended) < len(trace.asks)
    for pod in made.pods:
        assert pod.busy > 0.95 * made.now


# --- tiers below the pods ---------------------------------------------------------------------------------------------

STORAGE = TierParameters(tokens=100_000, speed=50_000.0)
MEMORY = "@100000"
NAMES = ["prefix-aware", "kv-aware", "round-robin", "oracle"]


def one_document(*times: float) -> Trace:
    return Trace("t", [TraceRequest(at, (Piece(1, 2048), Piece(2 + n, 30)), 4) for n, at in enumerate(times)])


@settings(max_examples=25)
@given(
    failures=FAILURES,
    name=st.sampled_from(NAMES),
    l1=st.sampled_from([None, "600@3000", "12000@100000"]),
    l2=st.sampled_from([None, TierParameters(tokens=3000, speed=4000.0), STORAGE]),
    per_node=st.sampled_from([1, 2, 3]),
    replicas=st.sampled_from([1, 2]),
    foreign=st.sampled_from([0.0, 0.3]),
    gap=st.sampled_from([0.02, 0.2]),
)
def test_books_are_closed_with_tiers_too(
    failures: list[Failure],
    name: str,
    l1: str | None,
    l2: TierParameters | None,
    per_node: int,
    replicas: int,
    foreign: float,
    gap: float,
) -> None:
    conditions = Conditions(failures=tuple(failures), l2=l2, pods_per_node=per_node, replicas=replicas, foreign=foreign)
    trace = steady(50, gap, documents=8)
    made = play(trace, name=name, conditions=conditions, l1=l1)
    assert made.served == play(trace, name=name, conditions=conditions, l1=l1).served
    books_are_closed(made)
    for ask, served in zip(trace.asks, made.served, strict=True):
        if not served.failed:
            assert 0 <= served.l1 + served.l2 <= served.cached < ask.tokens
            assert served.sent < served.first <= served.ended
    for pod in made.pods:
        for tier in (pod.lower.l1, pod.lower.l2) if pod.lower is not None else ():
            assert tier is None or len(tier) <= tier.room


@pytest.mark.parametrize("name", ["prefix-aware", "round-robin"])
def test_leaps_change_nothing_where_something_is_loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = steady(150, 0.15, documents=24)
    leapt = play(trace, name=name, conditions=Conditions(l2=STORAGE), l1="12000@20000")
    monkeypatch.setattr(Engine, "leap", lambda self, now, limit=512: [])
    stepped = play(trace, name=name, conditions=Conditions(l2=STORAGE), l1="12000@20000")
    assert [s.first for s in leapt.served] == pytest.approx([s.first for s in stepped.served], abs=1e-9)
    assert [(s.pod, s.cached, s.l1, s.l2) for s in leapt.served] == [
        (s.pod, s.cached, s.l1, s.l2) for s in stepped.served
    ]
    assert sum(s.l1 for s in leapt.served) > 0
    assert sum(s.l2 for s in leapt.served) > 0


def test_a_pod_that_lost_its_cache_loads_from_its_nodes_memory() -> None:
    conditions = Conditions(failures=(Failure(0, 2.0, 1.0),))
    first, again = play(one_document(0.0, 5.0), pods="laptop", conditions=conditions, l1="10000" + MEMORY).served
    assert (first.cached, again.cached, again.l1) == (0, 2048, 2048)
    assert again.first - again.sent < 0.3 * (first.first - first.sent)
    _, without = play(one_document(0.0, 5.0), pods="laptop", conditions=conditions).served
    assert without.cached == 0


def test_another_pod_has_it_from_storage_or_from_the_memory_they_share() -> None:
    trace = one_document(0.0, 5.0, 10.0)
    alone = play(trace, pods="2*laptop", name="round-robin", l1="10000" + MEMORY).served
    assert [(s.pod, s.l1, s.l2) for s in alone[:2]] == [(0, 0, 0), (1, 0, 0)], "another node's memory is not theirs"
    shared = play(trace, pods="2*laptop", name="round-robin", conditions=Conditions(l2=STORAGE)).served
    assert [(s.l1, s.l2) for s in shared] == [(0, 0), (0, 2048), (0, 0)]
    mates = play(
        trace, pods="2*laptop", name="round-robin", conditions=Conditions(pods_per_node=2), l1="10000" + MEMORY
    ).served
    assert [(s.l1, s.l2) for s in mates] == [(0, 0), (2048, 0), (0, 0)]


def test_what_came_from_storage_stays_in_the_nodes_memory() -> None:
    failures = (Failure(1, 6.0, 1.0),)
    made = play(
        one_document(0.0, 5.0, 10.0, 15.0),
        pods="2*laptop",
        name="round-robin",
        conditions=Conditions(l2=STORAGE, failures=failures),
        l1="10000" + MEMORY,
    )
    second = [(s.l1, s.l2) for s in made.served if s.pod == 1]
    assert second == [(0, 2048), (2048, 0)]


def test_a_tier_holds_no_more_than_it_has_room_for() -> None:
    """Twelve documents in turn: more than a pod, fewer than a large tier holds."""
    trace = Trace("t", [TraceRequest(n * 1.0, (Piece(1 + n % 12, 2048), Piece(100 + n, 30)), 2) for n in range(48)])
    found = [
        sum(s.l1 for s in play(trace, pods="laptop", l1=size and size + MEMORY).served)
        for size in (None, "4096", "30000")
    ]
    assert found[0] == 0
    assert found[1] < 0.5 * found[2]
    assert found[2] > 30 * 2048, "all but the first time"


def test_knowing_the_tiers_wins_over_taking_turns() -> None:
    trace = steady(150, 0.15, documents=24)
    turns, aware = (play(trace, name=name, l1="20000" + MEMORY) for name in ("round-robin", "kv-aware"))
    assert fmean(waits(aware)) < 0.8 * fmean(waits(turns))
    assert sum(s.cached for s in aware.served) >= sum(s.cached for s in turns.served)


@pytest.mark.parametrize("name", NAMES)
def test_tiers_that_hold_nothing_in_time_change_nothing(name: str) -> None:
    """So slow that computing is always quicker."""
    trace = steady(80, 0.1)
    none = play(trace, name=name)
    slow = play(trace, name=name, conditions=Conditions(l2=TierParameters(tokens=99_999, speed=0.01)), l1="9999@0.01")
    assert [(s.first, s.ended, s.pod, s.cached) for s in slow.served if name != "kv-aware"] == [
        (s.first, s.ended, s.pod, s.cached) for s in none.served if name != "kv-aware"
    ]
    assert sum(s.l1 + s.l2 for s in slow.served) == 0
