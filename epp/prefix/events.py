"""vLLM's KV events off the wire: bytes in, events out. Pure; sockets are in `epp.prefix.subscriber`.

A batch is a msgpack array `[timestamp, [events], data_parallel_rank]`; an event is a map with its kind under `type`
(vLLM 0.26 and later) or an array with its kind first (before). Fields that are left out have their defaults. What we do
not use is not read, and what cannot be read costs itself alone: it is counted, the rest of its batch counts.
"""

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, Literal, TypeVar

import msgspec

Medium = Literal["device", "l1", "storage"]
MEDIA: Final[dict[str | None, Medium]] = {
    **dict.fromkeys((None, "", "GPU", "gpu"), "device"),
    **dict.fromkeys(("CPU", "cpu"), "l1"),
    **dict.fromkeys(("STORAGE", "storage"), "storage"),
}
"""The engines' words as they say them; others are looked up in lower case."""
WHOLE_PROMPT: Final = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache in which a prefix is reused as a whole. Others (sliding windows, mamba) forget its beginning."""
LOW: Final = (1 << 64) - 1
"""Block hashes are told apart by their low 64 bits."""

Hash = int | bytes


class BlockStored(msgspec.Struct, tag_field="type", gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: Sequence[int] | None = None
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None


class BlockRemoved(msgspec.Struct, tag_field="type", gc=False):
    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag_field="type", gc=False):
    pass


class _Stored(BlockStored, tag="BlockStored", array_like=True):
    pass


class _Removed(BlockRemoved, tag="BlockRemoved", array_like=True):
    pass


class _Cleared(AllBlocksCleared, tag="AllBlocksCleared", array_like=True):
    pass


Event = BlockStored | BlockRemoved | AllBlocksCleared
E = TypeVar("E")


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]
    rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[msgspec.Raw]
    rank: int | None = None


class Batch(msgspec.Struct, frozen=True, gc=False):
    """What one message said. `ts`: seconds since the epoch on the engine's clock."""

    ts: float
    events: Sequence[Event]
    rank: int = 0
    malformed: int = 0
    """Events that could not be read."""


class MalformedBatch(ValueError):
    """A message that is no batch at all."""


_batch: Final = msgspec.msgpack.Decoder(_Batch).decode
_array_batch: Final = msgspec.msgpack.Decoder(_ArrayBatch).decode
_raw_batch: Final = msgspec.msgpack.Decoder(_RawBatch).decode
_event: Final = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared).decode
_array_event: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode
_WRONG: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def decode(payload: bytes) -> Batch:
    """The batch of a message. Raises MalformedBatch if not even its frame can be read."""
    try:
        batch: _Batch | _ArrayBatch = _batch(payload)
    except _WRONG:
        try:
            batch = _array_batch(payload)
        except _WRONG:
            return _piecemeal(payload)
    return Batch(batch.ts, batch.events, batch.rank or 0)


def _piecemeal(payload: bytes) -> Batch:
    """The events one by one: some of them are broken, of an unknown kind, or in another form than the others."""
    try:
        batch = _raw_batch(payload)
    except _WRONG as error:
        raise MalformedBatch(str(error)) from None
    events: list[Event] = []
    for raw in batch.events:
        try:
            events.append(_event(raw))
        except _WRONG:
            with suppress(*_WRONG):
                events.append(_array_event(raw))
    return Batch(batch.ts, events, batch.rank or 0, len(batch.events) - len(events))


def key_of(hash_: Hash) -> int:
    """An engine's block hash as 64 bits, whichever of its forms it came in: a number, or bytes, of which vLLM's
    number is the last eight."""
    return hash_ & LOW if isinstance(hash_, int) else int.from_bytes(hash_[-8:], "big")


def keys_of(hashes: Sequence[Hash]) -> list[int]:
    """`key_of` each of them. Most come as numbers, and by the thousand."""
    return [each & LOW if type(each) is int else key_of(each) for each in hashes]


def medium_of(name: str | None) -> Medium | None:
    """The tier an engine's medium is; None for one we do not know."""
    return MEDIA.get(name) or MEDIA.get((name or "").lower())
