"""What LMCache's L2 adapters do when their backend is killed, hangs, or is not there yet.

    hack/bench l2                      every backend there is here, a table in Markdown, as in docs/l2.md (half an hour)
    hack/bench l2 --only valkey fs     those whose names hold a text

Real backends on loopback, and LMCache's own storage manager in a process of the engines' environment (`hack/install
engine`): four threads look up a new prompt of eight chunks and 2 MiB, store it, and look one up again that L1 has
forgotten. A fault begins after five seconds and ends eight later. A prompt that is not answered in 45 s is given up.
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from gateway.envoy import find_envoy
from gateway.errors import EnvoyError
from hack.benches.rig.processes import BenchError
from tooling.laptop.engines import EngineError, engine_python
from tooling.laptop.ports import free_ports

NODE: Final = Path(__file__).parent / "rig" / "l2_node.py"
BEFORE, DURING, AFTER, LIMIT = 5.0, 8.0, 30.0, 45.0
"""Seconds. AFTER: until a backend that is back is said not to be used again. LIMIT: that a prompt is waited for."""
CHUNKS: Final = 8
OLD: Final = 8
"""Chunks of a prompt, and prompts that one node stores and the next looks for."""
LOOPBACK: Final = "127.0.0.1"
ACCESS, SECRET = "bench", "bench-secret"


@dataclass(frozen=True)
class Service:
    """A process of a backend."""

    command: Sequence[str]
    ready: Callable[[], bool]
    clear: Callable[[], object] = lambda: None
    """Takes away what a killed one leaves behind."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Backend:
    """`services`: what has to run, in order; the first is the one that breaks."""

    adapter: dict[str, Any]
    services: Sequence[Service]


class Fault(NamedTuple):
    """How prompts fared. Seconds; `back` is None where L2 gave nothing more, `grown` is in MB."""

    prompts: int
    waited: float
    unanswered: int
    back: float | None
    wrong: int
    grown: float
    ended: bool


class Row(NamedTuple):
    """`again`, `kept`: prompts of 8 that a new node found, before and after the backend was killed."""

    name: str
    again: int
    kept: int
    killed: Fault
    hung: Fault
    late: Fault | None
    """None where the node does not start without its backend."""
    told: bool
    """Whether what was stored was reported as stored."""


# --- backends ---------------------------------------------------------------------------------------------------------


def listening(port: int) -> Callable[[], bool]:
    def look() -> bool:
        with socket.socket() as probe:
            return probe.connect_ex((LOOPBACK, port)) == 0

    return look


def program(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise BenchError(f"{name} was not found: install it ({package})")
    return found


def redis(folder: Path, port: int) -> Service:
    command = [
        program("redis-server", "Debian: redis-server"),
        "--port",
        str(port),
        "--bind",
        LOOPBACK,
        "--dir",
        str(folder),
    ]
    command += ["--save", "", "--appendonly", "no", "--maxmemory", "1gb", "--maxmemory-policy", "allkeys-lru"]
    return Service(command, listening(port))


def resp(folder: Path) -> Backend:
    [port] = free_ports(1)
    return Backend({"type": "resp", "host": LOOPBACK, "port": port, "num_workers": 4}, [redis(folder, port)])


def valkey(folder: Path) -> Backend:
    [port] = free_ports(1)
    adapter = {"type": "valkey", "startup_nodes": f"{LOOPBACK}:{port}", "num_workers": 4}
    return Backend({**adapter, "request_timeout": 1.0}, [redis(folder, port)])


def resp_by_envoy(folder: Path) -> Backend:
    """Envoy's Redis proxy between: it makes its own connections anew, and answers with an error while it has none."""
    port, front = free_ports(2)
    address = {"address": {"socket_address": {"address": LOOPBACK, "port_value": port}}}
    cluster = {"name": "redis", "type": "STATIC", "connect_timeout": "1s"}
    load = {"cluster_name": "redis", "endpoints": [{"lb_endpoints": [{"endpoint": address}]}]}
    kind = "type.googleapis.com/envoy.extensions.filters.network.redis_proxy.v3.RedisProxy"
    routes = {"catch_all_route": {"cluster": "redis"}}
    proxy = {"@type": kind, "stat_prefix": "redis", "settings": {"op_timeout": "2s"}, "prefix_routes": routes}
    listener = {
        "name": "redis",
        "address": {"socket_address": {"address": LOOPBACK, "port_value": front}},
        "filter_chains": [{"filters": [{"name": "envoy.filters.network.redis_proxy", "typed_config": proxy}]}],
    }
    config = folder / "envoy.json"
    resources = {"listeners": [listener], "clusters": [{**cluster, "load_assignment": load}]}
    config.write_text(json.dumps({"static_resources": resources}))
    command = [str(find_envoy()), "-c", str(config), "-l", "error", "--concurrency", "2", "--disable-hot-restart"]
    adapter = {"type": "resp", "host": LOOPBACK, "port": front, "num_workers": 4}
    return Backend(adapter, [redis(folder, port), Service(command, listening(front))])


def mounted(folder: Path) -> tuple[Path, Service]:
    """A directory that a process serves, as network file systems are: FUSE's bindfs."""
    below, above = folder / "below", folder / "above"
    (below / "kv").mkdir(
        parents=True
    )  # not in the directory beneath: while nothing is mounted there is nowhere to write
    above.mkdir()

    def clear() -> None:
        subprocess.run(["umount", "-l", str(above)], check=False, stderr=subprocess.DEVNULL)

    command = [program("bindfs", "Debian: bindfs; needs root and /dev/fuse"), "-f", str(below), str(above)]
    return above / "kv", Service(command, lambda: os.path.ismount(above), clear)


def fs(folder: Path) -> Backend:
    path, service = mounted(folder)
    return Backend({"type": "fs", "base_path": str(path)}, [service])


def fs_native(folder: Path) -> Backend:
    path, service = mounted(folder)
    return Backend({"type": "fs_native", "base_path": str(path)}, [service])


def nixl(folder: Path) -> Backend:
    path, service = mounted(folder)
    parameters = {"file_path": str(path), "use_direct_io": "false", "max_capacity_gb": "1"}
    return Backend({"type": "nixl_store_dynamic", "backend": "POSIX", "backend_params": parameters}, [service])


def s3(folder: Path) -> Backend:
    """The adapter takes the bucket from the host's name: of 127.0.0.1, it is 127 in the domain 0.0.1."""
    [port] = free_ports(1)
    data, notes = folder / "data", folder / "notes"
    (data / "127").mkdir(parents=True)
    notes.mkdir()
    command = [program("versitygw", "hack/binaries DIRECTORY versitygw"), "--access", ACCESS, "--secret", SECRET]
    command += [
        "--port",
        f"{LOOPBACK}:{port}",
        "--virtual-domain",
        f"0.0.1:{port}",
        "posix",
        "--sidecar",
        str(notes),
        str(data),
    ]
    adapter = {"type": "s3", "s3_endpoint": f"{LOOPBACK}:{port}", "s3_region": "us-east-1", "disable_tls": True}
    keys = {"aws_access_key_id": ACCESS, "aws_secret_access_key": SECRET, "s3_prefer_http2": False}
    return Backend({**adapter, **keys, "s3_num_io_threads": 4}, [Service(command, listening(port))])


BACKENDS: Final[dict[str, Callable[[Path], Backend]]] = {
    "resp: Redis": resp,
    "resp: Redis behind Envoy": resp_by_envoy,
    "valkey: Redis": valkey,
    "fs: a mount": fs,
    "fs_native: a mount": fs_native,
    "nixl_store_dynamic: POSIX on a mount": nixl,
    "s3: versitygw": s3,
}


class Stage:
    """A backend that runs."""

    def __init__(self, backend: Backend, folder: Path) -> None:
        self.backend = backend
        self._log = folder / "backend.log"
        self._running: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """All of it that does not run. BenchError if a part ends instead, or is not ready in 20 s."""
        for service in self.backend.services[len(self._running) :]:
            self._running.append(self._started(service))

    def _started(self, service: Service) -> "subprocess.Popen[bytes]":
        service.clear()
        with self._log.open("ab") as log:
            environment = {**os.environ, **service.environment}
            process = subprocess.Popen(
                service.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
            )
        deadline = time.monotonic() + 20
        while not service.ready():
            if process.poll() is not None or time.monotonic() > deadline:
                process.kill()
                last = self._log.read_text(errors="replace").strip().splitlines()[-3:]
                raise BenchError(f"{service.command[0]} did not start: {' / '.join(last)}")
            time.sleep(0.05)
        return process

    def kill(self) -> None:
        """The part that breaks."""
        self._running[0].kill()
        self._running[0].wait()

    def again(self) -> None:
        """That part anew."""
        self._running[0] = self._started(self.backend.services[0])

    def signal(self, number: signal.Signals) -> None:
        self._running[0].send_signal(number)

    def end(self) -> None:
        for process, service in zip(reversed(self._running), reversed(self.backend.services), strict=False):
            process.kill()
            process.wait()
            service.clear()
        self._running.clear()


# --- the node ---------------------------------------------------------------------------------------------------------


class Node:
    """A process that does with L2 what an LMCache server does, and what it has said until now."""

    def __init__(self, python: Path, adapter: dict[str, Any], log: Path, old: int) -> None:
        command = [str(python), str(NODE), json.dumps({**adapter, "shared": True}), "--limit", str(LIMIT)]
        command += ["--old", str(old)]
        environment = {**os.environ, "LMCACHE_LOG_LEVEL": "WARNING", "LMCACHE_TRACK_USAGE": "false"}
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, env=environment
            )
        self.said: list[dict[str, Any]] = []
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with suppress(ValueError):  # LMCache may print too
                self.said.append(json.loads(line))

    @property
    def ended(self) -> bool:
        return self.process.poll() is not None

    def wait(self, kind: str, seconds: float) -> bool:
        """Whether it says so in time and before it ends."""
        deadline = time.monotonic() + seconds
        while not of(self.said.copy(), kind):
            if self.ended or time.monotonic() > deadline:
                return False
            time.sleep(0.05)
        return True

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self._listener.join()


@contextmanager
def node(python: Path, stage: Stage, folder: Path, old: int = OLD) -> Iterator[Node]:
    made = Node(python, stage.backend.adapter, folder / "node.log", old)
    try:
        yield made
    finally:
        made.end()


def of(said: Sequence[dict[str, Any]], *kinds: str) -> list[dict[str, Any]]:
    return [each for each in said if each["kind"] in kinds]


def seen(said: Sequence[dict[str, Any]], since: float, over: float, ended: bool = False) -> Fault:
    """What a fault from `since` until `over` did, by all that a node has said. `ended`: whether the node did too."""
    prompts = [each for each in of(said, "new", "again") if each["t"] + each["seconds"] > since]
    before = max((each["kilobytes"] for each in of(said, "size") if each["t"] < since), default=0)
    largest = max((each["kilobytes"] for each in of(said, "size")), default=0)
    back = loaded(said, over)
    return Fault(
        prompts=len(prompts),
        waited=max((each["seconds"] for each in prompts), default=LIMIT),
        unanswered=sum(not each["answered"] for each in prompts),
        back=None if back is None else back - over,
        wrong=sum(each["wrong"] for each in of(said, "new", "again", "old", "kept")),
        grown=(largest - before) / 1024 if before else 0.0,
        ended=ended,
    )


def loaded(said: Sequence[dict[str, Any]], since: float) -> float | None:
    """When a prompt that was stored after `since` was loaded from L2 whole."""
    again = (each for each in of(said, "again") if each["stored"] > since and each["l2"] == CHUNKS)
    return min((each["t"] + each["seconds"] for each in again), default=None)


def until_back(found: Node, over: float) -> None:
    """Return when L2 is used again, or when it is not and prompts that wait would have been given up."""
    while time.monotonic() < over + AFTER and loaded(found.said.copy(), over) is None and not found.ended:
        time.sleep(0.2)
    time.sleep(3 if loaded(found.said.copy(), over) is not None else LIMIT + 3 - AFTER)


def kept(found: Node) -> int:
    return sum(each["l2"] == CHUNKS for each in of(found.said.copy(), "old"))


def measure(name: str, python: Path, folder: Path) -> Row:
    stage = Stage(BACKENDS[name](folder), folder)
    try:
        stage.start()
        with node(python, stage, folder) as first:
            if not first.wait("begin", 300):
                raise BenchError(f"a node on {name} does not begin: {last_words(folder / 'node.log')}")
            told = of(first.said.copy(), "begin")[0]["told"] > 0
        with node(python, stage, folder) as second:
            second.wait("begin", 300)
            again = kept(second)
            killed = happen(second, stage.kill, stage.again)
        with node(python, stage, folder) as third:
            third.wait("begin", 300)
            found = kept(third)
            hung = happen(third, lambda: stage.signal(signal.SIGSTOP), lambda: stage.signal(signal.SIGCONT))
        stage.kill()
        with node(python, stage, folder, old=0) as fourth:
            late = None
            if fourth.wait("ready", 60):
                since = time.monotonic()
                time.sleep(DURING)
                stage.again()
                over = time.monotonic()
                until_back(fourth, over)
                late = seen(fourth.said.copy(), since, over, fourth.ended)
        return Row(name, again, found, killed, hung, late, told)
    finally:
        stage.end()


def happen(found: Node, begin: Callable[[], None], end: Callable[[], None]) -> Fault:
    time.sleep(BEFORE)
    since = time.monotonic()
    begin()
    time.sleep(DURING)
    end()
    over = time.monotonic()
    until_back(found, over)
    return seen(found.said.copy(), since, over, found.ended)


def last_words(log: Path) -> str:
    lines = [
        line for line in log.read_text(errors="replace").splitlines() if line.strip() and "warn" not in line.lower()
    ]
    return lines[-1][:200] if lines else "silent"


# --- the table --------------------------------------------------------------------------------------------------------


def cells(fault: Fault | None) -> str:
    """Longest wait, unanswered, and when L2 gave something again."""
    if fault is None:
        return "does not start | - | -"
    back = "never" if fault.back is None else f"{fault.back:.1f}"
    return f"{fault.waited:.1f} | {fault.unanswered} of {fault.prompts} | {'node ended' if fault.ended else back}"


def table(rows: Sequence[Row]) -> str:
    """In Markdown."""
    head = ["adapter: backend", "found after a restart", "after the backend was killed", "reported"]
    for fault in ("killed", "hangs", "late"):
        head += [f"{fault}: longest wait, s", "unanswered", "L2 again, s"]
    head += ["wrong", "grown, MB"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for row in rows:
        faults = [row.killed, row.hung, *([row.late] if row.late else [])]
        figures = [row.name, f"{row.again} of 8", f"{row.kept} of 8", "yes" if row.told else "no"]
        figures += [cells(each) for each in (row.killed, row.hung, row.late)]
        figures += [str(sum(each.wrong for each in faults)), f"{max(each.grown for each in faults):.0f}"]
        lines.append(f"| {' | '.join(figures)} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench l2", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="those whose names hold one of these")
    parser.add_argument("--keep-logs", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    rows = []
    for name in (each for each in BACKENDS if any(text in each for text in options.only)):
        with tempfile.TemporaryDirectory(prefix="warmpath-l2-", ignore_cleanup_errors=True) as folder:
            try:
                rows.append(measure(name, engine_python(), Path(folder)))
                print(rows[-1], file=sys.stderr, flush=True)
            except (BenchError, EngineError, EnvoyError) as error:
                print(f"hack/bench l2: {name}: {error}", file=sys.stderr, flush=True)
            if options.keep_logs is not None:
                for log in Path(folder).glob("*.log"):
                    options.keep_logs.mkdir(parents=True, exist_ok=True)
                    shutil.copy(log, options.keep_logs / f"{name.partition(':')[0]}-{log.name}")
    print(table(rows))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
