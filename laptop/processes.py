"""The child processes of a laptop run: started, watched, and gone when we are gone."""

import asyncio
import contextlib
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

from gateway.child import with_parent


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
        return [await child.wait() for child in children]

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


def _how(status: int) -> str:
    return f"ended with status {status}" if status >= 0 else f"was killed by {signal.Signals(-status).name}"
