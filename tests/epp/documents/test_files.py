from pathlib import Path

import msgspec
import pytest

from epp.documents.files import MAX_FILE, Document, files_in, read_documents
from epp.errors import ConfigError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    ports: list[Inner]
    names: dict[str, str] = {}


def written(tmp_path: Path, text: str | bytes, name: str = "f.yaml") -> Path:
    path = tmp_path / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_documents_lists_and_json_are_read_and_empty_ones_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, "---\n---\nkind: A\n---\nkind: List\nitems: [{kind: B}, {kind: C}]\n")
    assert [(each.where, each.kind) for each in read_documents(path)] == [
        (f"{path}#2", "A"),
        (f"{path}#3: items[0]", "B"),
        (f"{path}#3: items[1]", "C"),
    ]
    assert read_documents(written(tmp_path, '{"kind": "A"}', "f.json"))[0].kind == "A"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"a: \x00", "not valid YAML"),
        ("- 1", "got [1]; expected a mapping"),
        ("text", "got 'text'; expected a mapping"),
        ("kind: List\nitems: [5]", "items[0]: got 5; expected a mapping"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("[" * 1_000, "line 1, column 101: nested too deep; expected at most 100 levels"),
        ("[" * 100_000, "nested too deep"),
        ("- " * 100_000, "nested too deep"),
        ("a: 1\nb: 2\na: 3", "line 3, column 1: the key 'a' is here twice; expected it once"),
        ("- [" + "a," * 500_000 + "]", "too many values; expected at most 500000"),
    ],
)
def test_files_that_are_no_yaml_mappings_are_refused(tmp_path: Path, text: str | bytes, says: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ConfigError) as error:
        read_documents(path)
    assert says in str(error.value)
    assert str(error.value).startswith(str(path))


def test_a_file_beyond_all_measure_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "big.yaml"
    with path.open("wb") as file:
        file.truncate(MAX_FILE + 1)
    with pytest.raises(ConfigError, match="expected at most"):
        read_documents(path)


def test_directories_give_their_yaml_files_in_order(tmp_path: Path) -> None:
    for name in ("b.yaml", "a.yml", "c.json", "notes.txt", "kustomization.yaml"):
        written(tmp_path, "kind: A", name)
    (tmp_path / "sub.yaml").mkdir()
    assert [path.name for path in files_in([tmp_path])] == ["a.yml", "b.yaml", "c.json"]
    assert files_in([tmp_path / "notes.txt"]) == [tmp_path / "notes.txt"]
    with pytest.raises(ConfigError, match="no such file"):
        files_in([tmp_path / "missing"])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"ports": [{"number": 1}, {"number": "x"}]}, "f#1: ports[1].number: got 'x'; expected `int`, got `str`"),
        ({"ports": [{"numbr": 1}]}, "f#1: ports[0].numbr: unknown field; did you mean 'number'?"),
        ({"ports": [], "zzz": 1}, "f#1: zzz: unknown field"),
        ({}, "f#1: got {}; object missing required field `ports`"),
        ({"ports": [], "names": {"a": 1}}, "f#1: names[...]: got {'a': 1}; expected `str`, got `int`"),
        ({"ports": 5}, "f#1: ports: got 5; expected `array`, got `int`"),
    ],
)
def test_a_wrong_shape_says_document_path_value_and_expectation(content: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Document("f#1", content).shape(Shape)
    assert str(error.value) == says
