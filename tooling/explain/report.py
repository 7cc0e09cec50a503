"""An explanation as a table for people."""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from epp.telemetry.text import printable

_MOST: Final = 40
"""Endpoints shown of a profile, the best first."""


def report(status: int, said: Mapping[str, Any]) -> RenderableType:
    """`said` as the picker answers: `pool`, `waiting` and `decision`, or an `error`."""
    if status != 200:
        error = said["error"]
        where = f" ({printable(str(error['param']))})" if error.get("param") else ""
        return Text(f"refused with {status}{where}: {printable(str(error.get('message', '')))}", "red")
    decision = said["decision"]
    parts: list[RenderableType] = [Text("\n".join(_summary(said, decision)))]
    for profile in decision["profiles"]:
        parts.append(_table(profile))
        parts += [Text(line) for line in _notes(profile)]
    return Group(*parts)


def _summary(said: Mapping[str, Any], decision: Mapping[str, Any]) -> Iterator[str]:
    model = printable(str(decision["model"]))
    yield f"{decision['tokens']} tokens for {model or 'no model'}, pool {printable(str(said['pool']))}"
    yield f"goes to {printable(decision['endpoint'])} ({printable(decision['address'])})"
    for stage in ("prefill", "encode"):
        if decision.get(stage):
            yield f"{stage} at {printable(', '.join(decision[stage]))}"
    if decision.get("ways_ms"):
        yield "ways: " + ", ".join(f"{printable(way)} {ms:.1f} ms" for way, ms in decision["ways_ms"].items())
    if said.get("waiting"):
        yield f"{said['waiting']} requests wait in flow control before it"


def _table(profile: Mapping[str, Any]) -> Table:
    stage = f", {profile['stage']}" if profile.get("stage") else ""
    table = Table(title=f"profile {printable(profile['profile'])}{stage}", title_justify="left")
    rows = profile["endpoints"]
    order = {name: place for place, name in enumerate(profile["picks"])}
    rows = sorted(rows, key=lambda row: order.get(row["endpoint"], len(order)))[:_MOST]
    billed = any("bill_ms" in row for row in rows)
    terms = (
        [term for term in (rows[0].get("bill_ms") or ()) if any(row["bill_ms"][term] for row in rows)] if billed else []
    )
    scorers = [] if billed and len(rows[0]["scores"]) == 1 else [*rows[0]["scores"]] if rows else []
    table.add_column("endpoint", overflow="fold")
    for name in (*(["cost ms"] if billed else []), *terms, *scorers, *(["total"] if scorers else [])):
        table.add_column(printable(name), justify="right", overflow="fold")
    for row in rows:
        cells = [printable(row["endpoint"])]
        cells += [f"{row['cost_ms']:.1f}"] if billed else []
        cells += [f"{row['bill_ms'][term]:.1f}" for term in terms]
        cells += [f"{row['scores'][name]['score']:.3f} x {row['scores'][name]['weight']:g}" for name in scorers]
        cells += [f"{row['total']:.3f}"] if scorers else []
        table.add_row(*cells, style="bold" if row["endpoint"] == profile["picks"][0] else "")
    return table


def _notes(profile: Mapping[str, Any]) -> Iterator[str]:
    if (more := len(profile["endpoints"]) - _MOST) > 0:
        yield f"and {more} more"
    for each in profile["dropped"]:
        names = ", ".join(each["endpoints"][:_MOST])
        yield f"dropped by {printable(each['filter'])}: {printable(names)}"
