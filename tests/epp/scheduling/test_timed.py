from random import Random

from epp.configuration.loader import load_strategy
from epp.plugin import Endpoint, Request
from epp.scheduling.timed import TimedScheduler


class Clock:
    now = 100.0

    def __call__(self) -> float:
        """Each look at it is a second later than the one before."""
        self.now += 1.0
        return self.now


async def test_a_decision_says_when_it_was_prepared_and_made() -> None:
    clock, pods = Clock(), [Endpoint("a", "10.0.0.1:8000"), Endpoint("b", "10.0.0.2:8000")]

    def made(*arguments: object, **named: object) -> TimedScheduler:
        return TimedScheduler(clock, *arguments, **named)

    scheduler = load_strategy("prefix-aware", clock=lambda: 0.0, random=Random(1)).scheduler(
        wall_clock=lambda: 0.0, on_error=lambda plugin, error: None, made=made
    )
    request = await scheduler.prepare(Request(id="r", model="m", prompt=b"x" * 400, tokens=100))
    clock.now = 200.0
    assert scheduler.choose(request, pods).times == (101.0, 102.0, 201.0, 202.0)
    clock.now = 300.0
    assert scheduler.choose(Request(id="q", model="m"), pods).times == (301.0, 301.0, 301.0, 302.0)
