"""The chain as processes: simulated pods <- Envoy -> EPP replicas, all on loopback, all gone when the block ends."""

import asyncio
import contextlib
import socket
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import yaml

from laptop.processes import ProcessDied, Processes

READY_SECONDS = 30.0
LOWEST_PORT, HIGHEST_PORT = 20000, 32000
"""Where free ports are taken from: below the range systems hand out for outgoing connections."""


class ChainError(Exception):
    """The chain could not be started or lost a part. `str()` is one sentence."""


@dataclass(frozen=True)
class Pod:
    """One simulated pod: its name in tables, and where it listens."""

    name: str
    port: int


@dataclass(frozen=True)
class Replica:
    """One EPP process and its three ports."""

    name: str
    grpc_port: int
    health_port: int
    metrics_port: int

    @property
    def admin(self) -> str:
        return f"http://127.0.0.1:{self.metrics_port}"


@dataclass
class Chain:
    """Running pods and EPP replicas; `Envoy` is started over them by whoever has the gateway's manifests."""

    directory: Path
    processes: Processes
    pods: Sequence[Pod]
    replicas: Sequence[Replica]
    manifests: Sequence[Path]
    picking: Sequence[str] = field(default_factory=tuple)
    """Flags of `warmpath serve` that say how to pick."""

    @property
    def endpoints_file(self) -> Path:
        return self.directory / "endpoints.yaml"

    async def start_epps(self) -> None:
        """Start every replica and wait until each is ready."""
        for replica in self.replicas:
            await self.start_epp(replica)
        for replica in self.replicas:
            await self.wait_ready(replica)

    async def start_epp(self, replica: Replica) -> None:
        files = [flag for path in (self.endpoints_file, *self.manifests) for flag in ("--endpoints", str(path))]
        await self.processes.start(
            replica.name,
            [sys.executable, "-m", "epp.cli", "serve", *files, *self.picking]
            + ["--grpc-port", str(replica.grpc_port), "--grpc-health-port", str(replica.health_port)]
            + ["--metrics-port", str(replica.metrics_port)],
        )

    async def wait_ready(self, replica: Replica) -> None:
        await self._wait_for(f"{replica.admin}/ready", replica.name)

    async def _wait_for(self, url: str, name: str) -> None:
        watch = asyncio.ensure_future(self.processes.wait_dead())
        try:
            async with aiohttp.ClientSession() as session, asyncio.timeout(READY_SECONDS):
                while not watch.done() and not await _answers(session, url):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ChainError(f"{name} did not answer {url} within {READY_SECONDS:g} seconds") from None
        finally:
            watch.cancel()
        if watch.done() and not watch.cancelled():
            raise ChainError(str(watch.exception()))
