"""`EventStream`: one publisher's messages in order, into its engine's cache. Pure: says when a replay is needed, asks
nobody.

Messages are numbered from 0 in each process. A number that is missing is asked for again; a number that goes back is a
new process, whose predecessor's blocks are gone. A new process that has counted as far as the old one is recognised by
asking for the last message we took once more: the old process has it still, byte for byte, the new one has another.
"""

from collections.abc import Callable, Iterator
from typing import Final

from xxhash import xxh3_64_intdigest

from epp.prefix.events.engine_cache import EngineCache
from epp.prefix.events.wire import AT_ONCE, Batch, MalformedBatch, decode, parts

END: Final = (1 << 64) - 1
"""Number of the message that ends a replay."""
_MOST: Final = 5
"""Replays tried for one gap: a publisher drops what a slow link does not take, in a replay too."""


class EventStream:
    """`replays`: the publisher answers requests for messages. `count(fault)` is called for each fault, for the metrics:
    gap, restart, lost (knowledge dropped because what was missed is unknown), malformed (a whole message),
    too-large (a message of more than `largest` bytes: it is not read, and what was known is dropped).

    Of a large message only a part is taken over at once; `step` until the rest is too. What comes before that finds it
    done: the order never changes.
    """

    def __init__(self, cache: EngineCache, count: Callable[[str], None], *, replays: bool, largest: int) -> None:
        self.cache = cache
        self.replays = replays
        self.lag_of: Callable[[float], None] = lambda ts: None
        """Called with the timestamp of each batch as it comes."""
        self._count = count
        self._largest = largest
        self._rest: Iterator[Batch] | None = None
        """Of the message taken last."""
        self._part: Batch | None = None
        """Of that, what is at hand."""
        self._at = 0
        """Event of the part that is next."""
        self._next = 0
        """Number of the message wanted next."""
        self._mark = 0
        """Fingerprint of the message taken last."""
        self._unsure = True
        """Whatever comes next is taken: nothing is known, so nothing can be missed."""
        self._last = -1
        """Number received last on this connection, replays left out."""
        self._missed = False
        """A replay failed, so what was published before the messages taken is unknown."""

    def connected(self) -> bool:
        """A connection was made, for the first time or anew. True: `wants` a replay before anything else."""
        self._last = -1
        if self.replays:
            return True
        if not self._unsure:  # unknown: what was published meanwhile, and whether it is the same process
            self._forget("lost")
        return False

    @property
    def wants(self) -> int:
        """Number to ask a replay from: the message taken last, to be shown again, or 0."""
        return 0 if self._unsure or self.owed or not self._next else self._next - 1

    @property
    def owed(self) -> bool:
        """Whether a replay failed that is to be asked for again: what is known is not what the engine holds."""
        return self._missed and self.cache.partial

    def receive(self, number: int, payload: bytes) -> bool:
        """A message came. False: it was not taken, since a replay has to come first; then `settle` it."""
        if number <= self._last:
            self._forget("restart")
        self._last = number
        if self._unsure:
            if self.replays and number:
                return False
        elif number > self._next:
            self._count("gap")
            return False
        elif number < self._next:
            return True
        self._take(number, payload)
        return True

    def settle(self, number: int, payload: bytes) -> None:
        """What `receive` did not take, after all was done to fill the gap: what is still missing is lost."""
        if not self._unsure and number > self._next:
            self._forget("lost")
        if self._unsure or number == self._next:
            self._take(number, payload)

    def replay(self) -> "Replay":
        return Replay(self)

    def gave_up(self) -> None:
        """A replay did not come about, and what was missed is unknown: it is owed."""
        if not self._unsure and not self.owed:
            self._forget("lost")
        self._missed = self.cache.partial = True

    @property
    def unfinished(self) -> bool:
        """Whether something is left to `step`."""
        return self._rest is not None or self._part is not None or bool(self.cache.unfinished)

    def step(self) -> bool:
        """Take over a part more of the message taken last. False: nothing was left of it."""
        if self.cache.unfinished and self.cache.step():
            return True
        if self._part is not None:
            self._take_part(self._part, self._at)
            return True
        if self._rest is None:
            return False
        try:
            batch = next(self._rest, None)
        except MalformedBatch:
            self._count("malformed")
            batch = None
        if batch is None:
            self._rest = None
            return False
        self.lag_of(batch.ts)
        self._take_part(batch, 0)
        return True

    def _take_part(self, part: Batch, at: int) -> None:
        self._at = self.cache.take(part, at)
        self._part = part if self._at < len(part.events) else None

    def _take(self, number: int, payload: bytes) -> None:
        while self.step():
            pass
        self._next, self._unsure, self._mark = number + 1, False, xxh3_64_intdigest(payload)
        if len(payload) > self._largest:
            self._count("too-large")
            self.cache.clear(emptied=False)
            self.cache.partial = True
            return
        if len(payload) > AT_ONCE:
            self._rest = parts(payload)
            self.step()
            return
        try:
            batch = decode(payload)
        except MalformedBatch:
            self._count("malformed")
            return
        self.lag_of(batch.ts)
        self._take_part(batch, 0)

    def _forget(self, fault: str) -> None:
        self._count(fault)
        self._drop(emptied=fault == "restart")

    def _drop(self, *, emptied: bool) -> None:
        self._rest = self._part = None
        self.cache.clear(emptied=emptied)
        self._next, self._unsure = 0, True

    def _begin(self) -> None:
        """The publisher repeats all that it has, which takes the place of what is known."""
        if not self._unsure:
            self._drop(emptied=False)
        self._missed = self.cache.partial = False


class Replay:
    """The answers to requests for messages, taken one by one until `done`; it may take several requests."""

    def __init__(self, stream: EventStream) -> None:
        self._stream = stream
        self._left = _MOST
        self.start = stream.wants
        """Number to ask from."""
        self._anew = stream._unsure or stream.owed
        """All that the publisher has is taken, in place of what is known."""
        self._proven = self._anew
        """It is the process we know, or we know none."""
        self._again = False

    def take(self, number: int, payload: bytes) -> None:
        """A message of the answer; what follows a surprise is left out, and asked for again."""
        stream = self._stream
        self._answered()
        if self._again:
            return
        if not self._proven:
            self._proven = True
            if number != self.start or xxh3_64_intdigest(payload) != stream._mark:
                stream._forget("restart")
                self.start, self._again = 0, True
                return
        if not stream._unsure and number > stream._next:
            stream._count("gap")
            self.start = stream.wants
            self._again = True
        elif stream._unsure or number == stream._next:
            stream._take(number, payload)

    def done(self) -> bool:
        """The answer ended. False: ask again, from `start`."""
        self._answered()
        if not self._proven:  # it does not even have what we took last
            self._stream._forget("restart")
            self.start, self._again = 0, True
        if not self._again:
            return True
        self._again = False
        self._proven = self._stream._unsure
        self._left -= 1
        if not self._left:
            self._stream.gave_up()
        return not self._left

    def _answered(self) -> None:
        if self._anew:
            self._anew = False
            self._stream._begin()

    def broken_off(self) -> None:
        """We let the answer end before its end: ask for what follows what was taken."""
        self.start, self._again = self._stream.wants, False
        self._proven = self._stream._unsure
