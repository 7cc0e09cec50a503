"""One kind of object in one namespace, kept as the API server has it: a list, then a watch, over and over.

Source: Kubernetes API concepts, "Efficient detection of changes".
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Final, Generic, Protocol, TypeVar

import msgspec

from epp.errors import UNREADABLE
from epp.pool.apiserver import ApiError, Kind

log = logging.getLogger("warmpath")

T = TypeVar("T")

_WATCH_SECONDS: Final = 60
_SHORTEST_PAUSE: Final = 0.1
"""Seconds between a watch that ended without failure and the next, and the first pause after a failure."""
_LONGEST_PAUSE: Final = 5.0
_AWAY_PAUSE: Final = 0.75
"""The longest between two tries to reach an API server that is away: however long it was, what changed meanwhile is
known within a second of its return. A try that is refused costs next to nothing.
"""
_ABSENT_PAUSE: Final = 5.0
"""Seconds until we look again for a kind that the API server does not know."""
_AT_ONCE: Final = 16
"""Objects read before other tasks run: requests do not wait for a list of thousands."""


class Source(Protocol):
    """What we need of `ApiServer`."""

    async def page(self, kind: Kind, namespace: str, selector: str, continuation: str) -> bytes: ...

    def stream(
        self, kind: Kind, namespace: str, selector: str, version: str, seconds: int
    ) -> AbstractAsyncContextManager[AsyncIterator[bytes]]: ...


class Listener(Protocol):
    """Is called for what a watch finds."""

    def changed(self) -> None:
        """The objects, `synced` or `answered` changed."""

    def trouble(self, watch: "Watch[Any]", reason: str, detail: str) -> None:
        """Something fails (a degradation's reason), and is tried again; empty: it works again."""

    def refused(self, detail: str) -> None:
        """An object we cannot read; what we had under its name stays."""


class _Meta(msgspec.Struct):
    name: str = ""
    version: str = msgspec.field(default="", name="resourceVersion")
    continuation: str = msgspec.field(default="", name="continue")


class _Object(msgspec.Struct):
    metadata: _Meta


class Listed(msgspec.Struct):
    """A page of a list."""

    metadata: _Meta
    items: list[msgspec.Raw] | None = None


class _Status(msgspec.Struct):
    code: int = 0
    message: str = ""


class _Event(msgspec.Struct):
    type: str
    object: msgspec.Raw


class Watch(Generic[T]):
    """The objects of a kind that match a label selector (empty: all), by name.

    `read` makes our object of an object's JSON; msgspec's errors if it cannot. `synced`: `objects` is what
    the API server had at some time. `answered`: it said something, perhaps that it does not know this kind
    (`absent`) or that we may not see it. While the API server is away everything stays as it was.
    """

    def __init__(
        self,
        source: Source,
        kind: Kind,
        namespace: str,
        read: Callable[[bytes], T],
        listener: Listener,
        random: random.Random,
        *,
        selector: str = "",
    ) -> None:
        self.kind = kind
        self.selector = selector
        self.synced = False
        self.answered = False
        self.absent = False
        self.revision = 0
        """Grows with every change of `objects`."""
        self._source = source
        self._namespace = namespace
        self._read = read
        self._listener = listener
        self._random = random
        self._objects: dict[str, T] = {}
        self._version = ""
        self._failures = 0
        self._away = False
        self._trouble = ""

    def objects(self) -> dict[str, T]:
        """A copy, by name."""
        return dict(self._objects)

    async def run(self) -> None:
        """Follow the API server until cancelled; `objects` stay."""
        while True:
            await asyncio.sleep(await self._round() * self._random.uniform(0.5, 1.0))

    async def _round(self) -> float:
        """A list where one is needed, and a watch until it ends; returns the longest pause until the next."""
        try:
            if not self._version:
                await self._list()
            await self._follow()
            self._failures = 0
            return _SHORTEST_PAUSE
        except ApiError as error:
            return self._after(error)
        except Exception as error:
            log.exception("the watch of %s failed", self.kind)
            self._version = ""
            self._report("kubernetes-watch-failed", repr(error))
            return self._next_pause(_LONGEST_PAUSE)

    async def _list(self) -> None:
        """Replace all objects by what the API server has now."""
        found: dict[str, T] = {}
        continuation, more = "", True
        while more:
            answer = await self._source.page(self.kind, self._namespace, self.selector, continuation)
            page = _decoded(answer, Listed)
            for number, raw in enumerate(page.items or ()):
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
                name = _decoded(raw, _Object).metadata.name
                if (item := self._readable(name, raw)) is not None:
                    found[name] = item
            more = bool(continuation := page.metadata.continuation)
        if not page.metadata.version:
            raise ApiError(0, f"a list of {self.kind} without a resource version")
        self._replace(found)
        self.synced = self.answered = True
        self.absent = False
        self._version = page.metadata.version
        self._listener.changed()

    async def _follow(self) -> None:
        """Watch from `_version` on until the server ends it."""
        seconds = int(_WATCH_SECONDS * self._random.uniform(0.75, 1.0))
        async with self._source.stream(self.kind, self._namespace, self.selector, self._version, seconds) as events:
            self._report("", "")
            number = 0
            async for line in events:
                self._take(_decoded(line, _Event))
                self._failures = 0
                number += 1
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)

    def _take(self, event: _Event) -> None:
        if event.type == "ERROR":
            status = _decoded(event.object, _Status)
            raise ApiError(status.code, status.message)
        meta = _decoded(event.object, _Object).metadata
        if event.type in ("ADDED", "MODIFIED"):
            if (item := self._readable(meta.name, event.object)) is not None and item != self._objects.get(meta.name):
                self._set(meta.name, item)
        elif event.type == "DELETED":
            self._set(meta.name, None)
        self._version = meta.version or self._version

    def _readable(self, name: str, raw: msgspec.Raw) -> T | None:
        """What `read` makes of it, else what we have under that name."""
        try:
            return self._read(bytes(raw))
        except UNREADABLE as error:
            self._listener.refused(f"{self.kind} {self._namespace}/{name}: {error}")
            return self._objects.get(name)

    def _set(self, name: str, item: T | None) -> None:
        if item is None:
            self._objects.pop(name, None)
        else:
            self._objects[name] = item
        self.revision += 1
        self._listener.changed()

    def _replace(self, objects: dict[str, T]) -> None:
        if objects != self._objects:
            self._objects = objects
            self.revision += 1

    def _after(self, error: ApiError) -> float:
        """What a failure means; returns seconds to wait."""
        away = error.status == 0 or error.status == 429 or error.status >= 500
        if self._away and not away:
            self._failures = 0  # it is back, if only to say no: what it will say next is not to wait for long
        self._away = away
        if error.status == 404:  # the kind is not installed, so there is none of it
            self._version = ""
            self.absent = True
            self._replace({})
            self._answered()
            self._report("", "")
            return _ABSENT_PAUSE
        if error.status == 410:  # our resource version is too old for a watch
            self._version = ""
            return self._next_pause(_LONGEST_PAUSE)
        if error.status in (401, 403):
            what = f"get, list and watch of {self.kind} in namespace {self._namespace!r}"
            known = "a token that the API server knows, of an account" if error.status == 401 else "a Role"
            self._report("kubernetes-forbidden", f"{error}; expected {known} that allows {what}")
            self._answered()
        elif away:
            if self._failures:  # one broken connection is nothing: the next goes on where it was
                self._report("kubernetes-away", str(error))
            return self._next_pause(_AWAY_PAUSE)
        else:
            self._version = ""
            self._report("kubernetes-refused", f"{self.kind} in namespace {self._namespace!r}: {error}")
            self._answered()
        return self._next_pause(_LONGEST_PAUSE)

    def _answered(self) -> None:
        self.answered = True
        self._listener.changed()

    def _report(self, reason: str, detail: str) -> None:
        """Report a failure once, until it changes or ends."""
        if reason != self._trouble:
            self._trouble = reason
            self._listener.trouble(self, reason, detail)

    def _next_pause(self, longest: float) -> float:
        self._failures += 1
        return float(min(longest, _SHORTEST_PAUSE * 2 ** min(self._failures, 16)))


def _decoded(raw: bytes | msgspec.Raw, shape: type[T]) -> T:
    try:
        return msgspec.json.decode(raw, type=shape)
    except UNREADABLE as error:
        raise ApiError(0, f"not the JSON a Kubernetes API server sends: {error}") from None
