"""`Holdings`: the blocks one engine said it holds in one tier, as a forest, and what of it is a prefix.

Events name blocks by the engine's hashes, in any order, one copy at a time; the index wants prefixes. So each block
knows the one before it, and is shown in the index while it and all before it are held: a block whose beginning is
evicted first is kept, out of sight, until the beginning comes back or it is evicted too.

The forest lies in flat arrays, one row a block: a million objects would be walked by every full garbage collection.
"""

from array import array
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Final

from epp.plugin import Endpoint
from epp.prefix.index import PrefixIndex

NOBODY: Final = -1
"""In place of a row: no block."""
_GROWTH: Final = 1024
"""Rows added at once."""
ROW_BYTES: Final = 170
"""Memory of a block here: 37 bytes of arrays, a free row's or the table's share, two numbers. Measured."""


class Budget:
    """Rows that all holdings may have together, and have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.evicted = 0
        """Blocks forgotten or left out for want of room, though an engine holds them."""


class Holdings:
    """One engine's blocks in one tier. Names are the engine's hashes, keys are links of `epp.prefix.chains`."""

    def __init__(self, endpoint: Endpoint, index: PrefixIndex, budget: Budget) -> None:
        self.index = index
        self.bit = index.join(endpoint)
        self.size = 0
        """Tokens a block; 0 until a block came."""
        self._budget = budget
        self._rows: dict[int, int] = {}
        """Name -> row; oldest first."""
        self._free: list[int] = []
        self._names, self._keys = array("Q"), array("Q")
        self._copies = array("I")
        """How often it was stored and not removed; 0: gone, kept for those behind it."""
        self._shown = bytearray()
        self._before, self._behind = array("i"), array("i")
        """The block before, and one of those behind; the others behind are in a ring of two ways with it."""
        self._next, self._last = array("i"), array("i")

    def __len__(self) -> int:
        """Blocks remembered, those out of sight and those only kept for others among them."""
        return len(self._rows)

    def row(self, name: int) -> int:
        """The row of a block, or NOBODY."""
        return self._rows.get(name, NOBODY)

    def key(self, row: int) -> int:
        return self._keys[row]

    def name_before(self, row: int) -> int | None:
        """Name of the block before, None for the first of a chain."""
        before = self._before[row]
        return None if before < 0 else self._names[before]

    def store(self, names: Sequence[int], keys: Sequence[int], before: int) -> None:
        """Blocks that follow each other in a chain, and the row `before` (NOBODY: begin it), are held once more."""
        if self._budget.used + len(names) > self._budget.limit:
            fitting = self._make_room(len(names), before)
            self._budget.evicted += len(names) - fitting
            names = names[:fitting]
        while len(self._free) < len(names):
            self._grow()
        rows, shown, copies, claim, bit = self._rows, self._shown, self._copies, self.index.claim, self.bit
        known = len(rows)
        connected = before < 0 or shown[before]
        for name, key in zip(names, keys, strict=False):
            row = rows.get(name, NOBODY)
            if row < 0:
                row = self._free.pop()
                rows[name] = row
                self._names[row], self._keys[row], copies[row] = name, key, 1
                self._before[row], self._behind[row] = before, NOBODY
                if before >= 0:
                    self._join(row, before)
                # What is held already came under another name; the first one counts.
                if connected and (connected := claim(key, bit)):
                    shown[row] = 1
            else:
                copies[row] += 1
                if not shown[row] and (self._before[row] < 0 or shown[self._before[row]]):
                    self._show(row)
                connected = shown[row]
            before = row
        self._budget.used += len(rows) - known

    def remove(self, name: int) -> bool:
        """One copy of a block is gone. False if it was not known."""
        row = self._rows.get(name, NOBODY)
        if row < 0 or not self._copies[row]:
            return False
        self._copies[row] -= 1
        if not self._copies[row]:
            if self._shown[row]:
                self._hide(row)
            self._release(row)
        return True

    def clear(self) -> None:
        """Forget everything; the bit stays."""
        self.index.drop([key for key, shown in zip(self._keys, self._shown, strict=True) if shown], self.bit)
        self._budget.used -= len(self._rows)
        self.size = 0
        self._rows.clear()
        self._free.clear()
        self._shown.clear()
        for column in (self._names, self._keys, self._copies, self._before, self._behind, self._next, self._last):
            del column[:]

    def leave(self) -> None:
        """The engine is gone: give back everything, the bit too. Nothing may be called after this."""
        self.clear()
        self.index.leave(self.bit)

    # --- rows

    def _join(self, row: int, before: int) -> None:
        """Put a row among those behind `before`."""
        first = self._behind[before]
        if first < 0:
            self._behind[before] = self._next[row] = self._last[row] = row
        else:
            last = self._last[first]
            self._next[row], self._last[row] = first, last
            self._next[last] = self._last[first] = row

    def _grow(self) -> None:
        start = len(self._names)
        for column in (self._names, self._keys, self._copies, self._before, self._behind, self._next, self._last):
            column.frombytes(bytes(column.itemsize * _GROWTH))
        self._shown.extend(bytes(_GROWTH))
        self._free.extend(range(start + _GROWTH - 1, start - 1, -1))

    def _release(self, row: int) -> None:
        """Give up a row that nobody holds and nobody is behind; then those before it that were kept for it alone."""
        while row >= 0 and not self._copies[row] and self._behind[row] < 0:
            before = self._before[row]
            if before >= 0:
                next_, last = self._next[row], self._last[row]
                if next_ == row:
                    self._behind[before] = NOBODY
                else:
                    self._next[last], self._last[next_] = next_, last
                    if self._behind[before] == row:
                        self._behind[before] = next_
            del self._rows[self._names[row]]
            self._free.append(row)
            self._budget.used -= 1
            row = before

    def _those_behind(self, row: int) -> Iterator[int]:
        first = each = self._behind[row]
        while each >= 0:
            yield each
            each = self._next[each]
            if each == first:
                return

    def _hide(self, row: int) -> None:
        """Take a block and all shown behind it out of the index."""
        todo, gone = [row], []
        while todo:
            row = todo.pop()
            self._shown[row] = 0
            gone.append(self._keys[row])
            if self._behind[row] >= 0:
                todo += [each for each in self._those_behind(row) if self._shown[each]]
        self.index.drop(gone, self.bit)

    def _show(self, row: int) -> None:
        """Put a block and all that are held behind it without a gap into the index."""
        todo = [row]
        while todo:
            row = todo.pop()
            if self._copies[row] and self.index.claim(self._keys[row], self.bit):
                self._shown[row] = 1
                todo += self._those_behind(row)

    def _make_room(self, count: int, needed: int) -> int:
        """Forget the oldest blocks that end a chain, and what they leave at an end, but none before `needed`.

        Returns how many of `count` blocks fit then.
        """
        path = set()
        while needed >= 0:
            path.add(needed)
            needed = self._before[needed]
        left = goal = max(count, len(self._rows) // 64)
        ends = list(islice((row for row in self._rows.values() if self._behind[row] < 0), goal))
        for row in ends:
            while left > 0 and row >= 0 and self._behind[row] < 0 and row not in path:
                before = self._before[row]
                kept = before >= 0 and self._copies[before]
                self._copies[row] = 0
                if self._shown[row]:
                    self._hide(row)
                self._release(row)
                self._budget.evicted += 1
                left -= 1
                row = before if kept else NOBODY
        return max(0, min(count, self._budget.limit - self._budget.used))

    def check(self) -> None:
        """Raise AssertionError if the books do not balance. Costs a pass over everything: for tests."""
        for name, row in self._rows.items():
            assert self._names[row] == name, "a row under another's name"
            assert self._copies[row] or self._behind[row] >= 0, "kept for nobody"
            before = self._before[row]
            if before >= 0:
                assert row in self._those_behind(before), "a block that the one before it does not know"
            if self._shown[row]:
                assert self._copies[row], "shown and not held"
                assert before < 0 or self._shown[before], "shown behind a gap"
                assert not self.index.claim(self._keys[row], self.bit), "shown, but not in the index"
        assert len(self._rows) + len(self._free) == len(self._names), "a row is lost"
