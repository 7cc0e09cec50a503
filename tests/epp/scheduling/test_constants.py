"""The fit of a pool's constants, from stretches made up with known ones."""

from collections.abc import Iterable
from random import Random

import pytest

from epp.scheduling.constants import FEW, Constants, Stretch, stretch_of

NOTHING = Stretch(0.0, 0.0, 0.0)


def fitted(stretches: Iterable[Stretch]) -> Constants:
    constants = Constants()
    for one in stretches:
        assert constants.observe(NOTHING, one, 1.0, 0.0) == NOTHING
        constants.fit()
    return constants


def mixed(prefill: float, steps: float, count: int = 60, noise: float = 0.1, seed: int = 1) -> list[Stretch]:
    """Stretches of an engine that takes so many times the modelled seconds, of all shares of both."""
    draw = Random(seed)
    made = []
    for _ in range(count):
        share = draw.random()
        seconds = 10 * (prefill * share + steps * (1 - share))
        made.append(Stretch(10 * share, 10 * (1 - share), seconds * draw.uniform(1 - noise, 1 + noise)))
    return made


@pytest.mark.parametrize(("prefill", "steps"), [(1.0, 1.0), (3.0, 1.0), (1 / 3, 1.0), (1.0, 10.0), (0.5, 0.5)])
def test_the_ratio_of_both_is_found_and_its_error_said(prefill: float, steps: float) -> None:
    constants = fitted(mixed(prefill, steps))
    assert constants.ratio == pytest.approx(steps / prefill, rel=0.1)
    for error in (constants.prefill_error, constants.steps_error):
        assert error is not None
        assert 0 < error < 0.1


def test_where_the_shares_never_change_the_configuration_stays() -> None:
    draw = Random(1)
    constants = fitted(Stretch(5.0, 5.0, 10 * draw.uniform(1.9, 2.1)) for _ in range(60))
    assert constants.ratio == pytest.approx(1.0, rel=0.1)
    constants = fitted(Stretch(5.0, 5.0 + draw.uniform(0, 0.01), 10 * draw.uniform(1.9, 2.1)) for _ in range(60))
    assert constants.ratio == pytest.approx(1.0, rel=0.5), "hardly known, so hardly moved"


def test_outliers_count_for_little() -> None:
    stretches = mixed(1.0, 3.0)
    for n in range(0, 60, 10):
        stretches[n] = stretches[n]._replace(seconds=8 * stretches[n].seconds)
    assert fitted(stretches).ratio == pytest.approx(3.0, rel=0.25)


def test_few_stretches_say_nothing() -> None:
    constants = fitted(mixed(1.0, 10.0, 3))
    assert (constants.ratio, constants.prefill_error) == (1.0, None)


@pytest.mark.parametrize("empty", [Stretch(1.0, 0.0, 5.0), Stretch(0.0, 1.0, 5.0)])
def test_of_work_of_one_kind_nothing_is_said(empty: Stretch) -> None:
    assert fitted([empty] * 20).ratio == 1.0


def test_short_stretches_are_put_together_once_there_are_some() -> None:
    constants = Constants()
    so_far = NOTHING
    for _ in range(FEW):
        so_far = constants.observe(so_far, Stretch(0.5, 0.5, 1.0), 2.0, 0.1)
    assert (len(constants.stretches), constants.stretches[0].seconds) == (FEW, 0.5)
    for _ in range(6):
        so_far = constants.observe(so_far, Stretch(0.5, 0.5, 1.0), 2.0, 0.1)
    assert len(constants.stretches) == FEW + 2
    assert constants.stretches[-1] == Stretch(1.5, 1.5, 1.5)
    for _ in range(20):
        so_far = constants.observe(so_far, Stretch(0.5, 0.5, 1.0), 2.0, 1.0)
    assert constants.stretches[-1].seconds == 10, "twenty long prompts, in a pool of twice the speed"


@pytest.mark.parametrize("values", [(0, 0, 1), (1, 1, 0), (-1, 2, 1), (1, 1, float("nan")), (float("inf"), 1, 1)])
def test_a_stretch_that_cannot_be_is_refused(values: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match="a stretch of"):
        stretch_of(values)
