"""What the page that refreshes each second costs the picker: its CPU time with a refresh, less that without one.

    hack/bench page                       8 and 300 endpoints, one after the other
    hack/bench page --scrape 1 --seconds 200

A `warmpath serve` of its own; endpoints whose metrics differ at each scrape; ten requests a second, so that decisions
are drawn anew. The viewer asks for what the page's script asks for, as often. CPU time is read before a refresh and
soon after it, and as long after in a time without one.
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from hack.benches.rig.processes import cpu_seconds
from tests.support.ext_proc.messages import request_body, request_headers
from tests.support.ext_proc.server import Gateway
from tooling.laptop.ports import free_ports

RATE: Final = 10
"""Requests a second."""
RARELY: Final = ("--refresh-metrics-interval", "10s", "--log-level", "error")
"""Scrapes cost more than the page, and not always the same."""
EVERY_S: Final = 1.0
"""Seconds from a refresh to the next, at least."""
LATER_S: Final = 0.2
"""At most so many seconds more, by chance: else what is done once a second would fall into the same part of each."""
WINDOW_S: Final = 0.1
"""Seconds of each measurement: longer than a refresh takes, and short, since what else is done in them differs."""
LIVE: Final = re.compile(r'data-live="([^"]+)"')
START_SECONDS: Final = 60.0


async def metrics(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """An engine's page, other figures each time."""
    try:
        while await reader.readuntil(b"\r\n\r\n"):
            running, usage = random.randrange(30), random.random()
            page = (
                f"vllm:num_requests_running {running}\nvllm:num_requests_waiting {running // 5}\n"
                f"vllm:kv_cache_usage_perc {usage}\n"
                'vllm:cache_config_info{block_size="16",num_gpu_blocks="8192"} 1\n'
            )
            writer.write(f"HTTP/1.1 200 OK\r\ncontent-length: {len(page)}\r\n\r\n{page}".encode())
    except (asyncio.IncompleteReadError, ConnectionError):
        writer.close()


@asynccontextmanager
async def endpoints(count: int) -> AsyncIterator[str]:
    """A file of so many, each at an address of its own."""
    hosts = [f"127.1.{number // 200}.{number % 200 + 1}" for number in range(count)]
    [port] = free_ports(1)
    server = await asyncio.start_server(metrics, hosts, port)
    entries = (f"- {{name: pod-{n}, address: {host}, port: {port}}}" for n, host in enumerate(hosts))
    async with server:
        yield "endpoints:\n" + "\n".join(entries) + "\n"


class Picker:
    """A running one."""

    def __init__(self, process: asyncio.subprocess.Process, grpc: int, admin: int) -> None:
        self.process = process
        self.grpc = grpc
        self.url = f"http://127.0.0.1:{admin}"

    @property
    def cpu(self) -> float:
        return cpu_seconds(self.process.pid)


@asynccontextmanager
async def picker(folder: Path, pool: str, *more: str) -> AsyncIterator[Picker]:
    """`more`: flags."""
    (folder / "pool.yaml").write_text(pool)
    grpc, health, admin = free_ports(3)
    ports = ("--grpc-port", grpc, "--grpc-health-port", health, "--metrics-port", admin)
    flags = ["serve", "--endpoints", str(folder / "pool.yaml"), *map(str, ports), *RARELY, *more]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", "epp.cli", *flags)
    made = Picker(process, grpc, admin)
    try:
        async with asyncio.timeout(START_SECONDS), aiohttp.ClientSession() as http:
            while not await _is_ready(http, f"{made.url}/ready"):
                await asyncio.sleep(0.1)
        yield made
    finally:
        process.terminate()
        await process.wait()


async def _is_ready(http: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with http.get(url) as answer:
            return answer.status == 200
    except aiohttp.ClientError:
        return False


async def requests(port: int) -> None:
    """For ever, `RATE` a second."""
    async with Gateway(port) as gateway:
        for number in range(10**9):
            call = gateway.stream()
            await call.write(request_headers())
            asked = {"role": "user", "content": f"{number} is a prompt of its own " * 40}
            body = json.dumps({"model": "m", "messages": [asked]})
            await call.write(request_body(body.encode(), end=True))
            said = await call.said()
            assert said.startswith("request headers to "), said
            await asyncio.sleep(1 / RATE)


@asynccontextmanager
async def viewer(url: str) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """One that has opened the page; what it refreshes by, as the page's script does."""
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/", headers={"accept": "text/html"}) as answer:
            found = LIVE.search(await answer.text())
        assert found is not None
        live = found[1].replace("&amp;", "&")

        async def refresh() -> None:
            async with http.get(f"{url}{live}", headers={"accept": "application/json"}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()

        yield refresh


async def nothing() -> None:
    """As a refresh, where there is none."""


async def window(made: Picker, ask: Callable[[], Awaitable[None]], seconds: float) -> tuple[float, float]:
    """CPU seconds of the picker in so many seconds, more if `ask` at their start takes longer; and how many it were."""
    before, began = made.cpu, time.monotonic()
    await ask()
    await asyncio.sleep(began + seconds - time.monotonic())
    return made.cpu - before, time.monotonic() - began


async def pairs(made: Picker, seconds: float) -> list[tuple[float, float]]:
    """Shares of a core without a viewer, and CPU seconds that a refresh adds to it; windows with and without are taken
    in turns.
    """
    found = []
    async with viewer(made.url) as refresh:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            began = time.monotonic()
            with_one, long = await window(made, refresh, WINDOW_S)
            await asyncio.sleep(began + EVERY_S / 2 - time.monotonic())
            without, as_long = await window(made, nothing, long)
            alone = without / as_long
            found.append((alone, with_one - alone * long))
            await asyncio.sleep(began + EVERY_S + random.uniform(0.0, LATER_S) - time.monotonic())
    return found


class Cost(NamedTuple):
    """Shares of a core: of a picker without a viewer, what one adds, and the standard error of that."""

    alone: float
    added: float
    error: float


async def cost(count: int, seconds: float, scrape: float) -> Cost:
    """With so many endpoints, each scraped once in `scrape` seconds."""
    often = ("--refresh-metrics-interval", f"{scrape:g}s")
    with tempfile.TemporaryDirectory(prefix="warmpath-page-") as folder:
        async with endpoints(count) as pool, picker(Path(folder), pool, *often) as made:
            sending = asyncio.ensure_future(requests(made.grpc))
            await asyncio.sleep(5.0)
            found = await pairs(made, seconds)
            if sending.done():
                sending.result()
            sending.cancel()
    alone, added = zip(*found, strict=True)
    error = statistics.stdev(added) / len(added) ** 0.5
    return Cost(statistics.mean(alone), statistics.mean(added) / EVERY_S, error / EVERY_S)


def table(rows: Sequence[tuple[int, Cost]]) -> str:
    """In Markdown: endpoints, and shares of a core."""
    lines = ["| endpoints | without a viewer | what one adds | standard error |", "|---|---|---|---|"]
    for count, found in rows:
        lines.append(f"| {count} | {100 * found.alone:.1f} % | {100 * found.added:.2f} % | {100 * found.error:.2f} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench page", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--endpoints", nargs="+", type=int, default=[8, 300], metavar="N")
    parser.add_argument("--seconds", type=float, default=100.0, help="of the measurement with each number of them")
    parser.add_argument("--scrape", type=float, default=10.0, metavar="SECONDS", help="from one to an endpoint's next")
    options = parser.parse_args()
    print(table([(count, asyncio.run(cost(count, options.seconds, options.scrape))) for count in options.endpoints]))


if __name__ == "__main__":
    main()
