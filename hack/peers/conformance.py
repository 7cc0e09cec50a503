"""The EPP suite against GIE's picker on a real API server and against ours, as two columns of a Markdown table."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.support.kubernetes.cluster import Cluster
from tests.support.kubernetes.control_plane import ControlPlane
from tooling.conformance.case import Case
from tooling.conformance.report import summary
from tooling.conformance.suite import CASES, Result, run
from tooling.conformance.target import ConformanceOptions
from tooling.conformance.verdict import Unreachable
from tooling.laptop.ports import free_ports

HOSTS = ("127.0.0.11", "127.0.0.12", "::1")
PORTS = (8000, 8001)
LONGEST = 300.0
MARKED = re.compile(r"(<!-- results -->\n).*(<!-- end of results -->)", re.DOTALL)


def endpoints() -> tuple[str, ...]:
    return tuple(f"[{host}]:{port}" if ":" in host else f"{host}:{port}" for host in HOSTS for port in PORTS)


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str], log: Path) -> Iterator[None]:
    with log.open("wb") as output:
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=output, stderr=output)
    try:
        yield
    finally:
        process.terminate()
        process.wait(30)


async def results(ext_proc: int, health: int, *, tls: bool) -> list[Result]:
    """Once it serves: every case."""
    options = ConformanceOptions(f"127.0.0.1:{ext_proc}", tls, endpoints(), health=f"127.0.0.1:{health}")
    ready = [case for case in CASES if case.group == "health"]
    while not await _holds(options, ready):
        await asyncio.sleep(0.2)
    return await run(options)


async def _holds(options: ConformanceOptions, cases: Sequence[Case]) -> bool:
    try:
        return all(result.outcome == "pass" for result in await run(options, cases))
    except Unreachable:
        return False


def theirs(program: Path, crds: Path, folder: Path) -> list[Result]:
    """GIE's picker with its default configuration, TLS included, on an InferencePool and ready Pods."""
    plane = ControlPlane(folder)
    try:
        plane.start()
        plane.define("--server-side", "-f", str(crds))
        plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": "conformance"}})
        asyncio.run(pods(Cluster(plane, "conformance")))
        ext_proc, health, metrics = free_ports(3)
        command = [str(program), "--pool-name=pool", "--pool-namespace=conformance", "--health-checking"]
        command += [f"--grpc-port={ext_proc}", f"--grpc-health-port={health}", f"--metrics-port={metrics}"]
        command += ["--tracing=false", "--metrics-endpoint-auth=false"]
        with running(command, {"KUBECONFIG": str(plane.kubeconfig())}, folder / "gie.log"):
            return asyncio.run(asyncio.wait_for(results(ext_proc, health, tls=True), LONGEST))
    finally:
        plane.stop()


async def pods(cluster: Cluster) -> None:
    await cluster.create_pool("pool", *PORTS)
    await cluster.create_pods([(f"pod-{number}", host) for number, host in enumerate(HOSTS)])


def ours(folder: Path) -> list[Result]:
    """Ours with its default configuration, on the same endpoints in a file."""
    listed = [{"name": f"{host}-{port}", "address": host, "port": port} for host in HOSTS for port in PORTS]
    (folder / "pool.yaml").write_text(json.dumps({"endpoints": listed}))
    ext_proc, health, metrics = map(str, free_ports(3))
    command = [sys.executable, "-m", "epp.cli", "serve", "--endpoints", str(folder / "pool.yaml")]
    command += ["--grpc-port", ext_proc, "--grpc-health-port", health, "--metrics-port", metrics]
    with running([*command, "--drain-timeout", "0"], {}, folder / "ours.log"):
        return asyncio.run(asyncio.wait_for(results(int(ext_proc), int(health), tls=False), LONGEST))


def table(ours: Sequence[Result], theirs: Sequence[Result]) -> str:
    lines = ["| case | what must hold | level | Warmpath | GIE v1.5.0 |", "|---|---|---|---|---|"]
    for mine, other in zip(ours, theirs, strict=True):
        case = mine.case
        lines.append(f"| {case.id} | {case.title} | {case.level} | {mine.outcome} | {other.outcome} |")
    return "\n".join([*lines, "", f"Warmpath: {summary(ours)}. GIE v1.5.0: {summary(theirs)}.", ""])


def main(program: Path, crds: Path, page: Path) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        other = theirs(program, crds, folder)
        mine = ours(folder)
    for result in other:
        if result.outcome != "pass":
            print(f"GIE {result.case.id} {result.case.level} {result.outcome}: {result.detail}")
    text = page.read_text(encoding="utf-8")
    page.write_text(MARKED.sub(lambda found: found[1] + table(mine, other) + found[2], text), encoding="utf-8")


main(*map(Path, sys.argv[1:]))
