import pickle
from pathlib import Path
from random import Random

import pytest

from epp.errors import ConfigError
from tooling.replay.policies import policy

MODULE = """
from epp.plugin import Cost, Filter, Picker, Plugin, Scorer

class Mine(Scorer):
    def score(self, request, endpoints):
        return [1.0 for _ in endpoints]

class Dear(Cost):
    terms = ("price",)
    def bill(self, request, endpoints):
        return [(1.0,) for _ in endpoints]

class Some(Filter):
    def filter(self, request, endpoints):
        return endpoints[:1]

class Last(Picker):
    def pick(self, request, scored):
        return [scored[-1][0]]

class Only(Plugin):
    pass
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    file = tmp_path / "mine_for_policies.py"
    file.write_text(MODULE)
    return file


def parts(spec: str) -> list[str]:
    found = policy(spec)
    pipeline = found.build(lambda: 0.0, Random(0))
    profile = pipeline.profiles["default"]
    members = (*profile.filters, *(scorer for scorer, _ in profile.scorers), profile.picker)
    return [member.name.rpartition(".")[2] for member in members]


def test_a_strategy_and_the_oracle_by_name() -> None:
    assert parts("prefix-aware") == ["previous-response-filter", "expected-ttft", "max-score-picker"]
    assert parts("oracle") == ["Oracle", "max-score-picker"]


def test_a_configuration_file(tmp_path: Path, module: Path) -> None:
    file = tmp_path / "my.yaml"
    file.write_text(
        f"apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{{type: {module.stem}.Mine}}]\n"
        f"schedulingProfiles: [{{name: default, plugins: [{{pluginRef: {module.stem}.Mine}}]}}]\n"
    )
    assert policy(str(file)).name == "my"
    assert parts(str(file)) == ["Mine", "max-score-picker"]


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("Mine", ["Mine", "max-score-picker"]),
        ("Dear", ["Dear", "max-score-picker"]),
        ("Some", ["Some", "expected-ttft", "max-score-picker"]),
        ("Last", ["expected-ttft", "Last"]),
    ],
)
def test_a_class_decides_alone_or_with_the_default_scorer(module: Path, name: str, expected: list[str]) -> None:
    assert policy(f"{module}:{name}").name == f"{module.name}:{name}"
    assert parts(f"{module}:{name}") == expected


def test_a_policy_travels_to_another_process(module: Path) -> None:
    found = policy(f"{module}:Mine")
    assert pickle.loads(pickle.dumps(found)) == found


@pytest.mark.parametrize(
    ("spec", "reported"),
    [
        ("prefix-awere", "policy: expected a strategy, oracle, .* did you mean 'prefix-aware'"),
        ("nothing.py:Mine", "nothing.py: there is no such file"),
        ("nothing.yaml", "nothing.yaml: cannot be read"),
        ("{module}:Yours", "to be a class made from epp.plugin's"),
        ("{module}:Only", "expected a Scorer, Cost, Filter or Picker, got Only"),
        ("{module}", "policy: expected a strategy"),
    ],
)
def test_what_is_no_policy_is_reported(module: Path, spec: str, reported: str) -> None:
    with pytest.raises(ConfigError, match=reported):
        policy(spec.format(module=module))
