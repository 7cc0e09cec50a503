from pathlib import Path

import pytest

from epp.errors import ConfigError
from gateway.load import load
from tests.support.gateway.files import GATEWAY, POOL, ROUTE, write


def test_the_laptops_manifests_load() -> None:
    resources = load([Path(__file__).parents[2] / "manifests" / "laptop"])
    assert [gateway.spec.listeners[0].port for gateway in resources.gateways] == [8080]
    assert [pool.metadata.id for pool in resources.pools] == ["default/sim"]
    assert resources.routes[0].spec.rules[0].backend_refs[0].name == "sim"


def test_other_kinds_of_a_cluster_are_passed_over_and_unknown_ones_refused(tmp_path: Path) -> None:
    job = "kind: Job\napiVersion: batch/v1\nmetadata: {name: p}\nspec: {anything: 1}"
    assert load([write(tmp_path, GATEWAY, ROUTE, POOL, job)]).routes
    with pytest.raises(ConfigError, match="GRPCRoute default/p: kind: GRPCRoute is not supported; supported: Gateway"):
        load([write(tmp_path, job.replace("Job", "GRPCRoute"))])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: sim}]", "name: sin}]", "no InferencePool sin in these files; they have: sim"),
        ("parentRefs: [{name: gate}]", "parentRefs: [{name: gat}]", "no Gateway default/gat in these files"),
        ("[{name: gate}]", "[{name: gate, sectionName: htp}]", "spec.parentRefs[0].sectionName: no listener htp"),
        ("[{name: gate}]", "[{name: gate, port: 81}]", "spec.parentRefs[0].port: no such listener with port 81"),
        ("name: sim}]", "name: sim, namespace: far}]", "backendRefs[0].namespace: far is not supported"),
        ("metadata: {name: route}", "metadata: {name: route, namespace: far}", "no Gateway far/gate"),
        ("rules:", "hostnames: [a.example]\n  rules:", "spec.hostnames: none is among those of Gateway"),
    ],
)
def test_references_that_lead_nowhere_are_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    gateway = GATEWAY.replace(
        "protocol: HTTP", "protocol: HTTP, hostname: '*.other'" if "hostnames" in message else "protocol: HTTP"
    )
    assert old in ROUTE
    with pytest.raises(ConfigError) as caught:
        load([write(tmp_path, gateway, ROUTE.replace(old, new), POOL)])
    assert message in str(caught.value)


def test_a_route_of_another_namespace_needs_leave(tmp_path: Path) -> None:
    route = ROUTE.replace("{name: route}", "{name: route, namespace: far}").replace(
        "{name: gate}", "{name: gate, namespace: default}"
    )
    pool = POOL.replace("{name: sim}", "{name: sim, namespace: far}", 1)
    with pytest.raises(ConfigError, match="allows routes of its own namespace only"):
        load([write(tmp_path, GATEWAY, route, pool)])
    allowing = GATEWAY.replace("protocol: HTTP", "protocol: HTTP, allowedRoutes: {namespaces: {from: All}}")
    assert load([write(tmp_path, allowing, route, pool)]).routes


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ((GATEWAY, GATEWAY), "the same object is also in"),
        ((GATEWAY, GATEWAY.replace("name: gate", "name: two")), "are those of Gateway default/gate listener http"),
        (("endpoints: [{name: a, address: pod-a, port: 1}]",), "endpoints[0].address: got 'pod-a'; expected an IPv4"),
        (("endpoints: [{name: a, address: 127.0.0.1, port: '0'}]",), "endpoints[0].port: got '0'"),
        (("endpoint: []",), "kind: missing; expected Gateway, HTTPRoute, InferencePool, or a list under `endpoints`"),
        (("endpoints: [{name: a, adress: 127.0.0.1, port: 1}]",), "did you mean 'address'?"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, documents: tuple[str, ...], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load([write(tmp_path, *documents)])
    assert message in str(caught.value)


def test_a_directory_without_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "below" / "gateway.yaml").write_text("kind: Gateway")
    with pytest.raises(ConfigError, match=r"no \.yaml, \.yml, \.json file in here \(directories below"):
        load([tmp_path])
