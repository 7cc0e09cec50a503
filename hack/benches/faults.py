"""What each fault costs: requests sent, answered, failed and asked again, under steady load through a real Envoy.

    hack/bench faults                 every fault, a table in Markdown, as in docs/faults.md
    hack/bench faults --only killed   those whose names hold a text

Simulated pods; 50 requests a second: chats, long documents, and half of them streamed. A fault begins after three
seconds and ends five later; the last requests are waited for.
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
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp
import zmq
import zmq.asyncio

from epp.configuration.loader import strategy_text
from hack.benches.rig.mixed_load import Kind, MixedLoad, mixed_load
from hack.benches.rig.processes import BenchError, install
from tests.support.ext_proc import messages
from tests.support.ext_proc.server import Gateway
from tooling.laptop.chain import MANIFESTS, Chain, Replica, Shape, running_chain
from tooling.laptop.engines import LaptopPod, Simulated
from tooling.laptop.ports import free_ports

RATE: Final = 50.0
SHARES: Final[dict[Kind, float]] = {"chat": 0.4, "document": 0.1, "stream": 0.5}
BEFORE, DURING, AFTER = 3.0, 5.0, 4.0
"""Seconds."""
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

    @property
    def replica(self) -> Replica:
        return self.chain.replicas[0]

    def pid(self, replica: Replica) -> int:
        return self.chain.processes.pid(replica.name)

    async def back(self, replica: Replica) -> None:
        await self.chain.start_replica(replica)
        await self.chain.ready(f"{replica.admin}/ready", replica.name)

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


class Outcome(NamedTuple):
    """Of the requests of one run. `recovered`: seconds from the fault until the last request began that felt it.
    `early`: of those refused or failed, how many were sent before the fault."""

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
    await stage.back(stage.replica)


async def stopped(stage: Stage) -> None:
    os.kill(stage.pid(stage.replica), signal.SIGSTOP)
    await asyncio.sleep(DURING)
    os.kill(stage.pid(stage.replica), signal.SIGCONT)


async def restarted(stage: Stage) -> None:
    await stage.chain.processes.stop(stage.replica.name)
    await stage.back(stage.replica)


async def rolled(stage: Stage) -> None:
    for replica in stage.chain.replicas:
        await stage.chain.processes.stop(replica.name)
        await stage.back(replica)
        await asyncio.sleep(1.5)


async def all_killed(stage: Stage) -> None:
    names = [replica.name for replica in stage.chain.replicas]
    await stage.chain.processes.stop(*names, how=signal.SIGKILL)
    await asyncio.sleep(DURING)
    for replica in stage.chain.replicas:
        await stage.back(replica)


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
    """LMCache's coordinator, which speaks to Redis and the servers, accepts and does not answer; then it is gone."""

    async def never(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    server = await asyncio.start_server(never, "127.0.0.1", stage.port)
    await asyncio.sleep(DURING)
    server.close()


EVENTS: Final = "kvEventsConfig: {zmqEndpoint: 'tcp://127.0.0.1:PORT'}"
TIERS: Final = "lmcache: {coordinator: 'http://127.0.0.1:PORT', hashAlgorithm: sha256_cbor}"
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
    Fault("one of three pods killed (-9)", pod_killed),
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
    shape = Shape(
        pods=3,
        replicas=fault.replicas,
        port=0,
        picking=("--config", str(config), *fault.flags),
        manifests=manifests,
        environment=fake_clock(folder / "clock") if fault.clocks else {},
        engine=Simulated(flags=("--time-scale", "5")),
    )
    async with running_chain(shape, folder) as chain:
        async with asyncio.timeout(30):
            while (await chain.envoy.stats(f"^{EPP}.membership_healthy$"))[
                f"{EPP}.membership_healthy"
            ] != fault.replicas:
                await asyncio.sleep(0.05)
        yield Stage(chain, port, folder / "clock")


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
            at = time.monotonic()
            await fault.happens(stage)
            await asyncio.sleep(AFTER)
        made = None if fault.happens is pod_killed else await generated(stage.chain)
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
        sum(each.at < at and each.outcome != "answered" for each in load.done),
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
    if any(each.clocks for each in faults) and next(libfaketime(), None) is None:
        try:
            install("faketime")
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
