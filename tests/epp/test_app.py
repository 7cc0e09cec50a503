"""The process as a whole: what it refuses at the start, several pools, its audit log, and how it ends."""

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from epp.app import Settings, serve
from epp.errors import ConfigError
from laptop.ports import free_ports
from tests.support import ext_proc
from tests.support.chain import eventually
from tests.support.ext_proc_door import Gateway

POOLS = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: one}
spec:
  selector: {matchLabels: {app: one}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: warmpath, port: {number: 9002}}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: two}
spec:
  selector: {matchLabels: {app: two}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: warmpath, port: {number: 9002}}
---
endpoints:
- {name: a, address: 10.0.0.1, port: 8000, labels: {app: one}}
- {name: b, address: 10.0.0.2, port: 8000, labels: {app: two}}
"""
REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS)
    return Settings(endpoints=(file,), grpc_port=(0, 0), grpc_health_port=0, metrics_port=0)


async def refusal(settings: Settings) -> str:
    with pytest.raises(ConfigError) as error:
        await asyncio.wait_for(serve(settings), 20)
    return str(error.value)


@pytest.mark.parametrize("which", ["grpc_port", "grpc_health_port", "metrics_port"])
async def test_a_port_in_use_is_told_by_its_number(settings: Settings, which: str) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:
        port = server.getsockname()[1]
        taken: Any = {which: (0, port) if which == "grpc_port" else port}
        told = await refusal(replace(settings, **taken))
    assert f"127.0.0.1:{port}" in told
    assert "in use" in told


async def test_pools_with_one_port_need_flags(settings: Settings) -> None:
    told = await refusal(replace(settings, grpc_port=()))
    assert told == "pool default/one: port 9002 is another pool's too; use --grpc-port"


async def test_more_ports_than_pools(settings: Settings) -> None:
    assert await refusal(replace(settings, grpc_port=(0, 0, 0))) == "--grpc-port: given 3 times for 2 pools"


async def test_an_audit_log_that_cannot_be_written(settings: Settings, tmp_path: Path) -> None:
    told = await refusal(replace(settings, audit_log=tmp_path / "no" / "audit.jsonl"))
    assert told == f"--audit-log: cannot write {tmp_path}/no/audit.jsonl: No such file or directory"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("endpoints: [{name: a, address: nowhere, port: 8000}]", "endpoints[0].address"),
        ("endpoints: {", "YAML"),
        ("kind: ConfigMap\n", "the files name no endpoints"),
    ],
)
async def test_a_wrong_endpoints_file(settings: Settings, text: str, sentence: str) -> None:
    settings.endpoints[0].write_text(text)
    assert sentence in await refusal(settings)


async def test_a_wrong_configuration(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorr}]\n")
    assert "queue-scorer" in await refusal(replace(settings, config=file))


# --- a running process ----------------------------------------------------------------------------------------------


class Process:
    def __init__(self, process: asyncio.subprocess.Process, grpc: list[int], metrics: int, log: Path) -> None:
        self.process = process
        self.grpc = grpc
        self.metrics = metrics
        self.log = log

    async def get(self, path: str) -> tuple[int, str]:
        """Status and text; 0 while nobody listens."""
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{self.metrics}{path}") as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError:
            return 0, ""

    async def ready(self, status: int = 200) -> str:
        answered = await eventually(lambda: self.get("/ready"), lambda seen: seen[0] == status)
        return str(answered[1])

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 30)


@asynccontextmanager
async def serving(settings: Settings, directory: Path, *flags: str) -> AsyncIterator[Process]:
    *grpc, health, metrics = free_ports(4)
    ports = [flag for port in grpc for flag in ("--grpc-port", str(port))]
    ports += ["--grpc-health-port", str(health), "--metrics-port", str(metrics)]
    ports += ["--drain-linger", "0"]
    command = [sys.executable, "-m", "epp.cli", "serve", "--endpoints", str(settings.endpoints[0]), *ports, *flags]
    log = directory / "epp.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        made = Process(process, grpc, metrics, log)
        await made.ready()
        yield made
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_each_pool_has_its_port(settings: Settings, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    async with serving(settings, tmp_path, "--audit-log", str(audit)) as process:
        for port, address in zip(process.grpc, ("10.0.0.1:8000", "10.0.0.2:8000"), strict=True):
            async with Gateway(port) as gateway:
                stream = gateway.stream()
                await stream.write(ext_proc.request_headers())
                await stream.write(ext_proc.request_body(REQUEST, end=True))
                assert address in await stream.said()
                await stream.rest()
        _, config = await process.get("/config")
        assert [line for line in config.splitlines() if line.startswith("pool ")] == [
            "pool default/one",
            "pool default/two",
        ]
        told = f"pool one on 127.0.0.1:{process.grpc[0]}; pool two on 127.0.0.1:{process.grpc[1]}"
        assert told in process.log.read_text()
        process.process.terminate()
        assert await process.ended() == 0
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["address"] for line in lines] == ["10.0.0.1:8000", "10.0.0.2:8000"]


async def test_a_drain_has_an_end(settings: Settings, tmp_path: Path) -> None:
    flags = ("--drain-timeout", "0.1")
    async with serving(settings, tmp_path, *flags) as process, Gateway(process.grpc[0]) as gateway:
        stream = gateway.stream()
        await stream.write(ext_proc.request_headers())
        await stream.write(ext_proc.request_body(REQUEST, end=True))
        assert "10.0.0.1:8000" in await stream.said()
        process.process.terminate()
        assert await process.ended() == 0


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({}, "which pools? expected one of --endpoints (files), --pool-name"),
        ({"pool_name": ("a",), "pool_selector": "x=y"}, "which pools?"),
        ({"endpoint_selector": "app=x"}, "--endpoint-target-ports: expected with --endpoint-selector"),
    ],
)
async def test_what_to_serve_must_be_said_once(changes: dict[str, Any], told: str) -> None:
    assert told in await refusal(Settings(grpc_health_port=0, metrics_port=0, **changes))


async def test_a_certificate_needs_tls(settings: Settings, tmp_path: Path) -> None:
    told = await refusal(replace(settings, cert_path=tmp_path))
    assert told == "--cert-path: expected with --secure-serving=true only"


async def test_of_files_one_pool_or_all(settings: Settings) -> None:
    assert "--pool-name: given several times" in await refusal(replace(settings, pool_name=("one", "two")))
