"""Ends a process whose event loop stands still: gateways ask another replica then, and it can be started anew.

A plugin that waits or computes on the loop stops every request of the process. The loop itself cannot say so; a thread
can, as long as it gets the GIL: code that never gives that up is left to a liveness probe.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Final

log = logging.getLogger("warmpath")

EXIT_STALLED: Final = 70
"""The exit status of a process that was ended (sysexits' EX_SOFTWARE)."""
_LOOKS: Final = 10
"""In a row that must find the loop where it was. Time is not compared: a process that was stopped, or a machine that
slept, has lost time without any fault of its loop, and its thread has not looked meanwhile either. Nor does the time
count in which the loop's thread could have run and got no CPU, as on a busy node or at the end of its CPU limit: a
process that was ended for that would be missed most then, and its successor would be no faster."""
_TELLING: Final = 2.0
"""Seconds that the last words may take: who reads them may be what the loop waits for."""
_DEBUGGERS: Final = ("bdb", "pdb")


async def watch(limit: float, end: Callable[[float], None] | None = None) -> None:
    """`end` (the process, by default) once the loop has not turned for `limit` seconds; 0: never.

    Runs until it is cancelled. Time that its thread spends in a debugger does not count, nor does that for which it
    waits for a CPU, where the kernel tells (Linux).
    """
    if not limit:
        return
    turns = [0]
    over = threading.Event()
    arguments = (turns, over, limit, threading.current_thread(), end or end_process)
    threading.Thread(target=_look, args=arguments, name="watchdog", daemon=True).start()
    try:
        while True:
            turns[0] += 1
            await asyncio.sleep(limit / _LOOKS)
    finally:
        over.set()


def end_process(limit: float) -> None:
    """Say where every thread is, and go."""
    teller = threading.Thread(target=_tell, args=(limit,), daemon=True)
    teller.start()
    teller.join(_TELLING)
    os._exit(EXIT_STALLED)


def _look(
    turns: list[int], over: threading.Event, limit: float, loop: threading.Thread, end: Callable[[float], None]
) -> None:
    seen, still = 0, 0.0
    at, waited = time.monotonic(), _waited(loop)
    while not over.wait(limit / _LOOKS):
        now, wait = time.monotonic(), _waited(loop)
        own = 1 - (wait - waited) / (now - at)  # below 0 where a long wait is over, which is told only then
        at, waited = now, wait
        if turns[0] != seen or _debugged(loop):
            seen, still = turns[0], 0.0
            continue
        still = max(0.0, still + own)
        if still > _LOOKS - 1:  # the last is never whole
            return end(limit)


def _waited(thread: threading.Thread) -> float:
    """Seconds in which it could have run and no CPU was free or allowed; 0 where the kernel does not tell."""
    try:
        with open(f"/proc/self/task/{thread.native_id}/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9  # proc(5): time on a CPU, time waiting for one, turns
    except (OSError, ValueError, IndexError):
        return 0.0


def _debugged(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    while frame is not None:
        if frame.f_trace is not None or frame.f_globals.get("__name__") in _DEBUGGERS:
            return True
        frame = frame.f_back
    return False


def _tell(limit: float) -> None:
    """The stacks come first: they take no lock, and have names of files and functions, never a value."""
    faulthandler.dump_traceback()
    log.error(
        "the event loop has not turned for %g s (--stall-limit): the process ends with status %d; what each of its "
        "threads does stands above",
        limit,
        EXIT_STALLED,
    )
