"""Every plugin type that llm-d or GIE document loads, or is refused with a sentence that says what is missing."""

import importlib
import importlib.util
import re
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, cast, get_type_hints

import pytest

import epp
from epp.configuration import builtin
from epp.configuration.registry import find_class
from epp.documents.strict import parameters_of
from epp.errors import ConfigError
from epp.plugin import Plugin
from tests.support.scheduling.pipelines import loaded

GIE = """
queue-scorer running-requests-size-scorer kv-cache-utilization-scorer prefix-cache-scorer lora-affinity-scorer
token-load-scorer latency-scorer prefix-cache-affinity-filter slo-headroom-tier-filter
header-based-testing-filter utilization-detector concurrency-detector max-score-picker random-picker
weighted-random-picker single-profile-handler approx-prefix-cache-producer inflight-load-producer
predicted-latency-producer latency-slo-admitter request-attribute-reporter destination-endpoint-served-verifier
openai-parser vllmgrpc-parser passthrough-parser metrics-data-source core-metrics-extractor k8s-notification-source
endpoint-notification-source global-strict-fairness-policy round-robin-fairness-policy fcfs-ordering-policy
edf-ordering-policy slo-deadline-ordering-policy static-usage-limit-policy
"""
ROUTER = """
label-selector-filter by-label-selector by-label decode-filter prefill-filter encode-filter session-affinity-filter
endpoint-attribute-filter topology-affinity-filter utilization-filter active-request-filter disagg-profile-handler
pd-profile-handler data-parallel-profile-handler header-profile-handler disagg-headers-handler prefill-header-handler
always-disagg-pd-decider prefix-based-pd-decider always-disagg-multimodal-decider load-aware-scorer
active-request-scorer context-length-aware session-affinity-scorer header-label-affinity-scorer no-hit-lru-scorer
precise-prefix-cache-scorer mm-embeddings-cache-scorer endpoint-attribute-scorer topology-affinity-scorer
token-producer tokenizer precise-prefix-cache-producer burst-prefix-cache-producer session-id-producer
p2p-source-producer mm-embeddings-cache-producer agent-identity probabilistic-admitter
disaggregatedset-rollout-screener program-aware-fairness priority-holdback-policy soft-reflective-ceiling-policy
sheddable-eviction-filter priority-then-time-eviction-order-policy models-data-source models-data-extractor
dcgm-data-source dcgm-extractor topology-extractor file-discovery anthropic-parser vllmhttp-parser sglanghttp-parser
vertexai-parser session-state-producer redis-syncer
"""
OURS = "expected-ttft round-robin-picker approx-cache-room-producer role-profile-handler expected-ttft-pd-decider"
ALL = [*GIE.split(), *ROUTER.split(), *OURS.split()]

REQUIRED = {
    "by-label": "{label: role, validValues: [decode]}",
    "utilization-filter": "{conditions: [{metric: waiting-queue, maxValue: 5}]}",
    "session-id-producer": "{headerName: x-chat}",
    "header-label-affinity-scorer": "{headerName: x-zone, labelKey: zone}",
    "active-request-filter": "{conditions: [{metric: active-requests, maxValue: 5}]}",
    "disagg-profile-handler": "{profiles: {decode: default}}",
    "endpoint-attribute-filter": "{attribute: a, algorithm: {type: threshold, threshold: {operator: Equal, value: 1}}}",
    "endpoint-attribute-scorer": "{attributeKey: a, algorithm: {type: linear_lower_is_better}}",
    "pd-profile-handler": "{decodeProfile: default, prefillProfile: default}",
}
"""Parameters of types that do not work without."""

CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {{type: {type}, parameters: {parameters}}}
"""


@pytest.mark.parametrize("type_", ALL)
def test_every_documented_type_loads_or_says_what_is_missing(type_: str) -> None:
    text = CONFIG.format(type=type_, parameters=REQUIRED.get(type_, "{}"))
    kind = builtin.ALIASES.get(type_, type_)
    if kind in builtin.MISSING:
        with pytest.raises(ConfigError) as refused:
            loaded(text)
        assert str(refused.value) == f"plugins[0].type: {kind} is not there yet: {builtin.MISSING[kind]}"
    else:
        pipeline = loaded(text)
        assert (type_ in pipeline.registry) == (kind in builtin.CLASSES)


SOURCE = "\n".join(path.read_text("utf-8") for path in Path(epp.__file__).parent.rglob("*.py"))


def parameters_read_nowhere(cls: type[Any], path: str = "") -> list[str]:
    found = []
    for key, field in parameters_of(cls).items():
        if not re.search(rf"\.{field.name}\b", SOURCE):
            found.append(path + key)
        elif is_dataclass(kind := get_type_hints(cls)[field.name]):
            found += parameters_read_nowhere(cast("type[Any]", kind), f"{path}{key}.")
    return found


@pytest.mark.parametrize("type_", sorted(builtin.CLASSES))
def test_a_parameter_that_nothing_reads_is_reported_to_have_no_effect(type_: str) -> None:
    assert set(parameters_read_nowhere(find_class(type_, ""))) - {"kvEventsConfig.engineType"} <= set(
        builtin.IDLE.get(type_, ())
    )


@pytest.mark.parametrize(
    ("type_", "setting", "idle"),
    [(type_, key, idle) for type_, all_ in builtin.IDLE.items() for key, idle in all_.items()],
)
def test_the_documentation_has_every_setting_without_effect(type_: str, setting: str, idle: builtin.Idle) -> None:
    rows = (Path(epp.__file__).parents[1] / "docs" / "kubernetes.md").read_text("utf-8").splitlines()
    words = re.escape(setting.rpartition(".")[2])
    assert any(re.search(rf"\b{words}\b", row) and row.endswith(f"| {idle.why} |") for row in rows)


def refusal(type_: str) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(CONFIG.format(type=type_, parameters="{}"))
    return str(refused.value)


@pytest.mark.parametrize("type_", sorted(builtin.REMOVED))
def test_a_type_that_is_gone_names_its_successor(type_: str) -> None:
    successor, how = builtin.REMOVED[type_]
    assert find_class(successor, "").__doc__
    assert refusal(type_) == (f"plugins[0].type: {type_} is gone from GIE and llm-d; expected {successor} ({how})")


@pytest.mark.parametrize("type_", sorted({*ALL, *builtin.MISSING, *builtin.REMOVED}))
def test_every_hint_names_a_type_that_loads(type_: str) -> None:
    for wrong in (
        type_[:-1],
        type_.replace("-", "_"),
        type_ + "s",
        type_.rpartition("-")[0] + "-plugin",
        f"old-{type_}",
    ):
        if wrong == type_ or "did you mean" not in (reported := refusal(wrong)):
            continue
        hinted = reported.split("did you mean '")[1].split("'")[0]
        assert hinted not in builtin.MISSING
        assert (
            hinted in builtin.BUILT_IN
            or builtin.ALIASES.get(hinted) in builtin.BUILT_IN
            or find_class(builtin.ALIASES.get(hinted, hinted), "")
        )


def test_a_name_near_one_that_is_not_there_yet_says_so() -> None:
    assert refusal("request-attribute-reporte") == (
        "plugins[0].type: no plugin type 'request-attribute-reporte'; request-attribute-reporter is a known type, but "
        "not there yet: what an answer used told to the gateway; remove it: /metrics and /decisions say it"
    )


@pytest.mark.parametrize("type_", sorted(builtin.NOTHING))
def test_what_does_nothing_here_is_said(type_: str) -> None:
    pipeline = loaded(CONFIG.format(type=type_, parameters="{anything: 1}") + "- {type: queue-scorer}\n")
    assert pipeline.idle == (f"plugins[0]: {builtin.NOTHING[type_]}",)


@pytest.mark.parametrize("type_", sorted(builtin.MISSING))
def test_what_is_missing_says_what_to_do(type_: str) -> None:
    assert "; remove it" in builtin.MISSING[type_]


def test_no_type_has_two_meanings() -> None:
    tables = [set(t) for t in (builtin.CLASSES, builtin.ALIASES, builtin.BUILT_IN, builtin.MISSING, builtin.REMOVED)]
    assert sum(map(len, tables)) == len(set.union(*tables))
    assert set(builtin.ALIASES.values()) <= set(builtin.CLASSES) | set(builtin.BUILT_IN)


@pytest.mark.parametrize("type_", sorted(builtin.CLASSES))
def test_classes_are_plugins_with_a_docstring(type_: str) -> None:
    cls = find_class(type_, "")
    assert issubclass(cls, Plugin)
    assert cls.__doc__
    module, _, name = builtin.CLASSES[type_].rpartition(".")
    assert getattr(importlib.import_module(module), name) is cls


@pytest.mark.parametrize(
    ("type_", "parameters", "line"),
    [
        ("prefix-cache-scorer", "{autoTune: perhaps}", "plugins[0].parameters.autoTune: expected true or false"),
        (
            "metrics-data-source",
            "{scheme: https}",
            "metrics-data-source with 'https' is not there; 'http' is built in",
        ),
        ("token-producer", "{vlm: {url: x}}", "plugins[0].parameters.vlm: unknown; did you mean 'vllm'?"),
        ("openai-parser", "{a: 1}", "plugins[0].parameters.a: unknown; no parameters are expected here"),
        ("max-score-picker", "{maxNumOfEndpoint: 2}", "unknown; did you mean 'maxNumOfEndpoints'?"),
        ("max-score-picker", "{maxNumOfEndpoints: 0}", "plugins[0].parameters.maxNumOfEndpoints: expected 1 or more"),
        ("queue-scorer", "{floor: 1}", "plugins[0].parameters.floor: unknown; no parameters are expected here"),
        ("prefix-cache-affinity-filter", "{maxTtftPenalty: 1}", "did you mean 'maxTTFTPenaltyMs'?"),
        ("approx-cache-room-producer", "{a: 1}", "plugins[0].parameters: unknown; no parameters are expected here"),
        ("by-label", "{}", "plugins[0].parameters.label: missing"),
    ],
)
def test_parameters_that_are_refused(type_: str, parameters: str, line: str) -> None:
    with pytest.raises(ConfigError) as refused:
        loaded(CONFIG.format(type=type_, parameters=parameters))
    assert line in str(refused.value)


@pytest.mark.parametrize(
    ("type_", "parameters"),
    [
        ("metrics-data-source", "{scheme: http, path: /metrics, insecureSkipVerify: true}"),
        ("core-metrics-extractor", "{defaultEngine: vllm, engineLabelKey: llm-d.ai/engine-type}"),
        ("token-producer", "{backend: estimate}"),
        ("token-producer", "{modelName: m, vllm: {url: http://localhost:8000}}"),
        ("mm-embeddings-cache-producer", "{cacheSizeInMB: 2048}"),
        ("context-length-aware", "{label: llm-d.ai/context-length-range, enableFiltering: true}"),
        ("burst-prefix-cache-producer", "{windowDurationMs: 100, maxPerReplica: -1, minColocateBlocks: 0}"),
        ("utilization-detector", "{queueDepthThreshold: 5, metricsStalenessThreshold: 200ms, headroom: 0}"),
        ("concurrency-detector", "{maxConcurrency: 132, concurrencyMode: hybrid}"),
        ("prefix-cache-affinity-filter", "{affinityThreshold: 0.8, maxTTFTPenaltyMs: 18000, peakPrefillThroughput: 9}"),
        ("approx-prefix-cache-producer", "{autoTune: false, blockSizeTokens: 16, lruCapacityPerServer: 31250}"),
        ("inflight-load-producer", "{addEstimatedOutputTokens: true, outputRatio: 1.5}"),
        ("label-selector-filter", "{matchLabels: {a: b}, matchExpressions: [{key: c, operator: In, values: [d]}]}"),
        ("session-affinity-scorer", "{strategy: session_id, sessionIdConfig: {sources: [{header: x-s}]}}"),
        ("no-hit-lru-scorer", "{lruSize: 2048}"),
    ],
)
def test_documented_parameters_load(type_: str, parameters: str) -> None:
    entry = loaded(CONFIG.format(type=type_, parameters=parameters)).registry.get(type_)
    assert (entry is not None) == (type_ in builtin.CLASSES), "what Warmpath does by itself makes no plugin"
    if entry is not None:
        assert type(entry.plugin) is find_class(type_, "type")


@pytest.mark.parametrize("type_", ["queue-scorre", "max-scorepicker", "openai-parsr"])
def test_misspelt_types_are_named(type_: str) -> None:
    with pytest.raises(ConfigError, match=r"^plugins\[0\].type: no plugin type .*; did you mean "):
        loaded(CONFIG.format(type=type_, parameters="{}"))
