"""What people are shown, as plain JSON-ready data; the page and the JSON paths show the same."""

from collections.abc import Sequence
from typing import Any, Protocol

from epp.plugin import Endpoint, Load
from epp.telemetry.metrics import Metrics
from epp.telemetry.pace import Pace
from epp.telemetry.series import ShadowSeries

SLICE = 20
"""Endpoints shown at once."""


class PoolView(Protocol):
    """`epp.pool.store.Pool`, as far as it is shown."""

    @property
    def name(self) -> str: ...
    @property
    def namespace(self) -> str: ...
    @property
    def endpoints(self) -> tuple[Endpoint, ...]: ...


async def pool_view(pool: PoolView, metrics: Metrics, now: float) -> dict[str, Any]:
    """A pool and its endpoints. `share` is of the decisions among the endpoints there are now, 0..1; `plugins` is what
    each plugin says of itself.
    """
    endpoints = pool.endpoints
    decisions = sum(metrics.endpoint(endpoint).decisions for endpoint in endpoints)
    figures = metrics.endpoint_statistics(pool)
    events = metrics.kv_events(pool.name)
    plugins = metrics.statistics(pool)
    shown = []
    pace = Pace()
    for number, e in enumerate(endpoints, 1):
        shown.append({**_endpoint(e, metrics, decisions, now, figures[e]), "kv_events": _events(events.get(e.name))})
        if not number % SLICE:
            await pace.rest()
    return {
        "name": pool.name,
        "namespace": pool.namespace,
        "plugins": plugins,
        "endpoints": shown,
        "shadows": shadows(metrics, pool),
    }


def shadows(metrics: Metrics, pool: PoolView) -> list[dict[str, Any]]:
    """What the pool's shadow profiles would have done."""
    return [_shadow(profile, series) for profile, series in metrics.shadows(pool.name).items()]


def _shadow(profile: str, series: ShadowSeries) -> dict[str, Any]:
    """`regret_ms`: by how much a pick of its would have cost more than ours, on average."""
    compared = series.same + series.other
    regret = (series.dearer - series.cheaper) / compared * 1000 if compared else None
    return {
        "profile": profile,
        "compared": compared,
        "failed": series.failed,
        "agreed": _rounded(series.same / compared if compared else None),
        "regret_ms": _rounded(regret),
    }


def _endpoint(
    endpoint: Endpoint, metrics: Metrics, decisions: int, now: float, figures: dict[str, dict[str, float]]
) -> dict[str, Any]:
    series = metrics.endpoint(endpoint)
    return {
        "name": endpoint.name,
        "address": endpoint.address,
        "labels": dict(endpoint.labels),
        "node": endpoint.node,
        "load": _load(endpoint.load),
        "load_age_seconds": None if endpoint.load.at is None else round(max(0.0, now - endpoint.load.at), 3),
        "in_flight": series.in_flight,
        "failures": series.failures,
        "decisions": series.decisions,
        "share": _rounded(series.decisions / decisions if decisions else None),
        "predicted_hit_rate": _rounded(series.predicted_hit_rate),
        "plugins": figures,
    }


def _events(figures: tuple[str, float | None, float] | None) -> dict[str, Any] | None:
    """None: the pool's configuration has no use for KV events."""
    if figures is None:
        return None
    state, lag, trust = figures
    return {"state": state, "lag_seconds": _rounded(lag), "trust": _rounded(trust)}


def _load(load: Load) -> dict[str, Any] | None:
    """The last scrape; None before the first."""
    if load.at is None:
        return None
    return {
        "waiting": load.waiting,
        "running": load.running,
        "kv_usage": load.kv_usage,
        "blocks": load.blocks,
        "block_size": load.block_size,
        "lora_running": sorted(load.lora_running),
        "lora_waiting": sorted(load.lora_waiting),
        "lora_max": load.lora_max,
        "prefix_hit_rate": _rounded(load.prefix_hits / load.prefix_queries if load.prefix_queries else None),
        "prompt_tokens": load.prompt_tokens,
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)


async def pools_view(pools: Sequence[PoolView], metrics: Metrics, now: float) -> list[dict[str, Any]]:
    return [await pool_view(pool, metrics, now) for pool in pools]
