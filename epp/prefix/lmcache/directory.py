"""Who holds which LMCache chunk in L1, and which are in L2: chunk name -> bitmask. Pure; `epp.prefix.lmcache.tiers`
fills it.

L1 is a node's memory, so it belongs to every endpoint on that node; L2 is everybody's. What is said here is a hint: an
entry may be gone by the time an engine asks for it, which then computes what it did not find.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

L2: Final = 1
"""The bit of what any node can load; the other bits are instances, each with an L1 of its own."""
ENTRY_BYTES: Final = 120
"""Memory of an entry: its place in a dict, two ints. Measured."""
_INSTANCES: Final = 4096
"""Of which chunks are known; names have at most 1024 characters."""


class Held(NamedTuple):
    """Of a chain: from the chunk before on, up to the one at `end`, all are held by the same (`mask`)."""

    end: int
    mask: int


class Directory:
    """`limit` bounds memory: chunks remembered, at `ENTRY_BYTES` each; beyond it new ones are left out.

    A ninth of the space is for what was asked for by itself, of which the oldest is dropped.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.left_out = 0
        """Times a chunk was left out for lack of space."""
        self._masks: dict[int, int] = {}
        self._asked_for: dict[int, int] = {}
        """Oldest first."""
        self._instances: dict[str, int] = {}
        self._fresh: dict[int, int] = {}
        """Of a reading of everything, what came of it so far."""
        self._free: list[int] = []
        """Bits of instances that are gone."""
        self._seen: set[str] = set()
        """Instances that were named since the last reading of everything began."""

    def __len__(self) -> int:
        return len(self._masks) + len(self._asked_for)

    def bit(self, instance: str) -> int:
        """The bit of an instance's L1, which holds something; 0 where there are too many to distinguish."""
        bit = self._instances.get(instance, 0)
        if not bit:
            if len(self._instances) >= _INSTANCES:
                return 0
            bit = self._instances[instance] = self._free.pop() if self._free else 2 << len(self._instances)
        self._seen.add(instance)
        return bit

    def bit_if_any(self, instance: str) -> int:
        """The bit of an instance's L1; 0 where nothing is known to be there."""
        return self._instances.get(instance, 0)

    def add(self, chunks: Iterable[tuple[int, int]]) -> None:
        """(name, mask) of chunks that are held there too."""
        self._join(self._masks, chunks)

    def _join(self, masks: dict[int, int], chunks: Iterable[tuple[int, int]]) -> None:
        limit = self.limit
        for name, mask in chunks:
            old = masks.get(name)
            if old is None and len(masks) >= limit:
                self.left_out += 1
            else:
                masks[name] = (old or 0) | mask

    def put(self, chunks: Iterable[tuple[int, int]]) -> None:
        """(name, mask) of chunks that were asked for, to be known until the next `finish`."""
        asked_for, most = self._asked_for, max(1, self.limit // 8)
        for name, mask in chunks:
            asked_for.pop(name, None)
            while len(asked_for) >= most:
                del asked_for[next(iter(asked_for))]
            asked_for[name] = mask

    def begin(self) -> None:
        """All there are will come, by `stage`, to be known from `finish` on. Until then nothing changes."""
        self._fresh, self._seen = {}, set()

    def stage(self, chunks: Iterable[tuple[int, int]]) -> None:
        """(name, mask) of chunks there are."""
        self._join(self._fresh, chunks)

    def finish(self) -> None:
        """Those staged are all there are. Instances that hold none of them are forgotten."""
        self._masks, self._asked_for, self._fresh = self._fresh, {}, {}
        for gone in self._instances.keys() - self._seen:
            self._free.append(self._instances.pop(gone))

    def clear(self) -> None:
        """Nothing is known to be held anywhere."""
        self._masks, self._asked_for, self._fresh = {}, {}, {}
        self._instances, self._free, self._seen = {}, [], set()

    def held(self, chain: Sequence[int]) -> list[Held]:
        """Who holds the chunks of `chain`, from its beginning to the first that no tier holds."""
        runs: list[Held] = []
        get, asked_for, last = self._masks.get, self._asked_for, 0
        for at, name in enumerate(chain):
            mask = get(name) or asked_for.get(name, 0)
            if mask != last and at:
                runs.append(Held(at, last))
            if not mask:
                return runs
            last = mask
        if last:
            runs.append(Held(len(chain), last))
        return runs


def loads(runs: Sequence[Held], bit: int, held: int, chunk: int) -> tuple[int, int]:
    """(tokens from L1, tokens from L2) that an endpoint loads which holds the first `held` tokens on its device.

    `bit`: of its node's instance, 0 = it has none; `chunk`: tokens of a chunk. LMCache gives a prefix: what it has
    behind a chunk that neither tier has is of no use, and neither is what it has if it lost the beginning.
    """
    l1 = l2 = before = 0
    for end, mask in runs:
        if not mask & (bit | L2):
            break
        count = end * chunk - max(before * chunk, held)
        if count > 0:
            if mask & bit:
                l1 += count
            else:
                l2 += count
        before = end
    return l1, l2
