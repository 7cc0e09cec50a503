"""What a cluster says of a pool, from an API server that holds the statuses that kubelets and gateways write."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.pool.kubernetes import OBJECTIVES, POOLS, REWRITES
from tests.support.kubernetes.api_server import FakeApiServer, Object, pod, pool, use
from tooling.doctor.command import DoctorOptions, diagnose

ROUTES, GATEWAYS = "httproutes.gateway.networking.k8s.io", "gateways.gateway.networking.k8s.io"
INVALID = "Failed to process route rule 0 backendRef 0: Group is invalid, only the core API group is supported."


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    fake = FakeApiServer()
    fake.installed |= {str(kind) for kind in (POOLS, *OBJECTIVES, *REWRITES)}
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        await fake.put(str(POOLS), "llm", pool(8000))
        yield fake


async def examined() -> tuple[list[str], list[tuple[str, str, str, str, str]]]:
    names, findings = await diagnose(DoctorOptions(pool_name="llm", pool_namespace="ns"))
    return names, [(each.subject, each.check, each.level, each.found, each.fix) for each in findings]


def unready(reason: str, message: str = "", *, init: bool = False) -> Object:
    """A pod whose container waits, as its kubelet says it."""
    content = pod("", ready=False)
    waiting = {"state": {"waiting": {"reason": reason, "message": message}}}
    going_on = {"state": {"waiting": {"reason": "PodInitializing"}}}
    content["status"] |= {"initContainerStatuses": [waiting], "containerStatuses": [going_on if init else waiting]}
    return content


@pytest.mark.parametrize(
    ("reason", "fix"),
    [
        ("ErrImagePull", "the image's name and tag"),
        ("ImagePullBackOff", "the image's name and tag"),
        ("CrashLoopBackOff", "kubectl logs a --previous"),
        ("CreateContainerConfigError", "make the ConfigMap or Secret"),
        ("ContainerCreating", "kubectl describe pod a"),
    ],
)
@pytest.mark.parametrize("init", [False, True])
async def test_a_pod_whose_container_waits_is_named_with_the_reason(
    fake: FakeApiServer, reason: str, fix: str, init: bool
) -> None:
    await fake.put("pods", "a", unready(reason, "why", init=init))
    names, [(subject, check, level, found, fixes)] = await examined()
    assert (names, subject, check, level, found) == (["ns/a"], "ns/a", "pods", "problem", f"{reason}: why")
    assert fix in fixes


async def test_a_pod_that_no_node_takes(fake: FakeApiServer) -> None:
    content = pod("", ready=False)
    scheduled = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}
    content["status"]["conditions"] = [{"type": "Ready", "status": "False", "reason": "ContainersNotReady"}, scheduled]
    await fake.put("pods", "a", content)
    _, [(_, _, _, found, fix)] = await examined()
    assert (found, fix) == ("Unschedulable: 0/3 nodes", "nodes with what it asks for, or ask for less")


async def test_a_pod_of_which_nothing_is_said_and_one_that_goes(fake: FakeApiServer) -> None:
    await fake.put("pods", "a", pod("", ready=False))
    await fake.put("pods", "b", pod("", ready=False, deletionTimestamp="2026-01-02T00:00:00Z"))
    assert [(each[0], each[3]) for each in (await examined())[1]] == [("ns/a", "not ready")]


async def test_a_selector_that_matches_nothing(fake: FakeApiServer) -> None:
    await fake.put("pods", "a", pod("10.0.0.1", labels={"app": "y"}))
    names, findings = await examined()
    found, fix = "no pod of namespace ns has the labels app=x", "its spec.selector, or the labels of the pods"
    assert names == ["InferencePool ns/llm"]
    assert findings == [("InferencePool ns/llm", "pods", "problem", found, fix)]


def route(*parents: Any, backend: str = "llm", said: Any = ()) -> Object:
    rules = [{"backendRefs": [{"name": backend, "kind": "InferencePool"}]}]
    return {"spec": {"parentRefs": list(parents), "rules": rules}, "status": {"parents": list(said)}}


def condition(type: str, status: str, reason: str, message: str = "") -> Object:
    return {"type": type, "status": status, "reason": reason, "message": message}


def gateway(*conditions: Object) -> Object:
    return {"spec": {"gatewayClassName": "c"}, "status": {"conditions": list(conditions)}}


WELL = gateway(condition("Accepted", "True", "Accepted"), condition("Programmed", "True", "Programmed"))


async def routes_of(fake: FakeApiServer, routed: Object, gate: Object = WELL) -> list[tuple[str, str, str, str]]:
    """(subject, level, found, fix) of what is wrong with the routes, beside a pod that is not ready."""
    await fake.put("pods", "a", pod("", ready=False))
    await fake.put(ROUTES, "r", routed)
    await fake.put(GATEWAYS, "g", gate)
    names, findings = await examined()
    assert {subject for subject, *_ in findings} <= {*names}
    return [(subject, level, found, fix) for subject, check, level, found, fix in findings if check == "route"]


async def test_a_route_that_was_taken_up_has_no_finding(fake: FakeApiServer) -> None:
    said = {"parentRef": {"name": "g"}, "conditions": [condition("Accepted", "True", "Accepted")]}
    assert await routes_of(fake, route({"name": "g"}, said=[said])) == []


async def test_a_parent_that_is_not_there(fake: FakeApiServer) -> None:
    [(subject, level, found, fix)] = await routes_of(fake, route({"name": "gg"}))
    assert (subject, level, found) == ("HTTPRoute ns/r", "problem", "there is no Gateway ns/gg")
    assert fix == "in parentRefs: the name of a Gateway; did you mean 'g'?"


async def test_a_gateway_without_a_controller(fake: FakeApiServer) -> None:
    waits = gateway(condition("Accepted", "Unknown", "Pending", "Waiting for controller"))
    [(subject, level, found, fix)] = await routes_of(fake, route({"name": "g"}), waits)
    assert (subject, level) == ("Gateway ns/g", "problem")
    assert found == "Accepted is Unknown: Waiting for controller"
    assert fix == "a controller for gatewayClassName c: kubectl get gatewayclass"


async def test_a_gateway_without_an_address_is_a_hint(fake: FakeApiServer) -> None:
    waits = gateway(condition("Programmed", "False", "AddressNotAssigned", "No addresses"))
    [(_, level, found, fix)] = await routes_of(fake, route({"name": "g"}), waits)
    assert (level, found) == ("hint", "Programmed is False: No addresses")
    assert "kubectl port-forward" in fix


async def test_a_kind_that_the_gateway_does_not_take(fake: FakeApiServer) -> None:
    said = {"parentRef": {"name": "g"}, "conditions": [condition("ResolvedRefs", "False", "InvalidKind", INVALID)]}
    [(subject, level, found, fix)] = await routes_of(fake, route({"name": "g"}, said=[said]))
    assert (subject, level, found) == ("HTTPRoute ns/r", "problem", f"ResolvedRefs is False: {INVALID}")
    assert fix.startswith("a gateway that supports InferencePool")


async def test_a_reason_that_is_not_known(fake: FakeApiServer) -> None:
    said = {"parentRef": {"name": "g"}, "conditions": [condition("Accepted", "False", "Strange")]}
    [(_, _, found, fix)] = await routes_of(fake, route({"name": "g"}, said=[said]))
    assert (found, fix) == ("Accepted is False: Strange", "see kubectl describe httproute r -n ns")


async def test_a_route_of_which_its_gateway_says_nothing(fake: FakeApiServer) -> None:
    [(_, level, found, fix)] = await routes_of(fake, route({"name": "g"}))
    assert (level, found) == ("problem", "no controller says anything of it, as of Gateway ns/g")
    assert fix == "see its log; its class is c"


async def test_no_route_to_the_pool(fake: FakeApiServer) -> None:
    [(subject, level, found, _)] = await routes_of(fake, route({"name": "g"}, backend="lm"))
    assert (subject, level) == ("InferencePool ns/llm", "hint")
    assert found == "no HTTPRoute of namespace ns leads to it; they lead to: lm"


@pytest.mark.parametrize("status", [403, 404])
async def test_routes_that_may_not_be_listed_are_passed_over(fake: FakeApiServer, status: int) -> None:
    fake.answers[ROUTES] = status
    assert await routes_of(fake, route({"name": "gg"})) == []


async def test_an_api_server_that_fails_is_reported(fake: FakeApiServer) -> None:
    fake.answers[ROUTES] = 500
    with pytest.raises(ConfigError, match=r"--pool-name: the Kubernetes API server: 500 "):
        await routes_of(fake, route({"name": "g"}))


async def test_what_is_no_route_is_reported(fake: FakeApiServer) -> None:
    with pytest.raises(ConfigError, match=r"httproutes.* in namespace ns: .*spec"):
        await routes_of(fake, {"nothing": 1})
