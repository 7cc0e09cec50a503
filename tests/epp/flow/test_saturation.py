"""Detectors: formulas, limits, what stale metrics do, accounts."""

from random import Random
from typing import Any, cast

import pytest

from epp.flow.saturation import ConcurrencyDetector, ProbabilisticAdmitter, UtilizationDetector
from epp.plugin import Endpoint, Load, Refusal, Request, Response, Services

NOW = 100.0


def endpoint(name: str = "a", waiting: int = 0, kv_usage: float = 0.0, at: float | None = NOW) -> Endpoint:
    return Endpoint(name, f"{name}:1", load=Load(waiting=waiting, kv_usage=kv_usage, at=at))


def utilization(**parameters: Any) -> UtilizationDetector:
    detector = UtilizationDetector(**parameters)
    detector.clock = lambda: NOW
    return detector


def request(tokens: int = 10) -> Request:
    return Request(id="r", model="m", tokens=tokens)


# --- utilization ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("endpoints", "saturation"),
    [
        ([endpoint()], 0.0),
        ([endpoint(waiting=5)], 1.0),
        ([endpoint(kv_usage=0.4)], 0.5),
        ([endpoint(waiting=1, kv_usage=0.8)], 1.0),
        ([endpoint(waiting=10), endpoint()], 1.0),
        ([endpoint(waiting=5), endpoint()], 0.5),
        ([endpoint(waiting=5), endpoint(waiting=0, at=NOW - 6)], 1.0),
        ([endpoint(waiting=50, at=NOW - 6), endpoint(kv_usage=0.4)], 0.5),
        ([endpoint(waiting=5, at=NOW - 5)], 1.0),
        ([], 1.0),
    ],
)
def test_mean_of_the_fuller_of_queue_and_memory(endpoints: list[Endpoint], saturation: float) -> None:
    assert utilization().saturation(endpoints) == pytest.approx(saturation)


def test_metrics_that_stop_do_not_stop_the_pool() -> None:
    detector = utilization()
    assert detector.saturation([endpoint(waiting=99, at=NOW - 60), endpoint(at=None)]) == 0.0
    assert detector.statistics() == {"stale_endpoints": 2}


def test_metrics_that_stop_count_as_full_where_that_is_wanted() -> None:
    detector = utilization(staleness_policy="saturated")
    assert detector.saturation([endpoint(waiting=99, at=NOW - 60), endpoint(at=None)]) == 1.0
    assert detector.saturation([endpoint(waiting=99, at=NOW - 60), endpoint(kv_usage=0.4)]) == 0.75


def test_the_filter_drops_full_endpoints_and_keeps_unknown_ones() -> None:
    idle, full, unknown = endpoint("idle"), endpoint("full", waiting=6), endpoint("unknown", waiting=9, at=None)
    assert utilization().filter(request(), [idle, full, unknown]) == [idle, unknown]
    assert utilization(headroom=0.5).filter(request(), [idle, full]) == [idle, full]


def test_the_filter_keeps_all_rather_than_nobody() -> None:
    everybody = [endpoint("a", waiting=6), endpoint("b", kv_usage=0.9)]
    assert utilization().filter(request(), everybody) == everybody


# --- concurrency ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "saturation"), [("requests", 0.75), ("tokens", 0.3), ("hybrid", 0.75)])
def test_in_flight_over_what_endpoints_may_have(mode: str, saturation: float) -> None:
    detector = ConcurrencyDetector(max_concurrency=2, max_token_concurrency=50, concurrency_mode=mode)  # type: ignore[arg-type]
    a, b = endpoint("a"), endpoint("b")
    for target in (a, a, b):
        detector.on_picked(request(), target)
    assert detector.saturation([a, b]) == pytest.approx(saturation)
    assert detector.saturation([endpoint("c")]) == 0.0
    assert detector.saturation([]) == 1.0


def test_hybrid_takes_the_fuller_for_each_endpoint() -> None:
    detector = ConcurrencyDetector(max_concurrency=10, max_token_concurrency=100, concurrency_mode="hybrid")
    a, b = endpoint("a"), endpoint("b")
    detector.on_picked(request(tokens=80), a)
    for _ in range(6):
        detector.on_picked(request(tokens=1), b)
    assert detector.saturation([a, b]) == pytest.approx((0.8 + 0.6) / 2)


def test_accounts_end_with_the_requests() -> None:
    detector = ConcurrencyDetector(max_concurrency=2)
    a, first, second = endpoint(), request(tokens=7), request(tokens=3)
    detector.on_picked(first, a)
    detector.on_picked(second, a)
    assert detector.statistics() == {"requests": 2, "tokens": 10}
    detector.on_removed(a)
    detector.on_finished(first, a, Response())
    assert detector.statistics() == {"requests": 1, "tokens": 3}
    detector.on_finished(second, a, Response())
    assert detector.statistics() == {"requests": 0, "tokens": 0}
    assert detector.saturation([a]) == 0.0


def test_the_filter_drops_endpoints_at_their_limit() -> None:
    detector, a, b = ConcurrencyDetector(max_concurrency=1), endpoint("a"), endpoint("b")
    detector.on_picked(request(), a)
    assert detector.filter(request(), [a, b]) == [b]
    detector.on_picked(request(), b)
    assert detector.filter(request(), [a, b]) == [a, b]
    roomy = ConcurrencyDetector(max_concurrency=1, headroom=1.0)
    roomy.on_picked(request(), a)
    assert roomy.filter(request(), [a, b]) == [a, b]


# --- parameters -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cls", "field", "value"),
    [
        (UtilizationDetector, "queue_depth_threshold", 0),
        (UtilizationDetector, "kv_cache_util_threshold", 0.0),
        (UtilizationDetector, "kv_cache_util_threshold", 1.5),
        (UtilizationDetector, "headroom", -0.1),
        (ConcurrencyDetector, "max_concurrency", 0),
        (ConcurrencyDetector, "max_token_concurrency", 0),
        (ConcurrencyDetector, "headroom", -1.0),
    ],
)
def test_parameters_out_of_range(cls: Any, field: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{value}$"):
        cls(**{field: value})


# --- admission by chance --------------------------------------------------------------------------------------------


def admitter(*endpoints: Endpoint, **parameters: Any) -> ProbabilisticAdmitter:
    plugin = ProbabilisticAdmitter(**parameters)
    plugin.clock, plugin.random = (lambda: NOW), Random(1)
    plugin.start(cast("Services", type("Given", (), {"endpoints": staticmethod(lambda: endpoints)})))
    return plugin


def refused(plugin: ProbabilisticAdmitter, priority: int, times: int = 1000) -> int:
    asked = Request(id="r", model="m", priority=priority)
    return sum(plugin.check(asked) is not None for _ in range(times))


@pytest.mark.parametrize(("waiting", "least", "most"), [(0, 0, 0), (1, 60, 140), (2, 1000, 1000)])
def test_the_fuller_the_pool_the_more_are_refused(waiting: int, least: int, most: int) -> None:
    assert least <= refused(admitter(endpoint(waiting=waiting)), -1) <= most


def test_who_is_refused_learns_why() -> None:
    asked = Request(id="r", model="m", priority=-2)
    said = admitter(endpoint(kv_usage=0.8)).check(asked)
    assert isinstance(said, Refusal)
    assert said.status == 429
    assert said.message.startswith("the pool fills (saturation 1.00) and requests of priority -2 wait for better times")


def test_others_and_those_of_an_empty_or_unknown_pool_pass() -> None:
    assert refused(admitter(endpoint(waiting=50)), 0) == 0
    assert refused(admitter(), -1) == 0
    assert refused(admitter(endpoint(waiting=50, at=None)), -1) == 0


@pytest.mark.parametrize("name", ["power", "k", "queue_depth_threshold"])
def test_an_admitter_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="expected"):
        admitter(**{name: 0})
