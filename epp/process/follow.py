"""Following what changes. Files: by looking at them now and then, which works on every file system and mount.

A path is looked up anew each time, so an editor's rename and Kubernetes' swap of symbolic links are changes like any
other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, Generic, TypeVar

T = TypeVar("T")

INTERVAL = 1.0
"""Seconds between looks."""

Stamp = tuple[int, int, int] | None


def stamp(path: Path) -> Stamp:
    """What is different once a file's content is: inode, time of change in nanoseconds, size. None: there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_ino, status.st_mtime_ns, status.st_size


class Current(Generic[T]):
    """Does the `work` of one thing at a time: of that in use, until another is."""

    def __init__(self, work: Callable[[T], Coroutine[Any, Any, None]]) -> None:
        self.value: T | None = None
        self._work = work
        self._changed = asyncio.Event()

    def use(self, value: T | None) -> None:
        """This from now on; None: nothing. What is in use already goes on as it is."""
        if value is not self.value:
            self.value = value
            self._changed.set()

    async def run(self) -> None:
        """For ever."""
        while True:
            self._changed.clear()
            if self.value is None:
                await self._changed.wait()
                continue
            async with asyncio.TaskGroup() as group:
                work = group.create_task(self._work(self.value))
                await self._changed.wait()
                work.cancel()


async def changes(look: Callable[[], T], seen: T, interval: float = INTERVAL) -> AsyncIterator[T]:
    """What `look` returns, each time it is no longer what it was at the last yield (at first: `seen`), for ever.

    A change counts once it has stood for one interval: writers need their time. `look` runs in a thread.
    """
    last = seen
    while True:
        await asyncio.sleep(interval)
        now = await asyncio.to_thread(look)
        if now == last != seen:
            seen = now
            yield now
        last = now
