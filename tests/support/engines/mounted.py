"""A directory that a process serves, as network file systems are, and that can be killed: FUSE's bindfs."""

import os
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LIMIT = 60.0
"""Seconds in which it is mounted on a machine that has other things to do."""


class Mount:
    """`path` is there while the process runs; without it every access fails at once."""

    def __init__(self, folder: Path) -> None:
        self._below, self._above = folder / "below", folder / "above"
        (self._below / "kv").mkdir(parents=True)  # beneath the mount there is none: nobody can write there
        self._above.mkdir()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def path(self) -> Path:
        return self._above / "kv"

    def start(self) -> None:
        """Return when it is mounted; what a killed process left is taken away before."""
        self._leave()
        command = ["bindfs", "-f", str(self._below), str(self._above)]
        self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL)
        deadline = time.monotonic() + LIMIT
        while not os.path.ismount(self._above):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("bindfs did not mount: it needs /dev/fuse, and root or fusermount")
            time.sleep(0.05)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _leave(self) -> None:
        for command in (["umount", "-l"], ["fusermount", "-uz"]):
            subprocess.run([*command, str(self._above)], check=False, stderr=subprocess.DEVNULL)

    def end(self) -> None:
        self.kill()
        self._leave()


@contextmanager
def mounted(folder: Path) -> Iterator[Mount]:
    """A mount below `folder`, while the block runs."""
    made = Mount(folder)
    try:
        made.start()
        yield made
    finally:
        made.end()
