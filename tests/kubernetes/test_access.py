"""Readers of the second port, on a real API server: accounts with and without the right, and no API server at all."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import yaml

from epp.admin.access import Access
from epp.admin.recorder import Decisions
from epp.admin.server import AdminServer, AdminSettings
from epp.pool.apiserver import ApiServer
from tests.support.kubernetes.cluster import Cluster
from tests.support.scheduling.degradations import RecordedMetrics

MANIFESTS = Path(__file__).parents[2] / "manifests"


class AdminPort:
    """A second port whose own rights are those of our manifests."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.metrics = RecordedMetrics()
        kubeconfig = cluster.plane.kubeconfig(self.token("warmpath"))
        self.now = 0.0
        self.api = ApiServer(kubeconfig)
        access = Access(self.api, self.metrics, lambda: self.now)
        self.server = AdminServer(self.metrics, [], Decisions(), list, str, AdminSettings(port=0, access=access))

    def token(self, account: str) -> str:
        path = f"/api/v1/namespaces/{self.cluster.namespace}/serviceaccounts/{account}/token"
        return str(self.cluster.plane.call("POST", path, {"spec": {}})["status"]["token"])

    async def get(self, path: str, token: str = "") -> tuple[int, str]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with aiohttp.request("GET", f"http://127.0.0.1:{self.server.port}{path}", headers=headers) as answer:
            return answer.status, await answer.text()

    async def status(self, path: str, token: str = "") -> int:
        return (await self.get(path, token))[0]


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((MANIFESTS / name).read_text()))


@pytest.fixture
def accounts(cluster: Cluster) -> Cluster:
    """Our accounts and rights as the manifests have them, in this namespace; and an account without any."""
    found = [*documents("base/rbac.yaml"), *documents("components/monitoring/reader.yaml")]
    for each in found:
        for subject in each.get("subjects", ()):
            subject["namespace"] = cluster.namespace
    cluster.plane.kubectl("apply", "-n", cluster.namespace, "-f", "-", stdin=yaml.safe_dump_all(found))
    path = f"/api/v1/namespaces/{cluster.namespace}/serviceaccounts"
    cluster.plane.call("POST", path, {"metadata": {"name": "guest"}})
    return cluster


@asynccontextmanager
async def opened(cluster: Cluster) -> AsyncIterator[AdminPort]:
    port = AdminPort(cluster)
    async with port.api, port.server:
        yield port


async def test_who_has_the_right_reads_and_nobody_else(accounts: Cluster) -> None:
    async with opened(accounts) as port:
        reader, guest = port.token("warmpath-metrics-reader"), port.token("guest")
        status, text = await port.get("/metrics", reader)
        assert (status, "warmpath_info" in text) == (200, True)
        assert await port.status("/metrics") == 401
        assert await port.status("/metrics", "forged") == 401
        assert await port.status("/metrics", reader[:-4] + "AAAA") == 401
        status, text = await port.get("/metrics", guest)
        assert status == 403
        assert f"system:serviceaccount:{accounts.namespace}:guest may not get /metrics" in text
        for path in ("/", "/endpoints", "/decisions", "/decisions/x", "/config"):
            assert await port.status(path, reader) == 403, path
        for path in ("/ready", "/healthz"):
            assert await port.status(path) == 200
        asked = accounts.plane.requests_of(f"system:serviceaccount:{accounts.namespace}:warmpath")
        assert {(verb, what) for verb, what, _ in asked} == {
            ("create", "tokenreviews.authentication.k8s.io"),
            ("create", "subjectaccessreviews.authorization.k8s.io"),
        }
        before = len(asked)
        assert [await port.status("/metrics", token) for token in (reader, guest)] == [200, 403]
        assert len(accounts.plane.requests_of(f"system:serviceaccount:{accounts.namespace}:warmpath")) == before
        assert port.metrics.degradations == []


async def test_an_operator_may_be_given_every_page(accounts: Cluster) -> None:
    rules = [{"nonResourceURLs": ["/", "/endpoints", "/decisions", "/config", "/metrics"], "verbs": ["get"]}]
    plane, name = accounts.plane, f"operator-{accounts.namespace}"
    rbac = "/apis/rbac.authorization.k8s.io/v1"
    plane.call("POST", f"{rbac}/clusterroles", {"metadata": {"name": name}, "rules": rules})
    subject = {"kind": "ServiceAccount", "name": "guest", "namespace": accounts.namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": name}
    body = {"metadata": {"name": name}, "subjects": [subject], "roleRef": role}
    plane.call("POST", f"{rbac}/clusterrolebindings", body)
    async with opened(accounts) as port:
        guest = port.token("guest")
        for path in ("/", "/endpoints", "/decisions", "/config", "/metrics"):
            assert await port.status(path, guest) == 200, path
        assert await port.status("/decisions/x", guest) == 404


async def test_without_the_right_to_ask_nobody_is_let_in(accounts: Cluster) -> None:
    async with opened(accounts) as port:
        name = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings/warmpath-metrics-auth"
        accounts.plane.call("PATCH", name, {"subjects": []})
        try:
            status, text = await _until_503(port)
            assert "cannot create resource" in text
            assert status == 503
            assert set(port.metrics.reasons()) == {"access-not-checked"}
        finally:
            accounts.plane.call("DELETE", name)


async def test_without_an_api_server_only_those_it_knew_are_let_in(accounts: Cluster) -> None:
    async with opened(accounts) as port:
        reader, late = port.token("warmpath-metrics-reader"), port.token("warmpath-metrics-reader")
        assert await port.status("/metrics", reader) == 200
        accounts.plane.stop_api()
        try:
            assert await port.status("/metrics", reader) == 200
            status, text = await port.get("/metrics", late)
            assert status == 503
            assert "cannot ask the Kubernetes API server whether you may read this" in text
            assert port.metrics.going_on() == {"access-not-checked"}
            assert await port.status("/ready") == 200
        finally:
            await asyncio.to_thread(accounts.plane.start_api)
        assert await port.status("/metrics", late) == 200
        assert port.metrics.going_on() == set()


async def _until_503(port: AdminPort) -> tuple[int, str]:
    """The API server takes a moment to know of rights that were withdrawn; what we believe is old by then."""
    reader = port.token("warmpath-metrics-reader")
    async with asyncio.timeout(20):
        while True:
            port.now += 100
            status, text = await port.get("/metrics", reader)
            if status == 503:
                return status, text
            await asyncio.sleep(0.05)
