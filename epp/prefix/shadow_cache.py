"""`ShadowCache`: a model of one endpoint's paged prefix cache, kept without asking it.

It repeats what vLLM v1 does with KV memory (`v1/core/block_pool.py`, `kv_cache_manager.py`, 0.32):

- what a request in flight uses is pinned and cannot be evicted; from the moment of the pick it counts as held, since
  an engine serves first come, first served and later requests find the blocks of those before them;
- when the request ends, a last block of the engine that is not full is free, as if it had never been used; the rest
  of its memory becomes idle, tail first: what it generated and the rest of the prompt, which fill no block of ours
  (`loose`), then its blocks from the last to the first;
- new memory comes from what is free, then from what has been idle longest.

Memory is counted in tokens, in whole blocks of the engine's own (`page` tokens) per request; held blocks are counted
in segments: stretches of a chain that were always used together, as in a radix tree. So a prompt costs one look at
each segment on its path and work per block only for what is new.

Why what is held stays a prefix of each chain: a segment is pinned while any segment behind it is, and a request's end
makes its path idle from the last segment to the first. So a segment always became idle after all those behind it, they
are evicted before it, and itself is evicted from its end.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from epp.plugin import CacheRoom, Endpoint, Load
from epp.prefix.index import PrefixIndex, bytes_at, common, depth_at


class Segment(msgspec.Struct, eq=False, gc=False):
    """Memory that is kept and evicted together: blocks of one chain in order and what is evicted before them, or (no
    blocks) tokens no request can reuse. Segments name those before them only, so there are no cycles to collect.
    """

    tokens: int
    """All that is evicted with it."""
    start: int = 0
    """Blocks before it in its chain."""
    blocks: list[int] = []
    bytes_per_token: float = 1.0
    parent: "Segment | None" = None
    users: int = 0
    """Requests in flight that pin it; 0 = idle."""
    proven: bool = False
    """A request that used it got an answer, so the engine has really computed it."""
    shrunk: bool = False
    """Evicted in part: its last block perhaps half, whose tokens that are left are part of `tokens`."""
    loose: int = 0
    """Tokens that fill no block of the request that used it last (part of `tokens` while it is idle)."""
    place: int = 0
    """Among the idle: higher is later."""

    def tokens_of(self, count: int) -> int:
        """Tokens of its first `count` blocks."""
        return round((bytes_at(self.start + count) - bytes_at(self.start)) / self.bytes_per_token)


class Pin(msgspec.Struct, eq=False, gc=False):
    """What a request in flight holds: a path of segments down to `last`, and `loose` tokens that fill no block."""

    last: Segment | None
    loose: int
    prompt: int


class Remembered(NamedTuple):
    """A chain that an endpoint holds, or (without one) memory that no request can use again."""

    tokens: int
    chain: list[int]
    bytes_per_token: float


class ShadowCache:
    """The cache of one endpoint: segments by their first block, and the idle ones in the order they became idle."""

    def __init__(self, endpoint: Endpoint, index: PrefixIndex, capacity: int, page: int) -> None:
        self.index = index
        self.bit = index.join(endpoint)
        self.load: Load | None = None
        """The scrape its size was last taken from."""
        self.capacity = capacity
        self.page = page
        self.pinned = 0
        self.idle = 0
        self.flights = 0
        """Requests in flight."""
        self.room = CacheRoom(0, capacity)
        self._segments: dict[int, Segment] = {}
        self._unused: dict[int, Segment] = {}
        """The idle ones by their places, which are their order too."""
        self._first, self._last = 1, 0
        """No place before `_first` is taken, and none after `_last`."""

    @property
    def segments(self) -> int:
        """Segments known, idle tokens no request can reuse among them."""
        return max(len(self._segments), len(self._unused))

    def resize(self, capacity: int, page: int) -> None:
        """The engine's memory is `capacity` tokens in blocks of `page` tokens; what no longer fits is forgotten."""
        self.capacity, self.page = capacity, page
        self._settle()

    def pin(self, chain: list[int], tokens: int, bytes_per_token: float) -> Pin:
        """A prompt of `tokens` tokens was sent: its full pages are held from now on, until `release` or `abandon`.

        Without a length (0) the whole chain is, and nothing beside it.
        """
        self.flights += 1
        page, index, segments, total = self.page, self.index, self._segments, len(chain)
        if tokens and (whole := depth_at(int(tokens // page * page * bytes_per_token + 1e-6))) < total:
            total = whole
        depth, last = 0, None
        while depth < total and (held := segments.get(chain[depth])) is not None and held.parent is last:
            count = len(held.blocks)
            if depth + count > total or chain[depth + count - 1] != held.blocks[-1]:
                held = self._split(held, count := common(chain[depth:total], held.blocks))
            if held.users:
                held.users += 1
            else:
                self._use(held)
            depth, last = depth + count, held
        size = bytes_at(depth)
        if (known := round(size / bytes_per_token)) > tokens:
            known = tokens
        covered, new = known, chain[depth:total]
        if len(new) > index.limit - index.holdings:
            new = self._affordable(new)
        if new and (added := index.add(new, self.bit)):
            if added < len(new):
                del new[added:]
            more = round((bytes_at(depth + added) - size) / bytes_per_token)
            last = segments[new[0]] = Segment(more, depth, new, bytes_per_token, last, 1)
            self.pinned += more
            if (covered := known + more) > tokens:
                covered = tokens
        # An engine reuses whole pages and computes at least the last token, so a wholly known prompt costs one page.
        again = known - (known if known < tokens else max(0, tokens - 1)) // page * page
        loose = -(-tokens // page) * page - covered + again
        self.pinned += loose
        self._settle()
        return Pin(last, loose, tokens)

    def in_use(self, chain: Sequence[int]) -> int:
        """Tokens of a chain that requests in flight pin."""
        tokens, at, last = 0, 0, None
        while at < len(chain) and (segment := self._segments.get(chain[at])) is not None:
            if segment.parent is not last or not segment.users:
                break
            count = common(chain[at : at + len(segment.blocks)], segment.blocks)
            tokens += segment.tokens_of(count)
            if count < len(segment.blocks):
                break
            at, last = at + count, segment
        return tokens

    def release(self, pin: Pin, generated: int) -> None:
        """The request ended after `generated` tokens: what it used becomes idle, its tail first."""
        # The last generated token is never computed upon, so it takes no memory.
        computed, page = pin.prompt + (generated - 1 if generated > 1 else 0), self.page
        answer = (pin.prompt // -page - computed // -page) * page  # in whole pages: both are rounded up
        if (excess := self.pinned + answer + self.idle - self.capacity) > 0:
            self._evict(excess)  # before anything of it is idle: the partial page too has taken its room from others
        self.flights -= 1
        self.pinned -= pin.loose
        left, segment = pin.loose + answer - (page if computed % page else 0), pin.last
        if left > 0:
            if segment is not None and segment.users == 1:
                segment.loose = left
            else:
                self._let_go(left)
        while segment is not None:
            segment.proven = True
            if segment.users > 1:
                segment.users -= 1
            else:
                self._leave(segment)
            segment = segment.parent
        self._settle()

    def abandon(self, pin: Pin) -> None:
        """The request ended before it was computed: what only such requests used was never there."""
        self.flights -= 1
        self.pinned -= pin.loose
        segment = pin.last
        while segment is not None:
            if segment.users > 1:
                segment.users -= 1
            elif segment.proven:
                self._leave(segment)
            else:
                self.pinned -= segment.tokens
                self._drop(segment.blocks)
            segment = segment.parent
        self._settle()

    def remembered(self) -> Iterator[Remembered]:
        """What was computed here, unused longest first: what another replica needs for `restore`, in its order.

        What is pinned comes last, as far as it was computed.
        """
        latest: Segment | None = None
        for segment in [*self._unused.values(), *(s for s in self._segments.values() if s.users and s.proven)]:
            if loose := segment.loose if segment.blocks else segment.tokens:
                yield Remembered(loose, [], 1.0)
                latest = None
            if segment.blocks and (latest is None or latest.parent is not segment):
                # else it is used again with the one before
                path = [segment]
                while path[-1].parent is not None:
                    path.append(path[-1].parent)
                blocks = [block for each in reversed(path) for block in each.blocks]
                yield Remembered(0, blocks, segment.bytes_per_token)
            latest = segment

    def restore(self, held: Remembered) -> None:
        """Another replica has seen that this is held: it counts as used just now."""
        if held.chain:
            self.release(self.pin(held.chain, 0, held.bytes_per_token), 0)
        else:
            if held.tokens:
                self._let_go(held.tokens)
            self._settle()

    def forget(self) -> None:
        """The endpoint is gone: give back everything, its bit too. Nothing may be called after this."""
        for segment in self._segments.values():
            self.index.drop(segment.blocks, self.bit)
        self._segments.clear()
        self._unused.clear()
        self.index.leave(self.bit)

    def _use(self, segment: Segment) -> None:
        """The first request pins it."""
        self.idle -= segment.tokens
        if loose := segment.loose:
            self._unused[segment.place] = Segment(loose, place=segment.place)
            self.idle += loose
            segment.tokens -= loose
            segment.loose = 0
        else:
            del self._unused[segment.place]
            if segment.shrunk:
                # The rest of a half evicted block is either computed upon again, then it is counted as new, or the
                # oldest memory there is and taken next.
                segment.tokens, segment.shrunk = segment.tokens_of(len(segment.blocks)), False
        segment.users = 1
        self.pinned += segment.tokens

    def _leave(self, segment: Segment) -> None:
        """The last request that pins it does no more."""
        segment.users = 0
        self.pinned -= segment.tokens
        segment.tokens += segment.loose
        self.idle += segment.tokens
        segment.place = self._last = place = self._last + 1
        self._unused[place] = segment

    def _let_go(self, tokens: int) -> None:
        """Memory no request can reuse becomes idle; joined to what became idle just before, if that is of its kind."""
        self.idle += tokens
        latest = self._unused.get(self._last)
        if latest is None or latest.blocks:
            self._leave(latest := Segment(0))
        latest.tokens += tokens

    def _split(self, segment: Segment, count: int) -> Segment:
        """Cut `segment` after `count` blocks; returns the upper part. The lower keeps its place among the idle."""
        tokens = min(segment.tokens_of(count), segment.tokens - segment.loose)
        upper = Segment(tokens, segment.start, segment.blocks[:count], segment.bytes_per_token, segment.parent)
        upper.users, upper.proven = segment.users, segment.proven
        if not upper.users:
            upper.place = self._last = place = self._last + 1
            self._unused[place] = upper
        segment.blocks = segment.blocks[count:]
        segment.start += count
        segment.tokens -= tokens
        segment.parent = upper
        self._segments[upper.blocks[0]] = upper
        self._segments[segment.blocks[0]] = segment
        return upper

    def _affordable(self, blocks: list[int]) -> list[int]:
        """As many of `blocks` as our own memory allows, after forgetting the oldest idle ones of this endpoint."""
        self.index.crowded += 1
        while len(blocks) > self.index.spare and self._unused:
            self._evict(1, whole=True)
        return blocks[: self.index.spare]

    def _settle(self) -> None:
        """What is pinned or idle has changed."""
        if (excess := self.pinned + self.idle - self.capacity) > 0:
            self._evict(excess)
        self.room = CacheRoom(self.pinned, self.capacity)

    def _evict(self, tokens: int, *, whole: bool = False) -> None:
        """Evict so many tokens of what has been idle longest, or all that is; more where segments go as a `whole`."""
        unused, place = self._unused, self._first
        while tokens > 0 and unused:
            if (segment := unused.get(place)) is None:
                place += 1
            elif (there := segment.tokens) > tokens and not whole:
                self._shrink(segment, tokens)
                break
            else:
                tokens -= there
                self.idle -= there
                del unused[place]
                if blocks := segment.blocks:
                    self._drop(blocks)
        self._first = place

    def _shrink(self, segment: Segment, tokens: int) -> None:
        """Evict so many tokens of an idle segment from its end, fewer than all."""
        self.idle -= tokens
        segment.tokens = left = segment.tokens - tokens
        if tokens <= segment.loose:
            segment.loose -= tokens
        elif blocks := segment.blocks:
            segment.loose, segment.shrunk = 0, True
            start = segment.start
            keep = depth_at(bytes_at(start) + int(left * segment.bytes_per_token + 1e-6)) - start
            if keep < len(blocks):
                if not keep:
                    del self._segments[blocks[0]]
                self.index.drop(blocks[keep:], self.bit)
                del blocks[keep:]

    def _drop(self, blocks: list[int]) -> None:
        """Nothing is held any more of a segment of these blocks."""
        del self._segments[blocks[0]]
        self.index.drop(blocks, self.bit)

    def check(self) -> None:
        """Raise AssertionError if the accounts do not add up. Costs a pass over everything: for tests."""
        segments = list(self._segments.values())
        idle = [*self._unused.values()]
        assert all(not s.users for s in idle), "something pinned is listed as idle"
        assert all(s.place == place for place, s in self._unused.items()), "listed in another's place"
        assert self.idle == sum(s.tokens for s in idle), "idle tokens"
        assert self.pinned >= sum(s.tokens for s in segments if s.users), "pinned tokens"
        assert self.pinned + self.idle <= self.capacity or not self._unused, "more is remembered than fits"
        order = {segment: at for at, segment in enumerate(idle)}
        for segment in segments:
            assert segment.users or segment in order, "a segment is neither pinned nor idle"
            parent = segment.parent
            if parent is None:
                assert segment.start == 0, "a chain without its beginning"
                continue
            assert parent.start + len(parent.blocks) == segment.start, "a hole in a chain"
            assert self._segments[parent.blocks[0]] is parent, "a segment outlived the one before it"
            assert parent.users >= segment.users, "pinned behind something that is not"
            assert parent.users or order[segment] < order[parent], "would be evicted after what it builds upon"
