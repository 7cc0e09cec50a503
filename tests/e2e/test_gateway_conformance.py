"""GIE's conformance suite of gateways with our picker, behind each gateway in the cluster that knows InferencePools."""

import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import ROOT, Stack
from tests.support.kubernetes.kubectl import Kubectl, wait

SUITE = "warmpath-e2e-suite"
IMAGE = "localhost/warmpath/gateway-conformance:local"
GATEWAYS = "inference-conformance-infra"
"""The namespace in which the suite has its Gateways."""
PICKERS = "inference-conformance-app-backend"
"""The namespace in which the suite has its pickers."""
NAMES = ("primary", "secondary", "dp", "appprotocol-http", "appprotocol-h2c")
RESULT = re.compile(r"^    --- (PASS|FAIL|SKIP): TestConformance/(\w+) ", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (passes|fails)[^|]* \| (passes|fails)", re.MULTILINE)
COLUMNS = {"istio": ("istio", 1), "ai_gateway": ("envoy-ai-gateway", 2)}
"""The class of Gateways, and where docs/kubernetes.md has its results."""


@pytest.fixture
def suite(clients: Kubectl) -> Iterator[Kubectl]:
    """A namespace whose default account may do what the suite does."""
    kubectl = Kubectl(SUITE)
    subject = {"kind": "ServiceAccount", "name": "default", "namespace": SUITE}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"}
    binding = {"kind": "ClusterRoleBinding", "roleRef": role, "subjects": [subject]}
    documents = [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SUITE}},
        {"apiVersion": "rbac.authorization.k8s.io/v1", "metadata": {"name": SUITE}, **binding},
    ]
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
    try:
        yield kubectl
    finally:
        kubectl("delete", "clusterrolebinding", SUITE)
        kubectl("delete", "namespace", SUITE)


@pytest.mark.parametrize("gateway", COLUMNS)
def test_the_conformance_suite_says_what_the_page_says(
    gateway: str, request: pytest.FixtureRequest, suite: Kubectl
) -> None:
    stack: Stack = request.getfixturevalue(gateway)
    name, column = COLUMNS[gateway]
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    expected = {row[0]: row[column] == "passes" for row in ROW.findall(page)}
    suite("apply", "-f", "-", stdin=yaml.safe_dump(pod("suite", IMAGE, args=["-test.v", f"-gateway-class={name}"])))
    wait(lambda: PICKERS in suite("get", "namespaces", "-o", "name"), "the suite makes its namespaces")
    if gateway == "istio":
        trusted = [trust(f"{each}-endpoint-picker-svc") for each in NAMES]
        Kubectl(PICKERS)("apply", "-f", "-", stdin=yaml.safe_dump_all(trusted))
    else:  # the suite waits for pods where its Gateways are, and this one's are elsewhere
        image = stack.kubectl.get("deployment", "llm")["spec"]["template"]["spec"]["containers"][0]["image"]
        Kubectl(GATEWAYS)("apply", "-f", "-", stdin=yaml.safe_dump(pod("filler", image, command=["sleep", "infinity"])))
    ended = lambda: suite.get("pod", "suite")["status"]["phase"] in ("Succeeded", "Failed")  # noqa: E731
    wait(ended, "the suite ends", timeout=5400)  # each request that should fail there is asked for five minutes
    said = suite("logs", "suite")
    results = {name: result == "PASS" for result, name in RESULT.findall(said)}
    assert results == expected, "\n".join(line for line in said.splitlines() if "not ready yet" not in line)[-20_000:]


def pod(name: str, image: str, **container: Any) -> dict[str, Any]:
    spec = {"restartPolicy": "Never", "containers": [{"name": name, "image": image, **container}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


def trust(service: str) -> Any:
    """As in the overlay: the certificates of these pickers are their own."""
    (rule,) = yaml.safe_load_all((ROOT / "manifests/overlays/istio/destinationrule.yaml").read_text(encoding="utf-8"))
    return {**rule, "metadata": {"name": service}, "spec": {**rule["spec"], "host": service}}
