"""Which plugins live, what their tasks do to each other, and what becomes of what they report."""

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from epp.configuration.lifecycle import Lasting, Lifecycle
from epp.plugin import Endpoint, Plugin, Producer, Request, Services
from epp.pool.store import Pool
from epp.testing import decide, endpoint, request, services
from tests.support.process.waiting import beside, until
from tests.support.scheduling.degradations import RecordedMetrics


class Worker(Plugin):
    """Writes its life into `log`; raises when `fails` is set."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name = name
        self.log = log
        self.fails = asyncio.Event()
        self.services: Services | None = None

    def start(self, services: Services) -> None:
        self.log.append(f"start {self.name}")
        self.services = services

    async def run(self, services: Services) -> None:
        assert services is self.services
        self.log.append(f"run {self.name}")
        try:
            await self.fails.wait()
            async with asyncio.TaskGroup() as group:
                group.create_task(self._fail())
        finally:
            await asyncio.sleep(0)  # its end takes a moment
            self.log.append(f"end {self.name}")

    async def _fail(self) -> None:
        raise RuntimeError(f"no {self.name}")

    def report(self, reason: str = "tired", detail: str = "") -> None:
        assert self.services is not None
        self.services.degraded(reason, detail, lasting=True)

    def recover(self, reason: str = "tired") -> None:
        assert self.services is not None
        self.services.recovered(reason)


@dataclass
class Fleet:
    """Lives of one process, whose pools share what lasts."""

    log: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    metrics: RecordedMetrics = field(default_factory=RecordedMetrics)
    lasting: Lasting = field(default_factory=dict)

    def lifecycle(self) -> Lifecycle:
        given = services(degraded=self.metrics.degraded, recovered=self.metrics.recovered)
        return Lifecycle(given, self.lasting, lambda plugin, error: self.errors.append(f"{plugin}: {error!r}"))

    def workers(self, names: str) -> list[Worker]:
        return [Worker(name, self.log) for name in names]


async def test_a_reload_starts_and_ends_lives_and_leaves_those_it_takes_over_alone() -> None:
    fleet = Fleet()
    lifecycle = fleet.lifecycle()
    a, b, c = fleet.workers("abc")
    lifecycle.use([a, b])
    assert fleet.log == ["start a", "start b"]  # before the first request, whenever the tasks begin
    async with beside(lifecycle.run()):
        await until(lambda: fleet.log[2:] == ["run a", "run b"])
        lifecycle.use([b, c])
        assert fleet.log[4:] == ["start c"]
        await until(lambda: sorted(fleet.log[5:]) == ["end a", "run c"])
        lifecycle.use([b, c])
        await asyncio.sleep(0.01)
        assert len(fleet.log) == 7
    assert sorted(fleet.log[7:]) == ["end b", "end c"]
    assert fleet.errors == []


async def test_a_plugin_that_is_taken_up_again_begins_anew() -> None:
    fleet = Fleet()
    lifecycle = fleet.lifecycle()
    (a,) = fleet.workers("a")
    async with beside(lifecycle.run()):
        for plugins in ([a], [], [a]):
            lifecycle.use(plugins)
            await asyncio.sleep(0.01)
        assert fleet.log == ["start a", "run a", "end a", "start a", "run a"]


async def test_of_several_reloads_at_once_the_last_counts() -> None:
    fleet = Fleet()
    lifecycle = fleet.lifecycle()
    async with beside(lifecycle.run()):
        await asyncio.sleep(0.01)
        for worker in fleet.workers("abc"):
            lifecycle.use([worker])
        await until(lambda: "run c" in fleet.log)
        assert [line for line in fleet.log if line.startswith("run")] == ["run c"]


async def test_a_life_that_fails_is_reported_and_harms_no_other() -> None:
    class Unstartable(Plugin):
        def start(self, services: Services) -> None:
            raise ValueError("not today")

    fleet = Fleet()
    lifecycle = fleet.lifecycle()
    a, b = fleet.workers("ab")
    lifecycle.use([Unstartable(), a, b])
    async with beside(lifecycle.run()):
        await until(lambda: "run b" in fleet.log)
        a.fails.set()
        await until(lambda: "end a" in fleet.log)
        await asyncio.sleep(0.01)
        assert "end b" not in fleet.log
    assert fleet.errors == ["Unstartable: ValueError('not today')", "a: RuntimeError('no a')"]


def test_what_lasts_is_over_when_nobody_has_it_any_more() -> None:
    fleet = Fleet()
    one, other = fleet.lifecycle(), fleet.lifecycle()
    a, b = fleet.workers("ab")
    one.use([a])
    other.use([b])
    a.report()
    b.report()
    a.recover()
    assert fleet.metrics.going_on() == {"tired"}
    b.recover()
    assert fleet.metrics.going_on() == set()


def test_what_a_plugin_reported_does_not_outlast_it() -> None:
    fleet = Fleet()
    lifecycle = fleet.lifecycle()
    a, b = fleet.workers("ab")
    lifecycle.use([a, b])
    a.report()
    lifecycle.use([b])
    assert fleet.metrics.going_on() == set()
    a.report()  # a request that was under way at the reload ended
    assert fleet.metrics.going_on() == set()
    assert fleet.metrics.reasons() == ["tired", "tired"]


async def test_a_plugin_may_work_for_each_endpoint_of_the_pool() -> None:
    class Greeter(Plugin):
        def __init__(self) -> None:
            self.at: set[str] = set()

        async def run(self, services: Services) -> None:
            await services.for_each_endpoint("greetings to", self._greet, lambda gone: None)

        async def _greet(self, endpoint: Endpoint) -> None:
            self.at.add(endpoint.name)
            try:
                await asyncio.Event().wait()
            finally:
                self.at.discard(endpoint.name)

    pool, greeter, errors = Pool("p", random=random.Random(1)), Greeter(), list[Exception]()
    given = services(for_each_endpoint=pool.run_for_each)
    lifecycle = Lifecycle(given, {}, lambda plugin, error: errors.append(error))
    lifecycle.use([greeter])
    pool.replace([endpoint("a"), endpoint("b")])
    async with beside(lifecycle.run()):
        await until(lambda: greeter.at == {"a", "b"})
        pool.replace([endpoint("c")])
        await until(lambda: greeter.at == {"c"})
    assert (greeter.at, errors) == (set(), [])


class Counted(int):
    """How many endpoints the pool has."""


@dataclass
class Counting(Producer[Counted]):
    """A plugin of a user's, which asks the pool."""

    produces = Counted

    def start(self, services: Services) -> None:
        self.services = services

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> dict[Endpoint, Counted]:
        return dict.fromkeys(endpoints, Counted(len(self.services.endpoints())))


def test_decide_gives_services_too() -> None:
    config = f"""
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: {__name__}.Counting
"""
    decision = decide(config, [endpoint("a"), endpoint("b")], request())
    assert [*decision.request.signal(Counted).values()] == [2, 2]
