"""Listening to an engine's KV events while something new is sent to it. The doctor's zmq client."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from epp.prefix.events.wire import BlockStored, MalformedBatch, decode

_CONNECT: Final = 3.0
"""Seconds for a publisher to take the connection."""
_TRIES: Final = 2
"""Of sending something new: a publisher may learn of a subscriber only after it published."""


async def hear(
    publishers: Sequence[str], provoke: Callable[[int], Awaitable[None]], seconds: float
) -> list[BlockStored] | None:
    """What the publishers say of blocks stored on the device when `provoke(attempt)` made some; [] = nothing.

    None: none of them takes a connection. Waits at most `seconds` after each attempt.
    """
    context = zmq.asyncio.Context()
    context.setsockopt(zmq.IPV6, 1)
    context.setsockopt(zmq.LINGER, 0)
    try:
        socket = context.socket(zmq.SUB)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        socket.subscribe(b"")
        for publisher in publishers:
            socket.connect(publisher)
        try:
            async with asyncio.timeout(_CONNECT):
                await recv_monitor_message(monitor)
        except TimeoutError:
            return None
        finally:
            socket.disable_monitor()
        for attempt in range(_TRIES):
            await provoke(attempt)
            if received := await _stored(socket, seconds):
                return received
        return []
    finally:
        context.destroy(linger=0)


async def _stored(socket: zmq.asyncio.Socket, seconds: float) -> list[BlockStored]:
    """The first batch that tells of blocks on the device."""
    try:
        async with asyncio.timeout(seconds):
            while True:
                frames = await socket.recv_multipart()
                try:
                    events = decode(frames[-1]).events
                except MalformedBatch:
                    continue
                found = [
                    event
                    for event in events
                    if isinstance(event, BlockStored) and (event.medium or "gpu").lower() == "gpu" and event.token_ids
                ]
                if found:
                    return found
    except TimeoutError:
        return []
