"""KV events off the wire: both forms, every default, and whatever else may come."""

import tracemalloc
from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import Endpoint
from epp.prefix.events.engine_cache import KvEventIndex
from epp.prefix.events.sources import KvEvents
from epp.prefix.events.wire import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    MalformedBatch,
    decode,
    key_of,
    medium_of,
    parts,
    rank_of,
)

pack = msgspec.msgpack.encode


def as_vllm_0_33(**fields: Any) -> dict[str, Any]:
    event = {
        "type": "BlockStored",
        "block_hashes": [11415969441711745966, b"\x01" * 32],
        "parent_block_hash": None,
        "token_ids": [456, 645, 7, 8],
        "block_size": 2,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        "extra_keys": [None, [["image", 1], "salt"]],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
        "kv_cache_spec_sliding_window": None,
        "locality": "LOCAL",
        "session_id": "s",
        "lookahead_token_ids": [[7], [9]],
    }
    return event | fields


def test_arrays_of_more_fields_than_are_read() -> None:
    """Where arrays were, a sliding window stood where maps may have a salt."""
    fields = [
        v for k, v in as_vllm_0_33().items() if k not in ("type", "locality", "session_id", "lookahead_token_ids")
    ]
    (event,) = decode(pack([1.0, [["BlockStored", *fields[:-1], 128, "LOCAL"]], 0])).events
    assert isinstance(event, BlockStored)
    assert (event.kv_cache_spec_kind, event.token_ids) == ("full_attention", [456, 645, 7, 8])


def test_maps() -> None:
    batch = decode(
        pack(
            [
                1795170129.3,
                [
                    as_vllm_0_33(),
                    {"type": "BlockRemoved", "block_hashes": [5], "medium": "CPU", "group_idx": 1},
                    {"type": "AllBlocksCleared"},
                ],
                3,
            ]
        )
    )
    stored, removed, cleared = batch.events
    assert (batch.ts, batch.rank, batch.malformed) == (1795170129.3, 3, 0)
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size, stored.medium, stored.group_idx) == ([456, 645, 7, 8], 2, "GPU", 0)
    assert stored.extra_keys == [None, [["image", 1], "salt"]]
    assert isinstance(removed, BlockRemoved)
    assert (removed.block_hashes, removed.medium, removed.group_idx) == ([5], "CPU", 1)
    assert isinstance(cleared, AllBlocksCleared)


@pytest.mark.parametrize("longer", [0, 1, 5, 12])
def test_arrays_of_every_age_with_their_last_fields_left_out_or_unknown(longer: int) -> None:
    more = [None, "GPU", "adapter", [["adapter"]], 0, "full_attention", None, None, None, None, 1, 2]
    batch = decode(pack([7, [["BlockStored", [1], None, [1, 2], 2, *more[:longer]], ["BlockRemoved", [1]]]]))
    stored, removed = batch.events
    assert isinstance(stored, BlockStored)
    assert isinstance(removed, BlockRemoved)
    assert (stored.block_hashes, stored.token_ids, stored.block_size) == ([1], [1, 2], 2)
    assert stored.lora_name == ("adapter" if longer > 2 else None)
    assert (batch.rank, batch.malformed) == (0, 0)


def test_a_broken_event_costs_itself_alone() -> None:
    events: list[Any] = [
        as_vllm_0_33(),
        as_vllm_0_33(token_ids="text"),
        {"type": "BlockMoved", "block_hashes": [1]},
        {"block_hashes": [1]},
        ["BlockRemoved", [1]],
        ["BlockRemoved"],
        None,
        7,
        {"type": "AllBlocksCleared"},
    ]
    batch = decode(pack([1.0, events, 0]))
    assert len(batch.events) == 3
    assert batch.malformed == 6


@pytest.mark.parametrize("payload", [b"", b"\xc1", pack(None), pack([]), pack([1.0]), pack({"ts": 1}), pack(["a", []])])
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedBatch):
        decode(payload)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(payload: bytes) -> None:
    try:
        batch = decode(payload)
    except MalformedBatch:
        return
    assert batch.malformed + len(batch.events) <= len(payload), "each event takes a byte"


@given(
    st.integers(0, 400),
    st.binary(min_size=1, max_size=6),
    st.sampled_from([as_vllm_0_33(), ["BlockRemoved", [1, 2], "GPU"], {"type": "AllBlocksCleared"}]),
)
def test_bytes_changed_on_the_way_are_no_more_than_a_broken_batch(at: int, patch: bytes, event: Any) -> None:
    payload = bytearray(pack([1.0, [event, event], 0]))
    payload[at : at + len(patch)] = patch
    try:
        batch = decode(bytes(payload))
    except MalformedBatch:
        return
    assert all(isinstance(each, BlockStored | BlockRemoved | AllBlocksCleared) for each in batch.events)


def test_hashes_are_one_in_all_their_forms() -> None:
    whole = bytes(range(32))
    number = int.from_bytes(whole, "big") & (2**64 - 1)
    assert key_of(whole) == key_of(number) == key_of(number - 2**64) == number
    assert key_of(b"\x01") == 1


@pytest.mark.parametrize(
    ("name", "tier"),
    [
        ("GPU", "device"),
        (None, "device"),
        ("cpu", "l1"),
        ("CPU_PINNED", "l1"),
        ("Storage", "storage"),
        ("DISK", "storage"),
        ("External", "storage"),
        ("TAPE", None),
    ],
)
def test_media(name: str | None, tier: str | None) -> None:
    assert medium_of(name) == tier


def whole_step(tokens: int, size: int = 16) -> bytes:
    """What vLLM 0.32 says of a step that clears a cache, evicts and computes so many tokens of one prompt, with every
    token id and hash as long as they get, and a cache salt."""
    blocks = tokens // size
    hashes = [bytes([255]) * 24 + i.to_bytes(8, "big") for i in range(blocks)]
    gone = [{"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU", "group_idx": 0} for each in hashes]
    stored = as_vllm_0_33(
        block_hashes=hashes,
        parent_block_hash=None,
        token_ids=[2**17 + i for i in range(tokens)],
        block_size=size,
        extra_keys=[["salt" * 16], *[None] * (blocks - 1)],
    )
    return pack([1.0, [{"type": "AllBlocksCleared"}, *gone, stored], 0])


def test_what_an_engine_says_of_a_step_is_well_below_the_limit() -> None:
    assert len(whole_step(65_536)) < KvEvents().max_message_bytes // 2
    assert decode(whole_step(65_536)).malformed == 0


def blocks_of(batch: Batch) -> int:
    """About how much there is to do for it."""
    return len(batch.events) + batch.malformed + sum(len(getattr(each, "block_hashes", ())) for each in batch.events)


HOSTILE = {
    "a long prompt": whole_step(131_072),
    "blocks of one token": pack([1.0, [["BlockStored", list(range(100)) * 4000, None, [1] * 400_000, 1]]]),
    "rubbish": pack([1.0, [0] * 30_000]),
    "events without a kind": pack([1.0, [{}] * 30_000]),
    "removals in one event": pack([1.0, [["BlockRemoved", list(range(400_000))]]]),
    "removals one by one": pack([1.0, [["BlockRemoved", [i]] for i in range(30_000)]]),
    "a cache cleared again and again": pack([1.0, [["AllBlocksCleared"]] * 2000]),
    "both forms": pack([1.0, [["BlockRemoved", [1]], {"type": "BlockRemoved", "block_hashes": [1]}] * 10_000]),
    "fewer tokens than blocks": pack([1.0, [["BlockStored", list(range(400_000)), None, [1] * 9, 1]]]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_message_comes_in_parts_of_bounded_work(name: str) -> None:
    batches = list(parts(HOSTILE[name]))
    assert len(HOSTILE[name]) <= KvEvents().max_message_bytes
    # An event that nobody takes over is told as it is.
    assert max(map(blocks_of, batches)) <= 2 * 512 + 2 or name == "fewer tokens than blocks"
    assert sum(blocks_of(each) for each in batches) >= 2000
    assert len(batches) > 1 or name == "fewer tokens than blocks"
    assert sum(isinstance(each, AllBlocksCleared) for each in batches[0].events) <= 1


@pytest.mark.parametrize("name", HOSTILE)
def test_parts_say_what_the_whole_says(name: str) -> None:
    whole, piecemeal = KvEventIndex(10**6), KvEventIndex(10**6)
    where = Endpoint("a", "10.0.0.1:8000")
    whole.state_of(where).engine(0).apply(decode(HOSTILE[name]))
    for part in parts(HOSTILE[name]):
        piecemeal.state_of(where).engine(0).apply(part)
    assert piecemeal.counts == whole.counts
    for medium, tier in whole.state_of(where).engine(0).tiers.items():
        assert piecemeal.state_of(where).engine(0).tiers[medium].rows.keys() == tier.rows.keys()
        assert list(piecemeal.indexes[medium]._masks) == list(whole.indexes[medium]._masks)


@given(st.binary(max_size=200))
def test_any_bytes_come_in_parts_or_are_refused(payload: bytes) -> None:
    with suppress(MalformedBatch):
        assert next(parts(payload)).events == decode(payload).events
    with suppress(MalformedBatch):
        assert isinstance(rank_of(payload), int)


def test_more_events_than_any_step_has_are_refused_before_they_are_read() -> None:
    payload = pack([1.0, [0] * 1_500_000])
    tracemalloc.start()
    try:
        with pytest.raises(MalformedBatch, match="length <= 32768"):
            list(parts(payload))
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("rank", [1.5, "1", [1], 1e300])
def test_a_rank_that_is_no_number_is_refused(rank: object) -> None:
    with pytest.raises(MalformedBatch):
        rank_of(pack([1.0, [], rank]))
