"""Waiting for what no event announces."""

import asyncio
from collections.abc import Callable


async def until(condition: Callable[[], bool], timeout: float = 5.0) -> None:
    """Return as soon as `condition` holds; TimeoutError if it does not within `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():
            await asyncio.sleep(0.002)
