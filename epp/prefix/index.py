"""Who remembers which block: block hash -> bitmask of endpoints, and the longest match of all endpoints at once.

The law everything here rests on: what an endpoint holds of a chain is a prefix of that chain. So along a chain masks
only lose bits, equal masks stand together, and the places where they change are found by galloping and bisection
instead of a walk: O(k log n) look-ups for k distinct depths, whatever the number of endpoints (a Python int is a set
of bits). `approximate` keeps the law: it adds behind what is held and takes away from the end.
"""

import sys
from bisect import bisect_left
from collections.abc import Sequence
from itertools import repeat

from epp.plugin import Endpoint

_REMEMBERED = 256
"""Bounds `_holders`: masks seen lately, each with a tuple of at most as many endpoints as the pool has."""
_FEW = 6
"""Up to so many bits a mask is taken apart faster than it is looked up and kept."""


class PrefixIndex:
    """Block hash -> endpoints that hold it. Bits belong to endpoints and are reused after `leave`.

    `limit` bounds memory: holdings, that is blocks summed over the endpoints that hold them, for which see `spare`.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.holdings = 0
        self.crowded = 0
        """Times the limit made a shadow forget or leave out blocks."""
        self._masks: dict[int, int] = {}
        self._slots: list[Endpoint | None] = []
        self._free: list[int] = []
        self._holders: dict[int, tuple[Endpoint, ...]] = {}

    def __len__(self) -> int:
        """Distinct blocks known."""
        return len(self._masks)

    @property
    def spare(self) -> int:
        """Blocks that may still be added."""
        return self.limit - self.holdings

    @property
    def bytes(self) -> int:
        """Memory it takes: the table, an int for each hash and each mask, and the holder's reference to each block."""
        mask = sys.getsizeof(1 << max(1, len(self._slots)))
        return sys.getsizeof(self._masks) + len(self._masks) * (sys.getsizeof(1 << 63) + mask) + 8 * self.holdings

    def join(self, endpoint: Endpoint) -> int:
        """Give `endpoint` a bit (an int with one bit set) of its own."""
        if self._free:
            slot = self._free.pop()
            self._slots[slot] = endpoint
        else:
            slot = len(self._slots)
            self._slots.append(endpoint)
        return 1 << slot

    def leave(self, bit: int) -> None:
        """Take a bit back. The caller has removed it from every block before."""
        slot = bit.bit_length() - 1
        self._slots[slot] = None
        self._free.append(slot)
        self._holders.clear()

    def match(self, chain: Sequence[int]) -> list[tuple[int, int]]:
        """Longest prefixes: (depth, mask of the endpoints holding at least the first `depth` blocks).

        Depths rise, masks shrink, each (but not its bits) differs from the one before; an endpoint's longest prefix is
        the last depth whose mask has its bit. Empty if nobody holds the first block.
        """
        found: list[tuple[int, int]] = []
        get, total, at = self._masks.get, len(chain), 0
        while at < total and (mask := get(chain[at], 0)):
            # `mask` holds at `at`: find where it ends. First in doubling strides, then within the last stride.
            low, high, stride = at + 1, at + 2, 2
            while high <= total and get(chain[high - 1], 0) == mask:
                low = high
                high += stride
                stride += stride
            at = self._end(chain, mask, low, min(high - 1, total))
            found.append((at, mask))
        return found

    def _end(self, chain: Sequence[int], mask: int, low: int, high: int) -> int:
        """First position in low..high whose mask is not `mask`; `high` if there is none before it."""
        get = self._masks.get
        while low < high:
            middle = (low + high) >> 1
            if get(chain[middle], 0) == mask:
                low = middle + 1
            else:
                high = middle
        return low

    def depth(self, chain: Sequence[int], bit: int) -> int:
        """Blocks of `chain` that the owner of `bit` holds."""
        get = self._masks.get
        return bisect_left(chain, True, key=lambda block: not get(block, 0) & bit)

    def holders(self, mask: int) -> Sequence[Endpoint]:
        """The endpoints of a mask."""
        if mask.bit_count() <= _FEW:
            return self._taken_apart(mask)
        if (known := self._holders.get(mask)) is None:
            if len(self._holders) >= _REMEMBERED:
                self._holders.clear()
            known = self._holders[mask] = tuple(self._taken_apart(mask))
        return known

    def _taken_apart(self, mask: int) -> list[Endpoint]:
        endpoints = []
        while mask:
            low = mask & -mask
            endpoint = self._slots[low.bit_length() - 1]
            assert endpoint is not None, "a block is held by nobody's bit"
            endpoints.append(endpoint)
            mask ^= low
        return endpoints

    def add(self, blocks: Sequence[int], bit: int) -> None:
        """`blocks`, which follow each other in a chain, are now held by the owner of `bit` too."""
        masks = self._masks
        self.holdings += len(blocks)
        shared = self.depth(blocks, -1)
        for block in blocks[:shared]:
            masks[block] |= bit
        masks.update(zip(blocks[shared:], repeat(bit), strict=False))

    def drop(self, blocks: Sequence[int], bit: int) -> None:
        """`blocks` are no longer held by the owner of `bit`."""
        masks = self._masks
        self.holdings -= len(blocks)
        for block in blocks:
            if masks[block] == bit:
                del masks[block]
            else:
                masks[block] ^= bit
