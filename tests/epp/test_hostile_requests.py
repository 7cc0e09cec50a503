"""What clients send goes as it came: nothing of it stays beyond a bound, whatever a client writes into it."""

import asyncio
import gc
import json
import tracemalloc
from pathlib import Path
from random import Random

from epp.admin.recorder import Decisions, Recorder
from epp.configuration.loader import load_strategy
from epp.extproc.stream import Stream
from epp.parsing.parser import Parser
from epp.parsing.request import RawRequest
from epp.pool.store import Pool
from epp.prefix.token_ratio import LearnTokens, TokenRatio
from epp.route import Admission, Policy, Router
from epp.telemetry.audit import AuditLog
from epp.telemetry.metrics import Metrics
from tests.support.ext_proc.messages import request_body, request_headers
from tests.support.ext_proc.server import Gateway, ext_proc_server
from tests.support.scheduling.schedulers import pod


def router(strategy: str, audit: AuditLog, metrics: Metrics) -> Router:
    """As the process joins one."""
    pool = Pool("p", random=Random(1))
    pool.replace([pod("a", address="10.0.0.1:8000"), pod("b", address="10.0.0.2:8000")])
    pipeline = load_strategy(strategy, clock=lambda: 0.0, random=Random(0))
    tokens = TokenRatio()
    scheduler = pipeline.scheduler(
        wall_clock=lambda: 0.0,
        on_error=lambda plugin, error: (_ for _ in ()).throw(error),
        others=(LearnTokens(tokens.observe),),
    )
    recorder = Recorder("p", metrics, Decisions(), audit, clock=lambda: 0.0, wall_clock=lambda: 0.0)
    parser = Parser(pool, tokens.tokens, lambda: "made-up", trusted=True)
    return Router(pool, parser, Policy(Admission(pipeline.detector), scheduler), recorder, lambda: 0.0)


def hostile(n: int) -> RawRequest:
    """A request in which everything is long, and different from all others."""
    body = {"model": "m", "messages": [{"role": "user", "content": f"{n} hello"}], "cache_salt": f"{n}" * 200_000}
    names = ("x-request-id", "x-session-id", "x-gateway-inference-objective", "x-gateway-inference-fairness-id", "x")
    headers = dict.fromkeys(names, f"{n}" * 20_000)
    return RawRequest("POST", "/v1/chat/completions", headers, json.dumps(body).encode())


def test_of_long_salts_ids_and_headers_nothing_stays(tmp_path: Path) -> None:
    async def serve() -> int:
        metrics = Metrics()
        routers = [router(name, AuditLog(tmp_path / name, metrics), metrics) for name in ("prefix-aware", "session")]

        async def send(numbers: range) -> None:
            for n in numbers:
                for each in routers:
                    async with each.route(hostile(n)) as routed:
                        routed.answered(200, "")

        await send(range(100, 110))
        before = tracemalloc.get_traced_memory()[0]
        await send(range(110, 160))
        return tracemalloc.get_traced_memory()[0] - before

    tracemalloc.start()
    try:
        grown = asyncio.run(serve())
    finally:
        tracemalloc.stop()
    assert grown < 2_000_000  # of 30 MB of salts and 15 MB of headers, twice


async def test_of_a_refused_request_nothing_waits_for_a_collector_of_cycles(tmp_path: Path) -> None:
    """An error's frames hold the request and its body: 1,600 refused bodies of 16 MiB fit between two collections."""
    metrics = Metrics()
    route = router("prefix-aware", AuditLog(tmp_path / "audit", metrics), metrics).route

    async def refused(gateway: Gateway) -> None:
        for body in (b"[" * 100_000, b'{"model": 5}', b""):
            call = gateway.stream()
            await call.write(request_headers())
            await call.write(request_body(body, end=True))
            assert (await call.said()).startswith("refused 400")
            await call.rest()

    async with ext_proc_server(route) as served, Gateway(served.ports[0]) as gateway:
        await refused(gateway)
        gc.collect()
        gc.disable()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            await refused(gateway)
            gc.collect()
            assert [each for each in gc.garbage if isinstance(each, Stream | RawRequest)] == []
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
            gc.enable()
