"""Processes that a test started, however deep: they are known by a mark in their environment."""

import os
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

MARK = "WARMPATH_TEST_FAMILY"


class Family:
    """Start the first process with `environment`; all that come of it inherit the mark."""

    def __init__(self) -> None:
        self._mark = f"{MARK}={uuid4().hex}"

    @property
    def environment(self) -> Mapping[str, str]:
        name, _, value = self._mark.partition("=")
        return {**os.environ, name: value}

    def alive(self) -> dict[int, str]:
        """Command lines of those that run, by process id."""
        found = {}
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit():
                continue
            try:
                if self._mark.encode() in (directory / "environ").read_bytes().split(b"\0"):
                    command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                    found[int(directory.name)] = command
            except OSError:  # it ended, or is not ours to look at
                continue
        return found

    def pid(self, part: str) -> int:
        """The process with `part` in its command line."""
        [pid] = [pid for pid, command in self.alive().items() if part in command]
        return pid
