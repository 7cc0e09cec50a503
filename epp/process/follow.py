"""Following what changes. Files: by looking at them now and then, which works on every file system and mount.

A path is looked up anew each time, so an editor's rename and Kubernetes' swap of symbolic links are changes like any
other.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TypeVar

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
