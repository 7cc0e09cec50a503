"""A prompt's bytes as a chain of 64-bit block hashes; equal prefixes have equal chains, whatever follows.

Each hash covers its block and, through its seed, everything before it: `h = xxh3_64(block, seed=h)`. Where a block
begins depends on its position alone: 256-byte blocks up to `LONG_FROM`, 1 KB blocks beyond, so a long prompt is cheap
to hash and to remember and still shares its beginning with a short one. Only full blocks count.

xxh3 is no cryptographic hash: a client who forges a collision gets a worse pick for it, never another's data, since
the engine compares tokens by its own hashes.
"""

from typing import Final

from xxhash import xxh3_64_intdigest

SHORT: Final = 256
"""Bytes per block up to `LONG_FROM`: 64 tokens of English text, four blocks of vLLM's default size."""
LONG: Final = 1024
"""Bytes per block beyond `LONG_FROM`."""
LONG_FROM: Final = 16 * 1024
"""Byte position from which blocks are long; a multiple of both sizes. At 256 KB a chain is 304 blocks, not 1,024."""
_SHORT_BLOCKS: Final = LONG_FROM // SHORT


def seed_of(model: str, salt: str) -> int:
    """Where a chain starts: prompts to different models, LoRA adapters (models by name) or salts share nothing."""
    return xxh3_64_intdigest(f"{len(model)}:{model}{salt}".encode("utf-8", "surrogatepass"))


def chain_of(prompt: bytes, seed: int, limit: int | None = None) -> list[int]:
    """Hashes of the full blocks within the first `limit` bytes (None = all), first block first. 45 us for 256 KB."""
    end = len(prompt) if limit is None else min(limit, len(prompt))
    digest, h = xxh3_64_intdigest, seed
    chain = []
    for i in range(0, min(end, LONG_FROM) - SHORT + 1, SHORT):
        h = digest(prompt[i : i + SHORT], h)
        chain.append(h)
    for i in range(LONG_FROM, end - LONG + 1, LONG):
        h = digest(prompt[i : i + LONG], h)
        chain.append(h)
    return chain


def bytes_at(depth: int) -> int:
    """Bytes that the first `depth` blocks cover."""
    if depth <= _SHORT_BLOCKS:
        return depth * SHORT
    return LONG_FROM + (depth - _SHORT_BLOCKS) * LONG


def depth_at(size: int) -> int:
    """Full blocks in the first `size` bytes; `depth_at(bytes_at(d)) == d`."""
    if size <= LONG_FROM:
        return size // SHORT
    return _SHORT_BLOCKS + (size - LONG_FROM) // LONG
