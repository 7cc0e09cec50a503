"""What engines lay out; the real ones run in tests/engine."""

import json
import os
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

import tooling.laptop.engines
from epp.configuration.loader import load_text, strategy_text
from epp.errors import ConfigError
from epp.prefix.lmcache.tiers import Lmcache
from epp.prefix.precise import PrecisePrefixCache
from tooling.laptop.engines import (
    EngineError,
    Layout,
    Simulated,
    Tiers,
    Vllm,
    engine_python,
    has_lmcache,
    has_nixl,
    knowing_tiers,
    number_format,
)
from tooling.laptop.models import cached_model


@pytest.fixture
def python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that is not run, and a model that it need not make."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    model = cached_model("tiny")
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    return tmp_path / "bin" / "python"


def ports_in(layout: Layout) -> list[int]:
    ready = [program.ready for program in (*layout.services, *layout.programs.values())]
    return [int(url.split("/")[2].rpartition(":")[2]) for url in ready]


def value(command: Any, flag: str) -> str:
    return str(command[list(command).index(flag) + 1])


def test_a_simulated_pod_needs_nothing_but_itself() -> None:
    layout = Simulated(seed=7).lay_out(["pod-a", "pod-b"])
    assert [pod.name for pod in layout.pods] == ["pod-a", "pod-b"]
    assert layout.services == ()
    command = layout.programs["pod-a"].command
    assert (value(command, "--seed"), value(command, "--port")) == ("7", str(layout.pods[0].port))


def test_who_decodes_stands_behind_a_sidecar() -> None:
    layout = Simulated(roles=("prefill", "decode", "both")).lay_out(["pod-a", "pod-b", "pod-c"])
    behind_sidecars(layout)
    assert "tooling.simulator.server" in layout.programs["pod-b"].command


def behind_sidecars(layout: Layout) -> None:
    """`layout` has a pod of each role, those that decode behind sidecars."""
    assert [pod.role for pod in layout.pods] == ["prefill", "decode", "both"]
    assert [service.name for service in layout.services] == ["pod-b-sidecar", "pod-c-sidecar"]
    asked = [str(pod.port) for pod in layout.pods]
    listening = [value(layout.programs[pod.name].command, "--port") for pod in layout.pods]
    assert [value(service.command, "--port") for service in layout.services] == asked[1:]
    assert [value(service.command, "--model-server-port") for service in layout.services] == listening[1:]
    assert listening[0] == asked[0]
    assert len({*asked, *listening}) == 5
    # A pod is ready when its engine answers, where requests come.
    assert [layout.programs[pod.name].ready for pod in layout.pods] == [f"{pod.url}/health" for pod in layout.pods]


def test_kv_goes_from_vllm_to_vllm_by_nixl_according_to_roles(python: Path) -> None:
    layout = Vllm(python, size="tiny", roles=("prefill", "decode", "both")).lay_out(["pod-a", "pod-b", "pod-c"])
    behind_sidecars(layout)
    links = [json.loads(value(each.command, "--kv-transfer-config")) for each in layout.programs.values()]
    assert {(link["kv_connector"], link["kv_load_failure_policy"]) for link in links} == {
        ("NixlConnector", "recompute")
    }
    assert [link["kv_role"] for link in links] == ["kv_producer", "kv_consumer", "kv_both"]
    channels = [each.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"] for each in layout.programs.values()]
    engines = [value(each.command, "--port") for each in layout.programs.values()]
    assert len({*channels, *engines, *(str(pod.port) for pod in layout.pods)}) == 8
    assert {each.environment["VLLM_NIXL_SIDE_CHANNEL_HOST"] for each in layout.programs.values()} == {"127.0.0.1"}
    assert {each.environment["UCX_NET_DEVICES"] for each in layout.programs.values()} == {"lo"}


def test_vllm_alone_has_no_services(python: Path) -> None:
    layout = Vllm(python, size="tiny").lay_out(["pod-a", "pod-b"])
    assert [*layout.services, *layout.caches] == []
    command = layout.programs["pod-b"].command
    assert command[0] == str(python)
    assert value(command, "--port") == str(layout.pods[1].port)
    assert "--kv-transfer-config" not in command
    assert "--num-gpu-blocks-override" not in command


@pytest.mark.parametrize(
    ("cpu", "expected"),
    [
        ("model name\t: A\nflags\t\t: fpu avx avx2\n", "float32"),
        ("flags\t\t: fpu avx avx2 avx512f avx512_bf16\n", "auto"),
        ("Features\t: fp asimd bf16\n", "auto"),
    ],
)
def test_processors_that_are_slow_with_16_bits_get_32(cpu: str, expected: str, tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(cpu)
    assert number_format(tmp_path / "cpuinfo") == expected
    assert number_format(tmp_path / "none") == "auto"


def test_with_tiers_each_pod_is_a_node_with_a_server(python: Path) -> None:
    layout = Vllm(python, size="tiny", block=64, tiers=Tiers(l1_gigabytes=0.25)).lay_out(["pod-a", "pod-b"])
    names = [service.name for service in layout.services]
    assert names == ["coordinator", "lmcache-pod-a", "lmcache-pod-b"]
    ports = ports_in(layout)
    assert len(set(ports)) == len(ports)
    assert [(pod.node, pod.role) for pod in layout.pods] == [("node-pod-a", ""), ("node-pod-b", "")]
    coordinator, *nodes = layout.services
    directories = set()
    for pod, node in zip(layout.pods, nodes, strict=True):
        server = value(node.command, "--port")
        extra = json.loads(value(layout.programs[pod.name].command, "--kv-transfer-config"))[
            "kv_connector_extra_config"
        ]
        assert str(extra["lmcache.mp.port"]) == server
        assert value(node.command, "--coordinator-url") == coordinator.ready.removesuffix("/healthz")
        directories.add(Path(json.loads(value(node.command, "--l2-adapter"))["base_path"]))
    programs = (*nodes, coordinator)
    assert {value(program.command, "--chunk-size") for program in programs} == {"64"}
    assert {value(program.command, "--hash-algorithm") for program in programs} == {"sha256_cbor"}
    assert {value(program.command, "--block-size") for program in layout.programs.values()} == {"64"}
    [l2] = directories  # both nodes'
    assert l2.is_dir()
    layout.tidy()
    assert not l2.exists()


def test_a_directory_for_l2_that_is_given_stays(python: Path, tmp_path: Path) -> None:
    layout = Vllm(python, size="tiny", tiers=Tiers(directory=tmp_path)).lay_out(["pod-a"])
    assert json.loads(value(layout.services[-1].command, "--l2-adapter"))["base_path"] == str(tmp_path)
    layout.tidy()
    assert tmp_path.is_dir()


def test_l2_can_be_a_redis_for_all_nodes(python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Vllm(python, size="tiny", tiers=Tiers(l2="redis"))
    layout = engine.lay_out(["pod-a", "pod-b"])
    redis, coordinator, *nodes = layout.services  # the nodes' adapter gives up where it is not there
    assert (redis.name, coordinator.name) == ("redis", "coordinator")
    port = redis.ready.rpartition(":")[2]
    assert value(redis.command, "--port") == port
    assert value(redis.command, "--save") == ""
    assert value(redis.command, "--maxmemory") == "1024mb"
    adapters = [json.loads(value(node.command, "--l2-adapter")) for node in nodes]
    assert [(each["type"], each["startup_nodes"], each["shared"]) for each in adapters] == [
        ("valkey", f"127.0.0.1:{port}", True)
    ] * 2
    ports = ports_in(layout)
    assert len(set(ports)) == len(ports)
    monkeypatch.setattr("shutil.which", lambda name: None)
    with pytest.raises(EngineError, match="redis-server was not found: install it"):
        engine.lay_out(["pod-a"])


def test_everything_listens_on_loopback(python: Path) -> None:
    for tiers in (Tiers(), Tiers(l2="redis")):
        layout = Vllm(python, size="tiny", tiers=tiers).lay_out(["pod-a"])
        for program in (*layout.services, *layout.programs.values()):
            words = " ".join(program.command)
            assert "0.0.0.0" not in words
            assert "127.0.0.1" in words
        assert layout.programs["pod-a"].environment["VLLM_HOST_IP"] == "127.0.0.1"  # what `tcp://*:0` becomes
        layout.tidy()


def test_kv_aware_is_reported_where_lmcache_is(python: Path) -> None:
    layout = Vllm(python, size="tiny", tiers=Tiers()).lay_out(["pod-a"])
    config = knowing_tiers(strategy_text("kv-aware"), layout)
    pipeline = load_text(config, clock=lambda: 0.0, random=Random(), where="")
    [precise] = [each for each in pipeline.plugins if isinstance(each, PrecisePrefixCache)]
    assert precise.lmcache == Lmcache(layout.coordinator, "sha256_cbor")
    for text, without in (("kv-aware", Simulated().lay_out(["pod-a"])), ("prefix-aware", layout)):
        assert knowing_tiers(strategy_text(text), without) == strategy_text(text)
    for wrong in ("[" * 100_000, "", "plugins: 5", config.replace("plugins:", "plugin:")):
        with pytest.raises(ConfigError):
            knowing_tiers(wrong, layout)
    layout.tidy()


def test_the_picker_is_reported_where_the_tokenizer_is(python: Path) -> None:
    flag, value = Vllm(python, size="tiny").picker_flags
    assert (flag, value) == ("--tokenizer", f"tiny={cached_model('tiny')}")
    assert not Simulated().picker_flags


def test_without_l2_there_is_l1_alone(python: Path) -> None:
    layout = Vllm(python, size="tiny", tiers=Tiers(l2=None)).lay_out(["pod-a"])
    assert [service.name for service in layout.services] == ["coordinator", "lmcache-pod-a"]
    assert "--l2-adapter" not in layout.services[-1].command


def test_an_unknown_model_is_refused_with_those_there_are(python: Path) -> None:
    with pytest.raises(EngineError, match="no model 'huge'; there are tiny, small"):
        Vllm(python, size="huge").lay_out(["pod-a"])


def test_a_model_that_cannot_be_made_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no torch here >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(EngineError, match="the model could not be made: no torch here"):
        Vllm(python, size="tiny").lay_out(["pod-a"])


def test_shared_memory_of_processes_that_are_gone_is_freed(tmp_path: Path) -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    names = [f"lmcache_kv_{gone.pid}_0", f"lmcache_kv_{os.getpid()}_0", "lmcache_kv_odd", f"psm_{gone.pid}"]
    for name in names:
        (tmp_path / name).touch()
    tooling.laptop.engines._free_shared_memory(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == sorted(names[1:])


def test_the_engines_python_is_ours_or_the_checkouts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tooling.laptop.engines, "ENGINE_PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr(tooling.laptop.engines, "find_spec", lambda name: None)
    with pytest.raises(EngineError, match="vLLM is not installed: run `hack/install engine`"):
        engine_python()
    (tmp_path / "installed").touch()
    assert engine_python() == tmp_path / "bin" / "python"
    assert not has_lmcache(engine_python())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "lmcache").touch()
    assert has_lmcache(engine_python())


def test_nixl_is_where_the_engines_python_finds_it(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={tmp_path} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    assert not has_nixl(python)
    (tmp_path / "nixl.py").touch()
    assert has_nixl(python)
