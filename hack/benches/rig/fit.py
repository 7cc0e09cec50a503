"""From timings of an engine to the parameters of its step-time model (`tooling.simulator.engine.EngineParameters`).
Pure.

A timing is linear in the parameters: so many steps, so many decodes in them, and so on, took so many seconds. The fit
makes relative errors small, since a step of milliseconds matters as much as a prefill of seconds; gives outliers less
weight (Huber), since a machine that does something else for a moment makes a timing longer and never shorter; and keeps
every parameter at 0 or more. With so few of them, all ways to hold some at 0 are tried, and the best one is exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import median
from typing import Final

NAMES: Final = ("base", "per_decode", "per_context_token", "linear", "attention", "overhead")
FEWEST: Final = 2 * len(NAMES)
_ROUNDS: Final = 30
_HUBER: Final = 1.345
"""Standard deviations from which on an error counts less."""
_DEVIATION: Final = 1.4826
"""Of a normal distribution, over its median absolute error."""
_SINGULAR: Final = 1e-9


class FitError(Exception):
    """The timings do not say what the parameters are. `str()` is one sentence."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What was in the steps that took `seconds` together. Fractions are means."""

    seconds: float
    steps: float
    decodes: float = 0.0
    """Requests decoding, summed over the steps."""
    context: float = 0.0
    """Tokens that those read, summed over the steps."""
    prefill: float = 0.0
    """Tokens prefilled."""
    pairs: float = 0.0
    """Pairs of a prefilled token and one before it."""
    requests: float = 0.0
    """Times that a request's way in and its first token's way out are in `seconds`."""

    @property
    def counts(self) -> tuple[float, ...]:
        """In the order of `NAMES`."""
        return (self.steps, self.decodes, self.context, self.prefill, self.pairs, self.requests)


@dataclass(frozen=True)
class Fitted:
    """Parameters in seconds, by the fields of EngineParameters; `overhead` is no step's: see `Timing.requests`."""

    base: float
    per_decode: float
    per_context_token: float
    linear: float
    attention: float
    overhead: float

    def seconds(self, timing: Timing) -> float:
        """What the model says such steps take."""
        return _dot(timing.counts, [getattr(self, name) for name in NAMES])

    def errors(self, timings: Sequence[Timing]) -> list[float]:
        """Relative errors, 0.1 for a tenth too long."""
        return [self.seconds(timing) / timing.seconds - 1 for timing in timings]


def prefill(*, fresh: int, cached: int) -> tuple[float, float]:
    """`prefill` and `pairs` of a Timing whose steps compute `fresh` tokens behind `cached` ones, in whatever chunks."""
    return float(fresh), fresh * (cached + fresh / 2)


def fit(timings: Sequence[Timing]) -> Fitted:
    """The parameters. Raises FitError for too few timings, or such that leave a parameter open."""
    if len(timings) < FEWEST:
        raise FitError(f"{len(timings)} timings; expected at least {FEWEST} for {len(NAMES)} parameters")
    if any(timing.seconds <= 0 for timing in timings):
        raise FitError("a timing of no time; expected more than 0 seconds")
    rows = [[count / timing.seconds for count in timing.counts] for timing in timings]
    for name, column in zip(NAMES, zip(*rows, strict=True), strict=True):
        if not any(column):
            raise FitError(f"no timing has anything to do with {name}; expected some that have")
    scales = [max(column) for column in zip(*rows, strict=True)]
    rows = [[value / scale for value, scale in zip(row, scales, strict=True)] for row in rows]
    if _solve(rows, [1.0] * len(rows), range(len(NAMES))) is None:
        raise FitError("the timings are too much alike to tell the parameters apart; expected a wider design")
    weights = [1.0] * len(rows)
    found: list[float] = []
    for _ in range(_ROUNDS):
        before, found = found, _non_negative(rows, weights)
        if before and max(abs(a - b) for a, b in zip(before, found, strict=True)) < 1e-9:
            break
        residuals = [abs(_dot(row, found) - 1) for row in rows]
        bound = _HUBER * _DEVIATION * median(residuals)
        weights = [1.0 if residual <= bound else bound / residual for residual in residuals]
    values = {name: value / scale for name, value, scale in zip(NAMES, found, scales, strict=True)}
    if values["base"] <= 0:
        raise FitError("a step with nothing in it would take no time; the timings are too noisy")
    return Fitted(**values)


def _non_negative(rows: Sequence[Sequence[float]], weights: Sequence[float]) -> list[float]:
    """Least squares of `rows @ x = 1` with no x below 0: the best of the free solutions over all sets of columns."""
    best, least = [0.0] * len(NAMES), float("inf")
    for columns in _subsets():
        found = _solve(rows, weights, columns)
        if found is None or min(found) < 0:
            continue
        wrong = sum(w * (_dot(row, found) - 1) ** 2 for row, w in zip(rows, weights, strict=True))
        if wrong < least:
            best, least = found, wrong
    return best


def _subsets() -> Iterator[Sequence[int]]:
    for count in range(1, len(NAMES) + 1):
        yield from combinations(range(len(NAMES)), count)


def _solve(rows: Sequence[Sequence[float]], weights: Sequence[float], columns: Sequence[int]) -> list[float] | None:
    """Weighted least squares over `columns`, 0 elsewhere, by the normal equations; None where they are singular."""
    size = len(columns)
    matrix = [[0.0] * (size + 1) for _ in columns]
    for row, weight in zip(rows, weights, strict=True):
        taken = [row[column] for column in columns]
        for line, value in zip(matrix, taken, strict=True):
            for place, factor in enumerate(taken):
                line[place] += weight * value * factor
            line[size] += weight * value
    sizes = [matrix[at][at] for at in range(size)]
    for at in range(size):
        pivot = max(range(at, size), key=lambda row: abs(matrix[row][at]))
        if abs(matrix[pivot][at]) <= _SINGULAR * sizes[at]:
            return None
        if pivot != at:
            matrix[at], matrix[pivot] = matrix[pivot], matrix[at]
        for other in range(size):
            if other != at:
                share = matrix[other][at] / matrix[at][at]
                matrix[other] = [a - share * b for a, b in zip(matrix[other], matrix[at], strict=True)]
    found = [0.0] * len(NAMES)
    for at, column in enumerate(columns):
        found[column] = matrix[at][size] / matrix[at][at]
    return found


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
