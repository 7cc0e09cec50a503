"""Traces so small that a CPU can serve them: seeded, one new conversation or question a second before scaling."""

from random import Random

from tooling.replay.generators import documents
from tooling.replay.trace import Piece, Trace, TraceRequest


def asked(seed: int, requests: int) -> Trace:
    """Questions about shared documents of 1,024 tokens, one in five about a new one."""
    return documents(seed, requests, "poisson", length=1024, fresh=1 / 5, answer=32)


def talked(seed: int, requests: int) -> Trace:
    """Conversations of four turns, each with a context of about 800 tokens of its own; about two seconds of thought."""
    chance = Random(f"talked {seed}")
    asks: list[TraceRequest] = []
    piece, at = 0, 0.0
    for session in range(-(-requests // 4)):
        at += chance.expovariate(1 / 4)
        conversation: tuple[Piece, ...] = ()
        after: tuple[int, ...] = ()
        for _ in range(4):
            piece += 2
            conversation = (
                *conversation,
                Piece(piece, chance.randint(30, 60) if conversation else chance.randint(500, 1100)),
            )
            output = chance.randint(16, 40)
            pause = chance.uniform(1, 3) if after else 0.0
            asks.append(TraceRequest(at, conversation, output, piece + 1, after, pause, f"talk-{session}"))
            conversation, after = (*conversation, Piece(piece + 1, output)), (len(asks) - 1,)
    return Trace("chats", asks)


def mixed(seed: int, requests: int) -> Trace:
    """Prompts of 100 to 3,000 tokens that share nothing and questions about documents, half and half."""
    chance = Random(f"mixed {seed}")
    asks: list[TraceRequest] = []
    at = 0.0
    for number in range(requests):
        at += chance.expovariate(1)
        own = Piece(1000 + number, round(100 * 30 ** chance.random()))
        shared = (Piece(1 + chance.randrange(4), 1024), Piece(1000 + number, chance.randint(20, 100)))
        asks.append(TraceRequest(at, shared if chance.random() < 0.5 else (own,), chance.randint(8, 64)))
    return Trace("mixed", asks)
