"""What a page shows of a decision: each profile's endpoints, the best first, with their bills as bars.

The page of one decision reads its explanation as JSON has it (`Decision.as_dict`), as explanations of requests come. A
list reads decisions themselves, and of these the best endpoints only: it is drawn anew each second.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Final, NamedTuple

from markupsafe import Markup

from epp.admin.drawing import Term, bill_bar
from epp.scheduling.decision import Decision, ProfileRun
from epp.telemetry.text import printable

MOST: Final = 100
"""Endpoints of a profile on a decision's own page."""
BEST: Final = 4
"""In a list of decisions."""
NOTHING_S: Final = 5e-7
"""Seconds of a bill that are none in milliseconds with three digits, as JSON has them."""
LONGEST: Final = 200
"""Characters of a name: a client chose the model's."""
MEANING: Final = 400
"""Of what a term is."""


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
    every = {term: _term(term, number, str(meanings.get(term, ""))) for term, number in numbers.items()}
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
        "bar": None if bill is None else bill_bar([(every[term], ms) for term, ms in bill.items()], most),
        "terms": [] if bill is None else [f"{bill[term]:.1f}" if bill[term] else "0" for term in terms],
        "scores": [f"{row['scores'][each]['score']:.3f}" for each in scorers],
        "total": f"{row['total']:.3f}" if scorers or bill is None else "",
        "predicted": None if predicted is None else milliseconds(predicted["ttft_ms"]),
    }


def _cost(row: Mapping[str, Any]) -> float:
    return float(row.get("cost_ms", 0.0))


def _dropped(each: Mapping[str, Any]) -> str:
    shown = ", ".join(map(name, each["endpoints"][:20]))
    more = len(each["endpoints"]) - 20
    return f"{name(each['filter'])}: {shown}{f' and {more} more' if more > 0 else ''}"


class Row(NamedTuple):
    """An endpoint in a list of decisions. `figure`: its cost, or its score where there is no bill and so no bar."""

    name: str
    chosen: bool
    bar: Markup
    figure: str


class Best(NamedTuple):
    """Of a decision: its best endpoints, the terms that one of them pays, and how many endpoints are not shown."""

    rows: Sequence[Row]
    terms: Sequence[Term]
    others: int


def best(decision: Decision) -> Best | None:
    """Of the profile that a list shows; None: no profile ran."""
    if not decision.runs:
        return None
    run, chosen = decision.last_run, decision.endpoint
    endpoints = run.endpoints
    places = sorted(range(len(endpoints)), key=run.totals.__getitem__, reverse=True)[:BEST]
    for at in chain(places, range(len(endpoints))):  # most often it is among the first
        if endpoints[at] is chosen:
            places = [at, *[place for place in places if place != at][: BEST - 1]]
            break
    terms, shown = _bars(run, places)
    rows = [
        Row(name(endpoints[at].name), endpoints[at] is chosen, drawn, figure)
        for at, (drawn, figure) in zip(places, shown, strict=True)
    ]
    return Best(rows, terms, run.others + len(endpoints) - len(places))


def _bars(run: ProfileRun, places: Sequence[int]) -> tuple[Sequence[Term], Sequence[tuple[Markup, str]]]:
    """The terms that an endpoint at `places` pays, and of each of these its bar and its cost, or else its score."""
    billed = next((scored for scored in reversed(run.scored) if scored.bills), None)
    if billed is None:
        return (), [(Markup(), f"{run.totals[at]:.3f}") for at in places]
    meanings, bills = billed.meanings, [billed.bills[at] for at in places]
    every = [_term(term, number, str(meanings.get(term, ""))) for number, term in enumerate(billed.terms)]
    terms = [term for term, *paid in zip(every, *bills, strict=True) if max(paid, default=0.0) > NOTHING_S]
    costs = [sum(bill) * 1000 for bill in bills]
    most = max(costs, default=0.0)
    shown = [
        (
            bill_bar([(term, s * 1000) for term, s in zip(every, bill, strict=True) if s > NOTHING_S], most),
            milliseconds(cost),
        )
        for bill, cost in zip(bills, costs, strict=True)
    ]
    return terms, shown


@lru_cache(256)
def _term(term: str, number: int, meaning: str) -> Term:
    """As it is shown."""
    return Term.of(name(term), number, printable(meaning, MEANING))
