"""KV memory below the device, in virtual time: the L1 of a node and the L2 of a pool, as LMCache keeps them. Pure.

What LMCache 0.5.6 was seen to do in front of vLLM, and what is done here: the chunks of a prompt are written through
to L1 as they are computed, and from there to L2, so that what the device evicts is there already; the end of a prompt
that fills no chunk, and answers, are not (`save_decode_cache` is off). A prompt's chunks are looked up from its
beginning to the first that neither tier has. What came from L2 stays in L1 (`--l2-prefetch-policy retain`). Each tier
forgets what was used longest ago, a prompt's tail before its head. Left out: what writing costs, and LMCache's
watermarks (it makes room before a tier is full).
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, Final, NamedTuple

CHUNK: Final = 256
"""Tokens of a chunk: LMCache's default. A multiple of the engine's block size."""
L1_SPEED: Final = 300_000.0
L2_SPEED: Final = 30_000.0
"""Tokens a second by default: what `expected-ttft` takes them to be (`l1TokensPerSecond`)."""


@dataclass(frozen=True, kw_only=True)
class TierParameters:
    """Size and speed of a tier."""

    tokens: int
    """It holds, in whole chunks of `CHUNK`."""
    speed: float = L1_SPEED
    """Tokens a second that one pod loads from it."""

    def __post_init__(self) -> None:
        if self.tokens < CHUNK:
            raise ValueError(f"tokens: {self.tokens}, expected at least one chunk of {CHUNK}")
        if not 0 < self.speed < inf:
            raise ValueError(f"speed: {self.speed}, expected more than 0")


class Changed(NamedTuple):
    """What a tier has learnt and forgotten at once."""

    about: Any
    """Whose prompt it was: `Job.about`."""
    chunks: Sequence[int]
    """That prompt's."""
    stored: Sequence[int]
    """Places in `chunks` of those that are new here, in order."""
    removed: Sequence[int]
    """Names of those that had to go."""


class Tier:
    """Chunks by name, least recently used first; `tokens` bounds them. A name says its chunk and all before it."""

    def __init__(self, tokens: int) -> None:
        self.room = tokens // CHUNK
        """Chunks."""
        self._names: OrderedDict[int, None] = OrderedDict()
        self._changes: list[Changed] | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: int) -> bool:
        return name in self._names

    def watch(self) -> None:
        """Write down from now on what comes and goes; `changes` has it."""
        self._changes = []

    def changes(self) -> list[Changed]:
        """What came and went since this was asked last, in order; [] where nothing watches."""
        changes = self._changes
        if not changes:
            return []
        self._changes = []
        return changes

    def keep(self, chunks: Sequence[int], start: int, end: int, about: Any = None) -> list[int]:
        """The chunks from `start` to `end` of a prompt are used now. Returns places of those that are new.

        Of a prompt larger than the tier the beginning is kept.
        """
        names = self._names
        stored = []
        for place in range(min(end, start + self.room) - 1, start - 1, -1):  # so that the tail goes before the head
            name = chunks[place]
            if name in names:
                names.move_to_end(name)
            else:
                names[name] = None
                stored.append(place)
        stored.reverse()
        removed = [names.popitem(last=False)[0] for _ in range(len(names) - self.room)]
        if self._changes is not None and (stored or removed):
            self._changes.append(Changed(about, chunks, stored, removed))
        return stored


class Load(NamedTuple):
    """What is best loaded of a prompt."""

    end: int
    """Tokens of the prompt that are on the device then."""
    l1: int = 0
    l2: int = 0
    """Tokens loaded from either."""
    seconds: float = 0.0
    """Until it is there."""


@dataclass(frozen=True)
class Lower:
    """The tiers below one pod's device; both may be shared with others."""

    l1: Tier | None
    l2: Tier | None
    l1_speed: float = L1_SPEED
    l2_speed: float = L2_SPEED
    """Tokens a second."""

    def best(
        self, chunks: Sequence[int], held: int, compute: Callable[[int], float], busy: tuple[float, float] = (0.0, 0.0)
    ) -> Load:
        """The load after which a prompt is computed soonest, of whose tokens the device holds the first `held`.

        `compute(n)`: seconds to compute what follows the first n tokens. `busy`: seconds for which the way from L1 and
        the way from L2 are taken. Loading nothing is an answer too: `Load(held)`.
        """
        best, least = Load(held), compute(held)
        l1 = l2 = before = 0
        tier: Tier | None = None
        for place, name in enumerate(chunks):
            holder = next((each for each in (self.l1, self.l2) if each is not None and name in each), None)
            if holder is not tier and l1 + l2:
                best, least = self._better(best, least, Load(place * CHUNK, l1, l2), compute, busy)
            tier = holder
            if tier is None:
                return best
            count = (place + 1) * CHUNK - max(before, held)
            before = (place + 1) * CHUNK
            if count > 0 and tier is self.l1:
                l1 += count
            elif count > 0:
                l2 += count
        return self._better(best, least, Load(before, l1, l2), compute, busy)[0] if l1 + l2 else best

    def _better(
        self, best: Load, least: float, other: Load, compute: Callable[[int], float], busy: tuple[float, float]
    ) -> tuple[Load, float]:
        ways = ((other.l1, self.l1_speed, busy[0]), (other.l2, self.l2_speed, busy[1]))
        seconds = max(wait + tokens / speed for tokens, speed, wait in ways if tokens)
        whole = seconds + compute(other.end)
        return (other._replace(seconds=seconds), whole) if whole < least else (best, least)

    def keep(self, chunks: Sequence[int], start: int, end: int, about: Any = None) -> None:
        """Write the chunks from `start` to `end` of a prompt through."""
        if self.l1 is None:
            if self.l2 is not None:
                self.l2.keep(chunks, start, end, about)
            return
        stored = self.l1.keep(chunks, start, end, about)
        if stored and self.l2 is not None:  # L1 hands on what is new to it
            self.l2.keep(chunks, stored[0], stored[-1] + 1, about)
