"""The child processes of a laptop run: started, watched, and gone when we are gone."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from gateway.child import with_parent


class ProcessDied(Exception):
    """A process of the chain ended by itself. `str()` is one sentence with the end of what it said."""


class Processes:
    """Starts processes, each with its output in `directory/NAME.log`; leaving the block ends all of them.

    Children run in sessions of their own, so that a Ctrl-C in the terminal reaches only us and the chain is taken
    down in order; they are killed when we are killed.
    """

    def __init__(self, directory: Path, stop_seconds: float = 10.0) -> None:
        self._directory = directory
        self._stop_seconds = stop_seconds
        self._running: dict[str, asyncio.subprocess.Process] = {}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.shield(self.stop(*reversed(self._running)))

    async def start(self, name: str, command: Sequence[str], environment: Mapping[str, str] | None = None) -> None:
        """Start `command` under `name`, which is also the name of its log."""
        with (self._directory / f"{name}.log").open("ab") as output:
            self._running[name] = await asyncio.create_subprocess_exec(
                *with_parent(command),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def pid(self, name: str) -> int:
        """The process id of a running process."""
        return self._running[name].pid

    async def stop(self, *names: str, how: signal.Signals = signal.SIGTERM) -> None:
        """Signal all `names` at once and wait; SIGKILL after `stop_seconds`."""
        children = [self._running.pop(name) for name in names if name in self._running]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(how)
        for child in children:
            try:
                await asyncio.wait_for(child.wait(), self._stop_seconds)
            except TimeoutError:
                child.kill()
                await child.wait()

    def check(self) -> None:
        """Raise ProcessDied if one ended by itself."""
        for name, child in self._running.items():
            if child.returncode is not None:
                raise ProcessDied(f"{name} ended with status {child.returncode}: {self.last_words(name)}")

    async def watch(self) -> None:
        """Never return; raise ProcessDied when one ends by itself."""
        while True:
            self.check()
            await asyncio.sleep(0.2)

    def last_words(self, name: str, lines: int = 3) -> str:
        """The last lines `name` wrote, on one line."""
        text = (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        said = [line.strip() for line in text.splitlines() if line.strip()]
        return " / ".join(said[-lines:]) or "it said nothing"
