"""Every module has its test at the same path; every test has its module."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("epp", "gateway", "tooling")


def modules() -> set[str]:
    """`epp/pool/store.py` for each module that holds code; generated code and mere constants do not count."""
    return {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*.py")
        if "proto" not in path.parts and does_something(path)
    }


def does_something(path: Path) -> bool:
    body = ast.parse(path.read_text(encoding="utf-8")).body
    return any(isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) for node in body)


def mirrored(test: Path) -> str:
    relative = test.relative_to(ROOT / "tests")
    return str(relative.with_name(relative.name.removeprefix("test_")))


def test_every_module_has_a_test_of_its_name() -> None:
    tested = {mirrored(path) for package in PACKAGES for path in (ROOT / "tests" / package).rglob("test_*.py")}
    assert modules() - tested == set()


def test_every_test_of_a_room_has_its_module_or_says_what_it_is_for() -> None:
    known = modules()
    homeless = [
        path
        for package in PACKAGES
        for path in (ROOT / "tests" / package).rglob("test_*.py")
        if mirrored(path) not in known and not path.read_text(encoding="utf-8").startswith('"""')
    ]
    assert homeless == []
