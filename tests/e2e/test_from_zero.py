"""Requests that come while there is no model server wait in the picker; the first server that is ready answers them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.conftest import ROOT, Stack
from tests.e2e.test_requests import ask
from tests.support.kubernetes.kubectl import wait

ROUNDS = 3
CLIENTS = 5
ALWAYS = ROOT / "manifests" / "components" / "envoy-gateway-from-zero" / "endpointslice.yaml"


@pytest.fixture
def empty_at_times(request: pytest.FixtureRequest, stack: Stack) -> Iterator[Stack]:
    """As docs/kubernetes.md says: with Envoy Gateway that knows no InferencePools, the component is needed."""
    needed = request.node.callspec.params["stack"] == "kind"
    if needed:
        stack.kubectl("apply", "-f", str(ALWAYS))
    yield stack
    if needed:
        stack.kubectl("delete", "-f", str(ALWAYS))


@pytest.mark.parametrize("stack", ["kind", "ai_gateway"], indirect=True)
def test_who_waits_for_the_first_server_is_answered_by_it(empty_at_times: Stack) -> None:
    stack = empty_at_times
    with stack.with_arguments("--flow-control"), stack.entered() as url, stack.admin() as admin:

        def waiting() -> float:
            return sum(each.value for each in admin.samples("warmpath_flow_waiting"))

        try:
            for number in range(ROUNDS):
                stack.kubectl("scale", "--replicas=0", "deployment/llm")
                wait(lambda: not stack.kubectl.get("pods", "-l", "app=llm")["items"], "the last server goes")
                with ThreadPoolExecutor(CLIENTS) as threads:
                    asked = [threads.submit(ask, url, f"Is anybody there, {number}.{each}?") for each in range(CLIENTS)]
                    wait(lambda: waiting() == CLIENTS, "all of them wait")
                    stack.kubectl("scale", "--replicas=1", "deployment/llm")
                    served = {each.result()[0] for each in asked}
                assert served == stack.kubectl.pods("llm").keys()
        finally:
            stack.kubectl("scale", "--replicas=3", "deployment/llm")
            stack.kubectl.rolled_out("llm")
