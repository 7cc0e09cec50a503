"""What a request takes that waits in flow control: memory, and CPU from its coming to its endpoint, in process.

Bodies come as from the network, each a copy of its own; the pool has one endpoint, which is full until all wait. Then
each in turn is let go, chosen for, and ends. After them as many come one by one, for whom there is room at once. With
`--roles` the pool has so many endpoints that prefill, and as many that decode.
"""

import argparse
import asyncio
import gc
import time
from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from random import Random

from epp.configuration.loader import load_strategy
from epp.errors import EppError
from epp.flow.control import FlowControl, Outcome
from epp.parsing.parser import Parser
from epp.parsing.request import RawRequest, Response
from epp.plugin import Endpoint, Load
from epp.pool.store import Pool, PoolState
from epp.protocol import ROLE_LABEL
from epp.route import Admission, Policy, Router
from epp.scheduling.decision import Decision
from epp.testing import services

_WORD = b"what is to be done with it, "


class Unwatched:
    """Nobody looks."""

    def decided(self, decision: Decision, complete_at: float) -> None: ...
    def finished(self, decision: Decision, response: Response) -> None: ...
    def failed(self, raw: RawRequest, error: EppError) -> None:
        raise error


def made(roles: int) -> Router:
    names = [(f"{role}-{number}", role) for number in range(roles) for role in ("prefill", "decode")] or [("pod", "")]
    endpoints = tuple(
        Endpoint(
            f"default/{name}", f"10.0.0.{at}:8000", labels={ROLE_LABEL: role} if role else {},
            load=Load(block_size=16, blocks=10**9, at=0.0),
        )
        for at, (name, role) in enumerate(names)
    )  # fmt: skip
    pool = Pool("bench", random=Random(1))
    pool.apply(PoolState("bench", endpoints=endpoints))
    pipeline = load_strategy("prefix-aware", clock=lambda: 0.0, random=Random(1), flow_control=True)
    assert pipeline.flow is not None
    unbounded = replace(pipeline.flow.usual, max_requests=inf, max_bytes=inf)
    settings = replace(pipeline.flow, usual=unbounded)
    flow = FlowControl(
        settings, pool.candidates, pool.why_empty, _later, _unwatched, _raise, clock=lambda: 0.0, trusted=False
    )
    scheduler = pipeline.scheduler(wall_clock=lambda: 0.0, on_error=_raise, others=[flow])
    for plugin in pipeline.plugins:
        plugin.start(services([*endpoints]))
    parser = Parser(pool, lambda model, size: size // 4, trusted=False)
    policy = Policy(Admission(pipeline.detector), scheduler, flow)
    return Router(pool, parser, policy, Unwatched(), lambda: 0.0)


def _later(seconds: float, call: object) -> asyncio.TimerHandle:
    return asyncio.get_running_loop().call_later(seconds, call)  # type: ignore[arg-type]


def _unwatched(fairness_id: str, priority: int, outcome: Outcome, seconds: float, model: str) -> None: ...


def _raise(plugin: str, error: Exception) -> None:
    raise error


def body(number: int, size: int) -> bytes:
    text = b"%d " % number + _WORD * (size // len(_WORD))
    return b'{"model": "llama", "messages": [{"role": "user", "content": "%s"}]}' % text[:size]


def resident() -> int:
    """Bytes of this process in memory."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def measure(count: int, size: int, roles: int) -> Mapping[str, float]:
    """Bytes a request that waits, beside its body; microseconds of CPU until it waits, from there to its end, and in
    all where it need not wait.
    """
    router = made(roles)
    flow = router.policy.flow
    assert flow is not None
    headers: Mapping[str, str] = {}

    async def one(raw: RawRequest) -> None:
        async with router.route(raw):
            pass

    large = [body(10**6 + number, 400_000) for number in range(roles or 1)]
    full = [router.route(RawRequest("POST", "/v1/chat/completions", headers, each)) for each in large]
    for each in full:
        await each.__aenter__()
    before, began = resident(), time.process_time()
    tasks = []
    for number in range(1, count + 1):
        raw = RawRequest("POST", "/v1/chat/completions", headers, body(number, size))
        tasks.append(asyncio.ensure_future(one(raw)))
        del raw
        await asyncio.sleep(0)
    come, held = time.process_time() - began, resident() - before
    waiting = sum(row.requests for row in flow.figures().waiting)
    if waiting != count:
        raise SystemExit(f"{waiting} of {count} requests wait")
    began = time.process_time()
    for each in full:
        await each.__aexit__(None, None, None)
    await asyncio.gather(*tasks)
    gone = time.process_time() - began
    bodies = [RawRequest("POST", "/v1/chat/completions", headers, body(-number, size)) for number in range(count)]
    began = time.process_time()
    for raw in bodies:
        await one(raw)
    passed = time.process_time() - began
    micros = {"come": come / count * 1e6, "gone": gone / count * 1e6, "passed": passed / count * 1e6}
    return {"held": held / count, "bodies": held / count / len(body(1, size)), **micros}


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/bench waiting", description=__doc__)
    parser.add_argument("--requests", type=int, default=5000, help="that wait")
    parser.add_argument("--bytes", type=int, default=32_768, help="of a request's body")
    parser.add_argument("--roles", type=int, default=0, help="endpoints of each of two roles; 0: one without")
    options = parser.parse_args()
    found = asyncio.run(measure(options.requests, options.bytes, options.roles))
    print(
        "{held:.0f} bytes a request that waits, {bodies:.2f} times its body; {come:.1f} us until it waits, {gone:.1f} "
        "us to be chosen for and end; {passed:.1f} us where it need not wait".format(**found)
    )


if __name__ == "__main__":
    main()
