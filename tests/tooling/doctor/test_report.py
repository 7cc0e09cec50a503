"""Findings as a table and as JSON."""

import json

from rich.console import Console

from tooling.doctor.finding import hint, problem
from tooling.doctor.report import as_json, table

FINDINGS = [
    problem("pod-a", "kv-events", "it publishes none [red]", "--kv-events-config X"),
    hint("pod-a", "tokenize", "404", "--tokenizer"),
]


def test_a_table_has_a_row_for_each_finding_and_for_who_has_none() -> None:
    console = Console(width=120)
    with console.capture() as captured:
        console.print(table(["pod-a", "pod-b"], FINDINGS))
    text = captured.get()
    assert text.count("pod-a") == 1
    assert "[red]" in text
    assert "--kv-events-config X" in text
    assert " ok " in text.split("pod-b")[1]
    assert "2 examined: 1 problem, 1 hint" in text


def test_json_has_all_of_it() -> None:
    said = json.loads(as_json(["pod-a"], FINDINGS))
    assert (said["ok"], said["examined"], said["summary"]) == (False, ["pod-a"], "1 examined: 1 problem, 1 hint")
    assert said["findings"][0] == {
        "subject": "pod-a",
        "check": "kv-events",
        "level": "problem",
        "found": "it publishes none [red]",
        "fix": "--kv-events-config X",
    }
    assert json.loads(as_json(["pod-a"], FINDINGS[1:]))["ok"] is True


def test_what_an_engine_answers_does_not_steer_the_terminal() -> None:
    finding = problem("pod-\x9bA", "model", "it serves \x1b[2J\u202e", "--model \x1b]0;x\x07")
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table(["pod-\x9bA", "\x1b[31mb"], [finding]))
    for shown in ("pod-\\x9bA", "\\x1b[31mb", "it serves \\x1b[2J\\u202e", "--model \\x1b]0;x\\x07"):
        assert shown in captured.get()
    said = as_json(["pod-\x9bA"], [finding])
    assert said.isascii()
    assert json.loads(said)["findings"][0]["found"] == finding.found
