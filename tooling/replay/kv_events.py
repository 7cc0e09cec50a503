"""KV events in virtual time: what engines do to their prefix caches and to lower tiers, as a subscribed picker receives
them.

The messages are left out: events reach the production code as what it makes of vLLM's bytes, and what LMCache's
coordinator reports as what it makes of pages. Tokens are known exactly, as they are where a model's tokenizer is
mounted.
"""

from array import array
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple, TypeVar

from epp.errors import ConfigError
from epp.plugin import Endpoint, Plugin, Request
from epp.prefix.events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, Hash
from epp.prefix.lmcache.directory import L2, Directory
from epp.prefix.lmcache.tiers import Listed, Lmcache, Tiers
from epp.prefix.precise import PrecisePrefixCache
from epp.prefix.tokens.block_hashes import chain_of_tokens
from tooling.simulator.engine import Change, Cleared, Evicted, Stored
from tooling.simulator.tiers import CHUNK, Changed

T = TypeVar("T")


def batch_of(changes: Sequence[Change], block_size: int, now: float) -> Batch:
    """What became of a prefix cache, as its engine reports it. The jobs' `about` are the ids of prompt and answer.

    vLLM reports each eviction by itself; here those in a row are one event, which says the same.
    """
    events: list[Event] = []
    gone: list[Hash] = []
    for change in changes:
        if isinstance(change, Evicted):
            if not gone:
                events.append(BlockRemoved(gone, "GPU"))
            gone += change.hashes
        else:
            gone = []
            events.append(AllBlocksCleared() if isinstance(change, Cleared) else _stored(change, block_size))
    return Batch(now, events)


def _stored(change: Stored, size: int) -> BlockStored:
    job, start, end = change
    ids: array[int] = job.about
    return BlockStored(
        list(job.hashes[start:end]),
        job.hashes[start - 1] if start else None,
        ids[start * size : end * size],
        size,
        medium="GPU",
        lora_name=job.adapter or None,
    )


def batch_of_l1(changes: Sequence[Changed], now: float) -> Batch:
    """What became of a node's L1, as each engine on it reports: an event for each new chunk, one for all that went."""
    events: list[Event] = []
    for about, chunks, stored, removed in changes:
        events += [
            BlockStored(
                [chunks[at]],
                chunks[at - 1] if at else None,
                about[at * CHUNK : (at + 1) * CHUNK],
                CHUNK,
                medium="CPU",
            )
            for at in stored
        ]
        if removed:
            events.append(BlockRemoved(list(removed), "CPU"))
    return Batch(now, events)


class TierLog:
    """What LMCache's coordinator knows: which chunk is in whose L1, and which are in L2. `nodes`: all there are."""

    def __init__(self, nodes: Sequence[str]) -> None:
        self.nodes = nodes
        self._bits = {"": L2, **{node: 2 << n for n, node in enumerate(nodes)}}
        self._masks: dict[int, int] = {}
        """Name -> who has it; in the order in which they came."""

    def note(self, node: str, changes: Sequence[Changed]) -> None:
        """The L1 of `node`, or L2 (""), has changed."""
        masks, bit = self._masks, self._bits[node]
        for _, chunks, stored, removed in changes:
            for at in stored:
                masks[chunks[at]] = masks.get(chunks[at], 0) | bit
            for name in removed:
                if left := masks.get(name, 0) & ~bit:
                    masks[name] = left
                else:
                    masks.pop(name, None)

    async def keys(self, offset: int) -> Listed:
        """All from that place on, in one page."""
        rows = self._masks.items()
        if offset:
            return _Page(self.nodes, len(rows), [*islice(reversed(rows), max(0, len(rows) - offset))][::-1])
        return _Page(self.nodes, len(rows), rows)


class _Page(NamedTuple):
    nodes: Sequence[str]
    total: int
    keys: Collection[tuple[int, int]]

    @property
    def chunk(self) -> int:
        return CHUNK if self.keys else 0

    @property
    def models(self) -> set[str]:
        return set()

    def chunks(self, directory: Directory, model: str) -> Collection[tuple[int, int]]:
        """A directory gives its bits in the order in which it is asked, and nobody asks before its first reading."""
        for n, node in enumerate(self.nodes):
            assert directory.bit(node) == 2 << n, "a directory with bits of its own"
        return self.keys


class _Mirror(Tiers):
    """The pickers' own, of the tier_log. Names are whatever the pods make of the same tokens."""

    def __init__(self, config: Lmcache, clock: Callable[[], float], tier_log: TierLog) -> None:
        named = replace(config, coordinator=config.coordinator or "http://coordinator", model="")
        super().__init__(named, clock, lister=tier_log)

    async def names(self, ids: Sequence[int], salt: str) -> Sequence[int]:
        return chain_of_tokens(ids, CHUNK) if len(self.directory) else ()


class EventDelivery:
    """Tells a plugin that listens what engines say. `tier_log`: of the tiers below, where there are any."""

    def __init__(self, precise: PrecisePrefixCache, tier_log: TierLog | None) -> None:
        self._kv_index = precise.kv_index
        self._tiers = precise.tiers if tier_log is not None else None

    @property
    def interval(self) -> float:
        """Seconds between readings of the tier_log; 0 where there is none."""
        return self._tiers.interval if self._tiers is not None else 0.0

    def read(self) -> None:
        """Read the tier_log, as production does the coordinator's directory."""
        if self._tiers is not None:
            at_once(self._tiers.read())

    def join(self, endpoint: Endpoint) -> None:
        """An endpoint's events are received from now on."""
        self._kv_index.state_of(endpoint).state = "live"

    def hear(self, endpoint: Endpoint, batch: Batch, now: float) -> None:
        """A batch arrives."""
        state = self._kv_index.state_of(endpoint)
        state.engine(0).apply(batch)
        state.received(now, now - batch.ts)

    def restarted(self, endpoint: Endpoint) -> None:
        """Its messages count from 0 again: a new process."""
        engine = self._kv_index.state_of(endpoint).engine(0)
        engine.clear(emptied=True)
        while engine.step():
            pass


def tiers_of(tier_log: TierLog | None) -> Mapping[type[Any], Callable[..., Any]]:
    """`Services.instead`: how plugins read `tier_log` where they would ask LMCache's coordinator."""
    if tier_log is None:
        return {}
    return {Tiers: lambda config, clock: _Mirror(config, clock, tier_log)}


def delivery_to(plugins: Iterable[Plugin], tier_log: TierLog | None = None) -> EventDelivery | None:
    """The delivery of a pipeline; None if nothing in it listens."""
    precise = next((plugin for plugin in plugins if isinstance(plugin, PrecisePrefixCache)), None)
    return None if precise is None else EventDelivery(precise, tier_log)


def at_once(waiting: Coroutine[Any, Any, T]) -> T:
    """Run what may wait; in virtual time nothing may. Raises ConfigError where it does."""
    try:
        waiting.send(None)
    except StopIteration as end:
        done: T = end.value
        return done
    waiting.close()
    raise ConfigError("policy", "a producer waits for something outside; such a plugin cannot be replayed")


async def ids_of(request: Request) -> Sequence[int]:
    """A prompt's tokens: it has four bytes for each, so it is them."""
    return array("I", request.prompt)
