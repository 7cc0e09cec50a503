"""Formulas of SGLang, production-stack and AIBrix, with numbers worked out by hand."""

import pytest

from tests.support.scheduling.policy_requests import ask, pods, send, text, winners
from tooling.policies import AibrixPrefixCache, ProductionStackLoadAware, ProductionStackPrefixAware, SglangCacheAware
from tooling.policies.by_prefix import Rates


def test_sglang_goes_to_the_longest_match_above_the_threshold() -> None:
    policy, (a, b, c) = SglangCacheAware(), pods(3)
    send(policy, ask([a, b, c], text(6, 256)), a)
    send(policy, ask([a, b, c], text(4, 256)), b)
    # 4 of 10 pieces at b and 6 of 10 at a; 0.6 > 0.3.
    assert winners(policy, ask([a, b, c], text(10, 256)), [a, b, c]) == {0}
    # 6 of 20 is 0.3, not more: the smallest tree, which is c's.
    assert winners(policy, ask([a, b, c], text(20, 256)), [a, b, c]) == {2}


@pytest.mark.parametrize(
    ("in_flight", "wanted"), [((65, 0), {1}), ((64, 0), {0}), ((200, 134), {0}), ((200, 133), {1})]
)
def test_sglang_leaves_the_prefix_when_both_thresholds_are_passed(in_flight: tuple[int, int], wanted: set[int]) -> None:
    policy, (a, b) = SglangCacheAware(), pods(2)
    send(policy, ask([a, b], text(4, 256)), a)
    request = ask([a, b], text(4, 256), in_flight=[(n, 0) for n in in_flight])
    # More than 64 apart, and more than 1.5 times: 200 > 1.5 * 133 = 199.5, but not > 1.5 * 134 = 201.
    assert winners(policy, request, [a, b]) == wanted


def test_production_stack_goes_to_the_longest_match_whatever_its_load() -> None:
    policy, (a, b) = ProductionStackPrefixAware(), pods(2)
    send(policy, ask([a, b], text(2)), a)
    assert winners(policy, ask([a, b], text(3), in_flight=[(500, 0)]), [a, b]) == {0}
    assert winners(policy, ask([a, b], b"something else" * 20), [a, b]) == {0, 1}


def test_production_stack_goes_by_rate_where_the_match_is_too_short() -> None:
    policy, (a, b) = ProductionStackPrefixAware(prefix_min_match_length=257), pods(2)
    policy.clock = lambda: 100.0
    send(policy, ask([a, b], text(2)), a)
    assert winners(policy, ask([a, b], text(2)), [a, b]) == {1}
    policy.clock = lambda: 170.0
    assert winners(policy, ask([a, b], text(2)), [a, b]) == {0, 1}


@pytest.mark.parametrize(("beta", "wanted"), [(0.2, {0}), (0.25, {0, 1}), (0.3, {1})])
def test_production_stack_weighs_the_match_against_the_spread(beta: float, wanted: set[int]) -> None:
    policy, (a, b) = ProductionStackLoadAware(beta), pods(2)
    send(policy, ask([a, b], text(2)), a)
    # (4, 0): mean 2, spreads (4 - 2) / 2 = 1 and -1. Half of the prompt matches at a: 0.5 - beta there, 0 + beta at b.
    assert winners(policy, ask([a, b], text(4), in_flight=[(4, 0)]), [a, b]) == wanted


def test_production_stack_counts_a_mean_below_one_as_one() -> None:
    policy, (a, b) = ProductionStackLoadAware(), pods(2)
    send(policy, ask([a, b], text(2)), a)
    # (1, 0): mean 0.5, spreads +0.5 and -0.5, so a has 1 - 0.5 and b 0 + 0.5.
    assert winners(policy, ask([a, b], text(2), in_flight=[(1, 0)]), [a, b]) == {0, 1}


def test_aibrix_prefers_the_match_with_less_load_and_skips_who_is_far_above_the_mean() -> None:
    endpoints = pods(6)
    policy = AibrixPrefixCache()
    send(policy, ask(endpoints, text(4)), *endpoints[:2])
    send(policy, ask(endpoints, text(2)), endpoints[2])
    even = [(3, 0), (2, 0), (0, 0), (2, 0), (2, 0), (2, 0)]
    assert winners(policy, ask(endpoints, text(4), in_flight=even), endpoints) == {1}
    # Mean 2, deviation sqrt(120 / 6) = 4.47: at most 10.9 in flight, so the first two, who match whole, are out.
    uneven = [(12, 0), (0, 0), (0, 0), (0, 0), (0, 0), (0, 0)]
    policy.routed.forget(endpoints[1])
    assert winners(policy, ask(endpoints, text(4), in_flight=uneven), endpoints) == {2}


@pytest.mark.parametrize(("busy", "wanted"), [(16, {0}), (17, {1, 2, 3, 4, 5, 6})])
def test_aibrix_balances_requests_when_they_are_too_far_apart(busy: int, wanted: set[int]) -> None:
    endpoints, policy = pods(7), AibrixPrefixCache(deviations=3.0)
    send(policy, ask(endpoints, text(4)), endpoints[0])
    assert winners(policy, ask(endpoints, text(4), in_flight=[(busy, 0)]), endpoints) == wanted


def test_rates_count_the_last_minute() -> None:
    rates, (a, b) = Rates(), pods(2)
    for now in (0.0, 30.0, 59.0, 61.0):
        rates.add(a, now)
    assert rates.counts([a, b], 61.0) == [3, 0]
    assert rates.counts([a, b], 200.0) == [0, 0]
    rates.forget(a)
    assert rates.counts([a], 61.0) == [0]


def test_who_leaves_is_forgotten() -> None:
    (a,) = pods(1)
    for policy in (SglangCacheAware(), ProductionStackPrefixAware(), ProductionStackLoadAware(), AibrixPrefixCache()):
        send(policy, ask([a], text(3, 256)), a)
        assert policy.routed.size(a)
        policy.on_removed(a)
        assert not policy.routed.size(a)
