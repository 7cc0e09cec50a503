import asyncio
from dataclasses import dataclass
from typing import Any

from epp.admin.views import PoolView, pool_view
from epp.plugin import Endpoint, Load
from epp.telemetry.metrics import Metrics
from epp.telemetry.series import KvEventFigures
from tests.support.scheduling.decisions import endpoint


@dataclass
class APool:
    name: str
    endpoints: tuple[Endpoint, ...]
    namespace: str = "default"


def view(pool: PoolView, metrics: Metrics, now: float) -> dict[str, Any]:
    return asyncio.run(pool_view(pool, metrics, now))


def test_an_endpoint_nothing_is_known_of_says_so() -> None:
    shown = view(APool("p", (endpoint(1),)), Metrics(), now=10.0)
    assert shown == {
        "name": "p",
        "namespace": "default",
        "plugins": {},
        "endpoints": [
            {
                "name": "default/pod-1",
                "address": "10.0.0.1:8000",
                "labels": {"zone": "a"},
                "node": "",
                "load": None,
                "load_age_seconds": None,
                "in_flight": 0,
                "failures": 0,
                "decisions": 0,
                "share": None,
                "predicted_hit_rate": None,
                "plugins": {},
                "kv_events": None,
            }
        ],
        "shadows": [],
    }


def test_what_plugins_say_of_an_endpoint_is_shown() -> None:
    pods, metrics = (endpoint(1), endpoint(2)), Metrics()
    metrics.add_endpoint_source(lambda: {"expected-ttft": {pods[1]: {"speed": 0.5}, endpoint(3): {"speed": 1}}}, "p")
    first, second = view(APool("p", pods), metrics, now=10.0)["endpoints"]
    assert (first["plugins"], second["plugins"]) == ({}, {"expected-ttft": {"speed": 0.5}})


def test_what_plugins_say_of_a_pool_is_shown_of_that_pool() -> None:
    metrics = Metrics()
    metrics.add_source(lambda: {"expected-ttft": {"step_seconds": 0.01}}, "p")
    metrics.add_source(lambda: {"expected-ttft": {"step_seconds": 0.02}}, "q")
    assert view(APool("p", ()), metrics, now=10.0)["plugins"] == {"expected-ttft": {"step_seconds": 0.01}}


def test_how_an_endpoints_kv_events_stand_is_shown() -> None:
    metrics = Metrics()
    reported = [("default/pod-1", "live", 0.0251234, 0.9), ("default/pod-2", "connecting", None, 1.0)]
    metrics.add_kv_events("p", lambda: KvEventFigures(reported, {}))
    metrics.add_kv_events("q", lambda: None)
    first, second, third = view(APool("p", (endpoint(1), endpoint(2), endpoint(3))), metrics, 10.0)["endpoints"]
    assert first["kv_events"] == {"state": "live", "lag_seconds": 0.0251, "trust": 0.9}
    assert second["kv_events"] == {"state": "connecting", "lag_seconds": None, "trust": 1.0}
    assert third["kv_events"] is None
    assert view(APool("q", (endpoint(1),)), metrics, 10.0)["endpoints"][0]["kv_events"] is None


def test_what_a_shadow_profile_would_have_done_is_shown() -> None:
    metrics = Metrics()
    metrics.shadow_compared("q", "other", agreed=True, regret=0.0, failed=False)
    metrics.shadow_compared("p", "new", agreed=False, regret=0.0, failed=True)
    assert view(APool("p", ()), metrics, now=0.0)["shadows"] == [
        {"profile": "new", "compared": 0, "failed": 1, "agreed": None, "regret_ms": None}
    ]
    for regret in (0.004, -0.001, 0.0):
        metrics.shadow_compared("p", "new", agreed=not regret, regret=regret, failed=False)
    assert view(APool("p", ()), metrics, now=0.0)["shadows"] == [
        {"profile": "new", "compared": 3, "failed": 1, "agreed": 0.3333, "regret_ms": 1.0}
    ]


def test_load_shares_and_hit_rates_are_shown() -> None:
    load = Load(waiting=3, kv_usage=0.5, lora_running=frozenset({"b", "a"}), prefix_queries=3, prefix_hits=1, at=8.0)
    pods, metrics = (endpoint(1, load), endpoint(2)), Metrics()
    for pod in (pods[0], pods[0], pods[0], pods[1]):
        metrics.request_decided(pod, "m", 0.001, 100, 25)
    metrics.request_finished(pods[0], "m", 200, 1.0)
    first, second = view(APool("p", pods), metrics, now=10.0)["endpoints"]
    assert (first["share"], second["share"]) == (0.75, 0.25)
    assert (first["decisions"], first["in_flight"], first["predicted_hit_rate"]) == (3, 2, 0.25)
    assert first["load_age_seconds"] == 2.0
    assert first["load"]["waiting"] == 3
    assert first["load"]["lora_running"] == ["a", "b"]
    assert first["load"]["prefix_hit_rate"] == 0.3333
