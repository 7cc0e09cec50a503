from collections.abc import Callable

import pytest

from epp.replicas import wire
from epp.replicas.exchange import FADE, JOIN, SILENT
from tests.support.scheduling.replicas import POOL, Member, Network, together


async def test_a_prompt_sent_by_one_replica_draws_the_same_prompt_at_all_others() -> None:
    network, (first, *others) = together(4)
    sent = await first.ask()
    network.deliver()
    for other in others:
        assert (await other.ask()).endpoint.name == sent.endpoint.name


async def test_what_is_in_flight_is_in_every_replicas_accounts_until_it_ends() -> None:
    network, (a, b) = together(2)
    decision = await a.ask()
    network.deliver()
    assert (a.exchange.open, b.exchange.open) == (1, 1)
    assert b.scheduler.statistics()["expected-ttft"]["pending_seconds"] > 0
    a.scheduler.first_token(decision)
    network.deliver()
    assert b.scheduler.statistics()["expected-ttft"]["pending_seconds"] == 0
    assert b.scheduler.statistics()["expected-ttft"]["decodes"] == 1
    a.answer(decision)
    network.deliver()
    assert (a.exchange.open, b.exchange.open) == (0, 0)
    assert b.scheduler.statistics()["expected-ttft"]["decodes"] == 0
    assert b.open == 0


async def test_both_stages_of_a_request_are_in_every_replicas_accounts_until_each_ends() -> None:
    network, (a, b) = together(2, roles=("prefill", "decode"))
    waiting = [await a.ask(bytes([number]) * 40_000) for number in range(8)]  # the one that decodes has much to do
    decision = await a.ask(b"x" * 40_000)
    assert (decision.endpoint.name, decision.beside) == ("default/pod-1", {"prefill": ("default/pod-0",)})
    network.deliver()
    stages = sum(1 + len(each.beside) for each in (*waiting, decision))
    assert a.exchange.open == b.exchange.open == stages > len(waiting) + 1
    for each in (*waiting, decision):
        a.answer(each)
    network.deliver()
    assert (a.exchange.open, b.exchange.open) == (0, 0)
    figures = b.scheduler.statistics()["expected-ttft"]
    assert (figures["pending_seconds"], figures["decodes"]) == (0, 0)
    assert b.open == 0


async def test_failures_seen_by_one_replica_keep_the_others_away() -> None:
    network, (a, b) = together(2)
    broken = (await a.ask()).endpoint.name
    for _ in range(4):
        a.answer(await a.ask(), 503)
    network.deliver()
    assert (await b.ask()).endpoint.name != broken


async def test_a_replica_that_joins_knows_within_a_second_what_the_others_know() -> None:
    network, (a, b) = together(2)
    done, running = await a.ask(), await a.ask(b"x" * 4096)
    a.answer(done)
    network.deliver()
    late = Member(network, "replica-9:9004")
    late.exchange.found(list(network.replicas))
    for member in (a, b):
        member.exchange.found(list(network.replicas))
    assert not late.exchange.joined
    network.run(1.0)
    assert late.exchange.joined
    assert late.degraded == []
    assert late.holds(a.chain(done)) == a.holds(a.chain(done)) != []
    assert late.holds(a.chain(running)) == a.holds(a.chain(running)) != []
    assert late.exchange.open == a.exchange.open == 1
    again = await late.ask()
    assert again.endpoint.name == done.endpoint.name
    late.answer(again)
    a.answer(running)
    network.deliver()
    assert late.exchange.open == 0


async def test_replicas_have_numbers_of_their_own_and_know_how_much_is_not_told_yet() -> None:
    network, members = together(3)
    seen = [member.exchange.replicas(POOL) for member in members]
    assert {(each.number, each.total, each.unreported) for each in seen} == {(n, 3, 0.0) for n in range(3)}
    a, b, c = members
    for member in members:
        assert member.exchange.replicas("default/unknown") == (0, 1, 0.0)
        for peer in member.exchange.peers.values():
            peer.lag = 0.01  # a network of tests has none; the next beats measure it anew
    for _ in range(25):
        a.answer(await a.ask())
    network.deliver()
    for member in members:
        member.exchange._look(network.now + 0.5)
    assert a.exchange.replicas(POOL).unreported == 0.0, "its own are known"
    assert (
        b.exchange.replicas(POOL).unreported == c.exchange.replicas(POOL).unreported == pytest.approx(0.2 * 50 * 0.01)
    )
    c.exchange.leave()
    c.alive = False
    network.run(20.0)
    assert [each.exchange.replicas(POOL).total for each in (a, b)] == [2, 2]
    assert b.exchange.replicas(POOL).unreported < 0.001


def test_what_a_plugin_tells_comes_to_the_same_plugin_of_all_peers() -> None:
    network, (a, *others) = together(3)
    told: list[tuple[str, object]] = []
    for other in others:
        other.scheduler.restore = lambda name, piece, endpoints: told.append((name, piece))  # type: ignore[method-assign]
    a.exchange.tell(POOL, "limits", ["counts", 1, [["t", 1, 20, 1]]])
    a.exchange.tell("default/unknown", "limits", [])
    network.deliver()
    assert told == [("limits", ["counts", 1, [["t", 1, 20, 1]]])] * 2


async def test_a_snapshot_repeats_the_order_in_which_prompts_are_forgotten() -> None:
    network, (a, b) = together(2)
    for n in range(30):
        a.answer(await a.ask(bytes([n % 7]) * 2000 + bytes([n]) * 3000))
    network.deliver()
    late = Member(network, "replica-9:9004")
    late.exchange.found(["replica-0:9004"])
    network.run(2.0)
    for endpoint, copy in zip(a.endpoints, late.endpoints, strict=True):
        known, taken = a.cache.shadows.get(endpoint), late.cache.shadows.get(copy)
        assert (known is None) == (taken is None)
        if known is not None and taken is not None:
            taken.check()
            assert taken.idle == known.idle
            assert [*taken.remembered()] == [*known.remembered()]
    assert b.exchange.joined


async def test_a_lost_frame_is_seen_and_a_snapshot_makes_up_for_it() -> None:
    network, (a, b) = together(2)
    network.loses = lambda frame: frame[:1] == wire.LIVE
    done, running = await a.ask(), await a.ask(b"x" * 4096)
    a.answer(done)
    network.deliver()
    network.loses = lambda frame: False
    assert b.exchange.open == 0
    network.run(6.0)
    assert "replicas-gap" in b.degraded
    assert b.exchange.counts["missing"] == 4
    assert b.exchange.open == 1
    assert b.holds(a.chain(done)) == a.holds(a.chain(done)) != []
    assert b.holds(a.chain(running)) == a.holds(a.chain(running)) != []


async def test_an_end_that_was_lost_does_not_stay_in_flight() -> None:
    network, (a, b) = together(2)
    decision = await a.ask()
    network.deliver()
    network.loses = lambda frame: True
    a.answer(decision)
    network.deliver()
    network.loses = lambda frame: False
    network.run(6.0)
    assert b.exchange.open == 0
    assert b.open == 0


async def test_what_a_silent_replica_had_in_flight_fades_and_what_it_sent_stays_known() -> None:
    network, (a, b) = together(2)
    decisions = [await a.ask(bytes([n]) * 4096) for n in range(8)]
    network.deliver()
    a.alive = False
    network.run(SILENT + 1.0)
    assert "replica-silent" in b.degraded
    network.run(FADE / 2)
    assert 0 < b.exchange.open < 8
    network.run(FADE / 2)
    assert b.exchange.open == 0
    assert b.open == 0
    assert all(b.holds(a.chain(decision)) for decision in decisions)
    assert b.recovered == []


async def test_a_replica_that_was_only_stalled_is_believed_again() -> None:
    network, (a, b) = together(2)
    decision = await a.ask()
    network.deliver()
    a.alive = False
    network.run(SILENT + FADE + 1.0)
    assert b.exchange.open == 0
    a.alive = True
    network.run(2.0)
    assert b.recovered == ["replica-silent"]
    assert b.exchange.open == 1
    a.answer(decision)
    network.deliver()
    assert b.exchange.open == 0


async def test_a_replica_that_was_restarted_leaves_nothing_in_flight() -> None:
    network, (a, b) = together(2)
    await a.ask()
    network.deliver()
    again = Member(network, a.address, instance=77)
    again.exchange.found(list(network.replicas))
    network.run(2.0)
    assert again.exchange.joined
    network.run(FADE)
    assert b.exchange.open == again.exchange.open == 0


def of_another_version(member: Member) -> None:
    """From now on its frames say that they are of another version."""
    publish = member.publish

    def changed(frame: bytes) -> None:
        at = 1 if frame[:1] == wire.LIVE else wire.TOPIC_BYTES
        publish(frame[:at] + b"\x7f" + frame[at + 1 :])

    member.publish = changed  # type: ignore[method-assign]


def state(member: Member, of: Member) -> str:
    return member.exchange.peers[of.address].state


async def test_a_replica_of_another_version_is_not_read_until_one_of_ours_has_its_place() -> None:
    network, (a, b) = together(2)
    decision = await a.ask()
    network.deliver()
    assert b.exchange.open == 1
    other = Member(network, a.address, instance=77)
    of_another_version(other)
    other.exchange.found(list(network.replicas))
    await other.ask(b"x" * 4096)
    network.run(2.0)
    assert state(b, a) == "other-version"
    assert b.degraded == ["replicas-version"]
    assert b.exchange.counts["malformed"] == 0
    assert b.exchange.counts["other-version"] > 2, "said once, counted each time"
    network.run(FADE)
    assert b.exchange.open == b.open == 0
    assert b.holds(a.chain(decision)), "what was known before stays known"
    again = Member(network, a.address, instance=78)
    again.exchange.found(list(network.replicas))
    network.run(2.0)
    assert state(b, a) == "live"
    assert again.exchange.joined
    assert b.recovered == ["replicas-version"]
    await again.ask()
    network.deliver()
    assert b.exchange.open == 1


async def test_replicas_of_another_version_are_not_waited_for_longer_than_for_nobody() -> None:
    network, olds = together(2)
    for old in olds:
        of_another_version(old)
    new = Member(network, "replica-9:9004")
    new.exchange.found(list(network.replicas))
    network.run(JOIN + 1.0)
    assert new.exchange.joined
    assert new.degraded == ["replicas-version"] * 2
    second = Member(network, "replica-10:9004")
    for member in (new, second):
        member.exchange.found(list(network.replicas))
    sent = await new.ask()
    network.run(1.0)
    assert second.exchange.joined
    assert second.holds(new.chain(sent)) == new.holds(new.chain(sent)) != []
    for member in (new, second):
        member.exchange.found([new.address, second.address])
    assert new.recovered == second.recovered == ["replicas-version"]


async def test_a_replica_of_another_version_that_says_no_more_is_silent() -> None:
    network, (a, b) = together(2)
    of_another_version(a)
    network.run(1.0)
    a.alive = False
    network.run(SILENT + 1.0)
    assert state(b, a) == "silent"
    assert (b.degraded, b.recovered) == (["replicas-version", "replica-silent"], ["replicas-version"])


async def test_a_replica_that_leaves_is_not_missed() -> None:
    network, (a, b) = together(2)
    a.exchange.leave()
    network.deliver()
    a.alive = False
    network.run(SILENT + 2.0)
    assert b.degraded == []
    assert [peer.state for peer in b.exchange.peers.values() if peer.address == a.address] == ["left"]


async def test_without_an_answer_a_replica_starts_cold_and_says_so() -> None:
    network = Network()
    alone = Member(network, "replica-0:9004")
    alone.exchange.found(["replica-0:9004", "nobody:9004"])
    network.run(JOIN - 1.0)
    assert not alone.exchange.joined
    network.run(1.5)
    assert alone.exchange.joined
    assert alone.degraded == ["replica-cold-start"]


async def test_nothing_is_joined_before_the_pool_is_known() -> None:
    network, (a, _) = together(2)
    decision = await a.ask()
    late = Member(network, "replica-9:9004")
    late.ready, pods, late.endpoints = False, late.endpoints, ()
    late.exchange.found(list(network.replicas))
    network.run(JOIN + 2.0)
    assert not late.exchange.joined
    late.ready, late.endpoints = True, pods
    network.run(2.0)
    assert late.exchange.joined
    assert late.holds(a.chain(decision)) == a.holds(a.chain(decision)) != []


async def test_a_replica_knows_itself_among_its_peers() -> None:
    _, (a, b) = together(2)
    assert [peer.state for peer in a.exchange.peers.values()] == ["self", "live"]
    assert [peer[0] for peer in b.exchange.figures().peers] == [a.address]


async def test_a_decision_for_an_endpoint_that_is_not_known_here_is_counted() -> None:
    network, (a, b) = together(2)
    b.endpoints = ()
    a.answer(await a.ask())
    network.deliver()
    assert b.exchange.counts["unknown-endpoint"] == 1
    assert b.exchange.open == 0


async def test_noise_is_counted_and_harms_nothing() -> None:
    network, (a, b) = together(2)
    b.exchange.received(a.address, wire.LIVE + wire.VERSION + b"\x93\x01")
    b.exchange.received("stranger:1", wire.LIVE + wire.VERSION + b"\x93\x01")
    assert b.exchange.counts["malformed"] == 1
    assert b.degraded == ["replicas-malformed"]
    await a.ask()
    network.deliver()
    assert b.exchange.open == 1


async def test_lag_and_agreement_are_measured() -> None:
    network, (a, b) = together(2)
    await a.ask()
    network.run(2.0)
    [peer] = [peer for peer in b.exchange.peers.values() if peer.address == a.address]
    assert peer.agreement == 1.0
    assert peer.lag is not None
    assert peer.as_dict(network.now)["in_flight"] == 1


async def test_a_peer_that_became_ready_is_asked_again() -> None:
    network = Network()
    a, b = (Member(network, f"replica-{n}:9004") for n in range(2))
    a.exchange.found(["replica-0:9004", "replica-1:9004", "nobody:9004"])
    b.exchange.found(["replica-0:9004", "replica-1:9004", "nobody:9004"])
    network.run(0.5)
    assert not a.exchange.joined
    assert not b.exchange.joined
    sent = await a.ask()
    a.exchange.joined = True
    network.run(2.0)
    assert b.exchange.joined
    assert b.degraded == []
    assert b.holds(a.chain(sent)) == a.holds(a.chain(sent)) != []


async def test_an_end_goes_with_the_next_decision_and_a_turn_s_decisions_go_together() -> None:
    network, (a, b) = together(2)
    waiting: list[tuple[float, Callable[[], None]]] = []
    a.later = lambda seconds, call: waiting.append((seconds, call))  # type: ignore[method-assign]
    before = a.exchange.counts["sent"]
    first = await a.ask()
    a.answer(first)
    second = await a.ask(b"x" * 4096)
    assert [seconds for seconds, _ in waiting] == [0.0]
    assert a.exchange.counts["sent"] == before
    for _, call in waiting:
        call()
    network.deliver()
    assert a.exchange.counts["sent"] == before + 1
    assert b.exchange.open == 1
    waiting.clear()
    a.answer(second)
    assert [seconds > 0 for seconds, _ in waiting] == [True]
    waiting[0][1]()
    network.deliver()
    assert b.exchange.open == 0
