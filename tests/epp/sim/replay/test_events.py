"""A picker that listens knows what the pods hold, and nothing but the events tells it."""

from math import inf
from random import Random
from statistics import fmean

import pytest

from epp.loader import load_strategy
from epp.prefix.chains import chain_of_tokens
from epp.prefix.events import BlockStored
from epp.prefix.precise import PrecisePrefixCache
from epp.sim.presets import pods
from epp.sim.replay.events import batch_of, ears_of
from epp.sim.replay.play import Conditions, Failure, Play
from epp.sim.replay.pod import Pod
from epp.sim.replay.policies import policy
from epp.sim.replay.trace import Ask, Piece, Trace
from tests.support.replaying import play, steady, waits


def precise(made: Play) -> PrecisePrefixCache:
    return next(p for p in made.replicas[0].scheduler.plugins if isinstance(p, PrecisePrefixCache))


def heard(made: Play, pod: Pod, ask: Ask) -> int:
    """Blocks of a prompt that the picker was told this pod holds."""
    cache = precise(made)
    shelf = cache.shelves.shelf(made.replicas[0].endpoint_of[pod])
    chain = chain_of_tokens(ask.ids(), 16)[: ask.tokens // 16]
    return max(
        (cache.shelves.indexes["device"].depth(chain, e.tiers["device"].bit) for e in shelf.engines.values()), default=0
    )


@pytest.mark.parametrize("foreign", [0.0, 1.0])
def test_what_was_heard_is_what_the_pods_hold(foreign: float) -> None:
    """Also of requests that passed the picker by, and though memory is short."""
    trace = steady(150, 0.1, documents=12)
    made = play(trace, name="kv-aware", conditions=Conditions(foreign=foreign, event_lag=0.0))
    told = 0
    for pod in made.pods:
        for ask in trace.asks:
            held = pod.engine.cached_blocks(ask.chain(16), ask.tokens // 16)
            assert heard(made, pod, ask) == held
            told += held
    assert told > 1000


def test_every_request_was_picked_by_events() -> None:
    reasons: list[str] = []
    made = Play(steady(100, 0.1), pods("3*laptop"), policy("kv-aware").build, Conditions(), 0)
    precise(made).degraded = lambda reason, detail: reasons.append(reason)
    made.run()
    assert reasons == []


def test_a_pod_that_comes_back_under_the_same_name_is_known_to_be_empty() -> None:
    """It is back before anybody notices; only its events tell."""
    trace = Trace("t", [Ask(0.5 * n, (Piece(1, 1600), Piece(2 + n, 30)), 4) for n in range(20)])
    conditions = Conditions(failures=(Failure(0, 4.7, 0.1),), notice=5.0)
    made = play(trace, pods="laptop", name="kv-aware", conditions=conditions)
    again = made.served[10]
    assert (again.sent, again.cached) == (5.0, 0)
    ask = trace.asks[10]
    assert heard(made, made.pods[0], ask) == made.pods[0].engine.cached_blocks(ask.chain(16), ask.tokens // 16)


def test_events_that_are_late_cost_little_while_nothing_else_writes_to_the_pods() -> None:
    trace = steady(200, 0.08, documents=6)
    at_once = play(trace, name="kv-aware", conditions=Conditions(event_lag=0.0))
    late = play(trace, name="kv-aware", conditions=Conditions(event_lag=0.5))
    assert fmean(waits(late)) < 1.3 * fmean(waits(at_once)), "what is in flight is known anyway"


def test_events_say_what_the_engine_did() -> None:
    pod = Pod("p", pods("laptop")[0])
    pod.watch()
    ask = Ask(0.0, (Piece(1, 40),), 30, answer=2)
    pod.add(1, ask, 0.0)
    pod.begin(0.0)
    while (due := pod.due) < inf:
        pod.end()
        pod.begin(due)
    batch = batch_of(pod.engine.changes(), 16, 3.0)
    stored = [event for event in batch.events if isinstance(event, BlockStored)]
    assert batch.ts == 3.0
    assert [hash for event in stored for hash in event.block_hashes] == ask.chain(16)
    assert stored[0].parent_block_hash is None
    assert stored[1].parent_block_hash == ask.chain(16)[1]
    assert [id for event in stored for id in event.token_ids or ()] == ask.ids()[:64].tolist()


def test_only_those_who_listen_have_ears() -> None:
    for name, listens in (("kv-aware", True), ("prefix-aware", False)):
        pipeline = load_strategy(name, clock=lambda: 0.0, random=Random(0))
        assert (ears_of(pipeline.plugins) is not None) == listens
