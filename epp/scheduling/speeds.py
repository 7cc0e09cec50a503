"""How fast each endpoint is: one factor to the modelled seconds, learned from the service we watched ourselves and
from what engines count; and for the pool what a step takes against prefill (`constants`).

What is compared are stretches: seconds in which an endpoint had something of ours to prefill against the seconds the
model gives for what came out. One request among others says little (engines batch, and end a step before they begin a
prompt); stretches even that out. Where few come, one that had its endpoint for itself makes a shorter stretch. An
endpoint's value is the median of its last stretches, so a few strange ones change nothing, drawn towards the pool's
while there are few or they are old, and rounded, so that equal endpoints stay equal and ties among them still take
turns. No endpoint counts as more than `_MOST` times faster or slower than the pool: an endpoint that sends its first
tokens too early gains a little by it, never the whole traffic.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from math import exp, inf, log, sqrt
from statistics import median, stdev
from typing import Final

from epp.plugin import Endpoint
from epp.scheduling.constants import FEW, NOTHING, Constants, Ratios, Stretch, stretch_of

_KEPT: Final = 24
"""Observations kept for an endpoint: what is older than so many is forgotten. Half of them turn the median."""
_LEAST: Final = 4
"""Observations before which an endpoint has the pool's value."""
_TOGETHER: Final = 0.1
"""A first token that comes sooner after the one before, as a share of its modelled seconds, is of the same step."""
_LONE: Final = 1 / 16
"""Of a stretch: what makes one where each request had the endpoint for itself, so that nothing is batched. Such count
only where there are no whole ones, and none come soon: where little is computed of a prompt, what was wrongly predicted
of the cache is most of such an observation.
"""
_PATIENCE: Final = 30.0
"""Seconds of an endpoint's first observation in which whole ones are waited for."""
_PROMPTS: Final = 3.0
"""Long prompts that a stretch has room for which an engine counted: it counts a prompt's tokens when all are computed.
"""
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
_SOON: Final = 1.0
"""The same, while the pool's constants are made of few stretches."""


_OF_MEDIAN: Final = 1.25
"""Standard error of a median, against that of a mean."""
_MOVED: Final = 0.02
"""Change of the constants, as a share, from which all that was seen is compared anew."""


class Speed:
    """One endpoint's. `factor` times modelled seconds are its seconds."""

    __slots__ = (
        "at", "factor", "logs", "lone", "lone_seen", "lone_since", "median", "pinned", "seen", "seen_at",
        "stretch", "whole",
    )  # fmt: skip

    def __init__(self, pinned: float | None) -> None:
        self.factor = 1.0 if pinned is None else 1 / pinned
        self.pinned = pinned is not None
        self.seen: deque[Stretch] = deque(maxlen=_KEPT)
        """Observations that are a stretch or more."""
        self.seen_at = -inf
        """Time of the last of them."""
        self.lone_seen: deque[Stretch] = deque(maxlen=_KEPT)
        """Shorter ones, of requests that were alone."""
        self.lone_since = inf
        """Time of the first of them."""
        self.logs: list[float] = []
        """Of each that counts the logarithm of observed to modelled seconds."""
        self.median = 0.0
        self.at = 0.0
        """Time of the last observation."""
        self.stretch = self.lone = self.whole = NOTHING
        """Those that are not complete yet: of all requests, of those that were alone; and of whole scrapes, for the
        pool's constants.
        """

    @property
    def error(self) -> float | None:
        """Standard error of the factor, as a share; None while it is not its own."""
        if self.pinned or len(self.logs) < _LEAST:
            return None
        return _OF_MEDIAN * stdev(self.logs) / sqrt(len(self.logs))

    @property
    def counts(self) -> Sequence[Stretch]:
        """The observations that say how fast it is."""
        whole = len(self.seen) >= _LEAST and self.at - self.seen_at <= _HALF_LIFE
        return self.seen if whole or self.at - self.lone_since < _PATIENCE else self.lone_seen

    def measure(self, ratios: Ratios) -> None:
        """Compare what was seen with the model, in which a step takes `ratios` times what is configured."""
        self.logs = [
            log(min(max(each.seconds / each.modelled(ratios), 1 / _MODEL_MOST), _MODEL_MOST)) for each in self.counts
        ]
        self.median = median(self.logs) if self.logs else 0.0


class Speeds:
    """Those of a pool. `pins`: shell pattern of an endpoint's name -> its speed, 1 as modelled; the first counts.

    `stretch`: modelled seconds that make one observation; short of a full step of the engine they measure its batches.
    """

    def __init__(self, pins: Mapping[str, float], stretch: float) -> None:
        self.observations = 0
        self.pool = 1.0
        """The pool's factor."""
        self.constants = Constants()
        self.ratios = Ratios()
        """Times that a step's configured seconds are to be taken, in modelled seconds."""
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

    def learned(self) -> list[tuple[str, list[Stretch]]]:
        """Of each endpoint its observations, for `restore`."""
        return [(endpoint.name, list(speed.counts)) for endpoint, speed in self._all.items() if speed.counts]

    def restore(self, speed: Speed, seen: Sequence[Sequence[float]], now: float) -> None:
        """Take over what was observed elsewhere of an endpoint of which nothing was observed here."""
        if not speed.counts and not speed.pinned and seen:
            speed.seen.extend(map(stretch_of, seen))
            speed.at = speed.seen_at = now
            speed.measure(self.ratios)
            self._refresh(now)

    def close(self, endpoint: Endpoint) -> None:
        """The endpoint is gone for good."""
        self._all.pop(endpoint, None)

    def observe(self, speed: Speed, one: Stretch, now: float, *, lone: bool = False) -> None:
        """`one` was seen. `lone`: of one request that had the endpoint for itself."""
        apart = one.seconds > _TOGETHER * speed.factor * one.modelled(self.ratios)
        self._observe(speed, one, now, apart=apart)
        if lone and one.seconds > 0:
            speed.lone = speed.lone.and_then(one)
            if speed.lone.prefill >= _LONE * self._stretch:
                speed.lone_seen.append(speed.lone)
                speed.lone_since = min(speed.lone_since, now)
                speed.lone = NOTHING
                self._conclude(speed, now)

    def counted(self, speed: Speed, one: Stretch, now: float, *, prompt: float = 0.0) -> None:
        """The same, as an engine counted it: that divides no step, so a stretch may end before it.

        `prompt`: modelled seconds of a long prompt's prefill.
        """
        self._observe(speed, one, now, apart=True, least=_PROMPTS * prompt)
        if not speed.pinned:
            apart = speed.factor / self.pool
            speed.whole = self.constants.observe(speed.whole, one, apart, speed.factor * prompt)

    def _observe(self, speed: Speed, one: Stretch, now: float, *, apart: bool, least: float = 0.0) -> None:
        before = speed.stretch
        if apart and before.modelled(self.ratios) >= max(self._stretch, least):
            speed.seen.append(before)
            speed.seen_at = now
            speed.stretch = NOTHING
            self._conclude(speed, now)
        speed.stretch = speed.stretch.and_then(one)

    def _conclude(self, speed: Speed, now: float) -> None:
        """There is one observation more."""
        speed.at = now
        speed.measure(self.ratios)
        self.observations += 1
        if now >= self._next:
            self._refresh(now)
        elif not speed.pinned:
            speed.factor = self._factor(speed, log(self.pool), now)

    def _refresh(self, now: float) -> None:
        """The pool's value, which is the median of its endpoints', and everybody's."""
        self.constants.fit()
        if any(abs(new / old - 1) > _MOVED for new, old in zip(self.constants.ratios, self.ratios, strict=True)):
            self.ratios = self.constants.ratios
            for speed in self._all.values():
                if speed.logs:
                    speed.measure(self.ratios)
        known = [speed.median for speed in self._all.values() if len(speed.logs) >= _LEAST]
        if known:
            self._next = now + (_SOON if 0 < len(self.constants.stretches) <= FEW else _REFRESH)
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
