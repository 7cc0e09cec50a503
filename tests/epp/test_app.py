"""The process as a whole: what it refuses at the start, several pools, its audit log, and how it ends."""

import asyncio
import json
import signal
import socket
import ssl
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import grpc
import pytest

from epp.app import ServedPool, Settings, Shared, discovered, serve
from epp.errors import ConfigError
from epp.plugin import Replicas
from epp.pool.store import Pool
from epp.process.watchdog import EXIT_STALLED
from epp.testing import endpoint
from tests.support.ext_proc import messages as ext_proc
from tests.support.ext_proc.server import Gateway
from tests.support.gateway.chain import eventually
from tests.support.kubernetes.api_server import FakeApiServer, use
from tooling.laptop.ports import free_ports, is_free

POOLS = """
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: one}
spec:
  selector: {matchLabels: {app: one}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: warmpath, port: {number: 9002}}
---
apiVersion: inference.networking.k8s.io/v1
kind: InferencePool
metadata: {name: two}
spec:
  selector: {matchLabels: {app: two}}
  targetPorts: [{number: 8000}]
  endpointPickerRef: {name: warmpath, port: {number: 9002}}
---
endpoints:
- {name: a, address: 10.0.0.1, port: 8000, labels: {app: one}}
- {name: b, address: 10.0.0.2, port: 8000, labels: {app: two}}
"""
REQUEST = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    file = tmp_path / "pools.yaml"
    file.write_text(POOLS)
    return Settings(endpoints=(file,), grpc_port=(0, 0), grpc_health_port=0, metrics_port=0)


async def refusal(settings: Settings) -> str:
    with pytest.raises(ConfigError) as error:
        await asyncio.wait_for(serve(settings), 20)
    return str(error.value)


@pytest.mark.parametrize("which", ["grpc_port", "grpc_health_port", "metrics_port"])
async def test_a_port_in_use_is_reported_by_its_number(settings: Settings, which: str) -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:
        port = server.getsockname()[1]
        taken: Any = {which: (0, port) if which == "grpc_port" else port}
        reported = await refusal(replace(settings, **taken))
    assert reported.startswith(f"--{which.replace('_', '-')}: ")
    assert f"127.0.0.1:{port}" in reported
    assert "in use" in reported


@pytest.mark.skipif(not is_free(0, "::1"), reason="no IPv6 on this machine")
@pytest.mark.parametrize("which", ["grpc_port", "grpc_health_port"])
async def test_an_ipv6_address_is_reported_in_brackets(settings: Settings, which: str) -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as server:
        port = server.getsockname()[1]
        taken: Any = {which: (0, port) if which == "grpc_port" else port}
        assert f"[::1]:{port} is in use" in await refusal(replace(settings, host="::1", **taken))


async def test_pools_with_one_port_need_flags(settings: Settings) -> None:
    reported = await refusal(replace(settings, grpc_port=()))
    assert reported == "pool default/one: port 9002 is another pool's too; use --grpc-port"


async def test_more_ports_than_pools(settings: Settings) -> None:
    assert await refusal(replace(settings, grpc_port=(0, 0, 0))) == "--grpc-port: given 3 times for 2 pools"


async def test_an_audit_log_that_cannot_be_written(settings: Settings, tmp_path: Path) -> None:
    reported = await refusal(replace(settings, audit_log=tmp_path / "no" / "audit.jsonl"))
    assert reported == f"--audit-log: cannot write {tmp_path}/no/audit.jsonl: No such file or directory"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("endpoints: [{name: a, address: nowhere, port: 8000}]", "endpoints[0].address"),
        ("endpoints: {", "YAML"),
        ("kind: ConfigMap\n", "the files name no endpoints"),
    ],
)
async def test_a_wrong_endpoints_file(settings: Settings, text: str, sentence: str) -> None:
    settings.endpoints[0].write_text(text)
    assert sentence in await refusal(settings)


async def test_a_wrong_configuration(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorr}]\n")
    assert "queue-scorer" in await refusal(replace(settings, config=file))


# --- a running process ----------------------------------------------------------------------------------------------


class Process:
    def __init__(self, process: asyncio.subprocess.Process, grpc: list[int], metrics: int, log: Path) -> None:
        self.process = process
        self.grpc = grpc
        self.metrics = metrics
        self.log = log

    async def get(self, path: str, **headers: str) -> tuple[int, str]:
        """Status and text; 0 while nobody listens."""
        try:
            async with aiohttp.request("GET", f"http://127.0.0.1:{self.metrics}{path}", headers=headers) as answer:
                return answer.status, await answer.text()
        except aiohttp.ClientError:
            return 0, ""

    async def ready(self, status: int = 200) -> str:
        answered = await eventually(lambda: self.get("/ready"), lambda seen: seen[0] == status)
        return str(answered[1])

    async def ended(self) -> int:
        return await asyncio.wait_for(self.process.wait(), 30)


@asynccontextmanager
async def serving(
    settings: Settings, directory: Path, *flags: str, descriptors: int | None = None
) -> AsyncIterator[Process]:
    """`descriptors`: how many files and sockets the process may have open."""
    *grpc, health, metrics = free_ports(4)
    ports = [flag for port in grpc for flag in ("--grpc-port", str(port))]
    ports += ["--grpc-health-port", str(health), "--metrics-port", str(metrics)]
    ports += ["--drain-linger", "0"]
    command = [sys.executable, "-m", "epp.cli", "serve", "--endpoints", str(settings.endpoints[0]), *ports, *flags]
    if descriptors is not None:
        command = ["prlimit", f"--nofile={descriptors}", *command]
    log = directory / "epp.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(*command, stdout=output, stderr=output)
    try:
        made = Process(process, grpc, metrics, log)
        await made.ready()
        yield made
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def test_each_pool_has_its_port(settings: Settings, tmp_path: Path) -> None:
    audit = tmp_path / "audit.jsonl"
    async with serving(settings, tmp_path, "--audit-log", str(audit)) as process:
        for port, address in zip(process.grpc, ("10.0.0.1:8000", "10.0.0.2:8000"), strict=True):
            async with Gateway(port) as gateway:
                stream = gateway.stream()
                await stream.write(ext_proc.request_headers())
                await stream.write(ext_proc.request_body(REQUEST, end=True))
                assert address in await stream.said()
                await stream.rest()
        _, config = await process.get("/config")
        assert [line for line in config.splitlines() if line.startswith("pool ")] == [
            "pool default/one",
            "pool default/two",
        ]
        reported = f"pool one on 127.0.0.1:{process.grpc[0]}; pool two on 127.0.0.1:{process.grpc[1]}"
        assert reported in process.log.read_text()
        process.process.terminate()
        assert await process.ended() == 0
    lines = [json.loads(line) for line in audit.read_text().splitlines()]
    assert [line["address"] for line in lines] == ["10.0.0.1:8000", "10.0.0.2:8000"]


SHADOW = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: expected-ttft}, {type: queue-scorer}]
schedulingProfiles:
- {name: main, plugins: [{pluginRef: expected-ttft}]}
- {name: new, plugins: [{pluginRef: queue-scorer}]}
"""


async def test_a_shadow_comes_with_a_changed_file_and_is_reported_of(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(SHADOW.replace("- {name: new", "# {name: new"))
    async with serving(settings, tmp_path, "--config", str(file)) as process:
        file.write_text(SHADOW + "shadow: {profile: new, sample: 1}\n")
        await eventually(lambda: process.get("/config"), lambda seen: "shadow new" in seen[1])
        async with Gateway(process.grpc[0]) as gateway:
            stream = gateway.stream()
            await stream.write(ext_proc.request_headers())
            await stream.write(ext_proc.request_body(REQUEST, end=True))
            await stream.said()
            await stream.rest()
        _, text = await process.get("/decisions")
        assert json.loads(text)["decisions"][0]["shadow"]["profile"] == "new"
        _, metrics = await process.get("/metrics")
        assert 'warmpath_shadow_picks_total{outcome="same",pool="one",profile="new"} 1.0' in metrics
        assert "Shadow profile new: of 1 picks" in (await process.get("/"))[1]
        file.write_text(SHADOW + "shadow: {profile: now}\n")
        reported = "shadow.profile: no profile is called 'now'; did you mean 'new'?"
        await eventually(lambda: asyncio.to_thread(process.log.read_text), lambda log: reported in log)
        assert "shadow new" in (await process.get("/config"))[1]


async def test_pools_of_one_name_are_reported_apart_by_their_namespace(settings: Settings, tmp_path: Path) -> None:
    two = POOLS.replace("metadata: {name: one}", "metadata: {name: same, namespace: left}")
    pods = "endpoints:\n" + "".join(
        f"- {{name: {name}, namespace: {side}, address: 10.0.0.{n}, port: 8000, labels: {{app: {app}}}}}\n"
        for n, (name, side, app) in enumerate((("a", "left", "one"), ("b", "right", "two")), 1)
    )
    text = two.replace("metadata: {name: two}", "metadata: {name: same, namespace: right}")
    settings.endpoints[0].write_text(text.partition("endpoints:")[0] + pods)
    async with serving(settings, tmp_path) as process:
        for port in process.grpc:
            async with Gateway(port) as gateway:
                stream = gateway.stream()
                await stream.write(ext_proc.request_headers())
                await stream.write(ext_proc.request_body(REQUEST, end=True))
                await stream.said()
                await stream.rest()
        decisions = json.loads((await process.get("/decisions"))[1])["decisions"]
        shown = [(each["namespace"], each["pool"], each["address"]) for each in decisions]
        assert shown == [("right", "same", "10.0.0.2:8000"), ("left", "same", "10.0.0.1:8000")]


async def test_a_drain_has_an_end(settings: Settings, tmp_path: Path) -> None:
    flags = ("--drain-timeout", "0.1")
    async with serving(settings, tmp_path, *flags) as process, Gateway(process.grpc[0]) as gateway:
        stream = gateway.stream()
        await stream.write(ext_proc.request_headers())
        await stream.write(ext_proc.request_body(REQUEST, end=True))
        assert "10.0.0.1:8000" in await stream.said()
        process.process.terminate()
        assert await process.ended() == 0


BLOCKING = """
import time
from dataclasses import dataclass

from epp.plugin import Scorer


@dataclass(eq=False)
class Waits(Scorer):
    def score(self, request, endpoints):
        time.sleep(600)
"""
PLUGGED = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: waits_on_the_loop.Waits}]
"""


async def test_a_process_whose_loop_stands_still_ends_and_says_where(settings: Settings, tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(PLUGGED)
    (tmp_path / "waits_on_the_loop.py").write_text(BLOCKING)
    flags = ("--config", str(config), "--stall-limit", "1s")
    async with serving(settings, tmp_path, *flags) as process, Gateway(process.grpc[0]) as gateway:
        stream = gateway.stream()
        await stream.write(ext_proc.request_headers())
        await stream.write(ext_proc.request_body(REQUEST, end=True))
        assert await process.ended() == EXIT_STALLED
        assert await stream.code() is not grpc.StatusCode.OK
    lines = process.log.read_text().splitlines()
    assert any("waits_on_the_loop.py" in line and "in score" in line for line in lines)
    assert len([line for line in lines if "the event loop has not turned for 1 s" in line]) == 1


async def test_gateways_are_reported_to_connect_anew_before_the_linger_would_be_over(
    settings: Settings, tmp_path: Path
) -> None:
    async with serving(settings, tmp_path, "--drain-linger", "1s") as process:
        reader, writer = await asyncio.open_connection("127.0.0.1", process.grpc[0])
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0]))
        async with asyncio.timeout(30):
            said = await reader.readuntil(b"max_age")
        assert 7 in said, "GOAWAY"
        writer.close()


async def test_a_process_that_was_stopped_goes_on(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, tmp_path, "--stall-limit", "0.5s") as process:
        for _ in range(2):
            process.process.send_signal(signal.SIGSTOP)
            await asyncio.sleep(2)
            process.process.send_signal(signal.SIGCONT)
            await process.ready()
        assert process.process.returncode is None
        assert "has not turned" not in process.log.read_text()


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({}, "which pools? expected one of --endpoints (files), --pool-name"),
        ({"pool_name": ("a",), "pool_selector": "x=y"}, "which pools?"),
        ({"endpoint_selector": "app=x"}, "--endpoint-target-ports: expected with --endpoint-selector"),
    ],
)
async def test_what_to_serve_must_be_said_once(changes: dict[str, Any], reported: str) -> None:
    assert reported in await refusal(Settings(grpc_health_port=0, metrics_port=0, **changes))


async def test_a_certificate_needs_tls(settings: Settings, tmp_path: Path) -> None:
    reported = await refusal(replace(settings, cert_path=tmp_path))
    assert reported == "--cert-path: expected with --secure-serving=true only"


async def test_tokenizer_files_that_are_not_there_are_reported_at_start(settings: Settings, tmp_path: Path) -> None:
    reported = await refusal(replace(settings, tokenizer=(f"org/m={tmp_path / 'm'}",)))
    assert (
        reported
        == f"--tokenizer org/m: {tmp_path / 'm'}: expected a directory with tokenizer.json and tokenizer_config.json"
    )


async def test_of_files_one_pool_or_all(settings: Settings) -> None:
    assert "--pool-name: given several times" in await refusal(replace(settings, pool_name=("one", "two")))


async def test_the_second_door_may_speak_tls(settings: Settings, tmp_path: Path) -> None:
    reported = await refusal(replace(settings, metrics_client_ca_file=tmp_path))
    assert reported == "--metrics-client-ca-file: expected with --metrics-cert-dir only"
    assert (await refusal(replace(settings, metrics_cert_dir=tmp_path))).startswith(
        "--metrics-cert-dir: expected tls.crt"
    )


async def test_flags_without_effect_are_reported_once(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, tmp_path, "--ha-enable-leader-election", "-v=4", "-health-checking") as process:
        lines = process.log.read_text().splitlines()
    reported = [line for line in lines if "without effect" in line]
    assert len(reported) == 1
    assert reported[0].endswith(
        "given and without effect: --ha-enable-leader-election: every replica is active, none leads"
    )


async def test_settings_without_effect_are_reported_once(settings: Settings, tmp_path: Path) -> None:
    text = (
        "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nfeatureGates: [enableLegacyMetrics]\n"
        "plugins: [{type: no-hit-lru-scorer, parameters: {prefixPluginName: a}}]\n"
    )
    async with serving(settings, tmp_path, "--config-text", text) as process:
        lines = process.log.read_text().splitlines()
    (reported,) = [line for line in lines if "without effect" in line]
    assert reported.endswith(
        "accepted, without effect: featureGates[0]: endpoints' metrics are read in one way; "
        "plugins[0].parameters.prefixPluginName: without effect in llm-d too; prefixMatchInfoProducerName says it"
    )


async def test_a_configuration_may_name_the_endpoints_file(settings: Settings, tmp_path: Path) -> None:
    file, text = (
        settings.endpoints[0],
        (
            "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
            "plugins: [{type: queue-scorer}, {type: file-discovery, parameters: {path: PATH, watchFile: true}}]\n"
            "dataLayer: {discovery: {pluginRef: file-discovery}}\n"
        ).replace("PATH", str(settings.endpoints[0])),
    )
    without = replace(settings, endpoints=(), config_text=text)
    assert discovered(without).endpoints == (file,)
    named = replace(settings, endpoints=(tmp_path,), config_text=text)
    assert discovered(named) is named, "flags say it first"
    wrong = replace(without, config_text=text.replace("path:", "pfad:"))
    assert discovered(wrong) is wrong, "its own start tells"
    config = tmp_path / "config.yaml"
    config.write_text(text)
    assert discovered(replace(without, config_text=None, config=config)).endpoints == (file,)


async def test_a_configuration_may_be_given_as_text(settings: Settings, tmp_path: Path) -> None:
    text = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{type: queue-scorer}]\n"
    async with serving(settings, tmp_path, "--config-text", text) as process:
        assert "queue-scorer" in (await process.get("/config"))[1]
    assert "--config-text" in await refusal(replace(settings, config_text="plugins: 7"))


async def test_the_cipher_suites_of_tls_1_2_can_be_chosen(settings: Settings, tmp_path: Path) -> None:
    def client(suite: str) -> ssl.SSLContext:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        context.maximum_version = ssl.TLSVersion.TLSv1_2
        context.set_ciphers(suite)
        context.set_alpn_protocols(["h2"])
        return context

    flags = ("--secure-serving", "--tls-min-version=VersionTLS12")
    suites = "--tls-cipher-suites=TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384"
    async with serving(settings, tmp_path, *flags, suites) as process:
        port = process.grpc[0]
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=client("ECDHE-ECDSA-AES256-GCM-SHA384"))
        writer.close()
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await asyncio.open_connection("127.0.0.1", port, ssl=client("ECDHE-ECDSA-AES128-GCM-SHA256"))


async def test_in_kubernetes_readers_need_a_token_and_with_files_only_if_asked(
    settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(settings, tmp_path) as process:
        assert (await process.get("/metrics"))[0] == 200
    fake = FakeApiServer()
    fake.tokens["t"] = "ann"
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        async with serving(settings, tmp_path, "--metrics-endpoint-auth") as process:
            assert [(await process.get(path))[0] for path in ("/metrics", "/decisions", "/ready")] == [401, 401, 200]
            reported = await process.get("/metrics", Authorization="Bearer t")
            assert reported[0] == 403
            fake.rights.add(("ann", "/decisions"))
            assert (await process.get("/decisions", Authorization="Bearer t"))[0] == 200


async def test_connections_of_the_admin_port_leave_file_descriptors_for_ext_proc(
    settings: Settings, tmp_path: Path
) -> None:
    async with serving(settings, tmp_path, descriptors=128) as process:
        silent = [await asyncio.open_connection("127.0.0.1", process.metrics) for _ in range(150)]
        for _ in range(20):
            async with asyncio.timeout(6), Gateway(process.grpc[0]) as gateway:  # silence would end after 10
                stream = gateway.stream()
                await stream.write(ext_proc.request_headers())
                await stream.write(ext_proc.request_body(REQUEST, end=True))
                assert "10.0.0.1:8000" in await stream.said()
                await stream.rest()
        assert (await process.get("/ready"))[0] == 200
        for _, writer in silent:
            writer.close()
            with suppress(ConnectionError):
                await writer.wait_closed()


async def test_without_tokens_a_reader_calls_us_by_a_name_of_ours(settings: Settings, tmp_path: Path) -> None:
    async with serving(settings, tmp_path, "--metrics-allowed-host", "metrics.example.org") as process:
        for host, status in (("metrics.example.org", 200), ("evil.example.org", 421)):
            assert (await process.get("/decisions", Host=host))[0] == status
            assert (await process.get("/ready", Host=host))[0] == 200
    assert await refusal(replace(settings, metrics_allowed_host=("http://a",))) == (
        "--metrics-allowed-host: expected a host name without scheme and port, got 'http://a'"
    )


async def test_replicas_of_one_process_each_find_each_other(settings: Settings, tmp_path: Path) -> None:
    ports = free_ports(2)
    peers = tuple(f"127.0.0.1:{port}" for port in ports)
    admin = free_ports(2)
    both = [
        replace(settings, replica_port=port, peer=peers, metrics_port=metrics)
        for port, metrics in zip(ports, admin, strict=True)
    ]

    async def seen(http: aiohttp.ClientSession, port: int) -> Any:
        async with http.get(f"http://127.0.0.1:{port}/endpoints") as answer:
            return (await answer.json())["replicas"]

    async with aiohttp.ClientSession() as http:
        processes = [asyncio.ensure_future(serve(each)) for each in both]
        try:
            for port in admin:
                await eventually(
                    lambda port=port: seen(http, port),  # type: ignore[misc]
                    lambda shown: shown["joined"] and [peer["state"] for peer in shown["peers"]] == ["live"],
                )
            async with http.get(f"http://127.0.0.1:{admin[0]}/metrics") as answer:
                text = await answer.text()
            assert 'warmpath_replica_peers{state="live"} 1.0' in text
            async with http.get(f"http://127.0.0.1:{admin[0]}/ready") as answer:
                assert answer.status == 200
        finally:
            for process in processes:
                process.cancel()
            await asyncio.gather(*processes, return_exceptions=True)


@pytest.mark.parametrize(
    ("changes", "reported"),
    [
        ({"peer": ("nowhere",)}, "--peer"),
        ({"peers_dns": "replicas.example:9004"}, "--replica-secret-file"),
        ({"peers_service": ("ns", "replicas")}, "no Kubernetes credentials"),
        ({"host": "0.0.0.0", "replica_port": 0}, "--replica-secret-file"),
        ({"replica_secret_file": Path("/nowhere")}, "--replica-secret-file"),
        ({"peer": ("127.0.0.1:9004",), "replica_secret_file": Path("/nowhere")}, "cannot read"),
    ],
)
async def test_replicas_that_cannot_be_are_refused(settings: Settings, changes: dict[str, Any], reported: str) -> None:
    assert reported in await refusal(replace(settings, **changes))


async def test_hashes_have_a_seed_that_only_replicas_share(tmp_path: Path) -> None:
    alone = {Shared(Settings()).hash_seed for _ in range(3)}
    assert len(alone) == 3
    seeds = []
    for name, secret in (("a", "0123456789abcdef"), ("b", "0123456789abcdef\n"), ("c", "fedcba9876543210")):
        (tmp_path / name).write_text(secret, encoding="utf-8")
        shared = Shared(Settings(peer=("127.0.0.1:9",), replica_port=0, replica_secret_file=tmp_path / name))
        seeds.append(shared.hash_seed)
        given = ServedPool(Pool("p", random=shared.random), 0, shared)._services()
        assert given.hash_seed == shared.hash_seed
        assert given.replicas() == (0, 1, 0.0)
        assert shared.replicas is not None
        shared.replicas.exchange._look(shared.clock())
        shared.replicas.exchange._replicas["default/p"] = Replicas(2, 3, 0.4)
        assert given.replicas() == (2, 3, 0.4)
        shared.replicas.open()
        shared.replicas.close()
    assert seeds[0] == seeds[1] != seeds[2]
    assert not {0, *alone} & {*seeds}


def test_models_that_differ_in_one_pool_are_said_until_they_do_in_none() -> None:
    shared = Shared(Settings())
    one, two = (ServedPool(Pool(name, random=shared.random), 0, shared) for name in ("one", "two"))
    for served in (one, two):
        served._models_differ(["a", "b"])
    one._models_differ(None)
    assert shared.metrics.degraded_now == ["models-differ"]
    two._models_differ(None)
    assert shared.metrics.degraded_now == []


def test_plugins_are_told_the_engine_that_the_configuration_names() -> None:
    text = (
        "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\n"
        "plugins: [{type: core-metrics-extractor, parameters: {defaultEngine: sglang}}]\n"
    )
    given = ServedPool(Pool("p", random=Random(0)), 0, Shared(Settings(config_text=text)))._services()
    assert given.engine_of(endpoint("a")) == "sglang"
    assert given.engine_of(endpoint("b", labels={"llm-d.ai/engine-type": "vllm"})) == "vllm"
