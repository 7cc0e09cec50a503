"""Pages are made on the event loop that also picks, so they are made one at a time, with pauses."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Final

WAITING: Final = 16
"""Readers who may wait."""
PATIENCE_S: Final = 8.0
"""How long they do: less than the 10 s that Prometheus waits for a scrape."""
PAUSE: Final = 1.0
"""After a page none is made for so many times as long as it took."""
LONGEST_PAUSE_S: Final = 2.0

RECENT_S: Final = 0.9
"""A page that everybody may share is made anew after so long: less than the second after which viewers ask again."""

Page = tuple[bytes, str]
"""Body and content type."""


class Busy(Exception):
    """Too many readers, or none of them was done in time."""


class Turns:
    """`clock`: seconds, monotonic."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = asyncio.Lock()
        self._free_at = 0.0
        self._waiting = 0
        self._next: dict[str, asyncio.Future[Page]] = {}
        self._made: dict[str, tuple[float, Page]] = {}

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Entered when no other page is made and the pause after the last one is over. Raises Busy."""
        if self._waiting >= WAITING:
            raise Busy
        self._waiting += 1
        try:
            async with asyncio.timeout(PATIENCE_S):
                await self._lock.acquire()
                try:
                    await asyncio.sleep(max(0.0, self._free_at - self._clock()))
                except BaseException:
                    self._lock.release()
                    raise
        except TimeoutError:
            raise Busy from None
        finally:
            self._waiting -= 1
        began = self._clock()
        try:
            yield
        finally:
            ended = self._clock()
            self._free_at = ended + min(PAUSE * (ended - began), LONGEST_PAUSE_S)
            self._lock.release()

    async def shared(self, kind: str, make: Callable[[], Awaitable[Page]]) -> Page:
        """The page of `make`, begun after this call; one for all who wait for the same kind. Raises Busy."""
        if (waited := self._next.get(kind)) is not None:
            return await asyncio.shield(waited)
        page: asyncio.Future[Page] = asyncio.get_running_loop().create_future()
        self._next[kind] = page
        try:
            async with self.turn():
                del self._next[kind]  # who comes from now on needs a later one
                page.set_result(await make())
        except BaseException as error:
            if self._next.get(kind) is page:
                del self._next[kind]
            page.cancel() if isinstance(error, asyncio.CancelledError) else page.set_exception(error)
            raise
        finally:
            if not page.cancelled():
                page.exception()  # retrieved, also where no other request waited
        return page.result()

    async def recent(self, kind: str, make: Callable[[], Awaitable[Page]]) -> Page:
        """The page of `make`, at most `RECENT_S` old, so that what it costs does not grow with its viewers. Kinds are
        few: the last page of each is kept. Raises Busy.
        """
        made = self._made.get(kind)
        if made is None or self._clock() - made[0] >= RECENT_S:
            made = self._clock(), await self.shared(kind, make)
            self._made[kind] = made
        return made[1]
