import tracemalloc
from pathlib import Path

import msgspec
import pytest

from epp.documents.files import MAX_FILE, Document, expectation, files_in, read_documents
from epp.errors import ConfigError


class Inner(msgspec.Struct, forbid_unknown_fields=True):
    number: int


class Shape(msgspec.Struct, forbid_unknown_fields=True):
    ports: list[Inner]
    names: dict[str, str] = {}


ALIASES = "l0: &l0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
"""Nine lines that stand for a thousand million values."""


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


def test_a_small_file_takes_little_memory_and_an_endless_one_no_more_than_a_file_may_have(tmp_path: Path) -> None:
    path = written(tmp_path, "kind: A")
    tracemalloc.start()
    try:
        read_documents(path)
        small = tracemalloc.get_traced_memory()[1]
        with pytest.raises(ConfigError, match=f"/dev/zero: more than {MAX_FILE} bytes"):
            read_documents(Path("/dev/zero"))
        endless = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert small < MAX_FILE / 16
    assert endless < MAX_FILE * 3


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a: [", "not valid YAML"),
        (b"\xff\xfe\x00", "not valid YAML"),
        (b"a: \x00", "not valid YAML"),
        ("- 1", "#1: got a list; expected a mapping"),
        ("a: 1\n---\n7\n", "#2: got 7; expected a mapping"),
        ("text", "got 'text'; expected a mapping"),
        ("kind: List\nitems: [5]", "items[0]: got 5; expected a mapping"),
        ("a: !!python/object/apply:os.getcwd []", "not valid YAML"),
        ("[" * 1_000, "line 1, column 101: nested too deep; expected at most 100 levels"),
        ("[" * 100_000, "nested too deep"),
        ("- " * 100_000, "nested too deep"),
        ("kind: PodList\nitems: [{}, null]", "items[1]: got nothing; expected a mapping"),
        ("[" * 101 + "]" * 101, "nested too deep"),
        ("{a: " * 100_000, "nested too deep"),
        ("- " * 100_000 + "x", "nested too deep"),
        ("a: &a [*a]\n", "*a is within &a; expected a value that is no part of itself"),
        (ALIASES, "too many values; expected at most 500000, aliases counted where they are used"),
        ("a: [", "line 2, column 1: not valid YAML: while parsing a flow node"),
        ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: a tab indents this line; expected spaces"),
        ("!!int '': a", "not valid YAML: a value that its tag does not fit"),
        ("a: !!bool maybe", "not valid YAML: a value that its tag does not fit"),
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
        ({"ports": [{"number": 1}, {"number": "x"}]}, "f#1: ports[1].number: got 'x'; expected a whole number"),
        ({"ports": [{"numbr": 1}]}, "f#1: ports[0].numbr: not supported; supported: number"),
        ({"ports": [], "zzz": 1}, "f#1: zzz: not supported; supported: ports, names"),
        ({"ports": [], "name": {}}, "f#1: name: not supported; supported: ports, names; did you mean 'names'?"),
        ({}, "f#1: ports: missing, but required"),
        ({"ports": [], "names": {"a": 1}}, "f#1: names.a: got 1; expected text"),
        ({"ports": [], "names": {"b": "c", 1: "a"}}, "f#1: names: got the key 1; expected text"),
        ({"ports": 5}, "f#1: ports: got 5; expected a list"),
    ],
)
def test_a_wrong_shape_says_document_path_value_and_expectation(content: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError) as error:
        Document("f#1", content).shape(Shape)
    assert str(error.value) == says


def test_an_object_is_named_in_its_errors() -> None:
    document = Document("f#3", {"kind": "HTTPRoute", "metadata": {"name": "chat", "namespace": "ns"}})
    assert str(document.error("spec.rules[0]", "nothing would answer")) == (
        "f#3: HTTPRoute ns/chat: spec.rules[0]: nothing would answer"
    )
    assert Document("f#3", {"kind": "Pod", "metadata": {"name": "x"}}).where == "f#3: Pod default/x"


@pytest.mark.parametrize(
    "content", [{"kind": "Pod"}, {"metadata": {"name": "x"}}, {"kind": "Pod", "metadata": {"name": "x" * 1000}}]
)
def test_an_object_without_a_name_to_show_is_named_by_its_place(content: dict[str, object]) -> None:
    assert Document("f#3", content).where == "f#3"


def test_two_merges_in_a_mapping_are_no_key_twice(tmp_path: Path) -> None:
    text = "a: &a {x: 1}\nb: &b {y: 2}\nc:\n  <<: *a\n  <<: *b\n"
    assert read_documents(written(tmp_path, text))[0].content["c"] == {"x": 1, "y": 2}


def test_names_that_are_many_are_not_listed_beside_a_near_one() -> None:
    assert expectation("nam", ["name", "port"]) == "supported: name, port; did you mean 'name'?"
    assert expectation("nam", ["name", *"abcdefghijkl"]) == "did you mean 'name'?"
    assert expectation("x1", ["v1"], there="they have") == "they have: v1"
