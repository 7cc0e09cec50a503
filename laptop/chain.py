"""The chain as processes: simulated pods <- Envoy -> EPP replicas, all on loopback, all gone when the block ends."""

import asyncio
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
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
    manifests: Path = SOURCE / "manifests" / "laptop"
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

    async def _answers(self, url: str) -> bool:
        try:
            async with self.http.get(url) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False


def _environment() -> Mapping[str, str]:
    """Children find our packages where we were found, also when we run from a checkout."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(SOURCE), os.environ.get("PYTHONPATH"))))}
