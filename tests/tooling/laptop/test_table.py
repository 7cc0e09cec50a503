from typing import Any

from rich.console import Console, RenderableType

from tooling.laptop.table import decision_table, endpoint_table, screen, why

LOAD = {"waiting": 3, "running": 7, "kv_usage": 0.415}
ENDPOINT: dict[str, Any] = {
    "name": "default/pod-a",
    "address": "127.0.0.1:8000",
    "load": LOAD,
    "in_flight": 5,
    "predicted_hit_rate": 0.84,
    "share": 1.0,
}
BILLED = {
    "profiles": [
        {
            "endpoints": [
                {"endpoint": "a", "total": 1.0, "cost_ms": 8.5, "bill_ms": {"own": 8.0, "stall": 0.5, "memory": 0.0}},
                {"endpoint": "b", "total": 0.2, "cost_ms": 40.0, "bill_ms": {"own": 40.0}},
                {"endpoint": "c", "total": 0.1, "cost_ms": 80.0, "bill_ms": {"own": 80.0}},
            ]
        }
    ]
}


def text(shown: RenderableType, width: int = 140) -> str:
    console = Console(width=width, record=True, force_terminal=False)
    with console.capture() as captured:
        console.print(shown)
    return captured.get()


def test_an_endpoint_shows_its_load_and_its_share() -> None:
    shown = text(endpoint_table([{"name": "sim", "endpoints": [ENDPOINT]}], {}))
    row = next(line for line in shown.splitlines() if "pod-a" in line)
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells == ["sim", "default/pod-a", "127.0.0.1:8000", "3", "7", "42%", "5", "84%", "100%"]


def test_what_is_not_known_is_a_dash() -> None:
    unknown = {**ENDPOINT, "load": None, "predicted_hit_rate": None, "share": None}
    row = next(
        line for line in text(endpoint_table([{"name": "p", "endpoints": [unknown]}], {})).splitlines() if "/" in line
    )
    assert row.count("–") == 5


def test_a_dead_pod_is_shown_once_as_gone() -> None:
    shown = text(endpoint_table([{"name": "sim", "endpoints": [ENDPOINT]}], {"127.0.0.1:8000": "pod-a"}))
    [row] = [line for line in shown.splitlines() if "pod-a" in line]
    assert "gone" in row
    assert "42%" not in row


def test_why_tells_the_bill_and_the_runner_up() -> None:
    assert why({"endpoint": "a", **BILLED}) == "8.5 ms (own 8.0, stall 0.5); next: b 40.0 ms"


def test_why_of_a_request_that_was_moved_tells_where_it_landed() -> None:
    assert why({"endpoint": "b", **BILLED}) == "40.0 ms (own 40.0); next: a 8.5 ms"


def test_why_without_a_bill_tells_the_scores() -> None:
    rows = [{"endpoint": "a", "total": 1.5, "scores": {"queue": {"score": 0.5}, "kv": {"score": 1.0}}}]
    assert why({"endpoint": "a", "profiles": [{"endpoints": rows}]}) == "queue 0.50, kv 1.00"
    rows = [{"endpoint": "a", "total": 0.0, "scores": {}}]
    assert why({"endpoint": "a", "profiles": [{"endpoints": rows}]}) == "no scorer: the picker alone"
    assert why({"endpoint": "x", "profiles": []}) == "the only way"


def test_the_screen_fits_a_narrow_terminal() -> None:
    decision = {"request_id": "f79ccc93-dc90-4b1c", "tokens": 457, "endpoint": "a", **BILLED}
    shown = text(screen([{"name": "sim", "endpoints": [ENDPOINT]}], [decision], {}), width=80)
    assert max(map(len, shown.splitlines())) <= 80
    assert "457" in text(decision_table([decision]))


HOSTILE = "[/x] [bold red]ok[/bold red] :warning: \x1b[2J\x9b31m\u202e\r\n\udc80"
SHOWN = "[/x] [bold red]ok[/bold red] :warning: \\x1b[2J\\x9b31m\\u202e\\r\\n\\udc80"


def test_what_others_chose_is_shown_and_not_obeyed() -> None:
    pool = {"name": HOSTILE, "endpoints": [{**ENDPOINT, "name": HOSTILE, "address": HOSTILE}]}
    shown = text(endpoint_table([pool], {HOSTILE + "!": HOSTILE}), width=800)
    assert shown.count(SHOWN) == 5
    row = {"endpoint": HOSTILE, "total": 1.0, "scores": {HOSTILE: {"score": 1.0}}}
    decision = {"tokens": 1, "endpoint": HOSTILE, "profiles": [{"endpoints": [row]}]}
    shown = text(decision_table([{"request_id": "[/x]\x9b", **decision}]), width=800)
    assert "[/x]\\x9b" in shown
    assert shown.count(SHOWN) == 2
