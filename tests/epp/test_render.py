from pathlib import Path
from typing import Any

import pytest
import yaml

from epp import render as module
from epp.errors import ConfigError
from epp.loader import strategy_text
from epp.render import Values, render, render_file, values_of

STACK = Path(module.__file__).with_name("stack.yaml")


def documents(text: str) -> dict[tuple[str, str], Any]:
    return {(each["kind"], each["metadata"]["name"]): each for each in yaml.safe_load_all(text)}


def test_the_stack_has_everything_from_the_gateway_to_the_model_servers() -> None:
    assert {kind for kind, _ in documents(render(Values("Qwen/Qwen3-8B")))} >= {
        *("Gateway", "HTTPRoute", "InferencePool", "Deployment", "Service", "ConfigMap", "ServiceAccount"),
        *("Role", "RoleBinding", "NetworkPolicy", "EnvoyExtensionPolicy", "BackendTrafficPolicy"),
    }


def test_what_no_value_names_stays_as_it_is() -> None:
    assert documents(render(Values("Qwen/Qwen3-8B"))) == documents(STACK.read_text())


def test_each_value_is_in_its_place_and_nowhere_else() -> None:
    before = documents(STACK.read_text())
    after = documents(render(values_of("{model: org/my.model_1, replicas: 7, strategy: session}")))
    assert after["ConfigMap", "warmpath"].pop("data") == {"config.yaml": strategy_text("session")}
    assert after["Deployment", "llm"]["spec"].pop("replicas") == 7
    arguments = after["Deployment", "llm"]["spec"]["template"]["spec"]["containers"][0]["args"]
    assert arguments.pop(0) == "org/my.model_1"
    before["ConfigMap", "warmpath"].pop("data")
    before["Deployment", "llm"]["spec"].pop("replicas")
    before["Deployment", "llm"]["spec"]["template"]["spec"]["containers"][0]["args"].pop(0)
    assert after == before


@pytest.mark.parametrize("nothing", ["", ", l1Size: 0", ", l1Size: '0', l2Backend: none", ", l1Size: null"])
def test_no_tiers_may_be_said_or_left_out(nothing: str) -> None:
    assert render(values_of(f"{{model: m{nothing}}}")) == render(Values("m"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", "model: missing"),
        ("[]", "expected a mapping with model, replicas, strategy, l1Size and l2Backend, got []"),
        ("modle: m", "modle: unknown; did you mean 'model'?"),
        ("{model: 3}", "model: expected text, got 3"),
        ("{model: 'a b'}", "model: expected a name such as Qwen/Qwen3-8B, got 'a b'"),
        ("{model: --port}", "model: expected a name such as Qwen/Qwen3-8B, got '--port'"),
        ("{model: m, replicas: 0}", "replicas: expected 1 to 1000, got 0"),
        ("{model: m, replicas: many}", "replicas: expected a whole number, got 'many'"),
        ("{model: m, strategy: prefixaware}", "got 'prefixaware'; did you mean 'prefix-aware'?"),
        ("{model: m, l1Size: 40Gi}", "l1Size: tiered KV memory is not there yet; expected 0 or nothing, got '40Gi'"),
        ("{model: m, l1Size: false}", "l1Size: tiered KV memory is not there yet; expected 0 or nothing, got false"),
        ("{model: m, l2Backend: redis}", "l2Backend: tiered KV memory is not there yet; expected none or nothing"),
        ("model: [", "not valid YAML"),
    ],
)
def test_a_wrong_value_is_refused_with_path_value_and_expectation(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        values_of(text)
    assert error in str(refused.value)


def test_all_wrong_values_are_told_at_once_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("{model: '', replicas: -1, strategy: x, l1Size: 1Gi, l2Backend: redis}")
    with pytest.raises(ConfigError) as refused:
        render_file(file)
    lines = str(refused.value).splitlines()
    fields = ("model", "replicas", "strategy", "l1Size", "l2Backend")
    assert [line.startswith(f"{file}: {field}: ") for line, field in zip(lines, fields, strict=True)] == [True] * 5


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        render_file(tmp_path / "none.yaml")
