"""The child processes of a laptop run: started, watched, and gone when we are gone."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from gateway.envoy import die_with_parent


class ProcessDied(Exception):
    """A process of the chain ended by itself. `str()` is one sentence and the end of what it said."""


class Processes:
    """Starts processes, each with its output in `directory/NAME.log`; leaving the block ends all of them.

    Children run in sessions of their own, so that a Ctrl-C in the terminal reaches only us and the chain is taken
    down in order; where the system can (Linux), they are killed when we are killed.
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
        """Start `command` under `name` (also the name of its log)."""
        with (self._directory / f"{name}.log").open("wb") as output:
            self._running[name] = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )

    async def stop(self, *names: str) -> None:
        """SIGTERM, then SIGKILL after `stop_seconds`; all `names` at once."""
        children = [self._running.pop(name) for name in names if name in self._running]
        for child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(signal.SIGTERM)
        for child in children:
            try:
                await asyncio.wait_for(child.wait(), self._stop_seconds)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await child.wait()

    async def wait_dead(self) -> None:
        """Return never while all live; raise ProcessDied when the first one ends by itself."""
        while True:
            for name, child in self._running.items():
                if child.returncode is not None:
                    raise ProcessDied(f"{name} ended with status {child.returncode}: {self.last_words(name)}")
            await asyncio.sleep(0.2)

    def last_words(self, name: str, lines: int = 3) -> str:
        """The last lines `name` wrote, on one line."""
        text = (self._directory / f"{name}.log").read_text(encoding="utf-8", errors="replace")
        return " / ".join(line.strip() for line in text.splitlines()[-lines:] if line.strip()) or "it said nothing"
