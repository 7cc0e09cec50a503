"""docs/reference is what the code says now, and nothing of the code is left out of it."""

from pathlib import Path

import pytest

from epp.cli import warmpath
from epp.configuration.builtin import CLASSES
from epp.telemetry.metrics_table import FAMILIES
from hack.docs.reference import FOLDER, main, pages

PAGES = pages()


@pytest.mark.parametrize("name", sorted(PAGES))
def test_the_page_is_the_code_s(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name], "run hack/reference"


def test_it_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    main([str(tmp_path / "new")])
    assert {page.name for page in (tmp_path / "new").iterdir()} == set(PAGES) == {p.name for p in FOLDER.iterdir()}


def test_all_there_is_has_a_place() -> None:
    assert [type_ for type_ in CLASSES if f"\n### {type_}\n" not in PAGES["plugins.md"]] == []
    assert [name for name in warmpath.commands if f"\n## warmpath {name}\n" not in PAGES["cli.md"]] == []
    assert [each.name for each in FAMILIES if f"| `{each.name}` |" not in PAGES["metrics.md"]] == []


def test_parameters_have_yaml_s_names_their_texts_and_their_defaults() -> None:
    assert "| `blockSizeTokens` | whole number | `16` | Tokens per KV block" in PAGES["plugins.md"]
    assert "`block_size_tokens` |" not in PAGES["plugins.md"]
    assert "| `label` | text | required |" in PAGES["plugins.md"]
    assert "| `sample` | number | `0.1` | Share of the requests" in PAGES["configuration.md"]
    assert "| `--max-body` | `INTEGER RANGE` | `16` |" in PAGES["cli.md"]
