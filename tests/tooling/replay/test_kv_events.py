"""A picker that listens knows what the pods hold, and nothing but the events tells it."""

from collections.abc import Coroutine
from dataclasses import replace
from math import inf
from random import Random
from statistics import fmean

import pytest

from epp.configuration.loader import load_strategy
from epp.plugin import PrefixMatch
from epp.prefix.events.wire import BlockStored
from epp.prefix.lmcache.directory import L2, Directory
from epp.prefix.lmcache.tiers import Listed
from epp.prefix.precise import PrecisePrefixCache
from epp.prefix.tokens.block_hashes import chain_of_tokens
from tests.support.scheduling.replaying import play, steady, waits
from tooling.replay.kv_events import TierLog, at_once, batch_of, delivery_to
from tooling.replay.pod import VirtualPod
from tooling.replay.policies import policy
from tooling.replay.replay import Conditions, Failure, Replay
from tooling.replay.trace import Piece, Trace, TraceRequest
from tooling.simulator.presets import pods
from tooling.simulator.tiers import CHUNK, Changed, TierParameters


def precise(made: Replay) -> PrecisePrefixCache:
    return next(p for p in made.replicas[0].scheduler.plugins if isinstance(p, PrecisePrefixCache))


def received(made: Replay, pod: VirtualPod, ask: TraceRequest) -> int:
    """Blocks of a prompt that the picker was told this pod holds."""
    cache = precise(made)
    kv_state = cache.kv_index.state_of(made.replicas[0].endpoint_of[pod])
    chain = chain_of_tokens(ask.ids(), 16)[: ask.tokens // 16]
    return max(
        (cache.kv_index.indexes["device"].depth(chain, e.tiers["device"].bit) for e in kv_state.engines.values()),
        default=0,
    )


@pytest.mark.parametrize("foreign", [0.0, 1.0])
def test_what_was_received_is_what_the_pods_hold(foreign: float) -> None:
    """Also of requests that passed the picker by, and though memory is short."""
    trace = steady(150, 0.1, documents=12)
    made = play(trace, name="kv-aware", conditions=Conditions(foreign=foreign, event_lag=0.0))
    reported = 0
    for pod in made.pods:
        for ask in trace.asks:
            held = pod.engine.cached_blocks(ask.chain(16), ask.tokens // 16)
            assert received(made, pod, ask) == held
            reported += held
    assert reported > 1000


def test_every_request_was_picked_by_events() -> None:
    reasons: list[str] = []
    made = Replay(steady(100, 0.1), pods("3*laptop"), policy("kv-aware").build, Conditions(), 0)

    def degraded(reason: str, detail: str = "", *, lasting: bool = False) -> None:
        reasons.append(reason)

    precise(made).start(replace(made.replicas[0].services, degraded=degraded))
    made.run()
    assert reasons == []


def test_a_pod_that_comes_back_under_the_same_name_is_known_to_be_empty() -> None:
    """It is back before anybody notices; only its events tell."""
    trace = Trace("t", [TraceRequest(0.5 * n, (Piece(1, 1600), Piece(2 + n, 30)), 4) for n in range(20)])
    conditions = Conditions(failures=(Failure(0, 4.7, 0.1),), notice=5.0)
    made = play(trace, pods="laptop", name="kv-aware", conditions=conditions)
    again = made.served[10]
    assert (again.sent, again.cached) == (5.0, 0)
    ask = trace.asks[10]
    assert received(made, made.pods[0], ask) == made.pods[0].engine.cached_blocks(ask.chain(16), ask.tokens // 16)


def test_events_that_are_late_cost_little_while_nothing_else_writes_to_the_pods() -> None:
    trace = steady(200, 0.08, documents=6)
    at_once = play(trace, name="kv-aware", conditions=Conditions(event_lag=0.0))
    late = play(trace, name="kv-aware", conditions=Conditions(event_lag=0.5))
    assert fmean(waits(late)) < 1.3 * fmean(waits(at_once)), "what is in flight is known anyway"


def test_events_say_what_the_engine_did() -> None:
    pod = VirtualPod("p", pods("laptop")[0])
    pod.watch()
    ask = TraceRequest(0.0, (Piece(1, 40),), 30, answer=2)
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


# --- tiers below ------------------------------------------------------------------------------------------------------

STORAGE = TierParameters(tokens=30_000, speed=50_000.0)


def l1_of(cache: PrecisePrefixCache, made: Replay, pod: VirtualPod, ask: TraceRequest) -> int:
    """Chunks of a prompt that the picker was told lie in this pod's L1."""
    kv_state = cache.kv_index.state_of(made.replicas[0].endpoint_of[pod])
    chain = chain_of_tokens(ask.ids(), CHUNK)[: ask.tokens // CHUNK]
    tiers = [engine.tiers["l1"] for engine in kv_state.engines.values() if "l1" in engine.tiers]
    return max((cache.kv_index.indexes["l1"].depth(chain, tier.bit) for tier in tiers), default=0)


@pytest.mark.parametrize("per_node", [1, 3])
def test_what_was_received_of_l1_is_what_it_holds(per_node: int) -> None:
    """By every pod of the node, and though it is too small for all."""
    trace = steady(150, 0.1, documents=24)
    made = play(trace, name="kv-aware", conditions=Conditions(event_lag=0.0, pods_per_node=per_node), l1="12000")
    reported = 0
    for pod in made.pods:
        assert pod.lower is not None
        for ask in trace.asks:
            chunks = pod.chunks(ask)
            memory = pod.lower.l1
            assert memory is not None
            held = next((n for n, name in enumerate(chunks) if name not in memory), len(chunks))
            assert l1_of(precise(made), made, pod, ask) == held
            reported += held
    assert reported > 300


def test_the_directory_is_read_as_in_production() -> None:
    """Each second, and what was forgotten with the next reading of it all."""
    trace = steady(200, 0.1, documents=24)
    made = play(trace, name="kv-aware", conditions=Conditions(event_lag=0.0, l2=STORAGE), l1="9000")
    tiers = precise(made).tiers
    assert tiers is not None
    assert tiers.sweeps > 10
    tiers.directory.clear()
    at_once(tiers.read())
    for pod in made.pods:
        assert pod.lower is not None
        l1, l2, bit = pod.lower.l1, pod.lower.l2, tiers.directory.bit(pod.node)
        assert l1 is not None
        assert l2 is not None
        for ask in trace.asks:
            for name in pod.chunks(ask):
                runs = tiers.directory.held([name])
                mask = runs[0].mask if runs else 0
                assert (bool(mask & bit), bool(mask & L2)) == (name in l1, name in l2)


def test_late_events_make_late_tiers() -> None:
    trace = Trace(
        "t", [TraceRequest(at, (Piece(1, 2048), Piece(2 + n, 30)), 4) for n, at in enumerate((0.0, 4.0, 30.0))]
    )
    known: dict[float, int] = {}
    for lag in (0.0, 10.0):
        made = Replay(trace, pods("laptop"), policy("kv-aware").build, Conditions(event_lag=lag, l2=STORAGE), 0)
        tiers = precise(made).tiers
        assert tiers is not None
        made._at(5.0, lambda lag=lag, tiers=tiers: known.__setitem__(lag, len(tiers.directory)))
        made.run()
    assert known == {0.0: 8, 10.0: 0}


@pytest.mark.parametrize(("name", "knows"), [("prefix-aware", False), ("kv-aware", True)])
def test_the_default_knows_nothing_of_what_lies_below_the_device(name: str, knows: bool) -> None:
    trace = Trace("t", [TraceRequest(at, (Piece(1, 2048), Piece(2 + n, 30)), 4) for n, at in enumerate((0.0, 9.0))])
    conditions = Conditions(failures=(Failure(0, 2.0, 4.0),), l2=STORAGE)
    made = Replay(trace, pods("laptop"), policy(name).build, conditions, 0)
    reported: list[tuple[int, int]] = []

    def ask() -> None:
        matches = made.replicas[0].choose(7, trace.asks[1]).request.signals[PrefixMatch]
        reported.extend((match.tokens, match.l2) for match in matches.values())

    made._at(8.9, ask)
    made.run()
    assert reported == [(0, 2048 if knows else 0)]
    assert made.served[1].l2 == 2048


def test_the_ledger_tells_what_is_new_at_its_end() -> None:
    tier_log = TierLog(["node-1"])
    tier_log.note("", [Changed(None, (1, 2), [0, 1], [])])
    tier_log.note("node-1", [Changed(None, (2, 3), [0, 1], [])])
    directory = Directory(10)
    pages = [Waited(tier_log.keys(offset)).page for offset in (0, 2, 3, 9)]
    assert [page.total for page in pages] == [3] * 4
    assert [dict(page.chunks(directory, "")) for page in pages] == [{1: 1, 2: 3, 3: 2}, {3: 2}, {}, {}]
    tier_log.note("", [Changed(None, (9,), [0], [1, 2])])
    assert dict(Waited(tier_log.keys(0)).page.chunks(directory, "")) == {2: 2, 3: 2, 9: 1}


class Waited:
    """What a coroutine that waits for nothing returns."""

    def __init__(self, asked: Coroutine[None, None, Listed]) -> None:
        async def keep() -> None:
            self.page = await asked

        at_once(keep())


def test_only_those_who_listen_have_ears() -> None:
    for name, listens in (("kv-aware", True), ("prefix-aware", False)):
        pipeline = load_strategy(name, clock=lambda: 0.0, random=Random(0))
        assert (delivery_to(pipeline.plugins) is not None) == listens
