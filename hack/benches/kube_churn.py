"""How long the event loop stands still while pods churn on a real API server.

Creates and deletes pods from another process as fast as it can, and prints the gaps of the loop that follows them.
The API server comes from KUBEBUILDER_ASSETS or hack/envtest.
"""

import argparse
import asyncio
import multiprocessing
import os
import random
import subprocess
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

import uvloop

from epp.pool.apiserver import ApiServer
from epp.pool.kubernetes import KubePools, Named
from epp.telemetry.metrics import Metrics
from tests.support.kubernetes.cluster import Cluster, followed
from tests.support.kubernetes.control_plane import ControlPlane
from tests.support.process.waiting import until

ROOT = Path(__file__).parents[2]
TICK = 0.001
ROUNDS = 3


def churn(plane: ControlPlane, count: int, go: Event, done: Event) -> None:
    go.wait()
    pods = [
        (f"pod-{number}", f"127.{2 + number // 62500}.{number // 250 % 250}.{number % 250 + 1}")
        for number in range(count)
    ]
    cluster = Cluster(plane, "default")
    for _ in range(ROUNDS):
        asyncio.run(cluster.create_pods(pods))
        asyncio.run(cluster.delete_pods([name for name, _ in pods]))
    done.set()


async def measure(plane: ControlPlane, go: Event, done: Event) -> list[float]:
    pools = KubePools(Named(("p",)), "default", ApiServer(), Metrics(), random.Random(1))
    most, gaps = 0, []
    async with followed(pools):
        await until(lambda: pools.pools[0].ready)
        go.set()
        last = time.perf_counter()
        while not done.is_set():
            await asyncio.sleep(TICK)
            now = time.perf_counter()
            gaps.append(now - last - TICK)
            last = now
            most = max(most, len(pools.pools[0].endpoints))
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(f"up to {most} endpoints at once; {resident / 1e6:.0f} MB resident, {time.process_time():.1f} s of CPU")
    return sorted(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pods", type=int, default=1000, help="how many at once")
    count = parser.parse_args().pods
    if "KUBEBUILDER_ASSETS" not in os.environ:
        os.environ["KUBEBUILDER_ASSETS"] = subprocess.check_output([ROOT / "hack" / "envtest"], text=True).strip()
    context = multiprocessing.get_context("fork")
    go, done = context.Event(), context.Event()
    with tempfile.TemporaryDirectory() as folder:
        plane = ControlPlane(Path(folder))
        try:
            plane.start()
            plane.define("-k", str(ROOT / "manifests" / "crds"))
            os.environ["KUBECONFIG"] = str(plane.kubeconfig())
            asyncio.run(Cluster(plane, "default").create_pool("p", 8000))
            other = context.Process(target=churn, args=(plane, count, go, done))
            other.start()
            start = time.perf_counter()
            gaps = uvloop.run(measure(plane, go, done))
            other.join()
        finally:
            plane.stop()
    print(f"{count} pods created and deleted {ROUNDS} times in {time.perf_counter() - start:.1f} s")
    for name, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("longest", 1.0)):
        print(f"gap {name}: {gaps[min(len(gaps) - 1, int(len(gaps) * share))] * 1000:.2f} ms")


if __name__ == "__main__":
    main()
