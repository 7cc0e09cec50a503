"""`EngineCache`: what one engine (one data-parallel rank) holds in its tiers, by its own KV events. Pure.

The engine's hashes and ours are joined by the token ids in the events: a prompt is looked up by our links, an event
names blocks by the engine's hashes, and an engine that stores a block sends both. So hash seeds and algorithms need
not agree.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal

import msgspec
from xxhash import xxh3_64_intdigest

from epp.plugin import Endpoint
from epp.prefix.events.held_blocks import NO_ROW, ROW_BYTES, Budget, HeldBlocks
from epp.prefix.events.wire import (
    WHOLE_PROMPT,
    Batch,
    BlockRemoved,
    BlockStored,
    Medium,
    key_of,
    keys_of,
    medium_of,
)
from epp.prefix.index import PrefixIndex
from epp.prefix.tokens.block_hashes import mixed, root_of

_EARLY: Final = 1024
"""Blocks of a tier that wait for the one before them, each copy counted; beyond, the first to come are forgotten."""
_EARLY_BYTES: Final = 1 << 20
"""Memory of their token ids and extra keys; beyond, the same."""
_NAME_BYTES: Final = 400
"""Memory of a waiting block beside that: its name in two tables. Measured."""
_ADAPTERS: Final = 256
"""LoRA adapters of one engine."""
_LONGEST_NAME: Final = 256
"""Characters of an adapter's name."""
_GROUPS: Final = 64
_SIZES: Final = 8
"""Block sizes in a tier at once, of all engines: each costs a pick a chain of its own."""


_pack: Final = msgspec.msgpack.Encoder().encode
_unpack: Final = msgspec.msgpack.Decoder(list[list[Any] | None]).decode

State = Literal["off", "connecting", "replaying", "live", "lost"]
"""Of an endpoint's events: it publishes none; no event yet; catching up; received; received until lately."""


class KvEventIndex:
    """What all engines' caches of a pool have together: an index for each tier, bounds, and a kv_state per endpoint.

    `limit`: blocks remembered, summed over engines and tiers, at 250 to 450 bytes.
    """

    def __init__(self, limit: int) -> None:
        self.indexes: Mapping[Medium, PrefixIndex] = {
            "device": PrefixIndex(limit),
            "l1": PrefixIndex(limit),
            "storage": PrefixIndex(limit),
        }
        self.sizes: Mapping[Medium, dict[int, int]] = {"device": {}, "l1": {}, "storage": {}}
        """Of each tier: tokens a block -> engines that have such blocks."""
        self.budget = Budget(limit)
        self.hash_seed = 0
        """See `epp.plugin.Services`; to be set before the first event."""
        self.adapters: dict[str, int] = {}
        """LoRA adapters that blocks were stored for -> engines that did; no others can have any."""
        self.counts = {"stored": 0, "removed": 0, "cleared": 0, "malformed": 0, "ignored": 0, "unresolved": 0}
        """Blocks stored and removed, caches cleared; events that could not be read, were not for us (kinds of cache
        that hold no whole prefixes, unknown media), or built upon blocks we do not know."""
        self.faults: dict[str, int] = {}
        """What went wrong with the messages, see `epp.prefix.events.stream`; and replays."""
        self.on_emptied: Callable[[Endpoint], None] = lambda endpoint: None
        """Called with an endpoint whose device cache is empty: it was cleared, or is another process's."""
        self._kv_index: dict[Endpoint, EndpointKvState] = {}

    def state_of(self, endpoint: Endpoint) -> "EndpointKvState":
        """What is known of an endpoint; made where it is new."""
        kv_state = self._kv_index.get(endpoint)
        if kv_state is None:
            kv_state = self._kv_index[endpoint] = EndpointKvState(endpoint, self)
        return kv_state

    @property
    def any_live(self) -> bool:
        """Whether any endpoint's events are received."""
        return any(kv_state.state == "live" for kv_state in self._kv_index.values())

    def leave(self, endpoint: Endpoint) -> None:
        """The endpoint left the pool."""
        if (kv_state := self._kv_index.pop(endpoint, None)) is not None:
            for engine in kv_state.engines.values():
                engine.leave()

    @property
    def bytes(self) -> int:
        """Memory of all that engines said."""
        rows = self.budget.used * ROW_BYTES + sum(index.bytes for index in self.indexes.values())
        return rows + sum(early.bytes for early in self._early())

    @property
    def waiting(self) -> int:
        """Blocks kept for the one before them, which did not come yet; `budget` does not count them."""
        return sum(early.blocks for early in self._early())

    def _early(self) -> "Iterator[_Early]":
        for kv_state in self._kv_index.values():
            for engine in kv_state.engines.values():
                yield from engine.early.values()


class EndpointKvState:
    """What one endpoint's engines said: one cache for each data-parallel rank, and how far their events are
    received.
    """

    def __init__(self, endpoint: Endpoint, kv_index: KvEventIndex) -> None:
        self.engines: dict[int, EngineCache] = {}
        self.state: State = "connecting"
        self.size = 0
        """Tokens a block on the device, as it said last; 0 while unknown."""
        self.received_at: float | None = None
        """When the last batch came."""
        self.lag = 0.0
        """Seconds from the engine's timestamp of that batch to our having it, on two clocks."""
        self.awaited: float | None = None
        """Since when it owes us events: it computed blocks and has said nothing."""
        self._endpoint = endpoint
        self._kv_index = kv_index

    def engine(self, rank: int) -> "EngineCache":
        engine = self.engines.get(rank)
        if engine is None:
            engine = self.engines[rank] = EngineCache(self._endpoint, self._kv_index)
        return engine

    @property
    def held(self) -> int:
        """Blocks known on the device, of all ranks."""
        tiers = (engine.tiers.get("device") for engine in self.engines.values())
        return sum(len(tier) for tier in tiers if tier is not None)

    def received(self, at: float, lag: float) -> None:
        self.received_at, self.lag, self.awaited = at, lag, None

    def lost(self) -> None:
        """The connection broke, or was never made."""
        if self.state in ("live", "replaying"):
            self.state = "lost"


class EngineCache:
    def __init__(self, endpoint: Endpoint, kv_index: KvEventIndex) -> None:
        self.endpoint = endpoint
        self.tiers: dict[Medium, HeldBlocks] = {}
        """Those in which anything was ever stored."""
        self._kv_index = kv_index
        self._group: int | None = None
        self._other_groups: set[int] = set()
        self.early: dict[Medium, _Early] = {}
        """Of each tier, blocks whose predecessor did not come yet."""
        self.partial = False
        """It holds blocks of which no event will come; so what is known of it is not what it holds."""
        self._adapters: set[str] = set()
        self.unfinished: list[HeldBlocks] = []
        """Tiers that an event left much to do in."""
        self._left = False

    def apply(self, batch: Batch) -> None:
        """Take over what a batch says. Nothing in it is ever fatal; what makes no sense is counted and left out."""
        at, end = self.take(batch), len(batch.events)
        while self.unfinished or at < end:
            if not self.step():
                at = self.take(batch, at)

    def step(self) -> bool:
        """Do some more of what an event left to do. False: nothing was left."""
        while self.unfinished:
            if self.unfinished[-1].step():
                return True
            self.unfinished.pop()
        return False

    def take(self, batch: Batch, start: int = 0) -> int:
        """Take over a batch from one of its events on, to the end or an event that leaves much to do, for `step`.

        Returns which event is next.
        """
        if self._left:
            return len(batch.events)
        if not start:
            self._kv_index.counts["malformed"] += batch.malformed
        unfinished = self.unfinished
        for at, event in enumerate(batch.events[start:] if start else batch.events, start):
            try:
                if isinstance(event, BlockStored):
                    self._stored(event)
                elif isinstance(event, BlockRemoved):
                    self._removed(event)
                else:
                    self._cleared()
            # Of token ids, or of extra keys that cannot be encoded or that are nested too deeply for it.
            except (OverflowError, RecursionError, TypeError, ValueError):
                self._kv_index.counts["malformed"] += 1
            if unfinished:
                return at + 1
        return len(batch.events)

    def clear(self, *, emptied: bool) -> None:
        """Forget everything it said. `emptied`: it is a new process; else we missed something of the old one.

        Of much, something may be left to `step`.
        """
        if emptied:
            self._kv_index.on_emptied(self.endpoint)
            self.partial = False
        for medium in self.tiers:
            self._empty(medium)
        self.early.clear()
        self._forget_adapters()
        self._group = None
        self._other_groups.clear()

    def leave(self) -> None:
        """The engine is gone for good; what it still says is not listened to."""
        self._left = True
        for medium, tier in self.tiers.items():
            self._unsized(medium)
            tier.leave()
        self.tiers.clear()
        self.early.clear()
        self._forget_adapters()

    def _adapter(self, name: str) -> None:
        """It stored blocks for a LoRA adapter."""
        if len(name) > _LONGEST_NAME:
            raise ValueError("no adapter is called that")
        if name not in self._adapters and len(self._adapters) < _ADAPTERS:
            self._adapters.add(name)
            self._kv_index.adapters[name] = self._kv_index.adapters.get(name, 0) + 1

    def _forget_adapters(self) -> None:
        adapters = self._kv_index.adapters
        for name in self._adapters:
            adapters[name] -= 1
            if not adapters[name]:
                del adapters[name]
        self._adapters.clear()

    def _cleared(self) -> None:
        self._kv_index.counts["cleared"] += 1
        self.partial = False
        if "device" in self.tiers:
            self._empty("device")
        self.early.pop("device", None)
        self._kv_index.on_emptied(self.endpoint)

    def _removed(self, event: BlockRemoved) -> None:
        medium, group, counts = medium_of(event.medium), event.group_idx, self._kv_index.counts
        if medium is None or (group is not None and group != self._group):
            counts["ignored"] += 1
            return
        counts["removed"] += len(event.block_hashes)
        if (tier := self.tiers.get(medium)) is None:
            return
        unknown = tier.remove(keys_of(event.block_hashes))
        if unknown and (early := self.early.get(medium)) is not None:
            early.removed(unknown)

    def _ours(self, event: BlockStored) -> bool:
        """Whether it is of the cache group that counts: the first one whose kind keeps whole prefixes."""
        group, whole = event.group_idx, (event.kv_cache_spec_kind or "") in WHOLE_PROMPT
        if group is None:
            return whole
        if not whole:
            if len(self._other_groups) < _GROUPS:
                self._other_groups.add(group)
            return False
        if self._group is None and group not in self._other_groups:
            self._group = group
        return group == self._group

    def _tier(self, medium: Medium) -> HeldBlocks:
        tier = self.tiers.get(medium)
        if tier is None:
            tier = HeldBlocks(self.endpoint, self._kv_index.indexes[medium], self._kv_index.budget, self.unfinished)
            self.tiers[medium] = tier
        return tier

    def _sized(self, medium: Medium, tier: HeldBlocks, size: int) -> bool:
        """Whether blocks of `size` tokens fit in. An endpoint has one size in a tier; two while it changes."""
        if tier.size:
            return tier.size == size
        kv_state, sizes = self._kv_index.state_of(self.endpoint), self._kv_index.sizes[medium]
        others = (engine.tiers.get(medium) for engine in kv_state.engines.values())
        if len({other.size for other in others if other is not None} - {0, size}) > 1:
            return False
        if size not in sizes and len(sizes) >= _SIZES:
            return False
        sizes[size] = sizes.get(size, 0) + 1
        if medium == "device":
            kv_state.size = size
        tier.size = size
        return True

    def _unsized(self, medium: Medium) -> None:
        sizes = self._kv_index.sizes[medium]
        if size := self.tiers[medium].size:
            sizes[size] -= 1
            if not sizes[size]:
                del sizes[size]

    def _empty(self, medium: Medium) -> None:
        self._unsized(medium)
        self.tiers[medium].clear()

    def _stored(self, event: BlockStored) -> None:
        medium, counts = medium_of(event.medium), self._kv_index.counts
        if medium is None or not self._ours(event):
            counts["ignored"] += 1
            return
        if not (count := len(event.block_hashes)):
            return
        if not event.token_ids:
            self._store_known(medium, keys_of(event.block_hashes))
            return
        tier, size = self.tiers.get(medium) or self._tier(medium), event.block_size
        if size < 1 or len(event.token_ids) < size * count:
            raise ValueError("fewer tokens than its blocks have")
        if event.lora_name:
            self._adapter(event.lora_name)
        if tier.size != size and not self._sized(medium, tier, size):
            counts["ignored"] += 1
            return
        names = keys_of(event.block_hashes)
        if self._store(medium, tier, names, event) and self.early:
            self._store_due(medium, tier, names)

    def _store(self, medium: Medium, tier: HeldBlocks, names: Sequence[int], event: BlockStored) -> bool:
        """Blocks with their tokens. False: the one before them is not known, so they wait for it."""
        counts = self._kv_index.counts
        if (parent := event.parent_block_hash) is None:
            before, link = NO_ROW, root_of(event.block_size, event.lora_name or "", self._kv_index.hash_seed)
        elif before := tier.rows.get(key_of(parent), NO_ROW):
            link = tier.keys[before]
        else:
            counts["unresolved"] += self.early.setdefault(medium, _Early()).add(names, event)
            return False
        tier.store(names, _links(event, len(names), link), before)
        counts["stored"] += len(names)
        return True

    def _store_due(self, medium: Medium, tier: HeldBlocks, names: Sequence[int]) -> None:
        """Blocks that waited for one of `names`, and those that waited for them."""
        todo, early = [names], self.early.get(medium)
        while todo and early is not None:
            for due, event in early.due(todo.pop()):
                if self._store(medium, tier, due, event):
                    todo.append(due)

    def _store_known(self, medium: Medium, names: Sequence[int]) -> None:
        """Blocks without their tokens: copies of what another tier holds, or held when it was copied."""
        for name in names:
            tier = self._tier(medium)
            for other in (tier, *self.tiers.values()):
                if (row := other.rows.get(name)) is None:
                    continue
                parent = other.name_before(row)
                before = NO_ROW if parent is None else tier.rows.get(parent, NO_ROW)
                if (before or parent is None) and self._sized(medium, tier, other.size):
                    tier.store((name,), (other.keys[row],), before)
                    self._kv_index.counts["stored"] += 1
                    break
            else:
                self._kv_index.counts["unresolved"] += 1


class _Waiting:
    """Stored blocks of one event, as long as the one before them is unknown: what is needed of it, no more."""

    __slots__ = ("extras", "lora_name", "names", "parent", "size", "tokens")

    def __init__(self, names: Sequence[int], event: BlockStored) -> None:
        assert event.parent_block_hash is not None
        assert event.token_ids is not None
        self.parent = key_of(event.parent_block_hash)
        self.names = names
        self.size = event.block_size
        self.lora_name = event.lora_name
        self.tokens = array("I", event.token_ids[: self.size * len(names)])
        keys = event.extra_keys
        self.extras = _pack(keys[: len(names)]) if keys is not None and any(keys) else b""

    @property
    def bytes(self) -> int:
        return len(self.tokens) * self.tokens.itemsize + len(self.extras)

    def cut(self, count: int) -> None:
        """Keep the first `count` blocks."""
        self.names = self.names[:count]
        del self.tokens[self.size * count :]

    def event(self) -> BlockStored:
        keys = _unpack(self.extras) if self.extras else None
        return BlockStored(
            [],
            parent_block_hash=self.parent,
            token_ids=self.tokens,
            block_size=self.size,
            lora_name=self.lora_name,
            extra_keys=keys,
        )


class _Early:
    """Stored blocks of one tier whose predecessor did not come yet."""

    def __init__(self) -> None:
        self._behind: OrderedDict[int, dict[_Waiting, None]] = OrderedDict()
        """Name they wait for -> what waits, first come first."""
        self._where: dict[int, set[_Waiting]] = {}
        """Name of a block that waits -> where."""
        self.blocks = 0
        self._bytes = 0

    @property
    def bytes(self) -> int:
        """Memory it takes."""
        return self._bytes + self.blocks * _NAME_BYTES

    def add(self, names: Sequence[int], event: BlockStored) -> int:
        """Let an event wait. Returns how many blocks were forgotten to make room for it."""
        waiting = _Waiting(names, event)
        self._behind.setdefault(waiting.parent, {})[waiting] = None
        for name in names:
            self._where.setdefault(name, set()).add(waiting)
        self.blocks += len(names)
        self._bytes += waiting.bytes
        before = self.blocks
        while self.blocks > _EARLY or self._bytes > _EARLY_BYTES:
            self._cut(next(iter(next(iter(self._behind.values())))), 0)
        return before - self.blocks

    def removed(self, names: Sequence[int]) -> None:
        """Blocks that may wait here are gone again, and those behind them are of no use."""
        for name in names:
            for waiting in tuple(self._where.get(name, ())):
                self._cut(waiting, waiting.names.index(name))

    def due(self, names: Sequence[int]) -> list[tuple[Sequence[int], BlockStored]]:
        """The events that waited for one of `names`, each as far as its blocks are still there."""
        found = []
        for name in names if self._behind else ():
            for waiting in tuple(self._behind.get(name, ())):
                self._cut(waiting, 0)
                found.append((waiting.names, waiting.event()))
        return found

    def _cut(self, waiting: _Waiting, count: int) -> None:
        """Keep the first `count` blocks of what waits; of 0, nothing at all."""
        for name in waiting.names[count:]:
            if (where := self._where.get(name)) is not None:
                where.discard(waiting)
                if not where:
                    del self._where[name]
        for name in waiting.names[:count]:  # a name that it has twice
            self._where.setdefault(name, set()).add(waiting)
        self.blocks -= len(waiting.names) - count
        if count:
            self._bytes -= waiting.bytes
            waiting.cut(count)
            self._bytes += waiting.bytes
            return
        self._bytes -= waiting.bytes
        behind = self._behind[waiting.parent]
        del behind[waiting]
        if not behind:
            del self._behind[waiting.parent]


def _links(event: BlockStored, count: int, link: int) -> list[int]:
    """Links of an event's first `count` blocks, which follow `link`. Raises OverflowError for what is no token id."""
    assert event.token_ids is not None
    tokens, size = array("I", event.token_ids), event.block_size
    some_have_extras = (event.extra_keys is not None and any(event.extra_keys)) or event.cache_salt is not None
    if len(tokens) == size and not some_have_extras:  # most events of a decoding engine
        return [xxh3_64_intdigest(tokens, link)]
    links = []
    for at in range(0, count * size, size):
        link = xxh3_64_intdigest(tokens[at : at + size], link)
        if some_have_extras and (extras := _extras(event, at // size)):
            link = mixed(link, extras)
        links.append(link)
    return links


def _extras(event: BlockStored, i: int) -> Sequence[Any]:
    """What is mixed into the hash of block `i` beside its tokens, but for the adapter, which the chain's root has."""
    keys = event.extra_keys
    extras = keys[i] if keys is not None and i < len(keys) else None
    if not extras:
        return (salt,) if not i and (salt := _salt_of(event)) else ()
    return extras[1:] if event.lora_name and extras[0] == event.lora_name else extras


def _salt_of(event: BlockStored) -> str:
    """SGLang's salt of a chain that begins with this event, "" for none."""
    salt = event.cache_salt
    return salt if isinstance(salt, str) and event.parent_block_hash is None else ""
