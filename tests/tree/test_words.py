"""One word for each thing: those of the glossary in docs/architecture.md, and no dialect of our own beside them."""

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORDS = {
    "door": "server, port or gateway",
    "doors": "servers, ports or gateways",
    "cellar": "the package's name",
    "shelf": "KV event state",
    "shelves": "KV event states",
    "witness": "observer",
    "patience": "timeout",
    "mend": "fix",
    "mends": "fixes",
    "mended": "fixed",
    "rivals": "policies of other projects",
    "ears": "subscriber",
    "heard": "received",
    "unheard": "without events",
    "untold": "unreported",
    "tend": "run",
    "ledger": "account",
}
"""Word -> what to say instead."""
EXCEPT = {
    "CHANGELOG.md",  # history
    "tests/tree/test_words.py",
    "epp/cli.py",  # --patience is an older name of --event-timeout
    "docs/reference/cli.md",  # is made of it
    "epp/configuration/builtin.py",  # epp.rivals is an older name of tooling.policies
    "tests/epp/configuration/test_registry.py",
    "tests/tooling/policies/test_init.py",
}
FOUND = re.compile(r"\b(" + "|".join(WORDS) + r")\b", re.IGNORECASE)


def _files() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [
        name
        for name in listed.split("\0")
        if name and name not in EXCEPT and not name.startswith("requirements/") and (ROOT / name).is_file()
    ]


def _hits(text: str) -> list[tuple[int, str]]:
    return [(text.count("\n", 0, found.start()) + 1, found[1].lower()) for found in FOUND.finditer(text)]


def test_names_and_prose_are_in_standard_words() -> None:
    wrong = []
    for name in _files():
        try:
            text = (ROOT / name).read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        wrong += [f"{name}:{line}: {word!r}; say: {WORDS[word]}" for line, word in _hits(text)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(("text", "found"), [("a\nthe Door is", [(2, "door")]), ("outdoors, remembered", [])])
def test_a_word_is_found_as_a_whole(text: str, found: list[tuple[int, str]]) -> None:
    assert _hits(text) == found
