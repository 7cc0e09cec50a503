"""Results for people and for programs."""

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from epp.telemetry.text import printable
from tooling.conformance.suite import Result, failed

_STYLE: Final = {"pass": "green", "skip": "yellow", "fail": "red"}


def passed(results: Sequence[Result]) -> bool:
    """No MUST is broken."""
    return not failed(results, "MUST")


def summary(results: Sequence[Result]) -> str:
    """One line."""
    counts = Counter(result.outcome for result in results)
    musts, shoulds = len(failed(results, "MUST")), len(failed(results, "SHOULD"))
    return f"{counts['pass']} passed, {counts['skip']} skipped, {musts} MUST and {shoulds} SHOULD failed"


def table(results: Sequence[Result], target: str) -> RenderableType:
    """A row for each case, and the summary."""
    rows = Table(title=Text(printable(f"EPP conformance of {target}")), title_justify="left", expand=True)
    rows.add_column("case", no_wrap=True)
    rows.add_column("what must hold", ratio=3)
    rows.add_column("level", no_wrap=True)
    rows.add_column("result", no_wrap=True)
    rows.add_column("detail", ratio=4)
    group = ""
    for result in results:
        case = result.case
        if case.group != group:
            group = case.group
            rows.add_section()
        style = "yellow" if result.outcome == "fail" and case.level == "SHOULD" else _STYLE[result.outcome]
        outcome, detail = Text(result.outcome, style), Text(printable(result.detail))
        rows.add_row(case.id, Text(case.title), case.level, outcome, detail)
    return Group(rows, Text(summary(results)))


def as_json(results: Sequence[Result], target: str) -> str:
    """`{target, passed, summary, cases: [{id, group, title, level, source, how, result, detail}]}`."""
    cases: list[dict[str, Any]] = []
    for result in results:
        fields = {name: value for name, value in vars(result.case).items() if name != "check"}
        cases.append({**fields, "result": result.outcome, "detail": result.detail})
    said = {"target": target, "passed": passed(results), "summary": summary(results), "cases": cases}
    return json.dumps(said, indent=2)
