from dataclasses import replace

import pytest

from epp import plugin
from tests.support.scheduling.replaying import asks, play, steady
from tooling.replay.figures import Figures, Slo, figures, percentile, regret, spread
from tooling.replay.replay import Conditions, Failure
from tooling.replay.trace import Trace
from tooling.simulator.tiers import TierParameters


def of(trace_name: str = "round-robin", **conditions: object) -> Figures:
    made = play(steady(100, 0.1), name=trace_name, conditions=Conditions(**conditions))  # type: ignore[arg-type]
    return figures(trace_name, 0, made, Slo())


def test_percentiles_lie_between_neighbours() -> None:
    assert percentile([], 0.5) == 0.0
    assert percentile([3.0], 0.9) == 3.0
    assert percentile([0.0, 1.0, 2.0, 3.0], 0.5) == 1.5
    assert percentile([0.0, 1.0, 2.0, 3.0], 1.0) == 3.0


def test_figures_of_a_run_computed_by_hand() -> None:
    """Two requests that do not meet: 400 prompt tokens in one step, then 19 decodes."""
    made = play(asks(0.0, 10.0), pods="2*laptop", name="round-robin")
    found = figures("x", 7, made, Slo(ttft=1.0, tpot=0.02))
    first = 0.008 + 400 * 0.2e-3 + 4e-9 * 400 * 200
    assert found.ttft_p50 == pytest.approx(first)
    decodes = sum(0.008 + 0.3e-3 + 0.4e-6 * (400 + n) for n in range(19))
    assert found.tpot_mean == pytest.approx(decodes / 19)
    assert found.seconds == pytest.approx(10.0 + first + decodes)
    assert found.tokens_per_second == pytest.approx(40 / found.seconds)
    assert found.cost == pytest.approx(2.0 * found.seconds / 3600 / 40 * 1000)
    assert (found.goodput, found.hit_rate, found.hit_bound, found.failed, found.retried) == (1.0, 0.0, 0.0, 0, 0)
    assert found.imbalance == pytest.approx(1.0)
    assert found.shares == (0.5, 0.5)
    assert (len(found.curve), len(found.timeline)) == (101, 60)
    assert (found.timeline[0], found.timeline[-1]) == pytest.approx((first, first))
    assert found.timeline[30] == -1.0
    assert figures("x", 7, made, Slo(ttft=first / 2)).goodput == 0.0
    assert figures("x", 7, made, Slo(tpot=0.001)).goodput == 0.0


def test_hits_stay_below_their_bound_and_warm_policies_come_nearer() -> None:
    warm, cold = of("prefix-aware"), of("round-robin")
    assert cold.hit_rate < warm.hit_rate <= warm.hit_bound
    assert list(warm.curve) == sorted(warm.curve)
    assert warm.curve[50] == warm.ttft_p50


def test_hits_by_tier_add_up_to_the_hits() -> None:
    found = of(l2=TierParameters(tokens=100_000))
    assert sum(found.hits.values()) == pytest.approx(found.hit_rate)
    assert found.hits["l1"] == 0.0
    assert found.hits["l2"] > 0.01
    assert of().hits == {}


def test_foreign_traffic_is_left_out_and_failures_are_counted() -> None:
    assert of(foreign=0.5).requests < 80
    trace = asks(*[0.1 * n for n in range(50)], output=100)
    made = play(trace, name="round-robin", conditions=Conditions(failures=(Failure(0, 2.0, 3.0),)))
    broken = figures("round-robin", 0, made, Slo())
    assert broken.failed > 0
    assert broken.goodput <= 1 - broken.failed / broken.requests


def test_a_run_in_which_nothing_was_served() -> None:
    made = play(asks(0.0), pods="laptop", conditions=Conditions(failures=(Failure(0, 0.0, 900.0),)))
    found = figures("x", 0, made, Slo())
    assert (found.failed, found.ttft_p50, found.cost, found.goodput) == (1, 0.0, 0.0, 0.0)


def test_spread_and_regret() -> None:
    assert (spread([2.0]).mean, spread([2.0]).deviation) == (2.0, 0.0)
    assert spread([1.0, 3.0]).deviation == pytest.approx(2**0.5)
    one, other = of("round-robin"), of("prefix-aware")
    assert regret([one], [one]).mean == 0.0
    assert regret([one], [other]).mean == pytest.approx(one.ttft_mean / other.ttft_mean - 1)


def test_a_class_is_judged_by_its_own_slo() -> None:
    """Two requests that do not meet: 88 ms until the first token, about 8.5 ms for each after it."""
    plain = asks(0.0, 10.0)

    def judged(slo: plugin.Slo | None) -> tuple[float, float]:
        made = Trace("test", [replace(ask, slo=slo, label="x") for ask in plain.asks])
        found = figures("x", 0, play(made, pods="2*laptop"), Slo(ttft=0.01, tpot=0.001))
        assert 8 < found.classes["x"].tpot_mean * 1000 < 9
        return found.classes["x"].attained, found.goodput

    assert judged(plugin.Slo(0.1, 0.01)) == (1.0, 1.0)
    assert judged(plugin.Slo(0.1, 0.005)) == (0.0, 0.0)
    assert judged(plugin.Slo(0.05, 0.01)) == (0.0, 0.0)
    assert judged(plugin.Slo(tpot=0.01)) == (1.0, 1.0)
    assert judged(None) == (0.0, 0.0), "without one, the replay's"
