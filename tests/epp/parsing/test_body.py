import sys

import msgspec
import pytest

from epp.errors import BadRequest
from epp.parsing.body import MAX_MODEL, Body, decode, shown

DEEP = 100_000 if sys.version_info < (3, 14) else 1_000_000
"""From Python 3.14 on C code recurses as far as the stack reaches."""
DECODER = msgspec.json.Decoder(Body)


def body(text: bytes) -> Body:
    return decode(DECODER, text)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"", "the body is empty, or the gateway does not show it; expected a JSON object"),
        (b"\x00", "invalid character (byte 0)"),
        (b'{"model": "a",}', "byte 14"),
        (b'{"model": "a"} x', "trailing characters (byte 16)"),
        (b'{"model": "a"', "ends too soon (byte 13)"),
        (b'{"model": NaN}', "byte 10"),
        (b'{"a": "\\ud800"}', "half a surrogate pair"),
        (b'\xef\xbb\xbf{"model": "a"}', "byte order mark (byte 0)"),
        ('{"model": "a"}'.encode("utf-16"), "byte 0"),
        (b"[]", "not a JSON object: expected `object`, got `array`"),
        (b"null", "got `null`"),
        (b'"text"', "got `str`"),
        (b'{"x":' + b"[" * DEEP + b"]" * DEEP + b"}", "nested too deeply"),
    ],
)
def test_what_is_no_json_object_is_refused_with_its_place(text: bytes, says: str) -> None:
    with pytest.raises(BadRequest) as error:
        body(text)
    assert says in error.value.message
    assert error.value.status == 400


@pytest.mark.parametrize("value", [b"", b"null", b"5", b"[]", b'""', b'"\xff"', b"1e999999", b'"' + b"m" * 1025 + b'"'])
def test_a_model_that_is_no_name_is_refused(value: bytes) -> None:
    text = b'{"model": ' + value + b"}" if value else b"{}"
    with pytest.raises(BadRequest, match="model: ") as error:
        body(text).model_name()
    assert error.value.param == "model"
    assert len(error.value.message) < 300


def test_a_model_may_have_escapes_any_language_and_the_longest_length() -> None:
    assert body(b'{"mod\\u0065l": "qw\\u0065n/\\ud83d\\ude00"}').model_name() == "qwen/😀"
    assert body(b'{"model": "' + b"m" * MAX_MODEL + b'"}').model_name() == "m" * MAX_MODEL


def test_the_last_of_equal_keys_counts_as_in_the_engines_reader() -> None:
    assert body(b'{"model": "a", "model": "b"}').model_name() == "b"


@pytest.mark.parametrize(
    ("value", "stream", "limit"),
    [
        (b"true", True, None),
        (b"false", False, None),
        (b"17", False, 17),
        (b'"17"', False, 17),
        (b"null", False, None),
        (b"-1", False, None),
        (b"1e3", False, 1000),
        (b"17.0", False, 17),
        (b"17.5", False, None),
        (b"1e400", False, 1_000_000_000),
        (b"10000000000", False, 1_000_000_000),
        (b"9" * 5000, False, None),
        (b"[[1]]", False, None),
    ],
)
def test_fields_of_the_engine_are_read_where_they_make_sense_and_never_refused(
    value: bytes, stream: bool, limit: int | None
) -> None:
    read = body(b'{"stream": %b, "max_tokens": %b, "cache_salt": %b}' % (value, value, value))
    assert read.streams() is stream
    assert read.answer_tokens() == limit
    assert read.salt() == ("17" if value == b'"17"' else "")


def test_an_empty_body_object_has_no_fields() -> None:
    read = body(b"{}")
    assert (read.streams(), read.answer_tokens(), read.salt()) == (False, None, "")


def test_values_are_shown_short_and_printable() -> None:
    assert shown(msgspec.Raw(b'"\xff"')) == '"\\xff"'
    assert shown(msgspec.Raw(b"[" + b"1," * 500 + b"1]")).endswith("… (1003 bytes)")
