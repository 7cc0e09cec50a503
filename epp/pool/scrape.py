"""The scraper: each endpoint's `/metrics` once an interval, into `endpoint.load`."""

import asyncio
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from epp import protocol
from epp.pool.answers import EngineAnswers
from epp.pool.engines import ALL_ENGINES, Engine, Engines, Places, Same, page_of_each, parse, series
from epp.pool.http import MAX_BODY, BadAnswer, Kept, host_and_port
from epp.pool.rounds import Rounds
from epp.pool.store import Endpoint, Load, Pool
from epp.telemetry.metrics import Metrics

_SECONDS: Final = 1.0
"""For one page that a plugin asks for."""


class Scraper:
    """Keeps the load of a pool's endpoints fresh, and says which are stale; a failing page harms only its own load.

    `interval`, `timeout` (of one scrape, connecting included) and `stale_after` are seconds. At most `concurrency`
    scrapes run at once. A failed scrape leaves the old `endpoint.load`, whose `at` says its age.
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
        self.engines = ALL_ENGINES
        """To be set where others are known; from the next scrape on they count."""
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._rounds = Rounds(pool, random, interval)
        self._timeout = timeout
        self._stale_after = stale_after
        self._slots = asyncio.Semaphore(concurrency)
        self._stale: set[Endpoint] = set()

    @property
    def stale(self) -> Sequence[Endpoint]:
        """Endpoints without a good scrape for `stale_after` seconds, in the pool's order."""
        return [endpoint for endpoint in self._pool.endpoints if endpoint in self._stale]

    async def run(self) -> None:
        """Scrape for ever, following the pool as it changes."""
        await self._pool.run_for_each("scrape", self._follow, self._stale.discard)

    async def _follow(self, endpoint: Endpoint) -> None:
        if endpoint.rank:  # its page is that of rank 0, which is read for all of them
            return
        since = self._clock()
        visit = Visit(endpoint.address)
        engines: Engines | None = None
        try:
            await self._rounds.first()
            while True:
                if engines is not self.engines:
                    engines = self.engines
                    readers = {
                        rank: PageReader(rank, self._engine(rank), self._metrics)
                        for rank in self._pool.ranks_at(endpoint.address)
                    }
                error = await self._scrape(visit, readers)
                if not error:
                    self._stale.difference_update(readers)
                else:
                    self._metrics.scrape_failed(self._pool.name)
                    self._report(readers, since, error)
                await self._rounds.next()
        finally:
            visit.close()

    def _report(self, endpoints: Iterable[Endpoint], since: float, error: str) -> None:
        """The scrape of a page failed that these share, so they are stale together; `since`: when the first was due."""
        now = self._clock()
        for endpoint in endpoints:
            good = endpoint.load.at if endpoint.load.at is not None else since
            if endpoint not in self._stale and now - good >= self._stale_after:
                self._stale.add(endpoint)
                self._metrics.degraded("metrics-stale", f"{endpoint.name} at {endpoint.address}: {error}")

    async def _scrape(self, visit: "Visit", readers: "Mapping[Endpoint, PageReader]") -> str:
        """One scrape of a page, for all ranks that are on it; what went wrong, or ""."""
        try:
            async with self._slots, asyncio.timeout(self._timeout):
                page = await visit.page()
        except BadAnswer as error:
            return str(error)
        except TimeoutError:
            if visit.connecting:
                return f"no connection within {self._timeout:g} s; is a NetworkPolicy or a firewall between?"
            return f"no whole answer within {self._timeout:g} s"
        except OSError as error:
            return error.strerror or str(error)
        now = self._clock()
        pages = [page]
        if len(readers) > 1:
            pages = list(page_of_each(page, len(readers)).values())
            if len(pages) != len(readers):
                label = f"label {protocol.DATA_PARALLEL_SIZE_LABEL} says {len(readers)}"
                return f"a page in which {len(pages)} data-parallel engines are told apart, but {label}"
        for (endpoint, reader), of_it in zip(readers.items(), pages, strict=True):
            if (load := reader.read(of_it, now)) is None:
                name = self.engines.of(endpoint)
                return f"a page of {len(page)} bytes without the metrics of engine {name}"
            self._pool.scraped(endpoint, load)
        return ""

    def _engine(self, endpoint: Endpoint) -> Engine:
        name = self.engines.of(endpoint)
        if (engine := self.engines.known.get(name)) is not None:
            return engine
        known = ", ".join(self.engines.known)
        self._metrics.degraded("engine-unknown", f"{endpoint.name}: got {name[:64]!r}; expected one of {known}")
        return self.engines.known[self.engines.default]


class PageReader:
    """Reads the pages of one endpoint, one after the other."""

    def __init__(self, endpoint: Endpoint, engine: Engine, metrics: Metrics) -> None:
        self._engine = engine
        self._answers = EngineAnswers(endpoint, engine, metrics)
        self._places = Places()
        self._same = Same(self._places)
        self._load: Load | None = None

    def read(self, page: bytes, now: float) -> Load | None:
        """What it says; None: it is no page of this engine."""
        if differs := self._load is None or not self._same.says(page):
            load = parse(page, self._engine, now, self._places)
        else:
            load = replace(self._load, at=now)
        if load is not None:
            self._load = load
            self._answers.look(page, self._places, now, differs=differs)
            if differs:
                self._same.remember(page)
        return load


async def samples_at(address: str, path: str, metric: str) -> Sequence[tuple[Mapping[str, str], float]]:
    """Labels and value of each sample of a metric in the page there, now. OSError (BadAnswer too), TimeoutError."""
    visit = Visit(address, path)
    try:
        async with asyncio.timeout(_SECONDS):
            return series(await visit.page(), metric)
    except BadAnswer as error:
        raise OSError(str(error)) from error
    finally:
        visit.close()


class Visit:
    """One page of an endpoint's, over a connection that is kept between visits."""

    def __init__(self, address: str, path: str = "/metrics", largest: int = MAX_BODY) -> None:
        """`largest`: bytes of the page."""
        accept = "text/plain" if path.endswith("metrics") else "application/json"
        self._request = f"GET {path} HTTP/1.1\r\nHost: {address}\r\nAccept: {accept}\r\n\r\n".encode()
        self._server = Kept(*host_and_port(address), largest)

    @property
    def connecting(self) -> bool:
        """Whether the last try got no connection."""
        return self._server.connecting

    async def page(self) -> bytes:
        """The page now. BadAnswer or OSError if there is none."""
        return await self._server.exchange(self._request)

    def close(self) -> None:
        self._server.close()
