"""The fit of a pool's constants, from stretches made up with known ones."""

from collections.abc import Iterable
from random import Random

import pytest

from epp.scheduling.constants import FEW, NOTHING, Constants, Ratios, Stretch, stretch_of


def fitted(stretches: Iterable[Stretch]) -> Constants:
    constants = Constants()
    for one in stretches:
        assert constants.observe(NOTHING, one, 1.0, 0.0) == NOTHING
        constants.fit()
    return constants


def mixed(
    prefill: float, steps: float, decodes: float, count: int = 60, noise: float = 0.1, seed: int = 1
) -> list[Stretch]:
    """Stretches of an engine that takes so many times the modelled seconds, of all shares of the three."""
    draw = Random(seed)
    made = []
    for _ in range(count):
        low, high = sorted((draw.random(), draw.random()))
        work = 10 * low, 10 * (high - low), 10 * (1 - high)
        seconds = prefill * work[0] + steps * work[1] + decodes * work[2]
        made.append(Stretch(*work, seconds * draw.uniform(1 - noise, 1 + noise)))
    return made


@pytest.mark.parametrize(
    ("prefill", "steps", "decodes"),
    [
        (1.0, 1.0, 1.0),
        (3.0, 1.0, 1.0),
        (1 / 3, 1.0, 1 / 3),
        (1.0, 5.0, 0.5),
        (0.5, 0.5, 0.5),
        (0.5, 0.5, 3.0),
        (1.0, 10.0, 10.0),
        (30.0, 10.0, 10.0),
    ],
)
def test_the_ratios_of_the_three_are_found_and_their_errors_said(prefill: float, steps: float, decodes: float) -> None:
    constants = fitted(mixed(prefill, steps, decodes))
    assert constants.ratios.steps == pytest.approx(steps / prefill, rel=0.1)
    assert constants.ratios.decodes == pytest.approx(decodes / prefill, rel=0.15)
    for error in (constants.prefill_error, constants.steps_error, constants.decodes_error):
        assert error is not None
        assert 0 < error < 0.1


def test_what_is_far_off_is_found_too() -> None:
    found = fitted(mixed(5.0, 50.0, 1.0, count=120, noise=0.02)).ratios
    assert found == pytest.approx((10.0, 1 / 5), rel=0.3)


def test_where_the_shares_never_change_the_configuration_stays() -> None:
    draw = Random(1)
    constants = fitted(Stretch(4.0, 4.0, 2.0, 10 * draw.uniform(1.9, 2.1)) for _ in range(60))
    assert constants.ratios == pytest.approx((1.0, 1.0), rel=0.1)
    nearly = (Stretch(4.0, 4.0 + draw.uniform(0, 0.01), 2.0, 10 * draw.uniform(1.9, 2.1)) for _ in range(60))
    assert fitted(nearly).ratios == pytest.approx((1.0, 1.0), rel=0.5), "hardly known, so hardly moved"


def test_what_always_comes_together_keeps_its_relation_and_the_rest_is_found() -> None:
    """As of answers that are all as long, where so many decodes come to a step."""
    draw = Random(1)
    shares = [draw.random() for _ in range(60)]
    rows = [Stretch(10 * x, 6 * (1 - x), 4 * (1 - x), 10 * x + 30 * (1 - x)) for x in shares]
    steps, decodes = fitted(rows).ratios
    assert (6 * steps + 4 * decodes) / 10 == pytest.approx(3.0, rel=0.1)
    assert steps == pytest.approx(decodes, rel=0.3)


def test_outliers_count_for_little() -> None:
    stretches = mixed(1.0, 3.0, 3.0)
    for n in range(0, 60, 10):
        stretches[n] = stretches[n]._replace(seconds=8 * stretches[n].seconds)
    assert fitted(stretches).ratios == pytest.approx((3.0, 3.0), rel=0.25)


def test_few_stretches_say_nothing() -> None:
    constants = fitted(mixed(1.0, 10.0, 10.0, 3))
    assert (constants.ratios, constants.prefill_error) == (Ratios(1.0, 1.0), None)


@pytest.mark.parametrize(
    "work", [(1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)], ids=["prefill", "steps", "decodes"]
)
def test_of_work_of_one_kind_nothing_is_said(work: tuple[float, float, float]) -> None:
    assert fitted([Stretch(*work, 5.0)] * 20).ratios == (1.0, 1.0)


def test_a_kind_of_work_that_never_came_goes_with_the_others() -> None:
    """Without a generated token, as where every answer has one."""
    draw = Random(1)
    rows = [Stretch(10 * x, 10 * (1 - x), 0.0, 10 * x + 30 * (1 - x)) for x in (draw.random() for _ in range(60))]
    constants = fitted(rows)
    assert constants.ratios.steps == pytest.approx(3.0, rel=0.1)
    assert 1.0 < constants.ratios.decodes < 3.0
    assert constants.decodes_error is not None
    assert constants.steps_error is not None
    assert constants.decodes_error > 10 * constants.steps_error


def test_short_stretches_are_put_together_once_there_are_some() -> None:
    constants = Constants()
    so_far = NOTHING
    for _ in range(FEW):
        so_far = constants.observe(so_far, Stretch(0.5, 0.3, 0.2, 1.0), 2.0, 0.1)
    assert (len(constants.stretches), constants.stretches[0].seconds) == (FEW, 0.5)
    for _ in range(6):
        so_far = constants.observe(so_far, Stretch(0.5, 0.3, 0.2, 1.0), 2.0, 0.1)
    assert len(constants.stretches) == FEW + 2
    assert constants.stretches[-1] == pytest.approx(Stretch(1.5, 0.9, 0.6, 1.5))
    for _ in range(20):
        so_far = constants.observe(so_far, Stretch(0.5, 0.3, 0.2, 1.0), 2.0, 1.0)
    assert constants.stretches[-1].seconds == 10, "twenty long prompts, in a pool of twice the speed"


@pytest.mark.parametrize(
    "values",
    [
        (0, 0, 0, 1),
        (1, 1, 1),
        (1, 1, 1, 0),
        (-1, 2, 1, 1),
        (1, 1, 1, float("nan")),
        (float("inf"), 1, 1, 1),
        (1, -1, 1, 1),
    ],
)
def test_a_stretch_that_cannot_be_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a stretch of"):
        stretch_of(values)
