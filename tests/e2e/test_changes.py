"""Pickers and model servers come and go under load, as deployments, scaling and failing nodes make them."""

import json
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.e2e.conftest import OWNER, Stack
from tests.support.kubernetes.kubectl import ClusterLoad, wait

CLIENTS = 7
"""Of the load; each has one request in flight."""
ROLLOUTS = 10
ADMIN = 19000
"""Where Envoy Gateway's Envoys show their configuration, to their own pod only."""
Load = Callable[[Stack], ClusterLoad]


def gone(stack: Stack, app: str, names: set[str]) -> bool:
    """Whether these pods are no more, not even on their way."""
    return not names & {pod["metadata"]["name"] for pod in stack.kubectl.get("pods", "-l", f"app={app}")["items"]}


def test_pickers_are_replaced_and_no_request_is_lost(stack: Stack, load: Load) -> None:
    kubectl = stack.kubectl
    old = set(kubectl.pods("warmpath"))
    with load(stack) as running:
        running.until_answered(1)
        kubectl("rollout", "restart", "deployment/warmpath")
        kubectl.rolled_out("warmpath")
        wait(lambda: gone(stack, "warmpath", old), "the old picker goes")
        running.until_answered(2)
    assert running.report.lost == []


def test_model_servers_are_replaced_and_no_request_is_lost(stack: Stack, load: Load) -> None:
    kubectl = stack.kubectl
    old = set(kubectl.pods("llm"))
    with load(stack) as running:
        running.until_answered(1)
        kubectl("rollout", "restart", "deployment/llm")
        kubectl.rolled_out("llm")
        wait(lambda: gone(stack, "llm", old), "the old pods go")
        running.until_answered(2)
        new = set(kubectl.pods("llm"))
    assert running.report.lost == []
    last = running.report.pods[max(running.report.pods)]
    assert last <= new


def test_servers_come_into_use_and_leave_as_they_are_scaled(stack: Stack, load: Load) -> None:
    kubectl = stack.kubectl
    with load(stack) as running, stack.admin() as admin:
        kubectl("scale", "--replicas=6", "deployment/llm")
        kubectl.rolled_out("llm")
        six = set(kubectl.pods("llm"))
        assert len(six) == 6
        wait(lambda: admin.pods() == six, "the picker knows six")
        era = running.until_answered(4).era
        kubectl("scale", "--replicas=2", "deployment/llm")
        wait(lambda: len(admin.pods()) == 2, "the picker knows two")
        two = set(kubectl.pods("llm"))
        wait(lambda: gone(stack, "llm", six - two), "the other pods go")
        running.until_answered(2)
        kubectl("scale", "--replicas=3", "deployment/llm")
        kubectl.rolled_out("llm")
    assert running.report.lost == []
    served = set().union(*(names for each, names in running.report.pods.items() if each <= era))
    assert six <= served
    assert running.report.pods[max(running.report.pods)] <= set(kubectl.pods("llm"))


def test_a_killed_server_costs_what_it_was_answering(stack: Stack, load: Load) -> None:
    kubectl = stack.kubectl
    victim = min(kubectl.pods("llm"))
    with load(stack) as running, stack.admin() as admin:
        running.until_answered(1)
        kubectl.killed(victim)
        wait(lambda: victim not in admin.pods(), "the picker knows")
        era = running.era().era
        kubectl.rolled_out("llm")
        running.until_answered(2)
    lost = running.report.lost
    assert len(lost) <= CLIENTS
    assert [each for each in lost if each[1] >= era] == []
    assert [each for each in lost if "cut by " in each[2] and f"cut by {victim}:" not in each[2]] == []


def test_a_killed_picker_costs_at_most_what_it_held(stack: Stack, load: Load) -> None:
    kubectl = stack.kubectl
    kubectl("scale", "--replicas=2", "deployment/warmpath")
    kubectl.rolled_out("warmpath")
    victim, address = min(kubectl.pods("warmpath").items())
    try:
        with load(stack) as running:
            running.until_answered(1)
            kubectl.killed(victim)
            wait(lambda: address not in json.dumps(kubectl.get("endpointslices")), "no Service leads to it")
            running.until_answered(1)
            era = running.era().era
            kubectl.rolled_out("warmpath")
            running.until_answered(2)
        assert len(running.report.lost) <= CLIENTS
        assert [each for each in running.report.lost if each[1] >= era] == []
    finally:
        kubectl("scale", "--replicas=1", "deployment/warmpath")
        wait(lambda: len(kubectl.pods("warmpath")) == 1, "one picker is left")


@pytest.fixture
def asked_once(kind: Stack) -> Iterator[Stack]:
    """The overlay `kind` with a gateway that asks once, connects through the Service and checks nobody's health."""
    policy = kind.kubectl.get("envoyextensionpolicy", "warmpath")["spec"]["extProc"]
    without = [{**each, "backendSettings": dict(each["backendSettings"])} for each in policy]
    for each in without:
        del each["backendSettings"]["retry"], each["backendSettings"]["healthCheck"]
    wired(kind, without, once=True)
    yield kind
    wired(kind, policy, once=False)


def wired(stack: Stack, processors: list[Any], *, once: bool) -> None:
    """Return when Envoy asks pickers like this."""
    for name, path, value in (
        ("envoyextensionpolicy/warmpath", "/spec/extProc", processors),
        ("envoyproxy/inference", "/spec/routingType", "Service" if once else "Endpoint"),
    ):
        patch = json.dumps([{"op": "add", "path": path, "value": value}])
        stack.kubectl("patch", name, "--type=json", "--patch", patch)
    service = stack.kubectl.get("service", "warmpath")["spec"]["clusterIP"]
    gateways, _ = stack.gateway
    (envoy,) = gateways.get("pods", "-l", f"{OWNER}-name=inference,{OWNER}-namespace=default")["items"]
    with gateways.forwarded(f"pod/{envoy['metadata']['name']}", ADMIN) as url:
        wanted = (not once, once)
        wait(lambda: (asks_again(url), f"{service}:9002" in page(f"{url}/clusters")) == wanted, "Envoy is set up so")


def page(url: str) -> str:
    with urllib.request.urlopen(url, timeout=30) as answer:
        text: str = answer.read().decode()
        return text


def asks_again(url: str) -> bool:
    """Whether this Envoy asks another picker where one fails."""
    services = list(under("grpc_service", json.loads(page(f"{url}/config_dump"))))
    assert services
    return any("retry_policy" in each for each in services)


def under(key: str, value: Any) -> Iterator[Any]:
    """All that this key has anywhere in there."""
    for name, each in value.items() if isinstance(value, dict) else enumerate(value):
        if name == key:
            yield each
        if isinstance(each, (dict, list)):
            yield from under(key, each)


def test_pickers_are_replaced_and_a_gateway_that_never_asks_again_loses_nothing(asked_once: Stack, load: Load) -> None:
    kubectl = asked_once.kubectl
    old: set[str] = set()
    with load(asked_once) as running, load(asked_once) as more:
        for _ in range(ROLLOUTS):
            old |= kubectl.pods("warmpath").keys()
            running.until_answered(1)
            kubectl("rollout", "restart", "deployment/warmpath")
            kubectl.rolled_out("warmpath")
        wait(lambda: gone(asked_once, "warmpath", old), "the old pickers go")
        running.until_answered(2)
    assert len(old) >= ROLLOUTS
    assert [*running.report.lost, *more.report.lost] == []
