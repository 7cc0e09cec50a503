"""The shadow cache and the simulator's engine get the same requests: what one believes, the other must reuse.

Four bytes are a token on both sides and nobody else writes to the engine. Three regimes are told apart.

*The same*, of every prompt ever sent, after every step, counted in the larger of the engine's blocks and ours: prompts
part at boundaries of both (and end in bytes of their own, which fill no block or some), lengths of answers are
reported, what is in flight fits in memory together, is computed in the step after the pick, and no memory is taken
behind the shadow's back: either one request is in flight at a time, with answers of any length, or many are, with
answers that end in the prompt's last block. Evictions and blocks of 16 to 1,024 tokens are in it.

*Exact*, every prompt within one block of ours when it is admitted: the same, with a queue for slots in the batch and
chunked prefill. A request that waits for its last chunk has no partial block yet, and may never have it beside those of
the others, so of many in flight the shadow may believe one of the engine's blocks less for each.

*Close*, within one block of ours a prompt on average: prompts part anywhere (the engine then shares up to a block more
than our blocks can tell), answers grow while others are picked (the shadow learns of their room only at the end), and
running requests are aborted, so that the length of their answers is a guess.

Outside all, so not held to a bound: a prompt that fills its last block and is sent again (the engine computes that
block once more and keeps the first copy's place in the order; the shadow renews it); requests that queue in the engine
for memory (what a request hoped to reuse may be evicted for another that stands before it); a prompt that repeats an
answer (the engine may reuse the answer's blocks, the shadow knows prompts only and believes less); and requests aborted
before their first token, of which the engine may have computed a part: there the shadow may only err towards less.
"""

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from epp.plugin import Endpoint, Load, Request, Response, Usage
from epp.prefix.approximate import ApproximatePrefixCache
from epp.prefix.index import LONG, LONG_FROM, SHORT, bytes_at
from tooling.simulator.engine import Engine, EngineParameters, Job
from tooling.simulator.tokenizer import hash_chain

BLOCK = SHORT // 4
"""Tokens of one of our (short) blocks."""


@dataclass
class Rig:
    """An engine, a shadow that is told what an EPP would be told, and how far apart they were at each prompt."""

    blocks: int
    page: int = 16
    running: int = 256
    budget: int = 1024
    """Tokens of a step."""
    errors: list[int] = field(default_factory=list)
    """Tokens the shadow believed cached less what the engine reused, per admitted request."""

    def __post_init__(self) -> None:
        self.capacity = self.blocks * self.page
        self.engine = Engine(
            EngineParameters(
                block_size=self.page,
                blocks=self.blocks,
                max_batched_tokens=self.budget,
                max_running=self.running,
                base=1.0,
                per_decode=0.0,
                per_context_token=0.0,
                linear=0.0,
                attention=0.0,
            )
        )
        load = Load(block_size=self.page, blocks=self.blocks, at=0.0)
        self.endpoint = Endpoint("pod", "10.0.0.1:8000", load=load)
        self.cache = ApproximatePrefixCache()
        self.now = 0.0
        self.names = count()
        self.live: dict[str, tuple[Request, Job, int]] = {}
        self.most_live = 0
        self.sent: list[tuple[Sequence[int], Sequence[int]]] = []
        """Prompts: their chains as the engine and as we have them."""

    def send(self, prompt: bytes, output: int) -> str:
        """Pick, as soon as everything in flight fits in memory together."""
        need = len(prompt) // 4 + output + self.page
        while (
            self.live
            and need + sum(job.prompt + job.output + self.page for _, job, _ in self.live.values()) > self.capacity
        ):
            self.step()
        name = f"r{next(self.names)}"
        request = Request(id=name, model="m", prompt=prompt, tokens=len(prompt) // 4, max_tokens=output)
        _finish(self.cache.prepare(request))
        believed = self.cache.produce(request, [self.endpoint])[self.endpoint].tokens
        chain = hash_chain(prompt, self.page)
        job = self.engine.add(name, chain, prompt=len(prompt) // 4, output=output, now=self.now)
        self.cache.on_picked(request, self.endpoint)
        self.live[name] = request, job, believed
        self.most_live = max(self.most_live, len(self.live))
        self.sent.append((chain, self.cache.chain(request)))
        return name

    def step(self) -> bool:
        """One step of the engine; whoever ends is reported to the shadow. False if there was nothing to do."""
        if (step := self.engine.step(self.now)) is None:
            return False
        self.now = step.ends_at
        for job in step.finished:
            self._end(job.id, Response(status=200, usage=Usage(job.prompt, job.generated), complete=True))
        return True

    def run(self) -> None:
        while self.step():
            pass
        assert not self.live
        assert self.cache.shadows[self.endpoint].pinned == 0

    def abort(self, name: str) -> None:
        self.engine.abort(name)
        job = self.live[name][1]
        status = 200 if job.generated else 0
        self._end(name, Response(status=status, first_token_at=job.first_token_at))

    def _end(self, name: str, response: Response) -> None:
        request, job, believed = self.live.pop(name)
        if job.cached >= 0:
            self.errors.append(believed - job.cached)
        self.cache.on_finished(request, self.endpoint, response)
        self.cache.shadows[self.endpoint].check()

    def apart(self) -> list[tuple[int, int]]:
        """Tokens held, as the shadow says and in truth, of prompts where they differ on the coarser grid."""
        shadow = self.cache.shadows[self.endpoint]
        grid = max(self.page, BLOCK)
        found = []
        for theirs, ours in self.sent:
            held = bytes_at(shadow.index.depth(ours, shadow.bit)) // 4
            cached = self.engine.cached_blocks(theirs, len(theirs)) * self.page
            if held // grid != cached // grid:
                found.append((held, cached))
        return found

    @property
    def mean_error(self) -> float:
        return sum(map(abs, self.errors)) / len(self.errors)


def _finish(coroutine: object) -> None:
    """Run a coroutine that does not wait."""
    with pytest.raises(StopIteration):
        coroutine.send(None)  # type: ignore[attr-defined]


class Texts:
    """Prompts that share prefixes: a system prompt, one of some documents, and a conversation that grows."""

    def __init__(self, draw: random.Random, unit: int, own: int) -> None:
        self.draw, self.unit, self.own = draw, unit, own
        self.system = draw.randbytes(4 * unit)
        self.documents = [draw.randbytes(draw.randint(1, 12) * unit) for _ in range(4)]
        self.turns: dict[int, bytes] = defaultdict(bytes)

    def next(self) -> bytes:
        kind = self.draw.random()
        if kind < 0.2:
            shared = self.draw.randbytes(self.draw.randint(0, 6) * self.unit)
        elif kind < 0.5:
            shared = self.system + self.draw.choice(self.documents)
        else:
            user = self.draw.randrange(5)
            if len(self.turns[user]) > 20 * self.unit:
                del self.turns[user]
            self.turns[user] += self.draw.randbytes(self.draw.randint(1, 4) * self.unit)
            shared = self.system + self.turns[user]
        return shared + self.draw.randbytes(4 * self.draw.randint(1, self.own))


def within_a_block(rig: Rig, block: int = BLOCK) -> bool:
    return all(abs(error) < block for error in rig.errors)


PAGES = (16, 32, 64, 128, 256, 512, 1024)


def examples(count: int) -> settings:
    """Seeds do not shrink, so a failure is reported as it was found."""
    return settings(max_examples=count, phases=(Phase.explicit, Phase.reuse, Phase.generate))


@examples(30)
@given(st.integers(0, 2**32), st.sampled_from([160, 250, 600]), st.sampled_from([8, 16, 32]))
def test_exact_one_at_a_time_with_answers_of_any_length(seed: int, tokens_16: int, page: int) -> None:
    draw = random.Random(seed)
    rig, texts = Rig(tokens_16 * 16 // page, page), Texts(draw, SHORT, 60)
    for _ in range(80):
        rig.send(texts.next(), draw.randint(1, 300))
        rig.run()
    assert max(map(abs, rig.errors)) < BLOCK, rig.errors


@pytest.mark.long
@examples(60)
@given(st.integers(0, 2**32), st.sampled_from(PAGES), st.sampled_from([40, 100]))
def test_the_same_is_held_after_each_of_many_answers(seed: int, page: int, units: int) -> None:
    draw = random.Random(seed)
    unit = max(page, BLOCK)
    rig, texts = Rig(units * unit // page, page, budget=1 << 20), Texts(draw, 4 * unit, 2 * unit)
    for _ in range(60):
        rig.send(texts.next(), draw.randint(1, 5 * unit))
        rig.run()
        assert rig.apart() == []


@pytest.mark.long
@examples(60)
@given(st.integers(0, 2**32), st.sampled_from(PAGES), st.sampled_from([60, 150]))
def test_the_same_is_held_while_many_are_computed_at_once(seed: int, page: int, units: int) -> None:
    draw = random.Random(seed)
    unit = max(page, BLOCK)
    rig, texts = Rig(units * unit // page, page, budget=1 << 20), Texts(draw, 4 * unit, 2 * unit)
    for _ in range(60):
        prompt = texts.next()
        rig.send(prompt, draw.randint(1, -(len(prompt) // 4) % page + 1))
        for _ in range(draw.choice([1, 1, 2, 10, 50])):
            rig.step()
            assert rig.apart() == []
    rig.run()
    assert rig.apart() == []


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from([160, 250, 600]), st.sampled_from([2, 256]))
def test_exact_many_at_once_with_answers_of_one_token(seed: int, blocks: int, running: int) -> None:
    draw = random.Random(seed)
    rig, texts = Rig(blocks, running=running), Texts(draw, SHORT, 60)
    for _ in range(80):
        rig.send(texts.next(), 1)
        for _ in range(draw.choice([0, 0, 1, 3])):
            rig.step()
    rig.run()
    assert max(rig.errors) < BLOCK, rig.errors
    assert min(rig.errors) > -BLOCK - rig.page * rig.most_live, rig.errors


def test_exact_where_blocks_are_long() -> None:
    draw = random.Random(3)
    rig, texts = Rig(3000), Texts(draw, LONG, 60)
    texts.system = draw.randbytes(LONG_FROM)
    for _ in range(60):
        rig.send(texts.next(), draw.randint(1, 30))
        rig.run()
    assert max(map(abs, rig.errors)) < LONG // 4, rig.errors


@examples(60)
@given(st.integers(0, 2**32), st.sampled_from([250, 600, 2000]), st.sampled_from([2, 8, 256]))
def test_close_on_average_when_prompts_part_anywhere_and_answers_grow(seed: int, blocks: int, running: int) -> None:
    draw = random.Random(seed)
    rig, texts = Rig(blocks, running=running), Texts(draw, 4 * 37, 60)
    for _ in range(120):
        rig.send(texts.next(), draw.randint(1, 60))
        for _ in range(draw.choice([0, 1, 5, 40])):
            rig.step()
        for name in aborted(rig, draw, 0.03):
            if rig.live[name][1].generated:
                rig.abort(name)
    rig.run()
    assert rig.mean_error < BLOCK, rig.errors


@examples(15)
@given(st.integers(0, 2**32))
def test_requests_aborted_at_any_moment_leave_no_belief_in_what_was_not_computed(seed: int) -> None:
    draw = random.Random(seed)
    rig, texts = Rig(20_000), Texts(draw, SHORT, 60)
    rig.send(b"one that succeeds shows that this gateway shows statuses", 1)
    rig.run()
    sent = []
    for _ in range(60):
        sent.append(texts.next())
        rig.send(sent[-1], draw.randint(1, 60))
        for _ in range(draw.choice([0, 0, 1, 20])):
            rig.step()
        for name in aborted(rig, draw, 0.2):
            rig.abort(name)
    rig.run()
    rig.errors.clear()
    for prompt in sent:
        rig.send(prompt, 1)
        rig.run()
    assert max(rig.errors) < BLOCK, rig.errors


def aborted(rig: Rig, draw: random.Random, share: float) -> list[str]:
    return [name for name in rig.live if draw.random() < share]
