"""`Announcer`: tells the other replicas what becomes of this one's requests, by the hooks that every plugin has."""

from collections.abc import Callable
from typing import Any, ClassVar

from epp.plugin import Endpoint, Plugin, Request, Response, Slot
from epp.replicas.exchange import Exchange


class Announcer(Plugin):
    """Of one pool. `states` gives what the other plugins share of a request (`Plugin.to_peers`).

    To be called after the other plugins: their `on_picked` comes before `to_peers`.
    """

    own_only: ClassVar[bool] = True

    def __init__(self, exchange: Exchange, pool: str, states: Callable[[Request, Endpoint], dict[str, Any]]) -> None:
        self._exchange = exchange
        self._pool = pool
        self._states = states
        self._numbers = Slot[int]()
        """By which number peers know a request at the endpoint that has it now."""

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        states = self._states(request, endpoint)
        self._numbers.set(request, self._exchange.decided(self._pool, request, endpoint, states))

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        self._exchange.first_token(self._numbers.get(request) or 0)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self._exchange.finished(self._numbers.take(request) or 0, response)
