"""How many EndpointPickerConfig documents of the given directories load, and why the others do not.

Directories are checkouts of projects that configure an endpoint picker. A document is found in YAML files (also in
values that are texts, such as those of a ConfigMap or a Helm values file) and in fenced blocks of Markdown files.
Documents that are equal count once. Deployable are those of YAML files outside directories called test, tests or
testdata.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import yaml

from epp.configuration.loader import load_text
from epp.errors import ConfigErrors

KIND = "EndpointPickerConfig"
_FENCE = re.compile(r"^(?P<indent> *)```ya?ml[^\n]*\n(?P<text>.*?)^ *```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Document:
    path: Path
    text: str
    deployable: bool


def found_in(directory: Path) -> Iterator[Document]:
    """The documents of a directory, in the order of their paths."""
    for path in sorted(directory.rglob("*")):
        if path.suffix not in (".yaml", ".yml", ".md") or not path.is_file():
            continue
        text = path.read_text("utf-8", "replace")
        if KIND not in text:
            continue
        tested = {"test", "tests", "testdata"} & set(path.relative_to(directory).parts)
        for each in _texts(text, markdown=path.suffix == ".md"):
            yield Document(path, each, path.suffix != ".md" and not tested)


def _texts(text: str, *, markdown: bool) -> Iterator[str]:
    blocks = [_dedented(found["indent"], found["text"]) for found in _FENCE.finditer(text)] if markdown else [text]
    for block in blocks:
        try:
            for value in yaml.safe_load_all(block):
                yield from _inside(value)
        except yaml.YAMLError:  # a template, or an excerpt
            continue


def _dedented(indent: str, text: str) -> str:
    return "".join(line.removeprefix(indent) for line in text.splitlines(keepends=True))


def _inside(value: Any) -> Iterator[str]:
    if isinstance(value, dict) and value.get("kind") == KIND:
        yield yaml.safe_dump(value, sort_keys=False)
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _inside(each)
    elif isinstance(value, str) and KIND in value and "\n" in value:
        yield from _texts(value, markdown=False)


def errors_of(text: str) -> list[str]:
    """Why it does not load; none: it does."""
    try:
        load_text(text, clock=lambda: 0.0, random=Random(0))
    except ConfigErrors as error:
        return [str(each) for each in error.errors]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench configurations", description=__doc__)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIRECTORY")
    parser.add_argument("--errors", action="store_true", help="print the errors of each document that does not load")
    arguments = parser.parse_args()
    totals: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for directory in arguments.directories:
        counts: Counter[str] = Counter()
        seen: set[str] = set()
        for document in found_in(directory):
            if document.text in seen:
                continue
            seen.add(document.text)
            errors = errors_of(document.text)
            kinds = ["all", "deployable"] if document.deployable else ["all"]
            counts.update(kinds)
            if not errors:
                counts.update(f"{kind} load" for kind in kinds)
            reasons.update({re.sub(r"\[\d+\]", "[]", each) for each in errors})
            if errors and arguments.errors:
                print(document.path, *errors, sep="\n  ")
        totals += counts
        print(_row(str(directory), counts))
    print(_row("all", totals))
    for reason, times in reasons.most_common():
        print(f"{times:4}  {reason}")
    sys.exit(0 if totals["all"] else 1)


def _row(name: str, counts: Counter[str]) -> str:
    return (
        f"{name}: {counts['deployable load']} of {counts['deployable']} deployable documents load, "
        f"{counts['all load']} of {counts['all']} of all"
    )


if __name__ == "__main__":
    main()
