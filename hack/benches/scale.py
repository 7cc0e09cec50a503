"""How a group of replicas grows: requests for each second of CPU of its busiest replica, behind one Envoy.

Groups of one, two and more replicas are up at once and asked by turns, each through a listener of its own. Each replica
is meant for a core of its own, so a group serves as many requests a second as its busiest replica allows, at a full
core; what Envoy, the load and the model servers take is not counted. Where the machine has twice as many cores as the
largest group has replicas, each has a core of its own, and what was answered is shown beside it. Else all share one
core, which they fill: so each has always something to do, as one that is full on a core of its own.

What a request takes changes from second to second on a machine that others share, by more than what is measured. So
bursts are short, each of a group is compared with the one of a single replica beside it, and the median of many such
comparisons counts; and as two processes that do the same differ too, all groups are started more than once.
"""

import argparse
import json
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from math import ceil, sqrt
from pathlib import Path
from statistics import median, stdev
from typing import NamedTuple
from urllib.request import urlopen

from hack.benches.rig import envoy
from hack.benches.rig.load import Bodies, Wrk
from hack.benches.rig.pickers import (
    EPP,
    Scenario,
    Variant,
    envoy_program,
    places,
    prepared_bodies,
    wait_for_answer,
    write_files,
)
from hack.benches.rig.processes import BenchError, Program, cores, cpu_seconds, need_programs, running
from tooling.laptop.ports import free_ports

PODS = 8
CONNECTIONS = 32
"""For each replica of a group."""
TARGET = 10_000
"""Requests a second to be served."""
MOST = 0.6
"""Share of a core that a replica may use for it."""
SCENARIOS = {size: Scenario(f"{size} KB", size << 10, "chat") for size in (2, 32)}
JOIN_SECONDS = 30.0
_OF_MEDIAN = 1.25
"""Standard error of a median, against that of a mean."""


class Group(NamedTuple):
    """Replicas that tell each other, and the way through Envoy to them."""

    replicas: Sequence[Program]
    variant: Variant


class Cost(NamedTuple):
    """CPU seconds a request of the group: of the busiest replica, and of all together; and requests answered in one."""

    busiest: float
    all: float
    answered: float


@contextmanager
def groups(
    sizes: Sequence[int], wiring: envoy.Wiring
) -> Iterator[tuple[Mapping[int, Group], Wrk, Mapping[int, Bodies]]]:
    """One group of each size, all answering and knowing each other, the load, and bodies by their kilobytes."""
    need_programs()
    on = cores(max(sizes))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        pods, free = places(PODS), iter(free_ports(1 + sum(1 + 4 * size for size in sizes)))
        streaming = next(free)
        write_files(folder, pods, streaming)
        nginx = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
        stack.enter_context(running("nginx", nginx, folder, on.others)).wait_for_port(pods[0].port)
        listeners, started = {}, {}
        for size in sizes:
            programs, ports = _replicas(stack, folder, free, size, on.own)
            listeners[str(size)] = envoy.Listener(next(free), ports[0], wiring, tuple(ports[1:]))
            started[size] = programs
        (folder / "envoy.json").write_text(json.dumps(envoy.config(listeners, pods)))
        workers = "1" if on.shared else str(max(sizes))
        flags = ["--config-path", str(folder / "envoy.json"), "--concurrency", workers, "--disable-hot-restart"]
        proxy = stack.enter_context(
            running("envoy", [envoy_program(), *flags, "--log-level", "error"], folder, on.others)
        )
        found = {}
        for size in sizes:
            found[size] = Group(started[size], Variant(str(size), listeners[str(size)].port, None))
            wait_for_answer(found[size].variant, [proxy, *started[size]])
        yield found, Wrk(on.others), {size: prepared_bodies(folder, each, 240) for size, each in SCENARIOS.items()}


def _replicas(
    stack: ExitStack, folder: Path, free: Iterator[int], size: int, own: Sequence[str | None]
) -> tuple[list[Program], list[int]]:
    """So many replicas of one group, joined, and their ext_proc ports."""
    peers = [next(free) for _ in range(size)]
    programs, grpc, admins = [], [], []
    for number, peer in enumerate(peers):
        port, health, metrics = next(free), next(free), next(free)
        given = {"endpoints": folder / "endpoints.yaml", "python": sys.executable}
        words = shlex.split(EPP.format(grpc_port=port, health_port=health, metrics_port=metrics, **given))
        if size > 1:
            words += [
                "--replica-port",
                str(peer),
                *(flag for each in peers for flag in ("--peer", f"127.0.0.1:{each}")),
            ]
        programs.append(stack.enter_context(running(f"epp-{size}-{number}", words, folder, own[number])))
        grpc.append(port)
        admins.append(metrics)
    for program, port, metrics in zip(programs, grpc, admins, strict=True):
        program.wait_for_port(port)
        program.wait_for_port(metrics)
        _wait_for_peers(program, metrics, size - 1)
    return programs, grpc


def _wait_for_peers(program: Program, metrics: int, count: int) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline:
        program.check()
        with urlopen(f"http://127.0.0.1:{metrics}/endpoints", timeout=5) as answer:
            replicas = json.load(answer).get("replicas")
        if not count or [peer["state"] for peer in replicas["peers"]] == ["live"] * count:
            return
        time.sleep(0.1)
    raise BenchError(f"{program.name} does not know its {count} peers after {JOIN_SECONDS:g} s")


def measured(group: Group, wrk: Wrk, bodies: Bodies, seconds: float) -> Cost:
    before = [cpu_seconds(replica.pid) for replica in group.replicas]
    seen = wrk.burst(group.variant.port, bodies, CONNECTIONS * len(group.replicas), seconds)
    spent = [cpu_seconds(each.pid) - was for each, was in zip(group.replicas, before, strict=True)]
    return Cost(max(spent) / seen.requests, sum(spent) / seen.requests, seen.requests / seconds)


def lines(kilobytes: int, costs: Mapping[int, Sequence[Cost]]) -> list[str]:
    """What one size of body came to, for people; `costs` of each size of group, the smallest of them 1, by turn."""
    own = median(cost.busiest for cost in costs[1])
    shown = []
    peers: dict[int, float] = {}
    for size, group in costs.items():
        pairs = [*zip(costs[1], group, strict=True)]
        gains = [alone.busiest / each.busiest for alone, each in pairs]
        gain, peer, error = median(gains), "", 8 * " "
        if size > 1:
            shares = [(each.all / alone.busiest - 1) / (size - 1) for alone, each in pairs]
            peers[size] = own * median(shares)
            peer = f"{peers[size] * 1e6:9.0f} us {median(shares):6.0%}"
            error = f" +- {_OF_MEDIAN * stdev(gains) / sqrt(len(gains)):4.2f}" if len(gains) > 1 else error
        rates = f"{gain / own:11,.0f}  {gain / own / size:13,.0f}  {gain:9.2f}{error}"
        answered = f"{median(cost.answered for cost in group):10,.0f}"
        shown.append(f"{kilobytes:4d} KB  {size:8d}  {rates}  {answered}  {peer}".rstrip())
    if peers:
        peer_cost = peers[min(peers)]
        left = MOST - TARGET * peer_cost
        enough = f"{ceil(TARGET * (own - peer_cost) / left)} replicas" if left > 0 else "more than one group can serve"
        shown.append(f"         {TARGET:,} a second at {MOST:g} of a core each: {enough}")
    return shown


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench scale", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4], help="sizes of groups beside one alone")
    parser.add_argument("--starts", type=int, default=2, help="times that all groups are started anew")
    parser.add_argument("--rounds", type=int, default=24, help="bursts of load for each group, at each start")
    parser.add_argument("--seconds", type=float, default=0.7, help="for one burst of load")
    parser.add_argument("--wiring", choices=("lean", "full-duplex", "buffered"), default="lean")
    flags = parser.parse_args(arguments)
    sizes = sorted({1, *flags.replicas})
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends
    costs: dict[int, dict[int, list[Cost]]] = {kilobytes: {size: [] for size in sizes} for kilobytes in SCENARIOS}
    try:
        for _ in range(flags.starts):
            with groups(sizes, flags.wiring) as (made, wrk, bodies):
                for turn in range(-3, flags.rounds):  # the first for warmth
                    for kilobytes in SCENARIOS:
                        for size in sizes if turn % 2 == 0 else reversed(sizes):
                            cost = measured(made[size], wrk, bodies[kilobytes], flags.seconds)
                            costs[kilobytes][size] += [cost] if turn >= 0 else []
    except BenchError as error:
        print(f"hack/bench scale: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("prompt  replicas   requests/s  of each, at a  times one alone    answered  taking in a")
    print("                       in all      full core  +- its error       a second  peer's request")
    for kilobytes, by_size in costs.items():
        print("\n".join(lines(kilobytes, by_size)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
