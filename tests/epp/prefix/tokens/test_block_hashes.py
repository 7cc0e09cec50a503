"""Chains of token blocks: equal prefixes share links, everything else does not."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.parsing.request import short_salt
from epp.prefix.tokens.block_hashes import chain_of_tokens, mixed

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=70)


@given(IDS, IDS, IDS, st.sampled_from([1, 4, 16]))
def test_chains_share_exactly_the_full_blocks_of_a_common_prefix(
    common: list[int], one: list[int], other: list[int], size: int
) -> None:
    a, b = common + one, common + other
    same = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    left, right = chain_of_tokens(a, size), chain_of_tokens(b, size)
    assert (len(left), len(right)) == (len(a) // size, len(b) // size)
    assert left[: same // size] == right[: same // size]
    assert not set(left[same // size :]) & set(right[same // size :])


def test_lists_and_arrays_of_ids_are_one() -> None:
    assert chain_of_tokens([1, 2, 3, 4], 2) == chain_of_tokens(array("I", [1, 2, 3, 4]), 2)


def test_adapters_salts_and_block_sizes_share_nothing() -> None:
    ids = list(range(32))
    chains = [
        chain_of_tokens(ids, 4),
        chain_of_tokens(ids, 8),
        chain_of_tokens(ids, 4, adapter="a"),
        chain_of_tokens(ids, 4, salt="a"),
        chain_of_tokens(ids, 4, adapter="a", salt="a"),
    ]
    links = [link for chain in chains for link in chain]
    assert len(set(links)) == len(links) == 4 * 8 + 4


def test_what_is_mixed_in_counts_by_its_parts() -> None:
    assert len({mixed(1, ["a"]), mixed(1, ["b"]), mixed(2, ["a"]), mixed(1, [["a", 0]]), mixed(1, ["a", "b"])}) == 5
    assert mixed(1, ["a"]) == mixed(1, ("a",))


@pytest.mark.parametrize("wrong", [-1, 2**32])
def test_what_is_no_token_id_is_refused(wrong: int) -> None:
    with pytest.raises(OverflowError):
        chain_of_tokens([wrong] * 16, 16)


def test_a_long_salt_meets_its_digest() -> None:
    ids, salt = list(range(32)), "s" * 1000
    assert chain_of_tokens(ids, 4, salt=salt) == chain_of_tokens(ids, 4, salt=short_salt(salt))
    assert mixed(1, [salt]) == mixed(1, [short_salt(salt)]) != mixed(1, [salt + "t"])
