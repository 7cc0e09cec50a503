import json

import pytest

from epp.configuration import builtin as stock
from epp.configuration.loader import strategies, strategy_text
from epp.configuration.registry import find_class
from epp.plugin import Filter, Load, Picker, Scorer
from epp.testing import decide, endpoint, request

CONFIG = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: queue-scorer
- type: kv-cache-utilization-scorer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: queue-scorer
    weight: 2
  - pluginRef: kv-cache-utilization-scorer
"""


def test_builders_say_only_what_matters() -> None:
    a, b = endpoint("a", waiting=3), endpoint("b", address="[fd00::1]:80", labels={"gpu": "H100"})
    assert a.load == Load(waiting=3)
    assert a.address == endpoint("a").address != endpoint("c").address
    assert (b.address, b.labels) == ("[fd00::1]:80", {"gpu": "H100"})
    asked = request("x" * 400, model="m", headers={"x-session-id": "1"})
    assert (asked.prompt, asked.tokens, asked.model, asked.header("x-session-id")) == (b"x" * 400, 100, "m", "1")
    assert request(tokens=7).tokens == 7


def test_decide_runs_the_configuration_and_explains_itself() -> None:
    busy, idle = endpoint("busy", waiting=9), endpoint("idle", kv_usage=0.25)
    decision = decide(CONFIG, [busy, idle], request("hello"))
    assert decision.endpoint is idle
    (profile,) = json.loads(json.dumps(decision.as_dict()))["profiles"]
    assert {row["endpoint"]: row["total"] for row in profile["endpoints"]} == {"busy": 1.0, "idle": 2.75}


def test_the_same_question_has_the_same_answer() -> None:
    config = CONFIG.replace("- type: queue-scorer", "- type: queue-scorer\n- type: random-picker").replace(
        "  - pluginRef: queue-scorer", "  - pluginRef: random-picker\n  - pluginRef: queue-scorer"
    )
    endpoints = [endpoint(name) for name in "abcdefgh"]
    assert len({decide(config, endpoints, request()).endpoint for _ in range(5)}) == 1


@pytest.mark.parametrize("strategy", strategies())
def test_every_strategy_decides(strategy: str) -> None:
    endpoints = [endpoint(name, block_size=16, blocks=1000) for name in "abc"]
    decision = decide(strategy_text(strategy), endpoints, request("x" * 4000, headers={"x-session-id": "1"}))
    assert decision.endpoint in endpoints


STOCK = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- {{name: it, type: {type}, parameters: {parameters}}}
- {{type: queue-scorer}}
schedulingProfiles:
- name: default
  plugins:
  - {{pluginRef: {used}}}
"""
NEEDED = {
    "session-id-producer": "{headerName: x-session-id}",
    "by-label": "{label: role, validValues: [decode], allowsNoLabel: true}",
    "endpoint-attribute-filter": "{attribute: a, algorithm: {type: threshold, threshold: {operator: Equal, value: 1}}}",
    "endpoint-attribute-scorer": "{attributeKey: a, algorithm: {type: linear_lower_is_better}}",
    "utilization-filter": "{conditions: [{metric: waiting-queue, maxValue: 5}]}",
    "header-label-affinity-scorer": "{headerName: x-zone, labelKey: zone}",
    "disagg-profile-handler": "{profiles: {decode: default}}",
    "pd-profile-handler": "{decodeProfile: default, prefillProfile: default}",
}
"""Parameters of types that do not work without."""


@pytest.mark.parametrize("kind", stock.CLASSES)
def test_every_stock_plugin_decides(kind: str) -> None:
    used = issubclass(find_class(kind, "type"), (Filter, Scorer, Picker))
    text = STOCK.format(type=kind, parameters=NEEDED.get(kind, "{}"), used="it" if used else "queue-scorer")
    endpoints = [endpoint(name, labels={"llm-d.ai/role": role}) for name in "ab" for role in ("both", "encode")]
    assert decide(text, endpoints, request("x" * 4000)).endpoint in endpoints
