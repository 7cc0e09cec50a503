import asyncio
from dataclasses import dataclass, field
from math import nan
from random import Random
from typing import Any

import pytest
from markupsafe import Markup

from epp.admin import overview, page
from epp.admin.history import KV_STEPS, STEPS, History
from epp.admin.overview import COLUMNS, MOST_FLOWS, Overview, Value
from epp.admin.recorder import Decisions
from epp.plugin import Endpoint, Load
from epp.telemetry.metrics import Metrics
from epp.telemetry.pace import Pace
from epp.telemetry.series import FlowFigures, KvEventFigures, Waits
from tests.support.scheduling.decisions import endpoint


@dataclass(eq=False)
class APool:
    name: str = "p"
    endpoints: tuple[Endpoint, ...] = field(default_factory=lambda: (endpoint(1), endpoint(2)))
    namespace: str = "ns"


class Seen:
    def __init__(self, *endpoints: Endpoint) -> None:
        self.now = 100.0
        self.pool = APool(endpoints=endpoints or (endpoint(1), endpoint(2)))
        self.metrics = Metrics(lambda: self.now)
        self.history = History(self.metrics, [self.pool], Decisions(), lambda: self.now)
        self.overview = Overview(self.metrics, [self.pool], self.history, lambda: ["draining"], lambda: self.now)

    def rows(self) -> list[dict[str, Value]]:
        """By the heads of columns, of charts by what they show."""
        heads = [f"chart of {column.chart}" if column.chart else column.head for column in COLUMNS]
        [columns] = asyncio.run(self.overview.columns(Pace()))
        return [dict(zip(heads, row, strict=True)) for row in zip(*columns, strict=True)]

    def pool_now(self) -> dict[str, Any]:
        [shown] = self.overview.glance()["pools"]
        assert isinstance(shown, dict)
        return shown

    def tiles(self) -> dict[str, str]:
        return {tile.label: tile.value for tile in self.pool_now()["tiles"]}


def test_of_an_endpoint_that_was_never_scraped_our_own_accounts_are_known() -> None:
    seen = Seen()
    seen.metrics.request_decided(seen.pool.endpoints[0], "m", 0.001, 100, 25)
    first, second = seen.rows()
    assert (first["ours"], first["hits"], first["share"], first["failures"]) == (1, 25, 100, 0)
    assert (second["ours"], second["hits"], second["share"]) == (0, None, 0)
    for head in ("queue", "running", "KV use", "speed", "trust", "events", "age", "chart of kv"):
        assert first[head] is None, head


def test_what_was_scraped_and_said_of_an_endpoint_is_in_its_row() -> None:
    seen = Seen()
    pod = seen.pool.endpoints[0]
    pod.load = Load(waiting=3, running=9, kv_usage=0.416, at=98.25)
    seen.metrics.add_endpoint_source(lambda: {"expected-ttft": {pod: {"speed": 0.876}}}, "p")
    seen.metrics.add_kv_events("p", lambda: KvEventFigures([(pod.name, "live", 0.1, 0.954)], {}))
    for _ in range(2):
        seen.history.look()
    first, second = seen.rows()
    expected = {"queue": 3, "running": 9, "KV use": 42, "speed": 0.88, "trust": 95, "events": "live", "age": 1.7}
    assert {head: first[head] for head in expected} == expected
    assert (first["chart of requests"], first["chart of kv"]) == (12, round(0.416 * KV_STEPS))
    assert (second["speed"], second["events"]) == (None, None)


def test_figures_of_many_endpoints_are_gathered_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    pods = [endpoint(n) for n in range(1, 8)]
    seen = Seen(*pods)
    for waiting, pod in enumerate(pods):
        pod.load = Load(waiting=waiting, at=99.0)
        seen.metrics.request_decided(pod, "m", 0.001, 100, 25)
    seen.metrics.add_kv_events(
        "p", lambda: KvEventFigures([(pod.name, f"state of {pod.name}", 0, 1) for pod in pods], {})
    )
    whole = seen.rows()
    assert [row["queue"] for row in whole] == [*range(7)]
    assert [row["events"] for row in whole] == [f"state of {pod.name}" for pod in pods]
    assert {row["share"] for row in whole} == {14}, "of all, not of a slice"
    for slice_ in (1, 2, 3, 7):
        monkeypatch.setattr(overview, "SLICE", slice_)
        assert seen.rows() == whole


def test_a_pool_without_endpoints_has_empty_columns() -> None:
    seen = Seen()
    seen.pool.endpoints = ()
    assert asyncio.run(seen.overview.columns(Pace())) == [[[]] * len(COLUMNS)]
    assert (seen.pool_now()["endpoints"], seen.pool_now()["roles"]) == (0, [])


@pytest.mark.parametrize(("use", "shade"), [(nan, 0), (-1.0, 0), (0.0, 0), (0.099, 0), (0.5, 5), (0.95, 9), (1.5, 9)])
def test_the_map_takes_any_kv_use(use: float, shade: int) -> None:
    seen = Seen()
    seen.pool.endpoints[0].load = Load(kv_usage=use, at=99.0)
    drawn = seen.pool_now()["map"]
    assert f'class="h{shade}" d="M0,0' in drawn
    assert 'class="none" d="M10,0' in drawn
    assert f"{int(shade == 9)} of them are at 90 % or more" in drawn


def test_a_tile_shows_what_is_and_what_a_pool_has_not_has_none() -> None:
    seen = Seen()
    assert seen.tiles() == {
        "requests a second": "–",
        "in flight": "0",
        "waiting in engines": "–",
        "KV use": "–",
        "predicted hit rate": "–",
    }
    for pod, use in zip(seen.pool.endpoints, (0.2, 0.9), strict=True):
        pod.load = Load(waiting=2, kv_usage=use, at=99.0)
    seen.metrics.add_source(lambda: {"expected-ttft": {"prefill_seconds_per_token": 1e-4}}, "p")
    seen.metrics.add_flow("p", lambda: FlowFigures([Waits("x", 0, 3, 10)], 0.931))
    seen.history.look()
    found = seen.tiles()
    assert (found["waiting in engines"], found["KV use, most 90 %"]) == ("4", "55 %")
    assert (found["prefill tokens/s"], found["saturation"], found["waiting here"]) == ("10,000", "93 %", "3.0")


def test_colours_of_tiers_are_explained_where_there_are_tiers() -> None:
    seen = Seen()

    def keys() -> list[str]:
        [tile] = [tile for tile in seen.pool_now()["tiles"] if tile.label == "predicted hit rate"]
        return [key for key, _ in tile.keys]

    history = seen.history.pools[0]
    history["device"].add(0.5)
    assert keys() == []
    history["l1"].add(0.2)
    seen.history.steps += 1
    assert keys() == ["dev 50", "L1 20", "L2 –"]


def test_charts_are_drawn_when_something_was_added() -> None:
    seen = Seen()
    first = seen.pool_now()["tiles"][1].chart
    assert seen.pool_now()["tiles"][1].chart is first
    seen.history.look()
    assert seen.pool_now()["tiles"][1].chart is not first


def test_what_is_drawn_grows_until_its_ten_minutes_are_full_and_no_more() -> None:
    """Each step adds to every chart of the pool, no two alike."""
    seen, chance = Seen(), Random(1)
    seen.metrics.add_flow("p", lambda: FlowFigures([Waits("x", 0, chance.randrange(100), 10)], chance.random()))
    sizes: dict[int, int] = {}
    for step in range(1, 4 * STEPS + 1):
        for pod in seen.pool.endpoints:
            pod.load = Load(
                waiting=chance.randrange(100), running=chance.randrange(100), kv_usage=chance.random(), at=seen.now
            )
            for _ in range(chance.randrange(20)):
                seen.metrics.request_decided(pod, "m", 0.001, 100, chance.randrange(100))
        seen.now += 5
        seen.history.look()
        if step % (STEPS // 2) == 0:
            parts = page.parts(seen.overview.glance(), page.Drawn(Markup(), Markup()))
            charts = [chart for pod in seen.pool.endpoints for chart in seen.overview.charts(pod, 256).values()]
            sizes[step] = sum(map(len, (*parts.values(), *charts)))
    full = sizes.pop(STEPS)
    assert sizes.pop(STEPS // 2) < full * 0.8
    assert max(sizes.values()) < full * 1.02


def test_roles_are_added_up() -> None:
    pods = [Endpoint(f"pod-{n}", f"10.0.0.{n}:1", {"llm-d.ai/role": role}) for n, role in enumerate("ddp")]
    pods[0].load, pods[2].load = Load(kv_usage=0.5, at=1.0), Load(kv_usage=1.0, at=1.0)
    seen = Seen(*pods)
    seen.metrics.request_decided(pods[0], "m", 0.001, 1, None)
    shown = [(role["role"], role["endpoints"], role["in_flight"], role["kv"]) for role in seen.pool_now()["roles"]]
    assert shown == [("d", 2, 1, "50 %"), ("p", 1, 0, "100 %")]
    assert Seen().pool_now()["roles"] == []


def test_what_waits_is_ordered_by_priority_and_has_a_bound() -> None:
    seen = Seen()
    assert seen.pool_now()["flow"] is None
    many = [
        Waits(f"flow-{n}", n % 2, *part, model)
        for n in range(MOST_FLOWS + 5)
        for model, part in (("m", (n // 2, n * 400)), ("adapter", (n - n // 2, n * 600)))
    ]
    seen.metrics.add_flow("p", lambda: FlowFigures(many, 0.5))
    flow = seen.pool_now()["flow"]
    assert (flow["waiting"], flow["saturation"]) == (sum(range(MOST_FLOWS + 5)), "50 %")
    assert (len(flow["rows"]), flow["more"]) == (MOST_FLOWS, 4)  # and one in which nobody waits
    assert [row["priority"] for row in flow["rows"]] == sorted([row["priority"] for row in flow["rows"]], reverse=True)
    assert flow["rows"][0]["requests"] == MOST_FLOWS + 3, "of both models"


def test_kv_events_are_counted_by_state() -> None:
    seen = Seen()
    assert seen.pool_now()["states"] == ""
    seen.metrics.add_kv_events(
        "p", lambda: KvEventFigures([("a", "live", 0, 1), ("b", "lost", 0, 1), ("c", "live", 0, 1)], {})
    )
    seen.now += 1
    assert seen.pool_now()["states"] == "2 live, 1 lost"


def test_replicas_are_this_one_and_its_peers() -> None:
    seen = Seen()
    assert seen.overview.glance()["replicas"] is None
    peer = {"address": "10.0.0.9:1", "state": "live", "lag_ms": 1.234, "in_flight": 4, "agreement": 0.98}
    lost = {**peer, "state": "silent", "lag_ms": None, "agreement": None}
    seen.overview.replicas = lambda: {"instance": "ab", "joined": True, "in_flight": 8, "peers": [peer, lost]}
    own, first, second = seen.overview.glance()["replicas"]
    assert (own["address"], own["state"], own["in_flight"]) == ("this one (ab)", "joined", 8)
    assert (first["lag"], first["agreement"]) == ("1.2 ms", "98 %")
    assert (second["lag"], second["bar"]) == (None, None)


def test_reasons_and_degradations_that_go_on_are_shown() -> None:
    seen = Seen()
    seen.metrics.degraded("over", lasting=True)
    seen.metrics.degraded("goes-on", lasting=True)
    seen.metrics.recovered("over")
    shown = seen.overview.glance()
    assert (shown["reasons"], shown["degraded"]) == (["draining"], ["goes-on"])


def test_a_pool_with_other_endpoints_has_another_version() -> None:
    seen = Seen()
    first = seen.overview.version
    seen.history.look()
    assert seen.overview.version == first
    seen.pool.endpoints = (seen.pool.endpoints[0], endpoint(3))
    assert seen.overview.version != first
    assert len(seen.rows()) == 2


@pytest.mark.parametrize(("most", "scale"), [(0, 8), (8, 8), (9, 16), (16, 16), (1000, 1024)])
def test_charts_of_requests_have_a_scale_that_seldom_changes(most: int, scale: int) -> None:
    seen = Seen()
    seen.history.endpoint(seen.pool.endpoints[1]).requests[3] = most
    assert seen.overview.scale(seen.pool) == scale


def test_the_kv_chart_of_an_endpoint_begins_with_its_first_scrape() -> None:
    seen = Seen()
    pod = seen.pool.endpoints[0]
    assert seen.overview.charts(pod, 8)["kv"] == ""
    pod.load = Load(kv_usage=1.0, at=1.0)
    for _ in range(4):
        seen.history.look()
    assert seen.overview.charts(pod, 8)["kv"] == "58,0 59,0"
    assert len(seen.overview.charts(pod, 8)["requests"].split()) == 60
