from typing import Any

import pytest
import yaml

from epp.documents.files import Document
from epp.errors import ConfigError
from epp.parsing.request import Objective, Slo
from epp.pool.manifests import pools_of
from epp.pool.store import PoolState, Rewrite, Target

POOL = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: llama, namespace: ns}
spec:
  selector: {matchLabels: {app: llama}}
  targetPorts: [{number: 8000}, {number: 8001}]
  endpointPickerRef: {name: epp, port: {number: 9002}}
"""
PODS = """
apiVersion: v1
kind: Pod
metadata: {name: llama-0, namespace: ns, labels: {app: llama, tier: gold}}
status: {podIP: 10.0.0.1, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: other-0, namespace: ns, labels: {app: other}}
status: {podIP: 10.0.0.2, conditions: [{type: Ready, status: "True"}]}
---
apiVersion: v1
kind: Pod
metadata: {name: llama-0, namespace: elsewhere, labels: {app: llama}}
status: {podIP: 10.0.0.3, conditions: [{type: Ready, status: "True"}]}
"""
ENDPOINTS = """
endpoints:
- {name: a, address: 10.0.1.1, port: "8000", namespace: ns, labels: {app: llama}, node: n1}
- {name: b, address: "2001:DB8::1", port: 9000, namespace: ns, labels: {app: llama}}
"""


def objective(group: str = "llm-d.ai", pool: str = "llama", priority: str = "5", annotations: str = "{}") -> str:
    return f"""
apiVersion: {group}/v1alpha2
kind: InferenceObjective
metadata: {{name: vip, namespace: ns, annotations: {annotations}}}
spec: {{poolRef: {{name: {pool}}}, priority: {priority}}}
"""


def rewrite(group: str = "inference.networking.x-k8s.io") -> str:
    return f"""
apiVersion: {group}/v1alpha2
kind: InferenceModelRewrite
metadata: {{name: r, namespace: ns}}
spec:
  poolRef: {{name: llama}}
  rules: [{{matches: [{{model: {{value: a}}}}], targets: [{{modelRewrite: b}}]}}]
"""


def load(*texts: str, pool: str | None = None) -> list[PoolState]:
    contents: list[dict[str, Any]] = [each for text in texts for each in yaml.safe_load_all(text)]
    return pools_of([Document(f"f#{i}", each) for i, each in enumerate(contents, 1)], pool)


def refused(*texts: str, pool: str | None = None) -> str:
    with pytest.raises(ConfigError) as error:
        load(*texts, pool=pool)
    return str(error.value)


def test_an_endpoints_file_alone_is_one_pool() -> None:
    (state,) = load(ENDPOINTS, pool="mine")
    assert (state.name, state.namespace, state.grpc_port) == ("mine", "default", None)
    assert [(each.name, each.address) for each in state.endpoints] == [
        ("ns/a", "10.0.1.1:8000"),
        ("ns/b", "[2001:db8::1]:9000"),
    ]
    assert state.endpoints[0].labels == {"app": "llama"}
    assert [each.node for each in state.endpoints] == ["n1", ""]
    assert load("endpoints: []")[0] == PoolState("default")


@pytest.mark.parametrize("group", ["llm-d.ai", "inference.networking.x-k8s.io"])
def test_a_pool_has_the_pods_endpoints_and_rules_that_belong_to_it(group: str) -> None:
    (state,) = load(POOL, PODS, ENDPOINTS, objective(group), rewrite(group), "kind: Gateway\nspec: 5")
    assert (state.name, state.namespace, state.grpc_port) == ("llama", "ns", 9002)
    names = ["ns/a", "ns/b", "ns/llama-0-rank-0", "ns/llama-0-rank-1"]
    assert [each.name for each in state.endpoints] == names
    assert state.objectives == {"vip": Objective(5)}
    assert state.rewrites == (Rewrite(("a",), (Target("b"),)),)


def test_several_pools_share_nothing_and_a_name_picks_one() -> None:
    other = POOL.replace("llama", "other").replace("9002", "9102")
    first, second = load(POOL, other, PODS, objective())
    assert [each.name for each in first.endpoints] == ["ns/llama-0-rank-0", "ns/llama-0-rank-1"]
    assert [each.name for each in second.endpoints] == ["ns/other-0-rank-0", "ns/other-0-rank-1"]
    assert (second.objectives, second.grpc_port) == ({}, 9102)
    assert [state.name for state in load(POOL, other, PODS, pool="other")] == ["other"]


def test_a_pool_without_a_picker_is_a_pool() -> None:
    text = POOL.replace("  endpointPickerRef: {name: epp, port: {number: 9002}}\n", "")
    assert load(text)[0].grpc_port is None


def test_an_objective_says_within_what_its_requests_are_to_be_served() -> None:
    both = "{warmpath/slo-ttft-ms: '500', warmpath/slo-tpot-ms: '25.5', team: x}"
    for texts in ((POOL, objective(annotations=both)), (ENDPOINTS, objective(annotations=both))):
        found = load(*texts, pool="llama")[0].objectives
        assert found == {"vip": Objective(5, Slo(0.5, 0.0255, "vip"))}
    assert load(POOL, objective(annotations="{warmpath/slo-tpot-ms: '0'}"))[0].objectives == {"vip": Objective(5)}


def test_a_priority_may_be_left_out() -> None:
    assert load(POOL, objective(priority="null"))[0].objectives == {"vip": Objective(0)}


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (
            [POOL, objective(annotations="{warmpath/slo-ttft-ms: soon}")],
            "f#2: InferenceObjective ns/vip: metadata.annotations['warmpath/slo-ttft-ms']: got 'soon'; expected",
        ),
        (
            [POOL, objective(annotations="{warmpath/slo-tfft-ms: '1'}")],
            "no such annotation; did you mean 'warmpath/slo-ttft-ms'?",
        ),
        (
            ["endpoints: [{name: a, address: localhost, port: 1}]"],
            "f#1: endpoints[0].address: got 'localhost'; expected",
        ),
        (["endpoints: [{name: a, address: 1.2.3.4, port: 0}]"], "f#1: endpoints[0].port: got 0; expected a port"),
        (["endpoints: [{name: a, address: 1.2.3.4, port: '99999999'}]"], "endpoints[0].port: got '99999999'"),
        (["endpoints: [{name: a, address: 1.2.3.4, port: x}]"], "endpoints[0].port: got 'x'; expected a port"),
        (
            ["endpoints: [{name: a, adress: 1.2.3.4, port: 1}]"],
            "endpoints[0].adress: not supported; supported: name, address, port, namespace, labels, node;"
            " did you mean 'address'?",
        ),
        (["endpoints: [{name: a, port: 1}]"], "f#1: endpoints[0].address: missing, but required"),
        (["endpoint: []"], "f#1: endpoint: not supported; supported: endpoints"),
        ([ENDPOINTS.replace("name: b", "name: a")], "name 'ns/a' is taken by f#1: endpoints[0]"),
        ([ENDPOINTS.replace('"2001:DB8::1", port: 9000', "10.0.1.1, port: 8000")], "address '10.0.1.1:8000' is taken"),
        ([PODS], "a Pod without an InferencePool"),
        (["kind: Gateway"], "the files name no endpoints"),
        ([POOL, POOL], "f#2: InferencePool ns/llama: metadata.name: InferencePool ns/llama is also in f#1"),
        ([POOL.replace("number: 8001", "number: 8000")], "spec.targetPorts: got [8000, 8000]; expected each port once"),
        ([POOL.replace("8001", "70000")], "spec.targetPorts[1].number: got 70000; expected a whole number <= 65535"),
        (
            [POOL.replace("matchLabels", "matchExpressions")],
            "spec.selector.matchExpressions: not supported; supported: matchLabels",
        ),
        ([POOL.replace(", port: {number: 9002}", "")], "spec.endpointPickerRef.port: missing; expected"),
        (
            [POOL.replace("k8s.io/v1", "k8s.io/v1alpha2")],
            "f#1: InferencePool ns/llama: apiVersion: got 'inference.networking.k8s.io/v1alpha2'",
        ),
        ([POOL.replace("g.k8s.io/v1", "g.x-k8s.io/v1alpha2")], "expected inference.networking.k8s.io/v1"),
        ([POOL, objective(pool="lama")], "names no InferencePool here; did you mean 'llama'?"),
        (
            [POOL, ENDPOINTS.replace("app: llama", "app: x", 1)],
            "f#2: endpoints[0]: namespace 'ns' with labels {'app': 'x'}",
        ),
        ([POOL, PODS.replace("10.0.0.1", "nowhere")], "'nowhere' does not appear to be an IPv4 or IPv6 address"),
        ([POOL, PODS.replace("10.0.0.2", "10.0.0.1").replace("app: other", "app: llama")], "is taken by"),
        ([ENDPOINTS, objective()], "spec.poolRef.name 'llama' names no InferencePool here; expected one of 'default'"),
    ],
)
def test_what_is_wrong_is_refused_with_place_value_and_expectation(texts: list[str], says: str) -> None:
    assert says in refused(*texts)


def test_an_unknown_pool_name_is_refused_with_the_nearest() -> None:
    assert refused(POOL, pool="lama") == "pool 'lama' names no InferencePool here; did you mean 'llama'?"


def test_other_projects_kinds_of_the_same_name_are_skipped() -> None:
    assert load(POOL, "{apiVersion: example.org/v1, kind: InferencePool}", "{apiVersion: v2, kind: Pod}")


def test_ranks_behind_one_port_are_endpoints_of_their_own() -> None:
    label = "warmpath/data-parallel-size"
    pods = PODS.replace("tier: gold", f"{label}: '2'")
    entries = ENDPOINTS.replace("labels: {app: llama}, node: n1", f"labels: {{app: llama, {label}: '2'}}, node: n1")
    (state,) = load(POOL, pods, entries)
    assert [(each.name, each.address, each.rank, each.node) for each in state.endpoints] == [
        ("ns/a-rank-0", "10.0.1.1:8000", 0, "n1"),
        ("ns/a-rank-1", "10.0.1.1:8000", 1, "n1"),
        ("ns/b", "[2001:db8::1]:9000", None, ""),
        ("ns/llama-0-rank-0", "10.0.0.1:8000", 0, ""),
        ("ns/llama-0-rank-1", "10.0.0.1:8000", 1, ""),
        ("ns/llama-0-rank-2", "10.0.0.1:8001", 0, ""),
        ("ns/llama-0-rank-3", "10.0.0.1:8001", 1, ""),
    ]
    again = entries.replace("name: a", "name: c").replace("name: b", "name: d")
    assert "address '10.0.1.1:8000' is taken by" in refused(POOL, entries, again)
    expected = f"{label}: got 'x'; expected the ranks behind one port, 1 to 64"
    assert refused(POOL, entries.replace("'2'", "x")) == f"f#2: endpoints[0].labels: {expected}"
    assert refused(POOL, pods.replace("'2'", "x")) == f"f#2: Pod ns/llama-0: metadata.labels: {expected}"
