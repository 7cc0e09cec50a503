"""The paged memory: references, LRU order, twins."""

import pytest

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
