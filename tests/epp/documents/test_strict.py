"""Strict YAML and strict dataclasses: what is taken, what is refused and in which words."""

import subprocess
import sys
import tracemalloc
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.documents.strict import MAX_BYTES, Problems, decode, documents, parameters_of, read
from epp.errors import ConfigError, ConfigErrors
from tests.support.plugins import Warm


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1", {"a": 1}),
        ("a: 010", {"a": 10}),
        ("a: 0x10", {"a": 16}),
        ("a: 1.5e3", {"a": 1500.0}),
        ("a: -1", {"a": -1}),
        ("a: true", {"a": True}),
        ("a:", {"a": None}),
        ("a: ~", {"a": None}),
        ("1: x", {"1": "x"}),
        ("a: yes", {"a": "yes"}),
        ("a: 2026-01-01", {"a": "2026-01-01"}),
        ("a: 1_000", {"a": "1_000"}),
        ("a: 1:30", {"a": "1:30"}),
        ("a: &x [1]\nb: *x", {"a": [1], "b": [1]}),
        ("<<: {a: 1}", {"<<": {"a": 1}}),
        ("", None),
        ("---\na: {b: [c, 'd']}", {"a": {"b": ["c", "d"]}}),
    ],
)
def test_plain_values(text: str, value: object) -> None:
    assert read(text) == value


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: 1\na: 2", "line 2, column 1: the key 'a' is here twice; expected it once"),
        ("a: [1", "while parsing a flow sequence (line 1, column 4), did not find expected ',' or ']'"),
        ("a:\n\tb: 1", "line 2, column 1: not valid YAML: a tab indents this line; expected spaces"),
        ("? [a]\n: 1", "a key must be a word"),
        ("a: !!python/object:os.system x", "could not determine a constructor"),
        ("a: !!binary aGk=", "could not determine a constructor"),
        ("a: !!bool maybe", "'maybe' is no bool"),
        ("a: !!map x", "expected a mapping"),
        ("a: 1\n---\nb: 2", "2 YAML documents; expected one"),
        ("a: \x00", "not valid YAML"),
        (b"a: \xff\xfe\xff", "not valid YAML"),
        ("[" * 2000, "nested too deep"),
        ("plugins: {{ .Values.plugins }}", "is a template such as {{ .Values.x }} left in the file?"),
        (b"a: \xe9bc\n", "not valid YAML: invalid trailing UTF-8 octet at byte 4; expected text in UTF-8"),
        ("- " * 2000, "line 1, column 129: nested too deep; expected at most 64 levels"),
        ("? " * 2000, "nested too deep"),
        (b"<<: [" * 2000, "nested too deep"),
        ("\n".join(["l0: &l0 [x]", *(f"l{i}: &l{i} [*l{i - 1}]" for i in range(1, 100))]), "nested too deep"),
        ("a: " + "9" * 5000, "not valid YAML"),
        ("x" * (MAX_BYTES + 1), f"expected at most {MAX_BYTES}"),
        ("&a [*a]", "*a is within &a"),
        ("&a {b: *a}", "*a is within &a"),
    ],
)
def test_refused_yaml(text: str | bytes, expected: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(text)
    assert expected in str(refused.value)


def test_deep_nesting_is_refused_before_anybody_walks_it() -> None:
    with pytest.raises(ConfigError, match="nested too deep"):
        read("[" * 70 + "]" * 70)


def test_a_few_lines_cannot_stand_for_millions() -> None:
    lines = ["l0: &l0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"l{i}: &l{i} [{', '.join([f'*l{i - 1}'] * 10)}]" for i in range(1, 9)]
    with pytest.raises(ConfigError, match="too many values"):
        read("\n".join(lines))


MILLION = 1_000_000
"""Levels; C code that recurses through a hundredth of them is killed by the system."""


@pytest.mark.parametrize("text", ["[" * MILLION, "- " * MILLION, "{a: " * MILLION, "? " * MILLION, "[?" * MILLION])
def test_no_depth_ends_the_process(text: str) -> None:
    with pytest.raises(ConfigError, match="nested too deep; expected at most 100 levels"):
        documents(text)


def test_yaml_is_read_without_libyaml_too() -> None:
    program = """
import yaml
yaml.__with_libyaml__ = False
del yaml.CSafeLoader
from epp.documents.strict import BoundedLoader, documents, read
assert yaml.SafeLoader in BoundedLoader.__mro__
assert documents("a: [1, {b: 2}]\\n---\\nc: &x [1]\\nd: *x") == [{"a": [1, {"b": 2}]}, {"c": [1], "d": [1]}]
assert read("a: 0x1f") == {"a": 31}
for text in ("[" * 200, "a: 1\\na: 2", "a: [", "a: *b"):
    try:
        documents(text)
    except Exception as error:
        print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert not done.stderr
    deep, twice, _, unknown = done.stdout.splitlines()
    assert "nested too deep" in deep
    assert "'a' is here twice" in twice
    assert "undefined alias" in unknown


def test_values_are_bounded_before_they_are_built() -> None:
    tracemalloc.start()
    try:
        with pytest.raises(ConfigError, match="too many values; expected at most 20000"):
            read("[" + "a," * 100_000 + "]")
        assert tracemalloc.get_traced_memory()[1] < 40 << 20
    finally:
        tracemalloc.stop()


def test_anchors_of_one_document_say_nothing_in_the_next() -> None:
    assert documents("- &a [1, 2]\n- *a\n---\n- &a 3\n- *a\n") == [[[1, 2], [1, 2]], [3, 3]]
    with pytest.raises(ConfigError, match=r"\*a is within &a"):
        documents("&a [1]\n---\n&a [*a]\n")


@dataclass
class Inner:
    name: str
    ratio: float = 0.5


@dataclass
class Outer:
    """A field of each kind."""

    inner: Inner | None = None
    several: list[Inner] = field(default_factory=list)
    numbers: tuple[int, ...] = ()
    free: Any = None
    choice: Literal[1, "two"] = 1
    max_ttft_penalty_ms: int = 0


def test_nested_values() -> None:
    given = {
        "inner": {"name": "a"},
        "several": [{"name": "b", "ratio": 1}],
        "numbers": [1, 2],
        "free": {"x": [1]},
        "choice": "two",
        "maxTTFTPenaltyMs": 3,
    }
    expected = Outer(Inner("a"), [Inner("b", 1.0)], (1, 2), {"x": [1]}, "two", 3)
    assert decode(Outer, given, "") == expected
    assert decode(Outer, {"inner": None}, "") == Outer()


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, True, "expected a whole number, got true"),
        (int, 1.0, "expected a whole number, got 1.0"),
        (int, "1", "expected a whole number, got '1'"),
        (int, 1 << 63, "expected a whole number, got a huge number"),
        (float, True, "expected a number, got true"),
        (float, float("nan"), "expected a number, got nan"),
        (float, float("inf"), "expected a number, got inf"),
        (float, 10**400, "expected a number, got a huge number"),
        (float, "high", "expected a number, got 'high'"),
        (bool, 1, "expected true or false, got 1"),
        (bool, "yes", "expected true or false, got 'yes'"),
        (str, 1, "expected text, got 1"),
        (str, None, "expected text, got nothing"),
        (list[int], {"a": 1}, "expected a list, got a mapping"),
        (dict[str, int], [1], "expected a mapping, got a list"),
        (Inner, [], "expected a mapping with name, got []"),
        (timedelta, 5, "expected a duration such as 200ms, 5s or 1m30s, got 5"),
        (timedelta, "5", "expected a duration such as 200ms, 5s or 1m30s, got '5'"),
        (timedelta, "-5s", "got '-5s'"),
        (timedelta, "9" * 30 + "h", "expected a duration"),
        (Literal["fast", "slow"], "fats", "expected fast or slow, got 'fats'; did you mean 'fast'?"),
        (Literal[1], True, "expected 1, got true"),
        (int | str, 1, "cannot be set from YAML"),
        (bytes, "x", "cannot be set from YAML"),
    ],
)
def test_refused_values(kind: Any, value: object, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decode(kind, value, "here")
    assert str(refused.value).startswith("here: ")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("text", "seconds"), [("200ms", 0.2), ("5s", 5.0), ("1m30s", 90.0), ("1.5h", 5400.0), ("250us", 0.00025)]
)
def test_durations(text: str, seconds: float) -> None:
    assert decode(timedelta, text, "") == timedelta(seconds=seconds)


def test_all_errors_are_reported_at_once() -> None:
    given = {"inner": {"ratio": "x"}, "several": [{"name": 1}, {"nam": "a"}], "numbres": []}
    with pytest.raises(ConfigErrors) as refused:
        decode(Outer, given, "at")
    assert str(refused.value).splitlines() == [
        "at.inner.ratio: expected a number, got 'x'",
        "at.inner.name: missing",
        "at.several[0].name: expected text, got 1",
        "at.several[1].nam: unknown; did you mean 'name'?",
        "at.several[1].name: missing",
        "at.numbres: unknown; did you mean 'numbers'?",
    ]


def test_letters_of_a_key_may_differ_in_case_but_not_twice() -> None:
    assert decode(Warm, {"maxTtftMs": 5}, "").max_ttft_ms == 5
    with pytest.raises(ConfigError, match=r"p.MAXTTFTMS: given twice"):
        decode(Warm, {"maxTTFTMs": 5, "MAXTTFTMS": 6}, "p")
    with pytest.raises(ConfigError, match=r"p.max_ttft_ms: unknown; did you mean 'maxTTFTMs'\?"):
        decode(Warm, {"max_ttft_ms": 5}, "p")


@dataclass
class Speed:
    tokens_per_second: float = field(default=1.0, metadata={"alias": "speed"})
    pods: int = 1

    def __post_init__(self) -> None:
        if self.tokens_per_second <= 0:
            raise ValueError(f"tokens_per_second: expected more than 0, got {self.tokens_per_second}")


@pytest.mark.parametrize("key", ["tokensPerSecond", "TOKENSPERSECOND", "speed", "Speed"])
def test_a_field_is_set_by_its_alias_too(key: str) -> None:
    assert decode(Speed, {key: 5}, "p") == Speed(tokens_per_second=5.0)
    with pytest.raises(ConfigError) as refused:
        decode(Speed, {key: "fast"}, "p")
    assert str(refused.value) == f"p.{key}: expected a number, got 'fast'"
    with pytest.raises(ConfigError) as refused:
        decode(Speed, {key: -1, "pods": 2}, "p")
    assert str(refused.value) == f"p.{key}: expected more than 0, got -1.0"


@pytest.mark.parametrize(("first", "second"), [("tokensPerSecond", "speed"), ("speed", "tokensPerSecond")])
def test_a_field_and_its_alias_are_refused_together(first: str, second: str) -> None:
    with pytest.raises(ConfigError) as refused:
        decode(Speed, {first: 1, second: 1}, "p")
    assert str(refused.value) == (
        f"p.{second}: the same parameter as {first!r}, which is given too; expected one of them"
    )
    assert list(parameters_of(Speed)) == ["tokensPerSecond", "pods"]


def test_state_is_no_parameter() -> None:
    with pytest.raises(ConfigError, match=r"p.seen: unknown; expected one of floor, count"):
        decode(Warm, {"seen": 5}, "p")


def test_what_a_constructor_refuses_is_reported_at_its_parameter() -> None:
    with pytest.raises(ConfigError) as refused:
        decode(Warm, {"count": 0}, "p")
    assert str(refused.value) == "p.count: expected 1 or more, got 0"
    with pytest.raises(ConfigError) as refused:
        decode(Warm, {"steps": [{"at": 1}, {"at": -1}]}, "p")
    assert str(refused.value) == "p.steps[1].at: expected 0 or more, got -1.0"


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda children: st.lists(children, max_size=4) | st.dictionaries(st.text(max_size=9), children, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.sampled_from(["floor", "count", "mode", "wait", "names", "labels", "steps", "x"]), VALUES))
def test_any_value_is_taken_or_refused(value: dict[str, Any]) -> None:
    problems = Problems()
    with problems.collect():
        assert isinstance(decode(Warm, value, "p"), Warm)
    assert all(error.path.startswith("p.") for error in problems.errors)
