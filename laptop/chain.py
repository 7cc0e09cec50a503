"""The chain as processes: simulated pods <- Envoy -> EPP replicas, all on loopback, all gone when the block ends."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from gateway.envoy import Envoy, running_envoy
from laptop.ports import free_ports, is_free
from laptop.processes import ProcessDied, Processes

READY_SECONDS = 60.0
"""For a Python process to answer; seconds on an idle machine, more when it compiles its modules for the first time."""
SOURCE = Path(__file__).parents[1]
MANIFESTS = SOURCE / "manifests" / "laptop"


class ChainError(Exception):
    """The chain could not be started, or lost a part. `str()` is one sentence."""


@dataclass(frozen=True)
class Shape:
    """What the chain is made of."""

    pods: int = 3
    replicas: int = 1
    """EPP processes, all active."""
    port: int = 8080
    """The gateway's; 0 takes a free one."""
    picking: Sequence[str] = ()
    """Flags of `warmpath serve` that say how to pick."""
    manifests: Path = MANIFESTS
    wiring: str = "lean"
    seed: int = 1
    pod_flags: Sequence[str] = ()


@dataclass(frozen=True)
class Pod:
    name: str
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@dataclass(frozen=True)
class Replica:
    name: str
    grpc_port: int
    health_port: int
    metrics_port: int

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}"


@dataclass
class Chain:
    """A running chain; made by `running_chain` only."""

    directory: Path
    shape: Shape
    processes: Processes
    http: aiohttp.ClientSession
    pods: Sequence[Pod]
    replicas: Sequence[Replica]
    port: int
    envoy: Envoy | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def endpoints_file(self) -> Path:
        return self.directory / "endpoints.yaml"

    async def start_pod(self, pod: Pod) -> None:
        """Start one pod and wait until it answers."""
        command = ["-m", "epp.sim.server", "--port", str(pod.port), "--name", pod.name, "--seed", str(self.shape.seed)]
        await self.processes.start(pod.name, [sys.executable, *command, *self.shape.pod_flags], _environment())

    async def start_replica(self, replica: Replica, picking: Sequence[str] | None = None) -> None:
        """Start one EPP, with other flags than the shape's if given. Wait for it with `ready`."""
        files = ["--endpoints", str(self.endpoints_file), "--endpoints", str(self.shape.manifests)]
        ports = ["--grpc-port", str(replica.grpc_port), "--grpc-health-port", str(replica.health_port)]
        ports += ["--metrics-port", str(replica.metrics_port), "--fallbacks", "2"]
        command = [sys.executable, "-m", "epp.cli", "serve", *files, *ports]
        await self.processes.start(
            replica.name, [*command, *(self.shape.picking if picking is None else picking)], _environment()
        )

    async def restart_replicas(self, picking: Sequence[str]) -> None:
        """All replicas anew, with other flags. Requests meanwhile fail: this is for between two workloads."""
        await self.processes.stop(*(replica.name for replica in self.replicas))
        for replica in self.replicas:
            await self.start_replica(replica, picking)
        for replica in self.replicas:
            await self.ready(f"{replica.admin}/ready", replica.name)

    async def forget(self) -> None:
        """Empty the prefix cache of every pod."""
        for pod in self.pods:
            async with self.http.post(f"{pod.url}/reset_prefix_cache") as answer:
                answer.raise_for_status()

    async def ready(self, url: str, name: str) -> None:
        """Return when `url` answers 200. ChainError if `name` dies or takes too long."""
        try:
            async with asyncio.timeout(READY_SECONDS):
                while not await self._answers(url):
                    self.processes.check()
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ChainError(f"{name} was not ready within {READY_SECONDS:g} seconds") from None
        except ProcessDied as died:
            raise ChainError(str(died)) from died

    async def get(self, url: str) -> Any:
        """JSON at `url`."""
        async with self.http.get(url) as answer:
            return await answer.json()

    async def watch(self) -> None:
        """Never return; raise ProcessDied or ChainError when a part of the chain ends by itself."""
        assert self.envoy is not None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.processes.watch())
            status = await self.envoy.wait()
            raise ChainError(f"Envoy ended with status {status}")

    async def seen(self, limit: int) -> tuple[list[Any], list[Any]]:
        """Pools with their endpoints, and the newest decisions of all replicas, as the admin doors tell them."""
        pools: list[Any] = []
        decisions: list[Any] = []
        for replica in self.replicas:
            if not pools:
                pools = (await self.get(f"{replica.admin}/endpoints"))["pools"]
            decisions += (await self.get(f"{replica.admin}/decisions?limit={limit}"))["decisions"]
        return pools, sorted(decisions, key=lambda decision: -float(decision["at"]))[:limit]

    async def _answers(self, url: str) -> bool:
        try:
            async with self.http.get(url) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


def _environment() -> Mapping[str, str]:
    """Children find our packages where we were found, also when we run from a checkout."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))}


@asynccontextmanager
async def running_chain(shape: Shape, logs: Path | None = None) -> AsyncIterator[Chain]:
    """Start everything, wait until it answers, yield it, and end all of it. Raises ChainError, EnvoyError.

    `logs`: a directory for the logs of all processes, kept afterwards; by default a private one that goes with us.
    """
    if shape.port and not is_free(shape.port):
        raise ChainError(f"port {shape.port} is in use by another program; choose another with --port")
    ports = iter(free_ports(shape.pods + 3 * shape.replicas + 1))
    pods = [Pod(f"pod-{chr(ord('a') + i) if i < 26 else i}", next(ports)) for i in range(shape.pods)]
    replicas = [Replica(f"epp-{i + 1}", next(ports), next(ports), next(ports)) for i in range(shape.replicas)]
    async with AsyncExitStack() as stack:
        directory = logs or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-")))
        directory.mkdir(parents=True, exist_ok=True)
        processes = await stack.enter_async_context(Processes(directory))
        http = await stack.enter_async_context(aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)))
        chain = Chain(directory, shape, processes, http, pods, replicas, shape.port or next(ports))
        entries = [
            {"name": pod.name, "address": "127.0.0.1", "port": pod.port, "labels": {"app": "sim"}} for pod in pods
        ]
        chain.endpoints_file.write_text(yaml.safe_dump({"endpoints": entries}), encoding="utf-8")
        for pod in pods:
            await chain.start_pod(pod)
        for replica in replicas:
            await chain.start_replica(replica)
        for name, url in [(p.name, f"{p.url}/health") for p in pods] + [(r.name, f"{r.admin}/ready") for r in replicas]:
            await chain.ready(url, name)
        chain.envoy = await stack.enter_async_context(running_envoy(chain.rendering()))
        yield chain
