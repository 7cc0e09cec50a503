"""Prefix knowledge from the engines themselves: their KV events, and what is on its way to them.

Events report what an engine holds; they come when a step ends, so they know nothing of the prompts that wait, and of a
burst that is a second too late. Hence two accounts: what engines said (`enginecache`), and what is in flight
(`ShadowCache`s without room, which hold what is pinned and nothing else). An endpoint holds of a prompt what the longer
of both says.

Where no events of an endpoint come, or a prompt's tokens are not known in time, the approximate producer answers, which
this one holds: it sees every pick, so it knows what it would know alone.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any, Final

from msgspec.structs import replace

from epp.plugin import Endpoint, KvEventFigures, NoTokens, PrefixMatch, Request, Response, Services, Slot
from epp.prefix.approximate import ApproximatePrefixCache, PrefixCache
from epp.prefix.events.engine_cache import EndpointKvState, KvEventIndex
from epp.prefix.events.sources import KvEvents
from epp.prefix.events.subscriber import Subscribers
from epp.prefix.index import PrefixIndex, told
from epp.prefix.lmcache.directory import Held
from epp.prefix.lmcache.tiers import Lmcache, Tiers
from epp.prefix.shadow_cache import Pin, ShadowCache
from epp.prefix.tokens.block_hashes import chain_of_tokens
from epp.prefix.trust import Trust

_SILENCE: Final = 5.0
"""Seconds an engine that computed something may say nothing. Steps end every few milliseconds; connectors' events and
clearings were seen to wait 1.6 s on an idle engine."""


_MOST_SENT: Final = 1 << 14
"""Blocks of a prompt that other replicas are told of: 144 KB."""
_MOST_LINKS: Final = 1 << 16
"""Blocks of a prompt that are looked up: a million tokens in blocks of 16. Making so many links takes some 10 ms."""


@dataclass(frozen=True)
class TokenProcessor:
    """llm-d's `tokenProcessorConfig`. Blocks are the engines' own here, and no seed has to agree: nothing is used."""

    block_size: int = 0
    block_size_tokens: int = 0
    hash_seed: str = ""
    hash_algorithm: str = ""


class _Read:
    """What is kept of a request whose tokens are known."""

    __slots__ = (
        "_chains", "_hash_seed", "adapter", "chunks", "held", "ids", "l2", "length", "pins", "salt", "without_events",
    )  # fmt: skip

    def __init__(self, ids: Sequence[int], limit: int, adapter: str, salt: str, hash_seed: int = 0) -> None:
        self.length = len(ids)
        self.ids = ids[:limit] if len(ids) > limit else ids
        self.adapter = adapter
        self.salt = salt
        self.held: dict[Endpoint, int] = {}
        """Tokens of it that an endpoint is known to hold, where the match says less because of doubts."""
        self.without_events: Sequence[Endpoint] = ()
        """Endpoints that were matched approximately."""
        self.l2: dict[Endpoint, int] = {}
        """Tokens of it that an endpoint would load from L2, where it would."""
        self.chunks: Sequence[int] = ()
        """Its chunks, as LMCache names them."""
        self.pins: dict[Endpoint, _Sent] = {}
        self._hash_seed = hash_seed
        self._chains: dict[int, list[int]] = {}

    @classmethod
    def of_peer(cls, tokens: int, size: int, links: list[int]) -> "_Read":
        """Of another replica's request, of which its chain in blocks of `size` tokens is all that is known."""
        read = cls((), 0, "", "")
        read.length = tokens
        read._chains[size] = links
        return read

    def sent(self) -> tuple[int, list[int]]:
        """Block size and chain by which the request was put on account, at the endpoint it was given to last."""
        size = next((sent.size for sent in reversed(self.pins.values())), 0)
        return size, self.chain(size) if size > 0 else []

    def chain(self, size: int) -> list[int]:
        """Links of its full blocks of `size` tokens. Of another replica's request they are known for one size only."""
        chain = self._chains.get(size)
        if chain is None:
            ids = self.ids if len(self.ids) <= size * _MOST_LINKS else self.ids[: size * _MOST_LINKS]
            chain = self._chains[size] = chain_of_tokens(ids, size, self.adapter, self.salt, self._hash_seed)
        return chain

    def reusable(self, size: int) -> list[int]:
        """The links an engine would look up: it computes at least the last token anew."""
        chain = self.chain(size)
        return chain[:-1] if chain and len(chain) * size == self.length else chain


class _Sent:
    """A request at an endpoint: its pin, and what was predicted."""

    __slots__ = ("pin", "predicted", "size")

    def __init__(self, pin: Pin | None, predicted: int, size: int) -> None:
        self.pin = pin
        self.predicted = predicted
        self.size = size


@dataclass(eq=False)
class PrecisePrefixCache(PrefixCache):
    """How much of a prompt each endpoint holds, by its own KV events (llm-d: precise-prefix-cache-producer).

    Parameters are llm-d's, those of the approximate producer, for where it has to answer, and a bound of ours.
    """

    kv_events_config: KvEvents = field(default_factory=KvEvents)
    speculative_ttl: timedelta = timedelta(seconds=2)
    """How long an answered prompt counts as held before its events came."""
    speculative_indexing: bool = True
    """Accepted: what is in flight counts as held whatever this says. Without it bursts are scattered or piled up."""
    token_processor_config: TokenProcessor = field(default_factory=TokenProcessor)
    indexer_config: Mapping[str, Any] = field(default_factory=dict)
    """Accepted, not used: of llm-d's index, its backends and its tokenizers."""
    max_event_blocks: int = 2_000_000
    """Bound on memory: blocks that engines said they hold, summed over engines and tiers, at 250 to 450 bytes. Beyond
    it the oldest are forgotten. Covers 70 H100s with an 8B model at 16 tokens a block."""

    lmcache: Lmcache = field(default_factory=Lmcache)
    """LMCache's tiers behind the engines."""

    kv_index: KvEventIndex = field(init=False)
    tiers: Tiers | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        same = {each.name: getattr(self, each.name) for each in fields(PrefixCache)}
        self._approximate = ApproximatePrefixCache(**same)
        if self.max_event_blocks < 1:
            raise ValueError(f"max_event_blocks: {self.max_event_blocks}, expected at least 1")
        self.kv_index = KvEventIndex(self.max_event_blocks)
        self.kv_index.on_emptied = self._emptied
        if self.lmcache.coordinator:
            self.tiers = Tiers(self.lmcache, lambda: self.clock())
        self._reads = Slot[_Read]()
        self._in_flight = PrefixIndex(self.max_blocks)
        self._pinned: dict[Endpoint, ShadowCache] = {}
        self._lingering: deque[tuple[float, Endpoint, Pin]] = deque()
        """Of answered requests: until when, where, what."""
        self._trust: dict[Endpoint, Trust] = {}
        self._doubted: dict[Endpoint, Trust] = {}
        """Those of them below 1."""
        self._tokens: Callable[[Request], Awaitable[Sequence[int]]] = _no_tokens
        self._report: Callable[[str, str], None] = _unreported
        """Called for each request that is answered approximately, in part or at all."""

    def start(self, services: Services) -> None:
        self._tokens, self._report = services.tokens, services.degraded
        self._approximate.start(services)
        self.kv_index.hash_seed = services.hash_seed
        if (tiers := services.instead.get(Tiers)) is not None:
            self.tiers = tiers(self.lmcache, lambda: self.clock())

    @property
    def approximate(self) -> ApproximatePrefixCache:
        return self._approximate

    async def run(self, services: Services) -> None:
        """Listen to the engines' events, and to LMCache's coordinator where there is one."""
        async with asyncio.TaskGroup() as group:
            group.create_task(Subscribers(self.kv_index, self.kv_events_config, services, self.clock).run())
            if self.tiers is not None:
                group.create_task(self.tiers.run(services.degraded))

    async def prepare(self, request: Request) -> int | None:
        known: int | None = None
        reason = "" if request.api != "other" else "unsupported"
        if not reason and self.kv_index.any_live:
            try:
                ids = await self._tokens(request)
            except NoTokens as none:
                reason = none.reason
            except Exception:  # a source's own fault costs this request its precision, no more
                reason = "failed"
            else:
                known = len(ids)
                request = replace(request, tokens=known)
                adapter = request.model if request.model in self.kv_index.adapters else ""
                longest, seed = self._approximate.longest, self.kv_index.hash_seed
                read = self._reads.set(request, _Read(ids, longest, adapter, request.salt, seed))
                if self.tiers is not None:
                    read.chunks = await self.tiers.names(read.ids, request.salt)
        if reason:
            self._report(f"approximate-{reason}", request.model[:100])
        await self._approximate.prepare(request)
        return known

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, PrefixMatch]:
        self._let_go()
        read = self._reads.get(request)
        if read is None:
            if not self.kv_index.any_live:
                self._report("approximate-events", "no endpoint's KV events are received")
            return self._approximate.produce(request, endpoints)
        sizes, without_events = self._sizes(endpoints)
        matches: dict[Endpoint, PrefixMatch] = {}
        for size, live in sizes.items():
            self._match(read, size, live, matches)
        if without_events:
            read.without_events = without_events
            matches.update(
                (e, m) for e, m in self._approximate.produce(request, without_events).items() if e not in matches
            )
        if self.tiers is not None and (runs := self.tiers.held(read.chunks)):
            self._add_tiers(self.tiers, runs, read, matches)
        return matches

    def _add_tiers(self, tiers: Tiers, runs: Sequence[Held], read: _Read, matches: dict[Endpoint, PrefixMatch]) -> None:
        """What LMCache's directory says of L1 and L2, where that is more than the engine's own events say."""
        same: dict[tuple[PrefixMatch, int, int], PrefixMatch] = {}
        for endpoint, match in matches.items():
            l1, l2 = tiers.loads(runs, endpoint, read.held.get(endpoint, match.tokens), read.length)
            if l1 + l2 <= match.l1 + match.l2:
                continue
            read.l2[endpoint] = l2
            if (trust := self._doubted.get(endpoint)) is not None:
                l1, l2 = int(trust.value * l1), int(trust.value * l2)
            key = match, l1, l2
            if key not in same:
                same[key] = PrefixMatch(match.tokens, match.blocks, match.total_blocks, l1, l2)
            matches[endpoint] = same[key]

    def _sizes(self, endpoints: Sequence[Endpoint]) -> tuple[dict[int, list[Endpoint]], list[Endpoint]]:
        """Endpoints by block size; and those without events, or of unknown block size."""
        sizes: dict[int, list[Endpoint]] = {}
        without_events: list[Endpoint] = []
        now, state_of = self.clock(), self.kv_index.state_of
        for endpoint in endpoints:
            kv_state = state_of(endpoint)
            stale = kv_state.awaited is not None and now - kv_state.awaited > _SILENCE
            size = kv_state.size or endpoint.load.block_size
            if kv_state.state != "live" or stale or size < 1:
                without_events.append(endpoint)
                self._report(f"approximate-{_why(kv_state, stale)}", endpoint.name)
            else:
                sizes.setdefault(size, []).append(endpoint)
        return sizes, without_events

    def _match(self, read: _Read, size: int, live: list[Endpoint], matches: dict[Endpoint, PrefixMatch]) -> None:
        """The matches of endpoints that share a block size."""
        chain, total = read.reusable(size), max(1, read.length // size)
        matches.update(dict.fromkeys(live, PrefixMatch(0, 0, total)))
        found = [
            (depth, mask, index)
            for index in (self.kv_index.indexes["device"], self._in_flight)
            for depth, mask in index.match(chain)
        ]
        found.sort(key=lambda each: each[0])  # the deepest that an endpoint is in comes last, and stays
        for depth, mask, index in found:
            match = PrefixMatch(depth * size, depth, total)
            for endpoint in index.holders(mask):
                if endpoint in matches:
                    matches[endpoint] = match
        if (tiers := self._tiers(read)) or self._doubted:
            self._adjust(read, size, live, tiers, matches)

    def _adjust(
        self,
        read: _Read,
        size: int,
        live: list[Endpoint],
        tiers: Sequence[Mapping[Endpoint, int]],
        matches: dict[Endpoint, PrefixMatch],
    ) -> None:
        """Add what lower tiers hold beyond the device, and take from those who do not keep what is predicted."""
        same: dict[PrefixMatch, PrefixMatch] = {}
        for endpoint in live:
            match = matches[endpoint]
            held, l1, l2 = match.tokens, 0, 0
            if tiers:
                l1_end, l2_end = (tier.get(endpoint, 0) for tier in tiers)
                l1, l2 = max(0, l1_end - held), max(0, l2_end - max(held, l1_end))
            if (trust := self._doubted.get(endpoint)) is not None:
                read.held[endpoint] = held
                held, l1, l2 = (int(trust.value * each) for each in (held, l1, l2))
            match = PrefixMatch(held, held // size, match.total_blocks, l1, l2)
            matches[endpoint] = same.setdefault(match, match)

    def _tiers(self, read: _Read) -> Sequence[Mapping[Endpoint, int]]:
        """Tokens from the beginning that lie in each endpoint's l1, and in its storage; () if no endpoint has tiers."""
        indexes = self.kv_index.indexes["l1"], self.kv_index.indexes["storage"]
        if not (len(indexes[0]) or len(indexes[1])):
            return ()
        ends: list[dict[Endpoint, int]] = []
        for index, sizes in zip(indexes, (self.kv_index.sizes["l1"], self.kv_index.sizes["storage"]), strict=True):
            end: dict[Endpoint, int] = {}
            for size in sizes:
                for depth, mask in index.match(read.reusable(size)):
                    for endpoint in index.holders(mask):
                        end[endpoint] = max(end.get(endpoint, 0), depth * size)
            ends.append(end)
        return ends

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self._approximate.on_picked(request, endpoint)
        read = self._reads.get(request)
        if read is None or endpoint in read.pins:
            return
        match = request.signals.get(self.produces, {}).get(endpoint)
        predicted = -1
        # Of a prompt that was computed elsewhere engines say that nothing was cached.
        if match is not None and endpoint not in read.without_events and request.stage != "decode":
            predicted = read.held.get(endpoint, match.tokens)
        self._pin(read, endpoint, predicted)
        if self.tiers is not None:
            self.tiers.picked(endpoint, read.l2.get(endpoint, 0), read.ids, read.salt)

    def _pin(self, read: _Read, endpoint: Endpoint, predicted: int) -> None:
        """A request was sent of which so many tokens are predicted to be cached; -1: none are predicted."""
        size, pin = self.kv_index.state_of(endpoint).size or endpoint.load.block_size, None
        if size > 0:
            shadow = self._pinned.get(endpoint)
            if shadow is None:  # without room: it holds what is pinned, and nothing else
                shadow = self._pinned[endpoint] = ShadowCache(endpoint, self._in_flight, 0, 1)
            pin = shadow.pin(read.chain(size), 0, 1.0)
        read.pins[endpoint] = _Sent(pin, predicted, size)
        if predicted >= 0:
            self._trust_in(endpoint).sent(predicted, endpoint.load)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        self._approximate.on_finished(request, endpoint, response)
        read = self._reads.get(request)
        sent = read.pins.pop(endpoint, None) if read is not None else None
        if read is None or sent is None:
            return
        computed = self._approximate.was_computed(endpoint, response)
        if sent.predicted >= 0 and endpoint in self._trust:
            usage = response.usage
            trust = self._trust[endpoint]
            cached = usage.cached if computed and usage else -1
            trust.ended(sent.predicted, cached, endpoint.load, computed=computed)
            if trust.value < 1:
                self._doubted[endpoint] = trust
            else:
                self._doubted.pop(endpoint, None)
        shadow = self._pinned.get(endpoint)
        if sent.pin is None or shadow is None:
            return
        if not computed:
            shadow.abandon(sent.pin)
            return
        now = self.clock()
        self._lingering.append((now + self.speculative_ttl.total_seconds(), endpoint, sent.pin))
        kv_state = self.kv_index.state_of(endpoint)
        if kv_state.awaited is None and not self._said(kv_state, read.chain(sent.size)):
            kv_state.awaited = now

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """The approximate state, block size, links, no more of them than fit into a message, and the tokens that are
        predicted to be cached.
        """
        read, approximate = self._reads.get(request), self._approximate.to_peers(request, endpoint)
        if read is None:
            return approximate, 0, [], -1
        size, links = read.sent()
        sent = read.pins.get(endpoint)
        return approximate, size, links[:_MOST_SENT], -1 if sent is None else sent.predicted

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        approximate, size, links, predicted = state or (None, 0, [], -1)
        self._approximate.from_peer(request, endpoint, approximate)
        if size > 0:
            read = self._reads.set(request, _Read.of_peer(request.tokens, size, told(links)))
            self._pin(read, endpoint, predicted)

    def snapshot(self) -> Iterator[Any]:
        """What is known without events. What engines say, every replica receives itself."""
        return self._approximate.snapshot()

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        self._approximate.restore(piece, endpoints)

    def _said(self, kv_state: EndpointKvState, chain: list[int]) -> bool:
        """Whether an endpoint's events speak of a whole chain already."""
        index = self.kv_index.indexes["device"]
        tiers = [engine.tiers["device"] for engine in kv_state.engines.values() if "device" in engine.tiers]
        return any(index.depth(chain, tier.bit) == len(chain) for tier in tiers) or not chain

    def on_removed(self, endpoint: Endpoint) -> None:
        self._approximate.on_removed(endpoint)
        self.kv_index.leave(endpoint)
        self._trust.pop(endpoint, None)
        self._doubted.pop(endpoint, None)
        if (shadow := self._pinned.pop(endpoint, None)) is not None:
            shadow.forget()
            self._lingering = deque(each for each in self._lingering if each[1] is not endpoint)

    def _emptied(self, endpoint: Endpoint) -> None:
        """What is not in flight there is gone, whatever we would have thought without events."""
        if (shadow := self._approximate.shadows.get(endpoint)) is not None:
            capacity, page = shadow.capacity, shadow.page
            shadow.resize(0, page)
            shadow.resize(capacity, page)
        if (pinned := self._pinned.get(endpoint)) is not None:
            for _, where, pin in self._lingering:
                if where is endpoint:
                    pinned.release(pin, 0)
            self._lingering = deque(each for each in self._lingering if each[1] is not endpoint)

    def _trust_in(self, endpoint: Endpoint) -> Trust:
        trust = self._trust.get(endpoint)
        if trust is None:
            trust = self._trust[endpoint] = Trust(endpoint.load)
        return trust

    def _let_go(self) -> None:
        """Drop what lingered long enough: by now events have confirmed it, or it is not there."""
        now = self.clock()
        while self._lingering and self._lingering[0][0] <= now:
            _, endpoint, pin = self._lingering.popleft()
            self._pinned[endpoint].release(pin, 0)

    def statistics(self) -> Mapping[str, float]:
        self._let_go()
        return {
            **self._approximate.statistics(),
            "event_blocks": self.kv_index.budget.used,
            "event_blocks_waiting": self.kv_index.waiting,
            "event_bytes": self.kv_index.bytes,
            "event_blocks_evicted": self.kv_index.budget.evicted,
            "in_flight_blocks": self._in_flight.holdings,
            **(self.tiers.statistics() if self.tiers is not None else {}),
        }

    def kv_events(self, endpoints: Sequence[Endpoint]) -> KvEventFigures:
        """The state of each endpoint's event stream, its lag and trust, and counts of events."""
        rows = []
        for endpoint in endpoints:
            kv_state, trust = self.kv_index.state_of(endpoint), self._trust.get(endpoint)
            lag = kv_state.lag if kv_state.received_at is not None else None
            rows.append((endpoint.name, kv_state.state, lag, trust.value if trust is not None else 1.0))
        return KvEventFigures(rows, dict(self.kv_index.counts))


def _unreported(reason: str, detail: str) -> None:
    """Before its life has begun there is nothing to report to."""


async def _no_tokens(request: Request) -> Sequence[int]:
    raise NoTokens("no-tokenizer", "its life has not begun")


def _why(kv_state: EndpointKvState, stale: bool) -> str:
    if kv_state.state == "live":
        return "events-silent" if stale else "block-size"
    return {"off": "events-off", "connecting": "events-never"}.get(kv_state.state, "events-stale")
