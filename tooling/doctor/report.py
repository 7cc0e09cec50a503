"""Findings for people and for programs."""

import json
from collections.abc import Sequence

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from epp.telemetry.text import printable
from tooling.doctor.finding import Finding


def summary(examined: Sequence[str], findings: Sequence[Finding]) -> str:
    """One line."""
    problems = sum(finding.level == "problem" for finding in findings)
    return f"{len(examined)} examined: {_some(problems, 'problem')}, {_some(len(findings) - problems, 'hint')}"


def _some(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"


def table(examined: Sequence[str], findings: Sequence[Finding]) -> RenderableType:
    """A row for each finding, endpoint by endpoint; one for each that has none; and the summary."""
    rows = Table(title="warmpath doctor", title_justify="left", expand=True)
    rows.add_column("what", overflow="fold")
    rows.add_column("check", no_wrap=True)
    rows.add_column("found", ratio=3, overflow="fold")
    rows.add_column("what fixes it", ratio=3, overflow="fold")
    for subject in examined:
        rows.add_section()
        own = [finding for finding in findings if finding.subject == subject]
        if not own:
            rows.add_row(Text(printable(subject)), Text("ok", "green"), "", "")
        for finding in own:
            style = "red" if finding.level == "problem" else "yellow"
            name = Text(printable(subject) if finding is own[0] else "")
            found, fix = Text(printable(finding.found)), Text(printable(finding.fix))
            rows.add_row(name, Text(finding.check, style), found, fix)
    return Group(rows, Text(summary(examined, findings)))


def as_json(examined: Sequence[str], findings: Sequence[Finding]) -> str:
    """`{ok, summary, examined: [name], findings: [{subject, check, level, found, fix}]}`."""
    said = {
        "ok": not any(finding.level == "problem" for finding in findings),
        "summary": summary(examined, findings),
        "examined": list(examined),
        "findings": [msgspec.to_builtins(finding) for finding in findings],
    }
    return json.dumps(said, indent=2)
