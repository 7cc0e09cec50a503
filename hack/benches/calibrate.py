"""The step times of a real vLLM as a pod kind for `warmpath replay --pods`, and how far such a replay is off.

Starts one vLLM on the CPU (a Llama of 82 million parameters), or asks the one at `--url`, which should have nothing
else to do. A design of requests tells what a step costs: prompts of several lengths, behind cached beginnings or not;
one to eight answers at a time at several contexts; prompts that come while others are answered. Then workloads that
the fit has not seen are sent at their times and replayed by the production replay, request beside request.
"""

import argparse
import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from statistics import median, quantiles
from typing import Final

import aiohttp
import yaml

from epp.errors import ConfigError
from epp.pool.engines import ENGINES, Places, parse
from hack.benches.rig.asking import Answered, EngineClient, client, play, text
from hack.benches.rig.fit import FitError, Fitted, Timing, fit, prefill
from hack.benches.rig.processes import BenchError
from hack.benches.rig.workloads import mixed, talked
from tooling.laptop.engines import EngineError, Vllm, engine_python
from tooling.laptop.processes import Processes
from tooling.replay.policies import policy
from tooling.replay.replay import Conditions, Replay
from tooling.replay.runs import saturation
from tooling.replay.trace import Trace
from tooling.simulator.engine import EngineParameters
from tooling.simulator.presets import PodKind

PROMPTS: Final = (64, 256, 512, 1024, 2048, 3500)
"""Tokens of a prompt nobody has seen."""
BEHIND: Final = ((64, 1024), (256, 1024), (64, 3072), (256, 3072))
"""Tokens of a prompt that are new, and those before them that are cached."""
STREAMS: Final = (8, 4, 2, 1)
CONTEXTS: Final = (128, 1024, 2048)
STEPS: Final = 24
"""Steps that a time per step is a mean over, or more."""
FEWEST: Final = 4
"""Steps without which there is none."""
BESIDE: Final = (256, 1024)
"""Tokens of a prompt that comes while others are answered."""
TARGET: Final = 0.1


@dataclass(frozen=True)
class Errors:
    """Relative errors over the requests of a workload: 0.1 is ten percent. `median` and `p90` without their signs."""

    median: float
    p90: float
    bias: float
    """The median with signs: above 0 where the replay is too slow."""

    def __str__(self) -> str:
        return f"median error {self.median:.1%}, nine in ten within {self.p90:.1%}, bias {self.bias:+.1%}"


def errors(real: Sequence[float], said: Sequence[float]) -> Errors:
    """Of pairs with a real value of more than 0; at least two of them."""
    found = [b / a - 1 for a, b in zip(real, said, strict=True) if a > 0]
    wrong = [abs(each) for each in found]
    return Errors(median(wrong), quantiles(wrong, n=10, method="inclusive")[8], median(found))


def noise(rounds: Sequence[Sequence[float]]) -> float:
    """How far a round is off the median of all of them, in the same place; the median over all, 0.1 is ten percent.

    No replay can be nearer to a machine than the machine is to itself.
    """
    found = [(value, median(same)) for same in zip(*rounds, strict=True) for value in same]
    return float(median(abs(value / usual - 1) for value, usual in found if usual > 0))


class Design:
    """The requests that tell what a step costs. `budget` is the engine's tokens a step."""

    def __init__(self, engine: EngineClient, budget: int, seed: int) -> None:
        self._engine = engine
        self._budget = budget
        self._seed = seed
        self._asked = 0

    async def round(self, chance: Random) -> list[Timing]:
        """All of it once, in an order of its own; told in always the same order."""
        todo: list[tuple[Callable[[int, int], Awaitable[Timing]], tuple[int, int]]] = []
        todo += [(self.alone, (tokens, 0)) for tokens in PROMPTS]
        todo += [(self.alone, pair) for pair in BEHIND]
        todo += [(self.decoding, (streams, context)) for streams in STREAMS for context in CONTEXTS]
        todo += [(self.beside, (tokens, 4)) for tokens in BESIDE]
        found: dict[int, Timing] = {}
        for number in chance.sample(range(len(todo)), len(todo)):
            measure, arguments = todo[number]
            found[number] = await measure(*arguments)
        return [found[number] for number in range(len(todo))]

    async def alone(self, tokens: int, cached: int) -> Timing:
        """Time to first token of a prompt on an idle engine, behind `cached` tokens that it has seen."""
        beginning = text(f"{self._seed} beginning", cached)
        if cached:
            await self._engine.ask(beginning, 1)
        answered = await self._engine.ask([*beginning, *self._fresh(tokens)], 1)
        fresh, pairs = prefill(fresh=answered.prompt - answered.cached, cached=answered.cached)
        return Timing(
            seconds=answered.ttft, steps=-(-int(fresh) // self._budget), prefill=fresh, pairs=pairs, requests=1
        )

    async def decoding(self, streams: int, context: int) -> Timing:
        """Time per step while `streams` answers are generated behind prompts of `context` tokens."""
        prompts = [text(f"{self._seed} stream {number}", context) for number in range(streams)]
        for output in (2 * STEPS, 12 * STEPS):  # where prompts take longer to arrive than short answers to end
            answers = await asyncio.gather(*(self._engine.ask(prompt, output) for prompt in prompts))
            if overlap(answers) >= STEPS:
                break
        return step_time(answers)

    async def beside(self, tokens: int, streams: int) -> Timing:
        """Time to first token of a prompt that comes while `streams` answers are generated."""
        begun = [asyncio.Event() for _ in range(streams)]
        context = CONTEXTS[0]
        async with asyncio.TaskGroup() as group:
            others = [
                group.create_task(
                    self._engine.ask(text(f"{self._seed} stream {number}", context), 40 * STEPS, on_first=event.set)
                )
                for number, event in enumerate(begun)
            ]
            for event in begun:
                await event.wait()
            answered = await self._engine.ask(self._fresh(tokens), 1)
            for other in others:
                other.cancel()
        await asyncio.sleep(0.3)  # until the engine has let go of them
        fresh, pairs = prefill(fresh=tokens, cached=0)
        steps = -(-tokens // (self._budget - streams)) + 0.5  # half of the one that it came into
        return Timing(
            seconds=answered.ttft,
            steps=steps,
            decodes=steps * streams,
            context=steps * streams * (context + STEPS),
            prefill=fresh,
            pairs=pairs,
            requests=1,
        )

    def _fresh(self, tokens: int) -> list[int]:
        self._asked += 1
        return text(f"{self._seed} fresh {self._asked}", tokens)


def overlap(answers: Sequence[Answered]) -> int:
    """Steps in which all of them were decoding, by the answer that ends first; 0 or less where there are none."""
    begin, ending = max(each.times[0] for each in answers), min(answers, key=lambda each: each.times[-1])
    return sum(at >= begin for at in ending.times) - 1


def step_time(answers: Sequence[Answered]) -> Timing:
    """The steps in which all of them were decoding: from the last first token to the first last one."""
    steps = overlap(answers)
    if steps < FEWEST:
        raise BenchError(f"{len(answers)} answers overlapped for {steps} tokens; expected at least {FEWEST}")
    ending = min(answers, key=lambda each: each.times[-1])
    begin, end = ending.times[-1 - steps], ending.times[-1]
    before = sum(each.prompt + sum(at < begin for at in each.times) for each in answers)
    context = steps * (before + len(answers) * steps / 2)
    return Timing(seconds=end - begin, steps=steps, decodes=steps * len(answers), context=context)


def typical(rounds: Sequence[Sequence[Timing]]) -> list[Timing]:
    """Of each place of the design the round that took the median time, the faster one of two."""
    return [
        sorted(same, key=lambda timing: timing.seconds / timing.steps)[(len(same) - 1) // 2]
        for same in zip(*rounds, strict=True)
    ]


def pod_file(kind: PodKind, comment: str) -> str:
    """What `warmpath replay --pods` takes."""
    fields = {_camel(name): value for name, value in asdict(kind.parameters).items()}
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.safe_dump({"price": kind.price, "parameters": fields}, sort_keys=False)


def _camel(name: str) -> str:
    head, *tail = name.split("_")
    return head + "".join(part.capitalize() for part in tail)


def kind_of(fitted: Fitted, size: EngineParameters, name: str, price: float) -> PodKind:
    """The fitted speeds with the size of the engine they are of."""
    speeds = {key: value for key, value in asdict(fitted).items() if key != "overhead"}
    return PodKind(name, replace(size, **speeds), price)


def at_load(trace: Trace, kind: PodKind, load: float, seed: int) -> Trace:
    """The trace at a share of the rate that the pod can do."""
    full = saturation(trace, [kind], seed, lambda what, ended, total: None)
    return trace.scaled(load * full / trace.rate)


def compared(trace: Trace, plays: Sequence[Sequence[Answered]], kind: PodKind, fitted: Fitted, seed: int) -> list[str]:
    """The replay beside the medians of what each request felt when the engine was asked; lines of a report."""
    served = Replay(trace, [kind], policy("round-robin").build, Conditions(), seed).run()
    ttfts = [[each.ttft for each in play] for play in plays]
    tpots = [[each.tpot for each in play] for play in plays]
    ttft = errors(
        [median(same) for same in zip(*ttfts, strict=True)],
        [each.first - each.sent + fitted.overhead for each in served],
    )
    tpot = errors(
        [median(same) for same in zip(*tpots, strict=True)],
        [(each.ended - each.first) / max(1, ask.output - 1) for each, ask in zip(served, trace.asks, strict=True)],
    )
    hits = sum(each.cached for play in plays for each in play) / sum(each.prompt for play in plays for each in play)
    said = sum(each.cached for each in served) / sum(ask.tokens for ask in trace.asks)
    return [
        f"{trace.name}, {len(plays)} times {len(served)} requests, {trace.rate:.2f}/s; "
        f"hit rate {hits:.1%}, replayed {said:.1%}",
        f"  TTFT: {ttft}; the engine itself {noise(ttfts):.1%} from round to round",
        f"  TPOT: {tpot}; the engine itself {noise(tpots):.1%} from round to round",
    ]


def machine() -> str:
    """The processor, in words."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{models[0] if models else 'unknown processor'}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"


async def size_of(url: str, budget: int, running: int) -> EngineParameters:
    """An engine's memory by its metrics page; its speeds are yet to be found."""
    try:
        async with aiohttp.ClientSession() as http, http.get(f"{url}/metrics") as answer:
            load = parse(await answer.read(), ENGINES["vllm"], 0.0, Places())
    except aiohttp.ClientError as error:
        raise BenchError(f"no answer from {url}: {error}") from error
    if load is None or not load.blocks or not load.block_size:
        raise BenchError(f"{url}/metrics does not report blocks and block size, as vLLM's does")
    return EngineParameters(
        block_size=load.block_size,
        blocks=load.blocks,
        max_batched_tokens=budget,
        max_running=running,
        base=1.0,
        per_decode=0.0,
        per_context_token=0.0,
        linear=0.0,
        attention=0.0,
    )


@asynccontextmanager
async def an_engine(options: argparse.Namespace) -> AsyncIterator[str]:
    """The URL of the engine: the given one, or one that is started and ended here."""
    if options.url:
        yield options.url.rstrip("/")
        return
    flags = ("--max-num-batched-tokens", str(options.max_batched_tokens), "--max-num-seqs", str(options.max_running))
    engine = Vllm(engine_python(), size=options.model, flags=flags)
    layout = engine.lay_out(["pod"])
    [pod], [program] = layout.pods, layout.programs.values()
    with tempfile.TemporaryDirectory(prefix="warmpath-") as directory:
        async with Processes(Path(directory)) as processes, aiohttp.ClientSession() as http:
            await processes.start(program.name, program.command, program.environment, children=True)
            await _ready(processes, http, program.ready, engine.ready_seconds)
            yield pod.url


async def _ready(processes: Processes, http: aiohttp.ClientSession, url: str, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while True:
                for _, what in processes.ended():
                    raise BenchError(what)
                try:
                    async with http.get(url) as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.2)
    except TimeoutError:
        raise BenchError(f"the engine was not ready within {seconds:g} seconds") from None


async def run(options: argparse.Namespace) -> None:
    print("starting the engine" if not options.url else f"asking {options.url}", flush=True)
    async with an_engine(options) as url, client() as http:
        engine = EngineClient(http, url, options.model)
        size = await size_of(url, options.max_batched_tokens, options.max_running)
        for warming in (1, 2):
            await engine.ask(text(f"warm {warming}", 300), 8)
        kind, report = await calibrated(engine, size, options)
    written = pod_file(kind, "\n".join(["Made by hack/bench calibrate.", *report]))
    Path(options.out).write_text(written, encoding="utf-8")
    print(written)


async def calibrated(
    engine: EngineClient, size: EngineParameters, options: argparse.Namespace
) -> tuple[PodKind, list[str]]:
    """The engine as a pod kind, and a report. Design and unseen workloads take turns: the machine's speed drifts."""
    name, seed = Path(options.out).stem, options.seed
    design = Design(engine, size.max_batched_tokens, seed)
    traces = [make(seed + 1, options.requests) for make in (mixed, talked)]
    rounds: list[list[Timing]] = []
    plays: list[list[list[Answered]]] = [[] for _ in traces]
    for number in range(options.rounds):
        rounds.append(await design.round(Random(f"{seed} {number}")))
        if not number:  # the rate has to be chosen before all is known
            first = kind_of(fit(rounds[0]), size, name, options.price)
            traces = [at_load(trace, first, options.load, seed) for trace in traces]
        for trace, own in zip(traces, plays, strict=True):
            own.append(await play(trace, engine, f"{seed} {number} {trace.name}"))
        print(f"round {number + 1} of {options.rounds}", flush=True)
    timings = typical(rounds)
    fitted = fit(timings)
    kind = kind_of(fitted, size, name, options.price)
    off = errors([1.0] * len(timings), [1 + error for error in fitted.errors(timings)])
    report = [
        f"vLLM, {engine.model}, on {machine()}",
        f"the fit's own {len(timings)} timings: {off}",
        f"outside the engine: {fitted.overhead * 1e3:.1f} ms a request, in TTFT below, in no step",
    ]
    for trace, own in zip(traces, plays, strict=True):
        report += compared(trace, own, kind, fitted, seed)
    return kind, report


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench calibrate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", default="calibrated.yaml", help="file of the pod kind (calibrated.yaml)")
    parser.add_argument("--url", default="", help="of a vLLM that runs; else one is started")
    parser.add_argument("--model", default="small", help="tiny or small, or what --url serves (small)")
    parser.add_argument("--max-batched-tokens", type=int, default=2048, help="--max-num-batched-tokens (2048)")
    parser.add_argument("--max-running", type=int, default=64, help="--max-num-seqs (64)")
    parser.add_argument("--rounds", type=int, default=3, help="of the design and the unseen workloads (3)")
    parser.add_argument("--requests", type=int, default=24, help="of each workload that the fit has not seen (24)")
    parser.add_argument("--load", type=float, default=0.3, help="of it, as a share of what the engine can do (0.3)")
    parser.add_argument("--price", type=float, default=1.0, help="dollars an hour (1)")
    parser.add_argument("--seed", type=int, default=1)
    try:
        asyncio.run(run(parser.parse_args(arguments)))
    except (BenchError, EngineError, FitError, ConfigError) as error:
        print(f"hack/bench calibrate: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
