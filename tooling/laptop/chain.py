"""The chain as processes: pods <- Envoy -> EPP replicas, all on loopback, all gone when the block ends."""

import asyncio
import contextlib
import dataclasses
import os
import re
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from msgspec.structs import replace

from epp import protocol
from gateway.envoy import Envoy, running_envoy
from gateway.errors import GatewayError
from gateway.load import Resources, load
from gateway.resources import InferencePool
from gateway.translate import TranslateOptions, translate
from gateway.wiring import Wiring
from gateway.xds import Rendering
from tooling.laptop.engines import Engine, LaptopPod, Layout, Program, Simulated
from tooling.laptop.ports import free_ports, is_free, this_or_free
from tooling.laptop.processes import Processes

READY_SECONDS = 60.0
"""For a Python process to answer; seconds on an idle machine, more when it compiles its modules for the first time."""
DRAIN_LINGER = 1.0
"""Seconds in which our Envoy surely asks a replica for its health and leaves it."""
ENDPOINTS = "endpoints.yaml"
LABELS = {"app": "sim"}
"""Of every pod the chain starts, whatever its engine: what the manifests' pool selects by."""
SOURCE = Path(__file__).parents[2]
MANIFESTS = next(
    path for path in (Path(__file__).parent / "manifests", SOURCE / "manifests" / "laptop") if path.is_dir()
)
"""Within an installed package, or in a checkout."""


class ChainError(Exception):
    """The chain could not be started, or lost a part. `str()` is one sentence."""


@dataclass(frozen=True)
class Shape:
    """What the chain is made of."""

    pods: int = 3
    replicas: int = 1
    """EPP processes, all active."""
    port: int | None = None
    """The gateway's, where the manifests' only listener gives another; 0 takes a free one."""
    admin_port: int | None = None
    """Of the first replica, where it is free."""
    picking: Sequence[str] = ()
    """Flags of `warmpath serve` that say how to pick."""
    manifests: Path = MANIFESTS
    wiring: Wiring = "lean"
    engine: Engine = field(default_factory=Simulated)
    plugins: Path | None = None
    """Directory of the modules that the configuration names, where they are not beside it."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """More of it, for the replicas."""
    pools: Sequence[str] = ()
    """Flags of `warmpath serve` that say where the replicas' pools come from; (): from the chain's files."""


@dataclass(frozen=True)
class Replica:
    name: str
    grpc_ports: Sequence[int]
    """One for each pool, in the order of the manifests."""
    health_port: int
    metrics_port: int
    replica_port: int
    """Where the other replicas connect to."""

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
    layout: Layout
    """What the engine runs, as started."""
    replicas: Sequence[Replica]
    """Those that run."""
    resources: Resources
    envoy: Envoy = field(init=False)
    gone: list[str] = field(default_factory=list)
    """Names of pods that ended by themselves."""

    @property
    def pods(self) -> Sequence[LaptopPod]:
        """As started."""
        return self.layout.pods

    def __post_init__(self) -> None:
        self._pool_ids = [pool.metadata.id for pool in self.resources.pools]

    @property
    def url(self) -> str:
        """Where clients come in: the first listener."""
        return f"http://127.0.0.1:{self.resources.gateways[0].spec.listeners[0].port}"

    @property
    def endpoints_file(self) -> Path:
        return self.directory / ENDPOINTS

    @property
    def files(self) -> list[Path]:
        """What says which endpoints, pools and routes there are; files or directories."""
        return [self.endpoints_file, self.shape.manifests]

    async def start(self, program: Program) -> None:
        """Start a pod or a service; wait for it with `ready`."""
        environment = {**_environment(self.shape.plugins), **program.environment}
        await self.processes.start(program.name, program.command, environment, children=program.children)

    async def start_replica(self, replica: Replica) -> None:
        """Start one EPP; wait for it with `ready`."""
        pools = self.shape.pools or [flag for file in self.files for flag in ("--endpoints", str(file))]
        ports = [flag for port in replica.grpc_ports for flag in ("--grpc-port", str(port))]
        ports += ["--grpc-health-port", str(replica.health_port), "--metrics-port", str(replica.metrics_port)]
        if len(self.replicas) > 1:  # each names all, itself too: they know themselves
            ports += ["--replica-port", str(replica.replica_port)]
            ports += [flag for each in self.replicas for flag in ("--peer", f"127.0.0.1:{each.replica_port}")]
        linger = DRAIN_LINGER if len(self.replicas) > 1 else 0  # alone, there is no other replica
        ports += ["--drain-linger", f"{linger:g}"]
        command = [sys.executable, "-m", "epp.cli", "serve", *pools, *ports, "--fallbacks", "2"]
        command += self.shape.engine.picker_flags
        environment = {**_environment(self.shape.plugins), **self.shape.environment}
        await self.processes.start(replica.name, [*command, *self.shape.picking], environment)

    async def start_again(self, replica: Replica) -> None:
        """Start an EPP that has ended, and return when it is ready."""
        await self.start_replica(replica)
        await self.ready(f"{replica.admin}/ready", replica.name)

    async def reconfigure(self, file: Path, text: str) -> None:
        """Replace `file`, which the replicas follow, and return when all of them use it, for each of their pools."""
        if file.exists() and file.read_text(encoding="utf-8") == text:
            return
        try:
            async with asyncio.timeout(READY_SECONDS):
                before = [await self._pools(replica) for replica in self.replicas]
                file.write_text(text, encoding="utf-8")
                for replica, old in zip(self.replicas, before, strict=True):
                    while not old.isdisjoint(await self._pools(replica)):
                        await asyncio.sleep(0.05)
        except TimeoutError:
            raise ChainError(f"{file.name} was not taken over; see the log of {self.replicas[0].name}") from None

    async def config(self, replica: Replica) -> str:
        """A replica's active configuration as text, once it has the time to say it."""
        async with asyncio.timeout(READY_SECONDS):
            while True:
                with contextlib.suppress(TimeoutError):  # it may be busy for longer than a request waits
                    async with self.http.get(f"{replica.admin}/config") as answer:
                        if answer.status == 200:
                            return await answer.text()
                await asyncio.sleep(0.05)

    async def _pools(self, replica: Replica) -> set[str]:
        """What the replica says of each of its pools, each of which takes a new configuration in its own time."""
        return set(re.split(r"(?m)^(?=pool )", await self.config(replica))) - {""}

    async def forget(self) -> None:
        """Empty the prefix cache of every pod, and those that the engine has beside."""
        for url in (*(f"{pod.url}/reset_prefix_cache" for pod in self.pods), *self.layout.caches):
            async with self.http.post(url) as answer:
                answer.raise_for_status()

    async def ready(self, url: str, name: str, seconds: float = READY_SECONDS) -> None:
        """Return when `url` answers 200 (`tcp://ip:port`: accepts). ChainError if `name` dies or takes too long."""
        try:
            async with asyncio.timeout(seconds):
                while not await self._answers(url):
                    for _, sentence in self.processes.ended():
                        raise ChainError(sentence)
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ChainError(f"{name} was not ready within {seconds:g} seconds") from None

    async def get(self, url: str) -> Any:
        """JSON at `url`."""
        async with self.http.get(url) as answer:
            return await answer.json()

    def rendering(self) -> Rendering:
        """Envoy's configuration for the manifests over the endpoints and replicas there are."""
        pickers = {
            pool_id: [f"127.0.0.1:{replica.grpc_ports[i]}" for replica in self.replicas]
            for i, pool_id in enumerate(self._pool_ids)
        }
        return translate(self.resources, pickers, TranslateOptions(wiring=self.shape.wiring))

    async def reload(self) -> bool:
        """Read the files again and make Envoy use them; False if it does already.

        Raises ChainError, ConfigError, GatewayError for wrong files: then the old ones stay. The replicas follow by
        themselves.
        """
        port = None if self.shape.port is None else self.resources.gateways[0].spec.listeners[0].port
        resources, before = _at_port(load(self.files), port), (self.resources, self.rendering())
        if {pool.metadata.id for pool in resources.pools} != set(self._pool_ids):
            raise ChainError(f"InferencePools came or went; expected {', '.join(self._pool_ids)} until a restart")
        self.resources = resources
        try:
            rendering = self.rendering()
            await self.envoy.update(rendering)
        except GatewayError:
            self.resources = before[0]
            raise
        return rendering != before[1]

    async def seen(self, limit: int) -> tuple[list[Any], list[Any]]:
        """Pools with their endpoints, and the newest decisions of all replicas, as the admin servers show them.

        A replica that does not answer just now is left out.
        """
        pools: list[Any] = []
        decisions: list[Any] = []
        for replica in self.replicas:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError):
                pools = pools or (await self.get(f"{replica.admin}/endpoints"))["pools"]
                decisions += (await self.get(f"{replica.admin}/decisions?limit={limit}"))["decisions"]
        return pools, sorted(decisions, key=lambda decision: -float(decision["at"]))[:limit]

    async def _answers(self, url: str) -> bool:
        try:
            if url.startswith("tcp://"):
                return not is_free(int(url.rpartition(":")[2]))
            async with self.http.get(url) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False


def _environment(plugins: Path | None = None) -> Mapping[str, str]:
    """Children find our packages where we were found, also when we run from a checkout."""
    return {"PYTHONPATH": os.pathsep.join(map(str, filter(None, (SOURCE, plugins, os.environ.get("PYTHONPATH")))))}


@asynccontextmanager
async def running_chain(shape: Shape, directory: Path) -> AsyncIterator[Chain]:
    """Start everything, wait until it answers, yield it, and end all of it.

    Raises ChainError, ConfigError, GatewayError.

    `directory` gets the endpoints file and the logs of all processes.
    """
    async with AsyncExitStack() as stack:
        _check_selected(load([shape.manifests]).pools)
        layout = await asyncio.to_thread(shape.engine.lay_out, _names(shape.pods))
        stack.callback(layout.tidy)
        write_endpoints(layout.pods, directory / ENDPOINTS)
        resources = _at_port(load([directory / ENDPOINTS, shape.manifests]), shape.port)
        _check_free(resources)
        chain = Chain(
            directory,
            shape,
            processes=await stack.enter_async_context(Processes(directory)),
            http=await stack.enter_async_context(
                aiohttp.ClientSession(
                    timeout=aiohttp.ClientTimeout(total=5),
                    connector=aiohttp.TCPConnector(keepalive_timeout=protocol.MODEL_SERVER_IDLE),
                )
            ),
            layout=layout,
            replicas=[_replica(i, len(resources.pools), shape.admin_port) for i in range(shape.replicas)],
            resources=resources,
        )
        seconds = shape.engine.ready_seconds
        for service in layout.services:
            await chain.start(service)
        for replica in chain.replicas:
            await chain.start_replica(replica)
        for service in layout.services:
            await chain.ready(service.ready, service.name, seconds)
        for pod in layout.pods:
            await chain.start(layout.programs[pod.name])
        for pod in layout.pods:
            await chain.ready(layout.programs[pod.name].ready, pod.name, seconds)
        for replica in chain.replicas:
            await chain.ready(f"{replica.admin}/ready", replica.name)
        chain.envoy = await stack.enter_async_context(running_envoy(chain.rendering(), directory=directory / "envoy"))
        yield chain


def _names(count: int) -> list[str]:
    return [f"pod-{chr(ord('a') + i)}" if i < 26 else f"pod-{i}" for i in range(count)]


def write_endpoints(pods: Sequence[LaptopPod], file: Path) -> None:
    """Write down `pods` as the endpoints there are."""
    entries = [
        {
            "name": pod.name,
            "address": "127.0.0.1",
            "port": pod.port,
            "labels": LABELS
            | ({protocol.ROLE_LABEL: pod.role} if pod.role else {})
            | ({protocol.DATA_PARALLEL_SIZE_LABEL: str(pod.ranks)} if pod.ranks > 1 else {})
            | ({protocol.ENGINE_LABELS[0]: pod.engine} if pod.engine else {}),
            "node": pod.node,
        }
        for pod in pods
    ]
    file.write_text(yaml.safe_dump({"endpoints": entries}), encoding="utf-8")


def _replica(number: int, pools: int, admin_port: int | None) -> Replica:
    *grpc_ports, health, metrics, peers = free_ports(pools + 3)
    if number == 0 and admin_port is not None:
        metrics = this_or_free(admin_port)
    return Replica(f"epp-{number + 1}", grpc_ports, health, metrics, peers)


def _at_port(resources: Resources, port: int | None) -> Resources:
    """The same resources, their only listener on `port`."""
    if port is None:
        return resources
    listeners = [listener for gateway in resources.gateways for listener in gateway.spec.listeners]
    if len(listeners) != 1:
        raise ChainError(f"--port needs manifests with one listener; these have {len(listeners)}")
    [gateway], [listener] = resources.gateways, listeners
    moved = replace(listener, port=port or free_ports(1)[0])
    spec = replace(gateway.spec, listeners=(moved,))
    return dataclasses.replace(resources, gateways=(replace(gateway, spec=spec),))


def _check_free(resources: Resources) -> None:
    for gateway in resources.gateways:
        for listener in gateway.spec.listeners:
            try:
                free = is_free(listener.port)
            except PermissionError:
                raise ChainError(f"only root may listen on port {listener.port}; choose another with --port") from None
            if not free:
                raise ChainError(f"port {listener.port} is in use by another program; choose another with --port")


def _check_selected(pools: Sequence[InferencePool]) -> None:
    if pools and not any(p.spec.selector.match_labels == LABELS and p.metadata.namespace == "default" for p in pools):
        got = ", ".join(f"{pool.metadata.id}: {dict(pool.spec.selector.match_labels)}" for pool in pools)
        what = f"no InferencePool selects the simulated pods ({got})"
        raise ChainError(f"{what}; expected matchLabels {LABELS} in namespace default")
