"""Time limits, HTTP/2 and IPv6 endpoints, hostnames and several workers, through a real Envoy."""

import asyncio
import itertools
from collections import Counter
from collections.abc import Collection
from contextlib import AsyncExitStack
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway.translate import TranslateOptions
from gateway.wiring import Wiring
from tests.support.gateway.h2_server import h2_server
from tests.support.gateway.rig import FIRST_EVENT, GATEWAY, LAST_EVENT, Upstream, rig, to
from tests.support.process.waiting import until
from tooling.laptop.ports import is_free

pytestmark = pytest.mark.envoy

ALL_TO_A: list[dict[str, Any]] = [{"backendRefs": to("a")}]
TOO_LONG = "The request took longer than its route allows."


@pytest.mark.parametrize("wiring", ["lean", "full-duplex"])
async def test_a_time_limit_is_the_endpoints(tmp_path: Path, wiring: Wiring) -> None:
    limited = [
        {"matches": [{"path": {"value": f"/{pool}"}}], "backendRefs": to(pool), "timeouts": {"request": "150ms"}}
        for pool in "ab"
    ]
    async with rig(tmp_path, limited, options=TranslateOptions(wiring=wiring)) as chain:
        slow, end = chain.upstreams["a-0"], asyncio.Event()
        slow.silent = end
        status, headers, said = await chain.ask("/a")
        assert (status, headers["content-type"], said["error"]["message"]) == (504, "application/json", TOO_LONG)

        slow.streams = True
        async with chain.session.post(f"http://127.0.0.1:{chain.port}/a", data=b"{}") as answer:
            assert answer.status == 200
            assert await answer.content.readuntil(b"\n\n") == FIRST_EVENT
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.content.read()
        picker = chain.pickers["a"]
        await picker.until(lambda: picker.left == picker.entered)

        chain.pickers["b"].wait = asyncio.Event()
        async with asyncio.TaskGroup() as tasks:
            held = tasks.create_task(chain.ask("/b"))
            await chain.pickers["b"].until(lambda: chain.pickers["b"].entered == 1)
            slow.streams = False
            assert (await chain.ask("/a"))[0] == 504, "as long as the limit of both has passed"
            chain.pickers["b"].wait.set()
        assert held.result()[0] == 200, "the time a picker takes does not count"
        end.set()


async def test_within_its_time_an_answer_streams_to_its_end(tmp_path: Path) -> None:
    async with rig(tmp_path, [{"backendRefs": to("a"), "timeouts": {"request": "1h"}}]) as chain:
        chain.upstreams["a-0"].streams = True
        status, headers, said = await chain.ask()
        assert (status, headers["content-type"]) == (200, "text/event-stream")
        assert said.encode() == FIRST_EVENT + LAST_EVENT


async def test_endpoints_may_speak_http2(tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        chain = await stack.enter_async_context(rig(tmp_path, ALL_TO_A, app_protocol="kubernetes.io/h2c"))
        servers = [await stack.enter_async_context(h2_server(f"a-{index}")) for index in range(2)]
        chain.upstreams = {**chain.upstreams, **{s.name: Upstream(s.name, f"127.0.0.1:{s.port}") for s in servers}}
        await chain.use(ALL_TO_A)
        chain.pickers["a"].destination = chain.upstreams["a-1"].address
        for size in (1, 3_000_000):
            status, _, said = await chain.ask("/v1/chat?x=1", data=BytesIO(b"x" * size))
            assert (status, said) == (200, {"name": "a-1", "path": "/v1/chat?x=1", "size": size, "http": 2})
        assert await chain.served(method="GET") == "a-1"


@pytest.mark.skipif(not is_free(0, "::1"), reason="loopback has no ::1 here")
async def test_endpoints_and_pickers_may_have_ipv6_addresses(tmp_path: Path) -> None:
    async with rig(tmp_path, ALL_TO_A, host="::1") as chain:
        first, second = chain.upstreams["a-0"], chain.upstreams["a-1"]
        assert first.address.startswith("[::1]:")
        assert await chain.served() == "a-0"
        chain.pickers["a"].destination = f"{second.address},{first.address}"
        assert await chain.served() == "a-1"
        second.status = 503
        assert await chain.served() == "a-0"
        way = await chain.pickers["a"].way(2)
        await until(lambda: bool(way.seen))
        assert way.seen[0].served == first.address  # type: ignore[union-attr]


ROUTE_OF_HOSTS = """
---
apiVersion: gateway.networking.k8s.io/v1
kind: HTTPRoute
metadata: {{name: {name}}}
spec:
  parentRefs: [{{name: gate}}]
  hostnames: ["{host}"]
  rules:
  - backendRefs: [{{group: inference.networking.k8s.io, kind: InferencePool, name: {pool}}}]
"""


async def test_the_closest_hostname_wins(tmp_path: Path) -> None:
    async with rig(tmp_path, ALL_TO_A) as chain:
        gateway = GATEWAY.format(port=chain.port, rules=[]).split("---")[0]
        hosts = [("*.example", "a"), ("*.far.example", "b"), ("one.far.example", "a"), ("bare", "b")]
        await chain.use_documents(
            gateway
            + "".join(ROUTE_OF_HOSTS.format(name=f"r{i}", host=host, pool=pool) for i, (host, pool) in enumerate(hosts))
        )
        asked = {
            "x.example": "a-0",
            "far.example": "a-0",
            "x.far.example": "b-0",
            "x.y.far.example:80": "b-0",
            "one.far.example": "a-0",
            "BARE": "b-0",
        }
        for host, name in asked.items():
            assert await chain.served(headers={"host": host}) == name, host
        for host in ("example", "other", "x.bare"):
            assert (await chain.ask(headers={"host": host}))[0] == 404, host


async def test_several_workers_serve_and_change_together(tmp_path: Path) -> None:
    async with rig(tmp_path, ALL_TO_A, concurrency=2) as chain:
        workers = f"^listener\\.127\\.0\\.0\\.1_{chain.port}\\.worker_[0-9]+\\.downstream_cx_total$"
        # Each over a connection of its own: kept ones would stay with the worker they have.
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True, limit=16)) as chain.session:
            used: Collection[int | str] = ()
            for pool in itertools.islice(itertools.cycle("ab"), 50):
                await chain.use([{"backendRefs": to(pool)}])
                async with asyncio.TaskGroup() as tasks:
                    answers = [tasks.create_task(chain.ask()) for _ in range(64)]
                got = Counter((each.result()[0], each.result()[2]["name"]) for each in answers)
                assert got == {(200, f"{pool}-0"): 64}
                used = (await chain.envoy.stats(workers)).values()
                if all(used):
                    break
            assert len(used) == 2
            assert all(used)
