"""The child processes of a laptop run: started, watched, and gone when we are gone."""

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from gateway.child import with_parent

# Beside the command stays a process that ends its group when the command ends, however it does: vLLM's engine, killed
# without its server, would stay and keep its memory. Who is left gets time to put away what it shares.
_GROUP_ENDS_WITH_IT = """
import ctypes, os, signal, sys, time

def others():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            state, _, group = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[:3]
        except OSError:
            continue
        if int(group) == os.getpgid(0) and int(pid) != os.getpid() and state != "Z":
            return True

pid = os.getpid()
if os.fork() == 0:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    ctypes.CDLL(None).prctl(1, signal.SIGUSR1)  # PR_SET_PDEATHSIG
    while os.getppid() == pid:
        signal.sigtimedwait([signal.SIGUSR1], 60)
    os.killpg(0, signal.SIGTERM)
    for _ in range(50):
        others() and time.sleep(0.1)
    os.killpg(0, signal.SIGKILL)
os.execvp(sys.argv[1], sys.argv[1:])
"""


class Processes:
    """Starts processes, each with its output in `directory/NAME.log`; leaving the block ends all of them.

    Children run in sessions of their own, so that a Ctrl-C in the terminal reaches only us and the chain is taken
    down in order; they are killed when we are killed.
    """

    def __init__(self, directory: Path, stop_seconds: float = 10.0) -> None:
        self._directory = directory
        self._stop_seconds = stop_seconds
        self._running: dict[str, asyncio.subprocess.Process] = {}
        self._groups: set[int] = set()
        """Of processes with children, until they were stopped."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop(*reversed(self._running)))

    async def start(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        children: bool = False,
    ) -> None:
        """Start `command` under `name`, which is also the name of its log. `children`: has some; they end with it."""
        if children and sys.platform == "linux":
            command = [sys.executable, "-I", "-S", "-c", _GROUP_ENDS_WITH_IT, *command]
        with (self._directory / f"{name}.log").open("ab") as output:
            self._running[name] = await asyncio.create_subprocess_exec(
                *with_parent(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )
        if children and sys.platform == "linux":
            self._groups.add(self._running[name].pid)

    def pid(self, name: str) -> int:
        """The process id of a running process."""
        return self._running[name].pid

    def runs(self, name: str) -> bool:
        """Whether a process of that name was started and has not ended."""
        return name in self._running and self._running[name].returncode is None

    async def stop(self, *names: str, how: signal.Signals = signal.SIGTERM) -> list[int]:
        """Signal all `names` at once and wait; SIGKILL after `stop_seconds`. Returns their exit statuses."""
        children = [self._running.pop(name) for name in names if name in self._running]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(how)
        for child in children:
            try:
                await asyncio.wait_for(child.wait(), self._stop_seconds)
            except TimeoutError:
                child.kill()
        statuses = [await child.wait() for child in children]
        for child in children:
            if child.pid in self._groups:
                self._groups.discard(child.pid)
                await self._end_of_group(child.pid)
        return statuses

    async def _end_of_group(self, group: int) -> None:
        """Return when no process of a process's group is left."""
        try:
            async with asyncio.timeout(self._stop_seconds):
                while _alive(group):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)

    def ended(self) -> list[tuple[str, str]]:
        """Those that ended by themselves since the last call: name, and one sentence with the end of what it said."""
        found = {name: child.returncode for name, child in self._running.items() if child.returncode is not None}
        for name in found:
            del self._running[name]
        return [(name, f"{name} {_how(status)}: {self.last_words(name)}") for name, status in found.items()]

    def last_words(self, name: str, lines: int = 3) -> str:
        """The last lines `name` wrote, on one line."""
        text = (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(said[-lines:]) or "it said nothing"


def _alive(group: int) -> bool:
    """Whether any process of a group runs; those that only wait to be reaped do not."""
    for directory in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError):
            state, _, found, *_ = (directory / "stat").read_text().rpartition(")")[2].split()
            if int(found) == group and state != "Z":
                return True
    return False


def _how(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
