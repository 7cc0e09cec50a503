"""`warmpath doctor` on real vLLM and LMCache: nothing to say of a healthy fleet, and each fault by its name."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tests.engine.conftest import BLOCK
from tests.support.engines.real_engines import eventually, restored
from tests.support.gateway.chain import Laptop
from tooling.doctor.command import DoctorOptions, diagnose
from tooling.doctor.finding import Finding
from tooling.laptop.engines import LaptopPod, Program, Tiers, Vllm
from tooling.laptop.ports import free_ports

pytestmark = pytest.mark.asyncio(loop_scope="session")

TOLD = (
    *("--chunk-size", "--hash-algorithm", "--l2-adapter", "--l2-prefetch-policy", "--supported-transfer-mode"),
    *("--instance-id", "--coordinator-url", "--coordinator-advertise-ip", "--coordinator-event-reporting"),
)
"""Flags of an LMCache server without which it starts all the same."""
TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@dataclass
class Ward:
    """Who is ill: pods, LMCache servers, and the Redis behind that of `mute`."""

    pods: dict[str, LaptopPod]
    lmcache: dict[str, str]
    """URLs by the pod that each was laid out for."""
    redis: Program
    server: Program
    """The LMCache server of `mute`."""


def events(endpoint: str) -> str:
    return json.dumps({"enable_kv_cache_events": True, "endpoint": endpoint, "topic": "kv@ill@tiny"})


def changed(program: Program, *flags: str, without: Sequence[str] = (), **environment: str) -> Program:
    """The program with more flags, of which the last counts, and without some, their values with them."""
    kept: list[str] = []
    dropping = False
    for word in program.command:
        dropping = word in without or (dropping and not word.startswith("--"))
        kept += [] if dropping else [word]
    return replace(program, command=[*kept, *flags], environment={**program.environment, **environment})


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def ward(running: Laptop, python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ward]:
    """Three pods and three LMCache servers, most with several illnesses that do not hide each other.

    `mute`: larger blocks, another hash, no token details, a publisher that connects instead of listening, and an
    engine_driven connection to its server, whose chunk is no block of anybody's, whose L2 is its own, and which reports
    nothing to a coordinator. `stranger`: another hash seed and another chat template; its server has that seed too.
    `forgetful`: no prefix cache, no KV events, no metrics, another name, and a server that was told nothing.
    """
    await restored(running)
    template = tmp_path_factory.mktemp("ward") / "template.jinja"
    template.write_text(TEMPLATE)
    names = ("mute", "stranger", "forgetful")
    layout = Vllm(python, size="tiny", block=BLOCK, blocks=192, context=4096, tiers=Tiers()).lay_out(names)
    services = {each.name: replace(each, name=f"ill-{each.name}") for each in layout.services}
    server = services["lmcache-mute"]
    away, deaf, port = free_ports(3)
    redis = Program(
        "ill-redis",
        ["redis-server", "--port", str(port), "--bind", "127.0.0.1", "--save", ""],
        f"tcp://127.0.0.1:{port}",
    )
    adapter = {"type": "resp", "host": "127.0.0.1", "port": port, "num_workers": 2}
    servers = {
        "mute": changed(
            server,
            *("--chunk-size", "192", "--coordinator-url", f"http://127.0.0.1:{away}"),
            *("--l2-adapter", json.dumps({**adapter, "shared": False})),
            without=("--l2-adapter", "--coordinator-event-reporting"),
        ),
        "stranger": changed(
            services["lmcache-stranger"], *("--coordinator-url", running.chain.layout.coordinator), PYTHONHASHSEED="7"
        ),
        "forgetful": changed(services["lmcache-forgetful"], without=TOLD),
    }
    mute = layout.programs["mute"]
    link = json.loads(mute.command[list(mute.command).index("--kv-transfer-config") + 1])
    link["kv_connector_extra_config"]["lmcache.mp.mp_transfer_mode"] = "engine_driven"
    ill = [
        changed(
            mute,
            *("--block-size", "96", "--prefix-caching-hash-algo", "sha256", "--kv-transfer-config", json.dumps(link)),
            *("--kv-events-config", events(f"tcp://127.0.0.1:{deaf}")),
            without=("--enable-prompt-tokens-details",),
        ),
        changed(
            layout.programs["stranger"],
            *("--chat-template", str(template)),
            PYTHONHASHSEED="7",
        ),
        changed(
            layout.programs["forgetful"],
            *("--no-enable-prefix-caching", "--disable-log-stats", "--served-model-name", "small"),
            without=("--kv-transfer-config", "--kv-events-config"),
        ),
    ]
    chain, programs = running.chain, [redis, *servers.values(), *ill]
    try:
        for some in (programs[:4], programs[4:]):
            for program in some:
                await chain.start(program)
            for program in some:
                await chain.ready(program.ready, program.name, 900.0)
        urls = {name: "http://" + program.ready.split("/")[2] for name, program in servers.items()}
        yield Ward({pod.name: pod for pod in layout.pods}, urls, redis, servers["mute"])
    finally:
        await chain.processes.stop(*reversed([program.name for program in programs]))
        layout.tidy()


def servers_of(fleet: Laptop) -> dict[str, Any]:
    lmcache = [f"http://{fleet.service(f'lmcache-{pod.name}')}" for pod in fleet.chain.pods]
    return {"lmcache": lmcache, "coordinator": f"http://{fleet.service('coordinator')}"}


async def found(event_timeout: float = 20.0, timeout: float = 120.0, **options: Any) -> list[Finding]:
    return (await diagnose(DoctorOptions(timeout=timeout, event_timeout=event_timeout, **options)))[1]


def reported(findings: Sequence[Finding]) -> dict[str, tuple[str, str]]:
    """Check -> level, and what fixes it."""
    return {finding.check: (finding.level, finding.fix) for finding in findings}


async def test_a_fleet_that_is_well_has_nothing_wrong(fleet: Laptop) -> None:
    pods = [pod.url for pod in fleet.chain.pods]
    assert await found(endpoint=pods, model="tiny", **servers_of(fleet)) == []


async def test_the_tokens_of_its_own_files_are_its_tokens(fleet: Laptop) -> None:
    command = fleet.chain.layout.programs["pod-a"].command
    files = command[list(command).index("--model") + 1]
    pods = [pod.url for pod in fleet.chain.pods]
    assert await found(endpoint=pods, tokenizer=[f"tiny={files}"]) == []


async def test_a_publisher_that_connects_other_blocks_and_no_token_details(fleet: Laptop, ward: Ward) -> None:
    mute = ward.pods["mute"]
    findings = await found(endpoint=[*(pod.url for pod in fleet.chain.pods), mute.url])
    assert {finding.subject for finding in findings} == {mute.address}
    by_check = reported(findings)
    assert set(by_check) == {"kv-events-endpoint", "prompt-token-details", "block-size", "hash-algorithm"}
    assert '"endpoint": "tcp://*:5557"' in by_check["kv-events-endpoint"][1]
    assert by_check["prompt-token-details"] == ("hint", "--enable-prompt-tokens-details")
    assert by_check["block-size"] == ("hint", f"--block-size {BLOCK}")
    assert by_check["hash-algorithm"] == ("hint", "--prefix-caching-hash-algo sha256_cbor")


async def test_another_hash_seed_and_another_chat_template(fleet: Laptop, ward: Ward) -> None:
    stranger = ward.pods["stranger"]
    pods = [*(pod.url for pod in fleet.chain.pods), stranger.url]
    findings = await found(endpoint=pods, **servers_of(fleet))
    assert {finding.subject for finding in findings} == {stranger.address}
    by_check = reported(findings)
    assert set(by_check) == {"hash-seed", "tokenizer"}
    assert by_check["hash-seed"][0] == "problem"
    assert "PYTHONHASHSEED" in by_check["hash-seed"][1]
    assert "--chat-template" in by_check["tokenizer"][1]


async def test_no_prefix_cache_no_kv_events_no_metrics_another_name(fleet: Laptop, ward: Ward) -> None:
    findings = await found(endpoint=[ward.pods["forgetful"].url], model="tiny")
    by_check = reported(findings)
    assert set(by_check) == {"metrics", "model", "prefix-caching", "kv-events"}
    assert "--disable-log-stats" in by_check["metrics"][1]
    assert by_check["model"][1] == "--served-model-name tiny"
    assert by_check["prefix-caching"][1] == "--enable-prefix-caching"
    assert by_check["kv-events"][1].startswith("--kv-events-config")


async def test_a_server_with_the_wrong_chunk_hash_transfer_and_l2_that_reports_nothing(
    fleet: Laptop, ward: Ward
) -> None:
    server, coordinator = ward.lmcache["mute"], servers_of(fleet)["coordinator"]
    findings = await found(endpoint=[ward.pods["mute"].url], lmcache=[server], coordinator=coordinator)
    own = reported([finding for finding in findings if finding.subject == server])
    assert own == {
        "lmcache-transfer": (
            "problem",
            'in vLLM\'s --kv-transfer-config: "lmcache.mp.mp_transfer_mode": "lmcache_driven"',
        ),
        "lmcache-chunk": ("problem", "lmcache server --chunk-size 96"),
        "lmcache-hash": ("hint", own["lmcache-hash"][1]),
        "l2-shared": ("problem", 'in --l2-adapter: "shared": true'),
        "coordinator-unset": ("problem", "--coordinator-event-reporting"),
    }
    assert "--prefix-caching-hash-algo sha256_cbor" in own["lmcache-hash"][1]
    level, fix = reported([finding for finding in findings if finding.subject == coordinator])[
        "coordinator-unreachable"
    ]
    assert level == "problem"
    assert f"--coordinator-url {coordinator}" in fix


async def test_a_server_that_was_reported_nothing(fleet: Laptop, ward: Ward) -> None:
    server = ward.lmcache["forgetful"]
    findings = await found(endpoint=[fleet.chain.pods[0].url], lmcache=[server])
    assert {finding.subject for finding in findings} == {server}
    own = reported(findings)
    assert {check: level for check, (level, _) in own.items()} == {
        "lmcache-engines": "hint",
        "lmcache-chunk": "problem",
        "lmcache-hash": "hint",
        "l2-shared": "hint",
        "coordinator-unset": "hint",
    }
    assert "LMCacheMPConnector" in own["lmcache-engines"][1]
    assert own["lmcache-chunk"][1] == f"lmcache server --chunk-size {BLOCK}"
    assert "--hash-algorithm sha256_cbor" in own["lmcache-hash"][1]
    assert own["l2-shared"][1].startswith("--l2-adapter")
    assert own["coordinator-unset"][1] == "--coordinator-url URL --coordinator-event-reporting"


async def test_a_server_with_another_hash_seed(fleet: Laptop, ward: Ward) -> None:
    server, coordinator = ward.lmcache["stranger"], servers_of(fleet)["coordinator"]
    findings = await found(endpoint=[ward.pods["stranger"].url], lmcache=[server], coordinator=coordinator)
    assert [(finding.subject, finding.check, finding.level) for finding in findings] == [
        (server, "lmcache-names", "problem")
    ]
    assert "without PYTHONHASHSEED" in findings[0].fix


async def test_a_server_that_lost_redis_and_calls_itself_healthy(fleet: Laptop, ward: Ward) -> None:
    async def checks() -> dict[str, tuple[str, str]]:
        return reported(await found(endpoint=[ward.pods["mute"].url], lmcache=[ward.lmcache["mute"]]))

    assert "l2-stuck" not in await checks()
    await fleet.chain.processes.stop(ward.redis.name)
    await fleet.chain.start(ward.redis)
    await fleet.chain.ready(ward.redis.ready, ward.redis.name, 600.0)
    level, fix = (await eventually(checks, lambda found: "l2-stuck" in found))["l2-stuck"]
    assert level == "problem"
    assert "start this LMCache server again" in fix


async def test_a_coordinator_that_is_away(fleet: Laptop) -> None:
    [away] = free_ports(1)
    findings = await found(coordinator=f"http://127.0.0.1:{away}")
    assert [(finding.check, finding.level) for finding in findings] == [("coordinator-unreachable", "problem")]


async def test_a_server_that_began_before_redis(fleet: Laptop, ward: Ward) -> None:
    await fleet.chain.processes.stop(ward.redis.name, ward.server.name)
    for program in (ward.server, ward.redis):
        await fleet.chain.start(program)
        await fleet.chain.ready(program.ready, program.name, 600.0)

    async def checks() -> dict[str, tuple[str, str]]:
        ill = {"endpoint": [ward.pods["mute"].url], "lmcache": [ward.lmcache["mute"]]}
        return reported(await found(event_timeout=3.0, timeout=10.0, **ill))

    # Until its engine is registered anew nothing is looked up.
    level, fix = (await eventually(checks, lambda found: "l2-stuck" in found))["l2-stuck"]
    assert level == "problem"
    assert "while its Redis answers" in fix
