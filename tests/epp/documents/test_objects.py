from typing import Any

import msgspec
import pytest

from epp.documents.files import Document
from epp.documents.objects import (
    EndpointsFile,
    InferencePool,
    Metadata,
    Pod,
    addresses_in,
    addresses_of,
    check_unique,
    created,
    entries_of,
    selects,
    target_ports,
)
from epp.errors import ConfigError
from gateway import resources

POOL: dict[str, Any] = {
    "apiVersion": "inference.networking.k8s.io/v1",
    "kind": "InferencePool",
    "metadata": {"name": "sim", "namespace": "ns"},
    "spec": {
        "selector": {"matchLabels": {"app": "sim"}},
        "targetPorts": [{"number": 8000}],
        "endpointPickerRef": {"name": "epp", "port": {"number": 9002}},
    },
}
POD = {"metadata": {"name": "p"}, "status": {"podIP": "::1", "conditions": [{"type": "Ready", "status": "True"}]}}


def test_a_pool_selects_by_namespace_and_all_of_its_labels() -> None:
    pool = msgspec.convert(POOL, InferencePool)
    assert selects(pool, "ns", {"app": "sim", "more": "1"})
    assert not selects(pool, "far", {"app": "sim"})
    assert not selects(pool, "ns", {"more": "1"})


@pytest.mark.parametrize(
    "change",
    [
        {"mystery": 1},
        {"metadata": {"name": "sim", "mystery": 1}},
        {"metadata": {"name": "No_Label"}},
        {"spec": {**POOL["spec"], "appProtocol": "grpc"}},
        {"spec": {key: POOL["spec"][key] for key in ("selector", "targetPorts")}},
    ],
)
def test_the_gateway_refuses_what_it_cannot_honour_and_the_picker_passes_over_it(change: dict[str, Any]) -> None:
    assert msgspec.convert(POOL, resources.InferencePool).metadata.id == "ns/sim"
    assert msgspec.convert(POOL | change, InferencePool).spec.target_ports[0].number == 8000
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(POOL | change, resources.InferencePool)


def test_neither_takes_a_field_of_the_spec_that_is_unknown() -> None:
    wrong = POOL | {"spec": {**POOL["spec"], "mystery": 1}}
    for shape in (InferencePool, resources.InferencePool):
        with pytest.raises(msgspec.ValidationError, match="mystery"):
            msgspec.convert(wrong, shape)


def test_entries_and_pods_of_files_have_addresses() -> None:
    file = msgspec.convert({"endpoints": [{"name": "a", "address": "::1", "port": "80"}]}, EndpointsFile)
    [(at, entry, address)] = entries_of(Document("f#1", {}), file)
    assert (at, entry.name, address) == ("endpoints[0]", "a", "[::1]:80")
    pod = msgspec.convert(POD, Pod)
    assert addresses_of(pod, [1]) == addresses_in(Document("f#1", {}), pod, [1]) == [("default/p", "[::1]:1")]
    with pytest.raises(ConfigError, match=r"^f#1: 'x' does not appear .*; expected an IP in status.podIP"):
        addresses_in(Document("f#1", {}), msgspec.structs.replace(pod, status=replaced(pod, "x")), [1])


def replaced(pod: Pod, ip: str) -> Any:
    return msgspec.structs.replace(pod.status, pod_ip=ip)


def test_when_an_object_was_created_sorts_as_text() -> None:
    assert created(Metadata("x")) == ""
    assert created(Metadata("x", creation_timestamp="2026-01-01T00:00:00Z")) == "2026-01-01T00:00:00Z"


def test_each_target_port_is_there_once() -> None:
    spec = msgspec.convert(POOL, InferencePool).spec
    assert target_ports(spec) == [8000]
    twice = msgspec.structs.replace(spec, target_ports=spec.target_ports * 2)
    with pytest.raises(ValueError, match=r"^got \[8000, 8000\]; expected each port once$"):
        target_ports(twice)
    with pytest.raises(ValueError, match=r"^got targetPorts \[8000, 8000\]; "):
        target_ports(twice, "targetPorts")


def test_names_and_addresses_are_taken_once() -> None:
    check_unique([("f#1", ("name a", "address x")), ("f#2", ("name b", "address y"))])
    with pytest.raises(ConfigError, match=r"^f#2: address x is taken by f#1; expected one of its own$"):
        check_unique([("f#1", ("name a", "address x")), ("f#2", ("name b", "address x"))])
