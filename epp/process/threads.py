"""How the threads that libraries start share a CPU with the event loop's."""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def in_background() -> Iterator[None]:
    """Threads that start while the block runs interrupt none that runs: SCHED_BATCH, see sched(7).

    A thread that wakes often and does little, as one that moves bytes, else takes the CPU from the event loop in the
    middle of its work where no other is idle, each time with two switches and a colder cache. So it runs when the loop
    waits, or after a time slice at the latest, and gets as much of the CPU as before. Threads inherit it from who
    starts them. Where the system has no such policy, or forbids it, nothing is changed.
    """
    changed = False
    try:
        if os.sched_getscheduler(0) == os.SCHED_OTHER:
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
            changed = True
    except (AttributeError, OSError):  # not on Linux; a sandbox
        pass
    try:
        yield
    finally:
        if changed:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
