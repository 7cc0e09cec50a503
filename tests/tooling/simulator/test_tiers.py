"""Tiers below the device: what they keep, what they forget, and what is best loaded from them."""

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tooling.simulator.tiers import CHUNK, Changed, Load, Lower, Tier, TierParameters

PROMPT = tuple(range(100, 110))


def kept(tier: Tier, chunks: tuple[int, ...] = PROMPT) -> list[int]:
    return [name for name in chunks if name in tier]


def test_it_holds_whole_chunks_and_forgets_what_was_used_longest_ago() -> None:
    tier = Tier(4 * CHUNK + CHUNK - 1)
    assert tier.room == 4
    assert tier.keep((1, 2), 0, 2) == [0, 1]
    assert tier.keep((3, 4), 0, 2) == [0, 1]
    assert tier.keep((1, 2), 0, 2) == [], "they were there, and are used again"
    assert tier.keep((5,), 0, 1) == [0]
    assert kept(tier, (1, 2, 3, 4, 5)) == [1, 2, 3, 5], "a tail goes before its head"


def test_of_a_prompt_that_is_larger_the_beginning_stays() -> None:
    tier = Tier(4 * CHUNK)
    tier.keep(PROMPT, 0, 10)
    assert kept(tier) == list(PROMPT[:4])


@given(st.integers(1, 6), st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.integers(0, 6)), max_size=30))
def test_it_is_bounded_and_what_it_tells_adds_up(room: int, uses: list[tuple[int, int, int]]) -> None:
    tier = Tier(room * CHUNK)
    tier.watch()
    reported: set[int] = set()
    for document, start, length in uses:
        chunks = tuple(range(20 * document, 20 * document + 20))
        tier.keep(chunks, start, start + length, "whose")
        for about, names, stored, removed in tier.changes():
            assert about == "whose"
            assert reported.isdisjoint(names[at] for at in stored)
            reported |= {names[at] for at in stored}
            assert reported.issuperset(removed)
            reported -= set(removed)
        assert len(tier) == len(reported) <= room
        assert all(name in tier for name in reported)
    assert tier.changes() == []


def test_what_is_computed_goes_to_l1_and_on_to_l2() -> None:
    l1, l2 = Tier(4 * CHUNK), Tier(100 * CHUNK)
    lower = Lower(l1, l2)
    lower.keep(PROMPT, 0, 3)
    lower.keep((1, 2, 3), 0, 3)
    assert kept(l1) == [100]
    assert kept(l2) == [100, 101, 102], "what L1 forgets is still there"
    alone = Lower(None, Tier(CHUNK))
    alone.keep(PROMPT, 0, 3)
    assert alone.l2 is not None
    assert kept(alone.l2) == [100]


def linear(tokens: int, seconds: float) -> Callable[[int], float]:
    return lambda there: seconds * (tokens - there)


def test_what_is_quicker_to_load_is_loaded() -> None:
    l1, l2 = Tier(100 * CHUNK), Tier(100 * CHUNK)
    lower = Lower(l1, l2, l1_speed=1000.0, l2_speed=100.0)
    l1.keep(PROMPT, 0, 2)
    l2.keep(PROMPT, 0, 4)
    tokens = 5 * CHUNK
    slow, middling, quick = linear(tokens, 0.1), linear(tokens, 0.005), linear(tokens, 0.0001)
    both = lower.best(PROMPT[:5], 0, slow)
    assert both == Load(4 * CHUNK, 2 * CHUNK, 2 * CHUNK, 2 * CHUNK / 100)
    assert lower.best(PROMPT[:5], 0, middling) == Load(2 * CHUNK, 2 * CHUNK, 0, 2 * CHUNK / 1000), "L1 alone"
    assert lower.best(PROMPT[:5], 0, quick) == Load(0), "computing is quicker"
    assert lower.best(PROMPT[:5], 3 * CHUNK + 16, slow)[:3] == (4 * CHUNK, 0, CHUNK - 16), "not what the device holds"
    assert lower.best(PROMPT[:5], 4 * CHUNK, slow) == Load(4 * CHUNK)
    waits = lower.best(PROMPT[:5], 0, middling, (2.0, 0.0))
    assert waits != lower.best(PROMPT[:5], 0, middling), "the way from L1 is taken"


def test_behind_a_chunk_that_nobody_has_nothing_counts() -> None:
    l1 = Tier(100 * CHUNK)
    l1.keep(PROMPT, 2, 6)
    lower = Lower(l1, None, l1_speed=1e9)
    assert lower.best(PROMPT, CHUNK, linear(10 * CHUNK, 1.0)) == Load(CHUNK)
    l1.keep(PROMPT, 0, 1)
    assert lower.best(PROMPT, 0, linear(10 * CHUNK, 1.0)).end == CHUNK


def test_nobody_is_reported_who_did_not_ask() -> None:
    tier = Tier(CHUNK)
    tier.keep(PROMPT, 0, 1)
    assert tier.changes() == []
    tier.watch()
    tier.keep((1,), 0, 1, "b")
    assert tier.changes() == [Changed("b", (1,), [0], [100])]


@pytest.mark.parametrize(
    ("wrong", "reported"),
    [
        ({"tokens": 255}, "tokens: 255, expected at least one chunk of 256"),
        ({"tokens": 1000, "speed": 0.0}, "speed: 0.0, expected more than 0"),
        ({"tokens": 1000, "speed": float("inf")}, "speed: inf, expected more than 0"),
    ],
)
def test_tiers_that_cannot_be_are_refused(wrong: dict[str, float], reported: str) -> None:
    with pytest.raises(ValueError, match=reported):
        TierParameters(**wrong)  # type: ignore[arg-type]
