"""A real cluster with a real gateway: the one KUBECONFIG names, with Envoy Gateway and our image in it.

`hack/test e2e` brings one and runs this; `pytest -m e2e tests/e2e` takes any. What README's commands make stays in the
namespace `default`; all else is in namespaces that begin with `warmpath-e2e`.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.support.kubernetes.kubectl import LOAD, ClusterLoad, Kubectl, KubectlFailed, wait
from tests.support.kubernetes.network_policies import enforced
from tooling.laptop.ports import free_ports

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SUPPORT = ROOT / "tests" / "support"
CLIENTS = "warmpath-e2e"
STANDALONE = "warmpath-e2e-standalone"
ISTIO = "warmpath-e2e-istio"
AI_GATEWAY = "warmpath-e2e-ai-gateway"
OWNER = "gateway.envoyproxy.io/owning-gateway"
"""How the labels begin by which Envoy Gateway tells whose Envoy it is."""
ASK = """
import sys, urllib.request
body = b'{"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": "Anybody?"}]}'
ask = urllib.request.Request(sys.argv[1], body, {"content-type": "application/json"})
print(urllib.request.urlopen(ask, timeout=5).read().decode())
"""
COMMANDS = re.compile(r"<!-- cluster -->\n```bash\n(.*?)```", re.DOTALL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(HERE):
            item.add_marker(pytest.mark.e2e)


@dataclass(frozen=True)
class Admin:
    """A picker's admin server."""

    url: str
    token: str

    def page(self, path: str) -> str:
        request = urllib.request.Request(self.url + path, headers={"authorization": f"Bearer {self.token}"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            text: str = answer.read().decode()
            return text

    def pods(self) -> set[str]:
        """Those it picks from."""
        pools = json.loads(self.page("/endpoints"))["pools"]
        return {each["name"].rpartition("/")[2] for pool in pools for each in pool["endpoints"]}

    def samples(self, name: str) -> list[Sample]:
        """Of one metric, all that there are."""
        families = text_string_to_metric_families(self.page("/metrics"))
        return [sample for family in families for sample in family.samples if sample.name == name]

    def decisions(self, limit: int) -> list[Any]:
        """The last that it made, so many at most."""
        found: list[Any] = json.loads(self.page(f"/decisions?limit={limit}"))["decisions"]
        return found

    def last_decision(self) -> Any:
        (decision,) = self.decisions(1)
        return decision


@dataclass(frozen=True)
class Stack:
    """One way to run it."""

    kubectl: Kubectl
    gateway: tuple[Kubectl, str]
    """Where clients ask: the namespace and name of a Service, port 80."""
    token: str
    """Of an account that may read what pickers show."""

    @contextmanager
    def entered(self) -> Iterator[str]:
        """Its URL from this machine."""
        namespace, service = self.gateway
        with namespace.forwarded(f"service/{service}", 80) as url:
            yield url

    @property
    def url(self) -> str:
        """Its URL from within the cluster."""
        namespace, service = self.gateway
        return f"http://{service}.{namespace.namespace}"

    @contextmanager
    def admin(self) -> Iterator[Admin]:
        """That of the one picker."""
        (pod,) = self.kubectl.pods("warmpath")
        with self.kubectl.forwarded(f"pod/{pod}", 9090) as url:
            yield Admin(url, self.token)

    @property
    def arguments(self) -> list[str]:
        """Of the pickers."""
        containers = self.kubectl.get("deployment", "warmpath")["spec"]["template"]["spec"]["containers"]
        (found,) = [each["args"] for each in containers if each["name"] == "warmpath"]
        return list(found)

    @contextmanager
    def with_arguments(self, *more: str) -> Iterator[None]:
        """One picker that has these, too, from entering until leaving."""
        before = self.arguments
        try:
            self._put_arguments([*before, *more])
            yield
        finally:
            self._put_arguments(before)

    def _put_arguments(self, arguments: list[str]) -> None:
        patch = [{"op": "replace", "path": "/spec/template/spec/containers/0/args", "value": arguments}]
        self.kubectl("patch", "deployment", "warmpath", "--type=json", "--patch", json.dumps(patch))
        self.replaced()

    def replaced(self) -> None:
        """Return when the one picker is the new one, and the old one, which serves while it goes, is no more."""
        self.kubectl.rolled_out("warmpath")
        wait(lambda: len(self.kubectl.get("pods", "-l", "app=warmpath")["items"]) == 1, "the old picker goes")

    def configured(self, admin: Admin, as_wanted: Callable[[str], bool]) -> None:
        """Return when the picker has taken such a configuration from its ConfigMap."""
        # Kubelets look after a ConfigMap once a minute or so, and whenever something of its pod changes.
        self.kubectl("annotate", "--overwrite", "pod", "-l", "app=warmpath", f"changed={time.monotonic_ns()}")
        wait(lambda: as_wanted(admin.page("/config")), "the picker has its new configuration")


@pytest.fixture(scope="session")
def clients() -> Kubectl:
    """The namespace of the pod `client`, from which load comes."""
    kubectl = Kubectl(CLIENTS)
    files = {key: (SUPPORT / path).read_text(encoding="utf-8") for key, path in LOAD.items()}
    documents: list[Any] = list(yaml.safe_load_all((HERE / "client.yaml").read_text(encoding="utf-8")))
    (config,) = (each for each in documents if each["kind"] == "ConfigMap")
    config["data"] = files
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))
    kubectl("wait", "--timeout=120s", "--for=condition=Ready", "pod/client")
    return kubectl


@pytest.fixture(scope="session")
def fenced(clients: Kubectl) -> bool:
    """Whether the cluster's network enforces NetworkPolicies."""
    return enforced(clients)


@pytest.fixture(scope="session")
def token(clients: Kubectl) -> str:
    return clients("create", "token", "reader", "--duration=2h").strip()


@pytest.fixture(scope="session")
def commands() -> tuple[str, str]:
    """README's commands for a cluster, and what they printed when they were run."""
    (text,) = COMMANDS.findall((ROOT / "README.md").read_text(encoding="utf-8"))
    ran = text.replace("8080", str(free_ports(1)[0]))
    with tempfile.TemporaryFile("w+") as output:
        shell = ["bash", "-euo", "pipefail", "-c", ran]
        process = subprocess.Popen(shell, cwd=ROOT, stdout=output, stderr=output, start_new_session=True)
        try:
            status = process.wait(600)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
        output.seek(0)
        printed = output.read()
    assert status == 0, f"{ran}\n{printed}"
    return text, printed


def gateway_of(namespace: str) -> tuple[Kubectl, str]:
    """The Service of the Envoy that Envoy Gateway runs for the Gateway there: its namespace and name."""
    gateways = Kubectl("envoy-gateway-system")
    (service,) = gateways.get("services", "-l", f"{OWNER}-name=inference,{OWNER}-namespace={namespace}")["items"]
    return gateways, service["metadata"]["name"]


def put_into(
    namespace: str,
    overlay: Path,
    folder: Path,
    components: Sequence[str] = (),
    patches: Sequence[Any] = (),
    **more: Any,
) -> Kubectl:
    """Apply an overlay with `components` in a namespace of its own, as docs/kubernetes.md says; `folder` is for the
    kustomization, which gets `patches` and whatever `more` there is.
    """
    kubectl = Kubectl(namespace)
    content = {
        "apiVersion": "kustomize.config.k8s.io/v1beta1",
        "kind": "Kustomization",
        "namespace": namespace,
        "resources": [os.path.relpath(overlay, folder.resolve())],
        "components": [
            os.path.relpath(ROOT / "manifests" / "components" / each, folder.resolve()) for each in components
        ],
        "patches": [
            {
                "target": {"kind": "ClusterRoleBinding", "name": "warmpath-metrics-auth"},
                "patch": f"- {{op: replace, path: /metadata/name, value: warmpath-metrics-auth-{namespace}}}",
            },
            *patches,
        ],
        **more,
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    made = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(made))
    kubectl("apply", "-k", str(folder))
    return kubectl


def entrance(clients: Kubectl, stack: Stack) -> Stack:
    """The same, once clients in the cluster get an answer.

    Nodes learn of a new Service some time after its pods are ready. What is asked there before leaves the cluster, and
    whoever answers outside may keep the connection.
    """

    def answers() -> bool:
        with suppress(KubectlFailed):
            return '"usage"' in clients("exec", "client", "--", "python", "-c", ASK, stack.url + "/v1/chat/completions")
        return False

    wait(answers, f"{stack.url} answers")
    return stack


@pytest.fixture(scope="session")
def kind(commands: tuple[str, str], clients: Kubectl, token: str) -> Stack:
    """The overlay `kind`, as README's commands made it."""
    return entrance(clients, Stack(Kubectl("default"), gateway_of("default"), token))


@pytest.fixture(scope="session")
def standalone(tmp_path_factory: pytest.TempPathFactory, clients: Kubectl, token: str) -> Stack:
    """The overlay `kind-standalone` in a namespace of its own."""
    overlay = ROOT / "manifests" / "overlays" / "kind-standalone"
    kubectl = put_into(STANDALONE, overlay, tmp_path_factory.mktemp("standalone"))
    kubectl.rolled_out("warmpath", "llm")
    return entrance(clients, Stack(kubectl, (kubectl, "warmpath"), token))


def needed(clients: Kubectl, definition: str, made_by: str) -> None:
    """Skip what needs this definition of custom resources, where it is not in the cluster."""
    try:
        clients("get", "customresourcedefinition", definition)
    except KubectlFailed:
        pytest.skip(f"the cluster has no {definition}; {made_by} makes one that has it")
    subprocess.run([ROOT / "hack" / "crds"], check=True, capture_output=True)


def simulated(overlay: str, namespace: str, folder: Path, *patches: Any) -> Kubectl:
    """The overlay with simulated pods in a namespace of its own, once its pods are ready."""
    small = [{"op": "replace", "path": "/spec/template/spec/containers/0/resources/requests", "value": {"cpu": "100m"}}]
    patch = {"target": {"kind": "Deployment", "name": "warmpath"}, "patch": yaml.safe_dump(small)}
    kubectl = put_into(namespace, ROOT / "manifests" / "overlays" / overlay, folder, ("simulator",), [patch, *patches])
    kubectl.rolled_out("warmpath", "llm")
    return kubectl


@pytest.fixture(scope="session")
def istio(tmp_path_factory: pytest.TempPathFactory, clients: Kubectl, token: str) -> Iterator[Stack]:
    """The overlay `istio`, where Istio is in the cluster."""
    needed(clients, "destinationrules.networking.istio.io", "hack/kind-up --istio")
    try:
        kubectl = simulated("istio", ISTIO, tmp_path_factory.mktemp("istio"))
        kubectl.rolled_out("inference-istio")
        yield entrance(clients, Stack(kubectl, (kubectl, "inference-istio"), token))
    finally:
        clients("delete", "namespace", ISTIO)


@pytest.fixture(scope="session")
def ai_gateway(tmp_path_factory: pytest.TempPathFactory, clients: Kubectl, token: str) -> Iterator[Stack]:
    """The overlay `envoy-ai-gateway`, where Envoy AI Gateway is in the cluster."""
    needed(clients, "aigatewayroutes.aigateway.envoyproxy.io", "hack/kind-up --ai-gateway")
    of_the_cluster = [{"op": "replace", "path": "/spec/gatewayClassName", "value": "envoy-ai-gateway"}]
    patch = {"target": {"kind": "Gateway", "name": "inference"}, "patch": yaml.safe_dump(of_the_cluster)}
    try:
        kubectl = simulated("envoy-ai-gateway", AI_GATEWAY, tmp_path_factory.mktemp("ai_gateway"), patch)
        kubectl("wait", "--timeout=180s", "--for=condition=Programmed", "gateway/inference")
        yield entrance(clients, Stack(kubectl, gateway_of(AI_GATEWAY), token))
    finally:
        clients("delete", "namespace", AI_GATEWAY)


@pytest.fixture(params=["kind", "standalone", "istio", "ai_gateway"])
def stack(request: pytest.FixtureRequest) -> Stack:
    found: Stack = request.getfixturevalue(request.param)
    return found


@pytest.fixture
def load(clients: Kubectl) -> Callable[[Stack], ClusterLoad]:
    return lambda stack: ClusterLoad(clients, "client", stack.url)
