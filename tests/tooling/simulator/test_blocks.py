"""The paged memory: references, the order of the free queue, twins; and all of it beside vLLM's rules."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.engines.block_requests import OurPool, outcomes, random_events
from tooling.simulator.blocks import Blocks


def filled(blocks: Blocks, hashes: list[int]) -> list[int]:
    """Allocate and register one block per hash."""
    taken = blocks.allocate(len(hashes))
    blocks.remember(taken, hashes)
    return taken


def test_released_blocks_can_be_hit_until_they_are_allocated_anew() -> None:
    blocks = Blocks(4)
    blocks.release(filled(blocks, [1, 2, 3]))
    assert len(blocks.match([1, 2, 3, 4], 4)) == 3
    blocks.allocate(1)  # the one never used is first in the queue
    assert len(blocks.match([1, 2, 3], 3)) == 3
    blocks.allocate(1)
    assert len(blocks.match([1, 2, 3], 3)) == 2, "the tail is evicted before the head"
    blocks.check()


def test_match_stops_at_the_first_miss_and_at_the_limit() -> None:
    blocks = Blocks(4)
    held = filled(blocks, [1, 2, 3])
    assert blocks.match([1, 9, 3], 3) == held[:1]
    assert blocks.match([1, 2, 3], 2) == held[:2]
    assert blocks.match([], 5) == []


def test_a_hit_takes_free_blocks_out_of_the_queue() -> None:
    blocks = Blocks(3)
    blocks.release(filled(blocks, [1, 2]))
    found = blocks.match([1, 2], 2)
    assert blocks.fits(found, 1)
    assert not blocks.fits(found, 2), "the hit blocks are not room for fresh ones"
    blocks.take(found)
    assert blocks.free == 1
    blocks.take(found)
    blocks.release(found)
    assert blocks.free == 1, "still referenced once"
    blocks.release(found)
    assert blocks.free == 3
    blocks.check()


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_a_twin_answers_when_its_elder_is_evicted(first_to_go: int) -> None:
    blocks = Blocks(3)
    twins = [filled(blocks, [7])[0], filled(blocks, [7])[0]]
    filler = blocks.allocate(1)
    assert blocks.match([7], 1) == [twins[0]]
    blocks.release([twins[first_to_go]])
    blocks.allocate(1)
    blocks.check()
    assert blocks.match([7], 1) == [twins[1 - first_to_go]]
    blocks.release([twins[1 - first_to_go]])
    blocks.allocate(1)
    assert blocks.match([7], 1) == []
    blocks.release(filler)
    blocks.check()


def test_what_was_never_filled_is_allocated_first_and_what_nobody_can_hit_in_its_turn() -> None:
    blocks = Blocks(8)
    first, second = blocks.allocate(3), blocks.allocate(2)
    blocks.remember(first[:2], [1])  # the second is full too, but of what nobody asks for
    blocks.remember(second[:1], [2])
    blocks.release(first)
    blocks.release(second)
    assert blocks.allocate(8) == [second[1], first[2], 5, 6, 7, first[1], first[0], second[0]]
    blocks.check()


def test_what_is_still_used_by_another_keeps_its_place_out_of_the_queue() -> None:
    blocks = Blocks(2)
    one = filled(blocks, [1])
    blocks.take(one)
    blocks.release(one)
    assert blocks.allocate(1) == [1]
    assert blocks.free == 0


def test_forget_is_refused_while_blocks_are_in_use() -> None:
    blocks = Blocks(2)
    held = filled(blocks, [1])
    assert not blocks.forget()
    assert blocks.cached == 1
    blocks.release(held)
    assert blocks.forget()
    assert blocks.match([1], 1) == []
    assert blocks.cached == 0
    blocks.check()


class Rules:
    """vLLM's rules in plain lists: `BlockPool` and how `KVCacheManager` uses it, 0.32, one group of full attention."""

    def __init__(self, count: int, size: int) -> None:
        self.size = size
        self.queue = list(range(count))
        self.users = [0] * count
        self.key: list[tuple[int, ...] | None] = [None] * count
        """What a block's hash stands for: its tokens and all before them."""
        self.holders: dict[tuple[int, ...], list[int]] = {}
        self.live: dict[int, tuple[list[int], list[int]]] = {}

    def cached(self, tokens: Sequence[int]) -> list[int]:
        found = []
        for end in range(self.size, len(tokens) + 1, self.size):
            if not (holders := self.holders.get(tuple(tokens[:end]))):
                break
            found.append(holders[0])
        return found

    def start(self, request: int, tokens: Sequence[int]) -> list[int]:
        found = self.cached(tokens[:-1])
        need = -(-len(tokens) // self.size) - len(found)
        if need > len([block for block in self.queue if block not in found]):
            return []
        for block in found:
            self.users[block] += 1
            if block in self.queue:
                self.queue.remove(block)
        mine = found + [self.pop() for _ in range(need)]
        for at in range(len(found), len(tokens) // self.size):
            self.fill(mine[at], tokens[: (at + 1) * self.size])
        self.live[request] = list(tokens), mine
        return list(mine)

    def grow(self, request: int, tokens: Sequence[int]) -> list[int]:
        if request not in self.live:
            return []
        known, mine = self.live[request]
        for token in tokens:
            if len(known) % self.size == 0:
                if not self.queue:
                    break
                mine.append(self.pop())
            known.append(token)
            if len(known) % self.size == 0:
                self.fill(mine[-1], known)
        return list(mine)

    def end(self, request: int) -> None:
        front: list[int] = []
        back: list[int] = []
        for block in reversed(self.live.pop(request, ([], []))[1]):
            self.users[block] -= 1
            if not self.users[block]:
                (front if self.key[block] is None else back).append(block)
        self.queue = front + self.queue + back

    def pop(self) -> int:
        block = self.queue.pop(0)
        self.users[block] = 1
        if (key := self.key[block]) is not None:
            self.holders[key].remove(block)
            self.key[block] = None
        return block

    def fill(self, block: int, tokens: Sequence[int]) -> None:
        key = self.key[block] = tuple(tokens)
        self.holders.setdefault(key, []).append(block)

    def drain(self) -> list[int]:
        return [self.pop() for _ in range(len(self.queue))]


@given(st.integers(0, 2**32), st.integers(8, 60), st.sampled_from([1, 4, 16]), st.booleans())
def test_blocks_are_given_hit_and_evicted_by_vllms_rules(seed: int, count: int, size: int, answers: bool) -> None:
    events = random_events(Random(seed), size, 40)
    theirs = list(outcomes(events, Rules(count, size)))
    ours = list(outcomes(events, OurPool(count, size, answers)))
    assert ours == theirs
