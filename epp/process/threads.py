"""How the threads that libraries start share a CPU with the event loop's."""

import os
from contextlib import suppress
from threading import Thread


def background_policy() -> int | None:
    """The scheduling policy of threads that interrupt none that runs: SCHED_BATCH, see sched(7).

    A thread that wakes often and does little, as one that moves bytes, else takes the CPU from the event loop in the
    middle of its work where no other is idle, each time with two switches and a colder cache. So it runs when the loop
    waits, or after a time slice at the latest, and gets as much of the CPU as before. None where the system has no such
    policy, or forbids it, as a sandbox may: libzmq ends the process if a thread cannot have the one it is told.
    """
    found = []

    def take() -> None:
        with suppress(AttributeError, OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))  # 0: this thread
            found.append(os.SCHED_BATCH)

    thread = Thread(target=take)
    thread.start()
    thread.join()
    return found[0] if found else None
