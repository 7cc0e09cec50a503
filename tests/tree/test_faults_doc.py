"""docs/faults.md has a row for each fault, and its commands and targets exist."""

import re
from pathlib import Path

from hack.benches.faults import FAULTS
from hack.benches.fuzz import TARGETS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "faults.md").read_text(encoding="utf-8")


def test_each_fault_has_its_row_in_order() -> None:
    table = PAGE[PAGE.index("| fault |") :].split("\n\n")[0].splitlines()[2:]
    assert [row.split("|")[1].strip() for row in table] == [fault.name for fault in FAULTS]
    for row in table:
        sent, answered, refused, failed = (int(cell) for cell in row.split("|")[2:6])
        assert answered + refused + failed == sent


def test_each_target_has_its_line() -> None:
    lines = [line for line in PAGE.splitlines() if re.match(r"[a-z_0-9]+ +[\d,]+ +\d+% ", line)]
    assert {line.split()[0] for line in lines} == set(TARGETS)


def test_commands_exist() -> None:
    assert [name for name in re.findall(r"`(hack/\w+)", PAGE) if not (ROOT / name).exists()] == []
