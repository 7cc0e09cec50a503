"""Small replays for tests."""

from collections.abc import Sequence
from random import Random

from tooling.replay.policies import policy
from tooling.replay.replay import Conditions, Replay
from tooling.replay.trace import Piece, Trace, TraceRequest
from tooling.simulator import presets


def asks(*times: float, tokens: int = 400, output: int = 20, shared: int = 0) -> Trace:
    """Requests at these times; the first `shared` tokens are the same in all."""
    head = (Piece(1, shared),) if shared else ()
    return Trace(
        "test", [TraceRequest(at, (*head, Piece(number + 2, tokens)), output) for number, at in enumerate(times)]
    )


def steady(count: int, gap: float = 0.1, *, documents: int = 4, seed: int = 0) -> Trace:
    """Questions about a few documents, one each `gap` seconds."""
    chance = Random(seed)
    return Trace(
        "steady",
        [
            TraceRequest(
                n * gap, (Piece(1 + chance.randrange(documents), 1600), Piece(100 + n, 30)), 1 + chance.randrange(40)
            )
            for n in range(count)
        ],
    )


def play(
    trace: Trace,
    *,
    pods: str = "3*laptop",
    name: str = "prefix-aware",
    seed: int = 0,
    conditions: Conditions | None = None,
    l1: str | None = None,
) -> Replay:
    """A finished replay. `l1` as the flag has it."""
    kinds = presets.with_l1(presets.pods(pods), presets.tier(l1, "l1", 1e5) if l1 else None)
    made = Replay(trace, kinds, policy(name).build, conditions or Conditions(), seed)
    made.run()
    return made


def waits(made: Replay) -> Sequence[float]:
    """TTFT of each request."""
    return [served.first - served.sent for served in made.served]
