"""Waiting for what no event announces."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> None:
    """Return as soon as `condition` holds; TimeoutError if it does not within `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)


@asynccontextmanager
async def beside(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """What never ends by itself runs meanwhile; at the end it is cancelled, and has to let that happen."""
    task = asyncio.ensure_future(work)
    yield
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
