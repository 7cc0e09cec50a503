"""Workloads for those who have no trace: seeded requests of the shapes that decide which policy wins.

Times are drawn for one new conversation a second; the replay scales them to the rate that is wanted. Sizes are tokens.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import accumulate, count
from math import exp
from random import Random
from typing import Final, Literal

from epp.plugin import Slo
from tooling.replay.trace import Piece, Trace, TraceRequest
from tooling.simulator import tokenizer as tokens
from tooling.simulator.workloads import demo as demo_sessions

Arrivals = Literal["poisson", "steady", "bursty"]
ARRIVALS: Final[tuple[Arrivals, ...]] = ("poisson", "steady", "bursty")
_BURST: Final = 10
"""Mean number of arrivals of a bursty process that come together."""
_FIRST: Final = 5.0
"""Seconds."""
_UNDER_WAY: Final = 63
"""Batch requests of a gateway: odd, so that all chains get the same."""
_FLOOD: Final = 320
"""Requests under way of who floods: more than eight pods run."""


class _Maker:
    """A workload in the making: numbers for pieces, times for arrivals, requests as they are added."""

    def __init__(self, name: str, seed: int, arrivals: Arrivals) -> None:
        self.name = name
        self.chance = Random(f"{name} {seed}")
        self.asks: list[TraceRequest] = []
        self._arrivals = arrivals
        self._pieces = count(1)
        self._now = 0.0

    def piece(self, tokens: int) -> Piece:
        """A text that nothing else contains."""
        return Piece(next(self._pieces), max(1, tokens))

    def drawn(self, median: float, spread: float = 0.5, most: float = 4.0) -> int:
        """Tokens, log-normal: lengths of prompts and answers are, in every published trace."""
        return max(1, round(median * min(most, exp(self.chance.gauss(0.0, spread)))))

    def arrival(self) -> float:
        """When the next one comes, one a second in the mean."""
        if self._arrivals == "steady":
            self._now += 1.0
        elif self._arrivals == "poisson":
            self._now += self.chance.expovariate(1.0)
        elif self.chance.random() < 1 / _BURST:
            self._now += self.chance.expovariate(1 / _BURST)
        return self._now

    def begun(self, requests: int) -> Iterator[tuple[int, float]]:
        """(number, when it comes) of conversations or the like, until they have made so many requests."""
        for number in count():
            if len(self.asks) >= requests:
                return
            yield number, self.arrival()

    def ask(
        self,
        at: float,
        prompt: tuple[Piece, ...],
        output: int,
        *,
        answered: bool = False,
        after: tuple[int, ...] = (),
        pause: float = 0.0,
        session: str = "",
        adapter: str = "",
    ) -> int:
        """Add a request; returns its number. `answered`: a later prompt contains the answer."""
        answer = next(self._pieces) if answered else 0
        self.asks.append(TraceRequest(at, prompt, output, answer, after, pause, session, adapter=adapter))
        return len(self.asks) - 1

    def done(self, number: int) -> tuple[Piece, ...]:
        """Prompt and answer of a request: what the next turn of its conversation begins with."""
        ask = self.asks[number]
        return (*ask.prompt, Piece(ask.answer, ask.output))

    def trace(self) -> Trace:
        return Trace(self.name, self.asks)


def chats(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Conversations of about six turns on five shared system prompts of 600 tokens; about 20 s between turns."""
    make = _Maker("chats", seed, arrivals)
    systems = [make.piece(make.drawn(600)) for _ in range(5)]
    for session, at in make.begun(requests):
        conversation: tuple[Piece, ...] = (make.chance.choice(systems),)
        last: tuple[int, ...] = ()
        for _ in range(1 + min(20, int(make.chance.expovariate(1 / 6)))):
            pause = make.chance.expovariate(1 / 20) if last else 0.0
            prompt = (*conversation, make.piece(make.drawn(120, 0.9)))
            number = make.ask(
                at, prompt, make.drawn(250, 0.6), answered=True, after=last, pause=pause, session=f"chat-{session}"
            )
            conversation, last = make.done(number), (number,)
    return make.trace()


def documents(
    seed: int,
    requests: int,
    arrivals: Arrivals,
    *,
    length: int,
    fresh: float = 1 / 16,
    skew: float = 0.9,
    answer: int = 200,
) -> Trace:
    """Questions about shared documents of `length` tokens.

    A question is about a new document with chance `fresh`, else about an old one, the k-th latest with weight
    1 / k ** skew (Zipf): so the share of cold prompts stays the same from beginning to end.
    """
    make = _Maker(f"documents-{length >> 10}k", seed, arrivals)
    texts: list[Piece] = []
    weights = list(accumulate((rank + 1) ** -skew for rank in range(requests)))
    for _ in range(requests):
        if not texts or make.chance.random() < fresh:
            texts.append(make.piece(length))
            text = texts[-1]
        else:
            text = texts[-1 - bisect_left(weights, make.chance.random() * weights[len(texts) - 1])]
        make.ask(make.arrival(), (text, make.piece(make.drawn(60))), make.drawn(answer))
    return make.trace()


def documents_8k(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Questions about documents of 8,192 tokens; each is asked about sixteen times in the mean."""
    return documents(seed, requests, arrivals, length=8192)


def documents_64k(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Questions about documents of 65,536 tokens; each is asked about sixteen times in the mean."""
    return documents(seed, requests, arrivals, length=65536)


def agents(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Code agents: a shared prompt of tools, a growing context, seconds of tool use, sub-agents side by side."""
    make = _Maker("agents", seed, arrivals)
    tools, helper = make.piece(6000), make.piece(3000)
    for task, at in make.begun(requests):
        session = f"agent-{task}"
        after: tuple[int, ...] = ()
        conversation: tuple[Piece, ...] = (tools, make.piece(make.drawn(4000, 0.8)))
        for _ in range(make.chance.randint(5, 25)):
            number = make.ask(
                at,
                conversation,
                make.drawn(180, 0.8),
                answered=True,
                after=after,
                pause=_tool(make, after),
                session=session,
            )
            helpers = make.chance.randint(2, 4) if make.chance.random() < 0.1 else 0
            after = tuple(_helper(make, helper, number, f"{session}-{n}") for n in range(helpers)) or (number,)
            conversation = (*make.done(number), make.piece(make.drawn(800, 0.9)))
    return make.trace()


def _helper(make: _Maker, system: Piece, caller: int, session: str) -> int:
    """A sub-agent's few steps; the number of its last."""
    at = make.asks[caller].at
    conversation: tuple[Piece, ...] = (system, make.piece(make.drawn(600)))
    last = caller
    for _ in range(make.chance.randint(2, 6)):
        last = make.ask(
            at,
            conversation,
            make.drawn(150, 0.8),
            answered=True,
            after=(last,),
            pause=_tool(make, (last,)),
            session=session,
        )
        conversation = (*make.done(last), make.piece(make.drawn(800, 0.9)))
    return last


def _tool(make: _Maker, after: tuple[int, ...]) -> float:
    """Seconds that running a tool takes."""
    return make.drawn(200, 1.0, most=30.0) / 100 if after else 0.0


def tools(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Assistants on forty shared prompts of tools, about 4,500 tokens, the k-th with weight 1 / k ** 1.1; few turns."""
    make = _Maker("tools", seed, arrivals)
    prompts = [make.piece(make.drawn(4500, 0.7)) for _ in range(40)]
    weights = list(accumulate((rank + 1) ** -1.1 for rank in range(len(prompts))))
    for session, at in make.begun(requests):
        conversation: tuple[Piece, ...] = tuple(make.chance.choices(prompts, cum_weights=weights))
        last: tuple[int, ...] = ()
        for _ in range(1 + min(10, int(make.chance.expovariate(1.0)))):
            prompt = (*conversation, make.piece(make.drawn(1200, 1.0, most=20.0)))
            number = make.ask(
                at,
                prompt,
                make.drawn(110, 1.0, most=15.0),
                answered=True,
                after=last,
                pause=make.chance.expovariate(1 / 20) if last else 0.0,
                session=f"tool-{session}",
            )
            conversation, last = make.done(number), (number,)
    return make.trace()


def batches(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Every ninth arrival brings a document of about 14,000 tokens, and 4 to 19 questions once it is summarised.

    They come within a minute or so, and it is never asked about again; the other arrivals share nothing.
    """
    make = _Maker("batches", seed, arrivals)
    for number, at in make.begun(requests):
        if make.chance.random() >= 1 / 9:
            make.ask(at, (make.piece(make.drawn(800, 0.8)),), make.drawn(200, 0.8))
            continue
        text, session = make.piece(make.drawn(14_000, 0.8, most=7.0)), f"batch-{number}"
        first = make.ask(at, (text, make.piece(make.drawn(60))), make.drawn(400), session=session)
        for _ in range(make.chance.randint(4, 19)):
            question, pause = make.piece(make.drawn(200, 0.8)), make.chance.expovariate(1 / 20)
            make.ask(at, (text, question), make.drawn(200, 0.8), after=(first,), pause=pause, session=session)
    return make.trace()


def reasoning(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Short prompts, answers of about 1,500 tokens, of which the next turn has the last entry alone."""
    make = _Maker("reasoning", seed, arrivals)
    system = make.piece(2000)
    for session, at in make.begun(requests):
        conversation: tuple[Piece, ...] = (system,)
        last: tuple[int, ...] = ()
        for _ in range(1 + min(12, int(make.chance.expovariate(1 / 2)))):
            pause = make.chance.expovariate(1 / 30) if last else 0.0
            conversation = (*conversation, make.piece(make.drawn(500, 1.0, most=15.0)))
            output = make.drawn(1500, 0.9, most=8.0)
            last = (make.ask(at, conversation, output, after=last, pause=pause, session=f"reasoning-{session}"),)
            # Chat templates leave out what a model thought before it answered.
            conversation = (*conversation, make.piece(min(output, make.drawn(300))))
    return make.trace()


def bursts(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Every thirtieth arrival is the same cold prompt of 6,000 tokens 24 times at once; the others share nothing."""
    make = _Maker("bursts", seed, arrivals)
    for _, at in make.begun(requests):
        if make.chance.random() < 1 / 30:
            cold = make.piece(6000)
            for _ in range(24):
                make.ask(at, (cold, make.piece(make.drawn(40))), make.drawn(150))
        else:
            make.ask(at, (make.piece(make.drawn(1500, 0.8)),), make.drawn(200))
    return make.trace()


def independent(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Prompts of about 1,500 tokens that share nothing."""
    make = _Maker("independent", seed, arrivals)
    for _ in range(requests):
        make.ask(make.arrival(), (make.piece(make.drawn(1500, 0.8)),), make.drawn(200))
    return make.trace()


def _alike(name: str, prompt: int, answer: int) -> Callable[[int, int, Arrivals], Trace]:
    def make(seed: int, requests: int, arrivals: Arrivals) -> Trace:
        made = _Maker(name, seed, arrivals)
        for _ in range(requests):
            made.ask(made.arrival(), (made.piece(prompt),), answer)
        return made.trace()

    make.__doc__ = f"Prompts of {prompt} tokens that share nothing, answers of {answer}."
    return make


ALIKE: Final = {"10k-1k": (10_000, 1_000), "5k-250": (5_000, 250), "1k-1k": (1_000, 1_000), "200-200": (200, 200)}
"""Workloads of one shape, tokens of prompt and answer, as benchmarks of disaggregated serving have them: the first and
the last are those of llm-d's guide, which says to split the one and not the other."""


def demo(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """The laptop demo's own 107 requests, whatever number and arrivals are asked for; best on three `laptop` pods."""
    make = _Maker("demo", seed, arrivals)
    known: dict[str, Piece] = {}
    for session in demo_sessions(seed):
        said: list[str] = []
        conversation: tuple[Piece, ...] = ()
        last: tuple[int, ...] = ()
        for turn in session.turns:
            length = tokens.count(tokens.render_chat(session.messages(said)))
            if not conversation and session.system:
                system = tokens.count(tokens.render_chat(session.messages(said)[:1], answer=False))
                conversation = (known.setdefault(session.system, make.piece(system)),)
            conversation = (*conversation, make.piece(length - sum(piece.tokens for piece in conversation)))
            number = make.ask(
                session.starts_at,
                conversation,
                turn.max_tokens,
                answered=True,
                after=last,
                pause=turn.pause,
                session=session.id,
            )
            conversation, last = make.done(number), (number,)
            said.append("word " * turn.max_tokens)
    return make.trace()


def interactive_and_batch(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Chats of priority 1, and jobs of 200 prompts of about 2,000 tokens at once of priority -1: one job for every 100
    chats, so twice as many requests. Classes `interactive` and `batch`.
    """
    make = _Maker("interactive-and-batch", seed, arrivals)
    systems = [make.piece(make.drawn(600)) for _ in range(5)]
    asks: list[TraceRequest] = []
    while len(asks) < requests:
        at = make.arrival()
        prompt = (make.chance.choice(systems), make.piece(make.drawn(300, 0.9)))
        asks.append(TraceRequest(at, prompt, make.drawn(200, 0.6), tenant="chat", priority=1, label="interactive"))
        if make.chance.random() < 1 / 100:
            task = make.piece(500)
            asks += [
                TraceRequest(
                    at,
                    (task, make.piece(make.drawn(2000, 0.6))),
                    make.drawn(300, 0.6),
                    tenant="batch",
                    priority=-1,
                    label="batch",
                )
                for _ in range(200)
            ]
    return Trace(make.name, asks)


def noisy_neighbour(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Two tenants of equal priority: `quiet` asks now and then, `flooding` as often and, every fiftieth time, 200
    prompts at once. Prompts of about 1,500 tokens that share nothing.
    """
    make = _Maker("noisy-neighbour", seed, arrivals)
    asks: list[TraceRequest] = []
    while len(asks) < requests:
        at = make.arrival()
        tenant = "quiet" if make.chance.random() < 0.5 else "flooding"
        for _ in range(200 if tenant == "flooding" and make.chance.random() < 1 / 50 else 1):
            prompt = (make.piece(make.drawn(1500, 0.8)),)
            asks.append(TraceRequest(at, prompt, make.drawn(200), tenant=tenant, label=tenant))
    return Trace(make.name, asks)


def adapters(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Chats of about three turns, each with one of forty LoRA adapters, the k-th with weight 1 / k; an adapter has a
    system prompt of about 600 tokens.
    """
    make = _Maker("adapters", seed, arrivals)
    names = [f"adapter-{number + 1}" for number in range(40)]
    systems = {name: make.piece(make.drawn(600)) for name in names}
    weights = list(accumulate(1 / (rank + 1) for rank in range(len(names))))
    for session, at in make.begun(requests):
        (name,) = make.chance.choices(names, cum_weights=weights)
        conversation: tuple[Piece, ...] = (systems[name],)
        last: tuple[int, ...] = ()
        for _ in range(1 + min(10, int(make.chance.expovariate(1 / 2)))):
            pause = make.chance.expovariate(1 / 20) if last else 0.0
            prompt = (*conversation, make.piece(make.drawn(120, 0.9)))
            number = make.ask(
                at,
                prompt,
                make.drawn(200, 0.6),
                answered=True,
                after=last,
                pause=pause,
                session=f"chat-{session}",
                adapter=name,
            )
            conversation, last = make.done(number), (number,)
    return make.trace()


def agents_with_slo(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Agents of three teams: a task reads about 8,000 tokens and calls tools about ten times, each call adding some
    500 tokens. Every second task has somebody waiting for it: priority 1 and its first tokens within 1 s (class
    `watched`); the others have priority 0 and 10 s (`background`). Every twentieth arrival brings 16 tasks at once.
    """
    make = _Maker("agents-with-slo", seed, arrivals)
    asks = make.asks
    systems = {team: make.piece(4000) for team in ("red", "green", "blue")}
    while len(asks) < requests:
        at = make.arrival()
        for _ in range(16 if make.chance.random() < 1 / 20 else 1):
            team, watched = make.chance.choice([*systems]), make.chance.random() < 1 / 2
            conversation: tuple[Piece, ...] = (systems[team], make.piece(make.drawn(4000)))
            last: tuple[int, ...] = ()
            session = f"agent-{len(asks)}"
            for _ in range(1 + min(30, int(make.chance.expovariate(1 / 10)))):
                pause = make.chance.expovariate(1 / 2) if last else 0.0
                conversation = (*conversation, make.piece(make.drawn(500, 0.9)))
                number = make.ask(
                    at, conversation, make.drawn(120, 0.7), answered=True, after=last, pause=pause, session=session
                )
                asks[number] = replace(
                    asks[number],
                    tenant=team,
                    priority=int(watched),
                    label="watched" if watched else "background",
                    slo=Slo(1.0, objective="watched") if watched else Slo(10.0, objective="background"),
                )
                conversation, last = make.done(number), (number,)
    return make.trace()


def burst_from_zero(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """A tenth of all requests at once, in the fifth second, when a pool scaled to zero has no pod yet; the others as
    they come after it. Prompts of about 1,000 tokens that share nothing. To be played with pods that come later:
    `--fail POD@0+30` for each.
    """
    make = _Maker("burst-from-zero", seed, arrivals)
    asks: list[TraceRequest] = []
    for number in range(requests):
        first = number < requests / 10
        at = _FIRST if first else _FIRST + make.arrival()
        label = "burst" if first else "later"
        asks.append(TraceRequest(at, (make.piece(make.drawn(1000, 0.8)),), make.drawn(200), label=label))
    return Trace(make.name, asks)


def batch_gateway(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """The case that llm-d published of its batch gateway (llm-d-batch-gateway #491): 15 interactive requests a second
    for 90 s, none for 90 s, and so on, beside as many batch requests, of which 63 are always under way. All have 512
    tokens and answers of 128. Its times are those of the case: play it with `--times 1`.
    """
    make = _Maker("batch-gateway", seed, arrivals)

    def batch(after: tuple[int, ...]) -> TraceRequest:
        return TraceRequest(0.0, (make.piece(512),), 128, after=after, tenant="batch", priority=-1, label="batch")

    asks = [batch(()) for _ in range(_UNDER_WAY)]
    last = [*range(_UNDER_WAY)]
    while len(asks) < requests:
        active = make.arrival() / 15
        at = active + 90 * int(active // 90)
        asks.append(TraceRequest(at, (make.piece(512),), 128, tenant="chat", priority=1, label="interactive"))
        chain = len(asks) % _UNDER_WAY
        asks.append(batch((last[chain],)))
        last[chain] = len(asks) - 1
    return Trace(make.name, asks)


def flooded(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Two `quiet` requests a second of priority 1, and a `flood` of priority 0, of which 320 requests are always under
    way, with prompts three times as long. For pods of the kind `laptop`: two with `--times 1`, eight with `--times 4`.
    """
    make = _Maker("flooded", seed, arrivals)

    def one(label: str, at: float, tokens: int, after: tuple[int, ...] = ()) -> TraceRequest:
        prompt = (make.piece(tokens + make.chance.randint(-8, 8)),)
        priority = int(label == "quiet")
        return TraceRequest(at, prompt, 48, after=after, tenant=label, priority=priority, label=label)

    asks = [one("flood", 0.0, 478) for _ in range(_FLOOD)]
    last = [*range(_FLOOD)]
    chain = 0
    while len(asks) < requests:
        asks.append(one("quiet", make.arrival() / 2, 158))
        for _ in range(6):  # as many as two pods compute meanwhile
            asks.append(one("flood", 0.0, 478, (last[chain],)))
            last[chain] = len(asks) - 1
            chain = (chain + 1) % _FLOOD
    return Trace(make.name, asks)


def chats_and_reports(seed: int, requests: int, arrivals: Arrivals) -> Trace:
    """Chats of a few hundred tokens, and every fourth request a report over a text of about 12,000 that nothing else
    shares. Classes `chat`, to be served within 0.5 s and 25 ms a token, and `report`, within 20 s and 100 ms.
    """
    make = _Maker("chats-and-reports", seed, arrivals)
    systems = [make.piece(make.drawn(600)) for _ in range(5)]
    chat, report = Slo(0.5, 0.025, "chat"), Slo(20.0, 0.1, "report")
    asks: list[TraceRequest] = []
    while len(asks) < requests:
        at = make.arrival()
        if make.chance.random() < 1 / 4:
            text = (make.piece(make.drawn(12_000, 0.5)),)
            asks.append(TraceRequest(at, text, make.drawn(400, 0.6), label="report", slo=report))
        else:
            prompt = (make.chance.choice(systems), make.piece(make.drawn(300, 0.9)))
            asks.append(TraceRequest(at, prompt, make.drawn(200, 0.6), label="chat", slo=chat))
    return Trace(make.name, asks)


WORKLOADS: Final[Mapping[str, Callable[[int, int, Arrivals], Trace]]] = {
    "chats": chats,
    "documents-8k": documents_8k,
    "documents-64k": documents_64k,
    "agents": agents,
    "tools": tools,
    "batches": batches,
    "reasoning": reasoning,
    "bursts": bursts,
    "independent": independent,
    "interactive-and-batch": interactive_and_batch,
    "noisy-neighbour": noisy_neighbour,
    "adapters": adapters,
    "chats-and-reports": chats_and_reports,
    **{name: _alike(name, *shape) for name, shape in ALIKE.items()},
    "agents-with-slo": agents_with_slo,
    "burst-from-zero": burst_from_zero,
    "batch-gateway": batch_gateway,
    "flooded": flooded,
    "demo": demo,
}
"""Name -> (seed, number of requests, how new conversations arrive) -> trace. A last conversation is played whole."""
