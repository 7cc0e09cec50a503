"""The chart in a namespace of its own: installed, asked as its notes say, upgraded, and gone."""

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import yaml

from tests.e2e.conftest import Stack, gateway_of
from tests.e2e.test_requests import LONG, ask, restarts
from tests.support.kubernetes.helm import CHART, commands, helm
from tests.support.kubernetes.kubectl import Kubectl, wait
from tooling.laptop.ports import free_ports

NAMESPACE = "warmpath-e2e-chart"
VALUES: dict[str, Any] = {
    "model": "sim",
    "servers": {"type": "simulator"},
    "gateway": {"serviceType": "ClusterIP"},
    "picker": {"resources": {"requests": {"cpu": "100m", "memory": "128Mi"}}},
}


class Release:
    """The one of these tests, and what its installation printed."""

    def __init__(self, printed: str) -> None:
        self.kubectl = Kubectl(NAMESPACE)
        self.printed = printed

    def helm(self, *arguments: str) -> str:
        return helm(*arguments, "--namespace", NAMESPACE)


@pytest.fixture(scope="module")
def release(kind: Stack) -> Iterator[Release]:
    """Beside the overlay `kind`, which has the GatewayClass."""
    flags = ("--namespace", NAMESPACE, "--create-namespace")
    try:
        yield Release(helm("install", "warmpath", str(CHART), *flags, values=VALUES))
    finally:
        kind.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def installed(release: Release, kind: Stack) -> Stack:
    """As its notes' commands leave it, which end in an answer."""
    port = str(free_ports(1)[0])
    assert '"text_completion"' in run(commands(release.printed).replace("8080", port))
    return Stack(release.kubectl, gateway_of(NAMESPACE), kind.token)


def run(script: str) -> str:
    """What it prints. AssertionError when it fails."""
    shell = ["bash", "-euo", "pipefail", "-c", script]
    pipe = subprocess.PIPE
    with subprocess.Popen(shell, stdout=pipe, stderr=subprocess.STDOUT, text=True, start_new_session=True) as process:
        try:
            status = process.wait(300)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # the port-forward
        assert process.stdout
        printed = process.stdout.read()
    assert status == 0, f"{script}\n{printed}"
    return printed


def test_a_request_through_its_gateway_is_answered_by_one_of_its_pods(installed: Stack) -> None:
    with installed.entered() as url:
        pod, answer = ask(url, LONG)
    assert pod in installed.kubectl.pods("llm")
    assert answer["usage"]["completion_tokens"] == 2


def test_an_upgrade_to_another_strategy_is_taken_by_the_running_picker(release: Release, installed: Stack) -> None:
    before = restarts(installed)
    with installed.entered() as url, installed.admin() as admin:
        assert len({ask(url, LONG)[0] for _ in range(6)}) == 1  # who holds it
        release.helm("upgrade", "warmpath", str(CHART), "--reuse-values", "--set", "strategy=round-robin")
        installed.configured(admin, lambda text: "round-robin-picker" in text)
        assert {ask(url, LONG)[0] for _ in range(6)} == installed.kubectl.pods("llm").keys()
    assert restarts(installed) == before


def test_nothing_is_left_but_definitions(release: Release, installed: Stack) -> None:
    kubectl = installed.kubectl
    manifest = release.helm("get", "manifest", "warmpath")
    assert len(listed(kubectl, manifest)) == len([each for each in yaml.safe_load_all(manifest) if each])
    release.helm("uninstall", "warmpath")
    wait(lambda: not listed(kubectl, manifest), "all that was made is gone")
    pods = kubectl.get("pods")["items"]
    assert [each["metadata"]["name"] for each in pods if "deletionTimestamp" not in each["metadata"]] == []
    definitions = kubectl("get", "customresourcedefinitions", "-o", "name")
    for each in (CHART / "crds").iterdir():
        assert yaml.safe_load(each.read_text(encoding="utf-8"))["metadata"]["name"] in definitions


def listed(kubectl: Kubectl, manifest: str) -> list[Any]:
    """What is there of a manifest's objects."""
    found = kubectl("get", "--ignore-not-found", "-o", "json", "-f", "-", stdin=manifest)
    if not found:
        return []
    answer = json.loads(found)
    items: list[Any] = answer["items"] if answer["kind"] == "List" else [answer]
    return items
