"""The component `ha`: three pickers that share what they know, and one that is killed."""

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import ROOT, Admin, Stack, entrance, gateway_of, put_into
from tests.support.kubernetes.kubectl import Kubectl, wait

NAMESPACE = "warmpath-e2e-ha"
REPLICAS = 3
PROMPTS = [f"{n} " + f"word{n} " * 800 for n in range(4)]


@pytest.fixture(scope="module")
def ha(tmp_path_factory: pytest.TempPathFactory, clients: Kubectl, kind: Stack, token: str) -> Iterator[Stack]:
    """The overlay `kind` with `ha`, in a namespace of its own."""
    overlay = ROOT / "manifests" / "overlays" / "kind"
    kubectl = put_into(NAMESPACE, overlay, tmp_path_factory.mktemp("ha"), ["ha"])
    try:
        secret = "--from-literal=secret=of-this-test-alone-0123456789"
        kubectl("create", "secret", "generic", "warmpath-replicas", secret)
        # Beside all else that the node runs: two processors are asked for by then.
        kubectl("set", "resources", "deployment", "warmpath", "llm", "--requests=cpu=10m")
        kubectl.rolled_out("warmpath", "llm")
        yield entrance(clients, Stack(kubectl, gateway_of(NAMESPACE), token))
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def shown(stack: Stack) -> list[Any]:
    """What each replica says of itself and its peers."""
    found = []
    for pod in stack.kubectl.pods("warmpath"):
        with stack.kubectl.forwarded(f"pod/{pod}", 9090) as url:
            found.append(json.loads(Admin(url, stack.token).page("/endpoints"))["replicas"])
    return found


def know_each_other(stack: Stack) -> bool:
    live = [[peer["state"] for peer in each["peers"]].count("live") for each in shown(stack)]
    return live == [REPLICAS - 1] * REPLICAS


def pods_of(url: str) -> dict[str, str]:
    """Which model server answers each prompt."""
    found = {}
    for prompt in PROMPTS:
        body = {"model": "sim", "max_tokens": 1, "messages": [{"role": "user", "content": prompt}]}
        ask = urllib.request.Request(
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(ask, timeout=30) as answer:
            found[prompt] = answer.headers["x-sim-pod"]
    return found


def test_replicas_know_each_other_and_pick_as_one(ha: Stack) -> None:
    wait(lambda: know_each_other(ha), "three replicas know each other")
    assert all(each["joined"] for each in shown(ha))
    with ha.entered() as url:
        first = pods_of(url)
        for _ in range(3 * REPLICAS):  # whichever replica is asked
            assert pods_of(url) == first


def test_a_killed_replica_is_replaced_by_one_that_knows_as_much(ha: Stack) -> None:
    wait(lambda: know_each_other(ha), "three replicas know each other")
    with ha.entered() as url:
        before = pods_of(url)
        for victim in sorted(ha.kubectl.pods("warmpath")):  # in the end, none is left that has picked
            ha.kubectl.killed(victim)
            ha.kubectl.rolled_out("warmpath")
            wait(lambda: know_each_other(ha), "the new replica knows the others")
        wait(lambda: pods_of(url) == before, "what was known is known")
