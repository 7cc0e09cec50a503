"""Those who must not wait beside those who fill the pool, behind a real Envoy: TTFT with each picker's flow control.

    hack/bench flow noisy-neighbour
    hack/bench flow noisy-neighbour --peer llm-d-router="hack/peers/llm-d-router run-flow build/llm-d-epp {endpoints}
        {grpc_port} {health_port} {metrics_port}"

Plays a workload of `warmpath replay` in real time on simulated pods of the kind that it is for. They share the
processors with pickers, Envoy and clients, so pods and arrivals are `--slower` times as slow as the workload says;
that changes no ratio. Whose a request is, the header x-llm-d-inference-fairness-id says, and its priority an
InferenceObjective; a peer that reads these from a cluster only knows tenants. Pickers take turns over the same pods.
Seconds are divided by `--slower` again.
"""

import argparse
import asyncio
import json
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Final, NamedTuple

import aiohttp

from epp import protocol
from hack.benches.rig import envoy
from hack.benches.rig.asking import paced
from hack.benches.rig.peer import OURS, peer
from hack.benches.rig.pickers import EPP, envoy_program
from hack.benches.rig.processes import BenchError, Program, running
from tooling.laptop.ports import free_ports
from tooling.replay.generators import WORKLOADS
from tooling.replay.trace import Trace, TraceRequest
from tooling.simulator.answers import WORDS

WITHOUT: Final = "without flow control"
ALONE: Final = "alone"
POOL: Final = "bench"
_EPP: Final = f"{EPP} --endpoints {{folder}}/objectives.yaml --pool-name {POOL}"
_COMMANDS: Final = {WITHOUT: _EPP, OURS: f"{_EPP} --flow-control --trust-client-headers"}
_LONGEST: Final = 600.0
_WARM_UP: Final = 60
"""Requests by which a picker learns how slow the pods are, before any that count."""
_PRIORITIES: Final = {1: "high", 0: "standard", -1: "low"}
_OBJECTIVES: Final = [
    {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name},
        "spec": {"priority": priority, "poolRef": {"name": POOL}},
    }
    for priority, name in _PRIORITIES.items()
]


@dataclass(frozen=True)
class Case:
    """A workload of the replay, and what it is played on."""

    watched: str
    """Class of those who must not wait."""
    pods: int
    kind: str
    rate: float | None
    """Requests a second of all together; None = the workload's own."""


CASES: Final[Mapping[str, Case]] = {
    "interactive-and-batch": Case("interactive", 4, "h100-8b", 24.1),
    "noisy-neighbour": Case("quiet", 4, "h100-8b", 24.5),
    "batch-gateway": Case("interactive", 2, "a100-gpt-oss-120b", None),
    "flooded": Case("quiet", 2, "laptop", None),
}


class Outcome(NamedTuple):
    """Of one picker in one round, in the workload's seconds."""

    ttfts: Sequence[float]
    """Of those who must not wait."""
    others: float
    """Generated tokens a second of the others, until the last of them ended."""
    lost: int

    @property
    def p95(self) -> float:
        return quantiles(self.ttfts, n=20, method="inclusive")[-1]


@contextmanager
def running_pool(commands: Mapping[str, str], case: Case, slower: float) -> Iterator[dict[str, int]]:
    """Pods, pickers and Envoy while the block runs; the port of each picker's way through Envoy."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        ports = free_ports(case.pods + 4 * len(commands))
        engines, free = ports[: case.pods], iter(ports[case.pods :])

        def start(name: str, command: Sequence[str], port: int) -> Program:
            program = stack.enter_context(running(name, command, folder))
            program.wait_for_port(port)
            return program

        for number, port in enumerate(engines):
            words = ["-m", "tooling.simulator.server", "--port", str(port), "--name", f"pod-{number}"]
            words += ["--preset", case.kind, "--time-scale", str(1 / slower)]
            start(f"pod-{number}", [sys.executable, *words], port)
        endpoints = [{"name": f"pod-{n}", "address": "127.0.0.1", "port": port} for n, port in enumerate(engines)]
        (folder / "endpoints.yaml").write_text(json.dumps({"endpoints": endpoints}))
        (folder / "objectives.yaml").write_text("---\n".join(json.dumps(each) + "\n" for each in _OBJECTIVES))
        listeners: dict[str, envoy.Listener] = {}
        for name, command in commands.items():
            grpc, health, metrics = next(free), next(free), next(free)
            given = {"endpoints": folder / "endpoints.yaml", "folder": folder, "python": sys.executable}
            words = shlex.split(command.format(grpc_port=grpc, health_port=health, metrics_port=metrics, **given))
            start(name.replace(" ", "-"), words, grpc)
            listeners[name] = envoy.Listener(next(free), grpc, "full-duplex")
        (folder / "envoy.json").write_text(json.dumps(envoy.config(listeners, [*map(envoy.Pod, engines)])))
        flags = ["--config-path", str(folder / "envoy.json"), "--concurrency", "1", "--disable-hot-restart"]
        start("envoy", [envoy_program(), *flags, "--log-level", "error"], next(iter(listeners.values())).port)
        yield {name: listener.port for name, listener in listeners.items()}


async def played(port: int, trace: Trace, watched: str, slower: float, salt: str) -> Outcome:
    """What becomes of `trace` at this port."""
    ttfts: list[float] = []
    tokens, lost = 0, 0
    clock = asyncio.get_running_loop().time
    began = last = clock()
    timeout = aiohttp.ClientTimeout(total=_LONGEST)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def send(number: int, ask: TraceRequest) -> None:
            nonlocal tokens, lost, last
            its = ask.label == watched
            pieces = [Random(f"{salt} {piece.id}").choices(WORDS, k=piece.tokens) for piece in ask.prompt]
            prompt = "".join(chain.from_iterable(pieces))
            body = {"model": "sim", "prompt": prompt, "max_tokens": ask.output, "ignore_eos": True, "stream": its}
            headers = {protocol.FAIRNESS_ID[0]: ask.tenant, protocol.OBJECTIVE[0]: _PRIORITIES[ask.priority]}
            sent = clock()
            try:
                async with client.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers) as answer:
                    answer.raise_for_status()
                    await answer.content.readany()
                    first = clock() - sent
                    await answer.read()
            except (aiohttp.ClientError, TimeoutError):
                lost += 1
                return
            if its:
                ttfts.append(first / slower)
            else:
                tokens, last = tokens + ask.output, clock()

        await paced(trace, send)
    return Outcome(ttfts, tokens * slower / (last - began) if tokens else 0.0, lost)


def run(commands: Mapping[str, str], name: str, case: Case, options: argparse.Namespace) -> dict[str, list[Outcome]]:
    """Each picker once for each round, every second round in reverse order."""
    found: dict[str, list[Outcome]] = {}

    def trace(seed: int) -> Trace:
        made = WORKLOADS[name](seed, options.requests, "poisson")
        return made.scaled((case.rate / made.rate if case.rate else 1.0) / options.slower)

    def outcome(port: int, trace: Trace, salt: str) -> Outcome:
        return asyncio.run(played(port, trace, case.watched, options.slower, salt))

    with running_pool(commands, case, options.slower) as ports:
        for picker, port in ports.items():
            first = trace(options.rounds)
            outcome(port, Trace(first.name, first.asks[:_WARM_UP]), f"warm-up {picker}")
        for turn in range(options.rounds):
            whole = trace(turn)
            ways = [
                (ALONE, ports[WITHOUT], whole.only(case.watched)),
                *((each, ports[each], whole) for each in commands),
            ]
            for picker, port, its in ways if turn % 2 == 0 else reversed(ways):
                print(f"round {turn + 1} of {options.rounds}: {picker}", file=sys.stderr)
                seen = outcome(port, its, f"{turn} {picker}")
                if len(seen.ttfts) < 2:
                    raise BenchError(f"{picker}: {len(seen.ttfts)} who must not wait were answered; {seen.lost} lost")
                found.setdefault(picker, []).append(seen)
    return found


def table(found: Mapping[str, Sequence[Outcome]]) -> str:
    """Markdown; medians over rounds."""
    alone = median(outcome.p95 for outcome in found[ALONE])
    full = median(outcome.others for outcome in found[WITHOUT])
    lines = [
        "| picker | TTFT p50 | p95 | p95 : alone | the others, tokens/s | : without | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (ALONE, *(name for name in found if name != ALONE)):
        outcomes = found[name]
        p50 = median(median(outcome.ttfts) for outcome in outcomes)
        p95 = median(outcome.p95 for outcome in outcomes)
        others = median(outcome.others for outcome in outcomes)
        lost = sum(outcome.lost for outcome in outcomes)
        lines.append(
            f"| {name} | {p50:.3f} s | {p95:.3f} s | {p95 / alone:.2f} | {others:.0f} | {others / full:.2f} | {lost} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    doc = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="hack/bench flow", description=doc[0] if doc else "")
    parser.add_argument("workload", choices=list(CASES))
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--requests", type=int, default=1000, help="of each measurement (1000)")
    parser.add_argument("--slower", type=float, default=3.0, help="how many times slower than the workload says (3)")
    parser.add_argument("--rounds", type=int, default=2)
    flags = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends
    try:
        found = run({**_COMMANDS, **dict(flags.peer)}, flags.workload, CASES[flags.workload], flags)
        print(table(found), end="")
    except BenchError as error:
        print(f"hack/bench flow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
