from array import array
from random import Random

import pytest

from epp.parsing.request import short_salt
from epp.prefix.lmcache.chunk_keys import chunks_of, low, salted

TOKENS = (lambda chance: [chance.randrange(4096) for _ in range(70)])(Random(1))
KNOWN = {
    "blake3": (
        "cddd34b483f4d0f7884688b1c639f2607945368054863a48b6869766eda0a2da",
        "84cdf75ba3dff2ff01f63469ff2361ea3609e23530336ec240c9a6e65fb81adc",
    ),
    "sha256_cbor": (
        "8c37d64fb580702a8ad3af68b5ed92c671f75d85b990f2c8b2e93e0491be30de",
        "704412f07257a331a67473d0d10eb216538d614e0d95a93f37380c92a0215a98",
    ),
}
"""Of TOKENS in chunks of 32, by LMCache 0.5.6's own TokenHasher."""


@pytest.mark.parametrize("algorithm", ["blake3", "sha256_cbor"])
def test_chunks_are_named_as_lmcache_names_them(algorithm: str) -> None:
    wanted = [low(bytes.fromhex(name)) for name in KNOWN[algorithm]]
    assert chunks_of(TOKENS, 32, algorithm) == wanted  # type: ignore[arg-type]
    ids = array("I", TOKENS)
    assert chunks_of(ids, 32, algorithm) == wanted  # type: ignore[arg-type]
    assert ids.tolist() == TOKENS


def test_a_name_covers_all_before_it_and_nothing_behind() -> None:
    chain = chunks_of(TOKENS, 16, "sha256_cbor")
    assert chunks_of([*TOKENS[:40], 1, 2, 3], 16, "sha256_cbor") == chain[:2]
    assert set(chunks_of([0, *TOKENS[1:]], 16, "sha256_cbor")).isdisjoint(chain)
    assert chunks_of(TOKENS[:15], 16, "sha256_cbor") == []


def test_a_salt_makes_other_names() -> None:
    name = chunks_of(TOKENS, 32, "blake3")[0]
    assert salted(name, "") == name
    assert len({name, salted(name, "a"), salted(name, "b")}) == 3
    long = "s" * 1000
    assert salted(name, long) == salted(name, short_salt(long)) != salted(name, long + "t")


@pytest.mark.parametrize("token", [-1, 1 << 32, "1"])
def test_what_is_no_token_id_is_refused(token: object) -> None:
    with pytest.raises((OverflowError, TypeError)):
        chunks_of([token] * 4, 4, "blake3")  # type: ignore[list-item]
