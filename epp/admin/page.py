"""The index page: plain HTML, no script, nothing loaded from elsewhere. Every value is escaped where it enters."""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from typing import Any
from urllib.parse import quote

from epp.admin.recorder import Record, brief

PATHS = (
    ("/metrics", "Prometheus metrics"),
    ("/ready", "ready for traffic, or why not"),
    ("/healthz", "the process answers"),
    ("/endpoints", "endpoints with their load, as JSON"),
    ("/decisions?limit=100", "the last decisions with all reasons, as JSON"),
    ("/config", "the active pipeline"),
)
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 2rem; color: #222; background: #fff }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { padding: .2rem .8rem .2rem 0; text-align: left; border-bottom: 1px solid #ddd; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums }
h1 { font-size: 1.3rem } h2 { font-size: 1.05rem } .bad { color: #a00 }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #181818 } a { color: #8bf } .bad { color: #f88 } }
"""


def page(pools: Sequence[dict[str, Any]], records: Iterable[Record], reasons: Sequence[str]) -> str:
    """`pools` as `views.pools_view` gives them; `reasons`: why we are not ready, nothing when we are."""
    state = f'<p class="bad">Not ready: {escape("; ".join(reasons))}</p>' if reasons else "<p>Ready.</p>"
    links = "".join(f'<li><a href="{escape(path)}">{escape(path)}</a> {escape(what)}</li>' for path, what in PATHS)
    tables = "".join(_pool(pool) for pool in pools)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Warmpath</title>'
        f'<meta http-equiv="refresh" content="5"><style>{STYLE}</style></head><body>'
        f"<h1>Warmpath</h1>{state}{tables}{_decisions(records)}<ul>{links}</ul></body></html>\n"
    )


def _pool(pool: dict[str, Any]) -> str:
    rows = []
    for endpoint in pool["endpoints"]:
        load = endpoint["load"] or {}
        rows.append(
            _row(
                endpoint["name"],
                endpoint["address"],
                endpoint["in_flight"],
                load.get("waiting"),
                load.get("running"),
                _percent(load.get("kv_usage")),
                _percent(endpoint["predicted_hit_rate"]),
                _percent(endpoint["share"]),
                _events(endpoint["kv_events"]),
                _told(endpoint["plugins"]),
                _text(endpoint["load_age_seconds"], " s"),
            )
        )
    heads = (
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
    shadows = "".join(f"<p>{escape(_shadow(shadow))}</p>" for shadow in pool["shadows"])
    return f"<h2>Pool {escape(pool['namespace'])}/{escape(pool['name'])}</h2>{_table(heads, rows)}{shadows}"


def _shadow(shadow: dict[str, Any]) -> str:
    failed = f", failed {shadow['failed']} times" if shadow["failed"] else ""
    if not shadow["compared"]:
        return f"Shadow profile {shadow['profile']}: nothing compared yet{failed}."
    return (
        f"Shadow profile {shadow['profile']}: of {shadow['compared']} picks {_percent(shadow['agreed'])} the same; "
        f"on average its picks would have cost {shadow['regret_ms']:+.1f} ms{failed}."
    )


def _decisions(records: Iterable[Record]) -> str:
    rows = []
    for record in records:
        decision, response = record.decision, record.response
        at = datetime.fromtimestamp(decision.at, UTC).strftime("%H:%M:%S")
        link = f'<a href="/decisions/{quote(decision.request.id, safe="")}">{escape(decision.request.id[:40])}</a>'
        row = _row(
            at,
            f"{record.namespace}/{record.pool}",
            record.model,
            decision.request.tokens,
            decision.endpoint.name,
            brief(decision),
            "under way" if response is None else response.status or "no answer",
            None if record.ttft is None else f"{record.ttft * 1000:.0f} ms",
        )
        rows.append(row.replace("<tr>", f"<tr><td>{link}</td>", 1))
    heads = ("request", "at (UTC)", "pool", "model", "tokens", "endpoint", "why", "status", "first token")
    return f"<h2>Last decisions</h2>{_table(heads, rows)}"


def _table(heads: Iterable[str], rows: Sequence[str]) -> str:
    if not rows:
        return "<p>None.</p>"
    head = "".join(f"<th>{escape(text)}</th>" for text in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _row(*values: object) -> str:
    cells = (f'<td class="n">{v}</td>' if isinstance(v, int) else f"<td>{escape(_text(v))}</td>" for v in values)
    return f"<tr>{''.join(cells)}</tr>"


def _events(told: dict[str, Any] | None) -> str | None:
    """State of an endpoint's KV events, how old the last batch was, and how far what it said has proved true."""
    if told is None:
        return None
    lag = None if told["lag_seconds"] is None else f"{told['lag_seconds'] * 1000:.0f} ms behind"
    return ", ".join(filter(None, (told["state"], lag, f"trust {_percent(told['trust'])}")))


def _told(plugins: dict[str, dict[str, float]]) -> str | None:
    """What plugins say of an endpoint, each figure once."""
    return ", ".join(f"{name} {value:.3g}" for figures in plugins.values() for name, value in figures.items()) or None


def _percent(share: float | None) -> str:
    return _text(None if share is None else f"{share * 100:.0f} %")


def _text(value: object, unit: str = "") -> str:
    """A value for people; a dash where there is none. Long ones (a client chose the model's name) are cut."""
    return "–" if value is None else f"{str(value)[:200]}{unit}"
