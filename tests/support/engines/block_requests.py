"""Random requests for whatever keeps blocks as vLLM does, and what becomes of them in our `Blocks`."""

from collections.abc import Iterator, Sequence
from random import Random
from typing import Literal, Protocol

from tooling.simulator.blocks import Blocks

Event = tuple[Literal["start", "grow", "end"], int, list[int]]
"""What a request does, its number, and the tokens it starts with or gets."""


def random_events(draw: Random, size: int, count: int) -> list[Event]:
    """`count` starts of prompts that share beginnings, a few repeated as a whole, with answers, in blocks of `size`."""
    stems = [[draw.randrange(1000) for _ in range(6 * size)] for _ in range(3)]
    prompts: list[list[int]] = []
    live: list[int] = []
    events: list[Event] = []
    started = 0
    while started < count or live:
        kind = draw.random()
        if started < count and (kind < 0.3 or not live):
            shared = draw.choice(stems)[: draw.randint(0, 6 * size)]
            prompt = shared + [draw.randrange(1000) for _ in range(draw.randint(1, 2 * size))]
            if prompts and draw.random() < 0.2:
                prompt = draw.choice(prompts)
            elif draw.random() < 0.3:
                prompt = (prompt * size)[: draw.randint(1, 4) * size]
            prompts.append(prompt)
            events.append(("start", started, prompt))
            live.append(started)
            started += 1
        elif kind < 0.7:
            # Of tokens that no prompt has: what nobody was told of must not be hit by chance.
            answer = [draw.randrange(1000, 2000) for _ in range(draw.randint(1, 2 * size))]
            events.append(("grow", draw.choice(live), answer))
        else:
            events.append(("end", live.pop(draw.randrange(len(live))), []))
    return events


class Pool(Protocol):
    """What keeps the blocks of requests, in blocks named 0, 1, ..."""

    def start(self, request: int, tokens: Sequence[int]) -> list[int]:
        """Compute a prompt; the request's blocks, [] if it does not fit as a whole, and is not there then."""

    def grow(self, request: int, tokens: Sequence[int]) -> list[int]:
        """Compute these tokens one by one, as far as there is room; the request's blocks, [] if it is not there."""

    def end(self, request: int) -> None:
        """Free its blocks, if it is there."""

    def cached(self, tokens: Sequence[int]) -> list[int]:
        """The blocks that a prompt of these tokens and one more would find."""

    def drain(self) -> list[int]:
        """All that is free, in the order in which it would be allocated."""


def outcomes(events: Sequence[Event], pool: Pool) -> Iterator[list[int]]:
    """What each event gave, what is cached of each prompt when a request has ended, and the free blocks in the end."""
    prompts = [tokens for kind, _, tokens in events if kind == "start"]
    for kind, request, tokens in events:
        if kind == "start":
            yield pool.start(request, tokens)
        elif kind == "grow":
            yield pool.grow(request, tokens)
        else:
            pool.end(request)
            yield from map(pool.cached, prompts)
    yield pool.drain()


class OurPool:
    """`Blocks`, given requests. Without `answers` it is not told by which hashes what they generated is known."""

    def __init__(self, count: int, size: int, answers: bool = True) -> None:
        self.blocks = Blocks(count)
        self.size = size
        self.answers = answers
        self.live: dict[int, tuple[list[int], list[int]]] = {}

    def chain(self, tokens: Sequence[int]) -> list[int]:
        return [hash(tuple(tokens[:end])) for end in range(self.size, len(tokens) + 1, self.size)]

    def start(self, request: int, tokens: Sequence[int]) -> list[int]:
        hashes = self.chain(tokens)
        found = self.blocks.match(hashes, (len(tokens) - 1) // self.size)
        fresh = -(-len(tokens) // self.size) - len(found)
        if not self.blocks.fits(found, fresh):
            return []
        self.blocks.take(found)
        mine = found + self.blocks.allocate(fresh)
        self.blocks.remember(mine[len(found) : len(hashes)], hashes[len(found) :])
        self.live[request] = list(tokens), mine
        return list(mine)

    def grow(self, request: int, tokens: Sequence[int]) -> list[int]:
        if request not in self.live:
            return []
        known, mine = self.live[request]
        for token in tokens:
            if len(known) == len(mine) * self.size:
                if not self.blocks.free:
                    break
                mine += self.blocks.allocate(1)
            known.append(token)
            if len(known) == len(mine) * self.size:
                self.blocks.remember(mine[-1:], self.chain(known)[-1:] if self.answers else [])
        return list(mine)

    def end(self, request: int) -> None:
        if request in self.live:
            self.blocks.release(self.live.pop(request)[1])
            self.blocks.check()

    def cached(self, tokens: Sequence[int]) -> list[int]:
        return self.blocks.match(self.chain(tokens), len(tokens))

    def drain(self) -> list[int]:
        return self.blocks.allocate(self.blocks.free)
