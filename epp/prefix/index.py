"""The blocks of a prompt, and who remembers which of them.

A chain is a prompt's bytes as 64-bit hashes of its blocks; equal prefixes have equal chains, whatever follows.

Each hash covers its block and, through its seed, everything before it: `h = xxh3_64(block, seed=h)`. Where a block
begins depends on its position alone: 256-byte blocks up to `LONG_FROM`, 1 KB blocks beyond, so a long prompt is cheap
to hash and to remember and still shares its beginning with a short one. Only full blocks count.

xxh3 is no cryptographic hash: who knows its seed makes blocks of any hash within milliseconds. So chains begin with a
seed that clients do not know. A collision costs a worse pick, never another's data, since the engine compares tokens by
its own hashes; and accounts stay right, since an endpoint counts as holding a hash once.

The index is block hash -> bitmask of endpoints, and the longest match of all endpoints at once.

The law everything here rests on: what an endpoint holds of a chain is a prefix of that chain. So along a chain masks
only lose bits, equal masks stand together, and the places where they change are found by galloping and bisection
instead of a walk: O(k log n) look-ups for k distinct depths, whatever the number of endpoints (a Python int is a set
of bits). `approximate` keeps the law: it adds behind what is held and takes away from the end.
"""

import sys
from collections.abc import Sequence
from struct import Struct as Packed
from typing import Any, Final

from xxhash import xxh3_64_intdigest

from epp.plugin import Endpoint

SHORT: Final = 256
"""Bytes per block up to `LONG_FROM`: 64 tokens of English text, four blocks of vLLM's default size."""
LONG: Final = 1024
"""Bytes per block beyond `LONG_FROM`."""
LONG_FROM: Final = 16 * 1024
"""Byte position from which blocks are long; a multiple of both sizes. At 256 KB a chain is 304 blocks, not 1,024."""
_SHORT_BLOCKS: Final = LONG_FROM // SHORT
_SHORT_BLOCK, _LONG_BLOCK = Packed(f"{SHORT}s"), Packed(f"{LONG}s")


def seed_of(model: str, salt: str, hash_seed: int = 0) -> int:
    """Where a chain starts: prompts to different models, LoRA adapters (models by name) or salts share nothing.

    `hash_seed`: see `epp.plugin.Services`.
    """
    return xxh3_64_intdigest(f"{len(model)}:{model}{salt}".encode("utf-8", "surrogatepass"), hash_seed)


def chain_of(prompt: bytes, seed: int, limit: int | None = None) -> list[int]:
    """Hashes of the full blocks within the first `limit` bytes (None = all), first block first. 45 us for 256 KB."""
    end = len(prompt) if limit is None else min(limit, len(prompt))
    digest, h, whole = xxh3_64_intdigest, seed, memoryview(prompt)
    short = whole[: min(end, LONG_FROM) // SHORT * SHORT]
    chain = [h := digest(block, h) for (block,) in _SHORT_BLOCK.iter_unpack(short)]
    if end >= LONG_FROM + LONG:
        long = whole[LONG_FROM : LONG_FROM + (end - LONG_FROM) // LONG * LONG]
        chain += [h := digest(block, h) for (block,) in _LONG_BLOCK.iter_unpack(long)]
    return chain


def told(hashes: Any) -> list[int]:
    """Block hashes as another replica tells them. Raises ValueError where they are none."""
    if not isinstance(hashes, list):
        raise ValueError(f"expected a list of block hashes, got {type(hashes).__name__}")
    return hashes


def bytes_at(depth: int) -> int:
    """Bytes that the first `depth` blocks cover."""
    if depth <= _SHORT_BLOCKS:
        return depth * SHORT
    return LONG_FROM + (depth - _SHORT_BLOCKS) * LONG


def depth_at(size: int) -> int:
    """Full blocks in the first `size` bytes; `depth_at(bytes_at(d)) == d`."""
    if size <= LONG_FROM:
        return size // SHORT
    return _SHORT_BLOCKS + (size - LONG_FROM) // LONG


def common(chain: Sequence[int], other: Sequence[int]) -> int:
    """Blocks that two chains share. A hash covers all before it, so where one is equal all before it are."""
    low, high = 0, min(len(chain), len(other))
    while low < high:
        middle = (low + high) >> 1
        if chain[middle] == other[middle]:
            low = middle + 1
        else:
            high = middle
    return low


_REMEMBERED = 256
"""Bounds `_holders`: so many masks seen lately, each with its endpoints, beside those of the first eight endpoints."""
_FEW = 6
"""In a large pool most masks of so few bits are never seen again: taking them apart costs less than keeping them."""


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
        self._holders: dict[int, Sequence[Endpoint]] = {}

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
        the last depth whose mask has its bit. Empty if no endpoint holds the first block.
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
            high = high - 1 if high <= total else total
            while low < high:
                middle = (low + high) >> 1
                if get(chain[middle], 0) == mask:
                    low = middle + 1
                else:
                    high = middle
            found.append((low, mask))
            at = low
        return found

    def depth(self, chain: Sequence[int], bit: int) -> int:
        """Blocks of `chain` that the owner of `bit` holds."""
        get, low, high = self._masks.get, 0, len(chain)
        if not high or not get(chain[0], 0) & bit:  # as of most prompts that nobody sent before
            return 0
        while low < high:
            middle = (low + high) >> 1
            if get(chain[middle], 0) & bit:
                low = middle + 1
            else:
                high = middle
        return low

    def holders(self, mask: int) -> Sequence[Endpoint]:
        """The endpoints of a mask."""
        if (known := self._holders.get(mask)) is not None:
            return known
        endpoints = self._taken_apart(mask)
        if mask < _REMEMBERED or len(endpoints) > _FEW:
            if len(self._holders) >= 2 * _REMEMBERED:
                self._holders.clear()
            self._holders[mask] = endpoints
        return endpoints

    def _taken_apart(self, mask: int) -> list[Endpoint]:
        endpoints = []
        while mask:
            low = mask & -mask
            endpoint = self._slots[low.bit_length() - 1]
            assert endpoint is not None, "a block is held by a bit without endpoint"
            endpoints.append(endpoint)
            mask ^= low
        return endpoints

    def add(self, blocks: Sequence[int], bit: int) -> int:
        """`blocks`, which follow each other in a chain, are now held by the owner of `bit` too. Returns how many: up to
        one that it holds in another chain, whose hash is the same.
        """
        masks, more = self._masks, len(blocks)
        if len({*blocks}) == more and masks.keys().isdisjoint(blocks):
            for block in blocks:
                masks[block] = bit
        else:
            for at, block in enumerate(blocks):
                if (mask := masks.get(block, 0)) & bit:
                    more = at
                    break
                masks[block] = mask | bit
        self.holdings += more
        return more

    def claim(self, block: int, bit: int) -> bool:
        """`add` for one block that may be held already: then False, and nothing is done. Trusts no hashes."""
        mask = self._masks.get(block, 0)
        if mask & bit:
            return False
        self._masks[block] = mask | bit
        self.holdings += 1
        return True

    def drop(self, blocks: Sequence[int], bit: int) -> None:
        """`blocks` are no longer held by the owner of `bit`."""
        masks = self._masks
        self.holdings -= len(blocks)
        found = [*map(masks.pop, blocks)]
        if found.count(bit) < len(blocks):
            masks.update((block, mask ^ bit) for block, mask in zip(blocks, found, strict=True) if mask != bit)
