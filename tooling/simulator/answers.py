"""What the simulated model says: seeded, synthetic, one token per word.

The words have three letters and a blank, so each is exactly one token of `tooling.simulator.tokenizer`, and an answer
that comes back in the next turn's prompt has the very tokens that were generated.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from tooling.simulator import tokenizer as tokens
from tooling.simulator.tokenizer import Tokens

_VOCABULARY = """
sim pod kvs hit hot run map net bit log job key row set tap sun sea sky oak elm fox owl bee ant cat dog cow hen pig ram
bat cod eel jay kit pup yak red tan low big new old raw dry wet sly shy odd few six ten two one all any
"""
WORDS = tuple(f"{word} " for word in _VOCABULARY.split())

MEDIAN = 64
"""Typical length of an answer that is not cut, in tokens."""
SPREAD = 0.5
"""Standard deviation of the logarithm of that length."""
LONGEST = 512


@dataclass(frozen=True)
class Wish:
    """How long an answer may be. Lengths are tokens."""

    limit: int
    """At most; the request's own limit or what is left of the context."""
    least: int = 0
    endless: bool = False
    """`ignore_eos`: go on until `limit`."""
    stop: Sequence[str] = ()


@dataclass(frozen=True)
class Answer:
    """One generated answer, known before its first token is due."""

    pieces: Sequence[str]
    """Text of each token; empty where a stop string was cut off."""
    generated: Tokens
    """The tokens themselves, uncut."""
    reason: str
    """`stop` or `length`."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)


def answer(prompt: Tokens, wish: Wish, seed: Sequence[object]) -> Answer:
    """The answer to a prompt. Equal arguments, equal answer; other limits only cut or extend it."""
    chance = random.Random(xxhash.xxh3_64_intdigest(prompt, xxhash.xxh3_64_intdigest(msgspec.json.encode(seed))))
    natural = min(LONGEST, max(4, round(math.exp(chance.gauss(math.log(MEDIAN), SPREAD)))))
    length = wish.limit if wish.endless else min(wish.limit, max(natural, wish.least))
    reason = "length" if length == wish.limit and (wish.endless or natural > length) else "stop"
    pieces = chance.choices(WORDS, k=length)
    text = "".join(pieces)
    cut = min(
        (at for stop in wish.stop if stop and (at := text.find(stop, 4 * max(0, wish.least - 1))) >= 0), default=-1
    )
    if cut < 0:
        return Answer(pieces, tokens.encode(text), reason)
    ends = min(cut + len(stop) for stop in wish.stop if stop and text.startswith(stop, cut))
    length = -(-ends // 4)
    kept = text[:cut]
    return Answer(
        [kept[4 * index : 4 * index + 4] for index in range(length)], tokens.encode(text[: 4 * length]), "stop"
    )


def embedding(prompt: Tokens, dimensions: int, seed: int) -> list[float]:
    """A vector of length 1 that depends on the prompt alone."""
    chance = random.Random(xxhash.xxh3_64_intdigest(prompt, seed))
    vector = [chance.gauss(0, 1) for _ in range(dimensions)]
    norm = math.hypot(*vector)
    return [value / norm for value in vector]
