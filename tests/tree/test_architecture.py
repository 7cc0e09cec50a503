"""docs/architecture.md: its layers are pyproject's, its packages are the tree's, and what it names is there."""

import importlib
import re
import tomllib
import xml.etree.ElementTree as ElementTree
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
LINTER = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
SVG = ROOT / "docs" / "request-path.svg"


def table(heading: str) -> list[list[str]]:
    """The cells of the rows below the heading row that begins with `heading`."""
    rows = PAGE.split(f"| {heading} |", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def test_the_layers_are_those_that_import_linter_holds() -> None:
    [contract] = [each for each in LINTER["contracts"] if each["type"] == "layers"]
    assert [set(re.findall(r"`(\w+)`", first)) for first, _ in table("layer of `epp`")] == [
        set(layer.split(" | ")) for layer in contract["layers"]
    ]


def test_the_packages_are_those_of_the_tree() -> None:
    assert {first.strip("`") for first, _ in table("package")} == set(LINTER["root_packages"])


def test_the_glossary_has_each_word_once_and_its_class() -> None:
    rows = table("word")
    words = [word.lower() for word, _, _ in rows]
    assert len(words) == len(set(words))
    classes = [where.strip("`") for _, _, where in rows if where]
    assert len(classes) == len(set(classes)), "one word for one thing"
    missing = []
    for where in classes:
        module, name = where.rsplit(".", 1)
        if not isinstance(getattr(importlib.import_module(module), name, None), type):
            missing.append(where)
    assert missing == []


def test_the_drawing_has_the_packages_of_a_request_and_two_colour_schemes() -> None:
    words = " ".join(ElementTree.parse(SVG).getroot().itertext())
    named = set(re.findall(r"\bepp/[\w/.]*\w", words))
    assert {
        f"epp/{each}" for each in ("extproc", "route.py", "parsing", "prefix", "pool", "flow", "scheduling")
    } <= named
    assert [each for each in named if not (ROOT / each).exists()] == []
    assert "prefers-color-scheme: dark" in words
    assert f"]({SVG.name})" in PAGE
