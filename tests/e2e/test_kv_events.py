"""The overlay `kind-kv-events` over a running `kind`: the picker hears each pod and picks by what it says it holds."""

import json
from collections.abc import Iterator

import pytest

from tests.e2e.conftest import ROOT, Admin, Stack
from tests.e2e.test_requests import ask
from tests.support.gateway.chain import PATIENT
from tests.support.kubernetes.kubectl import Kubectl, wait
from tests.support.kubernetes.network_policies import reaches

OVERLAYS = ROOT / "manifests" / "overlays"
PRODUCER = "precise-prefix-cache-producer"
BLOCK = 16
"""Of the simulator, in tokens."""


@pytest.fixture(scope="module")
def eventful(kind: Stack) -> Iterator[Stack]:
    """The running overlay `kind`, with that component as long as these tests last."""
    put_on(kind, "kind-kv-events", hears=True)
    with kind.with_arguments(*PATIENT):
        yield kind
    put_on(kind, "kind", hears=False)


def put_on(stack: Stack, overlay: str, *, hears: bool) -> None:
    """Apply it as users do, and return when the pods are its own and the picker follows it."""
    stack.kubectl("apply", "-k", str(OVERLAYS / overlay))
    stack.kubectl.rolled_out("warmpath", "llm")
    with stack.admin() as admin:
        stack.configured(admin, lambda text: (PRODUCER in text) == hears)


def states(admin: Admin) -> dict[str, str]:
    """How each pod's events are received."""
    samples = admin.samples("warmpath_endpoint_kv_events")
    return {pod_of(each.labels["endpoint"]): each.labels["state"] for each in samples if each.value}


def pod_of(endpoint: str) -> str:
    return endpoint.rpartition("/")[2]


def all_live(stack: Stack, admin: Admin) -> None:
    """Return when the picker hears every pod there is, and no other."""
    wait(lambda: states(admin) == dict.fromkeys(stack.kubectl.pods("llm"), "live"), "all pods are received")


def stored(admin: Admin) -> float:
    samples = admin.samples("warmpath_kv_events_total")
    return sum(each.value for each in samples if each.labels["outcome"] == "stored")


def learned(stack: Stack, admin: Admin, pod: str, prompt: str) -> None:
    """Ask a pod directly, and return when the picker has received what it holds now."""
    before = stored(admin)
    with stack.kubectl.forwarded(f"pod/{pod}", 8000) as url:
        served, answer = ask(url, prompt)
    assert served == pod
    blocks = answer["usage"]["prompt_tokens"] // BLOCK
    wait(lambda: stored(admin) >= before + blocks, f"what {pod} stored is received")


def picked(url: str, admin: Admin, prompt: str) -> tuple[str, int, int]:
    """Ask through the gateway: who answered, how many tokens it was predicted to hold, how many it held."""
    pod, answer = ask(url, prompt)
    decision = admin.last_decision()
    assert pod_of(decision["endpoint"]) == pod
    details = answer["usage"]["prompt_tokens_details"] or {}
    return pod, decision["predicted_cached_tokens"], details.get("cached_tokens") or 0


def asks(url: str, admin: Admin) -> bool:
    """Whether the picker has been asked, once a request of nobody's was sent."""
    ask(url, "Who picks?")
    return bool(admin.decisions(1))


LAG = "warmpath_endpoint_kv_events_lag_seconds"


def document(name: str) -> str:
    return f"{name} knows this by heart, and nobody else does. " * 100


def test_every_pod_is_live_and_how_late_is_reported(eventful: Stack) -> None:
    with eventful.admin() as admin:
        all_live(eventful, admin)
        pods = eventful.kubectl.pods("llm")
        for pod in pods:
            learned(eventful, admin, pod, document(f"Received {pod}"))
        lags = {pod_of(each.labels["endpoint"]): each.value for each in admin.samples(LAG)}
        assert lags.keys() == pods.keys()
        assert min(lags.values()) >= 0


def test_a_prompt_goes_to_the_pod_that_says_it_holds_it(eventful: Stack) -> None:
    with eventful.entered() as url, eventful.admin() as admin:
        all_live(eventful, admin)
        for pod in eventful.kubectl.pods("llm"):
            learned(eventful, admin, pod, document(f"Held {pod}"))
            served, predicted, cached = picked(url, admin, document(f"Held {pod}") + "Well?")
            assert served == pod
            assert predicted == cached > 50 * BLOCK


def test_a_new_picker_asks_for_what_was_said_before_it_came(eventful: Stack) -> None:
    (pod, *_) = eventful.kubectl.pods("llm")
    with eventful.admin() as admin:
        all_live(eventful, admin)
        learned(eventful, admin, pod, document("Before"))
        (old,) = eventful.kubectl.pods("warmpath")
    eventful.kubectl("rollout", "restart", "deployment/warmpath")
    eventful.replaced()
    assert old not in eventful.kubectl.pods("warmpath")
    with eventful.entered() as url, eventful.admin() as admin:
        all_live(eventful, admin)
        wait(lambda: asks(url, admin), "the gateway asks the new picker")  # it may still hold on to the old one
        served, predicted, cached = picked(url, admin, document("Before") + "Well?")
        why = admin.decisions(3), admin.samples("warmpath_degraded_total")
    assert served == pod
    assert predicted == cached > 50 * BLOCK, why


def test_what_a_deleted_pod_held_is_forgotten_and_its_successor_is_live(eventful: Stack) -> None:
    kubectl = eventful.kubectl
    with eventful.entered() as url, eventful.admin() as admin:
        all_live(eventful, admin)
        old = set(kubectl.pods("llm"))
        victim = min(old)
        learned(eventful, admin, victim, document("Gone"))
        assert picked(url, admin, document("Gone") + "Well?")[0] == victim
        kubectl.killed(victim)
        wait(lambda: victim not in states(admin), "the picker does not listen to it")
        kubectl.rolled_out("llm")
        all_live(eventful, admin)
        (successor,) = kubectl.pods("llm").keys() - old
        served, predicted, cached = picked(url, admin, document("Gone") + "And now?")
        assert served != victim
        assert (predicted, cached) == (0, 0)
        learned(eventful, admin, successor, document("New"))
        assert picked(url, admin, document("New") + "Well?")[0] == successor


def test_only_the_picker_hears_events(eventful: Stack, clients: Kubectl, fenced: bool) -> None:
    if not fenced:
        pytest.skip("this cluster's network enforces no NetworkPolicy")
    with eventful.admin() as admin:
        all_live(eventful, admin)
    addresses = [(address, port) for address in eventful.kubectl.pods("llm").values() for port in (8000, 5557, 5657)]
    assert [each for each in addresses if reaches(clients, *each)] == []


def test_the_doctor_finds_nothing_wrong_from_within(eventful: Stack) -> None:
    (picker,) = eventful.kubectl.pods("warmpath")
    pool = ("--pool-name=llm", f"--pool-namespace={eventful.kubectl.namespace}")
    said = json.loads(eventful.kubectl("exec", picker, "-c", "warmpath", "--", "warmpath", "doctor", "--json", *pool))
    assert len(said["examined"]) == len(eventful.kubectl.pods("llm"))
    assert said["findings"] == []
