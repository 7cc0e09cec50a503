"""An InferencePool on a real API server, with the pods of a chain in it, and what can happen to that server."""

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from epp import protocol
from hack.benches.rig.processes import BenchError
from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.control_plane import ControlPlane
from tooling.conformance.relay import copy
from tooling.laptop.chain import LABELS
from tooling.laptop.engines import LaptopPod, Layout, Simulated

ROOT: Final = Path(__file__).parents[3]
NAMESPACE, NAME = "default", "sim"


class PodAt(NamedTuple):
    """A Pod that is to be there."""

    name: str
    ip: str
    port: int
    """Which of its pool's target ports it serves."""


class Connections:
    """A port that leads to another one, whose connections can be cut."""

    def __init__(self, target: int) -> None:
        self.port = 0
        self._target = target
        self._open: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Future[None]] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            for each in self._serving:
                each.cancel()
            await asyncio.gather(*self._serving, return_exceptions=True)

    def cut(self) -> None:
        """Break all that are open."""
        for writer in self._open:
            writer.transport.abort()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        serving = asyncio.ensure_future(self._serve(reader, writer))
        self._serving.add(serving)
        serving.add_done_callback(self._serving.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        both = {writer}
        try:
            to_reader, to_writer = await asyncio.open_connection("127.0.0.1", self._target)
            both.add(to_writer)
            self._open |= both
            await asyncio.gather(copy(reader, to_writer), copy(to_reader, writer))
        except OSError:
            pass  # nobody listens there, as while the API server is away
        finally:
            self._open -= both
            for each in both:
                each.transport.abort()


@dataclass(frozen=True)
class RealPool:
    """The pool, as an administrator sees it. `connections`: those of the pickers to the API server."""

    plane: ControlPlane
    connections: Connections
    kubeconfig: Path

    @property
    def cluster(self) -> Cluster:
        return Cluster(self.plane, NAMESPACE)

    @property
    def picker_flags(self) -> Sequence[str]:
        """Of `warmpath serve`: follow this pool, and serve as with files."""
        pool = ("--pool-name", NAME, "--pool-namespace", NAMESPACE, "--kubeconfig", str(self.kubeconfig))
        return (*pool, "--secure-serving=false", "--metrics-endpoint-auth=false")

    async def create(self, pods: Iterable[PodAt]) -> None:
        """Pods of the pool, ready at once."""
        for port, some in groupby(sorted(pods, key=lambda pod: pod.port), lambda pod: pod.port):
            active = {protocol.ACTIVE_PORTS[0]: str(port)}
            await self.cluster.create_pods([(pod.name, pod.ip) for pod in some], labels=LABELS, annotations=active)

    def lists(self) -> int:
        """How often the pickers have listed the Pods: at their start, and where a watch cannot go on (410)."""
        return self.plane.requests_of("admin").count(("list", "pods", 200))


@asynccontextmanager
async def real_pool(folder: Path, flags: Sequence[str] = ()) -> AsyncIterator[RealPool]:
    """An API server of its own, with no pool yet. `flags`: more for kube-apiserver."""
    folder.mkdir()
    plane = ControlPlane(folder, flags)
    try:
        await asyncio.to_thread(plane.start)
        await asyncio.to_thread(plane.define, "-k", str(ROOT / "manifests" / "crds"))
        connections = Connections(plane.port)
        async with connections.listening():
            kubeconfig = folder / "picker.kubeconfig"
            text = plane.kubeconfig().read_text()
            kubeconfig.write_text(text.replace(plane.host, f"https://127.0.0.1:{connections.port}"))
            yield RealPool(plane, connections, kubeconfig)
    finally:
        plane.stop()


@dataclass(frozen=True)
class PodsOf(Simulated):
    """Simulated pods, each a Pod of the pool: all at 127.0.0.1, each at one of the pool's target ports. They listen on
    all addresses, so that more Pods can be had at others of 127.0.0.0/8.
    """

    pool: RealPool = field(kw_only=True)

    def lay_out(self, names: Sequence[str]) -> Layout:
        layout = super().lay_out(names)
        asyncio.run(self._create(layout.pods))
        return layout

    async def _create(self, pods: Sequence[LaptopPod]) -> None:
        await self.pool.cluster.create_pool(NAME, *(pod.port for pod in pods), labels=LABELS)
        await self.pool.create(PodAt(pod.name, "127.0.0.1", pod.port) for pod in pods)


def need_api_server() -> None:
    """Build what is missing of it, once. Raises BenchError; why is said before."""
    if "KUBEBUILDER_ASSETS" in os.environ:
        return
    done = subprocess.run([ROOT / "hack" / "envtest"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise BenchError("needs an API server, which hack/envtest could not build")
    os.environ["KUBEBUILDER_ASSETS"] = done.stdout.strip()
