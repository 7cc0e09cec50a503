import json

import pytest

pytest.importorskip("epp.loader", reason="the loader is not in this tree yet")

from epp.plugin import Load
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
