"""How a pool's own constants differ from the configured ones: three factors, of prefill, of what a step takes whatever
is in it, and of what it takes for the tokens it generates and their context.

One factor cannot tell them apart: where a token's prefill takes three times as long as configured and a step as long as
configured, the factor lies between, and lies elsewhere when the mix of both changes. What engines count between scrapes
has them in changing shares, so they can be fitted: least squares of relative errors, outliers weighted down, over the
last stretches of all endpoints together: they differ in speed, and hardly in the shape of their work. Where shares do
not change, the configured relations stay. What attention takes, against a token's prefill, follows from the model's
shape and is not fitted: no engine counts pairs.
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
_EXPECTED: Final = 0.85
"""How far each constant is expected to be off from what the three have in common, as a natural logarithm: what is known
less surely moves less."""
_ROUNDS: Final = 8
"""Of the fit, at most: the factors are fitted as logarithms, so step by step."""
_FARTHEST: Final = 1.0
"""Natural logarithm of how far a factor may move in one of them."""
_CLOSE: Final = 1e-3
"""Moves below which there is no more to come."""
_NOISE: Final = 0.05
"""Relative errors of stretches below which more agreement says nothing: there are few of them."""
_ROUGH: Final = 0.1
"""The same, before anything is known of them."""
_OUTLIER: Final = 1.5
"""Times the usual error from which a stretch counts for less."""
_MOST: Final = log(20)
"""Natural logarithm of the most that the two factors may differ by."""


class Ratios(NamedTuple):
    """Times that what a step takes is to be taken, where a token's prefill counts as configured."""

    steps: float = 1.0
    """Whatever is in it."""
    decodes: float = 1.0
    """For the tokens it generates and their context."""


class Stretch(NamedTuple):
    """Seconds in which an endpoint was at work all the time, and what it did, in modelled seconds."""

    prefill: float
    steps: float
    decodes: float
    seconds: float

    def and_then(self, more: "Stretch") -> "Stretch":
        return Stretch(
            self.prefill + more.prefill,
            self.steps + more.steps,
            self.decodes + more.decodes,
            self.seconds + more.seconds,
        )

    def modelled(self, ratios: Ratios) -> float:
        """Seconds, where prefill takes as long as configured."""
        return self.prefill + ratios.steps * self.steps + ratios.decodes * self.decodes


NOTHING: Final = Stretch(0.0, 0.0, 0.0, 0.0)


def stretch_of(values: Sequence[float]) -> Stretch:
    """What another replica says of one. ValueError if it cannot be."""
    if len(values) != len(Stretch._fields):
        raise ValueError(f"a stretch of {len(values)} numbers, expected {len(Stretch._fields)}")
    made = Stretch(*map(float, values))
    done = made.prefill + made.steps + made.decodes
    if not (min(made) >= 0 and 0 < done < inf and 0 < made.seconds < inf):
        raise ValueError(
            f"a stretch of {made.prefill} s of prefill, {made.steps} s of steps and {made.decodes} s of decodes in "
            f"{made.seconds} s"
        )
    return made


class Constants:
    """`ratios`: those of the pool."""

    def __init__(self) -> None:
        self.ratios = Ratios()
        self.prefill_error: float | None = None
        """Standard error, as a share, of the factor of prefill; None: nothing is fitted."""
        self.steps_error: float | None = None
        self.decodes_error: float | None = None
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
        return NOTHING

    def restore(self, stretches: Iterable[Sequence[float]]) -> None:
        """Take over what was observed elsewhere, where nothing was here."""
        if not self.stretches:
            self.stretches.extend(map(stretch_of, stretches))

    def fit(self) -> None:
        """Make the factors anew; they stay where nothing can be said."""
        if len(self.stretches) < _LEAST:
            return
        rows = [
            (one.prefill / one.seconds, one.steps / one.seconds, one.decodes / one.seconds) for one in self.stretches
        ]
        if sum(any(row[kind] > 0 for row in rows) for kind in range(3)) < 2:  # of one alone there is nothing to compare
            return
        weights = [1.0] * len(rows)
        found = _fitted(rows, weights, _ROUGH**2)
        if found is None:
            return
        errors = [abs(error) for error in found.left(rows)]
        usual = max(_NOISE, 1.5 * median(errors))
        weights = [min(1.0, _OUTLIER * usual / max(error, 1e-9)) for error in errors]
        squares = sum(w * error * error for w, error in zip(weights, errors, strict=True))
        found = _fitted(rows, weights, max(_NOISE**2, squares / max(1.0, sum(weights) - 3)), found.logs)
        if found is None:
            return
        prefill, steps, decodes = found.logs
        self.prefill_error, self.steps_error, self.decodes_error = map(sqrt, found.variances)
        self.ratios = Ratios(
            exp(max(-_MOST, min(_MOST, steps - prefill))), exp(max(-_MOST, min(_MOST, decodes - prefill)))
        )


_Three = tuple[float, float, float]


class _Fit(NamedTuple):
    logs: _Three
    """Of the factors of prefill, steps and decodes."""
    variances: _Three

    def left(self, rows: Sequence[_Three]) -> list[float]:
        """What the factors leave of each row."""
        a, b, c = map(exp, self.logs)
        return [a * p + b * s + c * d - 1 for p, s, d in rows]


def _fitted(rows: Sequence[_Three], weights: Sequence[float], noise: float, start: _Three | None = None) -> _Fit | None:
    """The factors with which all sum to 1 in each row, and their variances, where rows have errors of variance `noise`.

    None where that has no answer.
    """
    held = 1 / _EXPECTED**2
    if start is None:
        sums = [sum(row) for row in rows]
        common = log(sum(sums) / sum(each * each for each in sums))
        start = common, common, common
    logs = start
    for _ in range(_ROUNDS):
        a, b, c = map(exp, logs)
        aa = bb = cc = ab = ac = bc = ra = rb = rc = 0.0
        for w, (p, s, d) in zip(weights, rows, strict=True):
            p, s, d = a * p, b * s, c * d
            r = p + s + d - 1
            wp, ws, wd = w * p, w * s, w * d
            aa, bb, cc = aa + wp * p, bb + ws * s, cc + wd * d
            ab, ac, bc = ab + wp * s, ac + wp * d, bc + ws * d
            ra, rb, rc = ra + wp * r, rb + ws * r, rc + wd * r
        # Each is drawn to the mean of the three.
        mean = sum(logs) / 3
        aa, bb, cc = aa / noise + 2 / 3 * held, bb / noise + 2 / 3 * held, cc / noise + 2 / 3 * held
        ab, ac, bc = ab / noise - held / 3, ac / noise - held / 3, bc / noise - held / 3
        ra, rb, rc = (r / noise + held * (each - mean) for r, each in zip((ra, rb, rc), logs, strict=True))
        inverse = _inverse(aa, bb, cc, ab, ac, bc)
        if inverse is None:
            return None
        aa, bb, cc, ab, ac, bc = inverse
        moves = aa * ra + ab * rb + ac * rc, ab * ra + bb * rb + bc * rc, ac * ra + bc * rb + cc * rc
        x, y, z = (each - max(-_FARTHEST, min(_FARTHEST, move)) for each, move in zip(logs, moves, strict=True))
        logs = x, y, z
        if max(map(abs, moves)) < _CLOSE:
            break
    return _Fit(logs, (aa, bb, cc))


def _inverse(
    aa: float, bb: float, cc: float, ab: float, ac: float, bc: float
) -> tuple[float, float, float, float, float, float] | None:
    """Of a symmetric matrix, in the same order; None: it has none."""
    x, y, z = bb * cc - bc * bc, ac * bc - ab * cc, ab * bc - ac * bb
    determinant = aa * x + ab * y + ac * z
    if not 0 < determinant < inf:
        return None
    return (
        x / determinant,
        (aa * cc - ac * ac) / determinant,
        (aa * bb - ab * ab) / determinant,
        y / determinant,
        z / determinant,
        (ab * ac - aa * bc) / determinant,
    )
