"""`Announcer`: tells the other replicas what becomes of this one's requests, by the hooks that every plugin has."""

from collections.abc import Callable
from typing import Any

from epp.plugin import Endpoint, Plugin, Request, Response, Slot
from epp.replicas.exchange import Exchange


class Announcer(Plugin):
    """Of one pool. `states` gives what the other plugins share of a request (`Plugin.to_peers`).

    To be called after the other plugins: their `on_picked` comes before `to_peers`.
    """

    def __init__(self, exchange: Exchange, pool: str, states: Callable[[Request], dict[str, Any]]) -> None:
        self._exchange = exchange
        self._pool = pool
        self._states = states
        self._numbers = Slot[dict[Endpoint, int]]()
        """By which numbers peers know a request: one at each endpoint it was given to."""

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        if not request.elsewhere:
            number = self._exchange.decided(self._pool, request, endpoint, self._states(request))
            (self._numbers.get(request) or self._numbers.set(request, {}))[endpoint] = number

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        if (numbers := self._numbers.get(request)) is not None:
            self._exchange.first_token(numbers.get(endpoint, 0))

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if (numbers := self._numbers.get(request)) is not None:
            self._exchange.finished(numbers.pop(endpoint, 0), response)
