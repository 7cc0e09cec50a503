"""`warmpath doctor` on real vLLM and LMCache: nothing to say of a fleet that is well, and each illness by its name."""

import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from epp.doctor.command import Options, diagnose
from epp.doctor.finding import Finding
from laptop.engines import Pod, Program, Tiers, Vllm
from laptop.ports import free_ports
from tests.engine.conftest import BLOCK
from tests.support.chain import Laptop

pytestmark = pytest.mark.asyncio(loop_scope="session")

TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


@dataclass
class Ward:
    """Who is ill, and an LMCache server that is, with a Redis of its own."""

    pods: dict[str, Pod]
    lmcache: str
    redis: Program


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
async def ward(fleet: Laptop, python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Ward]:
    """Three pods and an LMCache server, each with several illnesses that do not hide each other.

    `mute`: larger blocks, another hash, no token details, a publisher that connects instead of listening, and an
    engine_driven connection to the server. `stranger`: another hash seed and another chat template. `forgetful`: no
    prefix cache, no KV events, no metrics, another name. The server: its chunk is no block of anybody's, its L2 is its
    own, and it reports nothing to a coordinator.
    """
    template = tmp_path_factory.mktemp("ward") / "template.jinja"
    template.write_text(TEMPLATE)
    names = ("mute", "stranger", "forgetful")
    layout = Vllm(python, size="tiny", block=BLOCK, blocks=192, context=4096, tiers=Tiers()).lay_out(names)
    redis, server = (next(each for each in layout.services if each.name == name) for name in ("redis", "lmcache-mute"))
    away, deaf = free_ports(2)
    adapter = json.loads(server.command[list(server.command).index("--l2-adapter") + 1])
    server = changed(
        server,
        *("--chunk-size", "192", "--coordinator-url", f"http://127.0.0.1:{away}"),
        *("--l2-adapter", json.dumps({**adapter, "shared": False})),
        without=("--l2-adapter", "--coordinator-event-reporting"),
    )
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
            without=("--kv-transfer-config",),
            PYTHONHASHSEED="7",
        ),
        changed(
            layout.programs["forgetful"],
            *("--no-enable-prefix-caching", "--disable-log-stats", "--served-model-name", "small"),
            without=("--kv-transfer-config", "--kv-events-config"),
        ),
    ]
    chain = fleet.chain
    try:
        for program in (redis, server):
            await chain.start(replace(program, name=f"ill-{program.name}"))
            await chain.ready(program.ready, f"ill-{program.name}", 600.0)
        for program in ill:
            await chain.start(program)
        for program in ill:
            await chain.ready(program.ready, program.name, 900.0)
        yield Ward({pod.name: pod for pod in layout.pods}, "http://" + server.ready.split("/")[2], redis)
    finally:
        await chain.processes.stop(*names, "ill-lmcache-mute", "ill-redis")
        layout.tidy()


def servers(fleet: Laptop) -> dict[str, Any]:
    lmcache = [f"http://{fleet.service(f'lmcache-{pod.name}')}" for pod in fleet.chain.pods]
    return {"lmcache": lmcache, "coordinator": f"http://{fleet.service('coordinator')}"}


async def found(patience: float = 20.0, **options: Any) -> list[Finding]:
    return (await diagnose(Options(timeout=120.0, patience=patience, **options)))[1]


def told(findings: Sequence[Finding]) -> dict[str, tuple[str, str]]:
    """Check -> level, and what mends it."""
    return {finding.check: (finding.level, finding.mend) for finding in findings}


async def test_a_fleet_that_is_well_has_nothing_wrong(fleet: Laptop) -> None:
    pods = [pod.url for pod in fleet.chain.pods]
    assert await found(endpoint=pods, model="tiny", **servers(fleet)) == []


async def test_the_tokens_of_its_own_files_are_its_tokens(fleet: Laptop) -> None:
    command = fleet.chain.layout.programs["pod-a"].command
    files = command[list(command).index("--model") + 1]
    pods = [pod.url for pod in fleet.chain.pods]
    assert await found(endpoint=pods, tokenizer=[f"tiny={files}"]) == []


async def test_a_publisher_that_connects_other_blocks_and_no_token_details(fleet: Laptop, ward: Ward) -> None:
    mute = ward.pods["mute"]
    findings = await found(endpoint=[*(pod.url for pod in fleet.chain.pods), mute.url], patience=5.0)
    assert {finding.subject for finding in findings} == {mute.address}
    by_check = told(findings)
    assert set(by_check) == {"kv-events-endpoint", "prompt-token-details", "block-size", "hash-algorithm"}
    assert '"endpoint": "tcp://*:5557"' in by_check["kv-events-endpoint"][1]
    assert by_check["prompt-token-details"] == ("hint", "--enable-prompt-tokens-details")
    assert by_check["block-size"] == ("hint", f"--block-size {BLOCK}")
    assert by_check["hash-algorithm"] == ("hint", "--prefix-caching-hash-algo sha256_cbor")


async def test_another_hash_seed_and_another_chat_template(fleet: Laptop, ward: Ward) -> None:
    stranger = ward.pods["stranger"]
    pods = [*(pod.url for pod in fleet.chain.pods), stranger.url]
    findings = await found(endpoint=pods, **servers(fleet))
    assert {finding.subject for finding in findings} == {stranger.address}
    by_check = told(findings)
    assert set(by_check) == {"hash-seed", "tokenizer"}
    assert by_check["hash-seed"][0] == "problem"
    assert "PYTHONHASHSEED" in by_check["hash-seed"][1]
    assert "--chat-template" in by_check["tokenizer"][1]


async def test_no_prefix_cache_no_kv_events_no_metrics_another_name(fleet: Laptop, ward: Ward) -> None:
    findings = await found(endpoint=[ward.pods["forgetful"].url], model="tiny")
    by_check = told(findings)
    assert set(by_check) == {"metrics", "model", "prefix-caching", "kv-events"}
    assert "--disable-log-stats" in by_check["metrics"][1]
    assert by_check["model"][1] == "--served-model-name tiny"
    assert by_check["prefix-caching"][1] == "--enable-prefix-caching"
    assert by_check["kv-events"][1].startswith("--kv-events-config")


async def test_a_server_with_the_wrong_chunk_transfer_l2_and_no_coordinator(fleet: Laptop, ward: Ward) -> None:
    coordinator = servers(fleet)["coordinator"]
    findings = await found(endpoint=[ward.pods["mute"].url], lmcache=[ward.lmcache], coordinator=coordinator)
    own = told([finding for finding in findings if finding.subject == ward.lmcache])
    assert {check: level for check, (level, _) in own.items()} == {
        "lmcache-transfer": "problem",
        "lmcache-chunk": "problem",
        "lmcache-hash": "hint",
        "l2-shared": "problem",
        "coordinator-unset": "problem",
    }
    assert "lmcache_driven" in own["lmcache-transfer"][1]
    theirs = told([finding for finding in findings if finding.subject == coordinator])
    assert theirs["coordinator-unreachable"][0] == "problem"


async def test_a_server_that_lost_redis_and_calls_itself_healthy(fleet: Laptop, ward: Ward) -> None:
    mute = ward.pods["mute"].url
    assert "l2-stuck" not in told(await found(endpoint=[mute], lmcache=[ward.lmcache], patience=1.0))
    await fleet.chain.processes.stop("ill-redis")
    await fleet.chain.start(replace(ward.redis, name="ill-redis"))
    await fleet.chain.ready(ward.redis.ready, "ill-redis", 60.0)
    stuck = told(await found(endpoint=[mute], lmcache=[ward.lmcache], patience=1.0))["l2-stuck"]
    assert stuck[0] == "problem"
    assert "start this LMCache server again" in stuck[1]


async def test_a_coordinator_that_is_away(fleet: Laptop) -> None:
    [away] = free_ports(1)
    findings = await found(coordinator=f"http://127.0.0.1:{away}")
    assert [(finding.check, finding.level) for finding in findings] == [("coordinator-unreachable", "problem")]
