"""`Parts`: endpoints shared out among replicas of the picker, so that not all pick the same of those that cost alike.

All replicas have the same on account, so they find the same endpoint the cheapest, and until one is told of another's
pick, a millisecond or a few later, it picks that endpoint too: the more often, the more requests come in a second
(docs/replay.md, several pickers). So each has a part of the endpoints, and one of another's part costs more: the mean
prefill, as likely as a request is on its way there that is not known here yet.
"""

from collections.abc import Callable, Collection, Sequence
from math import exp
from typing import Final
from zlib import crc32

from epp.plugin import Endpoint, Replicas

_TIMES: Final = 2.0
"""How often the wait behind such a request counts: once for each of the two."""


class Parts:
    """Of one pool: its `endpoints`, and the `replicas` that serve it."""

    def __init__(self, endpoints: Callable[[], Sequence[Endpoint]], replicas: Callable[[], Replicas]) -> None:
        self._endpoints = endpoints
        self._replicas = replicas
        self._of: tuple[Sequence[Endpoint], int, int] = ((), 0, 1)
        self._own: Collection[Endpoint] = frozenset()

    def look(self, work: float) -> tuple[float, Collection[Endpoint]]:
        """Seconds that an endpoint costs more which is not in this replica's part, and that part. `work`: mean seconds
        of a prompt's prefill.
        """
        number, total, unreported = self._replicas()
        if unreported <= 0 or total < 2:
            return 0.0, self._own
        of = self._endpoints(), number, total
        if of != self._of:
            self._of = of
            self._own = frozenset(sorted(of[0], key=_place)[number::total])
        return _TIMES * (1 - exp(-unreported)) * work, self._own


def _place(endpoint: Endpoint) -> tuple[int, str]:
    """The same in all replicas, and nothing to do with roles or nodes that names are numbered by."""
    return crc32(endpoint.name.encode("utf-8", "surrogatepass")), endpoint.name
