"""Tokens from bytes, by a ratio learned per model."""

from collections import OrderedDict
from typing import Final

DEFAULT_RATIO: Final = 4.0
"""Bytes a token until something was learned: English text with common BPE vocabularies."""
_LEAST, _MOST = 0.5, 16.0
_MEMORY: Final = 0.98
"""What is kept of the past at each observation: the last fifty or so count."""
_FEWEST: Final = 256
"""Bytes below which a prompt says little: the chat template's own tokens outweigh it."""
_HEAVIEST: Final = 65536.0
"""Bytes beyond which a prompt weighs no more, so that one long document does not outweigh fifty chats."""
_PRIOR: Final = 1024.0
"""Bytes of belief in `DEFAULT_RATIO` at the start."""


class TokenRatio:
    """Bytes of a raw prompt per token, per model. Forgets the models used least recently beyond `limit`."""

    def __init__(self, limit: int = 1000) -> None:
        self._limit = limit
        self._seen: OrderedDict[str, tuple[float, float]] = OrderedDict()  # model -> smoothed (bytes, tokens)

    def tokens(self, model: str, nbytes: int) -> int:
        """Estimated tokens of `nbytes` bytes of prompt; at least 1 for a prompt that is not empty."""
        if nbytes <= 0:
            return 0
        sums = self._seen.get(model)
        return round(nbytes / (DEFAULT_RATIO if sums is None else sums[0] / sums[1])) or 1

    def ratio(self, model: str) -> float:
        """Bytes a token, 0.5..16."""
        if (sums := self._seen.get(model)) is None:
            return DEFAULT_RATIO
        return sums[0] / sums[1]

    def observe(self, model: str, nbytes: int, tokens: int) -> None:
        """Learn from an answer: this prompt had `nbytes` bytes and `tokens` tokens. Implausible pairs are bounded."""
        if nbytes < _FEWEST or tokens <= 0:
            return
        ratio = min(max(nbytes / tokens, _LEAST), _MOST)
        weight = min(float(nbytes), _HEAVIEST)
        old_bytes, old_tokens = self._seen.get(model, (_PRIOR, _PRIOR / DEFAULT_RATIO))
        self._seen[model] = (old_bytes * _MEMORY + weight, old_tokens * _MEMORY + weight / ratio)
        self._seen.move_to_end(model)
        if len(self._seen) > self._limit:
            self._seen.popitem(last=False)
