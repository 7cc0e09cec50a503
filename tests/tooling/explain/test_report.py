"""What a person sees of an explanation."""

from collections.abc import Sequence
from io import StringIO
from typing import Any

from rich.console import Console

from epp.plugin import Endpoint
from epp.scheduling.decision import Decision, ProfileRun, Scored
from tests.support.scheduling.decisions import decision, endpoint
from tooling.explain.report import report


def shown(status: int, said: dict[str, Any]) -> str:
    console = Console(width=120, record=True, file=StringIO())
    console.print(report(status, said))
    return console.export_text()


def explained(made: Decision, waiting: int | None = None) -> dict[str, Any]:
    return {"pool": "default/p", "waiting": waiting, "decision": made.as_dict()}


def test_costs_are_shown_term_by_term_the_cheapest_first() -> None:
    made = decision("r", [endpoint(2), endpoint(1)])
    text = shown(200, explained(made, waiting=3))
    assert "100 tokens for m, pool default/p" in text
    assert "goes to default/pod-2 (10.0.0.2:8000)" in text
    assert "3 requests wait in flow control before it" in text
    rows = [line.split("│")[1:-1] for line in text.splitlines() if line.startswith("│")]
    assert [[cell.strip() for cell in row] for row in rows] == [
        ["default/pod-2", "12.0", "2.0", "10.0"],
        ["default/pod-1", "1012.0", "1002.0", "10.0"],
    ]


def test_scores_are_shown_with_their_weights_and_who_was_dropped() -> None:
    made = decision("r", [endpoint(1), endpoint(2)])
    scored = [Scored("queue", 2.0, [0.5, 1.0]), Scored("kv", 1.0, [1.0, 0.25])]
    gone: list[tuple[str, Sequence[Endpoint]]] = [("role-filter", [endpoint(9)])]
    made.runs = [ProfileRun("main", gone, made.endpoints, scored, [2.0, 2.25], [made.endpoints[1]])]
    text = shown(200, explained(made))
    assert text.index("default/pod-2 │") < text.index("default/pod-1 │")
    assert "1.000 x 2" in text
    assert "2.250" in text
    assert "dropped by role-filter: default/pod-9" in text


def test_a_large_pool_is_shown_up_to_the_best_forty() -> None:
    text = shown(200, explained(decision("r", [endpoint(n) for n in range(50)])))
    assert text.count("default/pod-") == 41
    assert "and 10 more" in text


def test_a_refusal_is_shown_with_its_field() -> None:
    error = {"message": "messages: missing", "type": "invalid_request_error", "param": "messages", "code": None}
    assert shown(400, {"error": error}).strip() == "refused with 400 (messages): messages: missing"
