"""Paged KV memory with a prefix cache, as vLLM v1 keeps it: ref-counted blocks, hash index, LRU free queue.

Source of the rules: vLLM's `v1/core/block_pool.py` and `kv_cache_manager.py` (0.32). Pure and single-threaded.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import islice


class Blocks:
    """`count` blocks, named 0..count-1. A block is either referenced by at least one request or in the free queue.

    A free block keeps its hash until it is allocated anew, so the free queue is the prefix cache's LRU: its head is
    evicted first. Blocks that are not full stand before all that are: those released, the last one first, then those
    never used. Two blocks may carry one hash (two requests computed the same tokens at the same time); then the first
    registered one answers look-ups and the other takes over when that one is evicted.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.on_evicted: Callable[[list[int]], None] | None = None
        """Called with the hashes of cached blocks that are overwritten, each once for each of its copies."""
        self._references = [0] * count
        self._hash_of: list[int | None] = [None] * count
        self._full = bytearray(count)
        """1 where a block is full: it has a hash, even where `remember` was not told which."""
        self._by_hash: dict[int, int] = {}
        self._twins: dict[int, list[int]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(count))

    @property
    def free(self) -> int:
        """Blocks that no request references; cached ones among them can still be hit."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Distinct hashes a look-up can find."""
        return len(self._by_hash)

    def match(self, hashes: Sequence[int], limit: int) -> list[int]:
        """Blocks that hold the longest cached prefix of `hashes[:limit]`. Takes nothing; see `take`."""
        found: list[int] = []
        by_hash = self._by_hash
        for index in range(min(limit, len(hashes))):
            block = by_hash.get(hashes[index])
            if block is None:
                break
            found.append(block)
        return found

    def depth(self, hashes: Sequence[int], limit: int) -> int:
        """Length of the longest cached prefix of `hashes[:limit]`: a prompt's tail is evicted before its head."""
        by_hash, low, high = self._by_hash, 0, min(limit, len(hashes))
        while low < high:
            middle = (low + high) >> 1
            if hashes[middle] in by_hash:
                low = middle + 1
            else:
                high = middle
        return low

    def fits(self, found: Sequence[int], fresh: int) -> bool:
        """Whether `fresh` new blocks could be allocated after taking `found`."""
        references = self._references
        return fresh + sum(1 for block in found if not references[block]) <= len(self._free)

    def take(self, found: Sequence[int]) -> None:
        """Reference the blocks of a prefix hit; those that were free leave the queue."""
        references = self._references
        for block in found:
            if not references[block]:
                del self._free[block]
            references[block] += 1

    def allocate(self, count: int) -> list[int]:
        """`count` blocks from the head of the free queue; their old content is forgotten. The caller checked room."""
        free, references, hash_of, by_hash = self._free, self._references, self._hash_of, self._by_hash
        twins, full, evicted = self._twins, self._full, []
        taken = [*islice(free, count)]
        for block in taken:
            del free[block]
            references[block] = 1
            full[block] = 0
            if (value := hash_of[block]) is not None:
                hash_of[block] = None
                evicted.append(value)
                if value in twins:
                    self._hand_over(value, block)
                else:  # nearly always: no other job has it
                    del by_hash[value]
        if evicted and self.on_evicted is not None:
            self.on_evicted(evicted)
        return taken

    def remember(self, blocks: Sequence[int], hashes: Sequence[int]) -> None:
        """Register full blocks under their hashes. Those beyond `hashes` have one that nobody will look up."""
        by_hash, hash_of, full = self._by_hash, self._hash_of, self._full
        for block in blocks:
            full[block] = 1
        for block, value in zip(blocks, hashes, strict=False):
            hash_of[block] = value
            if by_hash.setdefault(value, block) != block:
                self._twins.setdefault(value, []).append(block)

    def release(self, blocks: Sequence[int]) -> None:
        """Drop one reference of each. Full ones are evicted last, a prompt's tail before its head; others come first.

        So a request's partial last block is the next to be allocated.
        """
        free, references, full, partial = self._free, self._references, self._full, []
        for block in reversed(blocks):
            references[block] -= 1
            if not references[block]:
                free[block] = None
                if not full[block]:
                    partial.append(block)
        for block in reversed(partial):
            free.move_to_end(block, last=False)

    def forget(self) -> bool:
        """Empty the prefix cache. Refused (False) while any block is in use, as in vLLM."""
        if len(self._free) != self.count:
            return False
        self._by_hash.clear()
        self._twins.clear()
        self._hash_of = [None] * self.count
        self._full = bytearray(self.count)
        return True

    def _hand_over(self, value: int, block: int) -> None:
        """`block` no longer has the hash `value`; others do."""
        twins = self._twins[value]
        if self._by_hash[value] == block:
            self._by_hash[value] = twins.pop(0)
        else:
            twins.remove(block)
        if not twins:
            del self._twins[value]

    def check(self) -> None:
        """Raise AssertionError if the accounts do not add up. Costs a pass over all blocks: for tests."""
        assert all(count >= 0 for count in self._references), "negative reference count"
        idle = {block for block, count in enumerate(self._references) if not count}
        assert idle == set(self._free), "the free queue is not exactly the unreferenced blocks"
        hashed = {block for block, value in enumerate(self._hash_of) if value is not None}
        assert all(self._full[block] for block in hashed), "a block has a hash before it is full"
        indexed = list(self._by_hash.values()) + [block for twins in self._twins.values() for block in twins]
        assert len(indexed) == len(set(indexed)), "a block is indexed twice"
        assert hashed == set(indexed), "the hash index does not match the blocks"
