"""Words of an engine about its KV blocks, for tests: prompts of 4-token blocks whose hashes are as good as any."""

from collections.abc import Sequence
from typing import Any

import msgspec

from epp.prefix.events.engine_cache import EngineCache
from epp.prefix.tokens.block_hashes import chain_of_tokens

SIZE = 4


def names_of(ids: Sequence[int]) -> list[int]:
    """The engine's hashes of a prompt's blocks; they have nothing in common with our links."""
    return [hash(("engine", *ids[: i + SIZE])) & (2**64 - 1) for i in range(0, len(ids) - SIZE + 1, SIZE)]


def block_stored(ids: Sequence[int], names: Sequence[int], start: int, size: int) -> dict[str, Any]:
    """BlockStored as vLLM 0.32 has it on the wire: of a prompt whose blocks of `size` tokens have these `names`, those
    from `start` on."""
    return {
        "type": "BlockStored",
        "block_hashes": list(names[start:]),
        "parent_block_hash": names[start - 1] if start else None,
        "token_ids": list(ids[start * size : len(names) * size]),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None] * (len(names) - start),
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


def stored(ids: Sequence[int], start: int = 0, **fields: Any) -> dict[str, Any]:
    """BlockStored of a prompt's blocks from `start` on; `fields` are otherwise."""
    return block_stored(ids, names_of(ids), start, SIZE) | fields


def removed(ids: Sequence[int], block: int) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": [names_of(ids)[block]], "medium": "GPU", "group_idx": 0}


def batch(*events: Any) -> bytes:
    return msgspec.msgpack.encode([1.0, events, 0])


def depth(cache: EngineCache, ids: Sequence[int]) -> int:
    """Blocks of a prompt that an engine is known to hold on its device."""
    device = cache.tiers.get("device")
    return device.index.depth(chain_of_tokens(ids, SIZE), device.bit) if device is not None else 0
