"""Each overlay, alone and with each component: kustomize renders it and a real API server admits it."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from epp.cli import warmpath
from epp.configuration.loader import load_text, strategy_text
from epp.plugin import Endpoint, Stage, serves
from epp.prefix.precise import PrecisePrefixCache
from epp.protocol import ROLE_LABEL
from tests.support.kubernetes.control_plane import ApiFailed, ControlPlane
from tooling.simulator.publisher import kv_events_from

MANIFESTS = Path(__file__).parents[2] / "manifests"

GATEWAY = {"Gateway", "HTTPRoute"}
LEAN = {*GATEWAY, "EnvoyExtensionPolicy", "BackendTrafficPolicy", "EnvoyProxy"}
OVERLAYS: dict[str, set[str]] = {
    "agentgateway": GATEWAY,
    "envoy-ai-gateway": GATEWAY,
    "envoy-gateway": LEAN,
    "gke": {*GATEWAY, "HealthCheckPolicy", "GCPBackendPolicy"},
    "istio": {*GATEWAY, "DestinationRule"},
    "kind": {*LEAN, "GatewayClass"},
    "kind-kv-events": {*LEAN, "GatewayClass"},
    "kind-pd": {*LEAN, "GatewayClass"},
    "kind-standalone": set(),
    "standalone": set(),
    "tiered-kv": LEAN,
    "vllm-gpu": LEAN,
}
"""The kinds of each that this API server does not know, so that nothing is said of them here."""
COMPONENTS: dict[str, set[str]] = {
    "ha": set(),
    "kv-events": set(),
    "monitoring": {"PrometheusRule", "ServiceMonitor"},
    "tls": {"Issuer", "Certificate"},
    "autoscaling": {"ScaledObject"},
}
"""What may be added to every overlay, in this order, with what it adds to those kinds; `tls` not to plaintext."""
FROM_ZERO = "envoy-gateway-from-zero"
"""May be added to those that have Envoy Gateway without InferencePools."""
PLAINTEXT = {
    "envoy-gateway", "kind", "kind-kv-events", "kind-pd", "kind-standalone", "standalone", "tiered-kv", "vllm-gpu",
}  # fmt: skip
EVENTFUL = {"kind-kv-events", "tiered-kv"}
"""Those that have `kv-events` already."""
PRIVILEGED = {"tiered-kv"}
"""Of whose pods some are in their node's IPC namespace, and in no other way less restricted."""


def addable(overlay: str) -> tuple[str, ...]:
    """The components that may be added to an overlay."""
    without = {"tls"} if overlay in PLAINTEXT else set()
    without |= {"kv-events"} if overlay in EVENTFUL else set()
    return tuple(each for each in COMPONENTS if each not in without)


ADDED = [
    (overlay, added)
    for overlay in OVERLAYS
    for added in [(), *((each,) for each in addable(overlay)), addable(overlay)]
] + [("envoy-gateway", (FROM_ZERO,))]


def build(plane: ControlPlane, folder: Path, overlay: str, components: tuple[str, ...] = ()) -> str:
    """The overlay with components in the namespace of `restricted`, as a user's own kustomization has them."""
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": "manifests",
        "resources": [os.path.relpath(MANIFESTS / "overlays" / overlay, folder.resolve())],
        "components": [os.path.relpath(MANIFESTS / "components" / each, folder.resolve()) for each in components],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    return plane.kubectl("kustomize", str(folder))


def documents(text: str) -> list[Any]:
    return list(yaml.safe_load_all(text))


def admit(plane: ControlPlane, text: str, known: set[tuple[str, str]]) -> set[str]:
    """Have all of it admitted, nothing kept. The kinds in it that are not known."""
    found = documents(text)
    mine = [each for each in found if (each["apiVersion"], each["kind"]) in known]
    arguments = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-")
    answer = plane.kubectl(*arguments, stdin=yaml.safe_dump_all(mine))
    assert len(answer.splitlines()) == len(mine), answer
    return {each["kind"] for each in found if each not in mine}


def test_every_overlay_and_component_is_tested() -> None:
    assert {path.name for path in (MANIFESTS / "overlays").iterdir()} == OVERLAYS.keys()
    parts = {"plaintext", "gateway", "envoy-gateway", FROM_ZERO, "simulator", "tiered-kv", "vllm", "pd"}
    assert {path.name for path in (MANIFESTS / "components").iterdir()} == COMPONENTS.keys() | parts


@pytest.mark.usefixtures("restricted")
@pytest.mark.parametrize(("overlay", "added"), ADDED, ids=["+".join((overlay, *added)) for overlay, added in ADDED])
def test_it_is_admitted(
    plane: ControlPlane, served: set[tuple[str, str]], tmp_path: Path, overlay: str, added: tuple[str, ...]
) -> None:
    text = build(plane, tmp_path, overlay, added)
    assert "of-the-overlay" not in text
    unknown = set.union(OVERLAYS[overlay], *(COMPONENTS.get(each, set()) for each in added))
    assert admit(plane, text, served) == unknown


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_its_pods_are_restricted_and_fenced(plane: ControlPlane, restricted: str, tmp_path: Path, overlay: str) -> None:
    added = ("ha", "monitoring") if overlay in EVENTFUL else ("ha", "kv-events", "monitoring")
    found = documents(build(plane, tmp_path, overlay, added))
    policies = [each["spec"] for each in found if each["kind"] == "NetworkPolicy"]
    pods = [each["spec"]["template"] for each in found if each["kind"] in ("Deployment", "DaemonSet")]
    assert pods
    shares = [pod["spec"].pop("hostIPC", False) for pod in pods]
    assert any(shares) == (overlay in PRIVILEGED)
    for pod in pods:
        body = {"metadata": {"name": "pod", **pod["metadata"]}, "spec": pod["spec"]}
        plane.call("POST", f"/api/v1/namespaces/{restricted}/pods?dryRun=All", body)
        labels = pod["metadata"]["labels"].items()
        (fence,) = [each for each in policies if each["podSelector"]["matchLabels"].items() <= labels]
        every = [*pod["spec"].get("initContainers", ()), *pod["spec"]["containers"]]
        ports = {port["containerPort"] for each in every for port in each.get("ports", ())}
        let_in = {port["port"] for rule in fence["ingress"] for port in rule.get("ports", ())}
        assert let_in
        assert let_in <= ports


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_only_named_pods_of_named_namespaces_are_let_in(plane: ControlPlane, tmp_path: Path, overlay: str) -> None:
    found = documents(build(plane, tmp_path, overlay, ("monitoring",)))
    policies = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "NetworkPolicy"}
    rules = [(name, rule) for name, spec in policies.items() for rule in spec["ingress"]]
    # Clients come to Envoy from anywhere; that is what the port is for.
    assert [(name, rule["ports"]) for name, rule in rules if "from" not in rule] == (
        [("warmpath", [{"port": 8080}])] if "standalone" in overlay else []
    )
    peers = [peer for _, rule in rules for peer in rule.get("from", ())]
    assert peers
    for peer in peers:
        assert "ipBlock" in peer or peer["podSelector"]["matchLabels"]
        assert "namespaceSelector" not in peer or peer["namespaceSelector"]["matchLabels"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_model_servers_are_asked_for_nothing_but_the_api(plane: ControlPlane, tmp_path: Path, overlay: str) -> None:
    found = documents(build(plane, tmp_path, overlay))
    routes = [each["spec"]["rules"] for each in found if each["kind"] == "HTTPRoute"]
    assert len(routes) == ("standalone" not in overlay)
    paths = [match["path"] for rules in routes for rule in rules for match in rule["matches"]]
    assert all(each == {"type": "PathPrefix", "value": "/v1"} for each in paths)


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_fallbacks_are_named_only_to_gateways_that_walk_a_list(
    plane: ControlPlane, tmp_path: Path, overlay: str
) -> None:
    """Where a route leads to the InferencePool, the gateway takes one address, and none of a list."""
    found = documents(build(plane, tmp_path, overlay))
    backends = [
        backend["kind"]
        for each in found
        if each["kind"] == "HTTPRoute"
        for rule in each["spec"]["rules"]
        for backend in rule["backendRefs"]
        if "kind" in backend
    ]
    (picker,) = [each for each in found if (each["kind"], each["metadata"]["name"]) == ("Deployment", "warmpath")]
    said = [flag for flag in picker["spec"]["template"]["spec"]["containers"][0]["args"] if "fallbacks" in flag]
    assert said == ([] if "InferencePool" in backends else ["--fallbacks=2"])


@pytest.mark.parametrize("overlay", sorted(PLAINTEXT))
def test_a_certificate_for_plaintext_is_refused(plane: ControlPlane, tmp_path: Path, overlay: str) -> None:
    with pytest.raises(ApiFailed, match="test"):
        build(plane, tmp_path, overlay, ("tls",))


@pytest.mark.parametrize("servers", ["simulator", "vllm"])
def test_kv_events_are_published_listened_to_and_let_through(plane: ControlPlane, tmp_path: Path, servers: str) -> None:
    found = documents(build(plane, tmp_path, "envoy-gateway", (servers, "kv-events")))
    (llm,) = [each for each in found if each["kind"] == "Deployment" and each["metadata"]["name"] == "llm"]
    container = llm["spec"]["template"]["spec"]["containers"][0]
    flag = container["args"][-1].removeprefix("--kv-events-config=")
    published = kv_events_from(flag)
    ports = {int(at.rpartition(":")[2]) for at in (published.endpoint, published.replay_endpoint or "")}
    assert published.enable_kv_cache_events
    assert ports < {port["containerPort"] for port in container["ports"]}
    (config,) = [each["data"]["config.yaml"] for each in found if each["kind"] == "ConfigMap"]
    assert config == strategy_text("kv-aware")
    fences = {each["metadata"]["name"]: each["spec"] for each in found if each["kind"] == "NetworkPolicy"}
    for rules in (fences["warmpath"]["egress"], fences["llm"]["ingress"]):
        assert ports <= {port["port"] for rule in rules for port in rule["ports"]}


@pytest.fixture
def tiered(plane: ControlPlane, tmp_path: Path) -> dict[tuple[str, str], Any]:
    """The overlay `tiered-kv`, by kind and name."""
    return {(each["kind"], each["metadata"]["name"]): each for each in documents(build(plane, tmp_path, "tiered-kv"))}


def pods_of(made: dict[tuple[str, str], Any]) -> dict[str, Any]:
    running = ("Deployment", "DaemonSet")
    return {name: each["spec"]["template"]["spec"] for (kind, name), each in made.items() if kind in running}


def test_what_is_in_its_node_s_ipc_namespace_has_its_node_s_shared_memory(tiered: dict[tuple[str, str], Any]) -> None:
    """LMCache's server finds what a pod shares by its name there; a volume of the pod's own would hide it."""
    sharing = {name: pod for name, pod in pods_of(tiered).items() if pod.get("hostIPC")}
    assert sharing.keys() == {"llm", "lmcache"}
    for pod in sharing.values():
        mounts = [mount["mountPath"] for each in pod["containers"] for mount in each["volumeMounts"]]
        assert mounts
        assert not any(path.startswith("/dev") for path in mounts)


def test_blocks_have_one_name_everywhere(tiered: dict[tuple[str, str], Any]) -> None:
    pods = pods_of(tiered).values()
    flags = [flag.partition("=") for pod in pods for each in pod["containers"] for flag in each.get("args", ())]
    assert {value for flag, _, value in flags if flag in ("--block-size", "--chunk-size")} == {"64"}
    hashes = {value for flag, _, value in flags if flag in ("--prefix-caching-hash-algo", "--hash-algorithm")}
    assert hashes == {"sha256_cbor"}
    [connector] = [value for flag, _, value in flags if flag == "--kv-transfer-config"]
    extra = json.loads(connector)["kv_connector_extra_config"]
    assert extra["lmcache.mp.hash_algorithm"] == "sha256_cbor"
    assert extra["lmcache.mp.host"] == f"tcp://{tiered['Service', 'lmcache']['metadata']['name']}"
    assert extra["lmcache.mp.port"] == tiered["Service", "lmcache"]["spec"]["ports"][0]["port"]


def test_the_picker_asks_the_coordinator_where_it_is(tiered: dict[tuple[str, str], Any]) -> None:
    text = tiered["ConfigMap", "warmpath"]["data"]["config.yaml"]
    pipeline = load_text(text, clock=lambda: 0.0, random=Random(), where="")
    [precise] = [each for each in pipeline.plugins if isinstance(each, PrecisePrefixCache)]
    url = urlsplit(precise.lmcache.coordinator)
    assert [url.port] == [each["port"] for each in tiered["Service", url.hostname or ""]["spec"]["ports"]]


def test_l2_is_one_volume_for_all_nodes_and_swept(tiered: dict[tuple[str, str], Any], tmp_path: Path) -> None:
    claim = tiered["PersistentVolumeClaim", "lmcache-l2"]["spec"]
    assert claim["accessModes"] == ["ReadWriteMany"]
    pods = pods_of(tiered)
    (server,) = pods["lmcache"]["containers"]
    (adapter,) = [each.partition("=")[2] for each in server["args"] if each.startswith("--l2-adapter=")]
    mounts = {each["name"]: each["mountPath"] for each in server["volumeMounts"]}
    assert json.loads(adapter)["base_path"] == mounts["l2"]
    assert json.loads(adapter)["shared"]
    _, sweeper = pods["lmcache-coordinator"]["containers"]
    assert sweeper["args"] == [mounts["l2"], claim["resources"]["requests"]["storage"].removesuffix("Gi")]


def test_the_sweeper_removes_the_oldest_chunks_until_a_fifth_is_free(
    tiered: dict[tuple[str, str], Any], tmp_path: Path
) -> None:
    _, sweeper = pods_of(tiered)["lmcache-coordinator"]["containers"]
    volume = tmp_path / "volume"
    volume.mkdir()
    for number in range(19):
        with (volume / f"{number}.data").open("wb") as file:
            file.truncate(2**30 // 20)
        os.utime(volume / f"{number}.data", (1000 + number, 1000 + number))
    command = [sys.executable, *sweeper["command"][1:], str(volume), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        try:
            said = running.stdout.readline()
        finally:
            running.kill()
    assert said == "removed 3 of 19 chunks: the oldest\n"
    assert {int(file.stem) for file in volume.iterdir()} == set(range(3, 19))


@pytest.mark.parametrize("added", [("pd",), ("pd", "kv-events", "ha", "monitoring")], ids=["alone", "with-others"])
def test_each_role_has_a_deployment_and_who_decodes_a_sidecar(
    plane: ControlPlane, restricted: str, served: set[tuple[str, str]], tmp_path: Path, added: tuple[str, ...]
) -> None:
    text = build(plane, tmp_path, "envoy-gateway", added)
    assert admit(plane, text, served) == LEAN | (COMPONENTS["monitoring"] if "monitoring" in added else set())
    found = documents(text)
    servers = {
        each["metadata"]["name"]: each["spec"]
        for each in found
        if each["kind"] == "Deployment" and each["metadata"]["name"] != "warmpath"
    }
    assert servers.keys() == {"llm-decode", "llm-prefill"}
    pods = {name.removeprefix("llm-"): spec["template"] for name, spec in servers.items()}
    for role, pod in pods.items():
        body = {"metadata": {"name": role, **pod["metadata"]}, "spec": pod["spec"]}
        plane.call("POST", f"/api/v1/namespaces/{restricted}/pods?dryRun=All", body)
        labels = pod["metadata"]["labels"]
        assert labels == servers[f"llm-{role}"]["selector"]["matchLabels"] == {"app": "llm", ROLE_LABEL: role}
        endpoint = Endpoint(role, "10.0.0.1:8000", labels)
        stages: list[Stage] = ["decode", "prefill", "encode"]
        assert [stage for stage in stages if serves(endpoint, stage)] == [role]
    engines = {role: pod["spec"]["containers"][0] for role, pod in pods.items()}
    links = {role: json.loads(flag(engine, "--kv-transfer-config")) for role, engine in engines.items()}
    assert {role: link.pop("kv_role") for role, link in links.items()} == {
        "decode": "kv_consumer",
        "prefill": "kv_producer",
    }
    assert links["decode"] == links["prefill"]
    (pool,) = [each["spec"] for each in found if each["kind"] == "InferencePool"]
    asked = [port["number"] for port in pool["targetPorts"]]
    (sidecar,) = pods["decode"]["spec"]["initContainers"]
    settings = warmpath.commands["sidecar"].make_context("sidecar", sidecar["args"][1:]).params
    assert sidecar["args"][0] == "sidecar"
    assert [settings["port"]] == asked == [int(flag(engines["prefill"], "--port"))]
    assert settings["model_server_port"] == int(flag(engines["decode"], "--port"))
    for engine in engines.values():
        (port,) = [each["containerPort"] for each in engine["ports"] if each["name"] == "http"]
        assert (port, engine["readinessProbe"]["httpGet"]["port"]) == (int(flag(engine, "--port")), "http")
    (fence,) = [each["spec"] for each in found if (each["kind"], each["metadata"]["name"]) == ("NetworkPolicy", "llm")]
    assert {"from": [{"podSelector": {"matchLabels": {"app": "llm"}}}]} in fence["ingress"]


def flag(container: Any, name: str) -> str:
    """The value of a container's argument."""
    (found,) = [arg.removeprefix(f"{name}=") for arg in container["args"] if arg.startswith(f"{name}=")]
    return str(found)


def test_accounts_may_do_what_they_need_and_nothing_else(plane: ControlPlane, restricted: str, tmp_path: Path) -> None:
    found = documents(build(plane, tmp_path, "istio", ("monitoring",)))
    kinds = ("Role", "RoleBinding", "ClusterRole", "ClusterRoleBinding", "ServiceAccount")
    plane.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(each for each in found if each["kind"] in kinds))

    def may(account: str, verb: str, what: str, namespace: str = restricted) -> bool:
        try:
            who = f"system:serviceaccount:{restricted}:{account}"
            return plane.kubectl("auth", "can-i", verb, what, "-n", namespace, "--as", who).strip() == "yes"
        except ApiFailed:  # how `can-i` says no
            return False

    pools, objectives = "inferencepools.inference.networking.k8s.io", "inferenceobjectives.llm-d.ai"
    assert all(may("warmpath", "watch", each) for each in ("pods", pools, objectives))
    assert may("warmpath", "create", "tokenreviews.authentication.k8s.io")
    assert may("warmpath", "create", "subjectaccessreviews.authorization.k8s.io")
    assert may("warmpath-metrics-reader", "get", "/metrics")
    assert not may("warmpath", "watch", "pods", "default")
    assert not any(may("warmpath", "delete", each) for each in ("pods", pools))
    assert not any(may("warmpath", "get", each) for each in ("secrets", "configmaps", "/metrics"))
    assert not any(may("warmpath-metrics-reader", "get", each) for each in ("pods", "secrets", pools))


def test_alerts_lead_to_where_their_page_is(plane: ControlPlane, tmp_path: Path) -> None:
    page = (MANIFESTS.parent / "docs" / "alerts.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)
    build(plane, tmp_path, "istio", ("monitoring",))
    file = tmp_path / "kustomization.yaml"
    file.write_text(file.read_text() + shown)
    found = documents(plane.kubectl("kustomize", str(tmp_path)))
    assert "runbooks" not in str([each["metadata"]["name"] for each in found])
    (rule,) = (each for each in found if each["kind"] == "PrometheusRule")
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert alerts
    assert [each["annotations"]["runbook_url"] for each in alerts] == [
        f"https://git.example/warmpath/docs/alerts.md#{each['alert'].lower()}" for each in alerts
    ]


def test_every_subject_is_in_the_namespace_of_the_overlay(plane: ControlPlane, tmp_path: Path) -> None:
    found = documents(build(plane, tmp_path, "istio", ("monitoring",)))
    subjects = [subject for each in found for subject in each.get("subjects", ())]
    assert {each["namespace"] for each in subjects} == {"manifests"}
    assert len(subjects) == 3
