"""How fast each endpoint is: one factor to the modelled seconds, learned from the service we watched ourselves.

What is compared are stretches: seconds in which an endpoint had something of ours to prefill against the seconds the
model gives for what came out. One request alone says little (engines batch, and end a step before they begin a
prompt); stretches even that out. An endpoint's value is the median of its last stretches, so a few strange ones change
nothing, drawn towards the pool's while there are few or they are old, and rounded, so that equal endpoints stay equal
and ties among them still take turns. No endpoint counts as more than `_MOST` times faster or slower than the pool: an
endpoint that sends its first tokens too early gains a little by it, never the whole traffic.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import exp, log
from statistics import median
from typing import Final

from epp.plugin import Endpoint

_KEPT: Final = 24
"""Observations kept for an endpoint: what is older than so many is forgotten. Half of them turn the median."""
_LEAST: Final = 4
"""Observations before which an endpoint has the pool's value."""
_TOGETHER: Final = 0.1
"""A first token that comes sooner after the one before, as a share of its modelled seconds, is of the same step."""
_PRIOR: Final = 2.0
"""Observations that the pool's value counts for in an endpoint's."""
_HALF_LIFE: Final = 300.0
"""Seconds after the last observation in which an endpoint's own count half: a slow one is tried again."""
_STEP: Final = 0.2
"""Natural logarithm of the steps values are rounded to: 22 %. Within half a step of the pool is the pool's."""
_MOST: Final = log(4)
"""Natural logarithm of how many times an endpoint may be faster or slower than the pool."""
_MODEL_MOST: Final = 20.0
"""Times an observation may be faster or slower than modelled; what is beyond counts as this."""
_REFRESH: Final = 5.0
"""Seconds after which values are made anew, beside each endpoint's own at its observations."""


class Speed:
    """One endpoint's. `factor` times modelled seconds are its seconds."""

    __slots__ = ("at", "factor", "logs", "median", "modelled", "observed", "pinned")

    def __init__(self, pinned: float | None) -> None:
        self.factor = 1.0 if pinned is None else 1 / pinned
        self.pinned = pinned is not None
        self.logs: deque[float] = deque(maxlen=_KEPT)
        """Observations: logarithms of observed to modelled seconds."""
        self.median = 0.0
        self.at = 0.0
        """Time of the last observation."""
        self.modelled = self.observed = 0.0
        """Seconds of the stretch that is not complete yet."""


class Speeds:
    """Those of a pool. `pins`: shell pattern of an endpoint's name -> its speed, 1 as modelled; the first counts.

    `stretch`: modelled seconds that make one observation; short of a full step of the engine they measure its batches.
    """

    def __init__(self, pins: Mapping[str, float], stretch: float) -> None:
        self.observations = 0
        self.pool = 1.0
        """The pool's factor."""
        self.version = 0
        """Counts when the factors of many endpoints changed at once."""
        self._stretch = stretch
        self._pins = pins
        self._next = 0.0
        self._all: dict[Endpoint, Speed] = {}

    def open(self, endpoint: Endpoint) -> Speed:
        """The speed of a new endpoint: the pool's, until there is more to say."""
        pinned = next((speed for pattern, speed in self._pins.items() if fnmatchcase(endpoint.name, pattern)), None)
        speed = self._all[endpoint] = Speed(pinned)
        if pinned is None:
            speed.factor = self.pool
        return speed

    def learned(self) -> list[tuple[str, list[float]]]:
        """Of each endpoint its observations, for `restore`."""
        return [(endpoint.name, list(speed.logs)) for endpoint, speed in self._all.items() if speed.logs]

    def restore(self, speed: Speed, logs: Sequence[float], now: float) -> None:
        """Take over what was observed elsewhere of an endpoint of which nothing was observed here."""
        if not speed.logs and not speed.pinned and logs:
            speed.logs.extend(float(each) for each in logs)
            speed.median, speed.at = median(speed.logs), now
            self._refresh(now)

    def close(self, endpoint: Endpoint) -> None:
        """The endpoint is gone for good."""
        self._all.pop(endpoint, None)

    def observe(self, speed: Speed, modelled: float, observed: float, now: float, *, whole_steps: bool = False) -> None:
        """`observed` seconds of service that take `modelled` seconds at factor 1. `whole_steps`: it
        divides no step, so a stretch may end before it.
        """
        apart = whole_steps or observed > _TOGETHER * speed.factor * modelled
        if speed.modelled >= self._stretch and apart:
            self._conclude(speed, now)
        speed.modelled += modelled
        speed.observed += observed

    def _conclude(self, speed: Speed, now: float) -> None:
        ratio = speed.observed / speed.modelled
        speed.logs.append(log(min(max(ratio, 1 / _MODEL_MOST), _MODEL_MOST)))
        speed.modelled = speed.observed = 0.0
        speed.median, speed.at = median(speed.logs), now
        self.observations += 1
        if now >= self._next:
            self._refresh(now)
        elif not speed.pinned:
            speed.factor = self._factor(speed, log(self.pool), now)

    def _refresh(self, now: float) -> None:
        """The pool's value, which is the median of its endpoints', and everybody's."""
        known = [speed.median for speed in self._all.values() if len(speed.logs) >= _LEAST]
        if known:
            self._next = now + _REFRESH
        else:  # until one has enough of its own, those of all together say more than the configuration
            together = [each for speed in self._all.values() for each in speed.logs]
            known = together if len(together) >= _LEAST else []
        if known:
            self.pool = exp(median(known))
        centre = log(self.pool)
        for speed in self._all.values():
            if not speed.pinned and (factor := self._factor(speed, centre, now)) != speed.factor:
                speed.factor = factor
                self.version += 1

    def _factor(self, speed: Speed, centre: float, now: float) -> float:
        if len(speed.logs) < _LEAST:
            return exp(centre)
        count = len(speed.logs) * 0.5 ** ((now - speed.at) / _HALF_LIFE)
        apart = round((speed.median - centre) * count / (count + _PRIOR) / _STEP) * _STEP
        return exp(centre + max(-_MOST, min(_MOST, apart)))
