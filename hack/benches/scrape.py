"""One exchange with an endpoint's /metrics: our client beside aiohttp's, in turns, with the same server. Ten seconds.

Both keep their connection, bound the body and have a deadline, and neither parses the page. CPU is this process's own;
the server has a process of its own.
"""

import argparse
import asyncio
import multiprocessing
import statistics
import sys
import time
from collections.abc import Awaitable, Callable

import aiohttp
import uvloop

from epp.pool.http import MAX_BODY
from epp.pool.scrape import Visit

DEADLINE = 2.0
"""Seconds, as the scraper's own."""


def page(size: int) -> bytes:
    """Lines as vLLM has them, `size` bytes of them at least."""
    line = b'vllm:request_prefill_time_seconds_bucket{engine="0",le="0.3",model_name="bench"} 12.0\n'
    return line * (size // len(line) + 1)


def serve(port: "multiprocessing.Queue[int]", size: int) -> None:
    body = page(size)
    answer = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)

    async def client(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                writer.write(answer)
        except asyncio.IncompleteReadError:
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(client, "127.0.0.1", 0)
        port.put(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    uvloop.run(run())


async def cost(exchange: Callable[[], Awaitable[bytes]], times: int, size: int) -> float:
    """CPU microseconds of one exchange."""
    start = time.process_time()
    for _ in range(times):
        async with asyncio.timeout(DEADLINE):
            body = await exchange()
        assert len(body) >= size
    return (time.process_time() - start) / times * 1e6


async def compare(port: int, size: int, rounds: int, times: int) -> tuple[float, float]:
    """Medians of ours and of aiohttp's."""
    visit = Visit(f"127.0.0.1:{port}")
    url = f"http://127.0.0.1:{port}/metrics"
    connector = aiohttp.TCPConnector(limit=0, force_close=False)
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, auto_decompress=False, timeout=timeout) as session:

        async def theirs() -> bytes:
            parts = bytearray()
            async with session.get(url) as response:
                async for part in response.content.iter_any():
                    parts += part
                    if len(parts) > MAX_BODY:
                        raise ValueError("too large")
            return bytes(parts)

        await theirs()
        figures: list[tuple[float, float]] = []
        for turn in range(rounds):
            pair = [(0, visit.page), (1, theirs)]
            found = [0.0, 0.0]
            for place, exchange in pair if turn % 2 else reversed(pair):
                found[place] = await cost(exchange, times, size)
            figures.append((found[0], found[1]))
    visit.close()
    ours, others = zip(*figures, strict=True)
    return statistics.median(ours), statistics.median(others)


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/bench scrape", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--times", type=int, default=300, help="exchanges in a round")
    given = parser.parse_args()
    print("CPU us of an exchange")
    print(f"{'page':>8} {'ours':>8} {'aiohttp':>8} {'ratio':>6} {'100 endpoints at 1 Hz, % of a core':>36}")
    for size in (1 << 10, 30 << 10, 100 << 10):
        port: multiprocessing.Queue[int] = multiprocessing.Queue()
        server = multiprocessing.Process(target=serve, args=(port, size), daemon=True)
        server.start()
        try:
            ours, theirs = uvloop.run(compare(port.get(timeout=10), size, given.rounds, given.times))
        finally:
            server.terminate()
        share = f"{ours / 100:.2f} and {theirs / 100:.2f}"
        print(f"{size >> 10:>5} KB {ours:>8.0f} {theirs:>8.0f} {theirs / ours:>6.1f} {share:>36}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
