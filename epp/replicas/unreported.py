"""`Unreported`: how many requests other replicas have sent to endpoints that are not known here yet."""

from typing import Final

_WEIGHT: Final = 0.2
"""Of one more look: the last five or so count, two and a half seconds."""


class Unreported:
    """Of one pool. `requests` is a mean: as many as come in the time that telling takes (Little's law)."""

    def __init__(self, now: float) -> None:
        self.requests = 0.0
        self.looked = now
        self._came = 0

    def add(self) -> None:
        """Another replica told of one."""
        self._came += 1

    def look(self, lag: float, now: float) -> None:
        """To be called about twice a second. `lag`: seconds from another replica's pick until it is known here."""
        if now > self.looked:
            rate = self._came / (now - self.looked)
            self.requests += _WEIGHT * (rate * lag - self.requests)
            self.looked, self._came = now, 0
