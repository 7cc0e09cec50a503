"""Which of many values are among the largest, told one by one."""

from typing import Final

_STEP: Final = 0.05
"""By which share the bound moves: so a pool whose prompts become eight times as long is followed within some forty of
them, and one value that is out of all proportion is forgotten after some thousands."""


class Heaviest:
    """About a `share` of the values, the largest: those above a bound that rises with each of them and falls with each
    other, so that it stays where a `share` is above it (Robbins and Monro, 1951).
    """

    __slots__ = ("_bound",)

    def __init__(self, start: float) -> None:
        """`start`: a value as it is likely to come; at least 1, as the bound always is."""
        self._bound = start

    def has(self, value: float, share: float) -> bool:
        """Whether `value` is one of them; each is to be asked about once. `share`: above 0, below 1."""
        if value > self._bound:
            self._bound *= 1 + _STEP * (1 - share)
            return True
        self._bound = max(1.0, self._bound * (1 - _STEP * share))
        return False
