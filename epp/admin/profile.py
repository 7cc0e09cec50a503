"""Where the process spends its time: stacks of all threads, sampled for a while, in the folded format.

A line is `thread;outermost;...;innermost count`, as flamegraph.pl and speedscope read it. Code only: no argument and no
variable is looked at. It runs in a thread and costs nothing while it is not read.
"""

import sys
import threading
import time
from collections import Counter
from types import FrameType
from typing import Final

from epp.errors import Rejected

LONGEST: Final = 60
"""Seconds one profile may take."""
PAUSE: Final = 0.01
"""Seconds between samples."""
DEEPEST: Final = 100
MOST: Final = 20_000
"""Frames kept of a stack, and different stacks kept; what is more counts as `other`."""


class Profiler:
    """One profile at a time."""

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._stopped = threading.Event()

    def folded(self, seconds: int) -> str:
        """What all other threads do for so many seconds, `LONGEST` at most. Blocks. Rejected if one is being made."""
        if not self._turn.acquire(blocking=False):
            raise Rejected("a profile is being made; ask again when it is done", reason="profile-running")
        try:
            return self._sampled(min(seconds, LONGEST))
        finally:
            self._turn.release()

    def stop(self) -> None:
        """End a profile that is being made: the process ends, and does not wait for it."""
        self._stopped.set()

    def _sampled(self, seconds: float) -> str:
        found: Counter[str] = Counter()
        end = time.monotonic() + seconds
        while time.monotonic() < end and not self._stopped.wait(PAUSE):
            for stack in stacks():
                found[stack if stack in found or len(found) < MOST else "other"] += 1
        return "".join(f"{stack} {count}\n" for stack, count in found.most_common())


def stacks() -> list[str]:
    """What each thread but this one does now, folded."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    frames.pop(threading.get_ident(), None)
    return [";".join((_clean(names.get(ident, "thread")), *_calls(frame))) for ident, frame in frames.items()]


def _calls(frame: FrameType | None) -> list[str]:
    calls: list[str] = []
    while frame is not None and len(calls) < DEEPEST:
        calls.append(_clean(f"{frame.f_globals.get('__name__', '?')}.{frame.f_code.co_qualname}"))
        frame = frame.f_back
    return calls[::-1]


def _clean(text: str) -> str:
    return text.replace(";", ",").replace(" ", "_")
