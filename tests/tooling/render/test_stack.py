import json
import re
from pathlib import Path
from random import Random
from typing import Any

import pytest
import yaml

from epp.configuration.loader import load_text, strategy_text
from epp.errors import ConfigError, ConfigErrors
from epp.prefix.precise import PrecisePrefixCache
from tooling.render import stack as module
from tooling.render.stack import Values, render, render_file, values_of

STACK = Path(module.__file__).with_name("stack.yaml")
TIERED = STACK.with_name("tiered-stack.yaml")


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


def test_kv_aware_brings_servers_that_publish_and_a_way_to_hear_them() -> None:
    found = documents(render(values_of("{model: m, strategy: kv-aware}")))
    assert found["ConfigMap", "warmpath"]["data"]["config.yaml"] == strategy_text("kv-aware")
    (vllm,) = found["Deployment", "llm"]["spec"]["template"]["spec"]["containers"]
    (flag,) = [each.partition("=")[2] for each in vllm["args"] if each.startswith("--kv-events-config=")]
    reported = json.loads(flag)
    ports = {int(reported[each].rpartition(":")[2]) for each in ("endpoint", "replay_endpoint")}
    assert ports < {each["containerPort"] for each in vllm["ports"]}
    for name, way in (("warmpath", "egress"), ("llm", "ingress")):
        rules = found["NetworkPolicy", name]["spec"][way]
        assert ports <= {port["port"] for rule in rules for port in rule.get("ports", ())}
    plain = render(values_of("{model: m}"))
    assert "kv-events" not in plain


def test_an_l1_brings_lmcache_and_a_picker_that_knows_it() -> None:
    text = render(values_of("{model: Qwen/Qwen3-8B, strategy: kv-aware, l1Size: 40Gi, l2Backend: redis}"))
    assert documents(text) == documents(TIERED.read_text())
    picker = documents(text)["ConfigMap", "warmpath"]["data"]["config.yaml"]
    pipeline = load_text(picker, clock=lambda: 0.0, random=Random(), where="")
    [precise] = [each for each in pipeline.plugins if isinstance(each, PrecisePrefixCache)]
    url = precise.lmcache.coordinator
    [port] = documents(text)["Service", url.split("/")[2].split(":")[0]]["spec"]["ports"]
    assert url.endswith(f":{port['port']}")


def test_an_l1_is_as_large_as_said_and_an_l2_may_be_left_out() -> None:
    found = documents(render(values_of("{model: m, l1Size: 1Ti}")))
    assert found["ConfigMap", "warmpath"]["data"]["config.yaml"] == strategy_text("prefix-aware")
    assert not [name for _, name in found if "redis" in name]
    (server,) = found["DaemonSet", "lmcache"]["spec"]["template"]["spec"]["containers"]
    assert "--l1-size-gb=1024" in server["args"]
    assert not [each for each in server["args"] if "l2-adapter" in each]
    assert server["command"] == ["lmcache", "server"]
    assert "LMCACHE_RESP_PASSWORD" not in [each["name"] for each in server["env"]]
    assert server["resources"]["limits"]["memory"] == server["resources"]["requests"]["memory"] == "1032Gi"


def test_redis_and_who_loads_from_it_have_a_password_that_is_in_no_manifest() -> None:
    text = render(values_of("{model: m, l1Size: 1Gi, l2Backend: redis}"))
    found = documents(text)
    assert not [name for kind, name in found if kind == "Secret"]
    for kind, name, variable in (
        ("Deployment", "lmcache-redis", "PASSWORD"),
        ("DaemonSet", "lmcache", "LMCACHE_RESP_PASSWORD"),
    ):
        (container,) = found[kind, name]["spec"]["template"]["spec"]["containers"]
        (source,) = [each["valueFrom"] for each in container["env"] if each["name"] == variable]
        assert source == {"secretKeyRef": {"name": "lmcache-redis", "key": "password"}}
        assert not [each for each in container["args"] if variable in each or "protected-mode" in each]
    assert "requirepass" in str(found["Deployment", "lmcache-redis"])
    made = "kubectl create secret generic lmcache-redis --from-literal=password="
    assert made in text.partition("\napiVersion")[0]
    assert "Secret" not in render(values_of("{model: m, l1Size: 1Gi}"))


def test_images_are_those_that_are_said() -> None:
    digest = "@sha256:" + "0" * 64
    values = {"warmpath": "my.example:5000/warmpath:1" + digest, "redis": "r" + digest, "envoyproxy/envoy": "e:2"}
    text = render(Values("m", l1_size="1Gi", l2_backend="redis", images=values))
    for name, image in values.items():
        assert f"image: {image}\n" in text
        assert f"image: {name}:" not in text
    assert "image: lmcache/vllm-openai:" in text
    wrong = {"lmcache/vllm-openia": "a", "postgres": "b"}
    with pytest.raises(ConfigErrors) as refused:
        render(Values("m", l1_size="1Gi", images=wrong))
    assert sorted(str(refused.value).splitlines()) == [
        "images.lmcache/vllm-openia: nothing here runs it; did you mean 'lmcache/vllm-openai'?",
        "images.postgres: nothing here runs it; expected one of envoyproxy/envoy, lmcache/vllm-openai, warmpath",
    ]


def test_blocks_have_one_name_everywhere() -> None:
    found = documents(TIERED.read_text())
    pods = [
        each["spec"]["template"]["spec"] for (kind, _), each in found.items() if kind in ("Deployment", "DaemonSet")
    ]
    flags = [flag for pod in pods for each in pod["containers"] for flag in each.get("args", ())]
    sizes = {flag.partition("=")[2] for flag in flags if re.match("--(block|chunk)-size=", flag)}
    hashes = {
        flag.partition("=")[2] for flag in flags if re.match("--(prefix-caching-hash-algo|hash-algorithm)=", flag)
    }
    assert (sizes, hashes) == ({"64"}, {"sha256_cbor"})
    [connector] = [flag.partition("=")[2] for flag in flags if flag.startswith("--kv-transfer-config=")]
    extra = json.loads(connector)["kv_connector_extra_config"]
    assert extra["lmcache.mp.hash_algorithm"] == "sha256_cbor"
    assert extra["lmcache.mp.host"] == f"tcp://{found['Service', 'lmcache']['metadata']['name']}"
    assert extra["lmcache.mp.port"] == found["Service", "lmcache"]["spec"]["ports"][0]["port"]


@pytest.mark.parametrize("nothing", ["", ", l1Size: 0", ", l1Size: '0', l2Backend: none", ", l1Size: null"])
def test_no_tiers_may_be_said_or_left_out(nothing: str) -> None:
    assert render(values_of(f"{{model: m{nothing}}}")) == render(Values("m"))


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("{}", "model: missing"),
        ("[]", "expected a mapping with model, replicas, strategy, l1Size, l2Backend and images, got []"),
        ("modle: m", "modle: unknown; did you mean 'model'?"),
        ("{model: 3}", "model: expected text, got 3"),
        ("{model: 'a b'}", "model: expected a name such as Qwen/Qwen3-8B, got 'a b'"),
        ("{model: --port}", "model: expected a name such as Qwen/Qwen3-8B, got '--port'"),
        ("{model: m, replicas: 0}", "replicas: expected 1 to 1000, got 0"),
        ("{model: m, replicas: many}", "replicas: expected a whole number, got 'many'"),
        ("{model: m, strategy: prefixaware}", "got 'prefixaware'; did you mean 'prefix-aware'?"),
        ("{model: m, l1Size: 40GB}", "l1Size: expected a size such as 40Gi, or 0 for none, got '40GB'"),
        ("{model: m, l1Size: false}", "l1Size: expected a size such as 40Gi, or 0 for none, got false"),
        ("{model: m, l1Size: 40}", "l1Size: expected a size such as 40Gi, or 0 for none, got 40"),
        ("{model: m, l1Size: 1Gi, l2Backend: reddis}", "l2Backend: expected redis or none, got 'reddis'"),
        ("{model: m, l2Backend: redis}", "l2Backend: redis is reached through L1; expected l1Size too"),
        ("{model: m, images: redis}", "images: expected a mapping, got 'redis'"),
        (
            "{model: m, images: {warmpath: 'a b'}}",
            "images.warmpath: expected an image such as my.example/warmpath@sha256:",
        ),
        ("{model: m, images: {warmpath: 'w@sha256:12'}}", "images.warmpath: expected an image such as"),
        ("model: [", "not valid YAML"),
    ],
)
def test_a_wrong_value_is_refused_with_path_value_and_expectation(text: str, error: str) -> None:
    with pytest.raises(ConfigError) as refused:
        values_of(text)
    assert error in str(refused.value)


def test_all_wrong_values_are_reported_at_once_with_the_file(tmp_path: Path) -> None:
    file = tmp_path / "values.yaml"
    file.write_text("{model: '', replicas: -1, strategy: x, l1Size: 1G, l2Backend: disk}")
    with pytest.raises(ConfigError) as refused:
        render_file(file)
    lines = str(refused.value).splitlines()
    fields = ("model", "replicas", "strategy", "l1Size", "l2Backend")
    assert [line.startswith(f"{file}: {field}: ") for line, field in zip(lines, fields, strict=True)] == [True] * 5


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.yaml: cannot be read: No such file"):
        render_file(tmp_path / "none.yaml")
