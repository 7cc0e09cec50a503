"""What the pods may do: rights at the API server, files, the network."""

import time
import urllib.error
import urllib.request

import pytest

from tests.e2e.conftest import Stack
from tests.support.kubernetes.kubectl import Kubectl, KubectlFailed
from tests.support.kubernetes.network_policies import SOON, reaches

API = """
import os, ssl, sys, urllib.error, urllib.request
at = "/var/run/secrets/kubernetes.io/serviceaccount/"
# By address, as the picker does: it may not ask the cluster's DNS.
request = urllib.request.Request("https://" + os.environ["KUBERNETES_SERVICE_HOST"] + sys.argv[1])
request.add_header("authorization", "Bearer " + open(at + "token").read())
try:
    print(urllib.request.urlopen(request, context=ssl.create_default_context(cafile=at + "ca.crt")).status)
except urllib.error.HTTPError as error:
    print(error.code)
"""

REFUSED = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 80), 20)
except TimeoutError:
    print("silent")
except OSError:
    print("refused")
else:
    print("answered")
"""


def inside(stack: Stack, program: str, *arguments: str) -> str:
    """What a Python program prints in the picker's container."""
    (pod,) = stack.kubectl.pods("warmpath")
    return stack.kubectl("exec", pod, "-c", "warmpath", "--", "python", "-c", program, *arguments).strip()


def test_the_picker_reads_its_pods_and_nothing_else(stack: Stack) -> None:
    namespace = stack.kubectl.namespace
    expected = {
        f"/api/v1/namespaces/{namespace}/pods": "200",
        f"/api/v1/namespaces/{namespace}/secrets": "403",
        f"/api/v1/namespaces/{namespace}/configmaps": "403",
        "/api/v1/namespaces/kube-system/pods": "403",
        "/api/v1/nodes": "403",
    }
    assert {path: inside(stack, API, path) for path in expected} == expected


def test_no_pod_is_root_or_writes_its_image(stack: Stack) -> None:
    for app in ("warmpath", "llm"):
        for pod in stack.kubectl.pods(app):
            for container in stack.kubectl.get("pod", pod)["spec"]["containers"]:
                into = ("exec", pod, "-c", container["name"], "--")
                assert stack.kubectl(*into, "id", "-u").strip() == "65532"
                with pytest.raises(KubectlFailed, match="Read-only file system"):
                    stack.kubectl(*into, "touch", "/opt/written")


def test_only_gateways_reach_picker_and_servers(stack: Stack, clients: Kubectl, fenced: bool) -> None:
    policies = {each["metadata"]["name"] for each in stack.kubectl.get("networkpolicies")["items"]}
    assert policies == {"warmpath", "llm"}
    if not fenced:
        pytest.skip(
            "this cluster's network enforces no NetworkPolicy: those of the overlay are admitted, no more is known"
        )
    addresses = [(address, 9002) for address in stack.kubectl.pods("warmpath").values()]
    addresses += [(address, 8000) for address in stack.kubectl.pods("llm").values()]
    assert [each for each in addresses if reaches(clients, *each)] == []


def test_a_pod_that_says_it_is_a_gateway_is_let_in_nowhere(stack: Stack, clients: Kubectl, fenced: bool) -> None:
    if not fenced:
        pytest.skip("this cluster's network enforces no NetworkPolicy")
    labels = ("gateway.networking.k8s.io/gateway-name", "gateway.envoyproxy.io/owning-gateway-name")
    clients("label", "pod", "client", *(f"{each}=inference" for each in labels))
    try:
        end = time.monotonic() + SOON  # a network has seen the labels by then
        while time.monotonic() < end:
            addresses = [(address, 9002) for address in stack.kubectl.pods("warmpath").values()]
            addresses += [(address, 8000) for address in stack.kubectl.pods("llm").values()]
            assert [each for each in addresses if reaches(clients, *each)] == []
    finally:
        clients("label", "pod", "client", *(f"{each}-" for each in labels))


def test_clients_reach_the_api_of_model_servers_and_nothing_else_of_them(stack: Stack) -> None:
    with stack.entered() as url:
        for path in ("/metrics", "/reset_prefix_cache", "/health", "/"):
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(url + path, method="POST"), timeout=30)
            assert refused.value.code == 404
            refused.value.close()
        with urllib.request.urlopen(f"{url}/v1/models", timeout=30) as answer:
            assert answer.status == 200


def test_a_service_without_endpoints_refuses_its_clients(clients: Kubectl) -> None:
    """What is sent there must not leave the cluster, where somebody else might answer; `hack/kind-up` sees to it."""
    clients("create", "service", "clusterip", "nobody", "--tcp=80:80")
    try:
        address = clients.get("service", "nobody")["spec"]["clusterIP"]
        assert clients("exec", "client", "--", "python", "-c", REFUSED, address).strip() == "refused"
    finally:
        clients("delete", "service", "nobody")
