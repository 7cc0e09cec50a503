"""KV events off the wire: both forms, every default, and whatever else may come."""

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.prefix.events import AllBlocksCleared, BlockRemoved, BlockStored, MalformedBatch, decode, key_of, medium_of

pack = msgspec.msgpack.encode


def as_vllm_0_32(**fields: Any) -> dict[str, Any]:
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
    }
    return event | fields


def test_maps() -> None:
    batch = decode(
        pack(
            [
                1795170129.3,
                [
                    as_vllm_0_32(),
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
        as_vllm_0_32(),
        as_vllm_0_32(token_ids="text"),
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
    with suppress(MalformedBatch):
        decode(payload)


@given(
    st.integers(0, 400),
    st.binary(min_size=1, max_size=6),
    st.sampled_from([as_vllm_0_32(), ["BlockRemoved", [1, 2], "GPU"], {"type": "AllBlocksCleared"}]),
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
    ("name", "tier"), [("GPU", "device"), (None, "device"), ("cpu", "l1"), ("Storage", "storage"), ("TAPE", None)]
)
def test_media(name: str | None, tier: str | None) -> None:
    assert medium_of(name) == tier
