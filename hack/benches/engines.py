"""What kv-aware saves over round-robin with real vLLM on CPUs: time to first token of long conversations.

Two vLLM pods, a Llama of 82 million parameters, Envoy and the picker. The strategies take turns over the same chain,
each round with conversations of its own that nobody has seen: a context of thousands of tokens, then questions, each
sent with all before it. Device caches are so small that one pod alone cannot hold all conversations of a round. With
`--tiers` LMCache stands behind, which round-robin profits from too. Only ratios mean anything.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random

from rich.console import Console

from epp.configuration.loader import strategy_text
from tooling.laptop.chain import Chain, ChainError, Shape, running_chain
from tooling.laptop.engines import EngineError, Tiers, Vllm, engine_python, knowing_tiers
from tooling.laptop.load import Outcome, play
from tooling.laptop.up import comparison
from tooling.simulator.workloads import Session, Turn

SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
BLOCK = 32
HEADROOM = 1.3
"""Of a device's memory over the half of the conversations that is its share."""


def conversations(seed: int, count: int, turns: int, context: int, every: float) -> list[Session]:
    """Conversations that begin one after the other, with contexts of about `context` tokens."""
    chance = Random(seed)

    def words(tokens: int) -> str:
        return " ".join("".join(chance.choices(SYLLABLES, k=2)) for _ in range(tokens // 2))

    return [
        Session(
            id=f"conversation-{seed}-{number}",
            starts_at=number * every,
            system=words(context),
            turns=tuple(Turn(words(40), max_tokens=16, pause=1.0) for _ in range(turns)),
        )
        for number in range(count)
    ]


def add(total: Outcome, more: Outcome) -> None:
    total.requests += more.requests
    total.ttfts += more.ttfts
    total.completion_tokens += more.completion_tokens
    total.prompt_tokens += more.prompt_tokens
    total.cached_tokens += more.cached_tokens
    total.seconds += more.seconds
    total.failures += more.failures


async def rounds(chain: Chain, config: Path, options: argparse.Namespace) -> dict[str, Outcome]:
    kv_aware = knowing_tiers(strategy_text("kv-aware"), chain.layout)
    texts = {"round-robin": strategy_text("round-robin"), "kv-aware": kv_aware}
    outcomes = {name: Outcome() for name in texts}
    seed = options.seed
    for _ in range(options.rounds):
        for name, text in texts.items():
            if config.read_text(encoding="utf-8") != text:
                await chain.reconfigure(config, text)
                await asyncio.sleep(2)  # KV events and the directory are received again
            seed += 1
            sessions = conversations(seed, options.conversations, options.turns, options.context, options.every)
            add(outcomes[name], await play(sessions, chain.url, chain.shape.engine.model))
    return outcomes


async def run(options: argparse.Namespace) -> int:
    longest = options.context + options.turns * 100
    context = -(-longest // 1024) * 1024 + 1024
    share = int(HEADROOM * options.conversations / 2 * longest / BLOCK)
    engine = Vllm(
        engine_python(),
        size=options.model,
        block=BLOCK,
        blocks=max(share, context // BLOCK + 1),  # vLLM wants room for one prompt at least
        context=context,
        tiers=Tiers() if options.tiers else None,
    )
    console = Console()
    with tempfile.TemporaryDirectory(prefix="warmpath-") as directory:
        config = Path(directory) / "strategy.yaml"
        config.write_text(strategy_text("round-robin"), encoding="utf-8")
        flags = ("--config", str(config), "--refresh-metrics-interval", "0.5")
        console.print("starting vLLM, endpoint picker and Envoy; then each round takes a minute or more")
        async with running_chain(Shape(pods=2, port=0, picking=flags, engine=engine), Path(directory)) as chain:
            outcomes = await rounds(chain, config, options)
    console.print(comparison(outcomes))
    before, after = outcomes["round-robin"].ttft(50), outcomes["kv-aware"].ttft(50)
    if before and after:
        console.print(f"TTFT p50 {1 - after / before:.0%} lower")
    failures = [failure for outcome in outcomes.values() for failure in outcome.failures]
    for failure in failures[:10]:
        console.print(f"no answer: {failure}", highlight=False, markup=False)
    return 1 if failures else 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench engines", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2, help="of each strategy (2)")
    parser.add_argument("--conversations", type=int, default=8, help="in a round (8)")
    parser.add_argument("--turns", type=int, default=4, help="of a conversation (4)")
    parser.add_argument("--context", type=int, default=4000, help="tokens a conversation begins with (4000)")
    parser.add_argument("--every", type=float, default=4.0, help="seconds between beginnings (4)")
    parser.add_argument("--model", choices=["tiny", "small"], default="small")
    parser.add_argument("--tiers", action="store_true", help="with LMCache behind")
    parser.add_argument("--seed", type=int, default=1)
    try:
        return asyncio.run(run(parser.parse_args(arguments)))
    except (EngineError, ChainError) as error:
        print(f"hack/bench engines: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
