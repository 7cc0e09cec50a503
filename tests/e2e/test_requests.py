"""What clients and people see of it in a cluster: curl, the SDK, affinity, metrics, a strategy that changes."""

import json
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import yaml
from openai import APIStatusError, OpenAI

from epp.configuration.loader import strategy_text
from tests.e2e.conftest import Admin, Stack
from tests.support.kubernetes.kubectl import ClusterLoad, wait

LARGE = "A document of some three hundred kilobytes. " * 7000
LONG = "All of this is known to every pod that has read it. " * 400


def ask(url: str, prompt: str, **more: str) -> tuple[str, Any]:
    """(pod, answer); `more` fields may be in the request."""
    body = json.dumps({"model": "sim", **more, "prompt": prompt, "max_tokens": 2}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return answer.headers["x-sim-pod"], json.load(answer)


def metric(text: str, name: str) -> float:
    """Sum over all labels."""
    lines = [line for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_the_commands_of_the_readme_end_in_an_answer(commands: tuple[str, str]) -> None:
    text, printed = commands
    assert len([line for line in text.splitlines() if not line.startswith(" ")]) == 5
    assert '"text_completion"' in printed, printed


def test_curl_streams_through_the_gateway(stack: Stack) -> None:
    body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5, "stream": True}
    with stack.entered() as url:
        command = ["curl", "-sS", "-D", "-", f"{url}/v1/chat/completions", "-H", "content-type: application/json"]
        done = subprocess.run(
            [*command, "-d", json.dumps(body)], capture_output=True, text=True, timeout=60, check=True
        )
    head, events = done.stdout.replace("\r\n", "\n").split("\n\n", 1)
    served = dict(line.split(": ", 1) for line in head.splitlines()[1:])["x-sim-pod"]
    assert served in stack.kubectl.pods("llm")
    assert events.strip().endswith("data: [DONE]")


def test_the_sdk_works_as_it_is(stack: Stack) -> None:
    with stack.entered() as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        messages: list[Any] = [{"role": "user", "content": "Why is the sky blue?"}]
        answer = client.chat.completions.create(model="sim", messages=messages, max_tokens=8)
        assert answer.choices[0].message.content
        chunks = list(client.chat.completions.create(model="sim", messages=messages, max_tokens=8, stream=True))
        assert chunks[-1].choices[0].finish_reason in ("length", "stop")
        assert [model.id for model in client.models.list()] == ["sim"]


def test_each_request_is_served_by_the_pod_that_was_picked(stack: Stack) -> None:
    with stack.entered() as url, stack.admin() as admin:
        for number in range(30):
            served, _ = ask(url, f"Request {number}")
            assert admin.last_decision()["endpoint"].rpartition("/")[2] == served


def test_a_large_request_arrives_as_it_is(stack: Stack) -> None:
    with stack.entered() as url:
        _, answer = ask(url, "Why is the sky blue?", metadata=LARGE)  # JSON whose end is missing is no request
    assert answer["usage"]["completion_tokens"] == 2


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        (b'{"model": "sim", "prompt": ', 400, "JSON"),
        (b'{"model": "sim", "prompt": "Hi", "max_tokens": 0}', 400, "max_tokens"),
    ],
    ids=["of the picker", "of the server"],
)
def test_an_error_is_the_clients_to_read(stack: Stack, body: bytes, status: int, says: str) -> None:
    with stack.entered() as url:
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(request, timeout=30)
        with refused.value as answer:
            assert answer.status == status
            assert says in json.load(answer)["error"]["message"]


@pytest.mark.parametrize("stack", ["kind", "istio", "ai_gateway"], indirect=True)
def test_a_model_that_no_server_knows_is_rewritten(stack: Stack, request: pytest.FixtureRequest) -> None:
    """Not `standalone`: without an InferencePool nothing can refer to one."""
    rewrite = {
        "apiVersion": "llm-d.ai/v1alpha2",
        "kind": "InferenceModelRewrite",
        "metadata": {"name": "alias"},
        "spec": {
            "poolRef": {"name": "llm"},
            "rules": [{"matches": [{"model": {"value": "alias"}}], "targets": [{"modelRewrite": "sim"}]}],
        },
    }
    stack.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(rewrite))
    try:
        with stack.entered() as url, OpenAI(base_url=f"{url}/v1", api_key="none") as client:

            def asked() -> Any:
                return client.completions.create(model="alias", prompt="Hi", max_tokens=2)

            def known() -> bool:
                with suppress(APIStatusError):
                    return bool(asked())
                return False

            wait(known, "the picker knows of the rewrite")
            answer = asked()
            assert answer.choices[0].finish_reason == "length"
            lean = request.node.callspec.params["stack"] == "kind"  # there the gateway shows no answers
            assert answer.model == ("sim" if lean else "alias")
    finally:
        stack.kubectl("delete", "inferencemodelrewrites.llm-d.ai", "alias")


def test_a_prompt_goes_where_its_beginning_is_held(stack: Stack) -> None:
    with stack.entered() as url, stack.admin() as admin:
        before = admin.page("/metrics")
        places = set()
        for document in range(4):
            prompt = f"{document} {LONG}"
            first, _ = ask(url, prompt)
            later = [ask(url, f"{prompt} {number}?") for number in range(3)]
            assert {pod for pod, _ in later} == {first}
            assert all(answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 1000 for _, answer in later)
            places.add(first)
        after = admin.page("/metrics")
    assert len(places) > 1
    counted = "warmpath_prefix_hit_ratio_count"
    assert metric(after, counted) - metric(before, counted) >= 16
    shares = "warmpath_prefix_hit_ratio_sum"
    assert metric(after, shares) - metric(before, shares) >= 0.8 * 12


def test_answers_under_way_are_accounted_until_they_end(stack: Stack, load: Callable[[Stack], ClusterLoad]) -> None:
    with stack.admin() as admin:
        with load(stack):
            wait(lambda: in_flight(admin) >= 3, "the three streams of the load are seen")
        wait(lambda: in_flight(admin) == 0, "nothing is left when the load has ended")
        assert in_flight(admin) == 0


def in_flight(admin: Admin) -> int:
    pools = json.loads(admin.page("/endpoints"))["pools"]
    return sum(each["in_flight"] for pool in pools for each in pool["endpoints"])


def test_another_strategy_needs_no_restart(stack: Stack, load: Callable[[Stack], ClusterLoad]) -> None:
    kubectl = stack.kubectl
    before = restarts(stack)
    with stack.entered() as url, stack.admin() as admin, load(stack) as running:
        running.until_answered(1)
        try:
            configure(stack, admin, "round-robin", "round-robin-picker")
            # The load's requests come in between, and may take the same pod's turn a few times.
            assert {ask(url, LONG)[0] for _ in range(30)} == kubectl.pods("llm").keys()
            running.until_answered(1)
        finally:
            configure(stack, admin, "prefix-aware", "expected-ttft")
        running.until_answered(1)
    assert running.report.lost == []
    assert restarts(stack) == before


def configure(stack: Stack, admin: Admin, strategy: str, expected: str) -> None:
    """Put a strategy into the ConfigMap and wait until the picker has it."""
    patch = {"data": {"config.yaml": strategy_text(strategy)}}
    stack.kubectl("patch", "configmap", "warmpath", "--patch", json.dumps(patch))
    stack.configured(admin, lambda text: expected in text)


def restarts(stack: Stack) -> dict[str, int]:
    """Of each picker's containers."""
    pods = {name: stack.kubectl.get("pod", name) for name in stack.kubectl.pods("warmpath")}
    return {
        name: sum(each["restartCount"] for each in pod["status"]["containerStatuses"]) for name, pod in pods.items()
    }
