"""Policies on two real vLLM pods and in a replay with calibrated pods: do their order and their ratios agree?

Takes the pod kind that `hack/bench calibrate` wrote on this machine. The policies take turns over the same chain of
Envoy, picker and vLLM; shared documents and conversations come at a rate that the calibrated pods can bear. The replay
gets the same requests at the same times. Prints Markdown. Only ratios mean anything: two pods and all else share the
processors, which a pod was alone on when it was calibrated.
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean, median
from typing import Final

from epp.errors import ConfigError
from hack.benches.rig.asking import Answered, EngineClient, client, play
from hack.benches.rig.processes import BenchError
from hack.benches.rig.workloads import asked, talked
from tooling.laptop.chain import SOURCE, Chain, ChainError, Shape, running_chain
from tooling.laptop.engines import EngineError, Vllm, engine_python
from tooling.replay.policies import Policy, policy
from tooling.replay.replay import Conditions, Replay
from tooling.replay.runs import saturation
from tooling.replay.trace import Trace
from tooling.simulator.presets import PodKind, preset

BASE: Final = "round-robin"
POLICIES: Final = (BASE, str(SOURCE / "tooling" / "policies" / "llm-d-default.yaml"), "prefix-aware")
WORKLOADS: Final = {"documents": asked, "chats": talked}
PODS: Final = 2
SCRAPE: Final = 0.5
TIE: Final = 0.05


@dataclass(frozen=True)
class Felt:
    """What came of a policy's requests."""

    ttfts: Sequence[float]
    """Of each request the median over the rounds."""
    hit_rate: float

    @property
    def mean(self) -> float:
        return fmean(self.ttfts)


By = Mapping[str, Felt]
"""By policy."""


def table(workload: str, real: By, replay: By) -> list[str]:
    """A Markdown row for each policy."""
    lines = []
    for name, own in real.items():
        said = replay[name]
        cells = [workload, name, f"{own.mean:.3f}", f"{said.mean:.3f}"]
        cells += [f"{own.mean / real[BASE].mean:.2f}", f"{said.mean / replay[BASE].mean:.2f}"]
        cells += [f"{100 * own.hit_rate:.1f}", f"{100 * said.hit_rate:.1f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(real: By, replay: By) -> str:
    """In a sentence, how far both agree: which of two policies is faster, and by how much than the first.

    Of two that the replay tells apart by less than `TIE` it says nothing.
    """
    pairs = [(a, b) for a, b in combinations(real, 2) if abs(replay[a].mean / replay[b].mean - 1) >= TIE]
    alike = sum((real[a].mean < real[b].mean) == (replay[a].mean < replay[b].mean) for a, b in pairs)
    off = [
        abs((replay[name].mean / replay[BASE].mean) / (real[name].mean / real[BASE].mean) - 1)
        for name in real
        if name != BASE
    ]
    order, said = (" < ".join(sorted(by, key=lambda name: by[name].mean)) for by in (real, replay))
    return (
        f"order {order}, replayed {said}: {alike} of {len(pairs)} pairs it tells apart agree; "
        f"ratios to {BASE} off by {median(off):.0%} (median), {max(off):.0%} at most"
    )


def felt(plays: Sequence[Sequence[Answered]]) -> Felt:
    """What came of the same requests, round by round."""
    answers = [each for play in plays for each in play]
    hits = sum(each.cached for each in answers) / sum(each.prompt for each in answers)
    return Felt([median(each.ttft for each in same) for same in zip(*plays, strict=True)], hits)


def replayed(trace: Trace, kind: PodKind, each: Policy, seed: int) -> Felt:
    """What the replay says of it."""
    served = Replay(trace, [kind] * PODS, each.build, Conditions(scrape=SCRAPE), seed).run()
    hits = sum(one.cached for one in served) / sum(ask.tokens for ask in trace.asks)
    return Felt([one.first - one.sent for one in served], hits)


async def measure(
    chain: Chain, config: Path, kind: PodKind, policies: Sequence[Policy], options: argparse.Namespace
) -> None:
    for workload in options.workload or WORKLOADS:
        make = WORKLOADS[workload]
        trace, seed = make(options.seed, options.requests), options.seed
        full = saturation(trace, [kind] * PODS, seed, lambda what, ended, total: None)
        trace = trace.scaled(options.load * full / trace.rate)
        plays: dict[str, list[list[Answered]]] = {each.name: [] for each in policies}
        for number in range(options.rounds):
            for each in policies:
                if config.read_text(encoding="utf-8") != each.text:
                    await chain.reconfigure(config, each.text)
                await asyncio.sleep(2 * SCRAPE)
                async with client() as http:
                    engine = EngineClient(http, chain.url, chain.shape.engine.model)
                    plays[each.name].append(await play(trace, engine, f"{number} {workload} {each.name}"))
        real = {name: felt(own) for name, own in plays.items()}
        said = {each.name: replayed(trace, kind, each, seed) for each in policies}
        for line in [*table(workload, real, said), "", f"{workload}: {verdict(real, said)}", ""]:
            print(line, flush=True)


async def run(options: argparse.Namespace) -> None:
    kind = preset(options.pod)
    policies = [policy(each) for each in POLICIES]
    size = kind.parameters
    limits = ("--max-num-batched-tokens", str(size.max_batched_tokens), "--max-num-seqs", str(size.max_running))
    engine = Vllm(engine_python(), size=options.model, block=size.block_size, blocks=size.blocks, flags=limits)
    with tempfile.TemporaryDirectory(prefix="warmpath-") as directory:
        config = Path(directory) / "strategy.yaml"
        config.write_text(policies[0].text, encoding="utf-8")
        flags = ("--config", str(config), "--refresh-metrics-interval", str(SCRAPE))
        async with running_chain(Shape(pods=PODS, port=0, picking=flags, engine=engine), Path(directory)) as chain:
            print(
                "| workload | policy | TTFT mean, s | replayed | of round-robin's | replayed | hit rate, % | replayed |"
            )
            print("|---|---|---|---|---|---|---|---|", flush=True)
            await measure(chain, config, kind, policies, options)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench fidelity", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("pod", help="file of the pod kind, by hack/bench calibrate")
    parser.add_argument(
        "--model", choices=["tiny", "small"], default="small", help="that it was calibrated with (small)"
    )
    parser.add_argument(
        "--workload", action="append", choices=list(WORKLOADS), help="one of them; may be repeated (all)"
    )
    parser.add_argument("--rounds", type=int, default=2, help="of each policy and workload (2)")
    parser.add_argument("--requests", type=int, default=20, help="of each round (20)")
    parser.add_argument("--load", type=float, default=0.3, help="as a share of what the calibrated pods can do (0.3)")
    parser.add_argument("--seed", type=int, default=1)
    try:
        asyncio.run(run(parser.parse_args(arguments)))
    except (BenchError, ChainError, EngineError, ConfigError) as error:
        print(f"hack/bench fidelity: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
