"""A simulated vLLM pod on a socket, in real time: `python -m epp.sim.server --port 8000`, or `SimulatedPod` in tests.

Endpoints and faults: `epp.sim.endpoints`, `epp.sim.faults`. The engine behind them: `epp.sim.engine`.
"""

import asyncio
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from types import TracebackType
from typing import Self

import click
import uvloop
from aiohttp import web

from epp.sim.clockwork import Clockwork
from epp.sim.endpoints import Endpoints
from epp.sim.engine import H100_8B, LAPTOP, Engine, EngineParameters
from epp.sim.generation import Identity
from epp.sim.metrics import Adapters, Page

PRESETS = {"laptop": LAPTOP, "h100-8b": H100_8B}
GRACE = 0.3
"""Seconds that answers in progress get at shutdown before they are cut; cutting may take as long again."""


class SimulatedPod:
    """One pod: `async with SimulatedPod() as pod: … pod.address`.

    Entering raises OSError where the port is in use. An error in the engine's task ends the block it serves.
    """

    def __init__(
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
    ) -> None:
        """`port` 0 picks a free one. `time_scale` 10 makes ten seconds of the engine's time pass in one.

        `max_model_len` is in tokens; the whole KV memory where it is None or larger than that. `lora` names the
        adapters served beside `model`; `lora_slots` is only reported. Pods with equal `seed`, `model` and `lora`
        give equal answers.
        """
        if time_scale <= 0:
            raise ValueError(f"time_scale: {time_scale}, expected more than 0")
        self.name = name
        self.engine = Engine(parameters)
        self._host, self._port = host, port
        longest = min(parameters.capacity, parameters.capacity if max_model_len is None else max_model_len)
        adapters = Adapters(tuple(lora), lora_slots)
        page = Page(self.engine, model, adapters, _wall)
        self._clockwork = Clockwork(self.engine, page.histograms, 1 / time_scale)
        identity = Identity(name, model, seed, parameters, longest, adapters)
        self._endpoints = Endpoints(identity, self._clockwork, page, _wall)

    @property
    def address(self) -> str:
        """`ip:port` it listens on, IPv6 in brackets; meaningful while entered."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self._port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    async def __aenter__(self) -> Self:
        self._runner = web.AppRunner(
            self._endpoints.application(), handler_cancellation=True, access_log=None, shutdown_timeout=GRACE
        )
        await self._runner.setup()
        try:
            site = web.TCPSite(self._runner, self._host, self._port)
            await site.start()
        except OSError:
            await self._runner.cleanup()
            raise
        self._port = self._runner.addresses[0][1]
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._task = self._tasks.create_task(self._clockwork.run())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._runner.cleanup()
        self._task.cancel()
        await self._tasks.__aexit__(kind, error, trace)


def _wall() -> float:
    return datetime.now(UTC).timestamp()


async def _serve(pod: SimulatedPod) -> None:
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
@click.option("--max-loras", default=1, show_default=True, type=click.IntRange(1), help="Adapter slots reported.")
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
def main(
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
) -> None:
    """Serve one simulated vLLM pod until SIGTERM or Ctrl-C."""
    parameters = PRESETS[preset]
    pod = SimulatedPod(
        host=host,
        port=port,
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
    )
    try:
        uvloop.run(_serve(pod))
    except OSError as error:
        click.echo(f"{name}: cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
