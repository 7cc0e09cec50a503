"""What a first token takes beside what is computed for it, learned for predictions of TTFT.

    TTFT = overhead + share * seconds of computing, by the learned speed + what else is known

An engine takes some time for any request however short: its HTTP server, its scheduler, the rest of the step under way
and prompts that come just after and are computed in the same step. Learned speeds (`speeds`) have a part of that in
their seconds, which is right for a bill and too much for a long prompt. So both are fitted, to what was predicted of
the last first tokens that were seen in the pool: least squares of relative errors, in which larger errors count by
their size, so that a strange one changes little.
"""

from collections.abc import Sequence
from math import inf
from typing import Final

_KEPT: Final = 0.98
"""What an observation counts after each one more: the last fifty or so make the fit."""
_PRIOR: Final = 2.0
"""Observations that the learned speed counts for: it decides where prompts do not differ in length."""
_NOISE: Final = 0.1
"""Relative error from which an observation counts by its size."""
_LEAST, _MOST = 0.1, 2.0
"""Bounds of `share`."""
_NUMBERS: Final = 6


class Overhead:
    """One pool's."""

    __slots__ = ("_count", "_w", "_wx", "_wxx", "_wxy", "_wy", "seconds", "share")

    def __init__(self) -> None:
        self.seconds = 0.0
        """That any first token takes."""
        self.share = 1.0
        """What computing takes, of its seconds by the learned speed."""
        self._count = 0.0
        """Observations, and their weighted sums: x modelled seconds of computing at factor 1, y measured seconds
        without what else was known."""
        self._w = self._wx = self._wxx = self._wy = self._wxy = 0.0

    def observe(self, computing: float, besides: float, predicted: float, measured: float, pool: float) -> None:
        """A first token came after `measured` seconds. `predicted` were expected: overhead, `computing` modelled
        seconds at factor 1, and `besides`. `pool`: the pool's factor now.
        """
        scale = predicted if predicted > measured else measured
        w, error = 1.0 / (scale * scale), abs(measured - predicted)
        if error > _NOISE * scale:
            w *= _NOISE * scale / error
        y, wx = measured - besides, w * computing
        self._count = _KEPT * self._count + 1
        self._w = _KEPT * self._w + w
        self._wx = _KEPT * self._wx + wx
        self._wxx = _KEPT * self._wxx + wx * computing
        self._wy = _KEPT * self._wy + w * y
        self._wxy = _KEPT * self._wxy + wx * y
        self._fit(pool)

    def _fit(self, pool: float) -> None:
        w, wx, wxx, wy = self._w, self._wx, self._wxx, self._wy
        prior = _PRIOR / self._count * wxx
        xx, xy = wxx + prior, self._wxy + prior * pool
        determinant = w * xx - wx * wx
        if determinant > 0:  # something was computed
            factor = (w * xy - wx * wy) / determinant
            if wy < factor * wx:  # there is no less overhead than none
                factor = xy / xx
            share = factor / pool
            self.share = _LEAST if share < _LEAST else _MOST if share > _MOST else share
        seconds = (wy - self.share * pool * wx) / w
        self.seconds = seconds if seconds > 0 else 0.0

    def learned(self) -> list[float]:
        """For `restore`; nothing where nothing was observed."""
        sums = [self._count, self._w, self._wx, self._wxx, self._wy, self._wxy]
        return sums if self._count else []

    def restore(self, sums: Sequence[float], pool: float) -> None:
        """Take over what was observed elsewhere, where nothing was here. ValueError if it cannot be."""
        if len(sums) != _NUMBERS:
            raise ValueError(f"{len(sums)} sums of first tokens, expected {_NUMBERS}")
        count, w, wx, wxx, wy, wxy = map(float, sums)
        possible = 0 < count <= 1 / (1 - _KEPT) + 1 and 0 < w < inf and 0 <= wx < inf and 0 <= wxx < inf
        if not (possible and wx * wx <= 1.001 * w * wxx and abs(wy) < inf and abs(wxy) < inf):
            raise ValueError(f"sums of {count} first tokens: {w}, {wx}, {wxx}, {wy}, {wxy}")
        if not self._count:
            self._count, self._w, self._wx, self._wxx, self._wy, self._wxy = count, w, wx, wxx, wy, wxy
            self._fit(pool)
