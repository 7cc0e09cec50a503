"""Figures as a request leaves them: plain numbers, touched on the event loop only, read when a scrape is answered.

`prometheus_client`'s own counters and histograms take a lock and build label tuples: about 1 us for each, against
0.1 us here. They do what we need at scrape time, so its exposition is used and its instruments are not.

Names of models are a client's to choose, so only those that an endpoint answered have a label of their own.
"""

import time
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from math import exp2
from typing import Final, NamedTuple, TypeVar

from epp.telemetry import metrics_table as table
from epp.telemetry.metrics_table import MAX_MODELS

V = TypeVar("V")
OTHER = "other"


UNCOUNTED: Final = 128
"""Values of a histogram that wait to be counted together, which takes a fraction of what counting each would."""


class Histogram:
    """Counts by upper bound. `bounds` ascend; what lies above the last counts as +Inf."""

    __slots__ = ("_counts", "_total", "_values", "bounds")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._total = 0.0
        self._values: list[float] = []
        """Not counted yet."""

    @property
    def counts(self) -> Sequence[int]:
        """Of each bound, and of what lies above the last; not cumulative."""
        self._count()
        return self._counts

    @property
    def total(self) -> float:
        """Of all values."""
        self._count()
        return self._total

    def observe(self, value: float) -> None:
        values = self._values
        values.append(value)
        if len(values) >= UNCOUNTED:
            self._count()

    def _count(self) -> None:
        values, counts, before = self._values, self._counts, 0
        if not values:
            return
        values.sort()
        for n, bound in enumerate(self.bounds):
            upto = bisect_right(values, bound, before)
            counts[n] += upto - before
            before = upto
        counts[-1] += len(values) - before
        self._total += sum(values)
        values.clear()

    def spread(self, low: float, high: float, count: int) -> None:
        """Count so many values, of which it is only known that they lie between `low` and `high`: spread evenly."""
        done, last = 0, bisect_left(self.bounds, high)
        for n in range(bisect_left(self.bounds, low), last):
            upto = round(count * (self.bounds[n] - low) / (high - low))
            self._counts[n] += upto - done
            done = upto
        self._counts[last] += count - done

    def add_to_total(self, values: float) -> None:
        """The sum of values that were `spread`."""
        self._total += values

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


class ReplicaFigures(NamedTuple):
    """What this replica knows of the others, when a scrape asks."""

    peers: Sequence[tuple[str, str, float | None, float | None]]
    """Address, state, lag in seconds, agreement 0..1 (None: not known)."""
    in_flight: int
    """Requests of the others."""
    frames: Mapping[str, int]
    """Outcome -> frames."""


class Waits(NamedTuple):
    """Requests of one flow and model that wait."""

    fairness_id: str
    priority: int
    requests: int
    bytes: int
    model: str = ""


class FlowFigures(NamedTuple):
    """What waits in a pool's flow control, when a scrape asks."""

    waiting: Sequence[Waits]
    saturation: float
    """Of the pool, as it was seen last; 1 is full."""
    bands: Sequence[tuple[int, float, float]] = ()
    """Priority, share of the requests and of the bytes of it that may wait."""
    whole: tuple[float | None, float | None] = (None, None)
    """The same of all priorities together; None: there is no limit."""


class FlowSeries:
    """How long requests waited in flow control: by (fairness id, priority, outcome, model).

    `answered`: the models that have labels in metrics of requests. Of fairness ids there are at most `MAX_FLOWS`, of
    priorities `MAX_PRIORITIES`, and of pairs of an id and a model `MAX_PAIRS`; others count as `other`.
    """

    def __init__(self, answered: Container[str]) -> None:
        self.waits: dict[tuple[str, str, str, str], Histogram] = {}
        self._answered = answered
        self._ids: set[str] = set()
        self._priorities: set[int] = set()
        self._pairs: set[tuple[str, str]] = set()
        self._unanswered: set[str] = set()

    def ended(self, fairness_id: str, priority: int, outcome: str, seconds: float, model: str) -> None:
        flow = self.label(fairness_id)
        if model not in self._answered or not _has_room((flow, model), self._pairs, table.MAX_PAIRS):
            model = OTHER
        key = flow, self.priority(priority), outcome, model
        if (found := self.waits.get(key)) is None:
            found = self.waits[key] = Histogram(table.QUEUED)
        found.observe(seconds)

    def label(self, fairness_id: str) -> str:
        """The id, or `other` where too many are known."""
        return fairness_id if _has_room(fairness_id, self._ids, table.MAX_FLOWS) else OTHER

    def priority(self, priority: int) -> str:
        return str(priority) if _has_room(priority, self._priorities, table.MAX_PRIORITIES) else OTHER

    def model(self, model: str) -> str:
        """The label of a model for which requests wait. Of those that were never answered the first `MAX_MODELS` have
        one too: a pool is scaled from zero by what waits for it.
        """
        if model in self._answered:
            return model
        return model if len(model) <= LONGEST_MODEL and _has_room(model, self._unanswered, MAX_MODELS) else OTHER


def _has_room(value: V, known: set[V], most: int) -> bool:
    """Whether it is one of the first values, this one among them."""
    if value not in known:
        if len(known) >= most:
            return False
        known.add(value)
    return True


class LimitSeries:
    """Refusals by (tenant, limit), of at most `MAX_FLOWS` tenants by name."""

    def __init__(self) -> None:
        self.refusals: dict[tuple[str, str], int] = {}
        self._tenants: set[str] = set()

    def refused(self, tenant: str, limit: str) -> None:
        if not _has_room(tenant, self._tenants, table.MAX_FLOWS):
            tenant = OTHER
        self.refusals[tenant, limit] = self.refusals.get((tenant, limit), 0) + 1


class AnswerSeries:
    """What is counted of answers, from one source."""

    __slots__ = ("cached", "completion", "ntpot", "prompt", "tpot", "ttft")

    def __init__(self) -> None:
        self.ttft = Histogram(table.LATENCY)
        self.tpot = Histogram(table.PER_TOKEN)
        self.ntpot = Histogram(table.PER_TOKEN)
        self.prompt = Histogram(table.TOKENS)
        self.completion = Histogram(table.TOKENS)
        self.cached = Histogram(table.TOKENS)


class ModelSeries:
    """What is counted per model."""

    __slots__ = ("answers", "duration", "size", "stages", "statuses")

    def __init__(self) -> None:
        self.stages: dict[tuple[str, str], int] = {}
        """(pool, stages that had endpoints of their own) -> requests."""
        self.statuses: dict[int, int] = {}
        self.size = Histogram(table.BYTES)
        self.duration = Histogram(table.LATENCY)
        self.answers: dict[str, AnswerSeries] = {}
        """By source: `table.ANSWER` or `table.WATCHED`."""

    def of(self, source: str) -> AnswerSeries:
        found = self.answers.get(source)
        if found is None:
            found = self.answers[source] = AnswerSeries()
        return found


class PrioritySeries:
    """How long a pool's requests of one priority took."""

    __slots__ = ("duration", "ttft")

    def __init__(self) -> None:
        self.duration = Histogram(table.LATENCY)
        self.ttft = Histogram(table.LATENCY)


class PoolSeries:
    """What is counted per pool: prompt tokens that endpoints were predicted to hold when they were chosen, by tier, and
    times by priority, of at most `MAX_PRIORITIES`.
    """

    __slots__ = ("device", "l1", "l2", "priorities")

    def __init__(self) -> None:
        self.device = 0
        self.l1 = 0
        self.l2 = 0
        self.priorities: dict[int | None, PrioritySeries] = {}
        """None: all others."""

    def took(self, priority: int, duration: float, ttft: float | None) -> None:
        """A request of it has ended; seconds, None: not seen."""
        series = self.priorities.get(priority)
        if series is None:
            known = len(self.priorities) < table.MAX_PRIORITIES
            series = self.priorities.setdefault(priority if known else None, PrioritySeries())
        series.duration.observe(duration)
        if ttft is not None:
            series.ttft.observe(ttft)


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

    __slots__ = (
        "checked_cached", "checked_predicted", "counts_answers", "decisions", "failures", "in_flight", "predicted",
        "tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.counts_answers: bool | None = None
        """Its engine has histograms of its answers; None before its first page."""
        self.decisions = 0
        self.failures = 0
        self.in_flight = 0
        self.tokens = 0
        self.predicted = 0
        self.checked_predicted = 0
        self.checked_cached = 0

    @property
    def predicted_hit_rate(self) -> float | None:
        """Share of the tokens sent that the endpoint was predicted to hold; None before the first token."""
        return self.predicted / self.tokens if self.tokens else None


LONGEST_MODEL = 128
"""Characters; a longer model name counts as `other`."""
CANDIDATES = 1000
"""Answered models without a label whose uses are remembered; the one unused for longest makes room."""
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

    def __contains__(self, model: object) -> bool:
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
