"""The forest of an engine's blocks against a naive one, and its bounds."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from epp.plugin import Endpoint
from epp.prefix.events.held_blocks import NO_ROW, Budget, HeldBlocks
from epp.prefix.index import PrefixIndex, common

A = Endpoint("a", "10.0.0.1:8000")


def holdings(limit: int = 10_000) -> HeldBlocks:
    return HeldBlocks(A, PrefixIndex(limit), Budget(limit))


def chain(*path: int) -> list[int]:
    """Names (and keys) of the blocks along a path: equal paths have equal names."""
    return [hash(path[: i + 1]) & (2**63 - 1) for i in range(len(path))]


def put(held: HeldBlocks, names: list[int], at: int = 0) -> None:
    held.store(names[at:], names[at:], held.rows[names[at - 1]] if at else NO_ROW)


def depth(held: HeldBlocks, names: list[int]) -> int:
    return held.index.depth(names, held.bit)


def test_a_block_is_held_as_often_as_it_was_stored() -> None:
    held, names = holdings(), chain(1, 2, 3)
    put(held, names)
    put(held, names)
    assert held.remove(names) == []
    assert depth(held, names) == 3
    assert held.remove(names) == []
    assert (depth(held, names), len(held)) == (0, 0)
    assert held.remove([names[0], 7]) == [names[0], 7]
    held.check()


def test_what_lost_its_beginning_is_out_of_sight_until_it_is_back() -> None:
    held, names, branch = holdings(), chain(1, 2, 3, 4), chain(1, 2, 5)
    put(held, names)
    put(held, branch, 2)
    held.remove(names[1:2])
    assert (depth(held, names), depth(held, branch)) == (1, 1)
    held.check()
    held.store(names[1:2], names[1:2], held.rows[names[0]])
    assert (depth(held, names), depth(held, branch)) == (4, 3)
    held.check()


def test_a_chain_evicted_from_its_beginning_leaves_nothing() -> None:
    held, names = holdings(), chain(*range(50))
    put(held, names)
    for name in names:
        held.remove([name])
        held.check()
    assert (len(held), held.index.holdings) == (0, 0)


@pytest.mark.parametrize("order", [(3, 4, 1, 2), (1, 3, 2, 4), (4, 2, 3, 1)])
def test_one_key_under_two_names_is_held_while_one_of_them_is(order: tuple[int, ...]) -> None:
    held, keys, kept = holdings(), [101, 102], {1, 2, 3, 4}
    held.store([1, 2], keys, NO_ROW)
    held.store([3, 4], keys, NO_ROW)
    held.check()
    assert held.index.holdings == 2
    for name in order:
        held.remove([name])
        held.check()
        kept.discard(name)
        assert depth(held, keys) == max(2 * ({1, 2} <= kept or {3, 4} <= kept), 1 * bool({1, 3} & kept))
    assert (len(held), held.index.holdings, held._more) == (0, 0, {})


def test_prompts_that_part_behind_a_block_of_two_names_are_both_held() -> None:
    """With EAGLE vLLM 0.33 names a block after its tokens and the next one, so it has a name for each of the two."""
    held = holdings()
    held.store([1, 2, 3], [101, 102, 103], NO_ROW)
    held.store([12, 13], [102, 203], held.rows[1])
    assert (depth(held, [101, 102, 103]), depth(held, [101, 102, 203])) == (3, 3)
    held.check()
    held.remove([2])
    assert (depth(held, [101, 102, 103]), depth(held, [101, 102, 203])) == (2, 3)
    held.clear()
    assert (held.index.holdings, held._more) == (0, {})


def test_clearing_and_leaving_give_everything_back() -> None:
    held, names = holdings(), chain(1, 2, 3)
    put(held, names)
    held.clear()
    assert (depth(held, names), held.index.holdings, held.size) == (0, 0, 0)
    put(held, names)
    assert depth(held, names) == 3
    held.leave()
    assert (len(held.index), held.index.holdings) == (0, 0)


def test_two_engines_share_an_index_and_not_their_blocks() -> None:
    index, budget = PrefixIndex(100), Budget(100)
    one, other = HeldBlocks(A, index, budget), HeldBlocks(Endpoint("b", "10.0.0.2:8000"), index, budget)
    names = chain(1, 2, 3)
    put(one, names)
    put(other, names[:2])
    assert [(d, bin(mask).count("1")) for d, mask in index.match(names)] == [(2, 2), (3, 1)]
    one.clear()
    assert [(d, bin(mask).count("1")) for d, mask in index.match(names)] == [(2, 1)]
    assert budget.used == 2


def test_the_bound_holds_and_the_oldest_ends_go_first() -> None:
    held = holdings(200)
    system = chain(*range(20))
    put(held, system)
    chats = [system + chain(*range(20), 100 + i)[20:] + [10**9 + 10 * i + j for j in range(9)] for i in range(40)]
    for chat in chats:
        put(held, chat, 20)
        held.check()
        assert len(held) <= 200
        assert depth(held, chat) == 30
    assert depth(held, chats[0]) == 20
    assert depth(held, chats[-10]) == 30
    evicted = held._budget.evicted
    assert evicted >= 20 + 400 - 200


def test_room_is_made_of_many_short_chains_as_of_one_long() -> None:
    short, long = holdings(100), holdings(100)
    for i in range(100):
        put(short, chain(i))
    put(long, chain(*range(100)))
    names = chain(*range(1000, 1030))
    for held in (short, long):
        put(held, names)
        held.check()
        assert depth(held, names) == 30
        assert held._budget.evicted == 30


def test_a_chain_longer_than_the_bound_is_held_as_far_as_it_fits() -> None:
    held, names = holdings(100), chain(*range(300))
    put(held, names)
    held.check()
    assert depth(held, names) == 100
    put(held, chain(7, 8), 0)
    held.check()
    assert depth(held, chain(7, 8)) == 2


@settings(max_examples=100)
@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5, 4096]), st.booleans())
def test_any_history_against_a_naive_count(seed: int, at_once: int, several: bool) -> None:
    """Paths in a small tree are stored in pieces and removed in any order; a prefix is held while all of it is, under
    one or `several` names. What is held is always a prefix, also while something is left to do, which is done in the
    end or before anything else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("epp.prefix.events.held_blocks._AT_ONCE", at_once)
        any_history(random.Random(seed), several)


def is_prefix(held: HeldBlocks, keys: list[int]) -> bool:
    shown = [bool(held.index._masks.get(key, 0) & held.bit) for key in keys]
    return shown == sorted(shown, reverse=True)


def any_history(draw: random.Random, several: bool) -> None:
    held, copies = holdings(), Counter[int]()
    places = [tuple(draw.choice((1, 2, 3) if several else (1, 2)) for _ in range(6)) for _ in range(8)]
    paths = [chain(*place) for place in places]
    # With several names for a key: steps 2 and 3 have one.
    keys_of = {i: chain(*(step // 2 for step in place)) if several else paths[i] for i, place in enumerate(places)}
    key_of = {name: key for i, path in enumerate(paths) for name, key in zip(path, keys_of[i], strict=True)}
    for _ in range(150):
        names = draw.choice(paths)
        if draw.random() < 0.5:
            start = draw.randint(0, 5)
            if start and names[start - 1] not in held.rows:
                continue
            end = draw.randint(start + 1, 6)
            keys = [key_of[name] for name in names[start:end]]
            held.store(names[start:end], keys, held.rows[names[start - 1]] if start else NO_ROW)
            copies.update(names[start:end])
        else:
            some = draw.choices(names, k=draw.randint(1, 8))
            unknown = [name for place, name in enumerate(some) if some[:place].count(name) >= copies[name]]
            assert held.remove(some) == unknown
            copies = Counter({name: max(0, count - some.count(name)) for name, count in copies.items()})
        if draw.random() < 0.03:
            held.clear()
            copies.clear()
        if draw.random() < 0.3:
            continue
        assert all(is_prefix(held, keys) for keys in keys_of.values())
        while held.step():
            assert all(is_prefix(held, keys) for keys in keys_of.values())
        held_to = [next((i for i, name in enumerate(path) if not copies[name]), 6) for path in paths]
        for keys in keys_of.values():
            shared = (common(keys, other) for other in keys_of.values())
            assert depth(held, keys) == max(map(min, held_to, shared))
    held.check()
    held.leave()
    assert (len(held.index), held.index.holdings) == (0, 0)


def test_a_name_with_many_blocks_behind_it_is_shown_and_hidden_bit_by_bit() -> None:
    held = holdings(200_000)
    tree = [[1, *range(1000 * i, 1000 * i + 999)] for i in range(1, 100)]
    held.store([1], [1], NO_ROW)
    for chat in tree:
        put(held, chat, 1)
    unfinished: list[HeldBlocks] = held._unfinished
    for change in (lambda: held.remove([1]), lambda: held.store([1], [1], NO_ROW), held.clear):
        before, turns = held.index.holdings, 0
        change()
        assert abs(held.index.holdings - before) <= 4096
        assert unfinished.pop() is held
        while held.step():
            assert abs(held.index.holdings - before) <= 4096 * (turns := turns + 1) + 4096
            held_to = [depth(held, chat) for chat in tree[:3]]
            assert all(held.index._masks.get(name) for chat, n in zip(tree, held_to, strict=False) for name in chat[:n])
        assert turns >= 20
    assert held.index.holdings == 0
