"""The last ten minutes of each pool and endpoint, for the page's charts: a look every few seconds, none by a request.

Bounded: a pool takes some 7 KB and an endpoint 0.5 KB, which goes with it: 150 KB for 300 endpoints.
"""

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from math import isnan, nan
from typing import Any, Final
from weakref import WeakKeyDictionary

from epp.admin.recorder import Decisions, Record
from epp.admin.views import PoolView
from epp.plugin import Endpoint
from epp.telemetry.metrics import Metrics
from epp.telemetry.series import Histogram

STEP_S: Final = 5.0
STEPS: Final = 120
"""Ten minutes of a pool."""
EVERY: Final = 2
"""An endpoint is looked at with every second step."""
ENDPOINT_STEPS: Final = STEPS // EVERY
KV_STEPS: Final = 200
"""An endpoint's KV use is kept in so many parts of it."""
UNKNOWN: Final = 255
"""KV use before the first scrape."""
MOST_REQUESTS: Final = 65_535
RECENT: Final = 12
"""Steps whose first tokens make the median of one: a minute."""
SERIES: Final = (
    "requests",
    "in_flight",
    "waiting",
    "kv_mean",
    "kv_most",
    "device",
    "l1",
    "l2",
    "speed",
    "trust",
    "saturation",
    "queued",
)
"""Of a pool: requests a second; ours in flight; waiting in the engines; KV use, mean and highest; shares of the tokens
asked for that were predicted on the device, in L1, in L2; speed of the endpoints, and their least trust; how full the
pool is and how many wait in flow control."""


class Series:
    """The last values, oldest first; NaN where there was none."""

    __slots__ = ("values",)

    def __init__(self, steps: int = STEPS) -> None:
        self.values = array("f", [nan]) * steps

    def add(self, value: float | None) -> None:
        del self.values[0]
        self.values.append(nan if value is None else value)

    @property
    def last(self) -> float | None:
        """The newest value there was in the last minute; None: there was none."""
        return next((value for value in reversed(self.values[-RECENT:]) if not isnan(value)), None)


class EndpointHistory:
    """KV use in parts of `KV_STEPS`, and requests in the engine, oldest first."""

    __slots__ = ("decisions", "kv", "requests")

    def __init__(self) -> None:
        self.decisions = 0
        """Requests given to it until the last look."""
        self.kv = bytearray([UNKNOWN]) * ENDPOINT_STEPS
        self.requests = array("H", [0]) * ENDPOINT_STEPS

    def add(self, kv: int, requests: int) -> None:
        del self.kv[0]
        self.kv.append(kv)
        del self.requests[0]
        self.requests.append(min(requests, MOST_REQUESTS))


class PoolHistory:
    """A `Series` by each name of `SERIES`."""

    def __init__(self) -> None:
        self.series = {name: Series() for name in SERIES}

    def __getitem__(self, name: str) -> Series:
        return self.series[name]


class History:
    """What was seen of `pools` and of all requests. `clock`: seconds, monotonic."""

    def __init__(
        self,
        metrics: Metrics,
        pools: Sequence[PoolView],
        decisions: Decisions,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.pools = [PoolHistory() for _ in pools]
        """In the order of `pools`."""
        self.ttft = Series()
        """Median of the last minute, seconds."""
        self.refused = Series()
        """Requests a second that were answered by us."""
        self.steps = 0
        """How often was looked."""
        self._shown = pools
        self._metrics = metrics
        self._decisions = decisions
        self._clock = clock
        self._endpoints: WeakKeyDictionary[Endpoint, EndpointHistory] = WeakKeyDictionary()
        self._newest: Record | None = None
        self._first_tokens: deque[Sequence[int]] = deque(maxlen=RECENT + 1)
        self._refused = 0
        self._at = clock()

    @property
    def endpoint_steps(self) -> int:
        """How often the endpoints were."""
        return self.steps // EVERY

    def endpoint(self, endpoint: Endpoint) -> EndpointHistory:
        found = self._endpoints.get(endpoint)
        if found is None:
            found = self._endpoints[endpoint] = EndpointHistory()
        return found

    async def run(self) -> None:
        """Look, for ever."""
        while True:
            await asyncio.sleep(STEP_S)
            self.look()

    def look(self) -> None:
        """Add a step to each series."""
        now = self._clock()
        seconds, self._at = max(0.001, now - self._at), now
        self.steps += 1
        new = self._new_records()
        for pool, history in zip(self._shown, self.pools, strict=True):
            self._look_at(pool, history, seconds)
            for name, share in zip(("device", "l1", "l2"), tiers(new, pool), strict=True):
                history[name].add(share)
        refused = self._metrics.refusals
        self.refused.add((refused - self._refused) / seconds)
        self._refused = refused
        self.ttft.add(self._median_ttft())

    def _look_at(self, pool: PoolView, history: PoolHistory, seconds: float) -> None:
        metrics, whole = self._metrics, not self.steps % EVERY
        given = in_flight = waiting = 0
        usage: list[float] = []
        for endpoint in pool.endpoints:
            seen, counted, load = self.endpoint(endpoint), metrics.endpoint(endpoint), endpoint.load
            given += counted.decisions - seen.decisions
            seen.decisions = counted.decisions
            in_flight += counted.in_flight
            if load.at is not None:
                waiting += load.waiting
                usage.append(load.kv_usage)
            if whole:
                known = load.at is not None
                kv = round(min(max(load.kv_usage, 0.0), 1.0) * KV_STEPS) if known else UNKNOWN
                seen.add(kv, load.waiting + load.running if known else counted.in_flight)
        history["requests"].add(given / seconds)
        history["in_flight"].add(in_flight)
        history["waiting"].add(waiting if usage else None)
        history["kv_mean"].add(sum(usage) / len(usage) if usage else None)
        history["kv_most"].add(max(usage, default=None))
        trust = [each[2] for each in metrics.kv_events(pool.name).values()]
        history["trust"].add(min(trust, default=None))
        history["speed"].add(speed_of(metrics.statistics(pool)))
        flow = metrics.flow(pool.name)
        history["saturation"].add(None if flow is None else flow.saturation)
        history["queued"].add(None if flow is None else sum(row.requests for row in flow.waiting))

    def _new_records(self) -> list[Record]:
        """Decisions since the last look that are still kept."""
        found = []
        for record in self._decisions.newest(len(self._decisions)):
            if record is self._newest:
                break
            found.append(record)
        if found:
            self._newest = found[0]
        return found

    def _median_ttft(self) -> float | None:
        counts = _added(self._metrics.rows("warmpath_ttft_seconds"))
        if counts is None:
            return None
        histogram, now = counts
        self._first_tokens.append(now)
        before = self._first_tokens[0]
        return median(histogram.bounds, [max(0, new - old) for new, old in zip(now, before, strict=True)])


def speed_of(statistics: dict[str, dict[str, float]]) -> float | None:
    """Tokens a second that an endpoint of the pool computes of a prompt, where a plugin has learned it."""
    for figures in statistics.values():
        if (seconds := figures.get("prefill_seconds_per_token", 0.0)) > 0:
            return 1 / seconds
    return None


def tiers(records: Iterable[Record], pool: PoolView) -> tuple[float | None, float | None, float | None]:
    """Shares of all tokens asked of the pool that were predicted on the device, in L1 and in L2 of the endpoint."""
    tokens = device = l1 = l2 = 0
    for record in records:
        if (held := record.held) is None or (record.pool, record.namespace) != (pool.name, pool.namespace):
            continue
        tokens += record.decision.request.tokens
        device, l1, l2 = device + held.tokens, l1 + held.l1, l2 + held.l2
    if not tokens:
        return None, None, None
    return device / tokens, l1 / tokens, l2 / tokens


def median(bounds: Sequence[float], counts: Sequence[int]) -> float | None:
    """Of what was counted by upper bound; within a bucket values are taken to lie evenly. None: nothing was."""
    half = sum(counts) / 2
    if not half:
        return None
    reached = [*accumulate(counts)]
    at = next(at for at, upto in enumerate(reached) if upto >= half)
    if at >= len(bounds):
        return bounds[-1]
    low = bounds[at - 1] if at else 0.0
    return low + (bounds[at] - low) * (half - (reached[at] - counts[at])) / counts[at]


def _added(rows: Iterable[tuple[tuple[str, ...], Any]]) -> tuple[Histogram, list[int]] | None:
    """The counts of all models together, each from its best source."""
    models: dict[str, Histogram] = {}
    for (model, _), histogram in rows:
        models.setdefault(model, histogram)
    if not models:
        return None
    columns = zip(*(histogram.counts for histogram in models.values()), strict=True)
    return next(iter(models.values())), [sum(column) for column in columns]
