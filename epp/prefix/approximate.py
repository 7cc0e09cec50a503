"""Prefix knowledge that needs nothing from the engines: a shadow cache of each, filled by what was sent to it.

Design: what is true of an engine's cache (`shadow`) is kept per endpoint, who holds which block (`index`) for all. The
picks are the only input; the engines' metrics say how large the caches are. With one replica and no other client
writing to the engines this knows as much as KV events would (`tests/epp/prefix/test_shadow_against_engine.py` holds it
to it).
"""

import sys
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Final, Literal

import msgspec

from epp.plugin import CacheRoom, Endpoint, Level, PrefixMatch, Producer, Request, Response, Services, Slot
from epp.prefix.index import SHORT, PrefixIndex, bytes_at, chain_of, common, seed_of, told
from epp.prefix.shadow_cache import Pin, Remembered, ShadowCache

_BYTES_PER_TOKEN: Final = 4.0
"""Where a request's own ratio is unknown."""
_SMALLEST_BLOCK: Final = 64
"""Tokens. llm-d raises smaller blocks to this when it turns `max_prefix_blocks_to_match` into a length."""
_SEGMENT_BYTES: Final = 200
"""Memory of a `Segment`: the object, its list, its places in the tables. Measured."""
_PIECE: Final = 1024
"""Blocks in a piece of a snapshot: 9 KB, taken in within a millisecond or two."""
_ANSWER_TOKENS: Final = 256.0
"""Length of an answer before any was seen: about the mean of published chat traces."""
_ANSWER_WEIGHT: Final = 0.02
"""Of one more answer in the running mean: the last fifty or so count."""


class _Prompt(msgspec.Struct, eq=False):
    """What is kept of a request between hooks."""

    chain: list[int]
    bytes_per_token: float


@dataclass(eq=False)
class PrefixCache(Producer[PrefixMatch]):
    """A producer that keeps a shadow of each endpoint's KV cache: its parameters, which are llm-d's but the last."""

    produces: ClassVar[type[Any]] = PrefixMatch

    auto_tune: bool = True
    """Take block size and capacity from the engine's metrics where they are known, also when they change."""
    block_size_tokens: int = 16
    """Tokens per KV block of the engine, where metrics do not say."""
    max_prefix_blocks_to_match: int = 2048
    """Longest prompt prefix looked at, in blocks of max(64, block_size_tokens) tokens; where the next is 0."""
    max_prefix_tokens_to_match: int = 131_072
    """Longest prompt prefix looked at, in tokens; what follows counts as never held. 0: see the limit in blocks."""
    lru_capacity_per_server: int = 31_250
    """KV blocks an engine has, where metrics do not say: 500,000 tokens, an 8B model on one 80 GB GPU."""
    max_blocks: int = 2_000_000
    """Bound on memory: blocks remembered, summed over endpoints, at 110 to 400 bytes. Beyond it prompts are forgotten
    early. Covers 250 endpoints of the default capacity when all prompts are short."""

    def __post_init__(self) -> None:
        for name, least in (
            ("block_size_tokens", 1),
            ("max_prefix_blocks_to_match", 1),
            ("max_prefix_tokens_to_match", 0),
            ("lru_capacity_per_server", 1),
            ("max_blocks", 1),
        ):
            if (value := getattr(self, name)) < least:
                raise ValueError(f"{name}: {value}, expected at least {least}")

    @property
    @abstractmethod
    def approximate(self) -> "ApproximatePrefixCache":
        """What holds the shadows."""


@dataclass(eq=False)
class ApproximatePrefixCache(PrefixCache):
    """How much of a prompt each endpoint holds, by our own account (llm-d: approx-prefix-cache-producer).

    The parameters are llm-d's. Blocks are ours: 256 bytes, 1 KB beyond 16 KB of prompt, whatever `block_size_tokens`
    says; it means the engine's block size here, the unit of its memory. `PrefixMatch.blocks` counts blocks of 256
    bytes, so that its share is a share of the prompt.
    """

    waits: ClassVar[bool] = False

    index: PrefixIndex = field(init=False)
    shadows: dict[Endpoint, ShadowCache] = field(default_factory=dict, init=False)
    _prompts: Slot[_Prompt] = field(default_factory=Slot, init=False, repr=False)
    _pins: Slot[Pin] = field(default_factory=Slot, init=False, repr=False)
    """What a request pins at the endpoint that has it."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.index = PrefixIndex(self.max_blocks)
        self.longest = self.max_prefix_tokens_to_match or self.max_prefix_blocks_to_match * max(
            _SMALLEST_BLOCK, self.block_size_tokens
        )
        self.answer = _ANSWER_TOKENS
        """Tokens of an answer, in the mean of those seen lately."""
        self._sees_status = False
        self._hash_seed = 0

    def start(self, services: Services) -> None:
        self._hash_seed = services.hash_seed

    @property
    def approximate(self) -> "ApproximatePrefixCache":
        return self

    async def prepare(self, request: Request) -> None:
        size = len(request.prompt)
        per_token = size / request.tokens if size and request.tokens else _BYTES_PER_TOKEN
        seed = seed_of(request.model, request.salt, self._hash_seed)
        self._prompts.set(request, _Prompt(chain_of(request.prompt, seed, int(self.longest * per_token)), per_token))

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, PrefixMatch]:
        prompt = self._prompt(request)
        chain, per_token, tokens, holders = prompt.chain, prompt.bytes_per_token, request.tokens, self.index.holders
        total = bytes_at(len(chain)) // SHORT
        matches = dict.fromkeys(endpoints, PrefixMatch(0, 0, total))
        for depth, mask in self.index.match(chain):
            size = bytes_at(depth)
            held = round(size / per_token)
            match = PrefixMatch(held if held < tokens else tokens, size // SHORT, total)
            few = mask.bit_count() > len(endpoints)
            for endpoint in self._among(endpoints, mask) if few else holders(mask):
                matches[endpoint] = match
        return matches

    def levels(self, request: Request) -> Iterator[Level]:
        prompt = self._prompt(request)
        chain, per_token, tokens = prompt.chain, prompt.bytes_per_token, request.tokens
        total = bytes_at(len(chain)) // SHORT
        yield Level(PrefixMatch(0, 0, total), sys.maxsize, tuple, None)
        for depth, mask in self.index.match(chain):
            size = bytes_at(depth)
            match = PrefixMatch(min(round(size / per_token), tokens), size // SHORT, total)
            yield Level(match, mask.bit_count(), partial(self.index.holders, mask), partial(self._holds, mask))

    def _holds(self, mask: int, endpoint: Endpoint) -> bool:
        shadow = self.shadows.get(endpoint)
        return shadow is not None and bool(shadow.bit & mask)

    def _among(self, endpoints: Sequence[Endpoint], mask: int) -> list[Endpoint]:
        return [endpoint for endpoint in endpoints if self._holds(mask, endpoint)]

    def shadow(self, endpoint: Endpoint) -> ShadowCache:
        """The shadow of `endpoint`, as large as its metrics say now."""
        shadow = self.shadows.get(endpoint)
        if shadow is None:
            capacity = self.lru_capacity_per_server * self.block_size_tokens
            shadow = self.shadows[endpoint] = ShadowCache(endpoint, self.index, capacity, self.block_size_tokens)
        if shadow.load is not (load := endpoint.load):
            shadow.load = load
            size = load.block_size * load.blocks, load.block_size
            if self.auto_tune and size[0] > 0 and size != (shadow.capacity, shadow.page):
                shadow.resize(*size)
        return shadow

    def chain(self, request: Request) -> Sequence[int]:
        """Blocks of a prepared request's prompt."""
        return self._prompt(request).chain

    def _prompt(self, request: Request) -> _Prompt:
        return self._prompts.get(request) or _Prompt([], _BYTES_PER_TOKEN)

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        prompt = self._prompts.get(request)
        if prompt is not None:
            pin = self.shadow(endpoint).pin(prompt.chain, request.tokens, prompt.bytes_per_token)
            self._pins.set(request, pin)

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        """Release what was pinned, if the engine can hold it.

        It cannot if no token was produced: the request failed, was abandoned while it waited, or a retry took it
        elsewhere. Then nothing is known of it, and what no other request has used there is forgotten. A gateway that
        never shows a status says nothing by not showing one.
        """
        usage = response.usage
        if usage is not None and usage.completion >= 0:
            self.answer += _ANSWER_WEIGHT * (usage.completion - self.answer)
        self._sees_status = self._sees_status or response.status > 0
        pin, shadow = self._pins.take(request), self.shadows.get(endpoint)
        if pin is None or shadow is None:
            return
        if self.was_computed(endpoint, response):
            shadow.release(pin, self._generated(request, response))
        else:
            shadow.abandon(pin)

    def was_computed(self, endpoint: Endpoint, response: Response) -> bool:
        """Whether the engine can hold the prompt of a request that ended: it has produced a token of the answer."""
        if response.status >= 300 or (response.served and response.served != endpoint.address):
            return False
        if response.lost or response.first_token_at is not None or (not response.status and not self._sees_status):
            return True
        return response.status >= 200

    def _generated(self, request: Request, response: Response) -> int:
        """Tokens of the answer: as reported, else the mean of those seen, and no more than were asked for."""
        if response.usage is not None and response.usage.completion >= 0:
            return response.usage.completion
        mean = round(self.answer)
        return mean if request.max_tokens is None else min(mean, request.max_tokens)

    def on_removed(self, endpoint: Endpoint) -> None:
        if (shadow := self.shadows.pop(endpoint, None)) is not None:
            shadow.forget()

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """Bytes a token of its prompt, and its blocks."""
        prompt = self._prompt(request)
        return prompt.bytes_per_token, prompt.chain

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        per_token, blocks = state or (_BYTES_PER_TOKEN, [])
        self._pins.set(request, self.shadow(endpoint).pin(told(blocks), request.tokens, per_token))

    def snapshot(self) -> Iterator[Any]:
        """Each endpoint's shadow: [its name, [tokens, how many blocks to take of the chain before, more blocks, bytes
        a token] ...], unused longest first.
        """
        for endpoint, shadow in list(self.shadows.items()):
            entries: list[tuple[int, int, list[int], float]] = []
            blocks, before = 0, list[int]()
            for tokens, chain, per_token in list(shadow.remembered()):
                shared = common(before, chain)
                entries.append((tokens, shared, chain[shared:], per_token))
                blocks, before = blocks + 1 + len(chain) - shared, chain
                if blocks >= _PIECE:
                    yield endpoint.name, entries
                    entries, blocks, before = [], 0, []
            if entries:
                yield endpoint.name, entries

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        name, entries = piece
        if (endpoint := endpoints.get(name)) is None:
            return
        shadow = self.shadow(endpoint)
        chain: list[int] = []
        for tokens, shared, blocks, per_token in entries:
            chain = chain[:shared] + told(blocks)
            shadow.restore(Remembered(tokens, chain, per_token))

    def statistics(self) -> Mapping[str, float]:
        shadows = self.shadows.values()
        return {
            "blocks": len(self.index),
            "holdings": self.index.holdings,
            "bytes": self.index.bytes + _SEGMENT_BYTES * sum(shadow.segments for shadow in shadows),
            "crowded": self.index.crowded,
            "endpoints": len(shadows),
            "pinned_tokens": sum(shadow.pinned for shadow in shadows),
            "idle_tokens": sum(shadow.idle for shadow in shadows),
        }


@dataclass(eq=False)
class BurstPrefixCache(ApproximatePrefixCache):
    """`burst-prefix-cache-producer`: prompts that come together go together.

    llm-d's gathers requests for `window_duration_ms` and then says which endpoint holds each group. Here a prompt
    counts as held from the moment it is sent, so the second request of a burst is drawn to where the first went, and
    nobody waits. Its parameters are taken, and change nothing. Source: llm-d-router.
    """

    window_duration_ms: int = 100
    max_per_replica: int = -1
    min_colocate_blocks: int = 0
    max_batch_size: int = 1000
    balance_by: Literal["requests", "tokens"] = "requests"


class ApproximateCacheRoom(Producer[CacheRoom]):
    """Each endpoint's KV memory as our own requests use it: the other half of what the shadow caches know."""

    produces: ClassVar[type[Any]] = CacheRoom
    companion_of: ClassVar[type[Any]] = PrefixCache

    def __init__(self, cache: PrefixCache) -> None:
        self._cache = cache.approximate

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, CacheRoom]:
        cache, tokens = self._cache, request.tokens
        known, shadow, answer = cache.shadows.get, cache.shadow, cache.answer
        rooms = {}
        for endpoint in endpoints:
            found = known(endpoint)
            if found is None or found.load is not endpoint.load:
                found = shadow(endpoint)
            room = rooms[endpoint] = found.room
            pinned = room.pinned + found.flights * answer
            if room.capacity < pinned + tokens and room.capacity:
                pinned = round(pinned)
                # Engines admit a prompt when all of it fits, while answers take what is left: near the end of the
                # memory it counts what they will grow to, and that what is idle of the prompt is memory too.
                rooms[endpoint] = CacheRoom(pinned, room.capacity, min(tokens, found.in_use(cache.chain(request))))
        return rooms
