"""Start and end of the chain; what it does in between is in tests/integration."""

import shutil
import socket
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import aiohttp
import pytest
import yaml

from epp.errors import ConfigError
from tests.support.gateway.chain import MANIFESTS as THREE_POOLS
from tests.support.process.child_processes import Family
from tooling.laptop.chain import MANIFESTS, Chain, ChainError, Replica, Shape, running_chain
from tooling.laptop.engines import Simulated
from tooling.laptop.ports import free_ports

SMALL = Shape(pods=1, port=0)


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    made = Family()
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


async def refusal(shape: Shape, directory: Path) -> str:
    with pytest.raises(ChainError) as error:
        async with running_chain(shape, directory):
            pass
    return str(error.value)


@pytest.mark.envoy
async def test_a_chain_answers_and_leaves_nothing_behind(tmp_path: Path, family: Family) -> None:
    async with running_chain(replace(SMALL, replicas=2), tmp_path) as chain:
        assert len(family.alive()) == 4
        asked = {"model": "sim", "prompt": "Hello", "max_tokens": 1}
        async with chain.http.post(f"{chain.url}/v1/completions", json=asked) as answer:
            assert answer.status == 200
            assert answer.headers["x-sim-pod"] == "pod-a"
        [pool], decisions = await chain.seen(5)
        assert [endpoint["name"] for endpoint in pool["endpoints"]] == ["default/pod-a"]
        assert len(decisions) == 1
        assert not await chain.reload()
    assert family.alive() == {}
    assert {file.name for file in tmp_path.glob("*.log")} == {"pod-a.log", "epp-1.log", "epp-2.log"}
    [entry] = yaml.safe_load((tmp_path / "endpoints.yaml").read_text())["endpoints"]
    assert (entry["name"], entry["port"]) == ("pod-a", chain.pods[0].port)


@pytest.mark.envoy
async def test_a_new_configuration_is_waited_for_in_each_pool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["old old", "old old", "new old", "new new"]

    async def config(chain: Chain, replica: Replica) -> str:
        return "\n\n".join(f"pool default/{n}\n{each}" for n, each in enumerate(said.pop(0).split()))

    monkeypatch.setattr(Chain, "config", config)
    async with running_chain(SMALL, tmp_path) as chain:
        await chain.reconfigure(tmp_path / "config.yaml", "new")
        await chain.reconfigure(tmp_path / "config.yaml", "new")  # is there already: nothing to wait for
    assert said == []


@pytest.mark.envoy
async def test_a_replica_that_is_slow_to_say_its_configuration_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_chain(SMALL, tmp_path) as chain:
        [replica] = chain.replicas
        expected = await chain.config(replica)
        get, seconds = chain.http.get, [1e-6, 1e-6, 5.0]
        slow = SimpleNamespace(get=lambda url: get(url, timeout=aiohttp.ClientTimeout(total=seconds.pop(0))))
        monkeypatch.setattr(chain, "http", slow)
        assert await chain.config(replica) == expected
        assert seconds == []


async def test_a_pod_that_does_not_start_is_reported_and_nothing_is_left(tmp_path: Path, family: Family) -> None:
    reported = await refusal(replace(SMALL, engine=Simulated(flags=("--blocks", "none"))), tmp_path)
    assert reported.startswith("pod-a ended with status 2: ")
    assert "'none' is not a valid integer" in reported
    assert family.alive() == {}


async def test_a_replica_that_does_not_start_is_reported(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: max-score-piker}]\n")
    reported = await refusal(replace(SMALL, picking=("--config", str(wrong))), tmp_path)
    assert reported.startswith("epp-1 ended with status 1: ")
    assert "max-score-piker" in reported


async def test_a_port_in_use_is_reported_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:
        port = server.getsockname()[1]
        reported = await refusal(replace(SMALL, port=port), tmp_path)
    assert reported == f"port {port} is in use by another program; choose another with --port"
    assert list(tmp_path.glob("*.log")) == []


async def test_a_port_needs_one_listener(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    two = "[{name: a, port: 8081, protocol: HTTP}, {name: b, port: 8082, protocol: HTTP}]"
    text = THREE_POOLS.replace("[{name: http, port: 8080, protocol: HTTP}]", two)
    (tmp_path / "manifests" / "all.yaml").write_text(text)
    reported = await refusal(replace(SMALL, manifests=tmp_path / "manifests"), tmp_path)
    assert reported == "--port needs manifests with one listener; these have 2"


async def test_wrong_manifests_are_reported_by_the_gateway(tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text("kind: Gatway\n")
    with pytest.raises(ConfigError, match=r"wrong\.yaml.*Gatway is not supported.*did you mean 'Gateway'"):
        async with running_chain(replace(SMALL, manifests=wrong), tmp_path):
            pass


def test_the_manifests_of_the_laptop_are_there() -> None:
    assert {file.name for file in MANIFESTS.glob("*.yaml")} == {"gateway.yaml", "pool.yaml", "route.yaml"}


async def test_pools_that_no_simulated_pod_is_in_are_refused(tmp_path: Path) -> None:
    manifests = tmp_path / "manifests"
    shutil.copytree(MANIFESTS, manifests)
    pool = manifests / "pool.yaml"
    pool.write_text(pool.read_text().replace("app: sim", "app: vllm"))
    with pytest.raises(ChainError, match=r"no InferencePool selects the simulated pods .*expected matchLabels"):
        async with running_chain(replace(SMALL, manifests=manifests), tmp_path):
            pass


async def test_a_port_for_root_alone_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(port: int) -> bool:
        raise PermissionError

    monkeypatch.setattr("tooling.laptop.chain.is_free", forbidden)
    with pytest.raises(ChainError, match="only root may listen on port 80; choose another with --port"):
        async with running_chain(replace(SMALL, port=80), tmp_path):
            pass
