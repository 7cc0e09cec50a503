"""What predictions of TTFT learn: a time that all take, and how much of the learned speed is computing."""

from collections.abc import Callable
from math import inf, nan
from random import Random

import pytest

from epp.scheduling.overhead import Overhead


def serve(overhead: Overhead, seconds: Callable[[float], float], *works: float, pool: float = 1.0) -> None:
    """Requests of so many modelled seconds, each predicted with what was learned until then and 0.02 s besides."""
    for work in works:
        predicted = overhead.seconds + overhead.share * pool * work + 0.02
        overhead.observe(work, 0.02, predicted, seconds(work), pool)


def lengths(count: int, seed: int = 0) -> list[float]:
    random = Random(seed)
    return [random.uniform(0.01, 0.5) for _ in range(count)]


def test_what_all_take_is_told_from_computing() -> None:
    overhead = Overhead()
    serve(overhead, lambda work: 0.05 + 0.7 * work + 0.02, *lengths(100))
    assert overhead.seconds == pytest.approx(0.05, abs=0.01)
    assert overhead.share == pytest.approx(0.7, rel=0.1)


def test_what_is_learned_is_of_seconds_whatever_the_pools_factor_is_by_now() -> None:
    """Speeds follow the mix of requests, and have another part of the overhead in them then."""
    overhead, true = Overhead(), lambda work: 0.012 + 3.0 * work + 0.02
    serve(overhead, true, *lengths(100), pool=4.0)
    assert overhead.share == pytest.approx(0.75, rel=0.05)
    serve(overhead, true, *lengths(1), pool=6.0)
    assert 6.0 * overhead.share == pytest.approx(3.0, rel=0.1)


def test_where_prompts_are_alike_the_speed_is_believed() -> None:
    overhead = Overhead()
    serve(overhead, lambda work: 0.05 + work + 0.02, *[0.1] * 60)
    assert overhead.share == pytest.approx(1.0, rel=0.01)
    assert overhead.seconds == pytest.approx(0.05, rel=0.05)


def test_where_nothing_is_computed_the_rest_is_learned() -> None:
    overhead = Overhead()
    serve(overhead, lambda _: 0.03 + 0.02, *[0.0] * 20)
    assert [overhead.seconds, overhead.share] == pytest.approx([0.03, 1.0])


def test_there_is_no_less_than_none() -> None:
    """What was known besides did not come: then computing takes less, and is not made to take more."""
    overhead = Overhead()
    serve(overhead, lambda work: 0.9 * work + 0.005, *lengths(100))
    assert overhead.seconds == 0.0
    assert 0.75 < overhead.share < 0.9


@pytest.mark.parametrize("strange", [300.0, 0.5, 1e-9])
def test_strange_ones_change_little(strange: float) -> None:
    overhead = Overhead()
    serve(overhead, lambda work: 0.05 + work + 0.02, *lengths(60))
    for work in lengths(5, seed=1):
        serve(overhead, lambda _: strange, work)
    predicted = overhead.seconds + overhead.share * 0.2
    assert predicted == pytest.approx(0.25, rel=0.1)


def test_what_was_predicted_far_too_short_counts_no_more_than_others() -> None:
    overhead = Overhead()
    overhead.observe(0.1, 0.0, 0.0005, 2.0, 1.0)
    serve(overhead, lambda work: 0.05 + work + 0.02, *lengths(40))
    assert overhead.seconds + overhead.share * 0.2 == pytest.approx(0.25, rel=0.1)


def test_it_follows_what_changes() -> None:
    overhead = Overhead()
    serve(overhead, lambda work: 0.05 + work + 0.02, *lengths(500))
    serve(overhead, lambda work: 0.01 + work + 0.02, *lengths(200, seed=1))
    assert overhead.seconds == pytest.approx(0.01, abs=3e-3)


@pytest.mark.parametrize(("times", "share"), [(0.001, 0.1), (50.0, 2.0)])
def test_computing_has_bounds(times: float, share: float) -> None:
    """A speed that is as wrong as this is not for predictions to fix."""
    overhead = Overhead()
    serve(overhead, lambda work: times * work + 0.02, *lengths(300))
    assert overhead.share == share
    assert 0 <= overhead.seconds < inf


def test_what_was_learned_is_taken_over_where_nothing_was() -> None:
    old, new = Overhead(), Overhead()
    assert old.learned() == []
    serve(old, lambda work: 0.012 + 0.7 * work + 0.02, *lengths(100))
    new.restore(old.learned(), 1.0)
    assert (new.seconds, new.share) == (old.seconds, old.share)
    other = Overhead()
    serve(other, lambda work: work + 0.02, *lengths(3))
    before = other.learned()
    other.restore(old.learned(), 1.0)
    assert other.learned() == before


@pytest.mark.parametrize(
    "sums",
    [
        [], [1.0] * 5, [1.0] * 7,
        [0, 1, 1, 1, 1, 1], [1e6, 1, 1, 1, 1, 1], [nan, 1, 1, 1, 1, 1],
        [1, 0, 0, 0, 0, 0], [1, inf, 1, 1, 1, 1], [1, 1, -1, 1, 1, 1], [1, 1, 1, -1, 1, 1], [1, 1, 1, 1, nan, 1],
        [1, 1, 1, 1, 1, inf], [1, 1, 2, 1, 1, 1],
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(sums: list[float]) -> None:
    overhead = Overhead()
    with pytest.raises(ValueError, match="first tokens"):
        overhead.restore(sums, 1.0)
    assert overhead.learned() == []
