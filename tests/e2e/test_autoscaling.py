"""The component `autoscaling` with real KEDA and Prometheus: model servers from zero, up, and back to zero.

For a cluster of `hack/kind-up --keda`. Envoy sends to the address that the picker names, as gateways do that know
InferencePools, and not to one of those it knows.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import ROOT, Stack, put_into
from tests.support.kubernetes.kubectl import ClusterLoad, Kubectl, KubectlFailed, wait

NAMESPACE = "warmpath-e2e-scaling"
STANDALONE = ROOT / "manifests" / "overlays" / "kind-standalone"
TWO_EACH = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
featureGates: [flowControl]
plugins:
- type: expected-ttft
- type: max-score-picker
- type: concurrency-detector
  parameters: {maxConcurrency: 2}
schedulingProfiles:
- name: default
  plugins: [{pluginRef: expected-ttft}, {pluginRef: max-score-picker}]
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
  noEndpointRequestTTL: 4m
"""
MOST = 3
SCALED = [
    {"op": "replace", "path": f"/spec/{field}", "value": value}
    for field, value in {
        "minReplicaCount": 0, "maxReplicaCount": MOST, "pollingInterval": 1, "cooldownPeriod": 10,
    }.items()
]  # fmt: skip
ARGUMENTS = [
    {"op": "add", "path": "/spec/template/spec/containers/0/args/-", "value": each}
    for each in ("--flow-control", "--fallbacks=0")
]
REMOVED = "{{$patch: delete, apiVersion: {}, kind: {}, metadata: {{name: warmpath}}}}"


def by_address() -> str:
    """Envoy's configuration of `standalone`, with a cluster that knows no address but takes the one in the header."""
    content = json.loads((STANDALONE.parent / "standalone" / "envoy.json").read_text(encoding="utf-8"))
    (pool,) = [each for each in content["static_resources"]["clusters"] if each["name"].startswith("pool.")]
    for each in ("load_balancing_policy", "load_assignment", "dns_lookup_family", "dns_refresh_rate"):
        del pool[each]
    header = {"use_http_header": True, "http_header_name": "x-gateway-destination-endpoint"}
    pool |= {"type": "ORIGINAL_DST", "lb_policy": "CLUSTER_PROVIDED", "original_dst_lb_config": header}
    (retry,) = retries(content["static_resources"]["listeners"])
    # Nodes let requests through to a new pod a little after it is ready; there is no other to try meanwhile.
    retry |= {"num_retries": 20, "retry_back_off": {"base_interval": "0.25s", "max_interval": "1s"}}
    del retry["retry_host_predicate"]
    return json.dumps(content)


def retries(value: Any) -> list[dict[str, Any]]:
    """How routes in there ask again."""
    if isinstance(value, dict):
        found = [value["retry_policy"]] if "cluster" in value and "retry_policy" in value else []
        return found + [each for below in value.values() for each in retries(below)]
    return [each for below in value for each in retries(below)] if isinstance(value, list) else []


def patch(kind: str, operations: list[dict[str, Any]] | str) -> dict[str, Any]:
    return {
        "target": {"kind": kind, "name": "llm|warmpath" if kind != "Deployment" else "warmpath"},
        "patch": operations if isinstance(operations, str) else yaml.safe_dump(operations),
    }


@pytest.fixture(scope="module")
def scaled(clients: Kubectl, token: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """In a namespace of its own as long as these tests last, its picker read by the cluster's Prometheus."""
    try:
        clients("get", "customresourcedefinition", "scaledobjects.keda.sh")
    except KubectlFailed:
        pytest.skip("there is no KEDA in this cluster; hack/kind-up --keda makes one that has it")
    folder: Path = tmp_path_factory.mktemp("scaled")
    (folder / "envoy.json").write_text(by_address())
    (folder / "config.yaml").write_text(TWO_EACH)
    kubectl = put_into(
        NAMESPACE,
        STANDALONE,
        folder,
        ("monitoring", "autoscaling"),
        [
            patch("ScaledObject", SCALED),
            patch("Deployment", ARGUMENTS),
            # Nothing here knows these kinds, or the CPU of pods.
            patch("ServiceMonitor", REMOVED.format("monitoring.coreos.com/v1", "ServiceMonitor")),
            patch("HorizontalPodAutoscaler", REMOVED.format("autoscaling/v2", "HorizontalPodAutoscaler")),
        ],
        configMapGenerator=[
            {"name": "envoy", "behavior": "replace", "files": ["envoy.json"]},
            {"name": "warmpath", "behavior": "replace", "files": ["config.yaml"]},
        ],
        generatorOptions={"disableNameSuffixHash": True},
    )
    try:
        kubectl.rolled_out("warmpath")
        yield Stack(kubectl, (kubectl, "warmpath"), token)
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def left(stack: Stack) -> int:
    """Model servers, also those on their way in or out."""
    return len(stack.kubectl.get("pods", "-l", "app=llm")["items"])


def test_servers_come_from_zero_as_many_as_needed_and_go_again(
    scaled: Stack, load: Callable[[Stack], ClusterLoad]
) -> None:
    wait(lambda: left(scaled) == 0, "nobody asks, and no server is left")
    with scaled.admin() as admin, scaled.entered() as url:
        wait(lambda: not admin.pods(), "the picker knows of none")
        body = json.dumps({"model": "sim", "prompt": "Is anybody there?", "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=240) as answer:
                assert answer.headers["x-sim-pod"] in admin.pods()
        except urllib.error.HTTPError as error:
            pytest.fail(f"{error}: {error.read().decode()}")
        with load(scaled) as running:
            wait(lambda: len(admin.pods()) == MOST, "the pool is full, and gets all that it may have")
            running.until_answered(1)
        assert running.report.lost == []
    wait(lambda: left(scaled) == 0, "nobody asks any more, and no server is left")
