"""Pools on a real API server: what is there appears, what changes is seen, what breaks is survived."""

import random
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from epp.pool.apiserver import ApiServer, Kind
from epp.pool.kubernetes import KubePools, Named, Selected, labelled
from epp.pool.store import Endpoint, Pool
from tests.support.kubernetes.cluster import LEGACY_GROUP, LLMD_GROUP, POOL_GROUP, Cluster, followed
from tests.support.kubernetes.control_plane import ApiFailed
from tests.support.scheduling.degradations import RecordedMetrics

ROOT = Path(__file__).parents[2]
Seen = Callable[..., Awaitable[None]]


def pools_of(wanted: Any, cluster: Cluster, metrics: RecordedMetrics, source: ApiServer | None = None) -> KubePools:
    return KubePools(wanted, cluster.namespace, source or ApiServer(), metrics, random.Random(1))


def addresses(pool: Pool) -> list[str]:
    return [endpoint.address for endpoint in pool.endpoints]


@pytest.fixture
def metrics() -> RecordedMetrics:
    return RecordedMetrics()


async def test_every_change_is_seen(cluster: Cluster, metrics: RecordedMetrics, seen: Seen) -> None:
    await cluster.create_pool("p", 8000, 8001)
    await cluster.create_pods([("a", "127.1.0.1"), ("b", "127.1.0.2")])
    await cluster.create_pods([("other", "127.1.0.9")], labels={"app": "y"})
    async with followed(pools_of(Named(("p",)), cluster, metrics)) as pools:
        (pool,) = pools.pools
        await seen("a pool with two pods of two ranks", lambda: pool.ready)
        assert [(each.name.partition("/")[2], each.address) for each in pool.endpoints] == [
            ("a-rank-0", "127.1.0.1:8000"),
            ("a-rank-1", "127.1.0.1:8001"),
            ("b-rank-0", "127.1.0.2:8000"),
            ("b-rank-1", "127.1.0.2:8001"),
        ]
        assert pools.states[0].grpc_port == 9002
        stayed = pool.endpoints[0]
        await cluster.set_ready("b", False)
        await seen("a pod not ready", lambda: addresses(pool) == ["127.1.0.1:8000", "127.1.0.1:8001"])
        await cluster.set_ready("b", True)
        await seen("a pod ready again", lambda: len(pool.endpoints) == 4)
        await cluster.annotate("b", **{"inference.networking.k8s.io/active-ports": "8001"})
        await seen("active ports in GIE's spelling", lambda: len(pool.endpoints) == 3)
        await cluster.annotate("b", **{"llm-d.ai/active-ports": "8000,8001"})
        await seen("active ports in llm-d's spelling", lambda: len(pool.endpoints) == 4)
        assert pool.endpoints[0] is stayed
        await cluster.delete_pods(["b"], grace=30)
        await seen("a pod going away", lambda: len(pool.endpoints) == 2)
        await cluster.patch(POOL_GROUP, "inferencepools", "p", {"spec": {"targetPorts": [{"number": 9000}]}})
        await seen("a new port", lambda: addresses(pool) == ["127.1.0.1:9000"])
        await cluster.patch(POOL_GROUP, "inferencepools", "p", {"spec": {"selector": {"matchLabels": {"app": "y"}}}})
        await seen("a new selector", lambda: addresses(pool) == ["127.1.0.9:9000"])
        await cluster.patch("api/v1", "pods", "a", {"metadata": {"labels": {"app": "y"}}})
        await seen("a pod's new label", lambda: addresses(pool) == ["127.1.0.1:9000", "127.1.0.9:9000"])
        await cluster.delete(POOL_GROUP, "inferencepools", "p")
        await seen("the end of a pool", lambda: not pool.ready and not pool.endpoints)
        await cluster.create_pool("p", 8000)
        await seen("the pool again", lambda: pool.ready)
    assert metrics.degradations == []


async def test_objectives_and_rewrites_follow(cluster: Cluster, metrics: RecordedMetrics, seen: Seen) -> None:
    ref = {"poolRef": {"name": "p"}}
    rules = [{"matches": [{"model": {"type": "Exact", "value": "m"}}], "targets": [{"modelRewrite": "one"}]}]
    await cluster.create_pool("p", 8000)
    async with followed(pools_of(Named(("p",)), cluster, metrics)) as pools:
        (pool,) = pools.pools
        await seen("an empty pool", lambda: pool.ready)
        await cluster.create(LLMD_GROUP, "inferenceobjectives", "vip", {**ref, "priority": 5})
        await seen("an objective", lambda: pool.objective("vip").priority == 5)
        await cluster.patch(LLMD_GROUP, "inferenceobjectives", "vip", {"spec": {"priority": -1}})
        await seen("an objective's new priority", lambda: pool.objective("vip").priority == -1)
        await cluster.create(LLMD_GROUP, "inferencemodelrewrites", "r", {**ref, "rules": rules})
        await seen("a rewrite", lambda: pool.rewrite("m") == "one")
        rules[0]["targets"] = [{"modelRewrite": "two"}]
        await cluster.patch(LLMD_GROUP, "inferencemodelrewrites", "r", {"spec": {"rules": rules}})
        await seen("a rewrite's new target", lambda: pool.rewrite("m") == "two")
        await cluster.delete(LLMD_GROUP, "inferenceobjectives", "vip")
        await cluster.delete(LLMD_GROUP, "inferencemodelrewrites", "r")
        await seen("the end of both", lambda: pool.objective("vip").priority == 0 and pool.rewrite("m") == "m")
    assert metrics.degradations == []


@pytest.fixture
def legacy_definitions(cluster: Cluster) -> Iterator[str]:
    """The same two kinds in GIE's older group, not installed yet; removed afterwards."""
    texts = [
        (ROOT / "manifests" / "crds" / f"{name}.yaml").read_text()
        for name in ("inferenceobjectives", "inferencemodelrewrites")
    ]
    text = "---\n".join(texts).replace("llm-d.ai", "inference.networking.x-k8s.io")
    yield text
    cluster.plane.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=text)


async def test_definitions_installed_later_are_noticed_and_llm_ds_win(
    cluster: Cluster, metrics: RecordedMetrics, seen: Seen, legacy_definitions: str
) -> None:
    ref = {"poolRef": {"name": "p"}}
    await cluster.create_pool("p", 8000)
    await cluster.create(LLMD_GROUP, "inferenceobjectives", "vip", {**ref, "priority": 5})
    async with followed(pools_of(Named(("p",)), cluster, metrics)) as pools:
        (pool,) = pools.pools
        await seen("a pool without the older group", lambda: pool.objective("vip").priority == 5)
        cluster.plane.define("-f", "-", stdin=legacy_definitions)
        await cluster.create(LEGACY_GROUP, "inferenceobjectives", "vip", {**ref, "priority": 1})
        await cluster.create(LEGACY_GROUP, "inferenceobjectives", "old", {**ref, "priority": 2})
        await seen("a definition installed late (asked every 5 s)", lambda: pool.objective("old").priority == 2)
        assert pool.objective("vip").priority == 5
        await cluster.delete(LLMD_GROUP, "inferenceobjectives", "vip")
        await seen("the older group's objective instead", lambda: pool.objective("vip").priority == 1)
    assert metrics.degradations == []


async def test_while_the_api_server_is_away_endpoints_stay(
    cluster: Cluster, metrics: RecordedMetrics, seen: Seen
) -> None:
    await cluster.create_pool("p", 8000)
    await cluster.create_pods([("a", "127.1.0.1"), ("b", "127.1.0.2")])
    removed: list[Endpoint] = []
    async with followed(pools_of(Named(("p",)), cluster, metrics)) as pools:
        (pool,) = pools.pools
        await seen("two pods", lambda: len(pool.endpoints) == 2)
        pool.on_removed.append(removed.append)
        cluster.plane.stop_api()
        try:
            await seen("the API server's end", lambda: metrics.reasons() == ["kubernetes-away"])
            # Long enough that every watch has tried again, and more than once.
            await seen("several tries", lambda: all(watch._failures >= 4 for watch in pools._watches()))
        finally:
            cluster.plane.start_api()
        assert (len(pool.endpoints), removed, pool.ready) == (2, [], True)
        await cluster.create_pods([("c", "127.1.0.3")])
        await cluster.delete_pods(["a"])
        expected = ["127.1.0.2:8000", "127.1.0.3:8000"]
        await seen("changes since the API server is back", lambda: addresses(pool) == expected)
        assert [each.address for each in removed] == ["127.1.0.1:8000"]
    assert set(metrics.reasons()) == {"kubernetes-away"}


class CountingServer(ApiServer):
    """Counts the lists of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.lists: dict[str, int] = {}

    async def page(self, kind: Kind, namespace: str, selector: str, continuation: str) -> bytes:
        self.lists[kind.plural] = self.lists.get(kind.plural, 0) + 1
        return await super().page(kind, namespace, selector, continuation)


async def test_a_version_that_was_compacted_away_means_a_new_list(
    cluster: Cluster, metrics: RecordedMetrics, seen: Seen
) -> None:
    await cluster.create_pool("p", 8000)
    await cluster.create_pods([("a", "127.1.0.1")])
    source = CountingServer()
    async with followed(pools_of(Named(("p",)), cluster, metrics, source)) as pools:
        (pool,) = pools.pools
        await seen("one pod", lambda: len(pool.endpoints) == 1)
        assert source.lists["pods"] == 1
        # A stopped API server forgets its events, and etcd here the versions our watches would go on from.
        cluster.plane.stop_api()
        try:
            await seen("the API server's end", lambda: "kubernetes-away" in metrics.reasons())
            cluster.plane.compact()
        finally:
            cluster.plane.start_api()
        await cluster.create_pods([("b", "127.1.0.2")])
        await seen("a pod after a compaction", lambda: len(pool.endpoints) == 2)
        await seen("a new list of each", lambda: source.lists["pods"] >= 2 and source.lists["inferencepools"] >= 2)
    assert set(metrics.reasons()) == {"kubernetes-away"}


async def test_our_role_is_enough_and_nothing_else_is_asked(
    cluster: Cluster, metrics: RecordedMetrics, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, namespace = cluster.plane, cluster.namespace
    role = (
        (ROOT / "manifests" / "base" / "rbac.yaml").read_text().replace("namespace: default", f"namespace: {namespace}")
    )
    plane.kubectl("apply", "--namespace", namespace, "-f", "-", stdin=role)
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    token = plane.call("POST", f"{accounts}/warmpath/token", {"spec": {}})["status"]["token"]
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig(token)))
    await cluster.create_pool("p", 8000)
    await cluster.create_pods([("a", "127.1.0.1")])
    await cluster.create(LLMD_GROUP, "inferenceobjectives", "vip", {"poolRef": {"name": "p"}, "priority": 5})
    async with ApiServer() as api:
        wanted = await labelled("", cluster.namespace, api)
    async with followed(pools_of(wanted, cluster, metrics)) as pools:
        (pool,) = pools.pools
        await seen(
            "everything, with our role", lambda: len(pool.endpoints) == 1 and pool.objective("vip").priority == 5
        )
    assert metrics.degradations == []
    asked = plane.requests_of(f"system:serviceaccount:{namespace}:warmpath")
    assert {verb for verb, _, _ in asked} == {"list", "watch"}
    assert {resource for _, resource, _ in asked} == {
        "pods",
        "inferencepools.inference.networking.k8s.io",
        *(
            f"{kind}.{group}"
            for kind in ("inferenceobjectives", "inferencemodelrewrites")
            for group in ("llm-d.ai", "inference.networking.x-k8s.io")
        ),
    }
    assert not [each for each in asked if each[2] in (401, 403)]


async def test_without_a_role_it_says_what_is_forbidden(
    cluster: Cluster, metrics: RecordedMetrics, seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane, namespace = cluster.plane, cluster.namespace
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    plane.call("POST", accounts, {"metadata": {"name": "nobody"}})
    token = plane.call("POST", f"{accounts}/nobody/token", {"spec": {}})["status"]["token"]
    monkeypatch.setenv("KUBECONFIG", str(plane.kubeconfig(token)))
    async with followed(pools_of(Named(("p",)), cluster, metrics)) as pools:
        await seen("what is forbidden", lambda: len(metrics.degradations) >= 5)
        assert not pools.pools[0].ready
    assert set(metrics.reasons()) == {"kubernetes-forbidden"}
    assert any("inferencepools" in detail and "nobody" in detail for _, detail in metrics.degradations)


async def test_a_selector_and_ports_do_without_inference_pools(
    cluster: Cluster, metrics: RecordedMetrics, seen: Seen
) -> None:
    await cluster.create_pods([("a", "127.1.0.1")])
    await cluster.create_pods([("b", "127.1.0.2")], labels={"app": "y"})
    await cluster.create_pods([("c", "127.1.0.3")], labels={"app": "x", "skip": ""})
    wanted = Selected("mine", "app in (x, y),!skip", (8000, 8001))
    async with followed(pools_of(wanted, cluster, metrics)) as pools:
        (pool,) = pools.pools
        await seen("pods by selector", lambda: pool.ready)
        assert addresses(pool) == ["127.1.0.1:8000", "127.1.0.1:8001", "127.1.0.2:8000", "127.1.0.2:8001"]
    assert metrics.degradations == []


async def test_several_pools_share_a_namespace(cluster: Cluster, metrics: RecordedMetrics, seen: Seen) -> None:
    await cluster.create_pool("p", 8000)
    await cluster.create_pool("q", 9000, labels={"app": "y"})
    await cluster.create_pods([("a", "127.1.0.1")])
    await cluster.create_pods([("b", "127.1.0.2")], labels={"app": "y"})
    async with followed(pools_of(Named(("p", "q", "later")), cluster, metrics)) as pools:
        p, q, later = pools.pools
        await seen("two pools", lambda: p.ready and q.ready)
        assert (addresses(p), addresses(q), later.ready) == (["127.1.0.1:8000"], ["127.1.0.2:9000"], False)
        await cluster.create_pool("later", 7000)
        await seen("a third", lambda: addresses(later) == ["127.1.0.1:7000"])
        assert metrics.going_on() == set()
    assert metrics.degradations == [("pool-missing", f"there is no InferencePool {cluster.namespace}/later")]


async def test_a_thousand_pods_come_and_go(cluster: Cluster, metrics: RecordedMetrics, seen: Seen) -> None:
    pods = [(f"pod-{number:04}", f"127.2.{number // 250}.{number % 250 + 1}") for number in range(1000)]
    await cluster.create_pool("p", 8000)
    added: list[Endpoint] = []
    removed: list[Endpoint] = []
    async with followed(pools_of(Named(("p",)), cluster, metrics)) as pools:
        (pool,) = pools.pools
        pool.on_added.append(added.append)
        pool.on_removed.append(removed.append)
        await cluster.create_pods(pods[:500])
        await seen("the last of 500 pods", lambda: len(pool.endpoints) == 500)
        await cluster.create_pods(pods[500:])
        await cluster.delete_pods([name for name, _ in pods[:500]])
        await seen("the last of 1,000 changes", lambda: addresses(pool) == [f"{ip}:8000" for _, ip in pods[500:]])
        await cluster.delete_pods([name for name, _ in pods[500:]])
        await seen("the end of all", lambda: not pool.endpoints)
    assert len(added) == len(removed) == len({each.name for each in added}) == 1000
    assert metrics.degradations == []


@pytest.mark.parametrize(
    "spec",
    [
        {"targetPorts": [{"number": port} for port in range(1, 10)]},
        {"targetPorts": [{"number": 1}, {"number": 1}]},
        {"targetPorts": [{"number": 70000}]},
        {"selector": {"matchLabels": {}}},
        {"endpointPickerRef": {"name": "epp"}},
        {"appProtocol": "smtp"},
    ],
)
async def test_our_definition_refuses_what_an_inference_pool_may_not_say(cluster: Cluster, spec: Any) -> None:
    good = {"selector": {"matchLabels": {"app": "x"}}, "targetPorts": [{"number": 8000}]}
    await cluster.create(POOL_GROUP, "inferencepools", "good", good)
    with pytest.raises(ApiFailed, match="422"):
        await cluster.create(POOL_GROUP, "inferencepools", "bad", good | spec)
