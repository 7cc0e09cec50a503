"""Learned speeds, alone and in a pool of simulated pods in virtual time."""

from math import exp, log
from random import Random
from typing import Any

import pytest

from epp.plugin import Endpoint, Load
from epp.scheduling.constants import Stretch
from epp.scheduling.cost import ExpectedTtft
from epp.scheduling.speeds import Speed, Speeds
from tests.support.scheduling.virtual_pool import Arrival, VirtualPool, slower
from tooling.simulator.engine import H100_8B


def pods(count: int) -> list[Endpoint]:
    return [Endpoint(f"default/pod-{i}", f"10.0.0.{i}:8000") for i in range(count)]


def watch(speeds: Speeds, speed: Speed, times: float, count: int = 30, start: float = 0.0) -> float:
    """`count` observations of an endpoint `times` slower than modelled, one a second; returns when the last was."""
    for i in range(count + 1):  # one is concluded when the next begins
        speeds.observe(speed, Stretch(1.0, 0.0, 0.0, times), start + i)
    return start + count


def test_an_endpoint_gets_its_own_value_and_the_pool_the_median() -> None:
    speeds = Speeds({}, stretch=1.0)
    opened = [speeds.open(endpoint) for endpoint in pods(3)]
    for speed, times in zip(opened, (1.0, 1.05, 2.0), strict=True):
        watch(speeds, speed, times)
    watch(speeds, opened[0], 1.0, start=100)
    assert speeds.pool == pytest.approx(1.05)
    assert opened[0].factor == opened[1].factor == pytest.approx(1.05), "as good as equal is equal"
    assert 1.7 < opened[2].factor < 2.3


def test_a_few_strange_observations_change_nothing() -> None:
    speeds = Speeds({}, stretch=1.0)
    first, other = map(speeds.open, pods(2))
    watch(speeds, other, 1.0)
    now = watch(speeds, first, 1.0)
    now = watch(speeds, first, 1000.0, 8, now)
    watch(speeds, first, 1.0, 3, now)
    assert first.factor == pytest.approx(other.factor)


def test_before_there_is_enough_to_say_the_pool_speaks() -> None:
    speeds = Speeds({}, stretch=1.0)
    first, other, new = map(speeds.open, pods(3))
    now = max(watch(speeds, first, 3.0), watch(speeds, other, 3.0))
    watch(speeds, new, 30.0, 2, now + 10)
    assert new.factor == speeds.pool == pytest.approx(3.0)
    assert speeds.open(Endpoint("default/late", "10.0.0.9:8000")).factor == pytest.approx(3.0)


def test_what_is_old_counts_for_less() -> None:
    speeds = Speeds({}, stretch=1.0)
    slow, *others = map(speeds.open, pods(3))
    watch(speeds, slow, 3.0)
    factors = []
    for start in (100.0, 1000.0, 3000.0):
        for other in others:
            watch(speeds, other, 1.0, 10, start)
        factors.append(slow.factor)
    assert factors[0] > 2.5
    assert factors == sorted(factors, reverse=True)
    assert factors[-1] == pytest.approx(1.0), "it was long enough ago to be tried again"


@pytest.mark.parametrize("times", [1e-9, 1e9])
def test_nobody_counts_as_more_than_four_times_the_pool(times: float) -> None:
    speeds = Speeds({}, stretch=1.0)
    liar, *others = map(speeds.open, pods(4))
    for other in others:
        watch(speeds, other, 1.0)
    watch(speeds, liar, times, start=50)
    assert 1 / 4.01 <= liar.factor <= 4.01
    assert speeds.pool == pytest.approx(1.0)


def test_first_tokens_of_one_step_are_one_observation() -> None:
    speeds = Speeds({}, stretch=1.0)
    (speed,) = map(speeds.open, pods(1))
    for step in range(40):  # eight prompts a step, whose tokens come together
        for observed in (8.0, 0, 0, 0, 0, 0, 0, 0):
            speeds.observe(speed, Stretch(1.0, 0.0, 0.0, observed), step)
    assert [exp(value) for value in speed.logs] == pytest.approx([1.0] * len(speed.logs))


def test_requests_that_were_alone_count_where_there_are_no_whole_stretches() -> None:
    speeds = Speeds({}, stretch=16.0)
    speed, new = map(speeds.open, pods(2))
    for n in range(8):
        speeds.observe(speed, Stretch(0.5, 0.0, 0.0, 0.05), float(n), lone=True)
    assert speeds.observations == 4, "a sixteenth of a stretch makes one"
    assert speed.factor == 1.0, "whole ones may come"
    speeds.observe(speed, Stretch(1.0, 0.0, 0.0, 0.1), 40.0, lone=True)
    assert speed.factor == speeds.pool == pytest.approx(0.1)
    for n in range(41, 47):
        speeds.observe(speed, Stretch(16.0, 0.0, 0.0, 32.0), float(n))
    assert speed.median == pytest.approx(log(2.0)), "what was seen under load comes first"
    ((_, told),) = speeds.learned()
    assert [each.seconds for each in told] == [32.5, *[32.0] * 4], "whole stretches; what came before is in the first"
    speeds.restore(new, told, 50.0)
    assert new.median == pytest.approx(log(2.0))
    speeds.observe(speed, Stretch(1.0, 0.0, 0.0, 0.1), 1000.0, lone=True)
    assert speed.median == pytest.approx(log(0.1)), "until it is old"


def test_pins_are_not_learned_and_the_first_counts() -> None:
    speeds = Speeds({"default/pod-1": 0.25, "default/*": 0.5}, stretch=1.0)
    first, second = map(speeds.open, pods(2))
    watch(speeds, first, 1.0)
    watch(speeds, second, 1.0)
    assert (first.factor, second.factor) == (2.0, 4.0)


def test_what_was_seen_is_compared_anew_when_the_constants_become_known() -> None:
    """Prefill takes as long as configured, a step three times as long."""
    speeds = Speeds({}, stretch=1.0)
    first, other = map(speeds.open, pods(2))
    for n in range(40):
        prefill, steps = (0.9, 0.1) if n % 2 else (0.1, 0.9)
        for speed, times in ((first, 1.0), (other, 2.0)):
            speeds.counted(speed, Stretch(prefill, steps / 2, steps / 2, times * (prefill + 3 * steps)), float(n))
    assert speeds.ratios == pytest.approx((3.0, 3.0), rel=0.05)
    assert first.factor == pytest.approx(1.0, rel=0.1)
    assert other.factor == pytest.approx(2.0, rel=0.15)
    assert first.error is not None
    assert first.error < 0.05, "with the configured constants it would look three times slower at times"


def test_what_is_closed_is_forgotten() -> None:
    speeds = Speeds({}, stretch=1.0)
    slow, quick = pods(2)
    watch(speeds, speeds.open(slow), 3.0)
    speed = speeds.open(quick)
    speeds.close(slow)
    watch(speeds, speed, 1.0)
    watch(speeds, speed, 1.0, start=100)
    assert speeds.pool == pytest.approx(1.0)


# --- in a pool ------------------------------------------------------------------------------------------------------


def traffic(seed: int, rate: float, count: int, tokens: int = 3000) -> list[Arrival]:
    draw, at = Random(seed), 0.0
    arrivals = []
    for _ in range(count):
        at += draw.expovariate(rate)
        arrivals.append(Arrival(at, max(64, round(draw.expovariate(1 / tokens)))))
    return arrivals


def factors(cost: ExpectedTtft) -> list[float]:
    figures = cost.endpoint_statistics().values()
    return [1 / reported["speed"] for reported in figures]


def priors(times: float, **others: Any) -> ExpectedTtft:
    """Priors `times` too slow."""
    return ExpectedTtft(
        prefill_seconds_per_token=45e-6 * times, attention_seconds_per_token_pair=1.5e-9 * times, **others
    )


MIXED = [H100_8B, H100_8B, H100_8B, slower(2)]
TWICE = {"default/pod-3": 0.5}


def test_a_pod_half_as_fast_is_found_out_and_gets_less() -> None:
    learning, blind = priors(1), priors(1, learn_speeds=False)
    learned, without = VirtualPool(learning, MIXED), VirtualPool(blind, MIXED)
    for pool in (learned, without):
        pool.play(traffic(1, 12, 1200))
    *even, slow = factors(learning)
    assert max(even) / min(even) < 1.01
    assert 1.6 < slow / even[0] < 2.4
    assert factors(blind) == [1.0] * 4
    assert learned.share(3, 1000) < without.share(3, 1000)
    assert learned.mean_ttft < without.mean_ttft


def test_a_pod_that_slows_down_is_found_out_and_forgiven() -> None:
    cost = priors(1)
    pool = VirtualPool(cost, [H100_8B] * 4)
    found = []
    for part, slow in enumerate((1.0, 3.0, 1.0)):
        pool.slow[0] = slow
        start = pool.now
        pool.play([Arrival(start + at, *rest) for at, *rest in traffic(part, 16, 1200)])
        found.append(factors(cost)[0] / factors(cost)[1])
    assert found[0] == pytest.approx(1)
    assert found[1] > 2
    assert found[2] == pytest.approx(1)


def test_metrics_that_lie_teach_nothing() -> None:
    def tells(i: int, load: Load) -> Load:
        return Load(prefix_hits=10**9, prefix_queries=10**9, at=load.at) if i == 0 else load

    honest, lied_to = priors(1), priors(1)
    pools = VirtualPool(honest, MIXED), VirtualPool(lied_to, MIXED, tells=tells)
    for pool in pools:
        pool.play(traffic(2, 18, 800))
    assert factors(lied_to) == pytest.approx(factors(honest))


def test_a_pod_that_tells_its_first_token_too_early_does_not_take_the_pools_traffic() -> None:
    cost = priors(1)
    pool = VirtualPool(cost, [H100_8B] * 4, early=lambda i: i == 0)
    pool.play(traffic(3, 16, 1200))
    blind = VirtualPool(priors(1, learn_speeds=False), [H100_8B] * 4, early=lambda i: i == 0)
    blind.play(traffic(3, 16, 1200))
    assert factors(cost)[0] / factors(cost)[1] >= 1 / 4.01
    assert pool.share(0) < 0.75
    assert all(pool.share(i) > 0.05 for i in range(1, 4))


@pytest.mark.long
@pytest.mark.parametrize("times", [1 / 3, 3.0])
def test_priors_wrong_by_three_times_cost_little(times: float) -> None:
    for pods_, most, known in (([H100_8B] * 4, 1.03, {}), (MIXED, 1.05, TWICE)):
        learned, reported = (
            VirtualPool(priors(times), pods_),
            VirtualPool(priors(1, learn_speeds=False, speeds=known), pods_),
        )
        for pool in (learned, reported):
            for seed in range(3):
                start = pool.now
                pool.play([Arrival(start + at, *rest) for at, *rest in traffic(seed, 15, 700)])
        assert learned.mean_ttft / reported.mean_ttft < most


def test_where_first_tokens_are_not_seen_nothing_is_learned_and_it_says_so() -> None:
    cost = priors(3)
    VirtualPool(cost, MIXED, seen=False).play(traffic(4, 14, 300))
    assert cost.statistics()["speed_observations"] == 0
    assert all(reported == {"speed": 1.0, "speed_observations": 0} for reported in cost.endpoint_statistics().values())


def test_speeds_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="pod-1: 0"):
        ExpectedTtft(speeds={"pod-1": 0.0})
