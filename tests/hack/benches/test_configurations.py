"""Documents are found wherever projects keep them, and each that does not load is counted with why."""

from pathlib import Path

import pytest

from hack.benches.configurations import errors_of, found_in, main

GOOD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n"
BAD = GOOD.replace("queue-scorer", "queue-scorre")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    def write(name: str, text: str) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def indented(text: str) -> str:
        return "".join(f"    {line}\n" for line in text.splitlines())

    write("deploy/plain.yaml", GOOD)
    write("deploy/again.yaml", "# the same once more\n" + GOOD)
    write("deploy/template.yaml", GOOD + "{{ if .Values.x }}\n")
    write("deploy/map.yaml", "kind: ConfigMap\ndata:\n  config.yaml: |\n" + indented(BAD))
    write("values.yaml", "router: {epp: {pluginsCustomConfig: [1, {kind: EndpointPickerConfig, plugins: []}]}}\n")
    write("tests/testdata/x.yml", GOOD + "- type: max-score-picker\n")
    write("README.md", "Like this:\n\n  ```yaml\n" + indented(GOOD + "- type: random-picker\n") + "  ```\n")
    write("code.go", GOOD)
    return tmp_path


def test_documents_are_found_in_files_values_texts_and_markdown(checkout: Path) -> None:
    found = {(d.path.relative_to(checkout).as_posix(), d.deployable) for d in found_in(checkout)}
    assert found == {
        ("README.md", False),
        ("deploy/again.yaml", True),
        ("deploy/map.yaml", True),
        ("deploy/plain.yaml", True),
        ("tests/testdata/x.yml", False),
        ("values.yaml", True),
    }


def test_those_that_load_are_counted_once_each(
    checkout: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["x", str(checkout), "--errors"])
    with pytest.raises(SystemExit) as ended:
        main()
    printed = capsys.readouterr().out
    assert ended.value.code == 0
    assert "all: 1 of 3 deployable documents load, 3 of 5 of all" in printed
    assert "   1  plugins[].type: no plugin type 'queue-scorre'; did you mean 'queue-scorer'?" in printed


def test_a_document_that_loads_has_no_errors() -> None:
    assert errors_of(GOOD) == []
    assert len(errors_of(BAD)) == 1
