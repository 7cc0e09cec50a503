"""Every test says what it expects: it asserts, names an error, or calls a helper of the tests that does."""

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parents[1]
ERRORS = {"raises", "warns", "fail"}
"""Of pytest: what fails a test by itself."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST) -> Iterator[Function]:
    return (node for node in ast.walk(tree) if isinstance(node, Function))


def called(node: ast.AST) -> set[str]:
    """Names of the functions and methods that are called or handed on in it."""
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def expects(function: Function) -> bool:
    return any(
        isinstance(node, ast.Assert)
        or (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and (node.func.value.id, node.func.attr) in {("pytest", name) for name in ERRORS}
        )
        for node in ast.walk(function)
    )


def without_expectation(source: str, helpers: set[str]) -> list[str]:
    """Names of the tests in `source`. `helpers`: functions elsewhere that expect something; those it imports count."""
    tree = ast.parse(source)
    imported = {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("tests.")
        for alias in node.names
        if alias.name in helpers
    }
    known = imported | {each.name for each in functions(tree) if expects(each)}
    return [
        each.name
        for each in functions(tree)
        if each.name.startswith("test_") and not expects(each) and not called(each) & known
    ]


def test_every_test_has_one() -> None:
    support = [path.read_text(encoding="utf-8") for path in (TESTS / "support").rglob("*.py")]
    helpers = {each.name for source in support for each in functions(ast.parse(source)) if expects(each)}
    found = {
        str(path.relative_to(TESTS)): names
        for path in TESTS.rglob("test_*.py")
        if (names := without_expectation(path.read_text(encoding="utf-8"), helpers))
    }
    assert found == {}


def test_what_counts_as_an_expectation() -> None:
    source = """
from tests.support.some import checked, until

def own(): assert True
def test_asserts(): assert True
def test_names_an_error():
    with pytest.raises(ValueError): do()
def test_by_its_own_helper(): own()
async def test_by_a_helper_of_all_tests(): await checked()
async def test_only_waits(): await until(lambda: True)
def test_only_runs(): do()
"""
    assert without_expectation(source, {"checked"}) == ["test_only_waits", "test_only_runs"]


def test_no_lane_runs_what_failed_once_more() -> None:
    for name in ("hack/test", ".ci/run", "pyproject.toml"):
        text = (TESTS.parent / name).read_text(encoding="utf-8")
        assert [word for word in ("--last-failed", "--lf", "reruns", "flaky") if word in text] == [], name
