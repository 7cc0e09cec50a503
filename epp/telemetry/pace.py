"""Long work on the event loop, in slices: requests on the same loop get most of the time while it lasts."""

import asyncio
import time
from typing import Final

WORK_S: Final = 0.002
"""Seconds of work without a rest, and the slice that crosses them."""
REST: Final = 2.0
"""Times as long as the work, the rest after it."""


class Pace:
    """Of one piece of work."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    async def rest(self) -> None:
        """Between two slices: let others run, and for a while if it was long."""
        worked = time.monotonic() - self._began
        if worked < WORK_S:
            await asyncio.sleep(0)
            return
        await asyncio.sleep(REST * worked)
        self._began = time.monotonic()
