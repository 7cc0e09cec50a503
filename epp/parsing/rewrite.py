"""Another model name in a body, every other byte as it was."""

import re
from typing import Any

import msgspec
from msgspec import Raw

from epp.parsing.body import decode


class _Key:
    """A key with an identity of its own, so that a mapping keeps every pair, in order, even of equal keys."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


def _hook(kind: type[Any], value: str) -> _Key:
    return _Key(value)


_PAIRS = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=_hook)
_UP_TO_VALUE = re.compile(rb'[ \t\r\n,{]*+"(?:[^"\\]++|\\.)*+"[ \t\r\n]*+:[ \t\r\n]*+', re.DOTALL)


def rewrite_model(body: bytes, model: str) -> bytes:
    """`body` with `model` as the value of each top-level "model" key; linear in the body's length.

    Of equal keys all are changed: readers differ in which one counts. BadRequest if the body is no JSON object.
    """
    value = msgspec.json.encode(model)
    pieces: list[bytes | memoryview] = []
    view = memoryview(body)
    done = at = 0
    for key, raw in decode(_PAIRS, body).items():
        found = _UP_TO_VALUE.match(body, at)
        assert found is not None, "valid JSON has a key before each value"
        start, at = found.end(), found.end() + memoryview(raw).nbytes
        if key.text == "model":
            pieces += (view[done:start], value)
            done = at
    return b"".join([*pieces, view[done:]])
