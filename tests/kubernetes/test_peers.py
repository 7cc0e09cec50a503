"""Replicas that find each other by a Service's EndpointSlices on a real API server, with our manifests' rights."""

import asyncio
import random
import socket
import sys
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from epp.pool.apiserver import ApiServer
from epp.pool.slices import ServiceAddresses
from tests.support.kubernetes.cluster import Cluster
from tests.support.process.waiting import beside
from tests.support.scheduling.degradations import RecordedMetrics
from tooling.laptop.ports import free_ports
from tooling.laptop.processes import Processes

MANIFESTS = Path(__file__).parents[2] / "manifests"
SLICES = "apis/discovery.k8s.io/v1"
SERVICE = "warmpath-replicas"
Seen = Callable[..., Awaitable[None]]


async def put(cluster: Cluster, name: str, ips: list[str], port: int = 9004) -> None:
    """An EndpointSlice of the Service, as the control plane makes them; no controller runs here."""
    body = {
        "apiVersion": "discovery.k8s.io/v1",
        "kind": "EndpointSlice",
        "metadata": {"name": name, "labels": {"kubernetes.io/service-name": SERVICE}},
        "addressType": "IPv4",
        "endpoints": [{"addresses": [ip], "conditions": {"ready": False}} for ip in ips],
        "ports": [{"name": "replicas", "port": port}],
    }
    path = f"/{SLICES}/namespaces/{cluster.namespace}/endpointslices"
    await asyncio.to_thread(cluster.plane.call, "POST", path, body)


def account(cluster: Cluster, *, ha: bool) -> Path:
    """Credentials of the picker's account, with the rights that the base gives it, and those of `ha`."""
    found = list(yaml.safe_load_all((MANIFESTS / "base" / "rbac.yaml").read_text(encoding="utf-8")))
    for each in found:
        for subject in each.get("subjects", ()):
            subject["namespace"] = cluster.namespace
        if ha and each["kind"] == "Role":
            each["rules"].append(added_right())
    cluster.plane.kubectl("apply", "-n", cluster.namespace, "-f", "-", stdin=yaml.safe_dump_all(found))
    path = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts/warmpath/token"
    return cluster.plane.kubeconfig(str(cluster.plane.call("POST", path, {"spec": {}})["status"]["token"]))


def added_right() -> Any:
    content = yaml.safe_load((MANIFESTS / "components" / "ha" / "kustomization.yaml").read_text(encoding="utf-8"))
    (patch,) = [each["patch"] for each in content["patches"] if each["target"]["kind"] == "Role"]
    (step,) = yaml.safe_load(patch)
    return step["value"]


def own_address() -> str:
    """An address of this machine that is not loopback's, which the API server refuses in slices. Sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("192.0.2.1", 9))
        return str(asking.getsockname()[0])


async def test_every_change_is_seen_with_the_rights_of_ha(cluster: Cluster, seen: Seen) -> None:
    await put(cluster, "a", ["10.1.0.1", "10.1.0.2"])
    metrics = RecordedMetrics()
    found: list[str] = []
    async with ApiServer(account(cluster, ha=True)) as api:
        service = ServiceAddresses(
            cluster.namespace, SERVICE, "replicas", api, metrics, "replicas-service", random.Random(1)
        )
        async with beside(service.follow(lambda addresses: found.__setitem__(slice(None), addresses))):
            await seen("two replicas", lambda: found == ["10.1.0.1:9004", "10.1.0.2:9004"])
            await put(cluster, "b", ["10.1.0.3"])
            await seen("a third replica", lambda: len(found) == 3)
            await cluster.patch(SLICES, "endpointslices", "a", {"endpoints": [{"addresses": ["10.1.0.2"]}]})
            await seen("the end of a replica", lambda: found == ["10.1.0.2:9004", "10.1.0.3:9004"])
            assert metrics.degradations == []
            await asyncio.to_thread(cluster.plane.stop_api)
            try:
                await seen("the API server's end", lambda: metrics.going_on() == {"replicas-service"})
                assert found == ["10.1.0.2:9004", "10.1.0.3:9004"]
            finally:
                await asyncio.to_thread(cluster.plane.start_api)
            await cluster.delete(SLICES, "endpointslices", "b")
            await seen("a replica that left meanwhile", lambda: found == ["10.1.0.2:9004"])
            assert metrics.going_on() == set()


async def test_without_the_right_it_is_said(cluster: Cluster, seen: Seen) -> None:
    metrics = RecordedMetrics()
    async with ApiServer(account(cluster, ha=False)) as api:
        service = ServiceAddresses(
            cluster.namespace, SERVICE, "replicas", api, metrics, "replicas-service", random.Random(1)
        )
        async with beside(service.follow(lambda addresses: None)):
            await seen("a missing right", lambda: metrics.going_on() == {"replicas-service"})
    assert "endpointslices" in metrics.degradations[0][1]


async def test_replicas_of_a_service_join_each_other(cluster: Cluster, tmp_path: Path) -> None:
    host, ports = own_address(), free_ports(2)
    kubeconfig = account(cluster, ha=True)
    (tmp_path / "secret").write_text("0123456789abcdef", encoding="utf-8")
    flags = ["--pool-name=p", f"--pool-namespace={cluster.namespace}", f"--kubeconfig={kubeconfig}", f"--host={host}"]
    flags += ["--metrics-endpoint-auth=false", f"--peers-service={cluster.namespace}/{SERVICE}"]
    flags += [f"--replica-secret-file={tmp_path / 'secret'}", "--drain-linger=0"]
    async with AsyncExitStack() as stack:
        processes = await stack.enter_async_context(Processes(tmp_path))
        http = await stack.enter_async_context(aiohttp.ClientSession())
        admins = []
        for number, port in enumerate(ports):
            grpc, health, metrics = map(str, free_ports(3))
            own = [f"--replica-port={port}", f"--grpc-port={grpc}"]
            own += [f"--grpc-health-port={health}", f"--metrics-port={metrics}"]
            await processes.start(f"epp-{number}", [sys.executable, "-m", "epp.cli", *flags, *own])
            admins.append(f"http://{host}:{metrics}/endpoints")
            await put(cluster, f"replica-{number}", [host], port)
        async with asyncio.timeout(60):
            for admin in admins:
                while (await peers(http, admin))[1] != ["live"]:
                    await asyncio.sleep(0.05)
            # Who has a pool waits three seconds for what others know: on a slow machine too few to start both in.
            await cluster.create_pool("p", 8000)
            await cluster.create_pods([("a", "127.1.0.1")])
            for admin in admins:
                while await peers(http, admin) != (True, ["live"]):
                    await asyncio.sleep(0.05)
        assert [log.read_text(encoding="utf-8").count("replica-cold-start") for log in tmp_path.glob("epp-*")] == [0, 0]


async def peers(http: aiohttp.ClientSession, admin: str) -> tuple[bool, list[str]]:
    """Whether it has joined, and how its peers are."""
    try:
        async with http.get(admin) as answer:
            shown = (await answer.json())["replicas"]
    except aiohttp.ClientConnectionError:
        return False, []
    return shown["joined"], [peer["state"] for peer in shown["peers"]]
