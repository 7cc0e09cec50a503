"""Token counts out of an answer as it passes by, in pieces of any size, for next to nothing a piece."""

import json
import re
from typing import Any, Final

from epp.parsing.request import Usage

_USAGE: Final = re.compile(rb'"usage"[ \t\r\n]{0,16}:[ \t\r\n]{0,16}\{')
_LONGEST_MATCH: Final = len(b'"usage":{') + 32
_LARGEST: Final = 8192
"""Bytes of a usage object; real ones have some hundred."""
_MOST_TOKENS: Final = 1_000_000_000
_DECODER: Final = json.JSONDecoder()


class UsageReader:
    """Reads `usage` from a JSON or SSE answer: OpenAI's chat, completions, embeddings and responses, Anthropic's.

    It looks for the key itself and decodes only the object behind it, so neither events nor the document need to be
    put together and at most `_LARGEST` bytes are kept. Within a JSON string the key's quotes would be escaped, so
    generated text cannot imitate it. Later counts overwrite earlier ones: that joins Anthropic's first and last event
    and is right for running counts. Never raises; an answer without usage gives None.
    """

    __slots__ = ("_counts", "_looks", "_rest")

    def __init__(self, content_type: str) -> None:
        kind = content_type.lower()
        self._looks = not kind or "json" in kind or "event-stream" in kind
        self._rest = b""  # the end of the last chunk: where a key, or an object, may have begun
        self._counts: dict[str, int] = {}

    def feed(self, chunk: bytes) -> None:
        """The next piece of the answer's body."""
        if not self._looks:
            return
        data = self._rest + chunk
        if b"usage" not in data:
            self._rest = data[-_LONGEST_MATCH:]
            return
        at = 0
        while (found := _USAGE.search(data, at)) is not None:
            start = found.end() - 1
            size = self._read(data[start : start + _LARGEST])
            if size == 0 and len(data) - start < _LARGEST:
                self._rest = data[found.start() :]
                return
            at = start + max(size, 1)
        self._rest = data[max(at, len(data) - _LONGEST_MATCH) :]

    def finish(self) -> Usage | None:
        """What was found, or None."""
        if not self._counts:
            return None
        return Usage(**self._counts)

    def _read(self, data: bytes) -> int:
        """Take over the counts of the object `data` begins with; returns its length, 0 if it is not all there."""
        if b"}" not in data:
            return 0
        text = data.decode("latin-1")  # one character a byte: positions stay, and keys are ASCII
        try:
            usage, end = _DECODER.raw_decode(text)
        except (ValueError, RecursionError):
            return 0
        self._counts.update(_counts(usage))
        return end


def _counts(usage: dict[str, Any]) -> dict[str, int]:
    prompt = _first(usage, "prompt_tokens", "input_tokens")
    completion = _first(usage, "completion_tokens", "output_tokens")
    cached = -1
    for field in ("prompt_tokens_details", "input_tokens_details"):
        if isinstance(details := usage.get(field), dict):
            cached = max(cached, _first(details, "cached_tokens"))
    if (read := _first(usage, "cache_read_input_tokens")) >= 0:
        # Anthropic counts cached tokens beside input_tokens, not within them (Messages API, prompt caching).
        cached = read
        prompt = prompt + read + max(0, _first(usage, "cache_creation_input_tokens")) if prompt >= 0 else prompt
    found = {"prompt": prompt, "completion": completion, "cached": cached}
    return {name: count for name, count in found.items() if count >= 0}


def _first(fields: dict[str, Any], *names: str) -> int:
    for name in names:
        if type(value := fields.get(name)) is int and 0 <= value <= _MOST_TOKENS:
            return value
    return -1
