"""`warmpath up`: the chain with a live table, or (`--once`) two strategies compared on the same workload."""

import asyncio
import itertools
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NoReturn

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from epp.configuration.loader import strategy_text
from epp.errors import ConfigError
from epp.protocol import METRICS_PORT
from epp.telemetry.text import printable
from gateway.errors import GatewayError
from tooling.laptop.chain import MANIFESTS, Chain, ChainError, Shape, running_chain
from tooling.laptop.engines import (
    Engine,
    EngineError,
    Simulated,
    Tiers,
    Vllm,
    engine_python,
    has_lmcache,
    has_nixl,
    knowing_tiers,
)
from tooling.laptop.load import Outcome, play
from tooling.laptop.table import plain, screen, why
from tooling.laptop.watch import watch
from tooling.simulator.presets import roles
from tooling.simulator.workloads import demo

BASELINE = "round-robin"
REFRESH_SECONDS = 0.5
SHOWN_DECISIONS = 8


class UpError(Exception):
    """`warmpath up` cannot go on. `str()` is one sentence for a person."""


@dataclass(frozen=True)
class UpOptions:
    """The flags of `warmpath up`."""

    once: bool = False
    load: bool = False
    engine: str = "sim"
    """`sim` or `vllm`."""
    pods: int | None = None
    """None: three simulated ones, two of vLLM."""
    roles: str | None = None
    """As of `warmpath replay`: pods that prefill, decode or do both, as `1p1d`."""
    replicas: int = 1
    port: int | None = None
    strategy: str = "prefix-aware"
    config: Path | None = None
    plugins_from: Sequence[str] | None = None
    """As of `warmpath serve`; None: any."""
    flow_control: bool = False
    trust_client_headers: bool = False
    """As of `warmpath serve`, these two."""
    manifests: Path | None = None
    seed: int = 1
    keep_logs: Path | None = None

    @property
    def picking(self) -> tuple[str, ...]:
        """The same as flags of `warmpath serve`."""
        return (*(("--config", str(self.config)) if self.config else ("--strategy", self.strategy)), *self.allowed)

    @property
    def allowed(self) -> tuple[str, ...]:
        """Whose plugins may be used, and whether requests wait, as flags of `warmpath serve`."""
        allowed = () if self.plugins_from is None else ("--plugins-from", ",".join(self.plugins_from) or "none")
        flow = ["--flow-control"] if self.flow_control else []
        return (*allowed, *flow, *(["--trust-client-headers"] if self.trust_client_headers else []))

    @property
    def config_text(self) -> str:
        """The EndpointPickerConfig they come to."""
        return self.config.read_text(encoding="utf-8") if self.config else strategy_text(self.strategy)

    @property
    def label(self) -> str:
        return self.config.name if self.config else self.strategy


async def run(options: UpOptions) -> int:
    """Run until Ctrl-C or SIGTERM, or until the comparison is printed. Returns the exit status. Raises UpError."""
    console = Console()
    main = asyncio.current_task()
    assert main is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, main.cancel)
    try:
        async with AsyncExitStack() as stack:
            directory = options.keep_logs or Path(stack.enter_context(TemporaryDirectory(prefix="warmpath-")))
            directory.mkdir(parents=True, exist_ok=True)
            followed = directory / "strategy.yaml"
            follows = options.once or (options.engine == "vllm" and options.config is None)
            if follows:
                followed.write_text(strategy_text(BASELINE if options.once else options.strategy), encoding="utf-8")
            engine = _engine(options, console)
            shape = Shape(
                pods=len(engine.roles) or options.pods or (3 if options.engine == "sim" else 2),
                replicas=options.replicas,
                port=options.port,
                admin_port=METRICS_PORT,  # where what asks by itself, such as `warmpath explain`, looks
                picking=("--config", str(followed), *options.allowed) if follows else options.picking,
                manifests=options.manifests or MANIFESTS,
                engine=engine,
                plugins=options.config.absolute().parent if options.config and options.plugins_from != () else None,
            )
            with console.status(f"starting {shape.pods} {shape.engine.what}s, endpoint picker and Envoy"):
                chain = await stack.enter_async_context(running_chain(shape, directory))
            if options.once:
                return await _compare(chain, followed, options, console)
            if follows and (text := knowing_tiers(options.config_text, chain.layout)) != options.config_text:
                await chain.reconfigure(followed, text)
            await _show(chain, options, console)
    except (ChainError, EngineError, GatewayError, ConfigError) as error:
        raise UpError(str(error)) from error


def _engine(options: UpOptions, console: Console) -> Engine:
    labels = () if options.roles is None else roles(options.roles)
    if options.engine == "sim":
        return Simulated(options.seed, roles=labels)
    python = engine_python()
    if labels:
        if not has_nixl(python):
            raise UpError("--roles needs NIXL beside vLLM: run `hack/install engine`, or pip install nixl")
        return Vllm(python, roles=labels)
    if not has_lmcache(python):
        console.print("LMCache is not installed beside vLLM: each pod has its own cache and no other", soft_wrap=True)
    return Vllm(python, tiers=Tiers() if has_lmcache(python) else None)


async def _compare(chain: Chain, followed: Path, options: UpOptions, console: Console) -> int:
    """The same workload with round-robin and with the strategy; 1 if an answer is missing."""
    sessions = demo(options.seed)
    outcomes: dict[str, Outcome] = {}
    for name in dict.fromkeys((BASELINE, options.label)):
        if outcomes:
            await chain.reconfigure(followed, knowing_tiers(options.config_text, chain.layout))
            await chain.forget()
        with Progress(console=console, transient=True) as progress:
            bar = progress.add_task(escape(printable(name)), total=sum(len(session.turns) for session in sessions))
            outcomes[name] = await play(sessions, chain.url, chain.shape.engine.model, partial(progress.advance, bar))
    console.print(comparison(outcomes))
    failures = [f"{name}: {failure}" for name, outcome in outcomes.items() for failure in outcome.failures]
    for failure in failures[:10]:
        console.print(Text.assemble(("no answer", "red"), " ", plain(failure)), soft_wrap=True)
    return 1 if failures else 0


def comparison(outcomes: Mapping[str, Outcome]) -> Table:
    """The outcomes side by side, and how many times better the last is than the first."""
    first, last = next(iter(outcomes.values())), [*outcomes.values()][-1]
    table = Table(title=f"{first.requests} requests, the same for each", title_justify="left")
    table.add_column("")
    for name in outcomes:
        table.add_column(plain(name), justify="right")
    table.add_column("ratio", justify="right")
    rows: list[tuple[str, Callable[[Outcome], float], str]] = [
        ("TTFT p50", lambda o: o.ttft(50) * 1000, "ms"),
        ("TTFT p90", lambda o: o.ttft(90) * 1000, "ms"),
        ("throughput", lambda o: o.throughput, "tokens/s"),
        ("prefix hit rate", lambda o: o.hit_rate * 100, "%"),
    ]
    for label, value, unit in rows:
        old, new = value(first), value(last)
        ratio = f"{new / old:.2f}" if old else "–"
        table.add_row(label, *(f"{value(outcome):.0f} {unit}" for outcome in outcomes.values()), ratio)
    table.add_row("answered", *(f"{len(o.ttfts)} of {o.requests}" for o in outcomes.values()), "")
    return table


async def _show(chain: Chain, options: UpOptions, console: Console) -> NoReturn:
    """The live table until something ends it; without a terminal, a line for each decision instead."""
    console.print(_greeting(chain, options), soft_wrap=True)  # the curl line is to be copied

    def tell(sentence: str) -> None:
        console.print(plain(sentence), soft_wrap=True)

    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(watch(chain, tell))
            if options.load:
                tasks.create_task(_keep_asking(chain, options.seed))
            tasks.create_task(_live(chain, console) if console.is_terminal else _lines(chain, console))
    except* ChainError as group:
        lost = group.exceptions[0]
    raise UpError(str(lost)) from None


def _greeting(chain: Chain, options: UpOptions) -> Text:
    ask = (
        f"curl -s {chain.url}/v1/chat/completions -H 'content-type: application/json' "
        f'-d \'{{"model": "{chain.shape.engine.model}", "messages": [{{"role": "user", "content": "Hello"}}]}}\''
    )
    pods = f"{len(chain.pods)} {chain.shape.engine.what}s"
    return Text.assemble(
        (chain.url, "bold"),
        f" speaks OpenAI to {pods}; strategy {printable(options.label)}.\n\n",
        f"{ask}\n\n",
        f"page, decisions, metrics: {', '.join(f'{replica.admin}/' for replica in chain.replicas)}   end: Ctrl-C\n",
    )


async def _live(chain: Chain, console: Console) -> None:
    with Live(console=console, auto_refresh=False) as live:
        while True:
            pools, decisions = await chain.seen(SHOWN_DECISIONS)
            gone = {pod.address: pod.name for pod in chain.pods if pod.name in chain.gone}
            live.update(screen(pools, decisions, gone), refresh=True)
            await asyncio.sleep(REFRESH_SECONDS)


async def _lines(chain: Chain, console: Console) -> None:
    newest = 0.0
    while True:
        _, decisions = await chain.seen(100)
        for decision in reversed(decisions):
            if decision["at"] > newest:
                line = f"{decision['request_id']} -> {decision['endpoint']}: {why(decision)}"
                console.print(plain(line), soft_wrap=True)
        newest = max((decision["at"] for decision in decisions), default=newest)
        await asyncio.sleep(REFRESH_SECONDS)


async def _keep_asking(chain: Chain, seed: int) -> None:
    for round_ in itertools.count(seed):
        await play(demo(round_), chain.url, chain.shape.engine.model)
