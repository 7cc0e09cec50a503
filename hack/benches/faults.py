"""What each fault costs: requests sent, answered, failed and asked again, under steady load through a real Envoy.

    hack/bench faults                 every fault, a table in Markdown, as in docs/faults.md
    hack/bench faults --only killed   those whose names hold a text

Simulated pods; 50 requests a second: chats, long documents, and half of them streamed. A fault begins after three
seconds and ends five later, where its name says no other time; the last requests are waited for. Where the API server
is at fault, the pickers follow a pool of a real one, of KUBEBUILDER_ASSETS or hack/envtest.
"""

import argparse
import asyncio
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import yaml
import zmq
import zmq.asyncio

from epp.configuration.loader import strategy_text
from hack.benches.rig.mixed_load import Kind, MixedLoad, mixed_load
from hack.benches.rig.processes import BenchError, install
from hack.benches.rig.real_pool import PodAt, PodsOf, RealPool, need_api_server, real_pool
from tests.support.ext_proc import messages
from tests.support.ext_proc.server import Gateway
from tooling.laptop.chain import LABELS, MANIFESTS, Chain, Replica, Shape, running_chain
from tooling.laptop.engines import LaptopPod, Simulated
from tooling.laptop.ports import free_ports

RATE: Final = 50.0
SHARES: Final[dict[Kind, float]] = {"chat": 0.4, "document": 0.1, "stream": 0.5}
BEFORE, DURING, AFTER = 3.0, 5.0, 4.0
"""Seconds."""
AWAY: Final = 300.0
"""Seconds without the API server, or without a pod."""
CHURNED, AT_ONCE = 1000, 25
"""Pods that come and go, and how many of them are there at a time."""
SLOW: Final = 2.0
"""Seconds until the first byte, beyond which a request has felt the fault."""
POOL, EPP = "cluster.pool.default.sim", "cluster.epp.default.sim"


@dataclass
class Stage:
    """Where a fault happens."""

    chain: Chain
    port: int
    """Of a server that a fault brings itself."""
    wall: Path
    """Says how far the pickers' wall clocks are off."""
    pool: RealPool | None = None
    """What the pickers follow, where that is no file."""
    at: float = 0.0
    """When what costs requests came: as the fault begins, where that does not say otherwise. Monotonic."""

    @property
    def real_pool(self) -> RealPool:
        if self.pool is None:
            raise RuntimeError("this fault is one of pickers that follow an API server")
        return self.pool

    @property
    def replica(self) -> Replica:
        return self.chain.replicas[0]

    def pid(self, replica: Replica) -> int:
        return self.chain.processes.pid(replica.name)

    async def pods(self, pods: Sequence[LaptopPod], **faults: object) -> None:
        for pod in pods:
            async with self.chain.http.post(f"{pod.url}/admin/faults", json=faults) as answer:
                answer.raise_for_status()


Happening = Callable[[Stage], Awaitable[None]]


class Fault(NamedTuple):
    """`happens` returns when the fault is over."""

    name: str
    happens: Happening
    replicas: int = 2
    strategy: str = "prefix-aware"
    config: str = ""
    """More of the configuration: parameters of the producer of what pods hold."""
    fail_open: bool = False
    flags: tuple[str, ...] = ()
    clocks: bool = False
    """Whether the pickers' wall clocks can be set."""
    api_server: Sequence[str] | None = None
    """Flags of the API server whose InferencePool the pickers follow; None: they follow files."""
    prepare: Happening | None = None
    """Before there are requests."""
    counted: bool = True
    """Whether each pod can say at the end how many answers it generated."""


class Outcome(NamedTuple):
    """Of the requests of one run. `recovered`: seconds from the fault until the last request began that felt it.
    `early`: of those refused or failed, how many were sent before what costs requests came."""

    name: str
    sent: int
    answered: int
    refused: int
    failed: int
    retried: int
    duplicated: int | None
    recovered: float
    early: int
    why: tuple[str, ...]


# --- pickers ---------------------------------------------------------------------------------------------------------


async def killed(stage: Stage) -> None:
    await stage.chain.processes.stop(stage.replica.name, how=signal.SIGKILL)
    await asyncio.sleep(DURING)
    await stage.chain.start_again(stage.replica)


async def stopped(stage: Stage) -> None:
    os.kill(stage.pid(stage.replica), signal.SIGSTOP)
    await asyncio.sleep(DURING)
    os.kill(stage.pid(stage.replica), signal.SIGCONT)


async def restarted(stage: Stage) -> None:
    await stage.chain.processes.stop(stage.replica.name)
    await stage.chain.start_again(stage.replica)


async def rolled(stage: Stage) -> None:
    for replica in stage.chain.replicas:
        await stage.chain.processes.stop(replica.name)
        await stage.chain.start_again(replica)
        await asyncio.sleep(1.5)


async def all_killed(stage: Stage) -> None:
    names = [replica.name for replica in stage.chain.replicas]
    await stage.chain.processes.stop(*names, how=signal.SIGKILL)
    await asyncio.sleep(DURING)
    for replica in stage.chain.replicas:
        await stage.chain.start_again(replica)


async def no_descriptors(stage: Stage) -> None:
    """As many as it has open now: it can open none."""
    pids = [stage.pid(replica) for replica in stage.chain.replicas]
    before = [resource.prlimit(pid, resource.RLIMIT_NOFILE) for pid in pids]
    for pid, (_, most) in zip(pids, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (len(os.listdir(f"/proc/{pid}/fd")), most))
    await asyncio.sleep(DURING)
    for pid, limits in zip(pids, before, strict=True):
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


async def gateway_that_does_not_read(stage: Stage) -> None:
    """Another gateway of the same picker sends ten bodies of 4 MB and reads no reply."""
    body = b'{"model": "sim", "prompt": "' + b"x" * (4 << 20) + b'"}'
    async with Gateway(stage.replica.grpc_ports[0]) as gateway:

        async def one() -> None:
            call = gateway.stream()
            await call.write(messages.request_headers())
            for start in range(0, len(body), 1 << 20):
                piece = body[start : start + (1 << 20)]
                await call.write(messages.request_body(piece, end=start + (1 << 20) >= len(body)))

        sending = [asyncio.ensure_future(one()) for _ in range(10)]
        await asyncio.sleep(DURING)
        for each in sending:
            each.cancel()
        await asyncio.gather(*sending, return_exceptions=True)


def clock_set(*seconds: int) -> Happening:
    """The wall clock of all pickers is off by so much, one after the other."""

    async def happens(stage: Stage) -> None:
        for each in seconds:
            before = await wall_clock(stage)
            set_clock(stage.wall, each)
            await asyncio.sleep(DURING)
            off = await wall_clock(stage) - before
            if abs(off - each) > 600:
                raise RuntimeError(f"the pickers' clock was to be off by {each} s and is by {off:.0f} s")
            set_clock(stage.wall, 0)

    return happens


def set_clock(file: Path, seconds: int) -> None:
    """As libfaketime reads it at each look at the clock; put into its place whole."""
    new = file.with_suffix(".new")
    new.write_text(f"{seconds:+d}\n")
    new.replace(file)


async def wall_clock(stage: Stage) -> float:
    """What the picker says the time of day is, in seconds: its last decision's."""
    async with stage.chain.http.get(f"{stage.replica.admin}/decisions?limit=1") as answer:
        [last] = (await answer.json())["decisions"]
    return float(last["at"])


def libfaketime() -> Iterator[Path]:
    """Where Debian's package has put it."""
    return Path("/usr/lib").glob("*/faketime/libfaketimeMT.so.1")


def fake_clock(file: Path) -> dict[str, str]:
    """The environment in which a process sees another wall clock, and the same monotonic one."""
    set_clock(file, 0)
    return {
        "LD_PRELOAD": str(next(libfaketime())),
        "FAKETIME_TIMESTAMP_FILE": str(file),
        "FAKETIME_NO_CACHE": "1",
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "DONT_FAKE_MONOTONIC": "1",
    }


async def nothing(stage: Stage) -> None:
    """What is wrong is so from the start: see its flags and its configuration."""
    await asyncio.sleep(DURING)


# --- pods ------------------------------------------------------------------------------------------------------------


async def pod_killed(stage: Stage) -> None:
    pod = stage.chain.pods[0]
    await stage.chain.processes.stop(pod.name, how=signal.SIGKILL)
    await asyncio.sleep(DURING)
    await stage.chain.start(stage.chain.layout.programs[pod.name])
    await stage.chain.ready(stage.chain.layout.programs[pod.name].ready, pod.name)


def one_pod(times: float = 1.0, **faults: object) -> Happening:
    """`times`: so many times as long as others."""

    async def happens(stage: Stage) -> None:
        await stage.pods(stage.chain.pods[:1], **faults)
        await asyncio.sleep(times * DURING)
        await stage.pods(stage.chain.pods[:1])

    return happens


def all_pods(**faults: object) -> Happening:
    async def happens(stage: Stage) -> None:
        await stage.pods(stage.chain.pods, **faults)
        await asyncio.sleep(DURING)
        await stage.pods(stage.chain.pods)

    return happens


# --- what is known of them -------------------------------------------------------------------------------------------


async def rubbish(stage: Stage) -> None:
    """A publisher of KV events sends what is none, what is out of order, and more of it than anybody reads."""
    pods = [pod.url.removeprefix("http://") for pod in stage.chain.pods]
    with zmq.asyncio.Context() as context, context.socket(zmq.PUB) as publisher:
        publisher.connect(f"tcp://127.0.0.1:{stage.port}")
        end, number = time.monotonic() + DURING, 0
        while time.monotonic() < end:
            number += 1
            topic = f"kv@{pods[number % len(pods)]}@sim".encode()
            sequence = (number * 7919 % 1000).to_bytes(8, "big")
            await publisher.send_multipart([topic, sequence, os.urandom(64) if number % 2 else b"\x93\x01\x90\x00"])
            if number % 50 == 0:
                await asyncio.sleep(0.01)


async def coordinator_hangs(stage: Stage) -> None:
    """LMCache's coordinator, which its servers tell what they hold, accepts and does not answer; then it is gone."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", stage.port)
    await asyncio.sleep(DURING)
    server.close()


# --- the API server --------------------------------------------------------------------------------------------------


async def pod_gone(stage: Stage) -> None:
    """Killed soon after the start, of which the pickers are told at once; back at the end."""
    pod, end = stage.chain.pods[0], time.monotonic() + AWAY
    await pod_dies(stage, pod)
    await told_of_the_end(stage, pod)
    await asyncio.sleep(end - time.monotonic())
    await pod_back(stage, pod)


async def api_server_away(stage: Stage) -> None:
    """Killed, with a pod killed soon after it, of which nobody can tell the pickers; both are back at the end."""
    pool, pod, end = stage.real_pool, stage.chain.pods[0], time.monotonic() + AWAY
    await asyncio.to_thread(pool.plane.stop_api)
    await pod_dies(stage, pod)
    await asyncio.sleep(end - time.monotonic())
    for replica in stage.chain.replicas:
        if "kubernetes-away" not in await degraded(stage, replica):
            raise RuntimeError(f"{replica.name} did not miss the API server")
    await asyncio.to_thread(pool.plane.start_api)
    await told_of_the_end(stage, pod)
    await pod_back(stage, pod)


async def pod_dies(stage: Stage, pod: LaptopPod) -> None:
    """Soon after the fault has begun; from then on it costs requests."""
    await asyncio.sleep(DURING)
    await stage.chain.processes.stop(pod.name, how=signal.SIGKILL)
    stage.at = time.monotonic()


async def told_of_the_end(stage: Stage, pod: LaptopPod) -> None:
    """As a node's kubelet tells the API server of a pod that ended."""
    await stage.real_pool.cluster.set_ready(pod.name, False)
    await known(stage, {each.address for each in stage.chain.pods if each is not pod})


async def pod_back(stage: Stage, pod: LaptopPod) -> None:
    await stage.chain.start(stage.chain.layout.programs[pod.name])
    await stage.chain.ready(stage.chain.layout.programs[pod.name].ready, pod.name)
    await stage.real_pool.cluster.set_ready(pod.name, True)
    await known(stage, {each.address for each in stage.chain.pods})


async def compacted(stage: Stage) -> None:
    """Watches break and cannot go on where they were: etcd has forgotten what came since."""
    pool, before = stage.real_pool, stage.real_pool.lists()
    least, limit = time.monotonic() + 4 * DURING, time.monotonic() + 60
    while (lists := pool.lists() - before) < 2 * len(stage.chain.replicas) or time.monotonic() < least:
        if time.monotonic() > limit:
            raise RuntimeError(f"the pickers were to list Pods anew and again, and did so {lists} times")
        await asyncio.to_thread(pool.plane.compact)
        pool.connections.cut()
        await asyncio.sleep(0.25)
    print(f"Pods listed anew {lists} times by {len(stage.chain.replicas)} pickers", file=sys.stderr)
    await known(stage, {each.address for each in stage.chain.pods})


def to_churn(stage: Stage) -> list[PodAt]:
    """Each is served by one of the three pods' processes, at an address of its own."""
    ports = [pod.port for pod in stage.chain.pods]
    return [
        PodAt(f"churned-{number}", f"127.2.{number // 250}.{number % 250 + 1}", ports[number % len(ports)])
        for number in range(CHURNED)
    ]


async def tell_envoy(stage: Stage) -> None:
    """Of those that will come, so that it sends to them as soon as a picker names them."""
    file = stage.chain.endpoints_file
    content = yaml.safe_load(file.read_text())
    for pod in to_churn(stage):
        content["endpoints"].append({"name": pod.name, "address": pod.ip, "port": pod.port, "labels": LABELS})
    file.write_text(yaml.safe_dump(content))
    await stage.chain.reload()


async def churned(stage: Stage) -> None:
    """Some come and as many of those before them go, over and over."""
    pods = to_churn(stage)
    stay = {pod.address for pod in stage.chain.pods}
    before: list[PodAt] = []
    for first in range(0, len(pods) + AT_ONCE, AT_ONCE):
        some = pods[first : first + AT_ONCE]
        await stage.real_pool.create(some)
        await stage.real_pool.cluster.delete_pods([pod.name for pod in before])
        await known(stage, stay | {f"{pod.ip}:{pod.port}" for pod in some})
        before = some


async def known(stage: Stage, addresses: set[str]) -> None:
    """Return when all pickers know these endpoints and no others. RuntimeError if they do not in 30 s."""
    found: set[str] = set()
    try:
        async with asyncio.timeout(30):
            for replica in stage.chain.replicas:
                while (found := await endpoints(stage, replica)) != addresses:
                    await asyncio.sleep(0.05)
    except TimeoutError:
        raise RuntimeError(f"a picker was to know {len(addresses)} endpoints and knows {len(found)}") from None


async def endpoints(stage: Stage, replica: Replica) -> set[str]:
    """Addresses of those that a picker knows."""
    pools = (await stage.chain.get(f"{replica.admin}/endpoints"))["pools"]
    return {endpoint["address"] for pool in pools for endpoint in pool["endpoints"]}


async def degraded(stage: Stage, replica: Replica) -> str:
    """What works less well than it should at a picker, line by line."""
    async with stage.chain.http.get(f"{replica.admin}/metrics") as answer:
        lines = (await answer.text()).splitlines()
    return "\n".join(each for each in lines if each.startswith("warmpath_degraded_now{") and not each.endswith(" 0"))


EVENTS: Final = "kvEventsConfig: {zmqEndpoint: 'tcp://127.0.0.1:PORT'}"
TIERS: Final = "lmcache: {coordinator: 'http://127.0.0.1:PORT', hashAlgorithm: sha256_cbor}"
FASTER: Final = ("--time-scale", "5")
"""Of the simulated pods."""
FAULTS: Final = (
    Fault("none", nothing),
    Fault("one of two pickers killed (-9)", killed),
    Fault("one of two pickers stopped (SIGSTOP)", stopped),
    Fault("one of two pickers restarted", restarted),
    Fault("both pickers restarted in turn", rolled),
    Fault("all pickers killed, FailClose", all_killed),
    Fault("all pickers killed, FailOpen", all_killed, fail_open=True),
    Fault("the only picker restarted", restarted, replicas=1),
    Fault("pickers cannot open files", no_descriptors),
    Fault("another gateway does not read", gateway_that_does_not_read, replicas=1),
    Fault("the disk of the audit log is full", nothing, flags=("--audit-log", "/dev/full")),
    Fault("the pickers' clock an hour ahead, and right again", clock_set(3600), clocks=True),
    Fault("the pickers' clock an hour behind, and right again", clock_set(-3600), clocks=True),
    Fault("one of three pods killed (-9)", pod_killed, counted=False),
    Fault("one of three pods hangs, for 20 s", one_pod(4, hang=True, metrics="hang")),
    Fault("one of three pods hangs, for 20 s; its metrics are read", one_pod(4, hang=True)),
    Fault("one of three pods is 50 times slower", one_pod(slow=50)),
    Fault("one of three pods answers 500", one_pod(status=500)),
    Fault("one of three pods answers 503", one_pod(status=503)),
    Fault("one of three pods cuts connections", one_pod(refuse=True)),
    Fault("one of three pods cuts streams", one_pod(drop_after=5)),
    Fault("all pods cut connections", all_pods(refuse=True)),
    Fault("metrics of all pods never end", all_pods(metrics="endless")),
    Fault("metrics of all pods hang", all_pods(metrics="hang")),
    Fault("KV events with gaps", all_pods(mute=True), strategy="kv-aware"),
    Fault("KV events: rubbish, out of order, a flood", rubbish, strategy="kv-aware", config=EVENTS),
    Fault("LMCache's coordinator away, then hangs", coordinator_hangs, strategy="kv-aware", config=TIERS),
    Fault("one of three pods killed (-9), gone for five minutes", pod_gone, api_server=(), counted=False),
    Fault("the API server away for five minutes, a pod killed (-9)", api_server_away, api_server=(), counted=False),
    Fault("etcd compacted again and again for 20 s: watches get 410", compacted, api_server=("--watch-cache=false",)),
    Fault("1,000 pods created and deleted", churned, api_server=(), prepare=tell_envoy),
)


@asynccontextmanager
async def staged(fault: Fault, folder: Path) -> AsyncIterator[Stage]:
    [port] = free_ports(1)
    text = strategy_text(fault.strategy)
    if fault.config:
        producer = "- type: precise-prefix-cache-producer\n"
        more = fault.config.replace("PORT", str(port))
        text = text.replace(producer, f"{producer}  parameters: {{{more}}}\n", 1)
    config, manifests = folder / "config.yaml", folder / "manifests"
    config.write_text(text)
    manifests.mkdir()
    for file in MANIFESTS.iterdir():
        text = file.read_text()
        mode = "  endpointPickerRef:\n    failureMode: FailOpen\n"
        (manifests / file.name).write_text(text.replace("  endpointPickerRef:\n", mode) if fault.fail_open else text)
    async with AsyncExitStack() as stack:
        pool, engine = None, Simulated(flags=FASTER)
        if fault.api_server is not None:
            pool = await stack.enter_async_context(real_pool(folder / "kubernetes", fault.api_server))
            engine = PodsOf(flags=(*FASTER, "--host", "0.0.0.0"), pool=pool)
        shape = Shape(
            pods=3,
            replicas=fault.replicas,
            port=0,
            picking=("--config", str(config), *fault.flags),
            manifests=manifests,
            environment=fake_clock(folder / "clock") if fault.clocks else {},
            engine=engine,
            pools=pool.picker_flags if pool is not None else (),
        )
        chain = await stack.enter_async_context(running_chain(shape, folder))
        async with asyncio.timeout(30):
            while (await chain.envoy.stats(f"^{EPP}.membership_healthy$"))[
                f"{EPP}.membership_healthy"
            ] != fault.replicas:
                await asyncio.sleep(0.05)
        stage = Stage(chain, port, folder / "clock", pool)
        if fault.prepare is not None:
            await fault.prepare(stage)
        yield stage


async def generated(chain: Chain) -> int | None:
    """Answers that the pods ended in order; None where one does not tell."""
    total = 0.0
    for pod in chain.pods:
        try:
            async with chain.http.get(f"{pod.url}/metrics") as answer:
                page = await answer.text()
        except (aiohttp.ClientError, TimeoutError):
            return None
        for line in page.splitlines():
            if line.startswith("vllm:request_success_total") and ('"stop"' in line or '"length"' in line):
                total += float(line.rpartition(" ")[2])
    return int(total)


async def run(fault: Fault, folder: Path) -> Outcome:
    async with staged(fault, folder) as stage:
        load = MixedLoad(stage.chain.url, shares=SHARES)
        async with mixed_load(load, RATE):
            await asyncio.sleep(BEFORE)
            at = stage.at = time.monotonic()
            await fault.happens(stage)
            await asyncio.sleep(AFTER)
        made = await generated(stage.chain) if fault.counted else None
        names = [f"{POOL}.upstream_rq_retry", f"{EPP}.upstream_rq_retry"]
        stats = await stage.chain.envoy.stats("|".join(f"^{name}$" for name in names))
    count = load.count()
    felt = [each for each in load.done if each.at > at - LONG and (each.outcome != "answered" or each.took > SLOW)]
    return Outcome(
        fault.name,
        load.sent,
        count["answered"],
        count["refused"],
        count["failed"],
        sum(int(stats.get(name, 0)) for name in names),
        None if made is None else max(0, made - count["answered"]),
        max([0.0, *(each.at - at for each in felt)]),
        sum(each.at < stage.at and each.outcome != "answered" for each in load.done),
        tuple(sorted({each.why[:110] for each in load.done if each.outcome == "failed"})),
    )


LONG: Final = 2.0
"""Seconds that requests of before a fault may still run when it comes."""


def table(outcomes: Sequence[Outcome]) -> str:
    """In Markdown."""
    rows = [
        "| fault | sent | answered | refused | failed | asked again | twice | last felt, s |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for each in outcomes:
        twice = "?" if each.duplicated is None else str(each.duplicated)
        figures = (each.sent, each.answered, each.refused, each.failed, each.retried, twice, f"{each.recovered:.1f}")
        rows.append(f"| {each.name} | " + " | ".join(map(str, figures)) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench faults", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="those whose names hold one of these")
    options = parser.parse_args()
    faults = [each for each in FAULTS if any(text in each.name for text in options.only)]
    try:
        if any(each.clocks for each in faults) and next(libfaketime(), None) is None:
            install("faketime")
        if any(each.api_server is not None for each in faults):
            need_api_server()
    except BenchError as error:
        parser.exit(3, f"hack/bench faults: {error}\n")
    outcomes = []
    for fault in faults:
        with tempfile.TemporaryDirectory(prefix="warmpath-faults-") as folder:
            outcomes.append(asyncio.run(run(fault, Path(folder))))
        print(outcomes[-1], file=sys.stderr, flush=True)
    print(table(outcomes))


if __name__ == "__main__":
    main()
