"""What an engine's own histograms say of the answers it gave: known in every wiring, and of all its traffic.

vLLM and SGLang have them; metrics of answers that a gateway does not show are made of these, labelled
`source="engine"`.
"""

from collections.abc import Iterator, Mapping
from math import inf
from typing import Final, NamedTuple

from epp.pool.engines import Engine, Places, histogram, labelled
from epp.pool.store import Endpoint
from epp.telemetry.metrics import Metrics

EVERY: Final = 10.0
"""Seconds between two looks at a page. One takes as long as all else that is read of it."""
_MOST_MODELS: Final = 8
"""Names of one server that are followed: it has one, whatever adapters it serves."""


class Counted(NamedTuple):
    """A histogram as it stands."""

    total: float
    """Sum of the values."""
    upto: Mapping[float, float]
    """Upper bound -> how many values are not above it."""


class Increase(NamedTuple):
    """What came to a histogram."""

    total: float
    buckets: list[tuple[float, float, int]]
    """Lowest and highest value, and how many came between them."""

    @property
    def values(self) -> int:
        return sum(count for _, _, count in self.buckets)


_Figures = dict[tuple[str, str], Counted]
"""(model, figure) -> its histogram; of `cached` the total alone."""


class EngineAnswers:
    """Of one endpoint: follows its histograms from page to page, and gives what came to them to the metrics."""

    def __init__(self, endpoint: Endpoint, engine: Engine, metrics: Metrics) -> None:
        self._endpoint = endpoint
        self._engine = engine
        self._metrics = metrics
        self._before: _Figures = {}
        self._next = -inf
        self._differs = False

    def look(self, page: bytes, places: Places, now: float, *, differs: bool = True) -> None:
        """To be called with every page; the first only says from where to count. `differs`: from the page before."""
        self._differs = self._differs or differs
        if now < self._next:
            return
        self._next = now + EVERY
        if not self._differs:
            return
        self._differs = False
        before, self._before = self._before, _read(page, self._engine, places)
        self._metrics.engine_counts_answers(self._endpoint, counts=bool(self._before))
        for model in dict.fromkeys(model for model, _ in self._before):
            found = {
                figure: _increase(before[of, figure], counted)
                for (of, figure), counted in self._before.items()
                if of == model and (of, figure) in before
            }
            for figure, increase in _with_means(found, "ttft" if self._engine.unstreamed is None else "prompt"):
                if increase.values:
                    self._metrics.engine_answered(model, figure, increase.buckets, increase.total)


def _read(page: bytes, engine: Engine, places: Places) -> _Figures:
    found: dict[tuple[str, str], tuple[list[float], dict[float, float]]] = {}
    models: set[str] = set()

    def of(model: str, figure: str) -> tuple[list[float], dict[float, float]] | None:
        if model not in models and len(models) >= _MOST_MODELS:
            return None
        models.add(model)
        return found.setdefault((model, figure), ([], {}))

    for figure, metric in engine.answers.items():
        without = engine.unstreamed if figure in ("ttft", "tpot") else None
        for model, bound, value in histogram(page, metric, places, without):
            if (place := of(model, figure)) is None:
                continue
            if bound is None:
                place[0].append(value)
            else:  # data-parallel engines have one each
                place[1][bound] = place[1].get(bound, 0.0) + value
    if engine.cached_tokens is not None:
        for model, value in labelled(page, engine.cached_tokens, places):
            if (place := of(model, "cached")) is not None:
                place[0].append(value)
    return {key: Counted(sum(totals), upto) for key, (totals, upto) in found.items()}


def _increase(before: Counted, after: Counted) -> Increase:
    if after.total < before.total or any(after.upto.get(bound, 0.0) < n for bound, n in before.upto.items()):
        before = Counted(0.0, {})  # it was restarted
    buckets = []
    low = below = 0.0
    for bound in sorted(after.upto):
        upto = after.upto[bound] - before.upto.get(bound, 0.0)
        if (count := round(upto - below)) > 0:
            buckets.append((low, low if bound == inf else bound, count))
        low, below = bound, max(below, upto)
    return Increase(after.total - before.total, buckets)


def _with_means(found: Mapping[str, Increase], counted_with: str) -> Iterator[tuple[str, Increase]]:
    """The figures that are shown. Two of which there is no histogram count as their mean, once for each request.

    `counted_with`: the figure that is counted for each request at the time at which its cached tokens are.
    """
    yield from ((figure, found[figure]) for figure in ("ttft", "tpot", "prompt", "completion") if figure in found)
    duration, completion = found.get("duration"), found.get("completion")
    if duration and completion and completion.total > 0:
        yield "ntpot", _same(duration.total / completion.total, duration.values)
    cached, with_it = found.get("cached"), found.get(counted_with)
    if cached and with_it and with_it.values:
        yield "cached", _same(cached.total / with_it.values, with_it.values)


def _same(value: float, count: int) -> Increase:
    return Increase(value * count, [(value, value, count)])
