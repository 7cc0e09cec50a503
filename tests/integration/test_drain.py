"""How a process of the endpoint picker ends: what it says, what it still does, and when it is gone."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc
from grpc import aio
from grpc_health.v1 import health_pb2

from tests.support.ext_proc.messages import DUPLEX, LEAN, answer_headers, request_body, request_headers
from tests.support.ext_proc.server import Call, Gateway
from tooling.laptop.ports import free_ports
from tooling.laptop.processes import Processes

ENDPOINTS = "endpoints: [{name: a, address: 127.0.0.1, port: 1}]\n"
BODY = b'{"model": "m", "messages": [{"role": "user", "content": "x"}]}'
ONE_AT_A_TIME = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- {type: concurrency-detector, parameters: {maxConcurrency: 1}}
- type: round-robin-picker
schedulingProfiles:
- {name: default, plugins: [{pluginRef: round-robin-picker}]}
flowControl: {saturationDetector: {pluginRef: concurrency-detector}}
"""
HEALTH = "/grpc.health.v1.Health/Check"
STATUS = health_pb2.HealthCheckResponse


@dataclass
class Served:
    """A `warmpath serve` process, its ext_proc port as a gateway has it, and how to look at it."""

    processes: Processes
    gateway: Gateway
    health_port: int
    ready_url: str
    http: aiohttp.ClientSession

    async def ready(self) -> tuple[int, Any]:
        try:
            async with self.http.get(self.ready_url) as answer:
                return answer.status, (await answer.json()).get("reasons")
        except aiohttp.ClientConnectionError:
            return 0, None

    async def until(self, status: int) -> None:
        async with asyncio.timeout(30):
            while (await self.ready())[0] != status:
                await asyncio.sleep(0.02)

    async def waiting(self, count: int) -> None:
        """Until so many wait in flow control."""
        async with asyncio.timeout(30):
            while True:
                async with self.http.get(self.ready_url.replace("/ready", "/metrics")) as answer:
                    page = await answer.text()
                labels = 'fairness_id="default-flow",model="m",pool="default",priority="0"'
                if f"warmpath_flow_waiting{{{labels}}} {count}.0" in page:
                    return
                await asyncio.sleep(0.02)

    async def health(self) -> int:
        async with aio.insecure_channel(f"127.0.0.1:{self.health_port}") as channel:
            check = channel.unary_unary(
                HEALTH,
                request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
                response_deserializer=STATUS.FromString,
            )
            return int((await check(health_pb2.HealthCheckRequest())).status)

    async def routed(self, config: Any) -> Call:
        call = self.gateway.stream()
        await call.write(request_headers(config=config))
        await call.write(request_body(BODY, end=True))
        assert "request headers to" in await call.said()
        assert "request body echo" in await call.said()
        return call


@asynccontextmanager
async def served(folder: Path, linger: float, timeout: float = 300, config: str = "") -> AsyncIterator[Served]:
    (folder / "endpoints.yaml").write_text(ENDPOINTS)
    port, health, metrics = free_ports(3)
    command = [sys.executable, "-m", "epp.cli", "serve", "--endpoints", str(folder / "endpoints.yaml")]
    command += ["--grpc-port", str(port), "--grpc-health-port", str(health), "--metrics-port", str(metrics)]
    command += ["--drain-timeout", str(timeout), "--drain-linger", str(linger)]
    command += ["--config-text", config] if config else []
    async with (
        Processes(folder, stop_seconds=60) as processes,
        Gateway(port) as gateway,
        aiohttp.ClientSession() as http,
    ):
        await processes.start("epp", command)
        one = Served(processes, gateway, health, f"http://127.0.0.1:{metrics}/ready", http)
        await one.until(200)
        yield one


@asynccontextmanager
async def draining(one: Served) -> AsyncIterator["asyncio.Task[list[int]]"]:
    """Within the block the process drains; the task has its exit status."""
    async with asyncio.TaskGroup() as tasks:
        ended = tasks.create_task(one.processes.stop("epp"))
        await one.until(503)
        yield ended


async def test_it_says_at_once_that_it_drains_and_still_serves(tmp_path: Path) -> None:
    async with served(tmp_path, linger=200) as one:
        pid = one.processes.pid("epp")
        async with draining(one) as ended:
            assert await one.ready() == (503, ["draining"])
            assert await one.health() == STATUS.NOT_SERVING
            call = await one.routed(DUPLEX)
            assert not ended.done()
            os.kill(pid, signal.SIGINT)
            assert await ended == [0]
        assert await call.code() is not grpc.StatusCode.OK


async def test_it_ends_with_the_last_stream(tmp_path: Path) -> None:
    async with served(tmp_path, linger=0) as one:
        call, lean = await one.routed(DUPLEX), await one.routed(LEAN)
        async with draining(one) as ended:
            assert await lean.code() is grpc.StatusCode.OK
            await call.write(answer_headers())
            assert await call.said() == "answer headers"
            assert not ended.done()
            assert await call.rest() == []
            assert await ended == [0]


async def test_what_waits_in_flow_control_is_refused_before_it_is_cut_off(tmp_path: Path) -> None:
    async with served(tmp_path, linger=0, timeout=2, config=ONE_AT_A_TIME) as one:
        holds = await one.routed(DUPLEX)
        waits = one.gateway.stream()
        await waits.write(request_headers(config=DUPLEX))
        await waits.write(request_body(BODY, end=True))
        await one.waiting(1)
        async with draining(one) as ended:
            assert await waits.said() == "refused 503 service_unavailable_error rejected-shutting-down"
            assert await ended == [0]
        assert await holds.code() is not grpc.StatusCode.OK


async def test_a_second_signal_ends_it_at_once(tmp_path: Path) -> None:
    async with served(tmp_path, linger=0) as one:
        call, pid = await one.routed(DUPLEX), one.processes.pid("epp")
        async with draining(one) as ended:
            os.kill(pid, signal.SIGTERM)
            assert await ended == [0]
        assert await call.code() is not grpc.StatusCode.OK
