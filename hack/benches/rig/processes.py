"""Programs of a bench: what is needed, on which core it runs, how long it computed, how it ends."""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

PACKAGES = {"wrk": "wrk", "nginx": "nginx-light"}
"""Program -> Debian package."""


class BenchError(Exception):
    """The bench cannot run or its figures would be worthless; `str()` is one sentence."""


def need_programs() -> None:
    """wrk and nginx, installed if this is Debian and we are root. Raises BenchError naming what is missing."""
    if not sys.platform.startswith("linux"):
        raise BenchError("this benchmark needs Linux: it reads the CPU time of other processes")
    os.environ["PATH"] = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"  # where Debian puts nginx
    missing = [program for program in PACKAGES if shutil.which(program) is None]
    if missing:
        install(*(PACKAGES[program] for program in missing))


def install(*packages: str) -> None:
    """Of Debian. Raises BenchError where they cannot be had; why is said before."""
    print(f"installing {' and '.join(packages)}", file=sys.stderr)
    if subprocess.run([Path(__file__).parents[2] / "packages", *packages], check=False).returncode:
        raise BenchError(f"needs what Debian has as {' and '.join(packages)}")


def cpu_seconds(pid: int) -> float:
    """CPU time the process and all its threads have used, to the nanosecond (/proc/PID/stat counts in 10 ms ticks)."""
    scheduler_clock = 2  # clock ids of other processes: clock_getcpuclockid(3), linux/posix-timers.h
    try:
        return time.clock_gettime(~pid << 3 | scheduler_clock)
    except OSError as error:
        raise BenchError(f"process {pid} has ended") from error


class Cores(NamedTuple):
    """As `taskset --cpu-list` has them; None: wherever the kernel puts it."""

    others: str | None
    """For all programs that are not measured: what those leave, or all where they leave too few."""
    own: Sequence[str | None]
    """For each that is: a core of its own, or the same for all where the machine has too few."""

    @property
    def shared(self) -> bool:
        return len({*self.own}) < len(self.own)


def cores(measured: int = 1) -> Cores:
    """For so many programs that are measured, and for all others: at least as many, if need be the same ones."""
    usable = [str(core) for core in sorted(os.sched_getaffinity(0))]
    if len(usable) < 2 or not shutil.which("taskset"):
        return Cores(None, [None] * measured)
    if len(usable) < measured:
        return Cores(",".join(usable[:-1]), usable[-1:] * measured)
    others = usable[:-measured] if len(usable) >= 2 * measured else usable
    return Cores(",".join(others), usable[-measured:])


def pinned(command: Sequence[str], on: str | None) -> list[str]:
    """`on`: as in `Cores`."""
    return list(command) if on is None else ["taskset", "--cpu-list", on, *command]


class Program:
    """A running program; its output is in `log`."""

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
        self.name = name
        self.pid = process.pid
        self.log = log
        self._process = process

    def check(self) -> None:
        """Raises BenchError with its last words if it has ended."""
        if self._process.poll() is not None:
            last = self.log.read_text(errors="replace").strip().splitlines()[-3:]
            raise BenchError(
                f"{self.name} ended with status {self._process.returncode}: {' / '.join(last) or 'silent'}"
            )

    def wait_for_port(self, port: int, seconds: float = 20.0) -> None:
        """Until it accepts connections; raises BenchError."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.check()
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    return
            time.sleep(0.05)
        raise BenchError(f"{self.name} does not listen on port {port} after {seconds:g} s; its log: {self.log}")


@contextmanager
def running(
    name: str, command: Sequence[str], folder: Path, on: str | None = None, env: Mapping[str, str] | None = None
) -> Iterator[Program]:
    """Run a program while the block runs; it ends before the block is left."""
    log = folder / f"{name}.log"
    options: dict[str, Any] = {"env": {**os.environ, **(env or {})}, "stdin": subprocess.DEVNULL}
    with log.open("wb") as out:
        try:
            process = subprocess.Popen(pinned(command, on), stdout=out, stderr=subprocess.STDOUT, **options)
        except OSError as error:
            raise BenchError(f"cannot start {name}: {error}") from error
    try:
        yield Program(name, process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
