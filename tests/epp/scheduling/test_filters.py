from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from epp.errors import NoEndpoint
from epp.plugin import Endpoint, Filter, InFlight, PrefixMatch, Request
from epp.protocol import ROLE_LABEL, TEST_SELECTION
from epp.scheduling.filters import (
    ByLabelFilter,
    Condition,
    ContextLengthAware,
    DecodeFilter,
    EncodeFilter,
    HeaderBasedTestingFilter,
    LabelSelectorFilter,
    PrefillFilter,
    PrefixCacheAffinityFilter,
    Requirement,
    TopologyAffinityFilter,
    TopologyAffinityScorer,
    UtilizationFilter,
)
from epp.scheduling.headroom import LatencyHeadroom
from tests.support.scheduling.schedulers import Held, ask, pod, pods, scheduler
from tests.support.scheduling.signals import with_signal

GPU = [
    pod("h100", labels={"gpu": "H100", "tier": "gold"}),
    pod("a100", labels={"gpu": "A100"}),
    pod("none"),
]


def kept(plugin: Filter, endpoints: Sequence[Endpoint], request: Request | None = None) -> list[str]:
    return [endpoint.name for endpoint in plugin.filter(request or ask(), endpoints)]


@pytest.mark.parametrize(
    ("selector", "names"),
    [
        (LabelSelectorFilter(), ["h100", "a100", "none"]),
        (LabelSelectorFilter({"gpu": "H100"}), ["h100"]),
        (LabelSelectorFilter({"gpu": "H100", "tier": "silver"}), []),
        (LabelSelectorFilter({}, [Requirement("gpu", "In", ["A100", "H100"])]), ["h100", "a100"]),
        (LabelSelectorFilter({}, [Requirement("gpu", "NotIn", ["A100"])]), ["h100", "none"]),
        (LabelSelectorFilter({}, [Requirement("tier", "Exists")]), ["h100"]),
        (LabelSelectorFilter({}, [Requirement("gpu", "DoesNotExist")]), ["none"]),
        (LabelSelectorFilter({"gpu": "H100"}, [Requirement("tier", "DoesNotExist")]), []),
        (ByLabelFilter("gpu", ["A100", "H100"]), ["h100", "a100"]),
        (ByLabelFilter("gpu", ["A100"], allows_no_label=True), ["a100", "none"]),
    ],
)
def test_labels_select(selector: Filter, names: list[str]) -> None:
    assert kept(selector, GPU) == names


@pytest.mark.parametrize(
    ("operator", "values"), [("In", []), ("NotIn", []), ("Exists", ["x"]), ("DoesNotExist", ["x"]), ("Like", ["x"])]
)
def test_a_requirement_that_means_nothing_is_refused(operator: str, values: list[str]) -> None:
    with pytest.raises(ValueError, match=r"operator|values"):
        Requirement("gpu", operator, values)  # type: ignore[arg-type]


def test_roles() -> None:
    roles = ["encode", "prefill", "decode", "encode-prefill", "prefill-decode", "encode-prefill-decode", "both", "x"]
    endpoints = [*(pod(role, labels={ROLE_LABEL: role}) for role in roles), pod("unlabelled")]
    both = ["prefill-decode", "encode-prefill-decode", "both"]
    assert kept(DecodeFilter(), endpoints) == ["decode", *both, "unlabelled"]
    assert kept(PrefillFilter(), endpoints) == ["prefill", "encode-prefill", *both]
    assert kept(EncodeFilter(), endpoints) == ["encode", "encode-prefill", "encode-prefill-decode"]


def affinity_case(shares: dict[str, int], tokens: dict[str, int]) -> tuple[list[Endpoint], Request]:
    """Endpoints by name: tenths of the prompt held, and uncached tokens in flight."""
    endpoints = pods("".join(shares))
    request = ask()
    request = with_signal(request, PrefixMatch, {e: PrefixMatch(0, shares[e.name], 10) for e in endpoints})
    request = with_signal(request, InFlight, {e: InFlight(1, tokens.get(e.name, 0)) for e in endpoints})
    return endpoints, request


@pytest.mark.parametrize(
    ("shares", "tokens", "names"),
    [
        ({"a": 8, "b": 7, "c": 10}, {}, "ac"),
        ({"a": 7, "b": 0}, {}, "ab"),
        ({"a": 9, "b": 8}, {"a": 10**9}, "ab"),
        # 18 s at 15928 tokens/s are 286704 tokens: at the penalty it sticks, beyond it does not.
        ({"a": 9, "b": 0}, {"a": 286_704}, "a"),
        ({"a": 9, "b": 0}, {"a": 286_705}, "ab"),
        # The best of each side counts.
        ({"a": 9, "b": 9, "c": 0, "d": 0}, {"a": 10**9, "c": 10**9}, "ab"),
        ({"a": 9, "b": 9, "c": 0, "d": 0}, {"a": 10**9, "b": 286_706, "c": 10**9, "d": 1}, "abcd"),
    ],
)
def test_affinity_sticks_until_the_penalty(shares: dict[str, int], tokens: dict[str, int], names: str) -> None:
    endpoints, request = affinity_case(shares, tokens)
    assert kept(PrefixCacheAffinityFilter(), endpoints, request) == list(names)


def test_affinity_without_a_penalty_always_sticks() -> None:
    endpoints, request = affinity_case({"a": 9, "b": 0}, {"a": 10**9})
    assert kept(PrefixCacheAffinityFilter(max_ttft_penalty_ms=0), endpoints, request) == ["a"]


def test_affinity_explores_as_often_as_asked() -> None:
    endpoints, request = affinity_case({"a": 9, "b": 0}, {})
    explorer = PrefixCacheAffinityFilter(exploration_probability=0.25)
    explorer.random = Random(1)
    explored = sum(len(explorer.filter(request, endpoints)) == 2 for _ in range(2000))
    assert 430 < explored < 570


@pytest.mark.parametrize("lost", [PrefixMatch, InFlight])
def test_affinity_keeps_all_when_a_signal_was_lost(lost: type) -> None:
    endpoints, request = affinity_case({"a": 9, "b": 0}, {})
    request = replace(request, signals={kind: found for kind, found in request.signals.items() if kind is not lost})
    assert kept(PrefixCacheAffinityFilter(), endpoints, request) == ["a", "b"]


@pytest.mark.parametrize(
    ("wrong", "names"),
    [
        ({"affinity_threshold": 1.1}, "affinityThreshold"),
        ({"exploration_probability": -0.1}, "explorationProbability"),
        ({"max_ttft_penalty_ms": float("nan")}, "maxTTFTPenaltyMs"),
        ({"peak_prefill_throughput": 0}, "peakPrefillThroughput"),
    ],
)
def test_affinity_refuses_nonsense(wrong: dict[str, object], names: str) -> None:
    with pytest.raises(ValueError, match=names):
        PrefixCacheAffinityFilter(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metric", "limit", "names"),
    [
        ("active-requests", 2, "ab"),
        ("active-requests", 1, "a"),
        ("running-requests", 4, "bc"),
        ("waiting-queue", 0, "ac"),
        ("kv-cache-utilization", 0.5, "ab"),
    ],
)
def test_utilization_keeps_what_is_within_the_cap(metric: str, limit: float, names: str) -> None:
    a, b, c = endpoints = [pod("a", running=5), pod("b", waiting=1, kv_usage=0.5), pod("c", kv_usage=0.51)]
    request = ask()
    request = with_signal(request, InFlight, {a: InFlight(1, 0), b: InFlight(2, 0), c: InFlight(3, 0)})
    capped = UtilizationFilter([Condition(metric, limit)])  # type: ignore[arg-type]
    assert kept(capped, endpoints, request) == list(names)


def test_utilization_takes_every_condition_and_falls_back_only_when_reported() -> None:
    endpoints = [pod("a", running=5), pod("b", waiting=5)]
    conditions = [Condition("running-requests", 1), Condition("waiting-queue", 1)]
    assert kept(UtilizationFilter(conditions, fallback_on_empty=True), endpoints) == ["a", "b"]
    with pytest.raises(NoEndpoint, match="UtilizationFilter"):
        scheduler(filters=[UtilizationFilter(conditions)]).choose(ask(), endpoints)


def test_utilization_counts_unknown_figures_as_zero() -> None:
    everything = [
        Condition("active-requests", 0),
        Condition("running-requests", 0),
        Condition("waiting-queue", 0),
        Condition("kv-cache-utilization", 0),
    ]
    assert kept(UtilizationFilter(everything), pods("a")) == ["a"]


def test_utilization_refuses_nonsense() -> None:
    with pytest.raises(ValueError, match="conditions"):
        UtilizationFilter([])
    with pytest.raises(ValueError, match=r"waiting-queue.*got 'temperature'"):
        Condition("temperature", 1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("header", "names"),
    [
        (None, "abcd"),
        ("  ", "abcd"),
        ("10.0.0.1", "ab"),
        ("10.0.0.1:8001", "b"),
        ("10.0.0.2, 10.0.0.1:8000 ,", "ac"),
        ("fd00::1", "d"),
        ("[fd00::1]", "d"),
        ("[fd00::1]:8000", "d"),
        ("[fd00::1]:9", ""),
        ("256.256.256.256", ""),
        ("10.0.0", ""),
    ],
)
def test_the_testing_header_selects(header: str | None, names: str) -> None:
    addresses = {"a": "10.0.0.1:8000", "b": "10.0.0.1:8001", "c": "10.0.0.2:8000", "d": "[fd00::1]:8000"}
    endpoints = [pod(name, address=address) for name, address in addresses.items()]
    request = ask(headers={} if header is None else {TEST_SELECTION: header})
    assert kept(HeaderBasedTestingFilter(), endpoints, request) == list(names)


def test_affinity_reads_what_producers_find() -> None:
    a, b = pods("ab")
    s = scheduler(filters=[PrefixCacheAffinityFilter(max_ttft_penalty_ms=0)], producers=[Held(b=(100, 9))])
    assert s.choose(ask(), [a, b]).endpoint is b


LENGTHS = [
    pod("short", labels={"llm-d.ai/context-length-range": "0-2048"}),
    pod("long", labels={"llm-d.ai/context-length-range": "2048 - 8192"}),
    pod("wrong", labels={"llm-d.ai/context-length-range": "8192-2048"}),
    pod("any"),
]


@pytest.mark.parametrize(
    ("tokens", "scores"),
    [
        (1024, [0.3 + 0.7 * (0.7 / 1.2048 + 0.3 * 0.5), 0.3 / 2.024, 0.0, 0.5]),
        (9192, [0.3 / 8.144, 0.3 / 2.0, 0.0, 0.5]),
    ],
)
def test_endpoints_for_a_range_of_lengths(tokens: int, scores: list[float]) -> None:
    assert ContextLengthAware().score(ask(tokens=tokens), LENGTHS) == pytest.approx(scores)
    assert kept(ContextLengthAware(), LENGTHS, ask(tokens=tokens)) == ["short", "long", "wrong", "any"]


def test_a_range_of_one_length_scores_full() -> None:
    exact = pod("exact", labels={"n": "7-7"})
    assert ContextLengthAware("n").score(ask(tokens=7), [exact]) == [1.0]


@pytest.mark.parametrize(
    ("tokens", "names"), [(100, ["short", "any"]), (2048, ["short", "long", "any"]), (9000, ["any"])]
)
def test_lengths_may_filter(tokens: int, names: list[str]) -> None:
    assert kept(ContextLengthAware(enable_filtering=True), LENGTHS, ask(tokens=tokens)) == names


def test_a_label_of_lengths_has_a_name() -> None:
    with pytest.raises(ValueError, match="label: expected the key of a label"):
        ContextLengthAware(label="")


HOST, RACK = "kubernetes.io/hostname", "topology.kubernetes.io/rack"
ZONE, REGION = "topology.kubernetes.io/zone", "topology.kubernetes.io/region"
PEER = pod("peer", labels={HOST: "h1", RACK: "r1", ZONE: "z1", REGION: "eu"})
PLACES = [
    pod("same host", labels={HOST: "h1", RACK: "r1", ZONE: "z1", REGION: "eu"}),
    pod("same rack", labels={HOST: "h2", RACK: "r1", ZONE: "z1", REGION: "eu"}),
    pod("same zone", labels={HOST: "h3", RACK: "r2", ZONE: "z1", REGION: "eu"}),
    pod("same region", labels={REGION: "eu"}),
    pod("far", labels={HOST: "h9", REGION: "us"}),
    pod("unknown"),
]


@pytest.mark.parametrize(
    ("near", "names"),
    [
        ("host", ["same host"]),
        ("rack", ["same host", "same rack"]),
        ("zone", ["same host", "same rack", "same zone"]),
        ("region", ["same host", "same rack", "same zone", "same region"]),
    ],
)
def test_those_near_the_other_stages_endpoint_are_kept(near: Any, names: list[str]) -> None:
    assert kept(TopologyAffinityFilter(near), PLACES, ask(peer=PEER)) == names


def test_where_nobody_is_near_or_nothing_is_known_all_are_kept() -> None:
    for request in (ask(), ask(peer=pod("nowhere"))):
        assert kept(TopologyAffinityFilter("region"), PLACES, request) == [each.name for each in PLACES]
    assert kept(TopologyAffinityFilter(), PLACES[3:], ask(peer=PEER)) == ["same region", "far", "unknown"]


def test_the_nearer_the_better() -> None:
    assert TopologyAffinityScorer().score(ask(peer=PEER), PLACES) == [1.0, 0.2, 0.05, 0.02, 0.0, 0.0]
    assert TopologyAffinityScorer().score(ask(), PLACES) == [0.0] * 6


def test_the_load_gate_may_go_by_predicted_latency() -> None:
    a, b = pod("a"), pod("b")
    gate = PrefixCacheAffinityFilter(ttft_source="latencyPredictor", max_ttft_penalty_ms=5000)
    assert LatencyHeadroom in gate.needs
    for later, kept in ((4.0, [a]), (6.0, [a, b])):
        rooms = {a: LatencyHeadroom(0, 0, True, True, later, 1), b: LatencyHeadroom(0, 0, True, True, 0.5, 1)}
        request = with_signal(ask(), PrefixMatch, {a: PrefixMatch(90, 9, 10), b: PrefixMatch(0, 0, 10)})
        assert [*gate.filter(with_signal(request, LatencyHeadroom, rooms), [a, b])] == kept
        assert [*gate.filter(request, [a, b])] == [a, b], "nothing is known of them"
