"""What is only Envoy AI Gateway's of the overlay `envoy-ai-gateway`, for a cluster of `hack/kind-up --ai-gateway`.

Of the other files those tests that have it for a stack run there, too.
"""

import json
import urllib.error
from collections.abc import Iterator
from typing import Any

import pytest
import yaml
from openai import OpenAI

from tests.e2e.conftest import Admin, Stack, entrance
from tests.e2e.test_requests import LARGE, ask
from tests.support.kubernetes.kubectl import Kubectl, wait

GATEWAY_API = "gateway.networking.k8s.io"
POOL = {"group": "inference.networking.k8s.io", "kind": "InferencePool", "name": "llm"}
BY_MODEL = {
    "apiVersion": "aigateway.envoyproxy.io/v1alpha1",
    "kind": "AIGatewayRoute",
    "metadata": {"name": "by-model"},
    "spec": {
        "parentRefs": [{"name": "inference", "kind": "Gateway", "group": GATEWAY_API}],
        "rules": [
            {
                "matches": [{"headers": [{"type": "Exact", "name": "x-ai-eg-model", "value": "sim"}]}],
                "backendRefs": [POOL],
            }
        ],
    },
}


def untaken(admin: Admin) -> float:
    found = admin.samples("warmpath_degraded_total")
    return sum(each.value for each in found if each.labels["reason"] == "fallbacks-not-taken")


def test_fallbacks_are_not_taken_and_the_picker_says_so(ai_gateway: Stack) -> None:
    with ai_gateway.with_arguments("--fallbacks=2"), ai_gateway.entered() as url, ai_gateway.admin() as admin:
        with pytest.raises(urllib.error.HTTPError) as refused:
            ask(url, "Anybody?")
        with refused.value as answer:
            assert (answer.status, answer.read()) == (503, b"no healthy upstream")
        assert untaken(admin) >= 1


@pytest.fixture
def by_model(ai_gateway: Stack, clients: Kubectl) -> Iterator[Stack]:
    """The same with a route of Envoy AI Gateway's own in place of the overlay's."""
    kubectl = ai_gateway.kubectl
    route: Any = kubectl.get("httproute", "llm")
    kept = {name: route["metadata"][name] for name in ("name", "namespace")}
    kubectl("delete", "httproute", "llm")
    kubectl("apply", "-f", "-", stdin=yaml.safe_dump(BY_MODEL))
    try:
        yield entrance(clients, ai_gateway)
    finally:
        kubectl("delete", "aigatewayroute", "by-model")
        kubectl("apply", "-f", "-", stdin=yaml.safe_dump({**route, "metadata": kept}))
        entrance(clients, ai_gateway)


def test_a_route_by_model_leads_to_the_pool(by_model: Stack) -> None:
    with by_model.entered() as url, by_model.admin() as admin:
        for number in range(10):
            served, _ = ask(url, f"Request {number}")
            assert admin.last_decision()["endpoint"].rpartition("/")[2] == served


def takes_large(url: str) -> bool:
    """A request passes that is larger than Envoy buffers."""
    try:
        ask(url, "Hi", metadata=LARGE)
    except urllib.error.HTTPError:
        return False
    return True


@pytest.fixture
def buffered(ai_gateway: Stack, clients: Kubectl) -> Iterator[Stack]:
    """The same where Envoy keeps requests, shows them to the picker, and passes on answers as it says."""
    route: Any = ai_gateway.kubectl.get("httproute", "llm")
    kept = {name: route["metadata"][name] for name in ("name", "namespace")}

    def annotated(*annotations: str) -> None:
        """The gateway reads them when a route to the pool changes."""
        kubectl = ai_gateway.kubectl
        kubectl("annotate", "--overwrite", "inferencepools.inference.networking.k8s.io", "llm", *annotations)
        kubectl("delete", "httproute", "llm")
        kubectl("apply", "-f", "-", stdin=yaml.safe_dump({**route, "metadata": kept}))
        entrance(clients, ai_gateway)

    named = {"processing-body-mode": "buffered", "allow-mode-override": "true"}
    try:
        annotated(*(f"aigateway.envoyproxy.io/{name}={value}" for name, value in named.items()))
        with ai_gateway.entered() as url:
            wait(lambda: not takes_large(url), "the gateway follows its pool's annotations")
        yield ai_gateway
    finally:
        annotated(*(f"aigateway.envoyproxy.io/{name}-" for name in named))
        with ai_gateway.entered() as url:
            wait(lambda: takes_large(url), "the gateway follows its pool again")


def test_answers_are_streamed_where_requests_are_buffered(buffered: Stack) -> None:
    with buffered.entered() as url, buffered.admin() as admin, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        pieces = iter(client.completions.create(model="sim", prompt="Hi", max_tokens=300, stream=True))
        next(pieces)
        (pool,) = json.loads(admin.page("/endpoints"))["pools"]
        assert sum(each["in_flight"] for each in pool["endpoints"]) == 1, "the answer has not ended"
        assert len(list(pieces)) > 10
