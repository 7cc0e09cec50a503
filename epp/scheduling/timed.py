"""`TimedScheduler`: a scheduler that says when it prepared and when it chose. Made where requests are traced only."""

from collections.abc import Callable, Sequence
from typing import Any

from epp.plugin import Endpoint, Request, Slot
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Scheduler


class TimedScheduler(Scheduler):
    """Sets `Decision.times`. `clock`: seconds, monotonic, the router's; all else is as of `Scheduler`."""

    def __init__(self, clock: Callable[[], float], *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._clock = clock
        self._prepared: Slot[tuple[float, float]] = Slot()

    async def prepare(self, request: Request) -> Request:
        began = self._clock()
        request = await super().prepare(request)
        self._prepared.set(request, (began, self._clock()))
        return request

    def choose(self, request: Request, endpoints: Sequence[Endpoint]) -> Decision:
        began = self._clock()
        decision = super().choose(request, endpoints)
        decision.times = (*(self._prepared.take(request) or (began, began)), began, self._clock())
        return decision
