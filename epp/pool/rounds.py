"""When an endpoint is asked again: about once an interval, at a moment that it shares with some others.

To wake up costs a process more than what it then does for one endpoint: one that is asked alone takes twice the CPU of
one among eight (`hack/bench idle`).
"""

import asyncio
from random import Random
from typing import Final

from epp.pool.store import Pool

_TOGETHER: Final = 8
"""Endpoints that share a moment, on average: more would keep requests waiting."""
_FEWEST: Final = 10
"""Moments of an interval, however few endpoints there are."""
_LATEST: Final = 1.0
"""Seconds until an endpoint is asked first, at most."""


class Rounds:
    """Of one pool. `interval`: seconds."""

    def __init__(self, pool: Pool, random: Random, interval: float) -> None:
        self._pool = pool
        self._random = random
        self._interval = interval

    async def first(self) -> None:
        """Wait for the first time: not all endpoints have it at once."""
        await self._sleep(self._random.random() * min(self._interval, _LATEST))

    async def next(self, interval: float | None = None) -> None:
        """Wait for the next; so many seconds, if another interval is named."""
        seconds = self._interval if interval is None else interval
        await self._sleep(seconds * self._random.uniform(0.9, 1.1))

    def pause(self, now: float, seconds: float) -> float:
        """From `now` to the shared moment that is nearest to so many seconds later."""
        step = self._interval / max(_FEWEST, len(self._pool.endpoints) / _TOGETHER)
        return max(0.0, round((now + seconds) / step) * step - now)

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(self.pause(asyncio.get_running_loop().time(), seconds))
