"""What `hack/bench l2` makes of a node's lines. The real ones: the command itself."""

from typing import Any

from hack.benches.l2 import CHUNKS, Fault, Row, seen, table

LINES: list[dict[str, Any]] = [
    {"kind": "size", "t": 9.0, "kilobytes": 1024},
    {"kind": "new", "t": 1.0, "seconds": 0.1, "answered": True, "l1": 0, "l2": 0, "wrong": 0},
    {"kind": "new", "t": 9.5, "seconds": 8.0, "answered": True, "l1": 0, "l2": 0, "wrong": 0},
    {"kind": "new", "t": 12.0, "seconds": 45.0, "answered": False, "l1": 0, "l2": 0, "wrong": 0},
    {"kind": "again", "t": 21.0, "seconds": 0.5, "stored": 19.0, "answered": True, "l1": 0, "l2": CHUNKS, "wrong": 1},
    {"kind": "again", "t": 22.0, "seconds": 0.5, "stored": 20.5, "answered": True, "l1": 0, "l2": 3, "wrong": 0},
    {"kind": "again", "t": 23.0, "seconds": 0.5, "stored": 20.5, "answered": True, "l1": 0, "l2": CHUNKS, "wrong": 0},
    {"kind": "size", "t": 30.0, "kilobytes": 3072},
]
"""Of a fault from 10 to 20."""


def test_what_a_fault_did() -> None:
    assert seen(LINES, 10.0, 20.0) == Fault(
        prompts=5, waited=45.0, unanswered=1, back=3.5, wrong=1, grown=2.0, ended=False
    )
    assert seen(LINES[:4], 10.0, 20.0, ended=True) == Fault(
        prompts=2, waited=45.0, unanswered=1, back=None, wrong=0, grown=0.0, ended=True
    )


def test_a_row_says_what_never_came_back_and_what_did_not_start() -> None:
    well, ill = seen(LINES, 10.0, 20.0), seen(LINES[:4], 10.0, 20.0)
    head, _, row = table([Row("fs: a mount", 8, 0, well, ill, None, True)]).splitlines()
    assert head.count("|") == row.count("|")
    assert "| 45.0 | 1 of 5 | 3.5 | 45.0 | 1 of 2 | never | does not start | - | - | 1 | 2 |" in row
