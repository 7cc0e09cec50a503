"""What grows when each request names all that a client can name anew: memory, series, and pages for people.

    hack/bench names                       100,000 requests: models, adapters, tenants, flows, sessions, subsets, ...
    hack/bench names --requests 10000 --minutes 1

A `warmpath serve` of its own with flow control, limits, sessions and an audit log, which believes client headers, and
the gateway's end of ext_proc. Requests are spread over the time, twice what `/` draws, so that this is full in the
middle. Exit status 1: something went on growing in the second half.
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import aiohttp

from epp.admin.history import STEP_S, STEPS
from hack.benches.page import Picker, endpoints, picker
from tests.support.ext_proc.made_up import made_up
from tests.support.ext_proc.server import Gateway

SAMPLES: Final = 8
AT_ONCE: Final = 30
PAGES: Final = ("/", "/decisions", "/endpoints", "/explain")
"""Besides /metrics."""
MINUTES: Final = 2.2 * STEP_S * STEPS / 60
MAY_GROW: Final = 0.2
"""Of a page, in the second half: numbers get longer."""
MAY_KEEP: Final = 200.0
"""Bytes of memory for each request of the second half, less than what a table would keep of one."""
CONFIG: Final = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: agent-identity
- {type: session-affinity-scorer, parameters: {strategy: session_id, maxSessions: 10000}}
- {type: expected-ttft}
- {type: max-score-picker}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: session-affinity-scorer}, {pluginRef: expected-ttft}, {pluginRef: max-score-picker}]
flowControl: {noEndpointRequestTTL: 20ms}
limits:
  tenant: {header: x-tenant}
  maxOutputTokens: 100
"""


class Sample(NamedTuple):
    """At one moment. `pages`: path -> bytes."""

    requests: int
    rss_kb: int
    series: int
    pages: dict[str, int]


async def sample(running: Picker, requests: int) -> Sample:
    status = Path(f"/proc/{running.process.pid}/status").read_text()
    pages: dict[str, int] = {}
    series = 0
    async with aiohttp.ClientSession() as http:
        for path in ("/metrics", *PAGES):
            async with http.get(f"{running.url}{path}", headers={"accept": "text/html, text/plain"}) as answer:
                answer.raise_for_status()
                page = await answer.read()
            pages[path] = len(page)
            if path == "/metrics":
                series = sum(not line.startswith(b"#") for line in page.splitlines())
    return Sample(requests, int(status.partition("VmRSS:")[2].split()[0]), series, pages)


async def attack(requests: int, seconds: float, folder: Path) -> list[Sample]:
    """A sample before, and one after each of `SAMPLES` equal parts. AssertionError where too few were routed."""
    config = folder / "config.yaml"
    config.write_text(CONFIG)
    flags = ("--config", str(config), "--trust-client-headers", "--audit-log", "/dev/null")
    async with endpoints(4) as pool, picker(folder, pool, *flags) as running, Gateway(running.grpc) as gateway:
        host, port = re.findall(r"address: (\S+), port: (\d+)", pool)[0]
        seen, became = [await sample(running, 0)], Counter[str]()
        show(seen[0])
        start = time.monotonic()
        for part in range(SAMPLES):
            numbers = iter(range(requests * part // SAMPLES, requests * (part + 1) // SAMPLES))

            async def some(numbers: Iterator[int]) -> None:
                for n in numbers:
                    await asyncio.sleep(start + seconds * n / requests - time.monotonic())
                    became[await made_up(gateway, n, f"{host}:{port}")] += 1

            await asyncio.gather(*(some(numbers) for _ in range(AT_ONCE)))
            seen.append(await sample(running, became.total()))
            show(seen[-1])
    print(", ".join(f"{n:,} {what}" for what, n in became.items()))
    if became["routed"] < requests / 2:
        raise AssertionError("of so many requests that are refused, a table sees too little")
    return seen


def show(one: Sample) -> None:
    if not one.requests:
        print(f"{'requests':>10}{'RSS KB':>10}{'series':>10}" + "".join(f"{path:>12}" for path in one.pages))
    sizes = "".join(f"{size:>12,}" for size in one.pages.values())
    print(f"{one.requests:>10,}{one.rss_kb:>10,}{one.series:>10,}{sizes}", flush=True)


def grown(seen: Sequence[Sample]) -> list[str]:
    """What went on growing from the middle to the end."""
    middle, last = seen[len(seen) // 2], seen[-1]
    found = [
        f"{path}: {middle.pages[path]:,} to {size:,} bytes"
        for path, size in last.pages.items()
        if size > middle.pages[path] * (1 + MAY_GROW)
    ]
    kept = (last.rss_kb - middle.rss_kb) * 1024 / max(last.requests - middle.requests, 1)
    if kept > MAY_KEEP:
        found.append(f"memory: {kept:.0f} bytes for each request")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/bench names", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="over which they are spread")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="warmpath-names-") as folder:
        seen = asyncio.run(attack(options.requests, options.minutes * 60, Path(folder)))
    found = grown(seen)
    print("\n".join(["grew:", *found]) if found else "nothing grew in the second half")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
