"""`HeldBlocks`: the blocks one engine said it holds in one tier, as a forest, and what of it is a prefix.

Events name blocks by the engine's hashes, in any order, one copy at a time; the index wants prefixes. So each block
knows the one before it, and is shown in the index while it and all before it are held: a block whose beginning is
evicted first is kept, out of sight, until the beginning comes back or it is evicted too.

The forest lies in flat arrays, one row a block: a million objects would be walked by every full garbage collection.
"""

from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from epp.plugin import Endpoint
from epp.prefix.index import PrefixIndex

NO_ROW: Final = 0
"""The row of no block: what stands before the first of a chain. It counts as held, so nothing there is an exception."""
_GROWTH: Final = 1024
"""Rows added at once."""
_AT_ONCE: Final = 4096
"""Blocks shown or hidden at once: some milliseconds."""
_DONE: Final = object()
ROW_BYTES: Final = 170
"""Memory of a block here: 37 bytes of arrays, a free row's or the table's share, two numbers. Measured."""


class Budget:
    """Rows that all holdings may have together, and have."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.evicted = 0
        """Blocks forgotten or left out for lack of space, though an engine holds them."""


class HeldBlocks:
    """One engine's blocks in one tier. Names are the engine's hashes, keys are links of
    `epp.prefix.tokens.block_hashes`.

    One name may show or hide all blocks behind it. Of so many only some are done at once, the rest by `step`, or before
    anything else is done. In between the index has prefixes, as always. `unfinished` lists those with something left.
    """

    def __init__(
        self, endpoint: Endpoint, index: PrefixIndex, budget: Budget, unfinished: "list[HeldBlocks] | None" = None
    ) -> None:
        self.index = index
        self._unfinished: list[HeldBlocks] = [] if unfinished is None else unfinished
        self._rest: Iterator[None] | None = None
        """Of what was begun."""
        self.bit = index.join(endpoint)
        self.size = 0
        """Tokens a block; 0 until a block came."""
        self.rows: dict[int, int] = {}
        """Name -> row; oldest first. To be read only, as `keys` is."""
        self.keys = array("Q")
        """Row -> key."""
        self._budget = budget
        self._free: list[int] = []
        self._names = array("Q")
        self._copies = array("I")
        """How often it was stored and not removed; 0: gone, kept for those behind it."""
        self._shown = bytearray()
        self._more: dict[int, int] = {}
        """Key -> rows that are shown with it beside the first. With EAGLE vLLM hashes (0.33) the tokens after a block
        too, so blocks of the same tokens have a name each where prompts part behind them."""
        self._before, self._behind = array("I"), array("I")
        """The block before, and the latest of those behind; from it on they are a list of two ways."""
        self._next, self._last = array("I"), array("I")
        self._grow()

    def __len__(self) -> int:
        """Blocks remembered, those out of sight and those only kept for others among them."""
        return len(self.rows)

    def name_before(self, row: int) -> int | None:
        """Name of the block before, None for the first of a chain."""
        before = self._before[row]
        return self._names[before] if before else None

    def store(self, names: Sequence[int], keys: Sequence[int], before: int) -> None:
        """Blocks that follow each other in a chain, and the row `before` (NO_ROW: begin it), are held once more."""
        count = len(names)
        if self._rest is not None:
            self.finish()
        if self._budget.used + count > self._budget.limit:
            fitting = self._make_room(count, before)
            self._budget.evicted += count - fitting
            names = names[:fitting]
        while len(self._free) < count:
            self._grow()
        rows, shown, behind = self.rows, self._shown, self._behind
        claim, bit = self.index.claim, self.bit
        known = len(rows)
        connected = shown[before]
        for name, key in zip(names, keys):  # noqa: B905 - to say `strict` costs as much as a block
            if row := rows.get(name, NO_ROW):
                self._copies[row] += 1
                if not shown[row] and shown[self._before[row]]:
                    self._show(row)
                connected = shown[row]
            else:
                row = rows[name] = self._free.pop()
                self._names[row], self.keys[row], self._copies[row], self._before[row] = name, key, 1, before
                if first := behind[before]:
                    self._next[row], self._last[first] = first, row
                behind[before] = row
                if connected:
                    if not claim(key, bit):
                        self._count(key)
                    shown[row] = 1
            before = row
        self._budget.used += len(rows) - known

    def remove(self, names: Sequence[int]) -> list[int]:
        """One copy of each block is gone. Returns those that were not known."""
        rows, copies, shown, behind, more = self.rows, self._copies, self._shown, self._behind, self._more
        unknown, gone = [], []
        for name in names:
            if self._rest is not None:
                self.finish()
            row = rows.get(name, NO_ROW)
            if not row or not (left := copies[row]):
                unknown.append(name)
                continue
            copies[row] = left - 1
            if left > 1:
                continue
            if not behind[row]:  # nearly always: a chain is evicted from its end
                if shown[row]:
                    shown[row] = 0
                    if not (more and _has_more(more, self.keys[row])):
                        gone.append(self.keys[row])
                self._release(row)
            elif shown[row]:
                self._hide(row)
        if gone:
            self.index.drop(gone, self.bit)
        return unknown

    def clear(self) -> None:
        """Forget everything; the bit stays."""
        self.finish()
        dropping = self._drop(self.rows, self.keys, self._shown, self._more)
        self._budget.used -= len(self.rows)
        self.size = 0
        self.rows, self._free, self._more = {}, [], {}
        self._shown, self.keys = bytearray(), array("Q")
        for column in self._columns():
            del column[:]
        self._grow()
        self._begin(dropping)

    def leave(self) -> None:
        """The engine is gone: give back everything, the bit too. Nothing may be called after this."""
        self.clear()
        self.finish()
        self.index.leave(self.bit)

    def step(self) -> bool:
        """Do some more of what was begun. False: nothing was left."""
        if self._rest is None:
            return False
        if next(self._rest, _DONE) is _DONE:
            self._rest = None
            return False
        return True

    def finish(self) -> None:
        """Do all that was begun."""
        while self.step():
            pass

    # --- rows

    def _columns(self) -> tuple["array[int]", ...]:
        return self._names, self.keys, self._copies, self._before, self._behind, self._next, self._last

    def _grow(self) -> None:
        start = len(self._names)
        for column in self._columns():
            column.frombytes(bytes(column.itemsize * _GROWTH))
        self._shown.extend(bytes(_GROWTH))
        self._free.extend(range(start + _GROWTH - 1, start - 1, -1))
        if not start:
            self._shown[NO_ROW] = self._copies[NO_ROW] = 1
            self._free.remove(NO_ROW)

    def _release(self, row: int) -> None:
        """Give up a row that no endpoint holds and no row follows; then those before it that were kept for it alone."""
        copies, behind, followers, leaders = self._copies, self._behind, self._next, self._last
        while True:
            before, next_, last = self._before[row], followers[row], leaders[row]
            if last:
                followers[last], leaders[row] = next_, NO_ROW
            else:
                behind[before] = next_
            if next_:
                leaders[next_], followers[row] = last, NO_ROW
            del self.rows[self._names[row]]
            self._free.append(row)
            self._budget.used -= 1
            if copies[before] or behind[before]:
                return
            row = before

    def _begin(self, steps: Iterator[None]) -> None:
        """Do some of it now, the rest later."""
        self.finish()
        self._rest = steps
        if self.step():
            self._unfinished.append(self)

    def _count(self, key: int) -> None:
        """One more row is shown with a key that is in the index already."""
        self._more[key] = self._more.get(key, 0) + 1

    def _drop(self, rows: dict[int, int], keys: "array[int]", shown: bytearray, more: dict[int, int]) -> Iterator[None]:
        """Take what was shown out of the index, what was stored last first."""
        gone: list[int] = []
        for row in reversed(rows.values()):
            if shown[row] and not (more and _has_more(more, keys[row])):
                gone.append(keys[row])
                if len(gone) >= _AT_ONCE:
                    self.index.drop(gone, self.bit)
                    gone = []
                    yield
        self.index.drop(gone, self.bit)

    def _those_behind(self, row: int) -> Iterator[int]:
        row = self._behind[row]
        while row:
            yield row
            row = self._next[row]

    def _hide(self, row: int) -> None:
        """Take a block and all shown behind it out of the index."""
        self._begin(self._hiding(row))

    def _hiding(self, row: int) -> Iterator[None]:
        """Those behind first: what is left in between is a prefix."""
        shown, behind, followers, more, looked = self._shown, self._behind, self._next, self._more, 0
        gone: list[int] = []
        path, todo = [row], [behind[row]]
        while path:
            each = todo[-1]
            if each:
                todo[-1] = followers[each]
                if shown[each]:
                    path.append(each)
                    todo.append(behind[each])
            else:
                todo.pop()
                row = path.pop()
                if shown[row]:
                    shown[row] = 0
                    if not (more and _has_more(more, self.keys[row])):
                        gone.append(self.keys[row])
            looked += 1
            if looked % _AT_ONCE == 0:
                self.index.drop(gone, self.bit)
                gone = []
                yield
        self.index.drop(gone, self.bit)

    def _show(self, row: int) -> None:
        """Put a block and all that are held behind it without a gap into the index."""
        self._begin(self._showing(row))

    def _showing(self, row: int) -> Iterator[None]:
        todo, looked = [row], 0
        while todo:
            row = todo.pop()
            if self._copies[row] and not self._shown[row]:  # `store` goes on meanwhile, and shows what it adds
                if not self.index.claim(self.keys[row], self.bit):
                    self._count(self.keys[row])
                self._shown[row] = 1
                todo += self._those_behind(row)
            looked += 1
            if looked % _AT_ONCE == 0:
                yield

    def _make_room(self, count: int, needed: int) -> int:
        """Forget the oldest blocks that end a chain, and what they leave at an end, but none before `needed`.

        Returns how many of `count` blocks fit then.
        """
        path = set()
        while needed:
            path.add(needed)
            needed = self._before[needed]
        left = goal = max(count, len(self.rows) // 64)
        for row in self._oldest_ends(goal, path):
            while left > 0 and row and not self._behind[row] and row not in path:
                before = self._before[row]
                kept = self._copies[before]
                self._copies[row] = 0
                if self._shown[row]:
                    self._hide(row)
                self._release(row)
                self._budget.evicted += 1
                left -= 1
                row = before if kept else NO_ROW
        return max(0, min(count, self._budget.limit - self._budget.used))

    def _oldest_ends(self, goal: int, path: set[int]) -> list[int]:
        """Of the oldest chains the last blocks: so many that `goal` blocks can go one after another, if there are."""
        ends, found = [], 0
        for row in self.rows.values():
            if found >= goal:
                break
            if self._behind[row] or row in path:
                continue
            ends.append(row)
            alone = True
            while found < goal and row and alone and row not in path:
                found += 1
                alone = not (self._next[row] or self._last[row])
                row = self._before[row]
        return ends

    def check(self) -> None:
        """Raise AssertionError if the accounts do not add up. Costs a pass over everything: for tests."""
        self.finish()
        for name, row in self.rows.items():
            assert self._names[row] == name, "a row under another's name"
            assert self._copies[row] or self._behind[row], "kept without need"
            before = self._before[row]
            assert row in self._those_behind(before), "a block that the one before it does not know"
            if self._shown[row]:
                assert self._copies[row], "shown and not held"
                assert self._shown[before], "shown behind a gap"
                assert not self.index.claim(self.keys[row], self.bit), "shown, but not in the index"
            else:
                assert not (self._copies[row] and self._shown[before]), "held behind what is shown, and not shown"
        counted = Counter(self.keys[row] for row in self.rows.values() if self._shown[row])
        assert self._more == {key: n - 1 for key, n in counted.items() if n > 1}, "rows shown with one key"
        for row in self._free:
            used = self._shown[row], self._behind[row], self._next[row], self._last[row]
            assert not any(used), "free and in use"
        assert self._shown[NO_ROW], "chains do not begin"
        assert len(self.rows) + len(self._free) == len(self._names) - 1, "a row is lost"


def _has_more(more: dict[int, int], key: int) -> bool:
    """A row with this key is shown no more: whether another one is, of which there is one less beside the first."""
    if not (left := more.pop(key, 0)):
        return False
    if left > 1:
        more[key] = left - 1
    return True
