from random import Random

import pytest

from epp.scheduling.heaviest import Heaviest


def taken(heaviest: Heaviest, values: list[float], share: float) -> list[float]:
    return [value for value in values if heaviest.has(value, share)]


@pytest.mark.parametrize("share", [0.01, 0.02, 0.1, 0.5])
@pytest.mark.parametrize("typical", [20.0, 1000.0, 50_000.0])
def test_about_the_share_is_taken_and_it_is_the_largest(share: float, typical: float) -> None:
    random, heaviest = Random(1), Heaviest(1000)
    taken(heaviest, [random.lognormvariate(0, 1) * typical for _ in range(5000)], share)
    values = [random.lognormvariate(0, 1) * typical for _ in range(20_000)]
    found = taken(heaviest, values, share)
    assert len(found) == pytest.approx(share * len(values), rel=0.1)
    least = sorted(values)[-round(2 * share * len(values))]
    assert sum(value >= least for value in found) > 0.9 * len(found)


def test_of_equal_values_the_share_is_taken_too() -> None:
    heaviest = Heaviest(1000)
    taken(heaviest, [8000.0] * 5000, 0.02)
    assert len(taken(heaviest, [8000.0] * 10_000, 0.02)) == pytest.approx(200, rel=0.1)


def test_nothing_to_compute_is_never_heavy() -> None:
    heaviest = Heaviest(1000)
    assert taken(heaviest, [0.0] * 100_000, 0.5) == []
    assert heaviest.has(2.0, 0.5)


def test_one_out_of_all_proportion_hides_the_others_for_some_time_only() -> None:
    random, heaviest = Random(1), Heaviest(1000)
    for _ in range(100):
        heaviest.has(1e6, 0.02)
    usual = [random.uniform(500, 1500) for _ in range(20_000)]
    assert len(taken(heaviest, usual[:5000], 0.02)) < 20
    assert len(taken(heaviest, usual[5000:], 0.02)) == pytest.approx(300, rel=0.2)
