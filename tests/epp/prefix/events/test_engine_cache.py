"""What an engine says against what prompts then find: keys, tiers, groups, order, and words that make no sense."""

import random
import tracemalloc
from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from epp.plugin import Endpoint
from epp.prefix.events.engine_cache import EngineCache, KvEventIndex
from epp.prefix.events.wire import (
    AllBlocksCleared,
    Batch,
    BlockRemoved,
    BlockStored,
    Event,
    MalformedBatch,
    Medium,
    decode,
)
from epp.prefix.tokens.block_hashes import chain_of_tokens, mixed, root_of
from tooling.simulator.tokenizer import hash_chain, pack

SIZE = 4
IDS = list(range(1000, 1032))
NAMES = [10 * i + 7 for i in range(8)]


def stored(start: int = 0, end: int = 8, **fields: Any) -> BlockStored:
    """Blocks `start` to `end` of IDS, as an engine says it."""
    given: dict[str, Any] = {
        "block_hashes": NAMES[start:end],
        "parent_block_hash": NAMES[start - 1] if start else None,
        "token_ids": IDS[start * SIZE : end * SIZE],
        "block_size": SIZE,
        "medium": "GPU",
        "extra_keys": [None] * (end - start),
    }
    return BlockStored(**given | fields)


def removed(*blocks: int, **fields: Any) -> BlockRemoved:
    return BlockRemoved([NAMES[block] for block in blocks], **{"medium": "GPU"} | fields)


class Engine:
    def __init__(self, limit: int = 1000) -> None:
        self.kv_index = KvEventIndex(limit)
        self.cache = self.kv_index.state_of(Endpoint("a", "10.0.0.1:8000")).engine(0)

    @property
    def size(self) -> int:
        return self.kv_index.state_of(self.cache.endpoint).size

    def say(self, *events: Event) -> "Engine":
        self.cache.apply(Batch(1.0, events))
        for tier in self.cache.tiers.values():
            tier.check()
        return self

    def depth(self, medium: Medium = "device", ids: Sequence[int] = IDS, **key: Any) -> int:
        """Blocks of a prompt it is known to hold in a tier."""
        tier = self.cache.tiers.get(medium)
        if tier is None:
            return 0
        return tier.index.depth(chain_of_tokens(ids, tier.size or 1, **key), tier.bit)


def test_a_prompt_finds_what_was_stored_and_not_removed() -> None:
    engine = Engine().say(stored(0, 3), stored(3, 8))
    assert (engine.depth(), engine.size) == (8, SIZE)
    assert engine.depth(ids=[*IDS[:12], 1, 2, 3, 4]) == 3
    assert engine.say(removed(7), removed(6, 5)).depth() == 5


def test_hashes_may_be_bytes_of_which_only_the_last_eight_count() -> None:
    names: list[int | bytes] = [b"x" * 24 + name.to_bytes(8, "big") for name in NAMES]
    engine = Engine().say(stored(0, 3, block_hashes=names[:3]), stored(3, 8))
    assert engine.say(BlockRemoved(names[7:], "GPU")).depth() == 7


def test_copies_are_counted() -> None:
    engine = Engine().say(stored(), stored(), removed(7))
    assert engine.depth() == 8
    assert engine.say(removed(7)).depth() == 7


def test_salt_and_adapter_are_part_of_a_prompt() -> None:
    salted = stored(extra_keys=[["tenant"], *[None] * 7])
    engine = Engine().say(salted)
    assert (engine.depth(salt="tenant"), engine.depth(), engine.depth(salt="other")) == (8, 0, 0)
    extras: list[Any] = [["lora", "tenant"], *[["lora"]] * 7]
    engine = Engine().say(stored(lora_name="lora", extra_keys=extras))
    assert (engine.depth(adapter="lora", salt="tenant"), engine.depth(adapter="lora"), engine.depth()) == (8, 0, 0)
    assert engine.kv_index.adapters == {"lora": 1}
    assert Engine().say(stored(lora_name="lora", extra_keys=None)).depth(adapter="lora") == 8


def test_the_salt_of_sglang_is_that_of_the_chain() -> None:
    for parts in ([(0, 8)], [(0, 1), (1, 8)]):
        said = [stored(*part, cache_salt="tenant", extra_keys=None) for part in parts]
        engine = Engine().say(*said)
        assert (engine.depth(salt="tenant"), engine.depth(), engine.depth(salt="other")) == (8, 0, 0)
    assert Engine().say(stored(cache_salt=["no", "salt"])).depth() == 8


def test_an_image_counts_where_it_stands() -> None:
    extras: list[Any] = [None, None, [["image", 3]], [["image", -1]], *[None] * 4]
    engine = Engine().say(stored(extra_keys=extras))
    assert engine.depth() == 2
    link, chain = root_of(SIZE, ""), []
    for i in range(8):
        link = xxh3_64_intdigest(pack(IDS[i * SIZE : (i + 1) * SIZE]), link)
        link = mixed(link, extras[i]) if extras[i] else link
        chain.append(link)
    device = engine.cache.tiers["device"]
    assert device.index.depth(chain, device.bit) == 8


def test_tiers_are_apart_each_with_its_own_block_size() -> None:
    l1 = stored(block_hashes=[91, 92], block_size=16, medium="cpu", extra_keys=None)
    engine = Engine().say(stored(0, 2), l1, stored(0, 3, medium="STORAGE"))
    assert [engine.depth(medium) for medium in ("device", "l1", "storage")] == [2, 2, 3]
    engine.say(BlockRemoved([92], "CPU"), removed(0, 1, 2, medium="storage"))
    assert [engine.depth(medium) for medium in ("device", "l1", "storage")] == [2, 1, 0]


def test_clearing_is_of_the_device() -> None:
    engine = Engine().say(stored(), stored(medium="CPU"), AllBlocksCleared())
    assert (engine.depth(), engine.depth("l1")) == (0, 8)
    assert engine.say(stored(0, 2)).depth() == 2
    assert engine.kv_index.counts["cleared"] == 1


def test_stores_without_tokens_are_known_by_their_hashes() -> None:
    engine = Engine().say(
        stored(), stored(0, 4, token_ids=[], medium="CPU"), stored(4, 6, token_ids=None, medium="CPU")
    )
    assert engine.depth("l1") == 6
    engine.say(removed(*range(7, -1, -1)), stored(0, 1, token_ids=None, medium="CPU"), removed(0, medium="CPU"))
    assert (engine.depth(), engine.depth("l1")) == (0, 6)
    assert engine.say(stored(6, 8, token_ids=None, medium="CPU")).depth("l1") == 6
    assert engine.kv_index.counts["unresolved"] == 2


def test_children_may_come_first() -> None:
    engine = Engine().say(stored(6, 8), stored(3, 6))
    assert engine.depth() == 0
    assert engine.say(stored(0, 3)).depth() == 8


def test_a_child_that_came_first_and_went_is_not_held() -> None:
    engine = Engine().say(stored(4, 6), stored(6, 8), removed(7), removed(5), stored(0, 4))
    assert engine.depth() == 5


def early(name: int, parent: int, **fields: Any) -> Batch:
    """A store of one block that builds upon one nobody knows."""
    return Batch(1.0, [stored(1, 2, block_hashes=[name], parent_block_hash=parent, **fields)])


Attack = Callable[[int], Batch]


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(lambda i: early(10_000 + i, 20_000 + i), id="other blocks"),
        pytest.param(lambda i: early(1, 2), id="one block"),
        pytest.param(lambda i: early(10_000 + i, 2), id="one parent"),
        pytest.param(lambda i: early(1, 2, token_ids=[70_000 + i] * 4096), id="more tokens than the block has"),
        pytest.param(
            lambda i: early(10_000 + i, 2, token_ids=[70_000 + i] * 4096, block_size=4096), id="blocks of many tokens"
        ),
        pytest.param(lambda i: early(i, 2, extra_keys=[[bytes(20_000)]]), id="blocks with large extra keys"),
        pytest.param(lambda i: early(i, 2, extra_keys=[None] * 5000), id="more extra keys than blocks"),
        pytest.param(lambda i: early(i, 2, lora_name=str(i) * 9000), id="long adapter names"),
        pytest.param(lambda i: early(i, 2, medium=["GPU", "cpu", "STORAGE"][i % 3]), id="all tiers"),
    ],
)
def test_what_waits_for_a_beginning_is_bounded_whatever_it_is(attack: Attack) -> None:
    """What an engine may say again and again takes some megabytes at most, and what is dropped is counted."""
    engine = Engine(10_000)
    engine.cache.apply(attack(0))
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for i in range(4000):
            engine.cache.apply(attack(i))
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    kv_index = engine.kv_index
    assert grown < 6 << 20
    assert kv_index.waiting <= 3 * 1024
    assert kv_index.waiting + kv_index.counts["unresolved"] + kv_index.counts["malformed"] == 4001
    assert 0.3 * grown - 200_000 < kv_index.bytes < 3 * grown + 200_000
    engine.cache.clear(emptied=False)
    assert (kv_index.waiting, kv_index.bytes) == (0, KvEventIndex(1).bytes)


def test_sixty_thousand_stores_of_one_block_are_reported_as_what_they_are() -> None:
    engine = Engine(10_000)
    for _ in range(60_000):
        engine.cache.apply(early(1, 2))
    assert (engine.kv_index.waiting, engine.kv_index.counts["unresolved"]) == (1024, 60_000 - 1024)
    engine.say(BlockRemoved([1], "GPU"))
    assert (engine.kv_index.waiting, engine.kv_index.bytes) == (0, KvEventIndex(1).bytes)


def test_what_waits_of_one_endpoint_does_not_push_out_what_waits_of_another() -> None:
    kv_index = KvEventIndex(1000)
    good, bad = (kv_index.state_of(Endpoint(name, f"10.0.0.{name}:8000")).engine(0) for name in "12")
    good.apply(Batch(1.0, [stored(4, 8)]))
    for i in range(3000):
        bad.apply(early(i, 2**40 + i))
    good.apply(Batch(1.0, [stored(0, 4)]))
    assert good.tiers["device"].index.depth(chain_of_tokens(IDS, SIZE), good.tiers["device"].bit) == 8


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0, 9), min_size=1, max_size=5), st.integers(0, 9))))
def test_the_books_of_what_waits_balance(said: list[tuple[bool, list[int], int]]) -> None:
    engine = Engine()
    for is_store, names, parent in said:
        tokens = list(range(len(names) * SIZE))
        fields: dict[str, Any] = {"block_hashes": names, "parent_block_hash": parent, "token_ids": tokens}
        engine.say(stored(**fields | {"extra_keys": None}) if is_store else BlockRemoved(list(names), "GPU"))
    engine.say(BlockRemoved(list(range(10)), "GPU"))
    early_ = engine.cache.early.get("device")
    assert engine.kv_index.waiting == 0
    assert early_ is None or (early_.bytes, early_._where, len(early_._behind)) == (0, {}, 0)


def test_adapters_are_bounded_and_those_of_a_gone_engine_are_forgotten() -> None:
    engine = Engine(10_000)
    other = EngineCache(Endpoint("b", "10.0.0.2:8000"), engine.kv_index)
    other.apply(Batch(1.0, [stored(lora_name="lora")]))
    for i in range(3000):
        engine.say(stored(lora_name=f"{i}"))
    assert len(engine.kv_index.adapters) == 256 + 1
    engine.say(stored(lora_name="x" * 100_000))
    assert engine.kv_index.counts["malformed"] == 1
    engine.cache.leave()
    assert engine.kv_index.adapters == {"lora": 1}


def test_extra_keys_nested_as_deep_as_can_be_read_are_counted_and_left_out() -> None:
    """Where they are written down the stack may be deeper than where they were read."""
    engine = Engine()

    def deeper(calls: int, batch: Batch) -> None:
        """Through C, which Python 3.12 counts apart."""
        next(map(partial(deeper, calls - 1), [batch])) if calls else engine.cache.apply(batch)

    def nested(depth: int) -> bytes:
        extras = msgspec.Raw(b"\x91" * depth + b"\xc0")
        event = ["BlockStored", [depth], None, [1], 1, None, "GPU", None, [extras]]
        return msgspec.msgpack.encode([1.0, [event]])

    def is_read(depth: int) -> bool:
        with suppress(MalformedBatch):
            return bool(decode(nested(depth)))
        return False

    deepest = bisect_left(range(1, 200_000), True, key=lambda depth: not is_read(depth))
    taken = 0
    for depth in (10, *range(deepest - 200, deepest + 100)):
        with suppress(MalformedBatch):
            deeper(20, decode(nested(depth)))
            taken += 1
    counts = engine.kv_index.counts
    assert counts["malformed"] > 0
    assert counts["stored"] > 0
    assert counts["malformed"] + counts["stored"] == taken


def test_only_the_group_that_keeps_whole_prefixes_counts() -> None:
    engine = Engine().say(
        stored(group_idx=0, kv_cache_spec_kind="sliding_window"),
        removed(0, group_idx=0),
        stored(group_idx=1, kv_cache_spec_kind="full_attention"),
        stored(group_idx=2, kv_cache_spec_kind="full_attention"),
    )
    assert engine.depth() == 8
    assert engine.say(removed(7, group_idx=2), removed(6, 7, group_idx=0)).depth() == 8
    assert engine.say(removed(7, group_idx=1)).depth() == 7


def test_more_tokens_than_the_blocks_have_are_left_out() -> None:
    assert Engine().say(stored(token_ids=[*IDS, 5])).depth() == 8


@pytest.mark.parametrize(
    "event",
    [
        stored(token_ids=IDS[:-1]),
        stored(block_size=0),
        stored(block_size=-4),
        stored(token_ids=[-1] * 32),
        stored(token_ids=[2**40] * 32),
    ],
)
def test_words_that_make_no_sense_are_counted_and_left_out(event: BlockStored) -> None:
    engine = Engine().say(stored(0, 2), event, stored(2, 4))
    assert engine.depth() == 4
    assert engine.kv_index.counts["malformed"] == 1


def test_another_block_size_and_an_unknown_medium_are_not_for_us() -> None:
    engine = Engine().say(stored(), stored(block_size=2), stored(medium="TAPE"))
    assert engine.depth() == 8
    assert engine.kv_index.counts["ignored"] == 2


def test_block_sizes_are_bounded_and_go_with_those_who_had_them() -> None:
    """Each costs every pick a chain of its own."""
    kv_index = KvEventIndex(10_000)

    def say(name: int, rank: int, size: int) -> None:
        event = stored(block_hashes=[1], block_size=size, token_ids=[1] * size, medium="CPU", extra_keys=None)
        kv_index.state_of(endpoints[name]).engine(rank).apply(Batch(1.0, [event]))

    endpoints = [Endpoint(f"e{i}", f"10.0.0.{i}:8000") for i in range(20)]
    for rank in range(64):
        say(0, rank, rank + 1)
    assert kv_index.sizes["l1"] == {1: 1, 2: 1}
    assert kv_index.counts["ignored"] == 62
    for name in range(1, 20):
        say(name, 0, name)
    assert kv_index.sizes["l1"] == {1: 2, 2: 2, **dict.fromkeys(range(3, 9), 1)}
    for name in range(10):
        kv_index.leave(endpoints[name])
    assert kv_index.sizes["l1"] == {}
    say(19, 0, 19)
    kv_index.state_of(endpoints[19]).engine(0).clear(emptied=True)
    say(19, 0, 20)
    assert kv_index.sizes["l1"] == {20: 1}


def test_a_new_process_may_have_another_block_size() -> None:
    engine = Engine().say(stored())
    engine.cache.clear(emptied=True)
    assert engine.say(stored(0, 4, block_hashes=NAMES[:2], block_size=8, token_ids=IDS[:16])).size == 8
    assert engine.depth() == 2


@settings(max_examples=150)
@given(
    st.recursive(
        st.none() | st.integers() | st.sampled_from(NAMES) | st.text(max_size=3) | st.binary(max_size=9),
        lambda inner: st.lists(inner, max_size=5),
        max_leaves=8,
    ).map(lambda value: value if isinstance(value, list) else [value]),
    st.randoms(use_true_random=False),
)
def test_no_event_is_fatal(values: list[Any], draw: random.Random) -> None:
    """Real events with one field replaced by something else, and what the books look like after them."""
    engine = Engine(20)
    for value in (*values, values):
        event = msgspec.to_builtins(stored(draw.randint(0, 3), draw.randint(4, 8)))
        event[draw.choice(sorted(event))] = value
        try:
            batch = decode(msgspec.msgpack.encode([1.0, [event, ["BlockRemoved", value], ["BlockRemoved", NAMES[:1]]]]))
        except (MalformedBatch, OverflowError):
            continue
        engine.cache.apply(batch)
        for tier in engine.cache.tiers.values():
            tier.check()
    engine.cache.leave()
    assert engine.kv_index.budget.used == 0


def test_the_simulators_own_chains_are_just_other_names() -> None:
    """The engine's hashes are its own: here the simulator's, joined with ours by the tokens."""
    names = hash_chain(pack(IDS), SIZE)
    engine = Engine().say(stored(block_hashes=list(names)))
    assert engine.depth() == 8
    assert not set(names) & set(chain_of_tokens(IDS, SIZE))


def test_the_memory_it_reports_is_the_memory_it_takes() -> None:
    draw = random.Random(3)
    batches = [
        [
            BlockStored(
                [draw.getrandbits(64) for _ in range(32)],
                token_ids=[draw.randrange(128_000) for _ in range(32 * SIZE)],
                block_size=SIZE,
            )
            for _ in range(20)
        ]
        for _ in range(8)
    ]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        kv_index = KvEventIndex(100_000)
        caches = [EngineCache(Endpoint(f"e{i}", f"10.0.0.{i}:8000"), kv_index) for i in range(8)]
        for cache, events in zip(caches, batches, strict=True):
            cache.apply(Batch(1.0, events))
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert kv_index.budget.used == 8 * 20 * 32
    assert 0.6 < kv_index.bytes / taken < 1.4
