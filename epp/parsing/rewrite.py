"""Another model name in a body, every other byte as it was; and back again in the answer."""

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


class NameBack:
    """The model's name in an answer that passes by in pieces: for `model`, the one the client asked for.

    As the reference picker does it: wherever `"model":"NAME"` stands, with one space after the colon or none, at any
    depth, in JSON and in server-sent events alike. There whole answers are held for it; here only what may be the
    beginning of such a place.
    """

    __slots__ = ("_held", "_new", "_place", "_starts")

    def __init__(self, model: str, asked: str) -> None:
        old, self._new = msgspec.json.encode(model), msgspec.json.encode(asked)
        self._starts = [b'"model":' + old, b'"model": ' + old]
        self._place = re.compile(b'("model": ?)' + re.escape(old))
        self._held = b""

    def feed(self, piece: bytes, *, whole: bool) -> bytes:
        """What to pass on for the next piece. `whole`: hold nothing back; no more comes, or cannot be waited for."""
        data = self._held + piece
        passed: list[bytes] = []
        done = 0
        for found in self._place.finditer(data):
            passed += (data[done : found.start()], found[1], self._new)
            done = found.end()
        held = 0 if whole else max(_overlap(data, done, start) for start in self._starts)
        cut = len(data) - held
        self._held = data[cut:]
        return b"".join((*passed, data[done:cut]))


def _overlap(data: bytes, done: int, start: bytes) -> int:
    """Length of the longest end of `data`, from `done` on, that is a beginning of `start`, but not all of it."""
    at = data.find(b'"', max(done, len(data) - len(start) + 1))
    while at >= 0:
        if start.startswith(data[at:]):
            return len(data) - at
        at = data.find(b'"', at + 1)
    return 0
