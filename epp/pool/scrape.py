"""The scraper: each endpoint's `/metrics` once an interval, into `endpoint.load`."""

import asyncio
import random
from collections.abc import Callable, Sequence

from epp.pool.endpoint import Endpoint
from epp.pool.engines import DEFAULT_ENGINE, ENGINES, Engine, Places, engine_name, parse
from epp.pool.http import BadAnswer, Connection
from epp.pool.store import Pool
from epp.telemetry.metrics import Metrics


class Scraper:
    """Keeps the load of a pool's endpoints fresh, and says which are stale; a failing page harms only its own load.

    `interval`, `timeout` (of one scrape, connecting included) and `stale_after` are seconds. At most `concurrency`
    scrapes run at once. A failed scrape leaves the old `endpoint.load`, whose `at` tells its age.
    """

    def __init__(
        self,
        pool: Pool,
        metrics: Metrics,
        clock: Callable[[], float],
        random: random.Random,
        *,
        interval: float = 1.0,
        timeout: float = 1.0,
        stale_after: float = 5.0,
        concurrency: int = 64,
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._random = random
        self._interval = interval
        self._timeout = timeout
        self._stale_after = stale_after
        self._slots = asyncio.Semaphore(concurrency)
        self._tasks: dict[Endpoint, asyncio.Task[None]] = {}
        self._stale: set[Endpoint] = set()

    @property
    def stale(self) -> Sequence[Endpoint]:
        """Endpoints without a good scrape for `stale_after` seconds, in the pool's order."""
        return [endpoint for endpoint in self._pool.endpoints if endpoint in self._stale]

    async def run(self) -> None:
        """Scrape for ever, following the pool as it changes."""
        async with asyncio.TaskGroup() as group:

            def follow(endpoint: Endpoint) -> None:
                self._tasks[endpoint] = group.create_task(self._follow(endpoint), name=f"scrape {endpoint.name}")

            self._pool.on_added.append(follow)
            self._pool.on_removed.append(self._forget)
            try:
                for endpoint in self._pool.endpoints:
                    follow(endpoint)
                await asyncio.Event().wait()
            finally:
                self._pool.on_added.remove(follow)
                self._pool.on_removed.remove(self._forget)
                self._tasks.clear()

    def _forget(self, endpoint: Endpoint) -> None:
        self._stale.discard(endpoint)
        if (task := self._tasks.pop(endpoint, None)) is not None:
            task.cancel()

    async def _follow(self, endpoint: Endpoint) -> None:
        since = self._clock()
        engine = self._engine(endpoint)
        visit = Visit(endpoint.address)
        places: Places = {}
        try:
            await asyncio.sleep(self._random.random() * min(self._interval, 1.0))  # spread: not all at the same moment
            while True:
                error = await self._scrape(endpoint, engine, visit, places)
                if not error:
                    self._stale.discard(endpoint)
                elif endpoint not in self._stale:
                    good = endpoint.load.at if endpoint.load.at is not None else since
                    if self._clock() - good >= self._stale_after:
                        self._stale.add(endpoint)
                        self._metrics.degraded("metrics-stale", f"{endpoint.name} at {endpoint.address}: {error}")
                await asyncio.sleep(self._interval * self._random.uniform(0.9, 1.1))
        finally:
            visit.close()

    async def _scrape(self, endpoint: Endpoint, engine: Engine, visit: "Visit", places: Places) -> str:
        """One scrape; what went wrong, or ""."""
        try:
            async with self._slots, asyncio.timeout(self._timeout):
                page = await visit.page()
        except BadAnswer as error:
            return str(error)
        except TimeoutError:
            return f"no whole answer within {self._timeout:g} s"
        except OSError as error:
            return error.strerror or str(error)
        if (load := parse(page, engine, self._clock(), places)) is None:
            return f"a page of {len(page)} bytes without the metrics of engine {engine_name(endpoint.labels)}"
        endpoint.load = load
        return ""

    def _engine(self, endpoint: Endpoint) -> Engine:
        name = engine_name(endpoint.labels)
        if (engine := ENGINES.get(name)) is not None:
            return engine
        known = ", ".join(ENGINES)
        self._metrics.degraded("engine-unknown", f"{endpoint.name}: got {name[:64]!r}; expected one of {known}")
        return ENGINES[DEFAULT_ENGINE]


class Visit:
    """One endpoint's page, over a connection that is kept between visits."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host.strip("[]"), int(port)
        self._request = f"GET /metrics HTTP/1.1\r\nHost: {address}\r\nAccept: text/plain\r\n\r\n".encode()
        self._connection: Connection | None = None

    async def page(self) -> bytes:
        """The page now. BadAnswer or OSError if there is none."""
        kept = self._connection
        if kept is not None and kept.open:
            try:
                return await kept.get(self._request)
            except BadAnswer:
                if kept.begun:
                    raise
        # New, or closed by the server just as we asked: that is no failure of the endpoint.
        loop = asyncio.get_running_loop()
        _, self._connection = await loop.create_connection(Connection, self._host, self._port)
        return await self._connection.get(self._request)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.abort()
