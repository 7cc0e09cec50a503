from datetime import UTC, datetime
from typing import Any

import msgspec
import pytest

from epp.documents.objects import Metadata, Pod
from epp.pool.objects import InferenceModelRewrite, endpoints_of_pod, preferred, rewrites_of
from epp.pool.store import Rewrite, Target


def pod(**changes: Any) -> Pod:
    content: dict[str, Any] = {
        "metadata": {"name": "vllm-0", "namespace": "ns", "labels": {"app": "vllm"}},
        "status": {"podIP": "10.0.0.1", "conditions": [{"type": "Ready", "status": "True"}]},
    }
    content["metadata"] |= changes.get("metadata", {})
    content["status"] |= changes.get("status", {})
    return msgspec.convert(content, Pod)


def rewrite(created: object, *rules: dict[str, Any]) -> InferenceModelRewrite:
    meta = {"name": "r", "creationTimestamp": created}
    return msgspec.convert(
        {"metadata": meta, "spec": {"poolRef": {"name": "p"}, "rules": list(rules)}}, InferenceModelRewrite
    )


def rule(target: str, *models: str | None) -> dict[str, Any]:
    matches = [{"model": {"type": "Exact", "value": model}} if model else {} for model in models]
    return {"matches": matches, "targets": [{"modelRewrite": target, "weight": 1}]}


def test_a_ready_pod_is_an_endpoint_for_each_port() -> None:
    one = endpoints_of_pod(pod(), [8000])
    assert [(each.name, each.address, each.labels) for each in one] == [("ns/vllm-0", "10.0.0.1:8000", {"app": "vllm"})]
    several = endpoints_of_pod(pod(status={"podIP": "2001:db8::1"}), [8000, 8001])
    assert [(each.name, each.address) for each in several] == [
        ("ns/vllm-0-rank-0", "[2001:db8::1]:8000"),
        ("ns/vllm-0-rank-1", "[2001:db8::1]:8001"),
    ]


def test_an_endpoint_is_on_its_pods_node() -> None:
    raw: dict[str, Any] = msgspec.to_builtins(pod(), str_keys=True)
    scheduled = msgspec.convert({**raw, "spec": {"nodeName": "node-1", "containers": []}}, Pod)
    assert [each.node for each in endpoints_of_pod(scheduled, [8000, 8001])] == ["node-1", "node-1"]
    assert [each.node for each in endpoints_of_pod(pod(), [8000])] == [""]
    (placed,) = endpoints_of_pod(pod(status={"podIP": "10.0.0.1", "hostIP": "192.168.0.1"}), [8000])
    assert placed.node_address == "192.168.0.1"


@pytest.mark.parametrize(
    "changes",
    [
        {"status": {"podIP": ""}},
        {"status": {"conditions": [{"type": "Ready", "status": "False"}]}},
        {"status": {"conditions": [{"type": "Initialized", "status": "True"}]}},
        {"status": {"conditions": None}},
        {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}},
    ],
)
def test_a_pod_that_is_not_ready_or_going_away_has_no_endpoint(changes: dict[str, Any]) -> None:
    assert endpoints_of_pod(pod(**changes), [8000]) == []


@pytest.mark.parametrize("name", ["llm-d.ai/active-ports", "inference.networking.k8s.io/active-ports"])
def test_active_ports_narrow_a_pod_but_not_its_ranks(name: str) -> None:
    narrowed = pod(metadata={"annotations": {name: "8002, 9999"}})
    assert [each.name for each in endpoints_of_pod(narrowed, [8000, 8001, 8002])] == ["ns/vllm-0-rank-2"]


def test_rewrites_come_oldest_first_then_in_order_of_their_rules() -> None:
    young = rewrite("2026-03-01T00:00:00Z", rule("y", "a"))
    old = rewrite(datetime(2026, 1, 1, tzinfo=UTC), rule("o1", "a"), rule("o2", "b", "c"), rule("o3"))
    assert rewrites_of([young, old]) == (
        Rewrite(("a",), (Target("o1", 1),)),
        Rewrite(("b", "c"), (Target("o2", 1),)),
        Rewrite((), (Target("o3", 1),)),
        Rewrite(("a",), (Target("y", 1),)),
    )


def test_a_match_without_a_model_is_for_any_besides_those_named() -> None:
    target = (Target("t", 1),)
    assert rewrites_of([rewrite(None, rule("t", "a", None))]) == (Rewrite(("a",), target), Rewrite((), target))


@pytest.mark.parametrize(
    "spec",
    [
        {"poolRef": {"name": "p"}, "rules": []},
        {"rules": [rule("t")]},
        {"poolRef": {"name": "p"}, "rules": [{"targets": [{"modelRewrite": "t", "weight": 0}]}]},
    ],
)
def test_rewrites_hold_to_the_bounds_of_their_definition(spec: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"metadata": {"name": "r"}, "spec": spec}, InferenceModelRewrite)


def test_metadata_has_the_namespace_kubernetes_would_give() -> None:
    assert Metadata(name="x").namespace == "default"


def test_of_an_object_in_both_groups_llm_ds_own_counts() -> None:
    ours, theirs = rewrite("2026-01-01T00:00:00Z", rule("ours")), rewrite("2025-01-01T00:00:00Z", rule("theirs"))
    old, new = ("inference.networking.x-k8s.io", theirs), ("llm-d.ai", ours)
    assert preferred([old, new]) == preferred([new, old]) == [ours]
    assert preferred([old]) == [theirs]
