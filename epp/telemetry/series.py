"""Figures as a request leaves them: plain numbers, touched on the event loop only, read when a scrape is answered.

`prometheus_client`'s own counters and histograms take a lock and build label tuples: about 1 us for each, against
0.1 us here. They do what we need at scrape time, so its exposition is used and its instruments are not.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from epp.telemetry import metrics_table as table


class Histogram:
    """Counts by upper bound. `bounds` ascend; what lies above the last counts as +Inf."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def cumulative(self) -> list[tuple[str, float]]:
        """(le, count of values up to it), as Prometheus wants them."""
        return list(zip(_names(self.bounds), map(float, accumulate(self.counts)), strict=True))


@lru_cache(64)
def _names(bounds: tuple[float, ...]) -> tuple[str, ...]:
    return (*map(repr, bounds), "+Inf")


class KvEventFigures(NamedTuple):
    """What a pool's KV events come to, when a scrape asks."""

    endpoints: Sequence[tuple[str, str, float | None, float]]
    """Name, state, lag in seconds (None: no event yet), trust 0..1."""
    counts: Mapping[str, int]
    """Outcome -> blocks or events."""


class ModelSeries:
    """What is counted per model."""

    __slots__ = ("cached", "completion", "duration", "ntpot", "prompt", "size", "statuses", "tpot", "ttft")

    def __init__(self) -> None:
        self.statuses: dict[int, int] = {}
        self.size = Histogram(table.BYTES)
        self.duration = Histogram(table.LATENCY)
        self.ttft = Histogram(table.LATENCY)
        self.tpot = Histogram(table.PER_TOKEN)
        self.ntpot = Histogram(table.PER_TOKEN)
        self.prompt = Histogram(table.TOKENS)
        self.completion = Histogram(table.TOKENS)
        self.cached = Histogram(table.TOKENS)


class ShadowSeries:
    """What a shadow profile would have done, and by how many seconds its picks were dearer or cheaper."""

    __slots__ = ("cheaper", "dearer", "failed", "other", "same")

    def __init__(self) -> None:
        self.same = 0
        self.other = 0
        self.failed = 0
        self.dearer = 0.0
        self.cheaper = 0.0


class EndpointSeries:
    """What is counted per endpoint; tokens of prompts. `checked_*` cover requests whose answer reported the truth."""

    __slots__ = ("checked_cached", "checked_predicted", "decisions", "failures", "in_flight", "predicted", "tokens")

    def __init__(self) -> None:
        self.decisions = 0
        self.failures = 0
        self.in_flight = 0
        self.tokens = 0
        self.predicted = 0
        self.checked_predicted = 0
        self.checked_cached = 0

    @property
    def predicted_hit_rate(self) -> float | None:
        """Share of the tokens sent that the endpoint was believed to hold; None before the first token."""
        return self.predicted / self.tokens if self.tokens else None
