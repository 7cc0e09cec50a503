"""How a group of replicas grows: requests for each second of CPU of its busiest replica, behind one Envoy.

Groups of one, two and more replicas are up at once and asked by turns, each through a listener of its own. Each replica
has a core of its own, so a group serves as many requests a second as its busiest replica allows, at a full core; what
Envoy, the load and the model servers take is not counted. They have cores of their own where the machine has twice as
many as the largest group has replicas, else all of them. Where it has fewer than that group, its replicas share one.

Answers take a tenth of a second, so that requests are in flight at every endpoint, as in production. Where answers come
at once a replica finds its endpoints idle, and one that is told of others' requests finds them busy, of which bills say
more: part of what is compared would be that. And clients wait a little, each as long as chance says, before they ask
again: those that were answered at once would all ask at once, and replicas tell each other of requests that come
together at a lower price than of those that come one by one.

Others on their cores drive replicas out of caches. So a group is compared with as many replicas that know nothing of
each other, in the same place under the same load: what a request takes more in the group is what its replicas tell each
other. Beside it stands the comparison with one replica alone.

What a request takes changes from second to second on a machine that others share, by more than what is measured. So
bursts are short, each of a group is compared with those beside it, and the median of many such comparisons counts; and
as two processes that do the same differ too, all groups are started more than once.
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
from typing import Any, NamedTuple
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
PAUSE = 0.2
"""Seconds for which a client waits before it asks again, at most."""
REST_SECONDS = 0.5
"""Seconds after a burst in which all that it began has ended."""
TARGET = 10_000
"""Requests a second to be served."""
MOST = 0.6
"""Share of a core that a replica may use for it."""
SCENARIOS = {size: Scenario(f"{size} KB", size << 10, "chat") for size in (2, 32)}
JOIN_SECONDS = 30.0
_OF_MEDIAN = 1.25
"""Standard error of a median, against that of a mean."""


class Kind(NamedTuple):
    """Of a group."""

    size: int
    apart: bool = False
    """Its replicas know nothing of each other."""


class Group(NamedTuple):
    """Replicas, and the way through Envoy to them."""

    replicas: Sequence[Program]
    variant: Variant
    admins: Sequence[int]
    """Where the replicas show `/endpoints`: their ports of metrics."""
    clients: int


class Cost(NamedTuple):
    """CPU seconds a request that was routed: of the busiest replica, of all together; and requests answered in one."""

    busiest: float
    all: float
    answered: float


@contextmanager
def groups(
    kinds: Sequence[Kind], wiring: envoy.Wiring, answers_after: float, clients: int
) -> Iterator[tuple[Mapping[Kind, Group], Wrk, Mapping[int, Bodies]]]:
    """One group of each kind, all answering and knowing each other, the load, and bodies by their kilobytes.

    `answers_after`: seconds from a pick until the endpoint is asked. `clients`: for each core that replicas have.
    """
    need_programs()
    largest = max(kind.size for kind in kinds)
    on = cores(largest)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        pods, free = places(PODS), iter(free_ports(1 + sum(1 + 4 * kind.size for kind in kinds)))
        streaming = next(free)
        write_files(folder, pods, streaming)
        nginx = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"]
        stack.enter_context(running("nginx", nginx, folder, on.others)).wait_for_port(pods[0].port)
        listeners, found = {}, {}
        for kind in kinds:
            programs, ports, admins = _replicas(stack, folder, free, kind, on.own)
            port = next(free)
            listeners[_name(kind)] = envoy.Listener(port, ports[0], wiring, tuple(ports[1:]), answers_after)
            asking = clients * (1 if on.shared else kind.size)
            found[kind] = Group(programs, Variant(_name(kind), port, None), admins, asking)
        (folder / "envoy.json").write_text(json.dumps(envoy.config(listeners, pods)))
        workers = "1" if on.shared else str(largest)
        flags = ["--config-path", str(folder / "envoy.json"), "--concurrency", workers, "--disable-hot-restart"]
        proxy = stack.enter_context(
            running("envoy", [envoy_program(), *flags, "--log-level", "error"], folder, on.others)
        )
        for group in found.values():
            wait_for_answer(group.variant, [proxy, *group.replicas])
        bodies = {size: prepared_bodies(folder, each, 240) for size, each in SCENARIOS.items()}
        yield found, Wrk(on.others, PAUSE), bodies


def _name(kind: Kind) -> str:
    return f"{kind.size}{'-apart' if kind.apart else ''}"


def _replicas(
    stack: ExitStack, folder: Path, free: Iterator[int], kind: Kind, own: Sequence[str | None]
) -> tuple[list[Program], list[int], list[int]]:
    """The replicas of one group, joined, and their ports: of ext_proc, and of metrics."""
    peers = [next(free) for _ in range(kind.size)]
    tell = kind.size > 1 and not kind.apart
    programs, grpc, admins = [], [], []
    for number, peer in enumerate(peers):
        port, health, metrics = next(free), next(free), next(free)
        given = {"endpoints": folder / "endpoints.yaml", "python": sys.executable}
        words = shlex.split(EPP.format(grpc_port=port, health_port=health, metrics_port=metrics, **given))
        if tell:
            words += [
                "--replica-port",
                str(peer),
                *(flag for each in peers for flag in ("--peer", f"127.0.0.1:{each}")),
            ]
        programs.append(stack.enter_context(running(f"epp-{_name(kind)}-{number}", words, folder, own[number])))
        grpc.append(port)
        admins.append(metrics)
    for program, port, metrics in zip(programs, grpc, admins, strict=True):
        program.wait_for_port(port)
        program.wait_for_port(metrics)
        _wait_for_peers(program, metrics, kind.size - 1 if tell else 0)
    return programs, grpc, admins


def _wait_for_peers(program: Program, metrics: int, count: int) -> None:
    deadline = time.monotonic() + JOIN_SECONDS
    while time.monotonic() < deadline:
        program.check()
        replicas = _shown(metrics).get("replicas")
        if not count or [peer["state"] for peer in replicas["peers"]] == ["live"] * count:
            return
        time.sleep(0.1)
    raise BenchError(f"{program.name} does not know its {count} peers after {JOIN_SECONDS:g} s")


def measured(group: Group, wrk: Wrk, bodies: Bodies, seconds: float) -> Cost:
    """Of one burst, from rest to rest: those under way at its end are routed too, and end then, without an answer."""
    routed = _routed(group)
    before = [cpu_seconds(replica.pid) for replica in group.replicas]
    seen = wrk.burst(group.variant.port, bodies, group.clients, seconds)
    time.sleep(REST_SECONDS)
    spent = [cpu_seconds(each.pid) - was for each, was in zip(group.replicas, before, strict=True)]
    routed = _routed(group) - routed
    return Cost(max(spent) / routed, sum(spent) / routed, seen.requests / seconds)


def _routed(group: Group) -> int:
    return sum(decisions(_shown(port)) for port in group.admins)


def decisions(shown: Mapping[str, Any]) -> int:
    """Requests for which an endpoint was chosen so far, by a picker's `/endpoints`."""
    return sum(each["decisions"] for pool in shown["pools"] for each in pool["endpoints"])


def _shown(port: int) -> Any:
    with urlopen(f"http://127.0.0.1:{port}/endpoints", timeout=5) as answer:
        return json.load(answer)


def lines(kilobytes: int, costs: Mapping[Kind, Sequence[Cost]]) -> list[str]:
    """What one size of body came to, for people; `costs` of each group by turn: of one replica, and of each larger size
    together and apart.
    """
    own = median(cost.busiest for cost in costs[Kind(1)])
    shown = [_line(kilobytes, 1, 1 / own, 1.0, "", 1.0, costs[Kind(1)])]
    peers: dict[int, float] = {}
    for kind, group in costs.items():
        if kind.size == 1 or kind.apart:
            continue
        apart = costs[Kind(kind.size, True)]
        gains = [each.all / one.busiest for each, one in zip(apart, group, strict=True)]
        beside_one = median(each.busiest / one.busiest for each, one in zip(costs[Kind(1)], group, strict=True))
        share = median((one.all / each.all - 1) / (kind.size - 1) for each, one in zip(apart, group, strict=True))
        peers[kind.size] = own * share
        error = f" +- {_OF_MEDIAN * stdev(gains) / sqrt(len(gains)):4.2f}" if len(gains) > 1 else ""
        line = _line(kilobytes, kind.size, median(gains) / own, median(gains), error, beside_one, group)
        shown.append(f"{line}  {peers[kind.size] * 1e6:9.0f} us {share:6.0%}")
    if peers:
        peer_cost = peers[min(peers)]
        left = MOST - TARGET * peer_cost
        enough = f"{ceil(TARGET * (own - peer_cost) / left)} replicas" if left > 0 else "more than one group can serve"
        shown.append(f"         {TARGET:,} a second at {MOST:g} of a core each: {enough}")
    return shown


def _line(
    kilobytes: int, size: int, rate: float, gain: float, error: str, beside_one: float, group: Sequence[Cost]
) -> str:
    answered = median(cost.answered for cost in group)
    gains = f"{gain:9.2f}{error:8}  {beside_one:9.2f}"
    return f"{kilobytes:4d} KB  {size:8d}  {rate:11,.0f}  {rate / size:13,.0f}  {gains}  {answered:10,.0f}"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench scale", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--replicas", type=int, nargs="+", default=[2, 4], help="sizes of groups beside one alone")
    parser.add_argument("--starts", type=int, default=6, help="times that all groups are started anew")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of load for each group, at each start")
    parser.add_argument("--seconds", type=float, default=2.0, help="for one burst of load")
    parser.add_argument("--wiring", choices=("lean", "full-duplex", "buffered"), default="lean")
    parser.add_argument("--clients", type=int, default=450, help="for each core that replicas have")
    parser.add_argument("--answers-after", type=float, default=0.1, help="seconds that endpoints take to answer")
    flags = parser.parse_args(arguments)
    sizes = sorted({*flags.replicas} - {1})
    kinds = [Kind(1), *(Kind(size, apart) for size in sizes for apart in (True, False))]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends
    costs: dict[int, dict[Kind, list[Cost]]] = {kilobytes: {kind: [] for kind in kinds} for kilobytes in SCENARIOS}
    try:
        for _ in range(flags.starts):
            with groups(kinds, flags.wiring, flags.answers_after, flags.clients) as (made, wrk, bodies):
                for turn in range(-3, flags.rounds):  # the first for warmth
                    for kilobytes in SCENARIOS:
                        for kind in kinds if turn % 2 == 0 else reversed(kinds):
                            cost = measured(made[kind], wrk, bodies[kilobytes], flags.seconds)
                            costs[kilobytes][kind] += [cost] if turn >= 0 else []
    except BenchError as error:
        print(f"hack/bench scale: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print("prompt  replicas   requests/s  of each, at a  times one          times one    answered  taking in a")
    print("                       in all      full core  +- its error           alone    a second  peer's request")
    for kilobytes, found in costs.items():
        print("\n".join(lines(kilobytes, found)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
