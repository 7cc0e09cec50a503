"""What an endpoint has promised, and what it is like to be served there: for SLOs of `expected-ttft`.

While an engine computes prompts its answers go on by a token a step, and a step with a full chunk of prompts takes many
times as long as one without. So tokens take what a step takes, over the share of the time that is not spent on prompts:

    tpot = factor * (base + c * requests + d * their context) / (1 - factor * prefill)

`prefill` is the modelled seconds of prompts that came in a second lately; what a newcomer brings counts among it for
those that run there already. It is first come, first served, so nobody's first token is later for a newcomer.

What comes differs from what is predicted, since others come meanwhile. So an SLO is not kept up to a prediction and
missed beyond: the nearer to it, the more likely it is missed.
"""

from bisect import bisect_left, bisect_right, insort
from math import exp, inf
from typing import Final, NamedTuple

from epp.plugin import LatencyPrediction, Slo

WINDOW: Final = 10.0
"""Seconds over which it is remembered how much prefill came."""
_MOST: Final = 0.95
"""Share of the time that prompts take at most: beyond, an engine cannot follow and tokens wait for ever."""
_SPREAD: Final = 0.3
"""By what share of an SLO a prediction has to be below it to be sure that it is kept, or above it that it is missed."""


def chance(predicted: float) -> float:
    """That an SLO is missed of which this share is predicted to be taken."""
    return min(1.0, max(0.0, (predicted - (1 - _SPREAD)) / (2 * _SPREAD)))


class Promises:
    """Of one endpoint: the TPOT SLOs of the requests in flight there, and the prefill that came lately."""

    __slots__ = ("_at", "_prefill", "tpots")

    def __init__(self) -> None:
        self.tpots: list[float] = []
        """Seconds, least first."""
        self._prefill = 0.0
        self._at = 0.0

    def harm(self, before: float, after: float) -> float:
        """How many more of them are missed, in the mean, where tokens take `after` seconds instead of `before`."""
        tpots, found = self.tpots, 0.0
        if not tpots or after <= (1 - _SPREAD) * tpots[0]:
            return found
        place, end = bisect_left(tpots, before / (1 + _SPREAD)), bisect_left(tpots, after / (1 - _SPREAD))
        while place < end:  # those before are missed anyway, those behind are kept anyway
            tpot, first = tpots[place], place
            place = bisect_right(tpots, tpot, first, end)
            found += (place - first) * (chance(after / tpot) - chance(before / tpot))
        return found

    @property
    def tightest(self) -> float:
        """Seconds per token; inf: nobody was promised any."""
        return self.tpots[0] if self.tpots else inf

    def start(self, tpot: float | None, work: float, now: float) -> None:
        """A request comes, with `work` modelled seconds of prefill."""
        self._prefill = self._prefill * exp((self._at - now) / WINDOW) + work
        self._at = now
        if tpot is not None:
            insort(self.tpots, tpot)

    def end(self, tpot: float | None) -> None:
        if tpot is not None:
            del self.tpots[bisect_left(self.tpots, tpot)]

    def prefill(self, now: float) -> float:
        """Modelled seconds of prompts that came in a second."""
        return self._prefill * exp((self._at - now) / WINDOW) / WINDOW


def busy_share(prefill: float) -> float:
    """Of the time, spent on prompts, where so many seconds of them come in a second."""
    return prefill if prefill < _MOST else _MOST


class Verdict(NamedTuple):
    """How a prediction stands to what is wanted."""

    kept: bool
    """What is wanted, and what was promised to others there, if all comes as predicted."""
    excess: float
    """By how much the worst of what is wanted would be missed, as a share of it; below 0: what would be left."""
    room: float
    """What of the tightest is left, as a share of it, this request's own prefill left aside: 0..1."""
    missed: float
    """Chance that any of what is wanted is missed."""


def judge(slo: Slo, waited: float, own: float, seen: LatencyPrediction) -> Verdict:
    """`waited`: seconds that are gone of its TTFT already; `own`: seconds of its own prefill."""
    excess, room, met = -1.0, 1.0, 1.0
    if slo.ttft is not None:
        first = waited + seen.ttft
        excess = first / slo.ttft - 1
        room = 1 - (first - own) / slo.ttft
        met = 1 - chance(first / slo.ttft)
    if slo.tpot is not None:
        excess = max(excess, seen.tpot / slo.tpot - 1)
        room = min(room, 1 - seen.tpot / slo.tpot)
        met *= 1 - chance(seen.tpot / slo.tpot)
    kept = excess <= 0 and seen.tpot_after <= seen.promised
    return Verdict(kept, excess, min(1.0, max(0.0, room)), 1 - met)
