"""The overlay `istio` behind a real Istio, and GIE's conformance suite of gateways with our picker.

For a cluster of `hack/kind-up --istio`; of the other files those tests that have it for a stack run there, too.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import ROOT, Stack
from tests.e2e.test_requests import ask
from tests.support.kubernetes.kubectl import Kubectl, wait

SUITE = "warmpath-e2e-suite"
IMAGE = "localhost/warmpath/gateway-conformance:local"
PICKERS = "inference-conformance-app-backend"
"""The namespace in which the suite has its pickers."""
NAMES = ("primary", "secondary", "dp", "appprotocol-http", "appprotocol-h2c")
RESULT = re.compile(r"^    --- (PASS|FAIL|SKIP): TestConformance/(\w+) ", re.MULTILINE)
ROW = re.compile(r"^\| `(\w+)` \| (passes|fails)", re.MULTILINE)


def test_each_request_is_served_by_the_pod_that_was_picked(istio: Stack) -> None:
    with istio.entered() as url, istio.admin() as admin:
        for number in range(30):
            served, _ = ask(url, f"Request {number}")
            assert admin.last_decision()["endpoint"].rpartition("/")[2] == served


def test_fallbacks_are_taken(istio: Stack) -> None:
    arguments = istio.kubectl.get("deployment", "warmpath")["spec"]["template"]["spec"]["containers"][0]["args"]
    try:
        put_arguments(istio, [*arguments, "--fallbacks=2"])
        with istio.entered() as url, istio.admin() as admin:
            for number in range(10):
                served, _ = ask(url, f"Request {number}")
                decision = admin.last_decision()
                assert decision["endpoint"].rpartition("/")[2] == served
                assert len(decision["fallbacks"]) == 2
    finally:
        put_arguments(istio, arguments)


def put_arguments(stack: Stack, arguments: list[str]) -> None:
    """Return when one picker is left, which has these."""
    patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": arguments}]
    stack.kubectl("patch", "deployment", "warmpath", "--type=json", "--patch", json.dumps(patch))
    stack.kubectl.rolled_out("warmpath")
    wait(lambda: len(stack.kubectl.get("pods", "-l", "app=warmpath")["items"]) == 1, "the old picker goes")


@pytest.fixture
def suite(istio: Stack) -> Iterator[Kubectl]:
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


def test_the_conformance_suite_says_what_the_page_says(suite: Kubectl) -> None:
    page = (ROOT / "docs" / "kubernetes.md").read_text(encoding="utf-8")
    expected = {name: result == "passes" for name, result in ROW.findall(page)}
    container = {"name": "suite", "image": IMAGE, "args": ["-test.v", "-gateway-class=istio"]}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "suite"}}
    spec = {"restartPolicy": "Never", "containers": [container]}
    suite("apply", "-f", "-", stdin=yaml.safe_dump({**pod, "spec": spec}))
    wait(lambda: PICKERS in suite("get", "namespaces", "-o", "name"), "the suite makes its namespaces")
    trusted = [trust(f"{each}-endpoint-picker-svc") for each in NAMES]
    Kubectl(PICKERS)("apply", "-f", "-", stdin=yaml.safe_dump_all(trusted))
    ended = lambda: suite.get("pod", "suite")["status"]["phase"] in ("Succeeded", "Failed")  # noqa: E731
    wait(ended, "the suite ends", timeout=3600)
    said = suite("logs", "suite")
    results = {name: result == "PASS" for result, name in RESULT.findall(said)}
    assert results == expected, "\n".join(line for line in said.splitlines() if "not ready yet" not in line)[-20_000:]


def trust(service: str) -> Any:
    """As in the overlay: the certificates of these pickers are their own."""
    (rule,) = yaml.safe_load_all((ROOT / "manifests/overlays/istio/destinationrule.yaml").read_text(encoding="utf-8"))
    return {**rule, "metadata": {"name": service}, "spec": {**rule["spec"], "host": service}}
