"""`warmpath sidecar` as a process: its flags, its end, and what it says where it cannot start."""

import asyncio
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from epp.errors import ConfigError
from tooling.sidecar.command import tls_of
from tooling.simulator.server import SimulatedPod


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "epp.cli", "sidecar", "--host", "127.0.0.1", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip


async def test_it_serves_beside_an_engine_until_a_signal() -> None:
    async with SimulatedPod(name="beside") as pod:
        process = await started("--port", "0", "--model-server-port", pod.address.rpartition(":")[2])
        assert process.stdout is not None
        line = (await process.stdout.readline()).decode()
        port = line.removeprefix("sidecar: port ").partition(",")[0]
        async with aiohttp.ClientSession() as client, client.get(f"http://127.0.0.1:{port}/v1/models") as response:
            assert (response.status, response.headers["x-sim-pod"]) == (200, "beside")
        process.send_signal(signal.SIGTERM)
        _, errors = await process.communicate()
        assert (process.returncode, errors) == (0, b"")


async def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await started("--port", str(port))
        _, errors = await process.communicate()
    assert process.returncode == 1
    assert f"127.0.0.1:{port}: cannot be listened on" in errors.decode()


def test_a_directory_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected tls\.crt and tls\.key"):
        tls_of(tmp_path)
