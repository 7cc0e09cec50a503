import asyncio
import gc
import sys
from dataclasses import dataclass, field
from math import isnan
from typing import Any

import pytest
from msgspec.structs import replace

from epp.admin import history as module
from epp.admin.history import ENDPOINT_STEPS, STEPS, EndpointHistory, History, Series, median, speed_of, tiers
from epp.admin.recorder import Decisions, Record, Recorder
from epp.plugin import Endpoint, Load, PrefixMatch, Response
from epp.telemetry.metrics import Metrics
from epp.telemetry.series import FlowFigures, KvEventFigures, Waits
from tests.support.scheduling.decisions import decision, endpoint


@dataclass(eq=False)
class APool:
    name: str = "p"
    endpoints: tuple[Endpoint, ...] = field(default_factory=lambda: (endpoint(1), endpoint(2)))
    namespace: str = "default"


class Seen:
    """A history of one pool, on a clock of its own."""

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = APool()
        self.metrics = Metrics(lambda: self.now)
        self.decisions = Decisions()
        self.recorder = Recorder("p", self.metrics, self.decisions, clock=lambda: self.now, wall_clock=lambda: 1.0)
        self.history = History(self.metrics, [self.pool], self.decisions, lambda: self.now)

    def look(self, seconds: float = 5.0) -> None:
        self.now += seconds
        self.history.look()

    def request(self, at: Endpoint, ttft: float | None = None) -> None:
        made = decision("r", [at], cached=60)
        self.recorder.decided(made, self.now)
        if ttft is not None:
            self.recorder.finished(made, Response(status=200, first_token_at=self.now + ttft))

    def __getitem__(self, name: str) -> float | None:
        return self.history.pools[0][name].last


def test_a_pool_is_seen_as_it_is_now_and_by_what_has_come_since() -> None:
    seen, (a, b) = Seen(), (endpoint(1), endpoint(2))
    seen.pool.endpoints = (a, b)
    for _ in range(10):
        seen.request(a)
    seen.request(b, ttft=0.1)
    a.load = Load(waiting=3, running=2, kv_usage=0.8, at=1.0)
    b.load = Load(waiting=1, kv_usage=0.2, at=1.0)
    seen.look(2.0)
    assert (seen["requests"], seen["in_flight"], seen["waiting"]) == (5.5, 10, 4)
    assert [seen["kv_mean"], seen["kv_most"]] == pytest.approx([0.5, 0.8])
    assert [seen["device"], seen["l1"], seen["l2"]] == pytest.approx([0.6, 0, 0])
    assert (seen["trust"], seen["speed"], seen["saturation"]) == (None, None, None)
    seen.look()
    assert (seen["requests"], seen["in_flight"]) == (0, 10)
    assert isnan(seen.history.pools[0]["device"].values[-1])  # nothing was asked since


def test_what_plugins_and_flow_control_say_is_kept_where_they_are() -> None:
    seen = Seen()
    seen.metrics.add_kv_events("p", lambda: KvEventFigures([("a", "live", 0.1, 0.75), ("b", "lost", None, 1.0)], {}))
    seen.metrics.add_source(lambda: {"expected-ttft": {"prefill_seconds_per_token": 5e-5}}, "p")
    seen.metrics.add_flow("p", lambda: FlowFigures([Waits("x", 0, 3, 10), Waits("y", 1, 4, 10)], 1.25))
    seen.look()
    assert (seen["trust"], seen["speed"], seen["saturation"], seen["queued"]) == (0.75, 20_000, 1.25, 7)


def test_an_endpoint_is_looked_at_with_every_second_step() -> None:
    seen = Seen()
    a, b = seen.pool.endpoints
    a.load = Load(waiting=3, running=70_000, kv_usage=0.5, at=1.0)
    seen.request(b)
    seen.look()
    assert seen.history.endpoint_steps == 0
    seen.look()
    assert seen.history.endpoint_steps == 1
    of_a, of_b = seen.history.endpoint(a), seen.history.endpoint(b)
    assert (of_a.kv[-1], of_a.requests[-1]) == (100, 65_535)
    assert (of_b.kv[-1], of_b.requests[-1]) == (module.UNKNOWN, 1)  # before its first scrape our own are known
    assert {*of_a.kv[:-1]} == {module.UNKNOWN}
    for use in (-0.5, 2.0):
        a.load = replace(a.load, kv_usage=use)
        seen.look()
        seen.look()
    assert [*of_a.kv[-2:]] == [0, module.KV_STEPS]


def test_ten_minutes_are_kept_and_what_goes_takes_its_history_along() -> None:
    seen = Seen()
    for _ in range(3 * STEPS):
        seen.look()
    assert {len(series.values) for series in seen.history.pools[0].series.values()} == {STEPS}
    assert {len(each.kv) for each in seen.history._endpoints.values()} == {ENDPOINT_STEPS}
    assert len(seen.history._endpoints) == 2
    seen.pool.endpoints = ()
    gc.collect()
    assert len(seen.history._endpoints) == 0


def test_an_endpoint_takes_half_a_kilobyte() -> None:
    one = EndpointHistory()
    assert sum(map(sys.getsizeof, (one, one.kv, one.requests))) <= 512
    assert sum(sys.getsizeof(each.values) for each in module.PoolHistory().series.values()) <= 7 << 10


def test_first_tokens_of_the_last_minute_have_a_median() -> None:
    seen = Seen()
    a = seen.pool.endpoints[0]
    seen.look()
    assert seen.history.ttft.last is None
    seen.request(a, ttft=3.0)
    seen.look()
    for _ in range(9):
        seen.request(a, ttft=0.09)
    seen.look()
    assert seen.history.ttft.last == pytest.approx(0.09, rel=0.4)  # as exact as the histogram's buckets
    for _ in range(2 * module.RECENT):
        seen.look()
    assert seen.history.ttft.last is None


def test_refusals_are_counted_by_second() -> None:
    seen = Seen()
    for _ in range(10):
        seen.metrics.request_failed(429, "x")
    seen.look()
    assert seen.history.refused.last == 2.0


def test_tiers_are_those_of_the_pools_own_requests() -> None:
    pool, pod = APool(), endpoint(1)
    made = decision("r", [pod])
    record = Record(made, pod, "p", "default", "m", 0.0, 0.0, 7, 90, held=PrefixMatch(50, 1, 2, 30, 10))
    other = Record(made, pod, "p", "elsewhere", "m", 0.0, 0.0, 7, 90, held=PrefixMatch(100, 1, 2))
    unseen = Record(made, pod, "p", "default", "m", 0.0, 0.0, 7, None)
    assert tiers([record, other, unseen], pool) == (0.5, 0.3, 0.1)
    assert tiers([other, unseen], pool) == (None, None, None)


@pytest.mark.parametrize(
    ("counts", "found"),
    [([0, 0, 0], None), ([4, 0, 0], 0.5), ([0, 2, 2], 2.0), ([1, 2, 1], 1.5), ([0, 1, 9], 2.0)],
)
def test_a_median_lies_within_its_bucket(counts: list[int], found: float | None) -> None:
    assert median((1.0, 2.0), counts) == found


@pytest.mark.parametrize(
    ("statistics", "found"),
    [({}, None), ({"a": {"x": 1.0}}, None), ({"a": {"prefill_seconds_per_token": 0.0}}, None)],
)
def test_without_a_learned_speed_there_is_none(statistics: dict[str, Any], found: None) -> None:
    assert speed_of(statistics) is found


def test_the_newest_value_of_the_last_minute_counts() -> None:
    series = Series()
    assert series.last is None
    series.add(7.0)
    series.add(None)
    assert series.last == 7.0
    for _ in range(module.RECENT):
        series.add(None)
    assert series.last is None


async def test_it_looks_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STEP_S", 0.001)
    seen = Seen()
    task = asyncio.ensure_future(seen.history.run())
    while seen.history.steps < 3:
        await asyncio.sleep(0.001)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
