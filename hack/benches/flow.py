"""A quiet tenant beside one that floods, behind a real Envoy: TTFT and throughput with each picker's flow control.

    hack/bench flow --peer llm-d-router="hack/peers/llm-d-router run-flow build/llm-d-epp {endpoints} {grpc_port}
        {health_port} {metrics_port}"

The pods are simulated, in real time. The quiet tenant asks at a steady rate and streams; the other always has so many
requests under way; the header x-llm-d-inference-fairness-id says whose a request is. With `--priorities` the quiet
one's requests have an InferenceObjective of a higher priority too; a peer that reads these from a cluster only knows
tenants. Pickers take turns over the same pods. Only ratios mean anything: pods, pickers, Envoy and clients share the
machine.
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
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Final, NamedTuple

import aiohttp

from epp import protocol
from hack.benches.rig import envoy
from hack.benches.rig.peer import OURS, peer
from hack.benches.rig.pickers import EPP, envoy_program
from hack.benches.rig.processes import BenchError, Program, running
from tooling.laptop.ports import free_ports

WITHOUT: Final = "without flow control"
ALONE: Final = "the quiet tenant alone"
POOL: Final = "bench"
_EPP: Final = f"{EPP} --endpoints {{folder}}/objectives.yaml --pool-name {POOL}"
_COMMANDS: Final = {WITHOUT: _EPP, OURS: f"{_EPP} --flow-control --trust-client-headers"}
_PROMPT: Final = 700
"""Words of the flood's prompts; the quiet tenant's have a third of them."""
_ANSWER: Final = 48
_LONGEST: Final = 120.0


_OBJECTIVES: Final = [
    {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceObjective",
        "metadata": {"name": name},
        "spec": {"priority": priority, "poolRef": {"name": POOL}},
    }
    for name, priority in (("quiet", 1), ("flood", 0))
]


class Load(NamedTuple):
    rate: float
    """Requests a second of the quiet tenant."""
    flood: int
    """Requests under way of the other; 0: it is not there."""
    seconds: float
    priorities: bool = False
    """The quiet tenant's is higher."""


class Outcome(NamedTuple):
    """Of one picker in one round."""

    ttfts: Sequence[float]
    """Of the quiet tenant."""
    flood: float
    """Generated tokens a second of the other."""
    lost: int

    @property
    def p95(self) -> float:
        return quantiles(self.ttfts, n=20, method="inclusive")[-1]


@contextmanager
def chain(commands: Mapping[str, str], pods: int) -> Iterator[dict[str, int]]:
    """Pods, pickers and Envoy while the block runs; the port of each picker's way through Envoy."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        ports = free_ports(pods + 4 * len(commands))
        engines, free = ports[:pods], iter(ports[pods:])

        def start(name: str, command: Sequence[str], port: int) -> Program:
            program = stack.enter_context(running(name, command, folder))
            program.wait_for_port(port)
            return program

        for number, port in enumerate(engines):
            words = ["-m", "tooling.simulator.server", "--port", str(port), "--name", f"pod-{number}"]
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


async def played(port: int, load: Load, seed: int) -> Outcome:
    """What becomes of `load` at this port."""
    chance = Random(f"flow {seed}")
    ttfts: list[float] = []
    tokens, lost = 0, 0
    clock = asyncio.get_running_loop().time
    timeout = aiohttp.ClientTimeout(total=_LONGEST)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
        end = clock() + load.seconds

        async def ask(tenant: str, words: int, *, stream: bool) -> tuple[float, int]:
            """Seconds to the first token, and tokens of the answer; raises where there is none."""
            prompt = " ".join(f"{chance.getrandbits(40):x}" for _ in range(words // 4))
            body = {"model": "sim", "prompt": prompt, "max_tokens": _ANSWER, "ignore_eos": True, "stream": stream}
            began = clock()
            headers = {protocol.FAIRNESS_ID[0]: tenant}
            if load.priorities:
                headers[protocol.OBJECTIVE[0]] = tenant
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with client.post(url, json=body, headers=headers) as answer:
                answer.raise_for_status()
                await answer.content.readany()
                first = clock() - began
                await answer.read()
            return first, _ANSWER

        async def quiet() -> None:
            nonlocal lost
            try:
                ttfts.append((await ask("quiet", _PROMPT // 3, stream=True))[0])
            except (aiohttp.ClientError, TimeoutError):
                lost += 1

        async def flood() -> None:
            nonlocal tokens, lost
            while clock() < end:
                try:
                    _, got = await ask("flood", _PROMPT, stream=False)
                except (aiohttp.ClientError, TimeoutError):
                    lost += 1
                    await asyncio.sleep(0.1)
                else:
                    tokens += got if clock() < end else 0

        async with asyncio.TaskGroup() as asking:
            flooding = [asking.create_task(flood()) for _ in range(load.flood)]
            while clock() < end:
                await asyncio.sleep(chance.expovariate(load.rate))
                asking.create_task(quiet())
            for task in flooding:
                task.cancel()
    if len(ttfts) < 2:
        raise BenchError(f"of the quiet tenant {len(ttfts)} requests were answered and {lost} lost")
    return Outcome(ttfts, tokens / load.seconds, lost)


def run(commands: Mapping[str, str], pods: int, load: Load, rounds: int) -> dict[str, list[Outcome]]:
    """Each picker once for each round, every second round in reverse order."""
    found: dict[str, list[Outcome]] = {}
    with chain(commands, pods) as ports:
        for turn in range(rounds):
            ways = [(ALONE, ports[WITHOUT], load._replace(flood=0)), *((name, ports[name], load) for name in commands)]
            for name, port, its in ways if turn % 2 == 0 else reversed(ways):
                print(f"round {turn + 1} of {rounds}: {name}", file=sys.stderr)
                found.setdefault(name, []).append(asyncio.run(played(port, its, turn)))
    return found


def table(found: Mapping[str, Sequence[Outcome]]) -> str:
    """Markdown; medians over rounds."""
    alone = median(outcome.p95 for outcome in found[ALONE])
    full = median(outcome.flood for outcome in found[WITHOUT])
    lines = [
        "| picker | quiet TTFT p50 | p95 | p95 : alone | flood, tokens/s | : without | lost |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (ALONE, *(name for name in found if name != ALONE)):
        outcomes = found[name]
        p50 = median(median(outcome.ttfts) for outcome in outcomes)
        p95 = median(outcome.p95 for outcome in outcomes)
        flood = median(outcome.flood for outcome in outcomes)
        lost = sum(outcome.lost for outcome in outcomes)
        lines.append(
            f"| {name} | {p50:.3f} s | {p95:.3f} s | {p95 / alone:.2f} | {flood:.0f} | {flood / full:.2f} | {lost} |"
        )
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    doc = (__doc__ or "").splitlines()
    parser = argparse.ArgumentParser(prog="hack/bench flow", description=doc[0] if doc else "")
    parser.add_argument("--peer", type=peer, action="append", default=[], metavar="NAME=COMMAND")
    parser.add_argument("--pods", type=int, default=2, help="simulated pods, of the preset `laptop` (2)")
    parser.add_argument("--rate", type=float, default=2.0, help="of the quiet tenant, requests a second (2)")
    parser.add_argument("--flood", type=int, default=100, help="requests of the other under way (100)")
    parser.add_argument("--seconds", type=float, default=30.0, help="of each measurement (30)")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--priorities", action="store_true", help="the quiet tenant's requests have a higher priority")
    flags = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends
    try:
        load = Load(flags.rate, flags.flood, flags.seconds, flags.priorities)
        print(table(run({**_COMMANDS, **dict(flags.peer)}, flags.pods, load, flags.rounds)), end="")
    except BenchError as error:
        print(f"hack/bench flow: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
