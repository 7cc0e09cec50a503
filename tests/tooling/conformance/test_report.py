import io
import json

import pytest
from rich.console import Console

from tooling.conformance import report
from tooling.conformance.suite import CASES, Result

MUST = next(case for case in CASES if case.level == "MUST")
SHOULD = next(case for case in CASES if case.level == "SHOULD")
RESULTS = [Result(MUST, "pass"), Result(MUST, "skip", "needs [more]"), Result(SHOULD, "fail", "expected a; got b")]


@pytest.mark.parametrize(
    ("results", "passed"),
    [(RESULTS, True), ([*RESULTS, Result(MUST, "fail", "x")], False), ([], True)],
)
def test_only_a_must_decides(results: list[Result], passed: bool) -> None:
    assert report.passed(results) is passed
    assert json.loads(report.as_json(results, "here:1"))["passed"] is passed


def test_the_json_says_all_of_each_case() -> None:
    said = json.loads(report.as_json(RESULTS, "here:1"))
    assert said["target"] == "here:1"
    assert said["summary"] == "1 passed, 1 skipped, 0 MUST and 1 SHOULD failed"
    assert set(said["cases"][0]) == {"id", "group", "title", "level", "source", "how", "result", "detail"}
    assert said["cases"][2]["detail"] == "expected a; got b"


def test_the_table_shows_each_case_its_result_and_why() -> None:
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(RESULTS, "here:1"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    for word in ("here:1", MUST.title, SHOULD.title, "needs [more]", "expected a; got b", "1 SHOULD failed"):
        assert word in text


def test_what_a_picker_answers_does_not_steer_the_terminal() -> None:
    results = [Result(MUST, "fail", "got \x1b[2J\x9b\u202e")]
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(results, "[/x]\x9b:1"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "got \\x1b[2J\\x9b\\u202e" in text
    assert "[/x]\\x9b:1" in text
    assert report.as_json(results, "\x9b:1").isascii()
