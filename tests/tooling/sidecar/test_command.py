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


@pytest.mark.parametrize(
    ("flag", "said"),
    [
        ("--ec-connector=ec-nixl", "--ec-connector: encoders are not asked here; llm-d's pd-sidecar does that"),
        ("--enable-ssrf-protection", "let only the gateway reach this port (NetworkPolicy); expected false"),
        ("--enable-tls=encoder", "'encoder' is no stage here; expected prefiller or decoder"),
        ("--kv-connector=mooncake", "'mooncake' is not one of 'nixlv2', 'shared-storage', 'sglang'"),
    ],
)
async def test_what_llm_ds_sidecar_does_and_this_one_does_not_is_refused(flag: str, said: str) -> None:
    process = await started(flag)
    _, errors = await process.communicate()
    assert process.returncode == 2
    assert said in " ".join(errors.decode().replace("│", " ").split())


async def test_flags_of_llm_ds_sidecar_that_change_nothing_are_said() -> None:
    flags = ["--secure-proxy=false", "--tracing", "--ec-connector=", "--moriio-dp-size=1", "--enable-p2p-pull=false"]
    process = await started("--port", "0", "--model-server-port", "1", "--zap-log-level=debug", *flags)
    assert process.stdout is not None
    assert (await process.stdout.readline()).startswith(b"sidecar: port ")
    process.send_signal(signal.SIGTERM)
    _, errors = await process.communicate()
    assert process.returncode == 0
    (line,) = errors.decode().splitlines()
    assert "--zap-log-level: a line is logged for each reason, once a minute; --tracing: a request keeps its" in line


async def test_tls_with_a_pair_made_here() -> None:
    async with SimulatedPod(name="beside") as pod:
        port = pod.address.rpartition(":")[2]
        process = await started("--port", "0", "--model-server-port", port, "--secure-proxy")
        assert process.stdout is not None
        own = (await process.stdout.readline()).decode().removeprefix("sidecar: port ").partition(",")[0]
        url = f"https://127.0.0.1:{own}/v1/models"
        async with aiohttp.ClientSession() as client, client.get(url, ssl=False) as response:
            assert (response.status, response.headers["x-sim-pod"]) == (200, "beside")
        process.send_signal(signal.SIGTERM)
        await process.communicate()


def test_a_directory_without_a_certificate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"expected tls\.crt and tls\.key"):
        tls_of(tmp_path)
