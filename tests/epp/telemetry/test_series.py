from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.telemetry.metrics_table import MAX_FLOWS, MAX_MODELS, MAX_PAIRS, MAX_PRIORITIES
from epp.telemetry.series import LONGEST_MODEL, OTHER, UNCOUNTED, EndpointSeries, FlowSeries, Histogram


@given(values=st.lists(st.floats(0, 10) | st.integers(0, 10), max_size=3 * UNCOUNTED))
def test_values_are_counted_together_as_if_one_by_one(values: list[float]) -> None:
    bounds = (1.0, 2.0, 4.0)
    histogram, counts = Histogram(bounds), [0] * 4
    for number, value in enumerate(values):
        histogram.observe(value)
        counts[bisect_left(bounds, value)] += 1
        if number % 100 == 0:
            assert histogram.counts == counts, "whenever somebody looks"
    assert histogram.total == pytest.approx(sum(values))
    assert histogram.counts == counts


def test_few_values_wait_to_be_counted() -> None:
    histogram = Histogram((1.0,))
    for _ in range(10 * UNCOUNTED):
        histogram.observe(1.0)
        assert len(histogram._values) < UNCOUNTED


def test_a_value_counts_in_every_bucket_from_its_own_up() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.0, 1.0, 1.5, 4.0, 100.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("4.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 106.5


@pytest.mark.parametrize(
    ("low", "high", "count", "expected"),
    [
        (0.0, 4.0, 8, [2, 2, 4, 0]),
        (1.0, 3.0, 5, [0, 2, 3, 0]),
        (1.5, 1.5, 3, [0, 3, 0, 0]),
        (4.0, 4.0, 1, [0, 0, 1, 0]),
        (0.0, 8.0, 3, [0, 1, 1, 1]),
        (9.0, 9.0, 2, [0, 0, 0, 2]),
    ],
)
def test_values_between_two_bounds_are_spread_evenly(low: float, high: float, count: int, expected: list[int]) -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    histogram.spread(low, high, count)
    assert histogram.counts == expected


@given(low=st.floats(0, 100), wide=st.floats(0, 100), count=st.integers(0, 1000))
def test_spreading_loses_nobody(low: float, wide: float, count: int) -> None:
    histogram = Histogram((1.0, 2.0, 4.0, 50.0))
    histogram.spread(low, low + wide, count)
    assert sum(histogram.counts) == count
    assert min(histogram.counts) >= 0


def test_the_hit_rate_is_unknown_before_the_first_token() -> None:
    series = EndpointSeries()
    assert series.predicted_hit_rate is None
    series.tokens, series.predicted = 200, 50
    assert series.predicted_hit_rate == 0.25


def test_the_labels_of_flows_have_bounds() -> None:
    answered = {f"m{number}" for number in range(5)}
    series = FlowSeries(answered)
    for number in range(500):
        for model in (*answered, f"made up {number}"):
            series.ended(f"flow {number}", number, "Dispatched", 0.1, model)
    ids, priorities, _, models = (set(labels) for labels in zip(*series.waits, strict=True))
    assert len(ids) == MAX_FLOWS + 1
    assert len(priorities) == MAX_PRIORITIES + 1
    assert models == {*answered, OTHER}
    assert len({(flow, model) for flow, _, _, model in series.waits if model != OTHER}) == MAX_PAIRS
    assert sum(sum(each.counts) for each in series.waits.values()) == 500 * 6, "nothing is lost"


def test_of_models_without_an_answer_the_first_have_labels_while_they_wait() -> None:
    series = FlowSeries({"answered"})
    assert series.model("x" * (LONGEST_MODEL + 1)) == OTHER
    names = [f"new {number}" for number in range(MAX_MODELS + 3)]
    assert [series.model(name) for name in names] == [*names[:MAX_MODELS], *[OTHER] * 3]
    assert series.model("answered") == "answered"
    assert series.model(names[0]) == names[0]
