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
from collections.abc import Callable
from typing import Final

log = logging.getLogger("warmpath")

EXIT_STALLED: Final = 70
"""The exit status of a process that was ended (sysexits' EX_SOFTWARE)."""
_LOOKS: Final = 10
"""In a row that must find the loop where it was. Time is not compared: a process that was stopped, or a machine that
slept, has lost time without any fault of its loop, and its thread has not looked meanwhile either."""
_TELLING: Final = 2.0
"""Seconds that the last words may take: who reads them may be what the loop waits for."""
_DEBUGGERS: Final = ("bdb", "pdb")


async def watch(limit: float, end: Callable[[float], None] | None = None) -> None:
    """`end` (the process, by default) once the loop has not turned for `limit` seconds; 0: never.

    Runs until it is cancelled. Time that its thread spends in a debugger does not count.
    """
    if not limit:
        return
    turns = [0]
    over = threading.Event()
    arguments = (turns, over, limit, threading.get_ident(), end or end_process)
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


def _look(turns: list[int], over: threading.Event, limit: float, loop: int, end: Callable[[float], None]) -> None:
    seen, still = 0, 0
    while not over.wait(limit / _LOOKS):
        if turns[0] != seen or _debugged(loop):
            seen, still = turns[0], 0
            continue
        still += 1
        if still >= _LOOKS:
            return end(limit)


def _debugged(thread: int) -> bool:
    frame = sys._current_frames().get(thread)
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
