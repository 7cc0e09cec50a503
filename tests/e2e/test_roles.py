"""The overlay `kind-pd`: pods that prefill, pods that decode behind sidecars, each role scaled by itself under load."""

import json
from collections.abc import Callable, Iterator

import pytest

from tests.e2e.conftest import ROOT, Admin, Stack, entrance, gateway_of, put_into
from tests.e2e.test_changes import gone
from tests.e2e.test_kv_events import pod_of
from tests.e2e.test_requests import LONG, ask
from tests.support.kubernetes.kubectl import ClusterLoad, Kubectl, wait

NAMESPACE = "warmpath-e2e-roles"
DECIDERS = {"always-disagg-pd-decider": "{}", "prefix-based-pd-decider": "{nonCachedTokens: 128}"}
DECIDED = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
- {{type: {decider}, parameters: {parameters}}}
- type: role-profile-handler
  parameters: {{decider: {decider}}}
"""
SPLIT = "prefill-decode"
Load = Callable[[Stack], ClusterLoad]


@pytest.fixture(scope="module")
def roles(clients: Kubectl, kind: Stack, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """In a namespace of its own as long as these tests last, beside the overlay `kind`, which has the GatewayClass."""
    overlay = ROOT / "manifests" / "overlays" / "kind-pd"
    kubectl = put_into(NAMESPACE, overlay, tmp_path_factory.mktemp("roles"))
    try:
        kubectl.rolled_out("warmpath", "llm-prefill", "llm-decode")
        yield entrance(clients, Stack(kubectl, gateway_of(NAMESPACE), kind.token))
    finally:
        kubectl("delete", "namespace", NAMESPACE, "--wait=false")


def decide(stack: Stack, admin: Admin, decider: str) -> None:
    """Have all prompts decided by this plugin."""
    patch = {"data": {"config.yaml": DECIDED.format(decider=decider, parameters=DECIDERS[decider])}}
    stack.kubectl("patch", "configmap", "warmpath", "--patch", json.dumps(patch))
    stack.configured(admin, lambda text: decider in text)


def of_role(stack: Stack, role: str) -> set[str]:
    """The ready pods."""
    found = stack.kubectl.get("pods", "-l", f"llm-d.ai/role={role}")["items"]
    return {each["metadata"]["name"] for each in found} & stack.kubectl.pods("llm").keys()


def scaled(stack: Stack, admin: Admin, prefill: int, decode: int) -> tuple[set[str], set[str]]:
    """Return when there are so many pods of each role and the picker knows these: (those that prefill, that decode)."""
    wanted = {"prefill": prefill, "decode": decode}
    for role, count in wanted.items():
        stack.kubectl("scale", f"--replicas={count}", f"deployment/llm-{role}")
    wait(lambda: {role: len(of_role(stack, role)) for role in wanted} == wanted, f"there are {wanted}")
    made = of_role(stack, "prefill"), of_role(stack, "decode")
    wait(lambda: admin.pods() == made[0] | made[1], f"the picker knows {wanted}")
    return made


def handled(admin: Admin, how: str) -> float:
    """Requests by what the profile handler did with their prompts."""
    samples = admin.samples("warmpath_plugin_statistic")
    return sum(each.value for each in samples if each.labels["statistic"] == how)


def degraded(admin: Admin, reason: str) -> float:
    samples = admin.samples("warmpath_degraded_total")
    return sum(each.value for each in samples if each.labels["reason"] == reason)


def computed(stack: Stack, pod: str) -> float:
    """Prompt tokens that this pod's engine computed itself."""
    with stack.kubectl.forwarded(f"pod/{pod}", 8000) as url:
        samples = Admin(url, "").samples("vllm:prompt_tokens_by_source_total")
    return sum(each.value for each in samples if each.labels["source"] == "local_compute")


def test_a_long_prompt_is_computed_by_one_pod_and_decoded_by_another(roles: Stack) -> None:
    (prefills,) = of_role(roles, "prefill")
    with roles.entered() as url, roles.admin() as admin:
        decide(roles, admin, "prefix-based-pd-decider")
        before = {pod: computed(roles, pod) for pod in roles.kubectl.pods("llm")}
        served, answer = ask(url, f"Apart. {LONG}")
        decision = admin.last_decision()
        assert served in of_role(roles, "decode")
        assert [pod_of(each) for each in decision["prefill"]] == [prefills]
        assert pod_of(decision["endpoint"]) == served
        assert computed(roles, prefills) - before[prefills] == answer["usage"]["prompt_tokens"]
        assert computed(roles, served) - before[served] < 20  # the last block is the decoder's own
        split = handled(admin, SPLIT)
        later, _ = ask(url, "Short.")
        assert later in of_role(roles, "decode")
        assert "prefill" not in admin.last_decision()
        assert handled(admin, SPLIT) == split


def test_each_role_is_scaled_under_load_and_no_request_is_lost(roles: Stack, load: Load) -> None:
    with roles.admin() as admin:
        decide(roles, admin, "always-disagg-pd-decider")
        with load(roles) as running:
            prefill, decode = scaled(roles, admin, 2, 3)
            wait(lambda: set().union(*running.era().pods.values()) == decode, "all three decode")
            wait(lambda: all(computed(roles, pod) for pod in prefill), "both prefill")
            assert degraded(admin, "no-prefiller") == 0
            _, two = scaled(roles, admin, 0, 2)
            era = running.until_answered(2).era
            assert degraded(admin, "no-prefiller") > 0
            wait(lambda: gone(roles, "llm", prefill | decode - two), "the other pods go")
            (new,), _ = scaled(roles, admin, 1, 2)
            wait(lambda: computed(roles, new) > 0, "prompts are computed apart again")
            running.until_answered(1)
    assert running.report.lost == []
    assert set().union(*(pods for each, pods in running.report.pods.items() if each > era)) <= two


def test_a_killed_prefiller_costs_no_answer(roles: Stack, load: Load) -> None:
    with roles.admin() as admin:
        (victim,), _ = scaled(roles, admin, 1, 2)
        with load(roles) as running:
            running.until_answered(1)
            roles.kubectl.killed(victim)
            wait(lambda: victim not in admin.pods(), "the picker knows")
            roles.kubectl.rolled_out("llm-prefill")
            running.until_answered(1)
        assert running.report.lost == []
        assert of_role(roles, "prefill").isdisjoint({victim})
