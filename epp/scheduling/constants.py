"""How a pool's own constants differ from the configured ones: two factors, of prefill and of what a step takes beside.

One factor cannot tell them apart: where a token's prefill takes three times as long as configured and a step as long as
configured, the factor lies between, and lies elsewhere when the mix of both changes. What engines count between scrapes
has them in changing shares, so two can be fitted. Least squares of relative errors, outliers weighted down, over the
last stretches of all endpoints together: they differ in speed, and hardly in the shape of their work. What attention
takes, against a token's prefill, follows from the model's shape and is not fitted: no engine counts pairs.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from math import exp, inf, log, sqrt
from statistics import median
from typing import Final, NamedTuple

_SECONDS: Final = 3.0
"""Of a stretch at least."""
_PROMPTS: Final = 20.0
"""Long prompts that a stretch has room for, at least. An engine counts a prompt's tokens when all are computed, so
short stretches have others' work in them, and prefill looks cheaper and steps dearer than they are: with 3 s for all
the mean TTFT of the Mooncake trace was 30 % longer."""
FEW: Final = 16
"""Stretches up to which each changes the fit much; so many are taken that are a third as long."""
_KEPT: Final = 128
"""Stretches. At least `_LEAST` of them make a fit."""
_LEAST: Final = 4
_EXPECTED: Final = 1.2
"""How far the configuration is expected to be off, as a natural logarithm: what is known less surely moves less."""
_NOISE: Final = 0.05
"""Relative errors of stretches below which more agreement says nothing: there are few of them."""
_OUTLIER: Final = 1.5
"""Times the usual error from which a stretch counts for less."""
_MOST: Final = log(20)
"""Natural logarithm of the most that the two factors may differ by."""


class Stretch(NamedTuple):
    """Seconds in which an endpoint was at work all the time, and what it did, in modelled seconds."""

    prefill: float
    steps: float
    seconds: float

    def and_then(self, more: "Stretch") -> "Stretch":
        return Stretch(self.prefill + more.prefill, self.steps + more.steps, self.seconds + more.seconds)


def stretch_of(values: Sequence[float]) -> Stretch:
    """What another replica says of one. ValueError if it cannot be."""
    made = Stretch(*map(float, values))
    if not (made.prefill >= 0 and made.steps >= 0 and 0 < made.prefill + made.steps < inf and 0 < made.seconds < inf):
        raise ValueError(f"a stretch of {made.prefill} s of prefill and {made.steps} s of steps in {made.seconds} s")
    return made


class Constants:
    """`ratio`: times that a step's seconds are to be taken, where a token's prefill counts as configured."""

    def __init__(self) -> None:
        self.ratio = 1.0
        self.prefill_error: float | None = None
        """Standard error, as a share, of the factor of prefill; None: nothing is fitted."""
        self.steps_error: float | None = None
        self.stretches: deque[Stretch] = deque(maxlen=_KEPT)

    def observe(self, so_far: Stretch, more: Stretch, speed: float, prompt: float) -> Stretch:
        """One more scrape's of an endpoint. Returns what is to be given as `so_far` with the next.

        `speed`: seconds there against those in the whole pool. `prompt`: seconds of a long prompt's prefill there.
        """
        whole = so_far.and_then(more)
        least = max(_SECONDS, _PROMPTS * prompt)
        if whole.seconds < (least if len(self.stretches) >= FEW else least / 3):
            return whole
        self.stretches.append(whole._replace(seconds=whole.seconds / speed))
        return Stretch(0.0, 0.0, 0.0)

    def restore(self, stretches: Iterable[Sequence[float]]) -> None:
        """Take over what was observed elsewhere, where nothing was here."""
        if not self.stretches:
            self.stretches.extend(map(stretch_of, stretches))

    def fit(self) -> None:
        """Make the factors anew; they stay where nothing can be said."""
        if len(self.stretches) < _LEAST:
            return
        rows = [(each.prefill / each.seconds, each.steps / each.seconds) for each in self.stretches]
        solved = _solve(rows, [1.0] * len(rows))
        if solved is None:
            return
        errors = [abs(solved.prefill * p + solved.steps * s - 1) for p, s in rows]
        usual = max(_NOISE, 1.5 * median(errors))
        weights = [min(1.0, _OUTLIER * usual / max(error, 1e-9)) for error in errors]
        solved = _solve(rows, weights)
        if solved is None or solved.prefill <= 0 or solved.steps <= 0:
            return
        left = sum(
            w * (solved.prefill * p + solved.steps * s - 1) ** 2 for w, (p, s) in zip(weights, rows, strict=True)
        )
        noise = max(_NOISE**2, left / max(1.0, sum(weights) - 2))
        prefill, steps = solved.prefill_spread / solved.prefill**2, solved.steps_spread / solved.steps**2
        both = solved.both_spread / (solved.prefill * solved.steps)
        self.prefill_error, self.steps_error = sqrt(noise * prefill), sqrt(noise * steps)
        apart = log(solved.steps / solved.prefill)
        apart *= _EXPECTED**2 / (_EXPECTED**2 + noise * (prefill + steps - 2 * both))
        self.ratio = exp(max(-_MOST, min(_MOST, apart)))


class _Solution(NamedTuple):
    prefill: float
    steps: float
    prefill_spread: float
    """Variances and covariance, of errors of variance 1."""
    steps_spread: float
    both_spread: float


def _solve(rows: Sequence[tuple[float, float]], weights: Sequence[float]) -> _Solution | None:
    """The factors with which prefill and steps sum to 1 in each row; None where rows say nothing of one of them."""
    pp = ss = ps = p1 = s1 = 0.0
    for w, (p, s) in zip(weights, rows, strict=True):
        pp, ss, ps = pp + w * p * p, ss + w * s * s, ps + w * p * s
        p1, s1 = p1 + w * p, s1 + w * s
    determinant = pp * ss - ps * ps
    if not 1e-9 * pp * ss < determinant < inf:
        return None
    return _Solution(
        (p1 * ss - s1 * ps) / determinant,
        (s1 * pp - p1 * ps) / determinant,
        ss / determinant,
        pp / determinant,
        -ps / determinant,
    )
