import asyncio
import random
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count, product
from time import monotonic

import pytest

from epp.pool.engines import ENGINES, Engine, Engines, Figure, Places, parse
from epp.pool.scrape import PageReader, Scraper, samples_at
from epp.pool.store import Endpoint, Load, Pool
from tests.support.engines.metrics_pages import vllm_page
from tests.support.process.dropped import dropping
from tests.support.process.waiting import until
from tests.support.scheduling.degradations import RecordedMetrics

LABEL = "warmpath/data-parallel-size"

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Server:
    """A metrics server whose answer a test may change while it runs; counts connections and requests."""

    def __init__(self, handler: Handler | None = None) -> None:
        self.page = vllm_page()
        self.connections = 0
        self.requests: list[bytes] = []
        self.address = ""
        self._handler = handler or self._serve

    @asynccontextmanager
    async def running(self, host: str = "127.0.0.1") -> AsyncIterator["Server"]:
        server = await asyncio.start_server(self._accept, host, 0)
        port = server.sockets[0].getsockname()[1]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            yield self
        finally:
            server.close()
            await server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                self.requests.append(await reader.readuntil(b"\r\n\r\n"))
                await self._handler(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(self.page) + self.page)


def pool_of(*addresses: str) -> Pool:
    pool = Pool("p", random=random.Random(1))
    pool.replace(Endpoint(f"e{i}", address) for i, address in enumerate(addresses))
    return pool


@asynccontextmanager
async def scraping(
    pool: Pool, metrics: RecordedMetrics, stale_after: float = 0.05, timeout: float = 3.0
) -> AsyncIterator[Scraper]:
    scraper = Scraper(
        pool, metrics, monotonic, random.Random(1), interval=0.005, timeout=timeout, stale_after=stale_after
    )
    async with asyncio.TaskGroup() as group:
        task = group.create_task(scraper.run())
        await asyncio.sleep(0)
        yield scraper
        task.cancel()


async def test_load_follows_the_page_over_one_connection() -> None:
    metrics = RecordedMetrics()
    async with Server().running() as server:
        pool = pool_of(server.address)
        (endpoint,) = pool.endpoints
        async with scraping(pool, metrics) as scraper:
            await until(lambda: endpoint.load.waiting == 2)
            server.page = vllm_page(waiting=9)
            await until(lambda: endpoint.load.waiting == 9)
            assert scraper.stale == []
    assert server.connections == 1
    assert server.requests[0].startswith(b"GET /metrics HTTP/1.1\r\nHost: " + server.address.encode())
    assert endpoint.load.at is not None
    assert metrics.degradations == []


async def test_ranks_behind_one_port_are_read_off_one_page() -> None:
    def page(waiting: bytes) -> bytes:
        both = vllm_page(engines=2)
        return both.replace(b'waiting{engine="1",model_name="meta/x"} 2', b'waiting{engine="1"} ' + waiting)

    metrics = RecordedMetrics()
    async with Server().running() as server:
        server.page = page(b"5")
        pool = Pool("p", random=random.Random(1))
        first, second = (Endpoint(f"e-rank-{n}", server.address, {LABEL: "2"}, rank=n) for n in range(2))
        pool.replace([second, first])
        async with scraping(pool, metrics) as scraper:
            await until(lambda: second.load.waiting == 5)
            assert first.load.waiting == 2
            assert first.load.blocks == second.load.blocks == 1000
            server.page = page(b"6")
            await until(lambda: second.load.waiting == 6)
            assert scraper.stale == []
            server.page = vllm_page(engines=3)
            await until(lambda: len(scraper.stale) == 2)
            assert [reason for reason, _ in metrics.degradations] == ["metrics-stale"] * 2
            for rank, (_, detail) in enumerate(metrics.degradations):
                assert detail == (
                    f"e-rank-{rank} at {server.address}: a page in which 3 data-parallel engines are told apart, "
                    "but label warmpath/data-parallel-size says 2"
                )
            assert second.load.waiting == 6
            server.page = page(b"7")
            await until(lambda: second.load.waiting == 7 and scraper.stale == [])
            pool.replace([])
            scraped = len(server.requests)
            await asyncio.sleep(0.1)
            assert len(server.requests) <= scraped + 1
    assert server.connections == 1


@pytest.mark.parametrize("behind", [0.0, 0.25, 0.5, 0.75])
def test_ranks_of_one_page_are_stale_together(behind: float) -> None:
    reading = count(1000 + behind, 0.25)  # each reading is later than the one before
    metrics = RecordedMetrics()
    pool = Pool("p", random=random.Random(1))
    ranks = [Endpoint(f"e-rank-{n}", "127.0.0.1:1", {LABEL: "2"}, rank=n) for n in range(2)]
    pool.replace(ranks)
    scraper = Scraper(
        pool, metrics, lambda: next(reading), random.Random(1), interval=1.0, timeout=1.0, stale_after=2.0
    )
    while not scraper.stale:
        scraper._report(ranks, 1000.0, "it is away")
    assert scraper.stale == ranks
    assert [detail.split()[0] for _, detail in metrics.degradations] == ["e-rank-0", "e-rank-1"]


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6 here")
async def test_ipv6_endpoints_are_scraped() -> None:
    async with Server().running("::1") as server:
        pool = pool_of(server.address)
        async with scraping(pool, RecordedMetrics()):
            await until(lambda: pool.endpoints[0].load.waiting == 2)
    assert server.requests[0].startswith(b"GET /metrics HTTP/1.1\r\nHost: [::1]:")


async def test_the_pool_may_change_while_scraping() -> None:
    async with Server().running() as one, Server().running() as two:
        pool = pool_of(one.address)
        (first,) = pool.endpoints
        async with scraping(pool, RecordedMetrics()):
            await until(lambda: first.load.at is not None)
            pool.replace([Endpoint("new", two.address)])
            (second,) = pool.endpoints
            await until(lambda: second.load.at is not None)
            seen = len(one.requests)
            await until(lambda: len(two.requests) > 5)
            assert len(one.requests) <= seen + 1
        pool.replace([])  # nobody listens any more
        assert pool.on_added == pool.on_removed == []


async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
    while True:
        writer.write(b"x")
        await writer.drain()
        await asyncio.sleep(0.002)


async def endless(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        writer.write(b"vllm:num_requests_waiting 1\n" * 4000)
        await writer.drain()


async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    sock: socket.socket = writer.get_extra_info("socket")
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
    raise ConnectionResetError


def answer(data: bytes) -> Handler:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        raise ConnectionResetError  # close

    return serve


@pytest.mark.parametrize(
    ("handler", "says"),
    [
        (answer(b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\n\r\n"), "status 500"),
        (answer(b"HTTP/1.1 302 Found\r\nLocation: http://10.0.0.1/\r\n\r\n"), "status 302"),
        (answer(b"\x00\xff" * 20_000), "a head of more than"),
        (answer(b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\nvllm:num_req"), "closed before the answer's end"),
        (answer(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nabc\n"), "without the metrics of engine vllm"),
        (answer(b""), "closed before the answer's end"),
        (reset, ""),
        (drip, "no whole answer within"),
        (endless, ""),
    ],
)
async def test_a_bad_page_makes_its_endpoint_stale_once_and_harms_no_other(handler: Handler, says: str) -> None:
    metrics = RecordedMetrics()
    async with Server(handler).running() as bad, Server().running() as good:
        pool = pool_of(bad.address, good.address)
        async with scraping(pool, metrics, timeout=1.0) as scraper:
            await until(lambda: scraper.stale == [pool.endpoints[0]])
            seen = len(good.requests)
            await until(lambda: len(good.requests) > seen + 5)
    assert pool.endpoints[1].load.waiting == 2
    assert pool.endpoints[0].load.at is None
    assert metrics.reasons() == ["metrics-stale"]
    assert f"e0 at {bad.address}" in metrics.degradations[0][1]
    assert says in metrics.degradations[0][1]


async def test_an_address_that_does_not_answer_is_said_to_give_no_connection() -> None:
    metrics = RecordedMetrics()
    with dropping() as port:
        pool = pool_of(f"127.0.0.1:{port}")
        async with scraping(pool, metrics, timeout=0.05):
            await until(lambda: bool(metrics.degradations))
    why = "no connection within 0.05 s; is a NetworkPolicy or a firewall between?"
    assert metrics.degradations == [("metrics-stale", f"e0 at 127.0.0.1:{port}: {why}")]


async def test_a_stale_endpoint_keeps_its_last_load_and_recovers() -> None:
    metrics = RecordedMetrics()
    async with Server().running() as server:
        pool = pool_of(server.address)
        (endpoint,) = pool.endpoints
        async with scraping(pool, metrics) as scraper:
            for expected in (1, 2):
                await until(lambda: endpoint.load.waiting == 2 and not scraper.stale)
                server.page = b"going down\n"
                await until(lambda: bool(scraper.stale))
                assert endpoint.load.waiting == 2
                assert len(metrics.degradations) == expected
                server.page = vllm_page()


async def test_nobody_listening_is_a_failure_with_a_reason() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        pool, metrics = pool_of(f"127.0.0.1:{taken.getsockname()[1]}"), RecordedMetrics()
        async with scraping(pool, metrics):
            await until(lambda: bool(metrics.degradations))
    assert dict(metrics.rows("warmpath_scrape_failures_total")) == {}
    metrics.add_pool(pool)
    assert dict(metrics.rows("warmpath_scrape_failures_total"))[("p",)]
    assert "Connect call failed" in metrics.degradations[0][1] or "refused" in metrics.degradations[0][1]


async def test_a_server_that_closes_between_scrapes_is_asked_anew() -> None:
    async def once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        page = vllm_page()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(page) + page)
        await writer.drain()
        raise ConnectionResetError  # close, without having said so

    metrics = RecordedMetrics()
    async with Server(once).running() as server:
        pool = pool_of(server.address)
        async with scraping(pool, metrics, stale_after=0.0):
            await until(lambda: server.connections > 5)
    assert metrics.degradations == []


async def test_an_unknown_engine_is_said_and_read_as_vllm() -> None:
    metrics = RecordedMetrics()
    async with Server().running() as server:
        pool = Pool("p", random=random.Random(1))
        pool.replace([Endpoint("e", server.address, {"llm-d.ai/engine-type": "vlm"})])
        async with scraping(pool, metrics):
            await until(lambda: pool.endpoints[0].load.waiting == 2)
    assert metrics.reasons() == ["engine-unknown"]


async def test_other_engines_count_from_the_next_scrape_on() -> None:
    metrics = RecordedMetrics()
    server = Server()
    server.page += b"my_queue 40\n"
    async with server.running():
        pool = pool_of(server.address)
        async with scraping(pool, metrics) as scraper:
            await until(lambda: pool.endpoints[0].load.waiting == 2)
            scraper.engines = Engines({"mine": Engine(Figure(b"my_queue"), None)}, "mine")
            await until(lambda: pool.endpoints[0].load.waiting == 40)
    assert metrics.degradations == []


async def test_at_most_so_many_scrapes_run_at_once() -> None:
    running, most = 0, 0

    async def slow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.002)
        running -= 1
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 28\r\n\r\nvllm:num_requests_waiting 1\n")

    servers = [Server(slow) for _ in range(4)]
    async with AsyncExitStack() as stack:
        for server in servers:
            await stack.enter_async_context(server.running())
        pool = pool_of(*(server.address for server in servers))
        scraper = Scraper(pool, RecordedMetrics(), monotonic, random.Random(1), interval=0.001, concurrency=2)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(scraper.run())
            await until(lambda: all(len(server.requests) > 3 for server in servers))
            task.cancel()
    assert most == 2


async def test_one_metric_of_any_page() -> None:
    async with Server().running() as server:
        server.page = b'# TYPE gpu gauge\ngpu{pod="a"} 5\ngpu{pod="b"} 7\n'
        assert await samples_at(server.address, "/metrics", "gpu") == [({"pod": "a"}, 5.0), ({"pod": "b"}, 7.0)]
        address = server.address
    with pytest.raises(ConnectionRefusedError):
        await samples_at(address, "/metrics", "gpu")


LORA = 'vllm:lora_requests_info{max_lora="4",running_lora_adapters="a,b",waiting_lora_adapters="c"} 1.7e+09'


def described(process: str = "", waiting: int = 2, lora: str = "", others: str = "", *, last: str = "") -> bytes:
    """A page of vLLM's between what its process and its HTTP server say of themselves."""
    before = f"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total {process}\n"
    return (
        before.encode()
        + vllm_page(waiting=waiting, lora=lora)
        + f"# TYPE http counter\n{others}\n".encode()
        + last.encode()
    )


PAGES = [
    described("1.5", others="http 1"),
    described("1" * 500, others="http 1"),
    described("1.5", others="http 2222"),
    described("1.5" + "\nmore 1" * 1000, others="http 1"),
    described("1.5", waiting=3),
    described("1.5", waiting=3, lora=LORA),
    described("1.5", others=LORA),
    described("1.5\n" + LORA),
    described("1.5", others="http 1", last="http_more 1\n" + LORA + "\n"),
    described()[:-3000],
    vllm_page(),
    vllm_page() + b"# more\n",
    vllm_page(waiting=3),
    vllm_page(buckets=3),
    vllm_page(engines=2),
    vllm_page().replace(b"vllm:num_requests_waiting", b"vllm:num_requests_late"),
    LORA.encode() + b"\n" + vllm_page(),
    b"vllm:num_requests_waiting 1\n",
    b"vllm:num_requests_waiting 1\nvllm:num_requests_running 4\n",
    b"vllm:num_requests_waiting 1\nvllm:num_requests_running 44\n",
    b"vllm:num_requests_waiting 1\nvllm:num_requests_running 4",
    b"xvllm:num_requests_waiting 1\n",
    b"vllm:num_requests_waiting NaN\nother 4\n",
    b"no page of ours\n",
    b"",
]  # fmt: skip


def test_what_is_read_of_a_page_does_not_depend_on_those_before() -> None:
    for pages in product(PAGES, PAGES):
        reader = PageReader(Endpoint("e", "10.0.0.1:8000"), ENGINES["vllm"], RecordedMetrics())
        for at, page in enumerate((*pages, pages[0])):
            assert reader.read(page, float(at)) == parse(page, ENGINES["vllm"], float(at), Places()), pages


def test_pages_that_differ_in_what_is_not_read_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[float] = []

    def counted(page: bytes, engine: Engine, at: float, places: Places) -> Load | None:
        read.append(at)
        return parse(page, engine, at, places)

    monkeypatch.setattr("epp.pool.scrape.parse", counted)
    reader = PageReader(Endpoint("e", "10.0.0.1:8000"), ENGINES["vllm"], RecordedMetrics())
    for at in range(100):
        load = reader.read(described("1" * (at % 7), others=f"http {at}"), float(at))
        assert load is not None
        assert load.at == at
    assert read == [0.0]
    reader.read(described(waiting=5), 100.0)
    assert read == [0.0, 100.0]
