"""The chart makes the overlays' objects, one by one, and refuses values that it does not know."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from epp.configuration.loader import strategies, strategy_text
from tests.kubernetes.test_manifests import FROM_ZERO, MANIFESTS, OVERLAYS, PLAINTEXT, admit, build, documents
from tests.support.kubernetes.control_plane import ControlPlane
from tests.support.kubernetes.helm import CHART, HelmFailed, commands, helm, rendered

DOCS = (Path(__file__).parents[2] / "docs" / "kubernetes.md").read_text(encoding="utf-8")
SHOWN = [block for block in re.findall(r"```yaml\n(.*?)```", DOCS, re.DOTALL) if block.startswith("model:")]
NAMESPACE = "manifests"
NONE = {"servers": {"type": "none"}}
SIMULATED = {"servers": {"type": "simulator"}, "model": "sim", "replicas": 3}
SMALL = {"picker": {"resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}}}
KIND = {**SIMULATED, **SMALL, "gateway": {"createClass": True, "serviceType": "ClusterIP"}}
SIDECAR = {"type": "standalone", "resources": {"requests": {"cpu": "50m", "memory": "64Mi"}}}
VALUES: dict[str, dict[str, Any]] = {
    "agentgateway": {**NONE, "gateway": {"type": "agentgateway"}},
    "envoy-ai-gateway": {**NONE, "gateway": {"type": "envoy-ai-gateway"}},
    "envoy-gateway": NONE,
    "gke": {**NONE, "gateway": {"type": "gke"}},
    "istio": {**NONE, "gateway": {"type": "istio"}},
    "kind": KIND,
    "kind-kv-events": {**KIND, "strategy": "kv-aware"},
    "kind-pd": {**KIND, "roles": {"prefill": 1, "decode": 2}},
    "kind-standalone": {**SIMULATED, **SMALL, "gateway": SIDECAR},
    "standalone": {**NONE, "gateway": {"type": "standalone"}},
    "tiered-kv": {"strategy": "kv-aware", "tiers": {"l1GiB": 40, "l2GiB": 100}},
    "vllm-gpu": {},
}
"""Of the chart, that ask for each overlay."""
ADDED: dict[tuple[str, ...], dict[str, Any]] = {
    (): {},
    ("kv-events",): {"strategy": "kv-aware"},
    ("ha", "monitoring"): {"picker": {"replicas": 3}, "monitoring": True},
    ("pd",): {"servers": {"type": "vllm"}, "roles": {"prefill": 1, "decode": 3}},
    ("pd", "kv-events"): {
        "servers": {"type": "vllm"},
        "roles": {"prefill": 1, "decode": 3},
        "strategy": "kv-aware",
    },
    ("tls",): {"tls": "cert-manager"},
    ("ha", "autoscaling"): {
        "picker": {"replicas": 3},
        "replicas": 2,
        "autoscaling": {"pickers": 8, "servers": 16},
    },
}
"""That ask for components too."""
TO_SOME = {
    ("kv-events",): {"vllm-gpu", "kind-pd"},
    ("pd",): {"envoy-gateway"},
    ("pd", "kv-events"): {"envoy-gateway"},
    ("tls",): OVERLAYS.keys() - PLAINTEXT,
    ("ha", "autoscaling"): {"kind", "vllm-gpu"},
}
"""What is not added to every overlay: KV events, roles and scaling only where model servers are that lack them."""
SAME = [(overlay, added) for overlay in VALUES for added in ADDED if overlay in TO_SOME.get(added, VALUES)]
HASHED = re.compile(r"\benvoy-[0-9a-z]{10}\b")
CLUSTER_WIDE = ("ClusterRole", "ClusterRoleBinding")


def test_each_overlay_has_its_values() -> None:
    assert VALUES.keys() == OVERLAYS.keys()


@pytest.mark.parametrize(("overlay", "added"), SAME, ids=["+".join((overlay, *added)) for overlay, added in SAME])
def test_the_chart_makes_the_objects_of_the_overlay(
    plane: ControlPlane, tmp_path: Path, overlay: str, added: tuple[str, ...]
) -> None:
    expected = by_name(documents(build(plane, tmp_path, overlay, added)))
    made = by_name(rendered(merged(VALUES[overlay], ADDED[added]), namespace=NAMESPACE))
    assert made.keys() == expected.keys()
    for each, content in made.items():
        assert content == expected[each], each


def merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(values)
    for name, value in more.items():
        found[name] = merged(values.get(name, {}), value) if isinstance(value, dict) else value
    return found


def by_name(found: Iterable[Any]) -> dict[tuple[str, str], Any]:
    """Objects by kind and name, without what has to differ.

    Helm knows the namespace without it being written down. It lets no two releases have one object, so what belongs to
    no namespace is called after the release's. What is named for its content is by another hash.
    """
    objects = {}
    for each in json.loads(HASHED.sub("envoy-HASH", json.dumps(list(found)))):
        each["metadata"].pop("namespace", None)
        if each["kind"] in CLUSTER_WIDE:
            for at in (each["metadata"], *([each["roleRef"]] if "roleRef" in each else [])):
                at["name"] = at["name"].removesuffix(f"-{NAMESPACE}")
        objects[each["kind"], each["metadata"]["name"]] = each
    return objects


def test_two_releases_in_two_namespaces_have_no_object_in_common() -> None:
    def cluster_wide(namespace: str) -> set[tuple[str, str]]:
        made = rendered(merged(SIMULATED, ADDED["ha", "monitoring"]), namespace=namespace)
        return {(each["kind"], each["metadata"]["name"]) for each in made if each["kind"] in CLUSTER_WIDE}

    assert len(cluster_wide("one")) == 4
    assert not cluster_wide("one") & cluster_wide("two")


@pytest.mark.parametrize(
    "values",
    [
        *(pytest.param({"strategy": each}, id=each) for each in strategies()),
        pytest.param({"tiers": {"l1GiB": 1024}}, id="l1"),
        pytest.param({"tiers": {"l1GiB": 8, "l2GiB": 1}}, id="l1 and l2"),
        pytest.param({"tiers": {"l1GiB": 8, "l2Adapter": {"type": "fs", "base_path": "/tmp/x"}}}, id="adapter"),
        pytest.param({"gateway": {"type": "standalone"}, "picker": {"replicas": 2}}, id="standalone replicas"),
        *(pytest.param(yaml.safe_load(each), id="docs") for each in SHOWN),
    ],
)
def test_other_values_are_admitted(
    plane: ControlPlane, served: set[tuple[str, str]], restricted: str, values: dict[str, Any]
) -> None:
    text = yaml.safe_dump_all(made_in(restricted, values))
    assert admit(plane, text, served) <= OVERLAYS["vllm-gpu"]


def made_in(namespace: str, values: Mapping[str, Any]) -> list[Any]:
    made = rendered(values, namespace=namespace)
    for each in made:
        each["metadata"]["namespace"] = namespace
    return made


def test_values_are_shown() -> None:
    assert len(SHOWN) == 1
    assert by_name(rendered(yaml.safe_load(SHOWN[0])))["Deployment", "llm"]["spec"]["replicas"] == 4


def test_alerts_lead_to_where_their_page_is() -> None:
    base = "https://git.example/warmpath/docs/alerts.md"
    rule = by_name(rendered({"monitoring": True, "runbookUrl": base}))["PrometheusRule", "warmpath"]
    alerts = [each for group in rule["spec"]["groups"] for each in group["rules"]]
    assert [each["annotations"]["runbook_url"] for each in alerts] == [
        f"{base}#{each['alert'].lower()}" for each in alerts
    ]
    with pytest.raises(HelmFailed, match="runbookUrl"):
        rendered({"runbookUrl": f"{base}#warmpathdown"})


@pytest.mark.parametrize("strategy", strategies())
def test_a_strategy_is_in_the_configuration(strategy: str) -> None:
    made = by_name(rendered({"strategy": strategy}))
    assert made["ConfigMap", "warmpath"]["data"] == {"config.yaml": strategy_text(strategy)}


def test_a_configuration_of_ones_own_comes_from_a_file() -> None:
    file = CHART / "files" / "session.yaml"
    made = rendered({"strategy": "kv-aware"}, f"--set-file=picker.config={file}")
    assert by_name(made)["ConfigMap", "warmpath"]["data"] == {"config.yaml": file.read_text(encoding="utf-8")}
    assert "--kv-events-config=" in str(by_name(made)["Deployment", "llm"])


def test_an_l1_is_as_large_as_said_and_an_l2_may_be_left_out() -> None:
    made = by_name(rendered({"tiers": {"l1GiB": 1024}}))
    assert "lmcache-l2" not in json.dumps(list(made.values()))
    (server,) = made["DaemonSet", "lmcache"]["spec"]["template"]["spec"]["containers"]
    assert "--l1-size-gb=1024" in server["args"]
    assert not [each for each in server["args"] if "l2-adapter" in each]
    assert server["command"] == ["lmcache", "server"]
    assert server["resources"]["limits"]["memory"] == server["resources"]["requests"]["memory"] == "1032Gi"


def test_an_l2_is_a_volume_as_large_as_what_is_swept() -> None:
    made = by_name(rendered({"tiers": {"l1GiB": 1, "l2GiB": 7, "l2StorageClass": "files"}}))
    claim = made["PersistentVolumeClaim", "lmcache-l2"]["spec"]
    assert claim["storageClassName"] == "files"
    assert claim["resources"] == {"requests": {"storage": "7Gi"}}
    for kind, name in (("DaemonSet", "lmcache"), ("Deployment", "lmcache-coordinator")):
        pod = made[kind, name]["spec"]["template"]["spec"]
        assert {"name": "l2", "persistentVolumeClaim": {"claimName": "lmcache-l2"}} in pod["volumes"]
    _, sweeper = made["Deployment", "lmcache-coordinator"]["spec"]["template"]["spec"]["containers"]
    assert sweeper["args"] == ["/l2", "7"]


def test_an_adapter_that_is_said_is_instead_of_the_volume() -> None:
    said = {"type": "valkey", "startup_nodes": "redis:6379", "num_workers": 32}
    made = by_name(rendered({"tiers": {"l1GiB": 1, "l2Adapter": said}}))
    (server,) = made["DaemonSet", "lmcache"]["spec"]["template"]["spec"]["containers"]
    (adapter,) = [each.partition("=")[2] for each in server["args"] if each.startswith("--l2-adapter=")]
    assert json.loads(adapter) == {**said, "shared": True}
    assert ("PersistentVolumeClaim", "lmcache-l2") not in made
    assert "lmcache-l2" not in json.dumps(list(made.values()))


def test_images_and_arguments_are_those_that_are_said() -> None:
    digest = "@sha256:" + "0" * 64
    images = {"warmpath": "my.example:5000/w:1" + digest, "vllm": "v" + digest, "envoy": "e:2"}
    servers, picker = ["--tensor-parallel-size=2"], ["--flow-control"]
    values = {"images": images, "servers": {"args": servers}, "picker": {"args": picker}}
    made = by_name(rendered(values))
    containers = {
        name: made["Deployment", name]["spec"]["template"]["spec"]["containers"][0] for name in ("warmpath", "llm")
    }
    assert (containers["warmpath"]["image"], containers["llm"]["image"]) == (images["warmpath"], images["vllm"])
    assert (containers["warmpath"]["args"][-1:], containers["llm"]["args"][-1:]) == (picker, servers)
    proxy = made["EnvoyProxy", "inference"]["spec"]["provider"]["kubernetes"]["envoyDeployment"]["container"]
    assert proxy["image"] == "e:2"


@pytest.mark.parametrize(
    ("values", "error"),
    [
        ("{modle: m}", "at '': additional properties 'modle' not allowed"),
        ("{model: 3}", "at '/model': got number, want string"),
        ("{model: null}", "at '': missing property 'model'"),
        ("{model: 'a b'}", 'model: expected a name such as Qwen/Qwen3-8B, got "a b"'),
        ("{model: --port}", 'model: expected a name such as Qwen/Qwen3-8B, got "--port"'),
        ("{replicas: -1}", "at '/replicas': minimum: got -1, want 0"),
        ("{replicas: many}", "at '/replicas': got string, want integer"),
        ("{strategy: prefixaware}", "at '/strategy': value must be one of 'prefix-aware', 'kv-aware', 'session'"),
        ("{gateway: istio}", "at '/gateway': got string, want object"),
        ("{gateway: {type: envoy}}", "at '/gateway/type': value must be one of 'envoy-gateway', 'envoy-ai-gateway'"),
        ("{gateway: {type: gke, proxyRanges: [all]}}", "gateway.proxyRanges: expected ranges such as 10.129.0.0/23"),
        ("{gateway: {type: istio, createClass: true}}", "gateway.createClass: only the class of envoy-gateway is made"),
        ("{gateway: {type: istio, serviceType: ClusterIP}}", "gateway.serviceType: only envoy-gateway is told"),
        ("{gateway: {type: standalone, className: eg}}", "gateway.className: standalone has no Gateway"),
        ("{tiers: {l1GiB: 40Gi}}", "at '/tiers/l1GiB': got string, want integer"),
        ("{tiers: {l2GiB: 1}}", "tiers.l2GiB: L2 is reached through L1; expected tiers.l1GiB too"),
        ("{tiers: {l1GiB: 1}, servers: {type: simulator}}", "tiers.l1GiB: LMCache stands behind vLLM"),
        ("{roles: {prefill: 1}}", "roles: expected pods for both roles, or for none, got prefill 1 and decode 0"),
        ("{roles: {prefill: 1, decode: 1}, servers: {type: none}}", "roles: no model servers are made that could have"),
        ("{roles: {prefill: 1, decode: 1}, tiers: {l1GiB: 1}}", "roles: KV goes from pod to pod over NIXL"),
        ("{tls: acme}", "at '/tls': value must be one of 'self-signed', 'secret', 'cert-manager'"),
        ("{tls: secret}", "tls: with envoy-gateway the picker is asked in plaintext, and shows no certificate"),
        ("{autoscaling: {pickers: 2}, picker: {replicas: 3}}", "autoscaling.pickers: expected at least picker."),
        ("{autoscaling: {servers: 1}}", "autoscaling.servers: expected at least replicas, which is 2, got 1"),
        ("{autoscaling: {servers: 4}, replicas: 0}", "expected --flow-control among picker.args, or replicas 1"),
        ("{autoscaling: {servers: 4}, servers: {type: none}}", "autoscaling.servers: no model servers are made"),
        ("{autoscaling: {servers: 4}, roles: {prefill: 1, decode: 1}}", "autoscaling.servers: what a role needs"),
        ("{autoscaling: {servers: 4, prometheus: here}}", "autoscaling.prometheus: expected a URL such as http://"),
        ("{autoscaling: {max: 4}}", "at '/autoscaling': additional properties 'max' not allowed"),
        ("{servers: {args: --x}}", "at '/servers/args': got string, want array"),
        ("{images: {vlm: v}}", "at '/images': additional properties 'vlm' not allowed"),
        ("{images: {vllm: 'a b'}}", "images.vllm: expected an image such as registry.example/vllm@sha256:"),
        ("{images: {vllm: 'r@sha256:12'}}", "images.vllm: expected an image such as"),
        ("{tiers: {l1GiB: 1, l2GiB: 1, l2Adapter: {type: s3}}}", "tiers.l2Adapter: it is instead of the volume"),
        ("{tiers: {l1GiB: 1, l2Adapter: {host: r}}}", "tiers.l2Adapter.type: expected an adapter of LMCache"),
        ("{tiers: {l2Adapter: {type: s3}}}", "L2 is reached through L1"),
        ("{tiers: {l1GiB: 1, l2StorageClass: files}}", "tiers.l2StorageClass: there is no volume"),
    ],
)
def test_a_wrong_value_is_refused_with_a_sentence(values: str, error: str) -> None:
    with pytest.raises(HelmFailed) as refused:
        rendered(yaml.safe_load(values))
    assert error in str(refused.value)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"servers": {"type": "none"}}, ["rollout status --timeout=30m deployment/warmpath\n", "127.0.0.1:8080/v1"]),
        (
            {"picker": {"replicas": 2}},
            ["create secret generic warmpath-replicas", "deployment/warmpath deployment/llm"],
        ),
        ({"roles": {"prefill": 1, "decode": 1}}, ["deployment/llm-prefill deployment/llm-decode\n"]),
        ({"tiers": {"l1GiB": 1, "l2GiB": 1}}, ["get persistentvolumeclaim lmcache-l2", '"model": "Qwen/Qwen3-8B"']),
    ],
)
def test_the_notes_tell_the_next_steps(plane: ControlPlane, values: dict[str, Any], expected: list[str]) -> None:
    """Of `standalone`, whose kinds this API server knows; those for Envoy Gateway run in tests/e2e."""
    dry = ("install", "warmpath", str(CHART), "--dry-run=client", "--namespace", "other")
    said = helm(*dry, values={**values, "gateway": {"type": "standalone"}}, kubeconfig=plane.kubeconfig())
    steps = commands(said)
    assert [each for each in expected if each not in steps] == []
    assert steps.count("kubectl") == steps.count("kubectl -n other")
    assert ("secret" in steps) == any("secret" in each for each in expected)


def test_a_certificate_of_ones_own_is_taken_and_none_is_asked_for() -> None:
    made = by_name(rendered({"tls": "secret", "gateway": {"type": "istio"}}))
    pod = made["Deployment", "warmpath"]["spec"]["template"]["spec"]
    assert {"name": "certs", "secret": {"secretName": "warmpath-tls"}} in pod["volumes"]
    assert "--cert-path=/certs" in pod["containers"][0]["args"]
    assert not [kind for kind, _ in made if kind in ("Issuer", "Certificate")]


def test_model_servers_are_scaled_from_zero_where_requests_wait_in_the_picker() -> None:
    flow = {"picker": {"args": ["--flow-control"]}, "gateway": {"type": "istio"}}
    values = {"replicas": 0, "autoscaling": {"servers": 4}, **flow}
    made = by_name(rendered(values))
    scaled = made["ScaledObject", "llm"]["spec"]
    assert (scaled["minReplicaCount"], scaled["maxReplicaCount"]) == (0, 4)
    assert "replicas" not in made["Deployment", "llm"]["spec"]
    assert made["Deployment", "warmpath"]["spec"]["replicas"] == 1
    assert ("HorizontalPodAutoscaler", "warmpath") not in made


def test_from_zero_envoy_gateway_has_an_endpoint_that_always_is() -> None:
    zero = {"replicas": 0, "autoscaling": {"servers": 4}, "picker": {"args": ["--flow-control"]}}
    expected = documents((MANIFESTS / "components" / FROM_ZERO / "endpointslice.yaml").read_text(encoding="utf-8"))
    assert [each for each in rendered(zero) if each["kind"] == "EndpointSlice"] == expected
    assert "EndpointSlice" not in {each["kind"] for each in rendered({})}


def test_definitions_come_with_it() -> None:
    made = rendered({}, "--include-crds")
    names = {each["metadata"]["name"] for each in made if each["kind"] == "CustomResourceDefinition"}
    assert names == {
        "inferencepools.inference.networking.k8s.io",
        "inferenceobjectives.llm-d.ai",
        "inferencemodelrewrites.llm-d.ai",
    }
