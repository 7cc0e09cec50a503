"""Becomes GIE's picker, with a real API server beside it that ends when the picker does. hack/peers/gie calls it."""

import asyncio
import json
import os
import sys
import tempfile
from pathlib import Path

from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.control_plane import ControlPlane

NAMESPACE = "bench"


async def pool(cluster: Cluster, endpoints: Path) -> None:
    """An InferencePool with a pod for each address, all of which have the same ports."""
    listed = json.loads(endpoints.read_text(encoding="utf-8"))["endpoints"]
    addresses = dict.fromkeys(endpoint["address"] for endpoint in listed)
    ports = dict.fromkeys(endpoint["port"] for endpoint in listed)
    await cluster.create_pool("pool", *ports)
    await cluster.create_pods([(f"pod-{n}", address) for n, address in enumerate(addresses)])


def serve(crds: Path, endpoints: Path, ready: int, until_closed: int) -> None:
    """Be the API server: say where its kubeconfig is by `ready`, and end when nobody holds `until_closed` any more."""
    if len(others := set(range(os.cpu_count() or 1)) - os.sched_getaffinity(0)) > 0:
        os.sched_setaffinity(0, others)  # the picker has its core for itself
    with tempfile.TemporaryDirectory() as name:
        plane = ControlPlane(Path(name))
        try:
            plane.start()
            plane.define("--server-side", "-f", str(crds))
            plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
            asyncio.run(pool(Cluster(plane, NAMESPACE), endpoints))
            os.write(ready, str(plane.kubeconfig()).encode())
            os.close(ready)
            os.read(until_closed, 1)
        finally:
            plane.stop()


def main(program: str, crds: Path, endpoints: Path, grpc: str, health: str, metrics: str, *flags: str) -> None:
    told, ready = os.pipe()
    until_closed, held = os.pipe()
    if os.fork() == 0:
        os.close(told)
        os.close(held)
        serve(crds, endpoints, ready, until_closed)
        return
    os.close(ready)
    os.close(until_closed)
    kubeconfig = os.read(told, 4096).decode()
    if not kubeconfig:
        sys.exit("hack/peers/gie: no API server")
    os.set_inheritable(held, True)
    command = [
        program,
        "--pool-name=pool",
        f"--pool-namespace={NAMESPACE}",
        "--secure-serving=false",
        "--tracing=false",
    ]
    command += [f"--grpc-port={grpc}", f"--grpc-health-port={health}", f"--metrics-port={metrics}", "--v=1"]
    command += ["--metrics-endpoint-auth=false", *flags]
    os.execve(program, command, {**os.environ, "KUBECONFIG": kubeconfig})


main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), *sys.argv[4:])
