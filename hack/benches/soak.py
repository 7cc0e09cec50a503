"""Hours of mixed load through a real Envoy on simulated pods: does memory, or anything else, grow with requests?

Chats, long documents, streams, clients that leave, malformed requests; pods come and go, and configuration is reloaded;
of several replicas the last is restarted again and again. What is sampled is the first replica's: memory, what of it is
in use, file descriptors, threads, series of /metrics, sizes of its tables, and what clients wait for a first byte.
After a warm-up each is fitted by a line over the requests sent.
"""

import argparse
import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from statistics import quantiles
from typing import Final, NamedTuple

from epp.configuration.loader import strategy_text
from hack.benches.rig.mixed_load import MixedLoad, mixed_load
from tooling.laptop.chain import SOURCE, Chain, Shape, running_chain, write_endpoints
from tooling.laptop.engines import Simulated
from tooling.laptop.watch import watch

WARM: Final = 1 / 3
"""Of the time, before what is sampled counts: tables fill, allocators settle."""
LEAK: Final = 64.0
"""KB for 1,000 requests, 64 bytes each, which is less than any object kept of one would take."""
AT_ONCE: Final = 100
"""Requests under way while no more are sent: where others slow the machine down for a minute, requests take longer, and
none fails for it."""
SAMPLES: Final = 120
PODS: Final = 4
IN_USE: Final = Path(__file__).parent / "rig" / "in_use"
_TABLES: Final = re.compile(
    r'^warmpath_plugin_statistic\{.*?plugin="([^"]*)".*?statistic="([^"]*)".*?\} (\S+)$', re.MULTILINE
)
_COUNTED: Final = re.compile(r"^warmpath_endpoint_(prompt|predicted_cached)_tokens_total\{[^}]*\} (\S+)$", re.MULTILINE)


@dataclass
class Sample:
    """Of the picker, at one moment. `p50`, `p95`: seconds until the first byte since the sample before."""

    requests: int
    rss_kb: int
    blocks: int
    """Of Python's allocator, in use."""
    malloc_kb: int
    """In use."""
    descriptors: int
    threads: int
    series: int
    tables: dict[str, float]
    hit_rate: float
    p50: float
    p95: float


class Slope(NamedTuple):
    """Of a line through samples: what comes with 1,000 requests, and its standard error."""

    per_thousand: float
    error: float

    def verdict(self, limit: float) -> str:
        """Two errors decide: `leak`: surely more than `limit`; `none`: surely less; `unknown`: more time is needed."""
        if self.per_thousand - 2 * self.error > limit:
            return "leak"
        return "none" if self.per_thousand + 2 * self.error < limit else "unknown"


def slope(requests: Sequence[float], values: Sequence[float]) -> Slope:
    """Least squares. Samples that follow each other are alike: the error counts only every third as one of its own."""
    n = len(requests)
    mean_x, mean_y = sum(requests) / n, sum(values) / n
    spread = sum((x - mean_x) ** 2 for x in requests)
    if n < 4 or not spread:
        return Slope(0.0, float("inf"))
    rise = sum((x - mean_x) * (y - mean_y) for x, y in zip(requests, values, strict=True)) / spread
    off = sum((y - mean_y - rise * (x - mean_x)) ** 2 for x, y in zip(requests, values, strict=True))
    return Slope(rise * 1000, sqrt(3 * off / (n - 2) / spread) * 1000)


async def sample(chain: Chain, load: MixedLoad, seen: int, in_use: Path) -> Sample:
    """`seen`: requests that ended before the sample before. `in_use`: where pickers write of their memory."""
    replica = chain.replicas[0]
    pid = str(chain.processes.pid(replica.name))
    process = Path("/proc") / pid
    status = process.joinpath("status").read_text()
    async with chain.http.get(f"{replica.admin}/metrics") as answer:
        page = await answer.text()
    counted = {"prompt": 0.0, "predicted_cached": 0.0}
    for name, value in _COUNTED.findall(page):
        counted[name] += float(value)
    waits = [each.took for each in load.done[seen:] if each.kind != "abort" and each.outcome == "answered"]
    cuts = quantiles(waits, n=20, method="inclusive") if len(waits) > 1 else [0.0] * 19
    blocks, malloc = map(int, (in_use / pid).read_text().split())
    return Sample(
        requests=load.sent,
        rss_kb=int(status.partition("VmRSS:")[2].split()[0]),
        blocks=blocks,
        malloc_kb=malloc // 1024,
        descriptors=len(list(process.joinpath("fd").iterdir())),
        threads=int(status.partition("Threads:")[2].split()[0]),
        series=sum(not line.startswith("#") for line in page.splitlines()),
        tables={f"{plugin} {name}": float(value) for plugin, name, value in _TABLES.findall(page) if name in SIZES},
        hit_rate=counted["predicted_cached"] / max(counted["prompt"], 1.0),
        p50=cuts[9],
        p95=cuts[18],
    )


SIZES: Final = frozenset(
    {"index_blocks", "blocks", "sessions", "responses", "event_blocks", "cached_blocks", "index_holdings"}
)
"""Statistics of plugins that are sizes of tables."""


async def comings_and_goings(chain: Chain, every: float) -> None:
    """One pod after another leaves the pool, ends, starts anew and joins it."""
    number = 0
    while True:
        number += 1
        pod = chain.pods[number % len(chain.pods)]
        await asyncio.sleep(every / 2)
        write_endpoints([each for each in chain.pods if each is not pod], chain.endpoints_file)
        await asyncio.sleep(5)  # what it had begun is answered
        await chain.processes.stop(pod.name)
        await chain.start(chain.layout.programs[pod.name])
        await chain.ready(chain.layout.programs[pod.name].ready, pod.name)
        await asyncio.sleep(every / 2)
        write_endpoints(chain.pods, chain.endpoints_file)


async def reloads(config: Path, every: float) -> None:
    """Another configuration, and the first again."""
    texts = [strategy_text("least-load"), strategy_text("prefix-aware")]
    number = 0
    while True:
        # The usual one is in use four fifths of the time: its tables are what is looked at.
        await asyncio.sleep(every * (1.6 if number % 2 == 0 else 0.4))
        config.write_text(texts[number % 2])
        number += 1


async def restarts(chain: Chain, every: float) -> None:
    """The last replica ends, as in a rollout, and starts anew."""
    replica = chain.replicas[-1]
    while True:
        await asyncio.sleep(every)
        await chain.processes.stop(replica.name)
        await chain.start_again(replica)


async def soak(minutes: float, rate: float, folder: Path, replicas: int = 1) -> tuple[list[Sample], MixedLoad]:
    config = folder / "config.yaml"
    config.write_text(strategy_text("prefix-aware"))
    engine = Simulated(flags=("--time-scale", "5"))
    in_use = folder / "in_use"
    in_use.mkdir()
    shape = Shape(
        pods=PODS,
        replicas=replicas,
        port=0,
        picking=("--config", str(config)),
        engine=engine,
        environment={"PYTHONPATH": f"{IN_USE}{os.pathsep}{SOURCE}", "IN_USE": str(in_use)},
    )
    samples: list[Sample] = []
    async with running_chain(shape, folder) as chain:
        load = MixedLoad(chain.url)
        beside = [watch(chain, lambda line: None), comings_and_goings(chain, 20), reloads(config, 15)]
        if replicas > 1:
            beside.append(restarts(chain, 25))
        async with asyncio.TaskGroup() as tasks, mixed_load(load, rate, AT_ONCE):
            running = [tasks.create_task(each) for each in beside]
            end, every = time.monotonic() + minutes * 60, minutes * 60 / SAMPLES
            while time.monotonic() < end:
                seen = len(load.done)
                await asyncio.sleep(every)
                try:
                    samples.append(await sample(chain, load, seen, in_use))
                except TimeoutError:
                    print("  no answer from /metrics: the machine is too busy; this row is missing", flush=True)
                else:
                    show(samples[-1], first=len(samples) == 1)
            for task in running:
                task.cancel()
    return samples, load


def show(one: Sample, *, first: bool) -> None:
    if first:
        names = (
            "requests",
            "RSS KB",
            "blocks",
            "malloc KB",
            "files",
            "threads",
            "series",
            "hit rate",
            "p50 ms",
            "p95 ms",
        )
        print("".join(f"{name:>10}" for name in names) + "  tables", flush=True)
    figures = (one.requests, one.rss_kb, one.blocks, one.malloc_kb, one.descriptors, one.threads, one.series)
    tables = ", ".join(f"{name} {value:.0f}" for name, value in sorted(one.tables.items()))
    times = f"{one.hit_rate:10.3f}{one.p50 * 1e3:10.1f}{one.p95 * 1e3:10.1f}"
    print("".join(f"{figure:10}" for figure in figures) + times + f"  {tables}", flush=True)


def report(samples: Sequence[Sample], load: MixedLoad) -> int:
    """Slopes and the verdict; the exit status: 0 no leak and nothing failed, 1 either, 3 not known."""
    warm = samples[int(len(samples) * WARM) :]
    requests = [float(each.requests) for each in warm]
    count = load.count()
    print(f"\n{load.sent:,} requests: " + ", ".join(f"{n:,} {outcome}" for outcome, n in sorted(count.items())))
    for why in sorted({each.why for each in load.done if each.outcome == "failed"})[:10]:
        print(f"  failed: {why}")
    found = {
        "RSS, KB": slope(requests, [each.rss_kb for each in warm]),
        "Python's blocks": slope(requests, [each.blocks for each in warm]),
        "malloc, KB": slope(requests, [each.malloc_kb for each in warm]),
        "file descriptors": slope(requests, [each.descriptors for each in warm]),
        "threads": slope(requests, [each.threads for each in warm]),
        "series of /metrics": slope(requests, [each.series for each in warm]),
        "hit rate, %": slope(requests, [each.hit_rate * 100 for each in warm]),
        "p50, ms": slope(requests, [each.p50 * 1e3 for each in warm]),
        "p95, ms": slope(requests, [each.p95 * 1e3 for each in warm]),
    }
    print(f"after a third of the time ({int(requests[0]):,} requests), for 1,000 requests:")
    for name, each in found.items():
        print(f"  {name:20}{each.per_thousand:+10.3f} +- {2 * each.error:.3f}")
    verdict = found["RSS, KB"].verdict(LEAK)
    said = {
        "none": f"no leak: surely less than {LEAK:g} bytes a request",
        "leak": f"a leak: surely more than {LEAK:g} bytes a request",
        "unknown": f"not known: {LEAK:g} bytes a request are within the error; run it for longer",
    }
    print(said[verdict])
    return 1 if count["failed"] or verdict == "leak" else 3 if verdict == "unknown" else 0


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/soak", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--rate", type=float, default=40, help="requests a second")
    parser.add_argument("--replicas", type=int, default=1, help="pickers behind the Envoy")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmpath-soak-") as folder:
        samples, load = asyncio.run(soak(options.minutes, options.rate, Path(folder), options.replicas))
    return report(samples, load)


if __name__ == "__main__":
    sys.exit(main())
