"""The index page: plain HTML, no script, nothing loaded from elsewhere. The template escapes every value."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from epp.admin.recorder import Record, brief

Cells = tuple[object, ...]
"""Of a table's row, in the order of its heads; integers stand at the right."""

PATHS = (
    ("/metrics", "Prometheus metrics"),
    ("/ready", "ready for traffic, or why not"),
    ("/healthz", "the process answers"),
    ("/endpoints", "endpoints with their load, as JSON"),
    ("/decisions?limit=100", "the last decisions with all reasons, as JSON"),
    ("/config", "the active pipeline"),
)
POOL_HEADS = (
    "endpoint",
    "address",
    "ours",
    "queue",
    "running",
    "KV use",
    "hits predicted",
    "share",
    "KV events",
    "plugins say",
    "scraped",
)
DECISION_HEADS = ("request", "at (UTC)", "pool", "model", "tokens", "endpoint", "why", "status", "first token")


def page(pools: Sequence[dict[str, Any]], records: Iterable[Record], reasons: Sequence[str]) -> str:
    """`pools` as `views.pools_view` gives them; `reasons`: why we are not ready, nothing when we are."""
    return _TEMPLATE.render(
        pools=[
            {
                **pool,
                "rows": _endpoints(pool),
                "shadows": [*map(_shadow, pool["shadows"])],
                "said": [f"{name}: {said}" for name, figures in pool["plugins"].items() if (said := _figures(figures))],
            }
            for pool in pools
        ],
        decisions=[_decision(record) for record in records],
        reasons=reasons,
        paths=PATHS,
        pool_heads=POOL_HEADS,
        decision_heads=DECISION_HEADS,
    )


def _endpoints(pool: dict[str, Any]) -> list[Cells]:
    rows: list[Cells] = []
    for endpoint in pool["endpoints"]:
        load = endpoint["load"] or {}
        rows.append(
            (
                endpoint["name"],
                endpoint["address"],
                endpoint["in_flight"],
                load.get("waiting"),
                load.get("running"),
                _percent(load.get("kv_usage")),
                _percent(endpoint["predicted_hit_rate"]),
                _percent(endpoint["share"]),
                _events(endpoint["kv_events"]),
                _deliver(endpoint["plugins"]),
                _text(endpoint["load_age_seconds"], " s"),
            )
        )
    return rows


def _shadow(shadow: dict[str, Any]) -> str:
    failed = f", failed {shadow['failed']} times" if shadow["failed"] else ""
    if not shadow["compared"]:
        return f"Shadow profile {shadow['profile']}: nothing compared yet{failed}."
    return (
        f"Shadow profile {shadow['profile']}: of {shadow['compared']} picks {_percent(shadow['agreed'])} the same; "
        f"on average its picks would have cost {shadow['regret_ms']:+.1f} ms{failed}."
    )


def _decision(record: Record) -> Cells:
    decision, response = record.decision, record.response
    name = decision.request.id
    link = Markup('<a href="/decisions/{}">{}</a>').format(quote(name, safe=""), name[:40])
    return (
        link,
        datetime.fromtimestamp(decision.at, UTC).strftime("%H:%M:%S"),
        f"{record.namespace}/{record.pool}",
        record.model,
        decision.request.tokens,
        decision.endpoint.name,
        brief(decision),
        "under way" if response is None else response.status or "no answer",
        None if record.ttft is None else f"{record.ttft * 1000:.0f} ms",
    )


def _events(figures: dict[str, Any] | None) -> str | None:
    """State of an endpoint's KV events, how old the last batch was, and how far what it said has proved true."""
    if figures is None:
        return None
    lag = None if figures["lag_seconds"] is None else f"{figures['lag_seconds'] * 1000:.0f} ms behind"
    return ", ".join(filter(None, (figures["state"], lag, f"trust {_percent(figures['trust'])}")))


def _deliver(plugins: dict[str, dict[str, float]]) -> str | None:
    """What plugins say of an endpoint, each figure once."""
    return ", ".join(filter(None, map(_figures, plugins.values()))) or None


def _figures(figures: dict[str, float]) -> str:
    return ", ".join(f"{name} {value:.3g}" for name, value in figures.items())


def _percent(share: float | None) -> str:
    return _text(None if share is None else f"{share * 100:.0f} %")


def _text(value: object, unit: str = "") -> str:
    """A value for people; a dash where there is none. Long ones (a client chose the model's name) are cut."""
    if isinstance(value, Markup):
        return value
    return "–" if value is None else f"{str(value)[:200]}{unit}"


_TEMPLATES: Final = Environment(
    loader=PackageLoader("epp.admin"), autoescape=True, undefined=StrictUndefined, keep_trailing_newline=True
)
_TEMPLATES.filters["text"] = _text
_TEMPLATE: Final = _TEMPLATES.get_template("page.html")
