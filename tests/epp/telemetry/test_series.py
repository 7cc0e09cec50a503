from epp.telemetry.series import EndpointSeries, Histogram


def test_a_value_counts_in_every_bucket_from_its_own_up() -> None:
    histogram = Histogram((1.0, 2.0, 4.0))
    for value in (0.0, 1.0, 1.5, 4.0, 100.0):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2.0), ("2.0", 3.0), ("4.0", 4.0), ("+Inf", 5.0)]
    assert histogram.total == 106.5


def test_the_hit_rate_is_unknown_before_the_first_token() -> None:
    series = EndpointSeries()
    assert series.predicted_hit_rate is None
    series.tokens, series.predicted = 200, 50
    assert series.predicted_hit_rate == 0.25
