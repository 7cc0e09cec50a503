"""What users send: seeded streams of sessions, pure. A client plays them in real time, the replay in virtual time.

A `Session` is a conversation: its first request comes at `starts_at`, each further one `pause` seconds after the
answer before it, and contains that answer. What is a single request elsewhere is a session of one turn here. Sizes are
tokens of `tooling.simulator.tokenizer` (a word of three letters and a blank); other tokenizers see about as many.

    for session in sessions:                      # one task each, in real time
        answers = []
        for turn in session.turns:                # wait until session.starts_at, then turn.pause after each answer
            answers.append(await ask(session.messages(answers), turn.max_tokens))
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from tooling.simulator.answers import WORDS

Message = dict[str, str]


@dataclass(frozen=True)
class Turn:
    """One request of a session."""

    text: str
    """What the user says."""
    max_tokens: int
    pause: float = 0.0
    """Seconds between the answer before and this request; without meaning at the first turn."""


@dataclass(frozen=True)
class Session:
    """A conversation."""

    id: str
    """Unique in its workload; the kind of workload stands before the first `-`."""
    starts_at: float
    """Seconds from the start of the workload."""
    system: str
    """What stands before the first question: a shared system prompt or a document; empty for none."""
    turns: tuple[Turn, ...]

    def messages(self, answers: Sequence[str]) -> list[Message]:
        """The messages of the request that follows `answers`, the texts of all answers so far."""
        conversation = [{"role": "system", "content": self.system}] if self.system else []
        for turn, answer in zip(self.turns, answers, strict=False):
            conversation += [{"role": "user", "content": turn.text}, {"role": "assistant", "content": answer}]
        return [*conversation, {"role": "user", "content": self.turns[len(answers)].text}]


def chats(
    seed: int,
    *,
    sessions: int,
    turns: int,
    seconds: float,
    system_tokens: int = 400,
    question_tokens: int = 40,
    answer_tokens: int = 48,
    pause: float = 1.0,
) -> list[Session]:
    """Conversations of several turns that share one system prompt. They start evenly at random within `seconds`."""
    chance = random.Random(f"chats {seed}")
    system = _text(chance, system_tokens)
    return [
        Session(
            f"chat-{number}",
            at,
            system,
            tuple(
                Turn(_text(chance, question_tokens), answer_tokens, pause * chance.uniform(0.5, 1.5))
                for _ in range(turns)
            ),
        )
        for number, at in enumerate(_arrivals(chance, sessions, seconds))
    ]


def documents(
    seed: int,
    *,
    documents: int,
    questions: int,
    seconds: float,
    document_tokens: int = 2000,
    question_tokens: int = 24,
    answer_tokens: int = 32,
    skew: float = 0.6,
) -> list[Session]:
    """Questions about shared documents. The k-th document is asked about with weight 1 / k ** skew (Zipf)."""
    chance = random.Random(f"documents {seed}")
    texts = [_text(chance, document_tokens) for _ in range(documents)]
    weights = [1 / (rank + 1) ** skew for rank in range(documents)]
    return [
        Session(
            f"document-{number}",
            at,
            chance.choices(texts, weights)[0],
            (Turn(_text(chance, question_tokens), answer_tokens),),
        )
        for number, at in enumerate(_arrivals(chance, questions, seconds))
    ]


def burst(
    seed: int, *, requests: int, at: float = 0.0, prompt_tokens: int = 2000, answer_tokens: int = 32
) -> list[Session]:
    """The same cold prompt, `requests` times at one moment."""
    turn = Turn(_text(random.Random(f"burst {seed}"), prompt_tokens), answer_tokens)
    return [Session(f"burst-{number}", at, "", (turn,)) for number in range(requests)]


def independent(
    seed: int, *, requests: int, seconds: float, prompt_tokens: int = 400, answer_tokens: int = 48
) -> list[Session]:
    """Prompts that share nothing, of half to one and a half times `prompt_tokens`."""
    chance = random.Random(f"independent {seed}")
    return [
        Session(
            f"independent-{number}",
            at,
            "",
            (Turn(_text(chance, round(prompt_tokens * chance.uniform(0.5, 1.5))), answer_tokens),),
        )
        for number, at in enumerate(_arrivals(chance, requests, seconds))
    ]


def demo(seed: int = 0) -> list[Session]:
    """The demo's mix for three pods of the preset `LAPTOP`: 107 requests in about ten seconds, by time of arrival.

    Its documents and chats fit in three such caches together, but not in one: where requests go decides.
    """
    asked = documents(seed, documents=10, questions=75, seconds=10.0)
    talked = chats(seed, sessions=8, turns=4, seconds=4.0)
    return sorted(asked + talked, key=lambda session: session.starts_at)


def _arrivals(chance: random.Random, count: int, seconds: float) -> list[float]:
    """Times of a Poisson process that had `count` arrivals within `seconds`, in order."""
    return sorted(chance.uniform(0, seconds) for _ in range(count))


def _text(chance: random.Random, tokens: int) -> str:
    return "".join(chance.choices(WORDS, k=tokens))
