"""Simulated pods behind one scorer, in virtual time: minutes of traffic in a moment, the same each time."""

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from epp.plugin import CacheRoom, Cost, Endpoint, Load, PrefixMatch, Request, Response
from tests.support.scheduling.signals import with_signal
from tooling.simulator.engine import H100_8B, Engine, EngineParameters


class Arrival(NamedTuple):
    at: float
    tokens: int
    output: int = 32


def slower(times: float, parameters: EngineParameters = H100_8B) -> EngineParameters:
    """The same pod, all of it `times` slower."""
    names = ("base", "per_decode", "per_context_token", "linear", "attention")
    return replace(parameters, **{name: times * getattr(parameters, name) for name in names})


class VirtualPool:
    """Requests that share nothing, sent to the endpoint with the lowest bill, ties in turn.

    `tells(endpoint number, load)` is what its metrics say; `early(endpoint number)`: it tells its first token at once.
    """

    def __init__(
        self,
        cost: Cost,
        pods: Sequence[EngineParameters],
        *,
        seen: bool = True,
        tells: Callable[[int, Load], Load] = lambda i, load: load,
        early: Callable[[int], bool] = lambda i: False,
    ) -> None:
        self.cost, self.seen, self.tells, self.early = cost, seen, tells, early
        self.now = 0.0
        cost.clock = lambda: self.now
        self.engines = [Engine(parameters) for parameters in pods]
        self.slow = [1.0] * len(pods)
        self.endpoints = [Endpoint(f"default/pod-{i}", f"10.0.0.{i}:8000") for i in range(len(pods))]
        self.picks: list[int] = []
        self.ttft: list[float] = []
        self._busy = [False] * len(pods)
        self._events: list[tuple[float, int, Callable[..., None], Any]] = []
        self._live: dict[str, tuple[Request, int, float]] = {}

    def play(self, arrivals: Iterable[Arrival]) -> None:
        """Let them all come, and end."""
        for arrival in arrivals:
            self._at(arrival.at, self._arrive, arrival)
        for i in range(len(self.engines)):
            self._at(self.now + 0.1 * i, self._scrape, i)
        while any(event[2] != self._scrape for event in self._events):
            self.now, _, happen, subject = heapq.heappop(self._events)
            happen(subject)
        self._events.clear()

    @property
    def mean_ttft(self) -> float:
        return sum(self.ttft) / len(self.ttft)

    def share(self, i: int, last: int = 0) -> float:
        """Endpoint `i`'s part of the (last) picks."""
        picks = self.picks[-last:]
        return picks.count(i) / len(picks)

    def _at(self, at: float, happen: Callable[..., None], subject: object) -> None:
        self._count = getattr(self, "_count", 0) + 1
        heapq.heappush(self._events, (at, self._count, happen, subject))

    def _arrive(self, arrival: Arrival) -> None:
        number = len(self.picks)
        request = Request(id=str(number), model="m", tokens=arrival.tokens, stream=True, sees_answer=self.seen)
        request = with_signal(request, PrefixMatch, dict.fromkeys(self.endpoints, PrefixMatch(0, 0, 1)))
        request = with_signal(request, CacheRoom, dict.fromkeys(self.endpoints, CacheRoom(0, 0)))
        costs = [sum(bill) for bill in self.cost.bill(request, self.endpoints)]
        turn = number % len(costs)
        chosen = min(range(len(costs)), key=lambda i: (costs[i], (i - turn) % len(costs)))
        self.picks.append(chosen)
        self.cost.on_picked(request, self.endpoints[chosen])
        self._live[request.id] = request, chosen, self.now
        self.engines[chosen].add(request.id, (), prompt=arrival.tokens, output=arrival.output, now=self.now)
        if self.early(chosen):
            self.cost.on_first_token(request, self.endpoints[chosen])
        self._step(chosen)

    def _step(self, i: int) -> None:
        if not self._busy[i] and (step := self.engines[i].step(self.now)) is not None:
            self._busy[i] = True
            self._at(self.now + step.duration * self.slow[i], self._stepped, (i, step))

    def _stepped(self, subject: Any) -> None:
        i, step = subject
        for job in step.first:
            request, _, came = self._live[job.id]
            self.ttft.append(self.now - came)
            if self.seen:
                self.cost.on_first_token(request, self.endpoints[i])
        for job in step.finished:
            request, _, _ = self._live.pop(job.id)
            self.cost.on_finished(request, self.endpoints[i], Response(status=200, complete=True))
        self._busy[i] = False
        self._step(i)

    def _scrape(self, i: int) -> None:
        engine = self.engines[i]
        load = Load(waiting=len(engine.waiting), running=len(engine.running), kv_usage=engine.kv_usage, at=self.now)
        self.endpoints[i].load = self.tells(i, load)
        self._at(self.now + 1, self._scrape, i)
