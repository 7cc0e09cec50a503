"""Pages for people, drawn here: HTML whose every value is escaped, a style sheet and a script beside it.

They can be read without the script, which only refreshes, sorts and filters. Nothing is loaded from elsewhere.
"""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from html import escape
from importlib.resources import files
from time import gmtime, strftime
from typing import Any, Final, NamedTuple
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from epp.admin.bills import Best, best, milliseconds, name, profile_view
from epp.admin.drawing import HEIGHT, Term
from epp.admin.history import ENDPOINT_STEPS
from epp.admin.overview import COLUMNS, Column, Value
from epp.admin.recorder import Record, brief

HELD: Final = 200
"""Decisions whose drawn rows are kept."""
_WATCHED: Final = {"sampled": "watched, as one of a sample", "asked": "watched, since a plugin asked to see it"}
STATIC: Final[Mapping[str, str]] = {"page.css": "text/css", "page.js": "text/javascript", "icon.svg": "image/svg+xml"}


@lru_cache
def static(file: str) -> bytes:
    """Of `STATIC`."""
    return files("epp.admin").joinpath("static", file).read_bytes()


class Live(NamedTuple):
    """Where a page's script asks for changes, and of what it has: `version` and `step` as of `Overview`."""

    path: str
    version: str = ""
    step: int = 0


NOT_LIVE: Final = Live("")


class Drawn(NamedTuple):
    """Decisions: the terms of their bills with what these are, and the table."""

    terms: Markup
    table: Markup


def overview(
    glance: Mapping[str, Any],
    tables: Sequence[Markup],
    said: Sequence[Mapping[str, Any]],
    decisions: Drawn,
    live: Live,
) -> str:
    """The first page. `glance`: as `Overview.glance`; `said`: of each pool what plugins and shadow profiles report."""
    pools = [
        {**pool, **about, "part": _PARTS.pool(pool), "table": table}
        for pool, table, about in zip(glance["pools"], tables, said, strict=True)
    ]
    page = _TEMPLATES.get_template("overview.html")
    return page.render(title="Pools", here="/", live=live, state=_PARTS.state(glance), pools=pools, decisions=decisions)


def parts(glance: Mapping[str, Any], decisions: Drawn) -> dict[str, str]:
    """What of the first page is drawn anew each second, by its id."""
    pools = {f"part{number}": str(_PARTS.pool(pool)) for number, pool in enumerate(glance["pools"])}
    return {"state": str(_PARTS.state(glance)), **pools, **decision_parts(decisions)}


def decision_parts(decisions: Drawn) -> dict[str, str]:
    """The same of decisions."""
    return {"terms": str(decisions.terms), "decisions": str(decisions.table)}


def said(statistics: Mapping[str, Mapping[str, float]], shadows: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """In words: what plugins report of a pool, and what its shadow profiles would have done."""
    lines = (f"{name(plugin)}: {', '.join(_figures(figures))}" for plugin, figures in statistics.items() if figures)
    return {"said": [*lines], "shadows": [*map(_shadow, shadows)]}


def _figures(figures: Mapping[str, float]) -> Iterable[str]:
    return (f"{name(figure)} {value:.3g}" for figure, value in figures.items())


def _shadow(shadow: Mapping[str, Any]) -> str:
    failed = f", failed {shadow['failed']} times" if shadow["failed"] else ""
    if not shadow["compared"]:
        return f"Shadow profile {name(shadow['profile'])}: nothing compared yet{failed}."
    return (
        f"Shadow profile {name(shadow['profile'])}: of {shadow['compared']} picks {shadow['agreed'] * 100:.0f} % the "
        f"same; on average its picks would have cost {shadow['regret_ms']:+.1f} ms{failed}."
    )


# --- endpoints


def endpoint_rows(some: Iterable[tuple[Mapping[str, str], Sequence[Value], Mapping[str, str]]]) -> Markup:
    """Rows of the table: what an endpoint is, its values by `COLUMNS`, points of its charts."""
    return Markup(_ROW.render(some=[(identity, _cells(row, charts)) for identity, row, charts in some]))


def _cells(row: Sequence[Value], charts: Mapping[str, str]) -> Markup:
    """Without a template, which would take three times as long for hundreds of endpoints."""
    cells = []
    for column, value in zip(COLUMNS, row, strict=True):
        if column.chart:
            cells.append(_SPARK.format(column.chart, column.about, charts[column.chart]))
            continue
        safe = "" if value is None else escape(value) if isinstance(value, str) else str(value)
        share = _SHARE.format(safe or 0) if column.bar else ""
        shown = "–" if value is None else f"{safe}{column.unit}"
        cells.append(f'<td class="n" data-v="{safe}">{share}<span>{shown}</span></td>')
    return Markup("".join(cells))


_SPARK: Final = (
    f'<td><svg class="spark {{}}" viewBox="0 0 {ENDPOINT_STEPS - 1} {HEIGHT}" preserveAspectRatio="none" role="img" '
    'aria-label="{}"><polyline points="{}"/></svg></td>'
)
_SHARE: Final = (
    '<svg class="share" viewBox="0 0 100 8" preserveAspectRatio="none" aria-hidden="true"><rect width="{}" height="8"/>'
    "</svg>"
)


def endpoint_table(number: int, scale: int, rows: Iterable[Markup], columns: Sequence[Column] = COLUMNS) -> Markup:
    """Of a pool; `scale`: requests at the upper edge of their charts."""
    template = _TEMPLATES.get_template("endpoints.html")
    return Markup(template.render(number=number, scale=scale, rows=rows, columns=columns))


# --- decisions


class DecisionTable:
    """Rows of decisions, each drawn once while it is under way and once when it has ended."""

    def __init__(self) -> None:
        self._drawn: dict[Record, tuple[bool, Markup, Sequence[Term]]] = {}

    def drawn(self, records: Iterable[Record]) -> Drawn:
        shown = [(record, self._row(record)) for record in records]
        terms = {term.name: term for _, (_, _, found) in shown for term in found}
        if len(self._drawn) > HELD:
            self._drawn = dict(shown)
        in_order = sorted(terms.values(), key=lambda term: term.colour)
        return Drawn(_legend(tuple(in_order)), Markup(_PARTS.decisions([markup for _, (_, markup, _) in shown])))

    def _row(self, record: Record) -> tuple[bool, Markup, Sequence[Term]]:
        ended = record.response is not None
        known = self._drawn.get(record)
        if known is None or known[0] != ended:
            shown = best(record.decision)
            markup = _decision(record, brief(record.decision) if shown is None else shown)
            known = self._drawn[record] = ended, markup, shown.terms if shown is not None else ()
        return known


@lru_cache(16)
def _legend(terms: Sequence[Term]) -> Markup:
    """Seldom another one."""
    return Markup(_PARTS.terms(terms))


def _decision(record: Record, shown: Best | str) -> Markup:
    """Without a template, as there may be new ones each second. `shown`: its best endpoints, or else a line."""
    decision, response = record.decision, record.response
    request = decision.request
    status = "under way" if response is None else str(response.status or "no answer")
    ttft = "" if record.ttft is None else milliseconds(record.ttft * 1000)
    lines = [f"{stage}: {', '.join(map(name, names))}" for stage, names in decision.beside.items()]
    return Markup(
        f'<tr><td class="when">{_time(decision.at)}<br><a href="{_link(request.id)}">{escape(name(request.id)[:40])}'
        f"</a></td><td>{escape(name(record.model))}<br>"
        f"<small>{escape(name(f'{record.namespace}/{record.pool}'))}</small></td>"
        f'<td class="n">{request.tokens}</td><td class="n">{status}<br><small>{ttft}</small></td>\n'
        f"<td>{escape(shown) if isinstance(shown, str) else _bills(shown)}"
        f"{''.join([f'<small>{escape(line)}</small> ' for line in lines])}</td></tr>\n"
    )


def _bills(shown: Best) -> str:
    rows = [
        f'{CHOSEN if row.chosen else OTHER}{escape(row.name)}</span>{row.bar}<span class="n">{row.figure}</span></li>'
        for row in shown.rows
    ]
    more = f"<small>and {shown.others} more</small>" if shown.others > 0 else ""
    return f'<ol class="bills">{"".join(rows)}</ol>{more}'


CHOSEN: Final = '<li class="chosen"><span><span class="hidden">chosen: </span>'
OTHER: Final = "<li><span>"


def _link(request_id: str) -> str:
    return f"/decisions/{quote(request_id, safe='')}"


def _time(at: float) -> str:
    return strftime("%H:%M:%S", gmtime(at))


def decisions(drawn: Drawn, limit: int, live: str) -> str:
    page = _TEMPLATES.get_template("decisions.html")
    return page.render(title="Decisions", here="/decisions", live=Live(live), decisions=drawn, limit=limit)


def decision(shown: Mapping[str, Any]) -> str:
    """`shown`: as `Record.as_dict`."""
    return _TEMPLATES.get_template("decision.html").render(
        title="Decision",
        here="",
        live=NOT_LIVE,
        heading=f"Request {name(shown['request_id'])}",
        facts=[("pool", name(f"{shown['namespace']}/{shown['pool']}")), *_facts(shown), *_outcome(shown)],
        profiles=_profiles(shown),
        json=f"{_link(shown['request_id'])}?format=json",
    )


def explain(form: Mapping[str, Any], said: Mapping[str, Any] | None = None, error: str = "") -> str:
    """The form with what was asked, and the answer: `said` as `POST /explain` answers, or the error in words."""
    found = None if said is None else said["decision"]
    facts = []
    if said is not None and found is not None:
        waiting = [("wait in flow control before it", said["waiting"])] if said["waiting"] else []
        facts = [("pool", name(said["pool"])), *_facts(found), *waiting]
    return _TEMPLATES.get_template("explain.html").render(
        title="Explain",
        here="/explain",
        live=NOT_LIVE,
        error=error,
        heading="" if found is None else f"It would go to {name(found['endpoint'])}",
        facts=facts,
        profiles=[] if found is None else _profiles(found),
        **form,
    )


def _profiles(shown: Mapping[str, Any]) -> list[dict[str, Any]]:
    runs = [*shown["profiles"]]
    if (shadow := shown.get("shadow")) is not None and "run" in shadow:
        runs.append(shadow["run"])
    views = [profile_view(run, shown["endpoint"] if not run.get("stage") else run["picks"][0]) for run in runs]
    optional = (("predicted", "predicted"), ("totals", "total"))
    return [{**view, **{key: any(row[of] for row in view["rows"]) for key, of in optional}} for view in views]


def _facts(shown: Mapping[str, Any]) -> Iterable[tuple[str, object]]:
    yield "model", name(shown["model"]) or "none"
    yield "tokens", shown["tokens"]
    yield "endpoint", f"{name(shown['endpoint'])} ({name(shown['address'])})"
    if shown["fallbacks"]:
        yield "then", ", ".join(map(name, shown["fallbacks"]))
    for stage in ("prefill", "encode"):
        if shown.get(stage):
            yield stage, ", ".join(map(name, shown[stage]))
    if shown.get("ways_ms"):
        yield "ways", ", ".join(f"{name(way)} {milliseconds(ms)}" for way, ms in shown["ways_ms"].items())
    if shown.get("priority"):
        yield "priority", shown["priority"]
    if shown.get("waited_ms"):
        yield "waited in flow control", milliseconds(shown["waited_ms"])
    if shown.get("watched"):
        yield "answer", _WATCHED[shown["watched"]]
    if shown.get("predicted"):
        predicted = shown["predicted"]
        yield "predicted", f"TTFT {milliseconds(predicted['ttft_ms'])}, TPOT {milliseconds(predicted['tpot_ms'])}"
    if shown.get("opaque"):
        yield "not read", name(shown["opaque"])


def _outcome(shown: Mapping[str, Any]) -> Iterable[tuple[str, object]]:
    yield "decided", f"at {_time(shown['at'])} UTC, in {shown['decision_ms']:.2f} ms"
    if shown["predicted_cached_tokens"] is not None:
        yield "predicted in its cache", f"{shown['predicted_cached_tokens']} tokens"
    outcome = shown["outcome"]
    if outcome is None:
        yield "outcome", "under way"
        return
    times = ((label, outcome[key]) for label, key in (("TTFT", "ttft_ms"), ("TPOT", "tpot_ms"), ("all", "duration_ms")))
    told = [f"{label} {milliseconds(ms)}" for label, ms in times if ms is not None]
    yield "outcome", ", ".join((str(outcome["status"] or "no answer"), *told))
    if outcome["usage"]:
        yield "usage", ", ".join(f"{key} {value}" for key, value in outcome["usage"].items() if value >= 0)


_TEMPLATES: Final = Environment(
    loader=PackageLoader("epp.admin"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
)
_ROW: Final = _TEMPLATES.get_template("row.html")
_PARTS: Final[Any] = _TEMPLATES.get_template("parts.html").module
