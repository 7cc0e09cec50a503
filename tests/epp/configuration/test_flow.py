"""The section `flowControl` becomes queues, limits and policies; what is wrong with it is refused by name."""

from math import inf
from random import Random

import pytest

from epp.configuration.describe import describe
from epp.configuration.loader import Pipeline, load_strategy, load_text
from epp.errors import ConfigError

HEAD = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"
PLUGINS = """
plugins:
- type: queue-scorer
- {type: round-robin-fairness-policy, name: turns}
- type: slo-deadline-ordering-policy
- {type: priority-holdback-policy, name: holdback, parameters: {minCeiling: 0.4}}
- {type: concurrency-detector, parameters: {maxConcurrency: 132}}
"""


def loaded(body: str, *, flow_control: bool = False) -> Pipeline:
    return load_text(HEAD + body, clock=lambda: 0.0, random=Random(0), flow_control=flow_control)


def refused(body: str) -> str:
    with pytest.raises(ConfigError) as found:
        loaded(body)
    return str(found.value)


def test_without_the_gate_nothing_waits_and_the_section_is_said_to_have_no_effect() -> None:
    pipeline = loaded(PLUGINS + "flowControl: {maxRequests: 10, saturationDetector: {pluginRef: concurrency-detector}}")
    assert pipeline.flow is None
    assert pipeline.detector.name == "concurrency-detector"
    assert "flowControl.maxRequests: without the feature gate flowControl requests do not wait here" in pipeline.idle
    assert {"turns", "holdback"} <= set(pipeline.unused)


@pytest.mark.parametrize("gate", ["flowControl", "flowControl=true"])
def test_the_gate_alone_gives_the_defaults_of_llm_d(gate: str) -> None:
    pipeline = loaded(PLUGINS + f"featureGates: [{gate}]")
    flow = pipeline.flow
    assert flow is not None
    assert flow.detector.name == "utilization-detector"
    assert flow.usage.name == "static-usage-limit-policy"
    assert (flow.ttl, flow.no_endpoint_ttl, flow.max_requests, flow.max_bytes) == (60.0, 60.0, inf, inf)
    band = flow.band(-7)
    assert band is flow.band(3) is flow.usual
    assert (band.max_requests, band.max_bytes, band.ttl) == (5000, 1e9, None)
    assert (band.fairness.name, band.ordering.name) == ("global-strict-fairness-policy", "fcfs-ordering-policy")


def test_everything_that_can_be_said() -> None:
    pipeline = loaded(
        PLUGINS
        + """
featureGates: [flowControl]
flowControl:
  maxRequests: 10k
  maxBytes: 2Gi
  defaultRequestTTL: 30s
  noEndpointRequestTTL: 10m
  usageLimitPolicyPluginRef: holdback
  saturationDetector: {pluginRef: concurrency-detector}
  defaultPriorityBand: {maxRequests: 100}
  defaultNegativePriorityBand: {maxRequests: "1000", defaultRequestTTL: 0s}
  priorityBands:
  - {priority: 100, maxBytes: 500M, fairnessPolicyRef: turns, orderingPolicyRef: slo-deadline-ordering-policy}
"""
    )
    flow = pipeline.flow
    assert flow is not None
    assert (flow.max_requests, flow.max_bytes) == (10_000, 2 << 30)
    assert (flow.ttl, flow.no_endpoint_ttl) == (30.0, 600.0)
    assert (flow.usage.name, flow.detector.name) == ("holdback", "concurrency-detector")
    assert (flow.band(0).max_requests, flow.band(-1).max_requests, flow.band(-1).ttl) == (100, 1000, 0.0)
    high = flow.band(100)
    assert (high.max_bytes, high.fairness.name, high.ordering.name) == (5e8, "turns", "slo-deadline-ordering-policy")
    assert not pipeline.unused
    text = describe(pipeline)
    assert "flow control               at most 10000 requests and 2147483648 bytes wait, at most 30 s each" in text
    assert "other negative priorities  at most 1000 requests and 1000000000 bytes wait, for ever each" in text


def test_a_policy_that_is_not_declared_is_added_by_its_type() -> None:
    flow = loaded(
        "plugins: [{type: queue-scorer}]\nfeatureGates: [flowControl]\n"
        "flowControl: {defaultPriorityBand: {fairnessPolicyRef: program-aware-fairness}}"
    ).flow
    assert flow is not None
    assert flow.usual.fairness.name == "program-aware-fairness"


def test_a_policy_of_bands_is_taken_and_shown() -> None:
    pipeline = loaded(
        PLUGINS + "featureGates: [flowControl]\n"
        "flowControl: {bandSelectionPolicyPluginRef: strict-band-selection-policy}"
    )
    assert pipeline.flow is not None
    assert pipeline.flow.selection is not None
    assert "bands strict-band-selection-policy" in describe(pipeline)


@pytest.mark.parametrize(
    ("section", "error"),
    [
        ("usageLimitPolicyPluginRef: turns", "flowControl.usageLimitPolicyPluginRef: 'turns' is no usage limit policy"),
        ("usageLimitPolicyPluginRef: holdbak", "no plugin is called 'holdbak'; did you mean 'holdback'?"),
        (
            "defaultPriorityBand: {orderingPolicyRef: queue-scorer}",
            "flowControl.defaultPriorityBand.orderingPolicyRef: 'queue-scorer' is no ordering policy",
        ),
        (
            "bandSelectionPolicyPluginRef: turns",
            "flowControl.bandSelectionPolicyPluginRef: 'turns' is no band selection policy",
        ),
        ("priorityBands: [{maxRequests: 1}]", "flowControl.priorityBands[0].priority: missing"),
        (
            "priorityBands: [{priority: 1}, {priority: 1}]",
            "flowControl.priorityBands[1].priority: 1 has a band above; expected each once",
        ),
    ],
)
def test_what_is_wrong_is_refused_by_name(section: str, error: str) -> None:
    assert error in refused(f"{PLUGINS}featureGates: [flowControl]\nflowControl: {{{section}}}")


def test_the_flag_alone_has_tenants_take_turns_and_leaves_room_to_the_highest_priority() -> None:
    pipeline = load_strategy("prefix-aware", clock=lambda: 0.0, random=Random(0), flow_control=True)
    flow = pipeline.flow
    assert flow is not None
    assert flow.detector.name == "expected-ttft"
    assert flow.usual.fairness.name == "round-robin-with-room-fairness-policy"
    assert flow.usage.ceilings(0.5, (1, 0)) == pytest.approx([1.0, 0.5])
    assert load_strategy("prefix-aware", clock=lambda: 0.0, random=Random(0)).flow is None


def test_the_flag_takes_what_a_configuration_says() -> None:
    flow = loaded(PLUGINS + "flowControl: {usageLimitPolicyPluginRef: holdback}", flow_control=True).flow
    assert flow is not None
    assert flow.usage.name == "holdback"
    assert flow.usual.fairness.name == "global-strict-fairness-policy"
