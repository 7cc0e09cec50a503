import json
from pathlib import Path

import pytest

from gateway.documents import MAX_FILE, expectation, read
from gateway.errors import ResourceError


def test_directories_files_lists_and_json_are_read_in_name_order(tmp_path: Path) -> None:
    (tmp_path / "b.yaml").write_text("kind: B\n---\n---\nkind: C\n")
    (tmp_path / "a.json").write_text(json.dumps({"kind": "List", "items": [{"kind": "A"}, {"kind": "A2"}]}))
    (tmp_path / "kustomization.yaml").write_text("resources: []")
    (tmp_path / "notes.txt").write_text("not: read")
    (tmp_path / "below").mkdir()
    single = tmp_path / "single"
    single.write_text("endpoints: []")
    assert [document.kind for document in read([tmp_path, single])] == ["A", "A2", "B", "C", None]


ALIASES = "l0: &l0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"l{level}: &l{level} [{', '.join([f'*l{level - 1}'] * 10)}]\n" for level in range(1, 9)
)
"""Nine lines that stand for a thousand million values."""


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: [", "line 1, column 5: not valid YAML: while parsing a flow node"),
        ("a: 1\nb: 2\na: 3\n", "key 'a' twice"),
        ("a:\n\tb: 1\n", "line 2, column 1: not valid YAML: a tab indents this line; YAML wants spaces"),
        ("- 1\n", "document 1: got [1]; expected a mapping"),
        ("a: 1\n---\n7\n", "document 2: got 7"),
        ("a: &a [*a]\n", "nested too deep; expected at most 100 levels"),
        ("[" * 1_000, "nested too deep"),
        ("{a: " * 100_000, "nested too deep"),
        ("- " * 100_000 + "x", "nested too deep"),
        ("[" * 101 + "]" * 101, "nested too deep"),
        ("- [" + "a," * 500_000 + "]", "too many values; expected at most 500000"),
        (ALIASES, "too many values; expected at most 500000, aliases counted where they are used"),
        ("\x00", "not valid YAML"),
        ("!!int '': a", "not valid YAML: a value that its tag does not fit"),
        ("a: !!bool maybe", "not valid YAML: a value that its tag does not fit"),
    ],
)
def test_odd_files_are_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "odd.yaml"
    file.write_text(text)
    with pytest.raises(ResourceError) as caught:
        read([file])
    assert str(caught.value).startswith(f"{file}: ")
    assert message in str(caught.value)


def test_missing_huge_and_binary_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no such file or directory"):
        read([tmp_path / "none.yaml"])
    big = tmp_path / "big.yaml"
    with big.open("wb") as file:
        file.truncate(MAX_FILE + 1)
    with pytest.raises(ResourceError, match=f"expected at most {MAX_FILE}"):
        read([big])
    big.write_bytes(b"\xff\xfe\xfa")
    with pytest.raises(ResourceError, match="not valid YAML"):
        read([big])


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "gateway.yaml").write_text("kind: Gateway")
    with pytest.raises(ResourceError, match=r"no \.yaml, \.yml, \.json file in here \(directories below"):
        read([tmp_path])


def test_names_that_are_many_are_not_listed_beside_a_near_one() -> None:
    assert expectation("nam", ["name", "port"]) == "supported: name, port; did you mean name?"
    assert expectation("nam", ["name", *"abcdefghijkl"]) == "did you mean name?"
    assert expectation("x1", ["v1"], there="they have") == "they have: v1"
