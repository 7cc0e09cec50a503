"""What has to be read to follow one request: few files in few packages, and no long function in them."""

import ast
from pathlib import Path

from tests.support.ext_proc.request_path import ROOT, files_named, files_run

FILES, PACKAGES, LINES = 33, 8, 60
"""At most so many files, types and constants included, in so many folders; lines of a function, its docstring too."""
WAYMARKS = {"extproc/server", "extproc/stream", "route", "parsing/parser", "prefix/approximate", "scheduling/cost"}
"""Some that must be there, or nothing was measured."""


async def test_a_request_touches_few_files_in_few_packages_and_no_long_function() -> None:
    run = await files_run()
    assert {str(path.relative_to("epp").with_suffix("")) for path in run} >= WAYMARKS
    path = run | files_named(run)
    listed = "\n".join(sorted(map(str, path)))
    assert len(path) <= FILES, listed
    assert len({file.parent for file in path}) <= PACKAGES, listed
    assert [long for file in path for long in long_functions(file)] == []


def long_functions(path: Path) -> list[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    functions = (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    return [f"{path}: {f.name}" for f in functions if (f.end_lineno or 0) - f.lineno + 1 > LINES]
