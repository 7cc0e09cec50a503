"""What the page that refreshes each second costs the picker: its CPU time with a viewer, less that without one.

    hack/bench page                       8 and 300 endpoints, in turns
    hack/bench page --seconds 30 --rounds 5

A `warmpath serve` of its own; endpoints whose metrics differ at each scrape; ten requests a second, so that decisions
are drawn anew. The viewer asks for what the page's script asks for.
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
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import aiohttp

from hack.benches.rig.processes import cpu_seconds
from tests.support.ext_proc.messages import request_body, request_headers
from tests.support.ext_proc.server import Gateway
from tooling.laptop.ports import free_ports

RATE: Final = 10
"""Requests a second."""
RARELY: Final = ("--refresh-metrics-interval", "10s", "--log-level", "error")
"""Scrapes cost more than the page, and not always the same."""
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


async def viewer(url: str) -> None:
    """For ever, as the page's script."""
    async with aiohttp.ClientSession() as http:
        async with http.get(f"{url}/", headers={"accept": "text/html"}) as answer:
            found = LIVE.search(await answer.text())
        assert found is not None
        live = found[1].replace("&amp;", "&")
        while True:
            await asyncio.sleep(1.0)
            async with http.get(f"{url}{live}", headers={"accept": "application/json"}) as answer:
                assert answer.status == 200, await answer.text()
                await answer.read()


async def share(made: Picker, seconds: float, watched: bool) -> float:
    """CPU seconds of the picker for each second."""
    looking = asyncio.ensure_future(viewer(made.url)) if watched else None
    await asyncio.sleep(2.0)  # the page itself, which is asked for once
    before, at = made.cpu, time.monotonic()
    await asyncio.sleep(seconds)
    used = (made.cpu - before) / (time.monotonic() - at)
    if looking is not None:
        if looking.done():
            looking.result()
        looking.cancel()
    return used


async def compare(count: int, seconds: float, rounds: int) -> tuple[float, float]:
    """Medians, of the shares of a core without a viewer and of what one adds."""
    with tempfile.TemporaryDirectory(prefix="warmpath-page-") as folder:
        async with endpoints(count) as pool, picker(Path(folder), pool) as made:
            sending = asyncio.ensure_future(requests(made.grpc))
            await asyncio.sleep(5.0)
            pairs = []
            for _ in range(rounds):
                without = await share(made, seconds, watched=False)
                pairs.append((without, await share(made, seconds, watched=True) - without))
            if sending.done():
                sending.result()
            sending.cancel()
    alone, added = zip(*pairs, strict=True)
    return statistics.median(alone), statistics.median(added)


def table(rows: Sequence[tuple[int, float, float]]) -> str:
    """In Markdown: endpoints, and shares of a core."""
    lines = ["| endpoints | without a viewer | what one adds |", "|---|---|---|"]
    lines += [f"| {count} | {100 * alone:.2f} % | {100 * added:.2f} % |" for count, alone, added in rows]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench page", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--endpoints", nargs="+", type=int, default=[8, 300], metavar="N")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = [(count, *asyncio.run(compare(count, options.seconds, options.rounds))) for count in options.endpoints]
    print(table(rows))


if __name__ == "__main__":
    main()
