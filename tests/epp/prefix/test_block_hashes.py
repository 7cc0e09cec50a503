"""Chains: equal prefixes share them, everything else does not; boundaries depend on position alone."""

import random

import pytest

from epp.prefix.index import LONG, LONG_FROM, SHORT, bytes_at, chain_of, depth_at, seed_of

SEED = seed_of("llama", "")


def text(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


def common(first: list[int], second: list[int]) -> int:
    return next(
        (i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second))
    )


@pytest.mark.parametrize("shared", [0, 255, 256, 5000, LONG_FROM - 1, LONG_FROM, LONG_FROM + 1023, 60_000, 262_144])
def test_prompts_share_the_full_blocks_of_their_common_prefix(shared: int) -> None:
    head = text(shared)
    first, second = chain_of(head + b"a" * 9000, SEED), chain_of(head + b"b" * 70_000, SEED)
    assert common(first, second) == depth_at(shared)


def test_a_change_anywhere_changes_every_block_from_there_on() -> None:
    prompt = text(40_000)
    changed = bytearray(prompt)
    changed[20_000] ^= 1
    first, second = chain_of(prompt, SEED), chain_of(bytes(changed), SEED)
    assert common(first, second) == depth_at(20_000)
    assert not set(first[depth_at(20_000) :]) & set(second)


@pytest.mark.parametrize(
    ("model", "salt"), [("llama", "s"), ("lora-a", ""), ("llam", "a"), ("", "llama"), ("\udc80", "")]
)
def test_models_adapters_and_salts_share_nothing(model: str, salt: str) -> None:
    prompt = text(2000)
    assert not set(chain_of(prompt, SEED)) & set(chain_of(prompt, seed_of(model, salt)))


def test_only_full_blocks_count_and_long_prompts_have_few() -> None:
    assert chain_of(b"", SEED) == chain_of(b"x" * (SHORT - 1), SEED) == []
    assert len(chain_of(b"x" * LONG_FROM, SEED)) == LONG_FROM // SHORT
    assert len(chain_of(b"x" * (LONG_FROM + LONG - 1), SEED)) == LONG_FROM // SHORT
    assert len(chain_of(b"x" * 262_144, SEED)) == 304


def test_a_limit_cuts_the_chain_and_changes_nothing_before() -> None:
    prompt = text(50_000)
    for limit in (0, 255, 256, 17_000, 17_408, 10**9):
        assert chain_of(prompt, SEED, limit) == chain_of(prompt, SEED)[: depth_at(limit)]


def test_depth_and_bytes_are_each_others_inverse() -> None:
    for depth in range(400):
        assert depth_at(bytes_at(depth)) == depth
        assert depth_at(bytes_at(depth + 1) - 1) == depth
