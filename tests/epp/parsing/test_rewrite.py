import json
import tracemalloc
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.errors import BadRequest
from epp.parsing.rewrite import MAX_KEY, MAX_KEYS, NameBack, rewrite_model


@pytest.mark.parametrize(
    ("body", "rewritten"),
    [
        (b'{"model":"a"}', b'{"model":"new"}'),
        (b' \n{ "model" :\t"a" , "x":1 }\r\n', b' \n{ "model" :\t"new" , "x":1 }\r\n'),
        (b'{"x":{"model":"a"},"model":"a"}', b'{"x":{"model":"a"},"model":"new"}'),
        (b'{"x":"\\"model\\":\\"a\\"","model":"a"}', b'{"x":"\\"model\\":\\"a\\"","model":"new"}'),
        (b'{"mod\\u0065l":"a","modelx":"a"}', b'{"mod\\u0065l":"new","modelx":"a"}'),
        (b'{"model":"a","model":"bc","x":1,"x":2}', b'{"model":"new","model":"new","x":1,"x":2}'),
        (b'{"a\\"{,:":[1,"}"],"model":"\\\\"}', b'{"a\\"{,:":[1,"}"],"model":"new"}'),
        (b'{"model":"\\u0061","n":1.50e+3}', b'{"model":"new","n":1.50e+3}'),
        (b"{}", b"{}"),
    ],
)
def test_only_the_value_changes(body: bytes, rewritten: bytes) -> None:
    assert rewrite_model(body, "new") == rewritten


def test_the_new_name_is_escaped() -> None:
    assert json.loads(rewrite_model(b'{"model":"a"}', 'q"\\\n😀')) == {"model": 'q"\\\n😀'}


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":', b'{"\xff":1}'])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest):
        rewrite_model(body, "new")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        (b"".join(b'"%d":1,' % n for n in range(1_000_000)), f"more than {MAX_KEYS} fields"),
        (b'"k":1,' * 1_000_000, f"more than {MAX_KEYS} fields"),
        (b'"' + b"\\u006b" * 1_000_000 + b'":1,', f"1000000 characters; expected at most {MAX_KEY}"),
    ],
    ids=["many", "equal", "long"],
)
def test_what_would_take_long_is_refused_before_it_takes_memory(fields: bytes, named: str) -> None:
    body = b"{" + fields + b'"model":"a"}'
    tracemalloc.start()
    try:
        with pytest.raises(BadRequest, match=named):
            rewrite_model(body, "new")
        assert tracemalloc.get_traced_memory()[1] < 4_000_000  # pairs of the first would take 300 MB
    finally:
        tracemalloc.stop()


def test_as_many_fields_as_are_taken_are_rewritten() -> None:
    names = [f"{n}" for n in range(MAX_KEYS - 2)]
    body = json.dumps({"model": "a", **dict.fromkeys(names, 1), "k" * MAX_KEY: [{"model": "a"}] * 5}).encode()
    assert json.loads(rewrite_model(body, "new")) == {**json.loads(body), "model": "new"}


TEXT = st.one_of(st.sampled_from(["model", "mod", 'a"b', "\\", "{", "é😀"]), st.text(st.characters(codec="utf-8")))
VALUES: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)
SPACE = st.text(" \t\r\n", max_size=3)


@st.composite
def objects(draw: st.DrawFn) -> tuple[bytes, list[tuple[str, Any]]]:
    """A JSON object written any way it may be, and its pairs, repeated keys included."""
    pairs = draw(st.lists(st.tuples(TEXT, VALUES), max_size=6))
    ascii_only = draw(st.booleans())
    parts = []
    for key, value in pairs:
        spaces = [draw(SPACE) for _ in range(4)]
        written = json.dumps(value, ensure_ascii=ascii_only, indent=draw(st.sampled_from([None, 1])))
        key_text = json.dumps(key, ensure_ascii=ascii_only)
        parts.append(spaces[0] + key_text + spaces[1] + ":" + spaces[2] + written + spaces[3])
    return (draw(SPACE) + "{" + (",".join(parts) or draw(SPACE)) + "}" + draw(SPACE)).encode(), pairs


@given(objects(), TEXT)
def test_a_rewritten_body_reads_as_the_old_one_with_another_model(
    written: tuple[bytes, list[tuple[str, Any]]], model: str
) -> None:
    body, pairs = written
    found: list[tuple[str, Any]] = []
    json.loads(rewrite_model(body, model), object_pairs_hook=lambda each: found.__setitem__(slice(None), each))
    values = {key: model if key == "model" else value for key, value in pairs}
    assert json.loads(rewrite_model(body, model)) == values
    assert [key for key, _ in found] == [key for key, _ in pairs]
    assert all(value == model for key, value in found if key == "model")


@given(objects())
def test_rewriting_to_a_mark_and_back_restores_every_byte(written: tuple[bytes, list[tuple[str, Any]]]) -> None:
    body, pairs = written
    models = [json.dumps(value) for key, value in pairs if key == "model"]
    marked = rewrite_model(body, "\x00mark\x00")
    pieces = marked.split(b'"\\u0000mark\\u0000"')
    assert len(pieces) == len(models) + 1
    at = 0
    for piece in pieces:
        at = body.index(piece, at) + len(piece)


# --- back again -----------------------------------------------------------------------------------------------------


def back(body: bytes, cuts: list[int], model: str = "tuned", asked: str = "base") -> bytes:
    """The body as it is passed on when it comes in these pieces."""
    name = NameBack(model, asked)
    edges = [0, *sorted(cut % (len(body) + 1) for cut in cuts), len(body)]
    pieces = [body[a:b] for a, b in pairwise(edges)]
    return b"".join(name.feed(piece, whole=n == len(pieces) - 1) for n, piece in enumerate(pieces))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model":"tuned","x":1}', b'{"model":"base","x":1}'),
        (b'{"model": "tuned"}', b'{"model": "base"}'),
        (b'data: {"model":"tuned"}\n\ndata: {"model":"tuned"}\n\n', b'data: {"model":"base"}\n\n' * 2),
        (b'{"message":{"model":"tuned"}}', b'{"message":{"model":"base"}}'),
        (b'{"model":  "tuned"}', b'{"model":  "tuned"}'),
        (b'{"model":"tuned2"}', b'{"model":"tuned2"}'),
        (b'{"content":"tuned"}', b'{"content":"tuned"}'),
        (b'no json "model":"tun', b'no json "model":"tun'),
        (b'no json "model":"tuned"model":"tuned"', b'no json "model":"base"model":"tuned"'),
        (b"", b""),
    ],
)
def test_an_answer_names_the_model_that_was_asked_for(body: bytes, expected: bytes) -> None:
    assert back(body, []) == expected
    for cut in range(len(body)):
        assert back(body, [cut]) == expected
    assert back(body, list(range(len(body)))) == expected


@given(
    st.lists(st.sampled_from(['"model":"tuned"', '"model": "tuned"', '"model":"', '"', "tuned", "x", "}\n"])),
    st.lists(st.integers(0, 200)),
)
def test_however_it_is_cut_it_is_the_same(parts: list[str], cuts: list[int]) -> None:
    body = "".join(parts).encode()
    assert back(body, cuts) == back(body, [])


def test_only_the_beginning_of_a_name_is_held_back() -> None:
    name = NameBack("tuned", "base")
    assert name.feed(b'data: {"id":"1","mod', whole=False) == b'data: {"id":"1",'
    assert name.feed(b'e":1}\n\n', whole=False) == b'"mode":1}\n\n'
    assert name.feed(b'{"model":"tune', whole=False) == b"{"
    assert name.feed(b"", whole=True) == b'"model":"tune'
