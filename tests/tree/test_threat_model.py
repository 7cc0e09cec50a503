"""docs/threat-model.md is true: the tests that it names are there, its ports are ours, its commands exist."""

import ast
import re
from pathlib import Path

import pytest

from epp import protocol

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", PAGE)


def test_each_finding_names_its_tests() -> None:
    table = PAGE[PAGE.index("| found | tests |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) == 22
    assert [row for row in table if "::test_" not in row] == []


@pytest.mark.parametrize(("file", "test"), NAMED)
def test_the_tests_are_there(file: str, test: str) -> None:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    functions = {each.name for each in tree.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}
    assert not test or test in functions


def test_ports_and_commands_are_ours() -> None:
    for port in (protocol.GRPC_PORT, protocol.HEALTH_PORT, protocol.METRICS_PORT, protocol.REPLICA_PORT):
        assert f"| {port}" in PAGE
    assert [name for name in re.findall(r"`(hack/\w+)", PAGE) if not (ROOT / name).exists()] == []
