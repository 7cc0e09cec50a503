"""A simulated vLLM pod on a socket, in real time: `python -m tooling.simulator.server --port 8000`, or `SimulatedPod`
in tests.

Endpoints and faults: `tooling.simulator.endpoints`, `tooling.simulator.faults`. The engine behind them:
`tooling.simulator.engine`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from types import TracebackType
from typing import Self

import click
import uvloop
from aiohttp import web

from epp.documents.addresses import join
from tooling.simulator.endpoints import GRACE, Endpoints
from tooling.simulator.engine import LAPTOP, Engine, EngineParameters
from tooling.simulator.generation import Identity
from tooling.simulator.metrics import Adapters, Page
from tooling.simulator.presets import PRESETS
from tooling.simulator.publisher import KvEventsConfig, Publisher, events_of, kv_events_from
from tooling.simulator.ranks import DataParallelPod
from tooling.simulator.realtime import RealTimeEngine


class SimulatedPod:
    """One pod: `async with SimulatedPod() as pod: … pod.address`.

    Entering raises OSError where the port is in use. An error in the engine's task ends the block it serves.
    """

    # Named by whoever calls, each with a default: what a test changes of a pod is one word.
    def __init__(  # noqa: PLR0913
        self,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = "pod",
        model: str = "sim",
        seed: int = 0,
        time_scale: float = 1.0,
        parameters: EngineParameters = LAPTOP,
        max_model_len: int | None = None,
        lora: Sequence[str] = (),
        lora_slots: int = 1,
        kv_events: KvEventsConfig | None = None,
    ) -> None:
        """`port` 0 picks a free one. `time_scale` 10 makes ten seconds of the engine's time pass in one.

        `max_model_len` is in tokens; the whole KV memory where it is None or larger than that. `lora` names the
        adapters served beside `model`, `lora_slots` says how many fit at once. Pods with equal `seed`, `model` and
        `lora` give equal answers. `kv_events`: where it publishes what becomes of its cache, if it does.
        """
        if time_scale <= 0:
            raise ValueError(f"time_scale: {time_scale}, expected more than 0")
        self.name = name
        parameters = replace(parameters, adapter_slots=lora_slots)
        self.engine = Engine(parameters)
        self._host, self._port = host, port
        longest = min(parameters.capacity, parameters.capacity if max_model_len is None else max_model_len)
        adapters = Adapters(tuple(lora))
        page = Page(self.engine, model, adapters, _wall)
        self._clockwork = RealTimeEngine(self.engine, page.histograms, 1 / time_scale)
        identity = Identity(name, model, seed, parameters, longest, adapters)
        self._publisher: Publisher | None = None
        if kv_events is not None and kv_events.enable_kv_cache_events:
            self._publisher = Publisher(host, kv_events, _wall)
            self.engine.watch()
            publish, size = self._publisher.publish, parameters.block_size
            self._clockwork.on_changes = lambda changes: publish(events_of(changes, size))
        self._endpoints = Endpoints(identity, self._clockwork, page, _wall, self._publisher)

    @property
    def address(self) -> str:
        """`ip:port` it listens on, IPv6 in brackets; meaningful while entered."""
        return join(self._host, str(self._port))

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(
            self._endpoints.application(), handler_cancellation=True, access_log=None, shutdown_timeout=GRACE
        )
        async with AsyncExitStack() as stack:
            if self._publisher is not None:
                await stack.enter_async_context(self._publisher)
            await self._runner.setup()
            try:
                await web.TCPSite(self._runner, self._host, self._port).start()
            except OSError:
                await self._runner.cleanup()
                raise
            self._stack = stack.pop_all()
        self._port = self._runner.addresses[0][1]
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._task = self._tasks.create_task(self._clockwork.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        self._task.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            await self._stack.aclose()


def _wall() -> float:
    return datetime.now(UTC).timestamp()


async def _serve(pod: SimulatedPod | DataParallelPod) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with pod:
        click.echo(f"{pod.name}: simulated vLLM on {pod.url}")
        await stop.wait()


@click.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", default=8000, show_default=True, type=click.IntRange(0, 65535), help="0 picks a free one.")
@click.option("--name", default="pod", show_default=True, help="Shown in the header x-sim-pod.")
@click.option("--model", default="sim", show_default=True, help="Model name served.")
@click.option("--lora", multiple=True, help="LoRA adapter served beside it (repeatable).")
@click.option("--max-loras", default=1, show_default=True, type=click.IntRange(1), help="Adapters that fit at once.")
@click.option("--seed", default=0, show_default=True, help="Pods with one seed answer alike.")
@click.option("--preset", default="laptop", show_default=True, type=click.Choice(list(PRESETS)), help="Size and speed.")
@click.option("--blocks", type=click.IntRange(1), help="KV blocks, instead of the preset's.")
@click.option("--block-size", type=click.IntRange(1), help="Tokens per KV block, instead of the preset's.")
@click.option("--max-model-len", type=click.IntRange(2), help="Tokens of prompt and answer together.")
@click.option(
    "--time-scale",
    default=1.0,
    show_default=True,
    type=click.FloatRange(0, 1000, min_open=True),
    help="10 = ten times faster than the preset.",
)
@click.option("--kv-events-config", help="Publish KV events over zmq: vLLM's flag, JSON; port 0 takes a free one.")
@click.option(
    "--data-parallel-size",
    default=1,
    show_default=True,
    type=click.IntRange(1, 64),
    help="Ranks behind the port, each an engine of its own; KV events then want port 0.",
)
# The arguments are the command's flags: click hands each over by itself.
def main(  # noqa: PLR0913, PLR0917
    host: str,
    port: int,
    name: str,
    model: str,
    lora: tuple[str, ...],
    max_loras: int,
    seed: int,
    preset: str,
    blocks: int | None,
    block_size: int | None,
    max_model_len: int | None,
    time_scale: float,
    kv_events_config: str | None,
    data_parallel_size: int,
) -> None:
    """Serve one simulated vLLM pod until SIGTERM or Ctrl-C."""
    parameters = PRESETS[preset].parameters
    try:
        events = kv_events_from(kv_events_config) if kv_events_config else None
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="--kv-events-config") from None
    one = partial(
        SimulatedPod,
        host=host,
        name=name,
        model=model,
        seed=seed,
        time_scale=time_scale,
        parameters=replace(
            parameters, blocks=blocks or parameters.blocks, block_size=block_size or parameters.block_size
        ),
        max_model_len=max_model_len,
        lora=lora,
        lora_slots=max_loras,
        kv_events=events,
    )
    pod: SimulatedPod | DataParallelPod
    if data_parallel_size == 1:
        pod = one(port=port)
    else:
        pod = DataParallelPod(name, host, port, [one(port=0) for _ in range(data_parallel_size)])
    try:
        uvloop.run(_serve(pod))
    except OSError as error:
        click.echo(f"{name}: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
