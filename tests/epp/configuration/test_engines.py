"""core-metrics-extractor: engines of one's own, and the names of their metrics."""

from typing import Any

import pytest

from epp.configuration.loader import Pipeline
from epp.errors import ConfigError
from epp.pool.engines import ENGINES, Engine, Figure, Places, parse
from epp.testing import endpoint
from tests.support.scheduling.pipelines import loaded

HEAD = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: queue-scorer\n"
DECLARED = HEAD + "- {{type: core-metrics-extractor, parameters: {parameters}}}\n"
OWN = """{defaultEngine: mine, engineConfigs: [{
  name: mine, queuedRequestsSpec: 'my_queue{state = waiting, model="m 1"}', runningRequestsSpec: my_running,
  kvUsageSpec: ' my_kv ', loraSpec: my_lora, cacheInfoSpec: my_info, cacheNumBlocksLabelName: pages, SEE}]}"""
PAGE = b"""my_queue{model="m 1",state="waiting"} 3
my_queue{model="m 2",state="waiting"} 50
my_queue{model="m 1",state="paused"} 60
my_running 2
my_kv 0.25
my_lora{max_lora="4",running_lora_adapters="a",waiting_lora_adapters=""} 1
my_info{block_size="32",pages="100"} 1
my_size 64
"""


def declared(parameters: str) -> Pipeline:
    return loaded(DECLARED.format(parameters=parameters))


def figures(page: bytes, engine: Engine) -> dict[str, Any]:
    load = parse(page, engine, 7.0, Places())
    assert load is not None
    return {
        name: getattr(load, name) for name in ("waiting", "running", "kv_usage", "block_size", "blocks", "lora_max")
    }


def test_an_engine_of_ones_own_is_read() -> None:
    engines = declared(OWN.replace("SEE", "customMetrics: []")).engines
    assert engines.of(endpoint("p", labels={})) == "mine"
    expected = {"waiting": 3, "running": 2, "kv_usage": 0.25, "block_size": 32, "blocks": 100, "lora_max": 4}
    assert figures(PAGE, engines.known["mine"]) == expected
    assert set(engines.known) == {*ENGINES, "mine"}


def test_a_metric_of_its_own_goes_before_a_label() -> None:
    engine = declared(OWN.replace("SEE", "cacheBlockSizeSpec: my_size")).engines.known["mine"]
    assert figures(PAGE, engine)["block_size"] == 64
    assert figures(PAGE, engine)["blocks"] == 100


def test_other_names_for_a_known_engine_leave_what_else_is_known_of_it() -> None:
    vllm = declared("{engineConfigs: [{name: vllm, runningRequestsSpec: my_running}]}").engines.known["vllm"]
    assert (vllm.waiting, vllm.running, vllm.kv_usage) == (None, Figure(b"my_running"), None)
    assert vllm.answers == ENGINES["vllm"].answers
    assert figures(PAGE, vllm)["running"] == 2


def test_without_parameters_and_undeclared_nothing_changes() -> None:
    for pipeline in (loaded(HEAD), declared("{}")):
        assert pipeline.engines.known == ENGINES
        assert (
            pipeline.engines.of(endpoint("p", labels={"inference.networking.k8s.io/engine-type": "triton"})) == "triton"
        )
        assert pipeline.engines.of(endpoint("p", labels={})) == "vllm"


def test_the_label_and_the_default_may_be_named() -> None:
    engines = declared("{engineLabelKey: example.com/engine, defaultEngine: sglang}").engines
    assert (
        engines.of(endpoint("p", labels={"example.com/engine": "triton", "llm-d.ai/engine-type": "vllm"})) == "triton"
    )
    assert engines.of(endpoint("p", labels={"llm-d.ai/engine-type": "vllm"})) == "sglang"


def test_metrics_of_ones_own() -> None:
    found = declared(OWN.replace("SEE", "customMetrics: [{attributeKey: a, metricSpec: 'b{c=d}'}]")).engines
    assert [each.custom for each in found.known.values() if each.custom] == [{"a": Figure(b"b", ((b"c", b"d"),))}]


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        (
            "{defaultEngine: sglng}",
            "plugins[1].parameters.defaultEngine: no engine is called 'sglng'; did you mean 'sg",
        ),
        ("{defaultEngine: xyz}", "no engine is called 'xyz'; expected one of vllm, sglang, "),
        ("{engineConfigs: [{name: a, kvUsageSpec: b}]}", "engineConfigs[0]: expected queuedRequestsSpec or running"),
        ("{engineConfigs: [{name: default, runningRequestsSpec: b}]}", "engineConfigs[0].name: expected a name, not"),
        (
            "{engineConfigs: [{name: a, runningRequestsSpec: 'b c'}]}",
            "engineConfigs[0].runningRequestsSpec: expected metric or metric{label=value}, got 'b c'",
        ),
        ("{engineConfigs: [{name: a, queuedRequestsSpec: 'b{c}'}]}", "engineConfigs[0].queuedRequestsSpec: expected"),
        ("{engineConfigs: [{queuedRequestsSpec: b}]}", "plugins[1].parameters.engineConfigs[0].name: missing"),
    ],
)
def test_what_cannot_be_read_is_refused(parameters: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        declared(parameters)
    assert message in str(refused.value)


def test_two_of_them_are_refused() -> None:
    second = "- {type: core-metrics-extractor, name: again}\n"
    with pytest.raises(ConfigError, match=r"plugins\[2\]: again is a second core-metrics-extractor; expected one"):
        loaded(DECLARED.format(parameters="{}") + second)
