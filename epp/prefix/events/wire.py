"""KV events of vLLM and SGLang off the wire: bytes in, events out. Pure; sockets are in `epp.prefix.events.subscriber`.

A batch is a msgpack array `[timestamp, [events], data_parallel_rank]`; an event is a map with its kind under `type`
(vLLM 0.26 and later, SGLang 0.5.23) or an array with its kind first (before). Fields that are left out have their
defaults. What we do not use is not read, and what cannot be read costs itself alone: it is counted, the rest of its
batch counts.
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final, Literal, TypeVar

import msgspec

Medium = Literal["device", "l1", "storage"]
MEDIA: Final[dict[str | None, Medium]] = {
    **dict.fromkeys((None, "", "GPU", "gpu"), "device"),
    **dict.fromkeys(("CPU", "cpu", "CPU_PINNED", "cpu_pinned"), "l1"),
    **dict.fromkeys(("STORAGE", "storage", "DISK", "disk", "EXTERNAL", "external"), "storage"),
}
"""The engines' words as they say them (vLLM 0.33, SGLang 0.5.23); others are looked up in lower case."""
WHOLE_PROMPT: Final = frozenset({"", "full_attention", "mla_attention", "sink_full_attention"})
"""Kinds of KV cache in which a prefix is reused as a whole. Others (sliding windows, mamba) forget its beginning."""
LOW: Final = (1 << 64) - 1
"""Block hashes are distinguished by their low 64 bits."""

AT_ONCE: Final = 8 << 10
"""Bytes of a message that is not worth to be taken over in `parts`, whatever is in it."""
_WHOLE: Final = 128 << 10
"""Bytes of a message that is read at once, before it is cut into parts; of a larger one, event by event."""
_PART: Final = 512
"""Blocks and events of a part, at some microseconds each to take over."""
MOST_EVENTS: Final = 1 << 15
"""Events of a message. A step of an engine evicts no more blocks than it has tokens for new ones: some thousand."""
_MOST_TOKENS: Final = 1 << 19
"""Tokens of an event."""

Hash = int | bytes
Tokens = Annotated[Sequence[int], msgspec.Meta(max_length=_MOST_TOKENS)]


class BlockStored(msgspec.Struct, tag_field="type", gc=False):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None = None
    token_ids: Tokens | None = None
    block_size: int = 0
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    cache_salt: Any = None
    """SGLang's, a text; vLLM has it among `extra_keys`. In the array form something else stands here."""


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
    events: Annotated[list[BlockStored | BlockRemoved | AllBlocksCleared], msgspec.Meta(max_length=MOST_EVENTS)]
    rank: int | None = None


class _ArrayBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[_Stored | _Removed | _Cleared], msgspec.Meta(max_length=MOST_EVENTS)]
    rank: int | None = None


class _RawBatch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MOST_EVENTS)]
    rank: int | None = None


class _Frame(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: msgspec.Raw
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
_frame: Final = msgspec.msgpack.Decoder(_Frame).decode
_raw_batch: Final = msgspec.msgpack.Decoder(_RawBatch).decode
_event: Final = msgspec.msgpack.Decoder(BlockStored | BlockRemoved | AllBlocksCleared).decode
_array_event: Final = msgspec.msgpack.Decoder(_Stored | _Removed | _Cleared).decode
_MAPS: Final = (0xDE, 0xDF)
"""First bytes of a msgpack map of more than 15 fields."""
_WRONG: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, OverflowError)


def decode(payload: bytes) -> Batch:
    """The batch of a message. Raises MalformedBatch if not even its frame can be read."""
    if (batch := _typed(payload)) is not None:
        return batch
    frame = _framed(payload)
    events = [event for raw in frame.events if (event := _one(raw)) is not None]
    return Batch(frame.ts, events, frame.rank or 0, len(frame.events) - len(events))


def parts(payload: bytes) -> Iterator[Batch]:
    """The batch of a message in parts, in order: each takes some milliseconds to read and take over, however large or
    broken the message is. Events of more than a part are cut, which says the same in more words.

    Raises MalformedBatch, before the first part, if not even its frame can be read.
    """
    batch = _typed(payload) if len(payload) <= _WHOLE else None
    whole: Batch | _RawBatch
    events: Iterator[Event | None]
    if batch is not None:
        whole, events = batch, iter(batch.events)
    else:
        whole = raw = _framed(payload)
        events = map(_one, raw.events)
    taken: list[Event] = []
    weight = malformed = 0
    for event in events:
        weight += 1
        if event is None:
            malformed += 1
        elif isinstance(event, AllBlocksCleared):  # it costs as much as all that is held
            taken.append(event)
            weight = _PART
        else:
            for piece in _pieces(event):
                if weight >= _PART:
                    yield Batch(whole.ts, taken, whole.rank or 0, malformed)
                    taken, weight, malformed = [], 0, 0
                taken.append(piece)
                weight += len(piece.block_hashes)
        if weight >= _PART:
            yield Batch(whole.ts, taken, whole.rank or 0, malformed)
            taken, weight, malformed = [], 0, 0
    yield Batch(whole.ts, taken, whole.rank or 0, malformed)


def rank_of(payload: bytes) -> int:
    """The data-parallel rank a message claims to be of, whatever else it says. Raises MalformedBatch."""
    try:
        return _frame(payload).rank or 0
    except _WRONG as error:
        raise MalformedBatch(str(error)) from None


def _typed(payload: bytes) -> Batch | None:
    """The batch if all of its events can be read, and in one form."""
    try:
        batch: _Batch | _ArrayBatch = _batch(payload)
    except _WRONG:
        try:
            batch = _array_batch(payload)
        except _WRONG:
            return None
    return Batch(batch.ts, batch.events, batch.rank or 0)


def _framed(payload: bytes) -> _RawBatch:
    """A batch whose events are not read yet."""
    try:
        return _raw_batch(payload)
    except _WRONG as error:
        raise MalformedBatch(str(error)) from None


def _one(raw: msgspec.Raw) -> Event | None:
    """An event by itself; None: it is broken, or of an unknown kind."""
    is_map = (first := bytes(memoryview(raw)[:1])[0]) & 0xF0 == 0x80 or first in _MAPS
    try:
        event: Event = _event(raw) if is_map else _array_event(raw)
    except _WRONG:
        return None
    return event


def _pieces(event: BlockStored | BlockRemoved) -> Iterator[BlockStored | BlockRemoved]:
    """An event as several of at most `_PART` blocks each, which say the same one after the other."""
    hashes = event.block_hashes
    if len(hashes) <= _PART:
        yield event
        return
    if isinstance(event, BlockRemoved):
        for at in range(0, len(hashes), _PART):
            yield BlockRemoved(hashes[at : at + _PART], event.medium, event.group_idx)
        return
    ids, size, keys = event.token_ids or (), event.block_size, event.extra_keys
    if ids and not 0 < size * len(hashes) <= len(ids):  # it is not taken over
        yield event
        return
    for at in range(0, len(hashes), _PART):
        end = at + _PART
        yield BlockStored(
            hashes[at:end],
            hashes[at - 1] if at else event.parent_block_hash,
            ids[size * at : size * end],
            size,
            event.lora_id,
            event.medium,
            event.lora_name,
            keys[at:end] if keys is not None else None,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.cache_salt,
        )


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
