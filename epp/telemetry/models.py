"""Which models have a label of their own: names are a client's to choose, so only those that an endpoint answered."""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from math import exp2

from epp.telemetry.metrics_table import MAX_MODELS
from epp.telemetry.series import ModelSeries

OTHER = "other"
LONGEST_MODEL = 128
"""Characters; a longer model name counts as `other`."""
CANDIDATES = 1000
"""Answered models without a label whose uses are remembered; the one unused for longest is dropped."""
HALF_LIFE_S = 3600.0
"""Seconds in which a use comes to count half."""


class _Uses:
    """How often a model was answered, older answers counting less."""

    __slots__ = ("at", "weight")

    def __init__(self) -> None:
        self.weight = 0.0
        self.at = 0.0

    def again(self, now: float) -> None:
        self.weight = self.until(now) + 1.0
        self.at = now

    def until(self, now: float) -> float:
        return self.weight * exp2((self.at - now) / HALF_LIFE_S)


class Models:
    """The series of at most `most` models by name, and one of all others. `clock`: seconds, monotonic.

    A model gets a label with its first answer of status 2xx. When all are taken it has to be answered twice as often as
    the one answered least, which then counts as `other`: names made up for an engine that answers to any name neither
    keep a real model out nor make new series faster and faster.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic, most: int = MAX_MODELS) -> None:
        self.other = ModelSeries()
        self._clock = clock
        self._most = most
        self._labelled: dict[str, tuple[ModelSeries, _Uses]] = {}
        self._candidates: OrderedDict[str, _Uses] = OrderedDict()

    def __iter__(self) -> Iterator[tuple[str, ModelSeries]]:
        """Each label with its series; `other` only where something was counted in it."""
        yield from [(model, series) for model, (series, _) in self._labelled.items()]
        if self.other.statuses:
            yield OTHER, self.other

    def __contains__(self, model: str) -> bool:
        return model in self._labelled

    def of(self, model: str) -> ModelSeries:
        """Where to count what became of a request for `model` that was not answered with 2xx."""
        found = self._labelled.get(model)
        return self.other if found is None else found[0]

    def answered(self, model: str) -> ModelSeries:
        """The same, for one that was."""
        now = self._clock()
        found = self._labelled.get(model)
        if found is None:
            return self._candidate(model, now)
        found[1].again(now)
        return found[0]

    def _candidate(self, model: str, now: float) -> ModelSeries:
        if model == OTHER or len(model) > LONGEST_MODEL:
            return self.other
        uses = self._candidates.pop(model, None) or _Uses()
        uses.again(now)
        if len(self._labelled) >= self._most:
            least = min(self._labelled, key=lambda name: self._labelled[name][1].until(now))
            if uses.weight < 2.0 * self._labelled[least][1].until(now):
                self._candidates[model] = uses
                if len(self._candidates) > CANDIDATES:
                    self._candidates.popitem(last=False)
                return self.other
            del self._labelled[least]
        series = ModelSeries()
        self._labelled[model] = series, uses
        return series
