"""What a page shows of a decision: each profile's endpoints, the best first, with their bills as bars.

It reads a decision's explanation as JSON has it (`Decision.as_dict`), as explanations of requests come; of decisions in
a list only the best endpoints are written out at all.
"""

from collections.abc import Mapping, Sequence
from heapq import nlargest
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from epp.admin.drawing import COLOURS, Part, bar
from epp.scheduling.decision import Decision, meanings_of, row_as_dict
from epp.telemetry.text import printable

MOST: Final = 100
"""Endpoints of a profile on a decision's own page."""
BEST: Final = 4
"""In a list of decisions."""
LONGEST: Final = 200
"""Characters of a name: a client chose the model's."""
MEANING: Final = 400
"""Of what a term is."""


class Term(NamedTuple):
    """Of bills: its name, the number of its colour, and what it is; "": its plugin does not say."""

    name: str
    colour: int
    meaning: str = ""


def name(text: object) -> str:
    """What somebody else chose, for a page."""
    return printable(str(text), LONGEST)


def milliseconds(value: float) -> str:
    return f"{value:.1f} ms" if value < 100 else f"{value:,.0f} ms"


def profile_view(profile: Mapping[str, Any], chosen: str) -> dict[str, Any]:
    """One profile's run. `chosen`: the endpoint that the request got."""
    order = {each: place for place, each in enumerate(profile["picks"])}
    ranked = sorted(profile["endpoints"], key=lambda row: (order.get(row["endpoint"], len(order)), -row["total"]))
    rows = ranked[:MOST]
    most = max((_cost(row) for row in rows), default=0.0)
    numbers = {term: number for number, term in enumerate(rows[0].get("bill_ms", ()))} if rows else {}
    terms = [term for term in numbers if any(row["bill_ms"][term] for row in rows)]
    meanings = profile.get("terms", {})
    every = {
        term: Term(name(term), number % COLOURS, printable(str(meanings.get(term, "")), MEANING))
        for term, number in numbers.items()
    }
    scorers = [*rows[0]["scores"]] if rows else []
    if numbers and len(scorers) == 1:  # the bill says it all
        scorers = []
    return {
        "name": name(profile["profile"]),
        "stage": profile.get("stage", ""),
        "terms": [every[term] for term in terms],
        "scorers": [*map(name, scorers)],
        "rows": [_row(row, chosen, every, most, terms, scorers) for row in rows],
        "more": len(profile["endpoints"]) - len(rows),
        "others": profile.get("others", 0),
        "dropped": [_dropped(each) for each in profile["dropped"] if each["endpoints"]],
    }


def _row(
    row: Mapping[str, Any],
    chosen: str,
    every: Mapping[str, Term],
    most: float,
    terms: Sequence[str],
    scorers: Sequence[str],
) -> dict[str, Any]:
    bill = row.get("bill_ms")
    predicted = row.get("predicted")
    return {
        "name": name(row["endpoint"]),
        "chosen": row["endpoint"] == chosen,
        "cost": None if bill is None else milliseconds(row["cost_ms"]),
        "bar": None if bill is None else _bar(bill, every, most),
        "terms": [] if bill is None else [f"{bill[term]:.1f}" if bill[term] else "0" for term in terms],
        "scores": [f"{row['scores'][each]['score']:.3f}" for each in scorers],
        "total": f"{row['total']:.3f}" if scorers or bill is None else "",
        "predicted": None if predicted is None else milliseconds(predicted["ttft_ms"]),
    }


def _cost(row: Mapping[str, Any]) -> float:
    return float(row.get("cost_ms", 0.0))


def _bar(bill: Mapping[str, float], every: Mapping[str, Term], most: float) -> Markup:
    label = ", ".join([f"{every[term].name} {ms:.1f}" for term, ms in bill.items() if ms > 0])
    parts = [Part(ms, every[term].colour, _said(every[term], ms)) for term, ms in bill.items()]
    return bar(parts, most, f"{label} ms" if label else "free")


def _said(term: Term, ms: float) -> str:
    return f"{term.name} {ms:.1f} ms" + (f": {term.meaning}" if term.meaning else "")


def _dropped(each: Mapping[str, Any]) -> str:
    shown = ", ".join(map(name, each["endpoints"][:20]))
    more = len(each["endpoints"]) - 20
    return f"{name(each['filter'])}: {shown}{f' and {more} more' if more > 0 else ''}"


def best(decision: Decision) -> dict[str, Any] | None:
    """The profile that a list shows, with its best endpoints only; None: no profile ran."""
    if not decision.runs:
        return None
    run = decision.last_run
    places = nlargest(BEST, range(len(run.endpoints)), key=run.totals.__getitem__)
    chosen = decision.endpoint
    here = [at for at, endpoint in enumerate(run.endpoints) if endpoint is chosen]
    if here and here[0] not in places:
        places = [*here, *places[: BEST - 1]]
    profile = {
        "profile": run.profile,
        "stage": run.stage,
        "terms": meanings_of(run),
        "picks": [chosen.name],
        "endpoints": [row_as_dict(run, at) for at in places],
        "dropped": [],
        "others": run.others + len(run.endpoints) - len(places),
    }
    return profile_view(profile, chosen.name)
