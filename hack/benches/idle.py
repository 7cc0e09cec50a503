"""What a picker costs while nobody asks: CPU of `warmpath serve` with endpoints that it scrapes once a second.

    hack/bench idle                         100 endpoints
    hack/bench idle --beside ../before      and the picker of another checkout, in the same seconds

The endpoints' pages are as long as vLLM 0.32's, and as those of idle engines: all that changes in them is what Python
says of its own process; with --busy, the engine's figures do too. On a machine with other work only ratios of one run
mean something.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Final, cast

import uvloop

from hack.benches.rig.pages import page
from hack.benches.rig.processes import BenchError, Program, cpu_seconds, running
from tooling.laptop.ports import free_ports

HERE: Final = Path(__file__).parents[2]
MODEL: Final = "meta-llama/Llama-3.1-8B-Instruct"
MODELS: Final = json.dumps({"object": "list", "data": [{"id": MODEL, "object": "model"}]}).encode()
WARM_SECONDS: Final = 12.0
"""Until what is read every ten seconds was read."""


class Server(asyncio.Protocol):
    """One endpoint's end of a connection. Head and body in a write each, as uvicorn does."""

    def __init__(self, parts: tuple[bytes, bytes], busy: bool) -> None:
        self._engine, self._others = parts
        self._busy = busy
        self._scrapes = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        body = self._page() if data.startswith(b"GET /metrics") else MODELS
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: %d\r\n\r\n" % len(body))
        self._transport.write(body)

    def _page(self) -> bytes:
        self._scrapes += 1
        count = self._scrapes
        own = b"# TYPE process_cpu_seconds_total counter\nprocess_cpu_seconds_total %d.25\n" % 10 ** (count % 7)
        engine = self._engine.replace(b"} 0.0\n", b"} %d.0\n" % count) if self._busy else self._engine
        return own + engine + self._others


def serve(hosts: Sequence[str], port: int, busy: bool, up: "multiprocessing.Queue[int]") -> None:
    parts = page(MODEL)

    async def run() -> None:
        loop = asyncio.get_running_loop()
        for host in hosts:
            await loop.create_server(lambda: Server(parts, busy), host, port)
        up.put(port)
        await asyncio.Event().wait()

    uvloop.run(run())


@contextmanager
def endpoints(count: int, busy: bool) -> Iterator[str]:
    """A file of so many, each at an address of its own, while they answer."""
    hosts = [f"127.1.{number // 200}.{number % 200 + 1}" for number in range(count)]
    [port] = free_ports(1)
    up: multiprocessing.Queue[int] = multiprocessing.Queue()
    server = multiprocessing.Process(target=serve, args=(hosts, port, busy, up), daemon=True)
    server.start()
    try:
        up.get(timeout=30)
        entries = [{"name": f"pod-{n}", "address": host, "port": port} for n, host in enumerate(hosts)]
        yield json.dumps({"endpoints": entries})
    finally:
        server.terminate()
        server.join()


@contextmanager
def pickers(checkouts: Mapping[str, Path], pool: str, warm: float = WARM_SECONDS) -> Iterator[dict[str, Program]]:
    """One of each checkout, all with the same endpoints, once they have run for so many seconds."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-idle-")))
        (folder / "pool.yaml").write_text(pool)
        found: dict[str, Program] = {}
        for name, checkout in checkouts.items():
            grpc, health, admin = free_ports(3)
            ports = ("--grpc-port", str(grpc), "--grpc-health-port", str(health), "--metrics-port", str(admin))
            flags = ["--endpoints", str(folder / "pool.yaml"), "--drain-linger", "0", *ports]
            command = [sys.executable, "-P", "-m", "epp.cli", "serve", *flags]
            env = {"PYTHONPATH": str(checkout.resolve())}
            found[name] = stack.enter_context(running(f"picker-{len(found)}", command, folder, env=env))
            found[name].wait_for_port(admin)
        time.sleep(warm)
        yield found


def measure(programs: Mapping[str, Program], seconds: float) -> dict[str, float]:
    """Share of a core that each uses, at the same time."""
    before, at = {name: cpu_seconds(program.pid) for name, program in programs.items()}, time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - at
    return {name: (cpu_seconds(program.pid) - before[name]) / took for name, program in programs.items()}


def table(rounds: Sequence[Mapping[str, float]], count: int) -> str:
    """Medians; what others cost as multiples of the first, within each round."""
    ours = next(iter(rounds[0]))
    lines = []
    for name in rounds[0]:
        share = median(each[name] for each in rounds)
        line = (
            f"{name}: {100 * share:.2f} % of a core with {count} endpoints: {share / count * 1e6:.0f} us each a second"
        )
        if name != ours:
            line += f"; {median(each[name] / each[ours] for each in rounds):.2f} times {ours}"
        lines.append(line)
    return "\n".join(lines)


def compare(checkouts: Mapping[str, Path], count: int, seconds: float, rounds: int, busy: bool) -> str:
    with endpoints(count, busy) as pool, pickers(checkouts, pool) as programs:
        return table([measure(programs, seconds) for _ in range(rounds)], count)


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/bench idle", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--endpoints", nargs="+", type=int, default=[100], metavar="N")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (10)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--busy", action="store_true", help="the engine's figures change from page to page")
    parser.add_argument("--beside", type=Path, metavar="CHECKOUT", help="compare with the picker there")
    options = parser.parse_args()
    checkouts = {"warmpath": HERE, **({} if options.beside is None else {str(options.beside): options.beside})}
    try:
        for count in options.endpoints:
            print(compare(checkouts, count, options.seconds, options.rounds, options.busy), flush=True)
    except BenchError as error:
        print(f"hack/bench idle: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
