"""One endpoint's shadow: pins, the order of forgetting, room, and its books under random events."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from epp.plugin import CacheRoom, Endpoint
from epp.prefix.index import SHORT, PrefixIndex
from epp.prefix.shadow_cache import Pin, ShadowCache

PER_TOKEN = 4.0
BLOCK = SHORT // 4


def shadow(blocks: int, limit: int = 10**9) -> ShadowCache:
    """Room for `blocks` of our blocks."""
    return ShadowCache(Endpoint("pod", "10.0.0.1:8000"), PrefixIndex(limit), blocks * BLOCK, 16)


def pin(of: ShadowCache, chain: list[int]) -> Pin:
    return of.pin(chain, len(chain) * BLOCK + 1, PER_TOKEN)


def served(of: ShadowCache, chain: list[int], generated: int = 1) -> None:
    of.release(pin(of, chain), generated)
    of.check()


def held(of: ShadowCache, chain: list[int]) -> int:
    return of.index.depth(chain, of.bit)


def chain(number: int, length: int) -> list[int]:
    return [number * 1000 + i for i in range(length)]


def test_a_prompt_is_held_from_the_pick_on() -> None:
    one = shadow(100)
    pinned = pin(one, chain(1, 10))
    assert held(one, chain(1, 10)) == 10
    assert one.room == CacheRoom(10 * BLOCK + 16, 100 * BLOCK)
    one.release(pinned, 1)
    assert held(one, chain(1, 10)) == 10
    assert one.room.pinned == 0


def test_the_oldest_is_forgotten_first_and_from_its_end() -> None:
    one = shadow(21)
    served(one, chain(1, 10))
    served(one, chain(2, 10))
    assert (held(one, chain(1, 10)), held(one, chain(2, 10))) == (10, 10)
    served(one, chain(3, 4))
    assert (held(one, chain(1, 10)), held(one, chain(2, 10)), held(one, chain(3, 4))) == (6, 10, 4)


def test_use_refreshes_a_prefix_but_not_what_lies_behind_it() -> None:
    one = shadow(32)
    served(one, chain(1, 10))
    served(one, chain(2, 10))
    served(one, chain(1, 4))
    served(one, chain(3, 20))
    assert held(one, chain(1, 10)) == 4
    assert 0 < held(one, chain(2, 10)) < 10


def test_what_an_answer_took_goes_first_wherever_its_prompt_is_used_meanwhile() -> None:
    one = shadow(20)
    served(one, chain(1, 4), generated=1 + 4 * BLOCK)
    served(one, chain(2, 4))
    assert one.idle == 12 * BLOCK
    served(one, chain(1, 4))
    assert [(each.tokens, each.chain) for each in one.remembered()] == [
        (4 * BLOCK, []),
        (0, chain(2, 4)),
        (0, chain(1, 4)),
    ]
    served(one, chain(3, 11))
    assert (one.idle, held(one, chain(2, 4)), held(one, chain(1, 4))) == (20 * BLOCK - 16, 4, 4)
    served(one, chain(4, 2))
    assert (held(one, chain(2, 4)), held(one, chain(1, 4)), held(one, chain(3, 11))) == (2, 4, 11)


def test_what_is_in_flight_is_never_forgotten() -> None:
    one = shadow(20)
    pins = [pin(one, chain(number, 8)) for number in range(4)]
    one.check()
    assert [held(one, chain(number, 8)) for number in range(4)] == [8] * 4
    assert one.room.pinned > one.room.capacity
    for each in pins:
        one.release(each, 1)
        one.check()
    assert sum(held(one, chain(number, 8)) for number in range(4)) == 19


def test_answers_take_room_and_age_like_prompts() -> None:
    one = shadow(20)
    served(one, chain(1, 10))
    served(one, chain(2, 2), generated=8 * BLOCK)
    assert held(one, chain(1, 10)) == 10
    served(one, chain(3, 8))
    assert (held(one, chain(1, 10)), held(one, chain(2, 2))) == (1, 2)


def test_a_shared_prefix_is_counted_once() -> None:
    one = shadow(100)
    system = chain(1, 10)
    first, second = pin(one, system + chain(2, 5)), pin(one, system + chain(3, 5))
    assert one.pinned == 20 * BLOCK + 2 * 16
    one.release(first, 1)
    one.check()
    assert one.pinned == 15 * BLOCK + 16
    one.release(second, 1)
    one.check()
    assert (one.pinned, one.idle) == (0, 20 * BLOCK), "what fills no block of the engine is free"


def test_a_block_that_is_not_full_is_free_at_once_and_takes_nobody_elses_room() -> None:
    one = shadow(10)
    served(one, chain(1, 5))
    for _ in range(20):
        one.release(one.pin([], 10, PER_TOKEN), 3)
        one.check()
    assert (one.idle, held(one, chain(1, 5))) == (5 * BLOCK, 5)
    one.release(one.pin([], 10, PER_TOKEN), 1 + 6)
    assert one.idle == 5 * BLOCK + 16, "the answer filled it"


def test_of_a_prompt_only_full_blocks_of_the_engine_are_held() -> None:
    one = ShadowCache(Endpoint("pod", "10.0.0.1:8000"), PrefixIndex(10**9), 10 * 1024, 1024)
    first = one.pin(chain(1, 30), 30 * BLOCK, PER_TOKEN)
    assert (held(one, chain(1, 30)), one.pinned) == (16, 2048)
    second = one.pin([*chain(1, 8), *chain(2, 24)], 32 * BLOCK, PER_TOKEN)
    assert one.pinned == 2048 + 2048, "it shares no whole block, so it reuses none"
    one.release(second, 1)
    one.release(first, 1)
    one.check()
    assert (held(one, chain(1, 30)), one.idle) == (16, 1024 + 2048)


def test_what_was_never_computed_is_not_remembered() -> None:
    one = shadow(100)
    served(one, chain(1, 10))
    one.abandon(pin(one, chain(1, 10) + chain(2, 5)))
    one.check()
    assert (held(one, chain(1, 10)), held(one, chain(1, 10) + chain(2, 5))) == (10, 10)
    assert one.pinned == 0


def test_what_another_request_still_computes_survives_one_that_is_abandoned() -> None:
    one = shadow(100)
    first, second = pin(one, chain(1, 10)), pin(one, [*chain(1, 10), *chain(2, 5)])
    one.abandon(first)
    one.check()
    assert held(one, chain(1, 10)) == 10
    one.release(second, 1)
    one.check()
    assert held(one, chain(1, 10)) == 10


def test_less_memory_forgets_the_oldest_and_more_memory_keeps_more() -> None:
    one = shadow(100)
    for number in range(4):
        served(one, chain(number, 20))
    one.resize(30 * BLOCK, 16)
    one.check()
    assert [held(one, chain(number, 20)) > 0 for number in range(4)] == [False, False, True, True]
    assert one.room.capacity == 30 * BLOCK
    one.resize(200 * BLOCK, 16)
    for number in range(4):
        served(one, chain(number, 20))
    assert [held(one, chain(number, 20)) for number in range(4)] == [20] * 4


def test_our_own_memory_is_bounded() -> None:
    one = shadow(10_000, limit=50)
    for number in range(20):
        served(one, chain(number, 20))
        assert one.index.holdings <= 50
    assert held(one, chain(19, 20)) == 20
    assert one.index.crowded == 18
    pins = [pin(one, chain(number, 40)) for number in (30, 31)]
    one.check()
    assert (held(one, chain(30, 40)), held(one, chain(31, 40)), one.index.spare) == (40, 10, 0)
    for each in pins:
        one.release(each, 1)
        one.check()


def test_forgetting_leaves_nothing() -> None:
    index = PrefixIndex(10**9)
    first, second = (ShadowCache(Endpoint(n, n), index, 10_000, 16) for n in "ab")
    served(first, chain(1, 10))
    pin(first, chain(2, 10))
    served(second, chain(1, 10))
    first.forget()
    assert (index.holdings, len(index), held(second, chain(1, 10))) == (10, 10, 10)
    second.forget()
    assert (index.holdings, len(index)) == (0, 0)


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([10, 40, 300]), st.sampled_from([60, 10**9]), st.sampled_from([4.0, 3.3]))
def test_books_balance_under_any_order_of_events(seed: int, blocks: int, limit: int, per_token: float) -> None:
    draw = random.Random(seed)
    one = shadow(blocks, limit)
    stems = [chain(number, 30) for number in range(4)]
    live: list[Pin] = []
    for _ in range(150):
        if draw.random() < 0.5 or not live:
            stem = draw.choice(stems)[: draw.randint(0, 30)]
            branch = draw.randrange(3)
            blocks_of = stem + [hash((*stem, branch, i)) for i in range(draw.randint(0, 6))]
            tokens = round(len(blocks_of) * SHORT / per_token) + draw.randint(0, BLOCK)
            live.append(one.pin(blocks_of, tokens, per_token))
        else:
            pinned = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.3:
                one.abandon(pinned)
            else:
                one.release(pinned, draw.randint(0, 100))
        if draw.random() < 0.05:
            one.resize(draw.choice([5, 40, 300]) * BLOCK, draw.choice([8, 16, 32]))
        one.check()
    for pinned in live:
        one.release(pinned, 1)
    one.check()
    assert one.pinned == 0


@settings(max_examples=60)
@given(st.integers(0, 2**32), st.sampled_from([6, 20, 200]))
def test_books_balance_where_clients_forge_hashes(seed: int, hashes: int) -> None:
    """Chains of a few hashes: each stands behind others too, and twice in one chain."""
    draw, index = random.Random(seed), PrefixIndex(10**9)
    caches = [ShadowCache(Endpoint(n, n), index, 40 * BLOCK, 16) for n in "abc"]
    live: list[tuple[ShadowCache, Pin]] = []
    for _ in range(150):
        if draw.random() < 0.5 or not live:
            cache, forged = draw.choice(caches), draw.choices(range(hashes), k=draw.randint(0, 12))
            assert cache.in_use(forged) <= len(forged) * BLOCK
            live.append((cache, pin(cache, forged)))
            for depth, mask in index.match(forged):
                assert depth <= len(forged)
                assert index.holders(mask)
        else:
            cache, pinned = live.pop(draw.randrange(len(live)))
            if draw.random() < 0.3:
                cache.abandon(pinned)
            else:
                cache.release(pinned, draw.randint(0, 100))
        for cache in caches:
            cache.check()
    for cache, pinned in live:
        cache.release(pinned, 1)
    assert [cache.pinned for cache in caches] == [0, 0, 0]
    for cache in caches:
        cache.forget()
    assert (index.holdings, len(index)) == (0, 0)
