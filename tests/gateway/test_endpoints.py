"""The gateway and the endpoint picker read the same documents: whatever they say, both come to the same addresses."""

import json
from pathlib import Path
from typing import Any

import pytest

from epp.errors import ConfigError
from epp.pool.static import load as picker_load
from gateway.load import load
from tests.support.gateway.files import POOL, write

READY = [{"type": "Initialized", "status": "True"}, {"type": "Ready", "status": "True"}]
ACTIVE = "inference.networking.k8s.io/active-ports"
ROUTER_ACTIVE = "llm-d.ai/active-ports"
THREE_PORTS = POOL.replace("[{number: 8000}]", "[{number: 8000}, {number: 8001}, {number: 8002}]")


def pod(name: str = "one", ip: str = "10.0.0.1", conditions: Any = READY, **metadata: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": "sim", "more": "1"}, "uid": "u", **metadata},
        "spec": {"containers": [{"name": "vllm"}]},
        "status": {"podIP": ip, "conditions": conditions, "phase": "Running"},
    }


def entry(name: str = "one", address: str = "10.0.0.1", **more: Any) -> dict[str, Any]:
    return {"name": name, "address": address, "port": 8000, "labels": {"app": "sim"}, **more}


ONE, ALL = ["10.0.0.1:8000"], ["10.0.0.1:8000", "10.0.0.1:8001", "10.0.0.1:8002"]
AGREED: list[tuple[str, str, list[dict[str, Any]], list[str]]] = [
    ("a ready pod", POOL, [pod()], ONE),
    ("each target port", THREE_PORTS, [pod()], ALL),
    ("an active port", THREE_PORTS, [pod(annotations={ACTIVE: "8001"})], ALL[1:2]),
    ("active ports, with blanks", THREE_PORTS, [pod(annotations={ROUTER_ACTIVE: " 8002, 8000,"})], ALL[::2]),
    ("both annotations", THREE_PORTS, [pod(annotations={ACTIVE: "8000", ROUTER_ACTIVE: "8001"})], ALL[1:2]),
    ("no port active", POOL, [pod(annotations={ACTIVE: ""})], []),
    ("an active port of no pool", POOL, [pod(annotations={ACTIVE: "9"})], []),
    ("not ready", POOL, [pod(conditions=[{"type": "Ready", "status": "False"}])], []),
    ("without conditions", POOL, [pod(conditions=None)], []),
    ("without an address", POOL, [pod(ip="")], []),
    ("without a status", POOL, [{**pod(), "status": {}}], []),
    ("going away", POOL, [pod(deletionTimestamp="2026-01-01T00:00:00Z")], []),
    ("other labels", POOL, [pod(labels={"app": "other"})], []),
    ("no labels", POOL, [pod(labels=None)], []),
    ("another namespace", POOL, [pod(namespace="far")], []),
    ("another kind of Pod", POOL, [{**pod(), "apiVersion": "example.com/v1"}], []),
    ("IPv6", POOL, [pod(ip="2001:db8:0:0:0:0:0:1")], ["[2001:db8::1]:8000"]),
    ("IPv4 in IPv6", POOL, [pod(ip="::ffff:10.0.0.1")], ONE),
    ("a List", POOL, [{"kind": "List", "items": [pod(), pod("two", "10.0.0.2")]}], ["10.0.0.1:8000", "10.0.0.2:8000"]),
    ("a PodList", POOL, [{"kind": "PodList", "items": [pod()]}], ONE),
    ("an entry", POOL, [{"endpoints": [entry(port="8005"), entry("Two_", "::1")]}], ["10.0.0.1:8005", "[::1]:8000"]),
    ("entries and pods", POOL, [pod(), {"endpoints": [entry("two", "10.0.0.2")]}], ["10.0.0.2:8000", "10.0.0.1:8000"]),
]  # fmt: skip

REFUSED: list[tuple[str, list[dict[str, Any]], str]] = [
    ("no address", [pod(ip="pod-a")], "expected an IP in status.podIP"),
    ("no port", [pod(annotations={ACTIVE: "http"})], "ports in active-ports"),
    ("one address twice", [pod(), pod("two")], "address 10.0.0.1:8000 is taken by"),
    ("one name twice", [pod(), pod(ip="10.0.0.2")], "name default/one is taken by"),
    ("an entry and a pod", [pod(), {"endpoints": [entry("two")]}], "address 10.0.0.1:8000 is taken by"),
    ("conditions that are none", [pod(conditions="Ready")], "status.conditions"),
    ("a name that is none", [pod(name=7)], "metadata.name"),  # type: ignore[arg-type]
    ("an entry in no pool", [{"endpoints": [entry(labels={"app": "sin"})]}], "in no InferencePool; expected"),
    ("an entry elsewhere", [{"endpoints": [entry(namespace="far")]}], "in no InferencePool; expected"),
    ("a host name", [{"endpoints": [entry(address="pod-a")]}], "endpoints[0].address: got 'pod-a'; expected an IPv4"),
    ("port 0", [{"endpoints": [entry(port="0")]}], "endpoints[0].port: got '0'"),
    ("a misspelt field", [{"endpoints": [entry(adress="::1")]}], "adress"),
    ("items of a PodList without a kind", [{"kind": "PodList", "items": [{"metadata": {"name": "p"}}]}], "endpoints"),
]  # fmt: skip


@pytest.mark.parametrize(("pool", "documents", "addresses"), [each[1:] for each in AGREED], ids=[e[0] for e in AGREED])
def test_both_find_the_same_addresses(
    tmp_path: Path, pool: str, documents: list[dict[str, Any]], addresses: list[str]
) -> None:
    file = write(tmp_path, pool, *map(json.dumps, documents))
    [state] = picker_load([file])
    assert list(load([file]).endpoints["default/sim"]) == [each.address for each in state.endpoints] == addresses


@pytest.mark.parametrize(("documents", "message"), [each[1:] for each in REFUSED], ids=[each[0] for each in REFUSED])
def test_both_refuse_the_same_documents(tmp_path: Path, documents: list[dict[str, Any]], message: str) -> None:
    file = write(tmp_path, POOL, *map(json.dumps, documents))
    with pytest.raises(ConfigError):
        picker_load([file])
    with pytest.raises(ConfigError) as caught:
        load([file])
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(file))
