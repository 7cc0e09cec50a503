"""The match of all endpoints at once equals a walk; bits are recycled clean; the bound is known."""

import random
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import Endpoint
from epp.prefix.index import PrefixIndex


def endpoint(number: int) -> Endpoint:
    return Endpoint(f"pod-{number}", f"10.0.0.{number}:8000")


def filled(chain: list[int], depths: list[int]) -> tuple[PrefixIndex, list[Endpoint]]:
    """An index where endpoint i holds the first depths[i] blocks of `chain`."""
    index = PrefixIndex(10**9)
    endpoints = [endpoint(i) for i in range(len(depths))]
    for one, depth in zip(endpoints, depths, strict=True):
        index.add(chain[:depth], index.join(one))
    return index, endpoints


def depths_found(index: PrefixIndex, chain: list[int]) -> dict[Endpoint, int]:
    return {one: depth for depth, mask in index.match(chain) for one in index.holders(mask)}


@given(st.integers(0, 300), st.lists(st.integers(0, 300), max_size=40))
def test_match_finds_what_a_walk_finds(length: int, depths: list[int]) -> None:
    chain = list(range(1, length + 1))
    held = [min(depth, length) for depth in depths]
    index, endpoints = filled(chain, held)
    expected = {one: depth for one, depth in zip(endpoints, held, strict=True) if depth}
    assert depths_found(index, chain) == expected
    steps = index.match(chain)
    assert [depth for depth, _ in steps] == sorted({depth for depth in held if depth})
    for bit, depth in enumerate(held):
        assert index.depth(chain, 1 << bit) == depth
    assert index.holdings == sum(held)
    assert len(index) == max(held, default=0)


def test_nothing_is_found_where_nothing_is_held() -> None:
    index, _ = filled([1, 2, 3], [3, 1])
    assert index.match([]) == []
    assert index.match([9, 1, 2]) == []


def test_match_stops_where_prompts_part() -> None:
    index, endpoints = filled(list(range(100)), [100, 40])
    other = [*range(50), *range(1000, 1050)]
    index.add(other[50:], 1)
    assert depths_found(index, [*range(70), 7777]) == {endpoints[0]: 70, endpoints[1]: 40}


def test_dropping_tails_gives_back_exactly_what_was_added() -> None:
    chain = list(range(64))
    index, endpoints = filled(chain, [64, 64, 10])
    index.drop(chain[20:], 1)
    assert depths_found(index, chain) == {endpoints[0]: 20, endpoints[1]: 64, endpoints[2]: 10}
    index.drop(chain[:20], 1)
    index.drop(chain, 2)
    index.drop(chain[:10], 4)
    assert (len(index), index.holdings, index.match(chain)) == (0, 0, [])


def test_a_bit_is_recycled_without_its_former_owners_holdings() -> None:
    chain = list(range(8))
    index, endpoints = filled(chain, [8] * 20)
    assert set(index.holders((1 << 20) - 1)) == set(endpoints)
    assert set(index.holders(0b1100)) == set(endpoints[2:4])
    index.drop(chain, 1 << 3)
    index.leave(1 << 3)
    newcomer = endpoint(99)
    assert index.join(newcomer) == 1 << 3
    assert newcomer not in depths_found(index, chain)
    index.add(chain[:2], 1 << 3)
    assert set(index.holders((1 << 20) - 1)) == {*endpoints, newcomer} - {endpoints[3]}
    assert set(index.holders(0b1100)) == {endpoints[2], newcomer}


def test_the_memory_it_reports_is_the_memory_it_takes() -> None:
    draw = random.Random(5)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        index = PrefixIndex(10**9)
        bits = [index.join(endpoint(i)) for i in range(64)]
        kept = []
        for _ in range(500):
            blocks = [draw.getrandbits(64) for _ in range(40)]
            for bit in draw.sample(bits, 2):
                index.add(blocks, bit)
                kept.append(list(blocks))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.7 < index.bytes / taken < 1.3
    assert index.spare == 10**9 - 40_000
