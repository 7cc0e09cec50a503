"""One burst of load: wrk with our bodies for part of a second, and what it saw."""

import re
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

from hack.benches.rig.processes import BenchError, pinned

SCRIPT = Path(__file__).with_name("requests.lua")
_RESULT = re.compile(r"RESULT requests=(\d+) failed=(\d+) p50=([\d.]+) p99=([\d.]+)")


class Seen(NamedTuple):
    """Answers, all with a status below 400, and their times in microseconds."""

    requests: int
    p50: float
    p99: float


class Bodies(NamedTuple):
    """Prepared bodies (`bodies.write`) and the path they are posted to."""

    folder: Path
    number: int
    path: str


class Wrk:
    """Runs wrk, each run with a number of its own, so that no request is ever repeated."""

    def __init__(self, on: str | None, pause: float = 0.0) -> None:
        """`on`: as in `Cores`. `pause`: seconds for which a client waits before a request, at most."""
        self._on = on
        self._pause = pause
        self._runs = 0

    def burst(self, port: int, bodies: Bodies, connections: int, seconds: float) -> Seen:
        """Raises BenchError if a request failed: figures of errors are no figures."""
        self._runs += 1
        env = {
            "PATH": "/usr/bin:/bin:/usr/local/bin",
            "BENCH_BODIES": str(bodies.folder),
            "BENCH_COUNT": str(bodies.number),
            "BENCH_PATH": bodies.path,
            "BENCH_RUN": str(self._runs),
            "BENCH_PAUSE": f"{self._pause * 1000:.0f}",
        }
        command = ["wrk", "-t1", f"-c{connections}", "-d300s", "--timeout", "10s", "-s", str(SCRIPT)]
        command = pinned([*command, f"http://127.0.0.1:{port}"], self._on)
        wrk = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert wrk.stdout is not None
        try:
            started = wrk.stdout.readline()  # the script has read its bodies; the first request follows at once
            time.sleep(seconds)
            wrk.send_signal(signal.SIGINT)  # its -d knows whole seconds only
            output, _ = wrk.communicate(timeout=30)
        except subprocess.TimeoutExpired as error:
            raise BenchError("wrk does not end") from error
        finally:
            wrk.kill()  # for when we are the ones to be ended
            wrk.wait()
        return seen((started + output).decode(errors="replace"))


def seen(output: str) -> Seen:
    """The result in wrk's output. Raises BenchError."""
    result = _RESULT.search(output)
    if result is None:
        raise BenchError(f"wrk gave no result: {output.strip()[-300:]}")
    requests, failed = int(result[1]), int(result[2])
    if not requests:
        raise BenchError("no request was answered in the time of a measurement: expected a larger --seconds")
    if failed:
        raise BenchError(f"{failed} of {requests} requests failed: the figures would be worthless")
    return Seen(requests, float(result[3]), float(result[4]))
