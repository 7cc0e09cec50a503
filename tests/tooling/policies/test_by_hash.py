"""Rings: who has a key, what moves when endpoints come and go, and the bound on loads."""

from collections import Counter

import pytest

from tests.support.scheduling.policy_requests import ask, pods, send, winners
from tooling.policies import KubeAiPrefixHash, SessionHash
from tooling.policies.by_hash import Ring

KEYS = [f"session-{n}".encode() for n in range(2000)]


def test_a_ring_spreads_keys_and_moves_few_when_an_endpoint_leaves() -> None:
    ring, endpoints = Ring(256), pods(4)
    before = {key: next(ring.walk(key, endpoints)) for key in KEYS}
    shares = Counter(before.values())
    assert all(0.2 < count / len(KEYS) < 0.3 for count in shares.values())
    gone = endpoints.pop()
    after = {key: next(ring.walk(key, endpoints)) for key in KEYS}
    assert {key for key in KEYS if before[key] is not after[key]} == {k for k in KEYS if before[k] is gone}


def test_a_walk_meets_everybody_once() -> None:
    endpoints = pods(5)
    assert sorted(e.name for e in Ring(8).walk(b"key", endpoints)) == [e.name for e in endpoints]


def test_a_session_keeps_its_endpoint_and_others_go_where_least_was_sent() -> None:
    policy, endpoints = SessionHash(), pods(3)
    homes = {frozenset(winners(policy, ask(endpoints, headers={"x-session-id": "me"}), endpoints)) for _ in range(5)}
    assert len(homes) == 1
    send(policy, ask(endpoints), endpoints[0], endpoints[0], endpoints[1])
    assert winners(policy, ask(endpoints), endpoints) == {2}


@pytest.mark.parametrize(("busy", "stays"), [(4, True), (5, False)])
def test_kubeai_walks_on_from_who_is_over_the_bound(busy: int, stays: bool) -> None:
    policy, endpoints = KubeAiPrefixHash(), pods(2)
    prompt = b"the same beginning" * 10
    (home,) = winners(policy, ask(endpoints, prompt), endpoints)
    load = [(busy, 0) if i == home else (2, 0) for i in range(2)]
    # (4 + 2 + 1) / 2 * 1.25 = 4.375 allows 4; (5 + 2 + 1) / 2 * 1.25 = 5.0 allows 5 too, so there the other has 1:
    if not stays:
        load[1 - home] = (1, 0)  # (5 + 1 + 1) / 2 * 1.25 = 4.375
    assert (winners(policy, ask(endpoints, prompt, in_flight=load), endpoints) == {home}) is stays


def test_kubeai_reads_what_the_user_says_first() -> None:
    policy = KubeAiPrefixHash()
    chat = b'[{"role":"system","content":"be kind"},{"role":"user","content":"%s"}]'
    assert policy._prefix(ask([], chat % b"hello")) == b"hello"
    assert policy._prefix(ask([], chat % (b"x" * 300))) == b"x" * 100
    for odd in (b"no json", b"[]", b'[{"role":"user","content":[{"type":"text"}]}]'):
        assert policy._prefix(ask([], odd)) == odd
