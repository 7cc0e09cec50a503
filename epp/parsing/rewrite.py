"""Another model name in a body, every other byte as it was; and back again in the answer."""

import re
from typing import Any, Final

import msgspec
from msgspec import Raw

from epp.errors import BadRequest
from epp.parsing.body import decode

MAX_KEYS: Final = 1024
"""Fields of a body's outermost object, where the model is rewritten. The engines know some hundred."""
MAX_KEY: Final = 1024
"""Characters of such a field's name."""
_QUOTE, _COLON = b'":'
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)


class _Key:
    """A key with an identity of its own, so that a mapping keeps every pair, in order, even of equal keys."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _Keys:
    """Makes the keys of one body after the other. Raises BadRequest beyond our bounds."""

    left = MAX_KEYS
    """How many more may come."""

    def __call__(self, kind: type[Any], text: str) -> _Key:
        self.left -= 1
        if self.left < 0:
            raise BadRequest(f"the outermost object has more than {MAX_KEYS} fields; expected at most that many")
        if len(text) > MAX_KEY:
            raise BadRequest(f"{text[:60]!r}…: a field's name of {len(text)} characters; expected at most {MAX_KEY}")
        return _Key(text)


_KEYS: Final = _Keys()
_PAIRS: Final = msgspec.json.Decoder(dict[_Key, Raw], dec_hook=_KEYS)


def rewrite_model(body: bytes, model: str) -> bytes:
    """`body` with `model` as the value of each top-level "model" key. Not for several threads.

    Of equal keys all are changed: readers differ in which one counts. BadRequest if the body is no JSON object, or has
    more than `MAX_KEYS` top-level keys or one of more than `MAX_KEY` characters.
    """
    _KEYS.left = MAX_KEYS
    value = msgspec.json.encode(model)
    pieces: list[bytes | memoryview] = []
    view, find, string = memoryview(body), body.find, _STRING.match
    done = at = 0
    for key, raw in decode(_PAIRS, body).items():
        # Valid JSON has blanks, a comma and a colon between these, and nothing else: `find` skips them fastest.
        found = string(body, find(_QUOTE, at))
        assert found is not None, "valid JSON has a key before each value"
        inside = memoryview(raw)
        start = find(inside[0], find(_COLON, found.end()))
        at = start + len(inside)
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
