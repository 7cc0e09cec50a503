"""The admin port's connections: few, and none silent for long, so that ext_proc has file descriptors left."""

import asyncio
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any, Final

from aiohttp import web

log = logging.getLogger("warmpath")

MOST: Final = 64
SHARE: Final = 8
"""Connections: one in so many of the file descriptors we may have, at most `MOST`."""
REQUEST_S: Final = 10.0
"""From a connection's start to the end of its first request's headers; with TLS the handshake has as long."""
IDLE_S: Final = 75.0
"""From an answer to the end of the next request's headers: longer than readers of metrics usually wait."""
BUSY_S: Final = 90.0
"""From a request's headers to the end of its answer: the longest profile, and time to send it."""
NO_ROOM_S: Final = 0.1
"""When no connection can be accepted, the next try."""


def most_connections() -> int:
    """Connections at a time, of the file descriptors this process may have."""
    allowed, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if allowed == resource.RLIM_INFINITY else max(4, min(MOST, allowed // SHARE))


class Connection(web.RequestHandler):
    """One of ours; `listener` is notified when it opens and closes."""

    __slots__ = ("_listener",)

    def __init__(self, listener: "Listener", server: web.Server, **options: Any) -> None:
        super().__init__(server, loop=asyncio.get_running_loop(), **options)
        self._listener = listener

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._listener.idle(self, REQUEST_S, self.abort)

    def connection_lost(self, exc: BaseException | None) -> None:
        super().connection_lost(exc)
        self._listener.gone(self)

    def answering(self) -> None:
        """A request came: its answer is to be sent within `BUSY_S`."""
        self._listener.busy(self, BUSY_S, self.abort)

    def answered(self) -> None:
        """It waits for the next request now."""
        if self.transport is not None:
            self._listener.idle(self, IDLE_S, self.abort)

    def abort(self) -> None:
        """End it at once, whatever is still to be sent."""
        if self.transport is not None:
            self.transport.abort()


class Listener:
    """Accepts at most `most` connections. When there are as many, the one that has been idle for longest is closed;
    while all are busy, new ones wait in the kernel.
    """

    def __init__(self, most: int) -> None:
        self.port = 0
        """Where it listens, once bound."""
        self._most = most
        self._idle: dict[object, Callable[[], object]] = {}
        """Connections without a request and TLS handshakes, the longest so first, with what ends them."""
        self._busy: set[object] = set()
        self._timers: dict[object, asyncio.TimerHandle] = {}
        self._room = asyncio.Event()
        self._sockets: list[socket.socket] = []

    def bind(self, host: str, port: int) -> None:
        """Listen on every address of `host`; port 0 is any. Raises OSError."""
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.port = port
        try:
            for family, address in dict.fromkeys((each[0], str(each[4][0])) for each in found):
                made = socket.create_server((address, self.port), family=family)
                made.setblocking(False)
                self._sockets.append(made)
                self.port = made.getsockname()[1]
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Accept nothing more."""
        for each in self._sockets:
            each.close()
        self._sockets.clear()

    async def serve(self, make: Callable[[], Connection], tls: ssl.SSLContext | None) -> None:
        """Accept, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for each in self._sockets:
                tasks.create_task(self._accept(each, tasks, make, tls))

    async def _accept(
        self,
        listening: socket.socket,
        tasks: asyncio.TaskGroup,
        make: Callable[[], Connection],
        tls: ssl.SSLContext | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                accepted, _ = await loop.sock_accept(listening)
            except OSError:  # no file descriptor is left, or the peer went away at once
                await asyncio.sleep(NO_ROOM_S)
                continue
            try:
                await self._make_room()
            except BaseException:
                accepted.close()
                raise
            task = tasks.create_task(_connect(accepted, make, tls))
            task.add_done_callback(self.gone)
            self.idle(task, REQUEST_S, task.cancel)

    async def _make_room(self) -> None:
        while len(self._idle) + len(self._busy) >= self._most:
            if self._idle:
                longest, end = next(iter(self._idle.items()))
                self.gone(longest)
                end()
            else:
                self._room.clear()
                await self._room.wait()

    def idle(self, one: object, seconds: float, end: Callable[[], object]) -> None:
        """It waits for its peer from now on, so many seconds at most; `end` ends it."""
        self.gone(one)
        self._idle[one] = end
        self._timers[one] = asyncio.get_running_loop().call_later(seconds, end)

    def busy(self, one: object, seconds: float, end: Callable[[], object]) -> None:
        """It is answered from now on; it ends after so many seconds, not before to free a connection."""
        self.gone(one)
        self._busy.add(one)
        self._timers[one] = asyncio.get_running_loop().call_later(seconds, end)

    def gone(self, one: object) -> None:
        """It ended, or changes its state."""
        self._idle.pop(one, None)
        self._busy.discard(one)
        if (timer := self._timers.pop(one, None)) is not None:
            timer.cancel()
        self._room.set()


async def _connect(accepted: socket.socket, make: Callable[[], Connection], tls: ssl.SSLContext | None) -> None:
    """Let a connection go on by itself, after its handshake if there is one."""
    taken = False

    def factory() -> Connection:
        nonlocal taken
        taken = True
        return make()

    try:
        timeout = None if tls is None else REQUEST_S
        loop = asyncio.get_running_loop()
        await loop.connect_accepted_socket(factory, accepted, ssl=tls, ssl_handshake_timeout=timeout)
    except Exception as error:  # it went away or does not use TLS: its loss alone, and a flood of these is not logged
        log.debug("a connection of the admin port failed: %s", error)
    finally:
        if not taken:
            accepted.close()
