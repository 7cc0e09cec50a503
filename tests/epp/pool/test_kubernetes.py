import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.parsing.request import Objective, Slo
from epp.pool import watch as module
from epp.pool.apiserver import ApiServer
from epp.pool.kubernetes import OBJECTIVES, POOLS, REWRITES, KubePools, Named, Selected, labelled
from epp.pool.store import Endpoint, Pool
from tests.support.kubernetes.api_server import FakeApiServer, Object, pod, pool, use
from tests.support.kubernetes.cluster import followed
from tests.support.process.waiting import until
from tests.support.scheduling.degradations import RecordedMetrics

POOL = str(POOLS)
(OBJECTIVE, OLD_OBJECTIVE), (REWRITE, OLD_REWRITE) = map(str, OBJECTIVES), map(str, REWRITES)
ALL = {POOL, OBJECTIVE, OLD_OBJECTIVE, REWRITE, OLD_REWRITE, "pods"}


def objective(priority: int | None, of: str = "p") -> Object:
    spec: Object = {"poolRef": {"name": of}}
    return {"spec": spec if priority is None else spec | {"priority": priority}}


def rewrite(target: str, of: str = "p", created: str = "2026-01-01T00:00:00Z") -> Object:
    rules = [{"matches": [{"model": {"type": "Exact", "value": "m"}}], "targets": [{"modelRewrite": target}]}]
    return {"metadata": {"creationTimestamp": created}, "spec": {"poolRef": {"name": of}, "rules": rules}}


def addresses(pool: Pool) -> list[str]:
    return [endpoint.address for endpoint in pool.endpoints]


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    monkeypatch.setattr(module, "_SHORTEST_PAUSE", 0.005)
    monkeypatch.setattr(module, "_ABSENT_PAUSE", 0.01)
    monkeypatch.setattr(module, "_LONGEST_PAUSE", 0.02)
    monkeypatch.setattr(module, "_AWAY_PAUSE", 0.02)
    monkeypatch.setattr("epp.pool.kubernetes._QUIET", 0.001)
    fake = FakeApiServer()
    fake.installed |= ALL
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        yield fake


@asynccontextmanager
async def following(wanted: Any, metrics: RecordedMetrics | None = None) -> AsyncIterator[KubePools]:
    async with ApiServer() as api:
        if isinstance(wanted, str):
            wanted = await labelled(wanted, "ns", api)
        async with followed(KubePools(wanted, "ns", api, metrics or RecordedMetrics(), random.Random(1))) as pools:
            yield pools


async def test_pods_come_change_and_go(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    await fake.put("pods", "a", pod("10.0.0.1"))
    await fake.put("pods", "other", pod("10.0.0.9", labels={"app": "y"}))
    metrics = RecordedMetrics()
    async with following(Named(("p",)), metrics) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        assert addresses(found) == ["10.0.0.1:8000"]
        stayed = found.endpoints[0]
        await fake.put("pods", "b", pod("10.0.0.2", ready=False))
        await fake.put("pods", "b", pod("10.0.0.2"))
        await until(lambda: addresses(found) == ["10.0.0.1:8000", "10.0.0.2:8000"])
        assert found.endpoints[0] is stayed
        await fake.put("pods", "b", pod("10.0.0.2", deletionTimestamp="2026-01-02T00:00:00Z"))
        await until(lambda: addresses(found) == ["10.0.0.1:8000"])
        await fake.delete("pods", "a")
        await until(lambda: not found.endpoints)
        assert found.ready
        assert [state.endpoints for state in pools.states] == [()]
    assert metrics.degradations == []


async def test_target_ports_are_ranks_and_follow_edits(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000, 8001))
    await fake.put("pods", "a", pod("10.0.0.1"))
    await fake.put("pods", "b", pod("10.0.0.2", annotations={"inference.networking.k8s.io/active-ports": "8001"}))
    async with following(Named(("p",))) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        assert [(each.name, each.address) for each in found.endpoints] == [
            ("ns/a-rank-0", "10.0.0.1:8000"),
            ("ns/a-rank-1", "10.0.0.1:8001"),
            ("ns/b-rank-1", "10.0.0.2:8001"),
        ]
        await fake.put(POOL, "p", pool(9000))
        await until(lambda: addresses(found) == ["10.0.0.1:9000"])


async def test_a_pool_waits_for_its_inference_pool_and_ends_with_it(fake: FakeApiServer) -> None:
    await fake.put("pods", "a", pod("10.0.0.1"))
    await fake.put(POOL, "other", pool(1))
    async with following(Named(("p", "q"))) as pools:
        p, q = pools.pools
        assert [state.name for state in pools.states] == ["p", "q"]
        await fake.put(POOL, "p", pool(8000))
        await until(lambda: p.ready)
        assert not q.ready
        await fake.delete(POOL, "p")
        await until(lambda: not p.ready)
        assert p.endpoints == ()
        assert pools.states[0].endpoints == ()
        await fake.put(POOL, "p", pool(8001))
        await fake.put(POOL, "q", pool(8002))
        await until(lambda: p.ready and q.ready)
        assert addresses(p) + addresses(q) == ["10.0.0.1:8001", "10.0.0.1:8002"]


async def test_without_the_definitions_it_waits_for_them(fake: FakeApiServer) -> None:
    fake.installed = {"pods"}
    await fake.put("pods", "a", pod("10.0.0.1"))
    metrics = RecordedMetrics()
    async with following(Named(("p",)), metrics) as pools:
        (found,) = pools.pools
        await until(lambda: all(watch.answered for watch in pools._watches()))
        assert not found.ready
        await fake.put(POOL, "p", pool(8000))
        await until(lambda: found.ready)
        await fake.put(OLD_OBJECTIVE, "vip", objective(5))
        await until(lambda: found.objective("vip").priority == 5)
    why = f"this cluster has no InferencePools ({POOL}); install their definition, as hack/crds does"
    assert metrics.degradations == [("pool-missing", why)]
    assert not metrics.going_on()


async def test_a_pool_that_is_not_there_is_reported_once_with_the_nearest_name(fake: FakeApiServer) -> None:
    await fake.put(POOL, "pool-a", pool(8000))
    metrics = RecordedMetrics()
    async with following(Named(("pool-b", "pool-a")), metrics) as pools:
        await until(lambda: pools.pools[1].ready)
        assert metrics.degradations == [("pool-missing", "there is no InferencePool ns/pool-b; did you mean 'pool-a'?")]
        assert metrics.going_on() == {"pool-missing"}
        await fake.put(POOL, "pool-b", pool(8000))
        await until(lambda: pools.pools[0].ready)
    assert not metrics.going_on()


async def test_a_new_selector_keeps_the_old_endpoints_until_it_has_its_own(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    await fake.put("pods", "a", pod("10.0.0.1"))
    await fake.put("pods", "b", pod("10.0.0.2", labels={"app": "y", "tier": "1"}))
    removed: list[Endpoint] = []
    async with following(Named(("p",))) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        found.on_removed.append(removed.append)
        fake.answers["pods"] = 503
        await fake.put(POOL, "p", pool(8000, selector={"tier": "1", "app": "y"}))
        first = pools._followed[0].pods
        await until(lambda: pools._followed[0].pods is not first)
        assert removed == []
        fake.answers.clear()
        await until(lambda: addresses(found) == ["10.0.0.2:8000"])
        assert [each.address for each in removed] == ["10.0.0.1:8000"]


async def test_llm_ds_own_group_wins_by_name(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    await fake.put(OLD_OBJECTIVE, "vip", objective(1))
    await fake.put(OLD_OBJECTIVE, "old", objective(2))
    await fake.put(OBJECTIVE, "vip", objective(10))
    await fake.put(OBJECTIVE, "none", objective(None))
    await fake.put(OBJECTIVE, "elsewhere", objective(7, of="q"))
    await fake.put(OLD_REWRITE, "r", rewrite("old", created="2020-01-01T00:00:00Z"))
    await fake.put(REWRITE, "r", rewrite("new"))
    async with following(Named(("p",))) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        assert [found.objective(name).priority for name in ("vip", "old", "none", "elsewhere")] == [10, 2, 0, 0]
        assert found.rewrite("m") == "new"
        await fake.delete(OBJECTIVE, "vip")
        await fake.delete(REWRITE, "r")
        await until(lambda: found.objective("vip").priority == 1 and found.rewrite("m") == "old")


async def test_a_bad_pod_is_left_out_and_reported_once(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    await fake.put("pods", "a", pod("10.0.0.1"))
    await fake.put("pods", "b", pod("10.0.0.2", annotations={"llm-d.ai/active-ports": "http"}))
    metrics = RecordedMetrics()
    async with following(Named(("p",)), metrics) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        await fake.put("pods", "c", pod("10.0.0.3"))
        await until(lambda: len(found.endpoints) == 2)
    assert metrics.reasons() == ["kubernetes-object-refused"]
    assert metrics.degradations[0][1].startswith("pods ns/b: ")


async def test_a_bad_annotation_of_an_objective_counts_as_missing_and_is_reported_once(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    said = {"warmpath/slo-ttft-ms": "soon", "warmpath/slo-tpot-ms": "20", "kubectl.kubernetes.io/x": "y"}
    await fake.put(OBJECTIVE, "vip", objective(5) | {"metadata": {"annotations": said}})
    metrics = RecordedMetrics()
    async with following(Named(("p",)), metrics) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        assert found.objective("vip") == Objective(5, Slo(None, 0.02, "vip"))
        await fake.put("pods", "c", pod("10.0.0.3"))
        await until(lambda: len(found.endpoints) == 1)
    assert metrics.reasons() == ["kubernetes-object-refused"]
    detail = "inferenceobjectives ns/vip: metadata.annotations['warmpath/slo-ttft-ms']: got 'soon'; expected"
    assert metrics.degradations[0][1].startswith(detail)


async def test_a_bad_pool_keeps_what_it_was(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    await fake.put("pods", "a", pod("10.0.0.1"))
    metrics = RecordedMetrics()
    async with following(Named(("p",)), metrics) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        await fake.put(POOL, "p", pool(0))
        await until(lambda: bool(metrics.degradations))
        assert addresses(found) == ["10.0.0.1:8000"]
    expected = f"{POOL} ns/p: Expected `int` >= 1 - at `$.spec.targetPorts[0].number`"
    assert metrics.degradations == [("kubernetes-object-refused", expected)]


async def test_fields_of_a_later_version_are_passed_over(fake: FakeApiServer) -> None:
    later = pool(8000)
    later["spec"] |= {"future": 1, "endpointPickerRef": {"name": "epp", "port": {"number": 9002, "future": 2}}}
    later["spec"]["targetPorts"][0]["future"] = 3
    await fake.put(POOL, "p", later)
    async with following(Named(("p",))) as pools:
        await until(lambda: pools.pools[0].ready)
        assert pools.states[0].grpc_port == 9002


async def test_an_address_of_two_pods_is_the_youngers(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    await fake.put("pods", "a", pod("10.0.0.1", creationTimestamp="2026-02-01T00:00:00Z"))
    await fake.put("pods", "b", pod("10.0.0.1", creationTimestamp="2026-01-01T00:00:00Z"))
    async with following(Named(("p",))) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        assert [each.name for each in found.endpoints] == ["ns/a"]


async def test_ranks_behind_a_pods_port_come_and_go_with_it(fake: FakeApiServer) -> None:
    def ranked(size: str, created: str = "2026-01-01T00:00:00Z") -> Object:
        labels = {"app": "x", "warmpath/data-parallel-size": size}
        return pod("10.0.0.1", labels=labels, creationTimestamp=created)

    metrics = RecordedMetrics()
    await fake.put(POOL, "p", pool(8000))
    await fake.put("pods", "a", ranked("11"))
    async with following(Named(("p",)), metrics) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        assert [each.name for each in found.ranks_at("10.0.0.1:8000")] == [f"ns/a-rank-{n}" for n in range(11)]
        await fake.put("pods", "b", ranked("2", "2026-02-01T00:00:00Z"))  # it has the address of one that is gone
        await until(lambda: [each.name for each in found.endpoints] == ["ns/b-rank-0", "ns/b-rank-1"])
        await fake.put("pods", "b", ranked("0", "2026-02-01T00:00:00Z"))
        await until(lambda: len(found.endpoints) == 11)
        expected = "got '0'; expected the ranks behind one port, 1 to 64"
        refused = f"pods ns/b: warmpath/data-parallel-size: {expected}"
        assert metrics.degradations == [("kubernetes-object-refused", refused)]


async def test_while_the_server_is_away_pools_stay_and_it_is_reported_once(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    await fake.put("pods", "a", pod("10.0.0.1"))
    metrics = RecordedMetrics()
    async with following(Named(("p",)), metrics) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        fake.answers[""] = 503
        await fake.drop()
        await until(lambda: all(watch._failures > 2 for watch in pools._watches()))
        assert addresses(found) == ["10.0.0.1:8000"]
        assert metrics.reasons() == ["kubernetes-away"]
        assert metrics.going_on() == {"kubernetes-away"}
        fake.answers.clear()
        await fake.put("pods", "b", pod("10.0.0.2"))
        await until(lambda: len(found.endpoints) == 2 and not metrics.going_on())
        fake.answers[""] = 503
        await fake.drop()
        await until(lambda: len(metrics.degradations) == 2)


async def test_what_we_may_not_see_is_reported_and_does_not_hold_up_the_pool(fake: FakeApiServer) -> None:
    await fake.put(POOL, "p", pool(8000))
    fake.answers |= {OBJECTIVE: 403, REWRITE: 403}
    metrics = RecordedMetrics()
    async with following(Named(("p",)), metrics) as pools:
        await until(lambda: pools.pools[0].ready and len(metrics.degradations) == 2)
        assert metrics.reasons() == ["kubernetes-forbidden"] * 2
        assert metrics.going_on() == {"kubernetes-forbidden"}
        fake.answers.pop(OBJECTIVE)
        fake.answers.pop(REWRITE)
        await until(lambda: not metrics.going_on())


async def test_pools_by_label_are_those_of_the_start(fake: FakeApiServer) -> None:
    labelled = {"metadata": {"labels": {"team": "a"}}}
    await fake.put(POOL, "q", pool(8002) | labelled)
    await fake.put(POOL, "p", pool(8001) | labelled)
    await fake.put(POOL, "other", pool(8000))
    await fake.put("pods", "a", pod("10.0.0.1"))
    metrics = RecordedMetrics()
    async with following("team=a", metrics) as pools:
        assert [each.name for each in pools.pools] == ["p", "q"]
        await until(lambda: all(each.ready for each in pools.pools))
        assert [addresses(each) for each in pools.pools] == [["10.0.0.1:8001"], ["10.0.0.1:8002"]]
        await fake.put(POOL, "new", pool(8003) | labelled)
        await until(lambda: bool(metrics.degradations))
        await fake.put("pods", "b", pod("10.0.0.2"))
        await until(lambda: len(pools.pools[0].endpoints) == 2)
    assert metrics.reasons() == ["pool-not-served"]


async def test_labels_that_no_pool_has_are_an_error_at_the_start(fake: FakeApiServer) -> None:
    with pytest.raises(ConfigError, match="no InferencePool in namespace 'ns' has labels 'team=a'"):
        async with following("team=a"):
            pass
    fake.answers[POOL] = 403
    with pytest.raises(ConfigError, match="cannot list InferencePools in namespace 'ns': 403"):
        async with following("team=a"):
            pass


async def test_without_inference_pools_a_selector_and_ports_make_one(fake: FakeApiServer) -> None:
    fake.installed = {"pods"}
    await fake.put("pods", "a", pod("10.0.0.1"))
    async with following(Selected("mine", "app=x", (8000, 8001))) as pools:
        (found,) = pools.pools
        await until(lambda: found.ready)
        assert (found.name, addresses(found)) == ("mine", ["10.0.0.1:8000", "10.0.0.1:8001"])
        await fake.delete("pods", "a")
        await until(lambda: not found.endpoints)
    assert set(fake.lists) == {"pods"}
