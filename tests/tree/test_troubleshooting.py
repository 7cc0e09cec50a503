"""docs/troubleshooting.md: each message it quotes is what comes when the mistake is made."""

import asyncio
import gzip
import os
import re
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path
from random import Random
from typing import NoReturn
from urllib.error import HTTPError

import pytest
from click.testing import CliRunner

from epp.admin.access import Access
from epp.cli import warmpath
from epp.configuration.loader import strategy_text
from epp.errors import ConfigError
from epp.extproc.http2 import PREFACE, Connection
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.stream import Memory, Stream
from epp.extproc.tls import Certificate
from epp.pool.apiserver import PODS, ApiError, User
from epp.pool.static import load
from epp.pool.store import Pool, PoolState
from epp.pool.watch import Watch
from epp.replicas.group import ReplicaGroup, ReplicaSettings
from epp.replicas.sockets import Sockets
from epp.replicas.wire import LIVE as LIVE_TOPIC
from epp.scheduling.failures import FailureShares
from epp.testing import services
from tests.support import mistakes
from tests.support.ext_proc.messages import HEADERS, request_body, request_headers
from tests.support.ext_proc.server import Gateway
from tests.support.mistakes import Said
from tests.support.scheduling.schedulers import ask, pod, pods
from tooling.laptop.ports import free_ports

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
QUOTED = re.findall(r"^### ([^\n]+)\n+```text\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE)
CONFIG = "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\n"
TYPOS = f"""{CONFIG}plugins:
- type: prefix-cache-scorr
- {{type: queue-scorer, parameters: {{weight: 2}}}}
schedulingProfiles:
- name: default
  plugins: [{{pluginRef: queue-scorer}}, {{pluginRef: queue}}]
"""
MODULE = f"""{CONFIG}plugins: [{{type: my_scorers.WarmFirst}}]
schedulingProfiles: [{{name: default, plugins: [{{pluginRef: my_scorers.WarmFirst}}]}}]
"""
POOL = "endpoints:\n- {name: a, address: 127.0.0.1, port: %d, labels: {llm-d.ai/role: decoder}}\n"
AT_MOST = 40.0
"""Seconds; never reached where all is well."""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(*arguments: str, text: str = "") -> str:
    """What it prints; for mistakes, so it must not end well."""
    done = CliRunner().invoke(warmpath, list(arguments), input=text or None, terminal_width=300)
    assert done.exit_code != 0, done.output
    return done.output


def served(*flags: str) -> str:
    """What `warmpath serve` prints, in a process of its own: it sets up logs, signals and the event loop."""
    return failed("-m", "epp.cli", "serve", *flags, env={**os.environ, "PYTHONPATH": str(ROOT)})


def failed(*arguments: str, env: Mapping[str, str]) -> str:
    """What Python prints that is run with these; it must not end well."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=AT_MOST, check=False)
    assert done.returncode != 0, done.stdout
    return done.stdout + done.stderr


def checked(text: str, *flags: str) -> str:
    Path("config.yaml").write_text(text)
    return command("check", *flags, "config.yaml")


def endpoints(entry: str) -> str:
    Path("pool.yaml").write_text(f"endpoints: [{entry}]\n")
    with pytest.raises(ConfigError) as error:
        load([Path("pool.yaml")])
    return str(error.value)


def refused_manifests(**changes: str) -> str:
    """What the gateway says of the demo's manifests with these words changed."""
    text = "\n---\n".join(file.read_text() for file in sorted((ROOT / "manifests" / "laptop").glob("*.yaml")))
    for old, new in changes.items():
        text = text.replace(old, new)
    Path("manifests.yaml").write_text(text)
    return command("up", "--once", "--manifests", "manifests.yaml")


def taken(run: Callable[[str], str]) -> str:
    with closing(socket.create_server(("127.0.0.1", 0))) as other:
        return run(str(other.getsockname()[1]))


def explained(pool: str, body: str) -> str:
    Path("pool.yaml").write_text(pool)
    return command("explain", "--endpoints", "pool.yaml", "--json", text=body)


def refused(*messages: bytes, max_body: int = 100) -> str:
    """What a gateway that sends these is told."""
    stream = Stream(max_body, Memory(1 << 20))
    for message in messages:
        stream.receive(message)
    assert stream.refused is not None
    return str(stream.refused)


def empty(subset: tuple[str, ...] | None, *names: str) -> str:
    pool = Pool("llm", random=Random(1))
    pool.apply(PoolState("llm", endpoints=tuple(pod(name) for name in names)))
    return pool.why_empty(subset)


def observing() -> bytes:
    return pb.ProcessingRequest(observability_mode=True, request_headers=pb.HttpHeaders()).SerializeToString()


def spoken(data: bytes) -> str:
    connection = Connection()
    connection.receive(data)
    return str(connection.broken)


def hung() -> str:
    """What is logged of an endpoint whose metrics cannot be read, and of one in whose metrics nothing moves."""
    now, said, shares, [a, b, c] = 0.0, [], FailureShares(), pods("abc")
    shares.clock = lambda: now
    shares.start(services(degraded=lambda reason, detail, *, lasting: said.append(f"degraded: {reason}: {detail}")))
    for second in range(30):
        now = float(second)
        for endpoint in (a, b, c) if second < 3 else (b, c):
            shares.on_scraped(endpoint)
        if second == 2:
            for endpoint in (a, b):
                shares.on_picked(ask(), endpoint)
    return "\n".join(said)


def without(module: str, *arguments: str) -> str:
    """What a command prints where a package is not installed."""
    program = f"import sys; sys.modules[{module!r}] = None; from epp.cli import main; main()"
    return failed("-c", program, *arguments, env={"PYTHONPATH": str(ROOT), "PATH": "", "HOME": os.environ["HOME"]})


def plain_where_tls_is_spoken() -> str:
    said, came = Said(), ssl.MemoryBIO()
    came.write(PREFACE)
    with pytest.raises(ssl.SSLError):
        Certificate(None, said).context().wrap_bio(came, ssl.MemoryBIO(), server_side=True).do_handshake()
    return said.text


def not_let_in() -> str:
    """Replicas with another secret, and with none, connect to one."""
    said = Said()
    group = ReplicaGroup(ReplicaSettings("127.0.0.1", 0), time.monotonic, Random(1), said.degraded, said.recovered)

    def sockets(secret: bytes | None) -> tuple[Sockets, str]:
        made = Sockets(lambda address, frame: None, lambda topic: None, group._not_let_in, secret)
        return made, f"127.0.0.1:{made.open('127.0.0.1', 0)}"

    async def connect() -> None:
        group.open()
        one, address = sockets(b"ours")
        try:
            for number, secret in enumerate((b"another", None)):
                other, _ = sockets(secret)
                try:
                    other.subscribe(address, LIVE_TOPIC)
                    async with asyncio.timeout(AT_MOST):
                        while len({*said.lines}) <= number:
                            one.poll()  # as a group does
                            other.poll()  # either end may be the one that hears of it
                            await asyncio.sleep(0.05)
                finally:
                    other.close()
        finally:
            one.close()
            group.close()

    asyncio.run(connect())
    return said.text


class Forbids:
    """An API server that lets nobody in."""

    def __init__(self) -> None:
        self.said = ""

    async def page(self, *asked: object) -> bytes:
        raise ApiError(403, "pods is forbidden")

    def stream(self, *asked: object) -> NoReturn:
        raise AssertionError(asked)

    async def authenticate(self, token: str) -> User | None:
        if token == "lost":
            raise ApiError(403, "tokenreviews is forbidden")
        return User("prometheus") if token == "prometheus" else None

    async def authorized(self, user: User, path: str) -> bool:
        return False

    def trouble(self, watch: object, reason: str, detail: str) -> None:
        self.said = f"{reason}: {detail}"

    def changed(self) -> None:
        pass

    def refused(self, detail: str) -> None:
        raise AssertionError(detail)


def forbidden() -> str:
    server = Forbids()
    watch: Watch[bytes] = Watch(server, PODS, "default", bytes, server, Random(1))
    asyncio.run(watch._round())
    return server.said


def without_a_right() -> str:
    access = Access(Forbids(), Said())

    async def ask() -> list[str]:
        tokens = ("", "Bearer stranger", "Bearer prometheus", "Bearer lost")
        return [(await access.check(token, "/metrics")).message for token in tokens]

    return "\n".join(asyncio.run(ask()))


POOL_FILE = ("--endpoints", "pool.yaml")
MADE: dict[str, Callable[[], str]] = {
    "Which pools?": served,
    "A key of the endpoints file is wrong": lambda: endpoints("{name: a, adress: 10.0.0.1, port: 8000}"),
    "An endpoint is given by its host name": lambda: endpoints("{name: a, address: vllm.example, port: 8000}"),
    "The port of the demo is taken": lambda: taken(lambda port: command("up", "--once", "--port", port)),
    "A plugin or a parameter is misspelt": lambda: checked(TYPOS),
    "The file is a ConfigMap": lambda: checked("apiVersion: v1\nkind: ConfigMap\ndata: {a: b}\n"),
    "A plugin's module is not found": lambda: checked(MODULE),
    "A plugin's module may not be used": lambda: checked(MODULE, "--plugins-from", "none"),
    "A package is missing": lambda: "".join(
        (
            without("kubernetes", "serve", "--pool-name", "p"),
            without("opentelemetry.sdk", "serve", "--endpoints", os.devnull, "--tracing"),
            without("envoy", "up", "--once", "--port", str(free_ports(1)[0])),
        )
    ),
    "The service account may not read": forbidden,
    "Their secrets differ": not_let_in,
    "The picker speaks TLS and the gateway does not": plain_where_tls_is_spoken,
    "The body is too large for the gateway": mistakes.larger_than_the_gateway_holds,
    "Port 9090 answers 401, 403 or 503": without_a_right,
    "The definition of InferencePool is missing": lambda: mistakes.followed_pool(defined=False),
    "There is no pool of that name": lambda: mistakes.followed_pool(defined=True),
    "The image is not there": mistakes.image_that_is_not_there,
    "No pod has the pool's labels": mistakes.selector_that_matches_nothing,
    "The path is in no route": mistakes.answered,
    "No route leads to the pool": lambda: mistakes.routed(backend="lm"),
    "The route names a Gateway that is not there": lambda: (
        mistakes.routed("gg") + refused_manifests(**{"- name: warmpath": "- name: warmpth"})
    ),
    "No controller takes up the Gateway": mistakes.without_a_controller,
    "The gateway takes no InferencePool": lambda: mistakes.routed(
        type="ResolvedRefs", reason="InvalidKind", message=mistakes.INVALID
    ),
    "The route leads to a Service": lambda: refused_manifests(
        **{"group: inference.networking.k8s.io\n          kind: InferencePool": "kind: Service"}
    ),
    "The gateway cannot reach the picker": mistakes.answered,
    "Nothing listens at the target port": mistakes.answered,
    "Another server listens at the target port": mistakes.another_server,
    "The picker cannot reach the pods": mistakes.dropped,
    "Prefix caching is switched off": mistakes.without_prefix_caching,
    "The gateway speaks HTTP/1.1 to the picker": lambda: spoken(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n"),
    "The gateway only observes": lambda: refused(observing()),
    "There is no endpoint": lambda: empty(None),
    "Gateway and picker do not mean the same pool": lambda: empty(("10.9.9.9:1",), "a", "b"),
    "No endpoint decodes": lambda: explained(POOL % 1, '{"model": "m", "prompt": "hello"}'),
    "The model is not named": lambda: explained(
        "endpoints: [{name: a, address: 10.0.0.1, port: 1}]", '{"prompt": "a"}'
    ),
    "The body is too large": lambda: refused(request_headers(), request_body(b"a" * 101)),
    "An endpoint hangs": hung,
    "An endpoint cannot be reached by doctor": lambda: command(
        "doctor", "--json", "--endpoint", f"http://127.0.0.1:{free_ports(1)[0]}"
    ),
}


def parts_in(message: str, text: str) -> list[str]:
    """Lines of the page that are not in the text; `…` stands for anything on the line."""
    return [
        line for line in message.strip().splitlines() if not re.search(".*".join(map(re.escape, line.split("…"))), text)
    ]


@pytest.mark.envoy
@pytest.mark.parametrize(
    ("symptom", "message"), [each for each in QUOTED if each[0] in MADE], ids=lambda text: text[:40]
)
def test_the_mistake_makes_the_message(symptom: str, message: str) -> None:
    text = MADE[symptom]()
    assert parts_in(message, text) == [], text


LIVE = {
    "A port is taken",
    "The tokenizer's directory is wrong",
    "The gateway speaks TLS and the picker does not",
    "Only one of the two speaks TLS",
    "The body does not arrive",
    "The body is compressed",
    "The page at port 9090 refuses",
    "An endpoint gets no request at all",
    "Metrics of an endpoint cannot be read",
    "KV events do not arrive",
    "Prompts are matched approximately",
    "A changed configuration has no effect",
}


def test_every_message_of_the_page_is_made() -> None:
    assert {symptom for symptom, _ in QUOTED} == MADE.keys() | LIVE
    assert len(QUOTED) == PAGE.count("\n### "), "an entry quotes no message"


def test_the_likeliest_mistakes_lead_to_entries_that_are_made() -> None:
    rows = re.findall(r"^\| ([^|]+) \| \[([^]]+)\]\(#([^)]+)\) \|$", PAGE, re.MULTILINE)
    assert len(rows) == len({mistake for mistake, _, _ in rows}) >= 20
    made = {re.sub(r"[^\w\- ]", "", entry.lower()).replace(" ", "-"): entry for entry in MADE.keys() | LIVE}
    wrong = [mistake for mistake, entry, anchor in rows if made.get(anchor) != entry]
    assert wrong == [], "the text of a link is the heading of its entry"


class Picker:
    """A `warmpath serve` with several mistakes in what it is given."""

    def __init__(self, folder: Path) -> None:
        self.grpc, self.health, self.admin, *dead = free_ports(5)
        self.log, self.config = folder / "log", folder / "kv-aware.yaml"
        self.config.write_text(strategy_text("kv-aware"))
        (folder / "pool.yaml").write_text(POOL % dead[0] + f"- {{name: b, address: 127.0.0.1, port: {dead[1]}}}\n")
        ports = ("--grpc-port", self.grpc, "--grpc-health-port", self.health, "--metrics-port", self.admin)
        flags = ["serve", *POOL_FILE, "--config", str(self.config), *map(str, ports)]
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "epp.cli", *flags],
                cwd=folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=output,
                stderr=output,
            )

    def text(self) -> str:
        return self.log.read_text(encoding="utf-8")

    def ask(self, path: str, body: bytes | None = None, **headers: str) -> str:
        url = f"http://127.0.0.1:{self.admin}{path}"
        try:
            with urllib.request.urlopen(urllib.request.Request(url, body, headers), timeout=10) as answer:
                return str(answer.read().decode())
        except HTTPError as error:
            with error:
                return error.read().decode()


@pytest.fixture
def picker(folder: Path) -> Iterator[Picker]:
    made = Picker(folder)
    yield made
    made.process.terminate()
    made.process.wait(30)


async def asked_with_a_compressed_body(port: int) -> None:
    async with Gateway(port) as gateway:
        call = gateway.stream()
        await call.write(request_headers({**HEADERS, "content-encoding": "gzip"}))
        await call.write(request_body(gzip.compress(b"{}"), end=True))
        async with asyncio.timeout(AT_MOST):
            assert (await call.said()).startswith("request headers to ")


def test_mistakes_around_a_running_picker_make_the_messages(picker: Picker) -> None:
    def wait_for(*texts: str) -> None:
        end = time.monotonic() + AT_MOST
        while not all(text in picker.text() for text in texts):
            assert picker.process.poll() is None, picker.text()
            assert time.monotonic() < end, picker.text()
            time.sleep(0.05)

    wait_for("serving pool")
    chat = b'{"model": "m", "messages": [{"role": "user", "content": "hello"}]}'
    said = [
        picker.ask("/explain/v1/chat/completions", chat),
        picker.ask("/explain/v1/chat/completions", b""),
        picker.ask("/decisions", Host="page.example"),
        command("conformance", "--tls", "--timeout", "1", "--target", f"127.0.0.1:{picker.grpc}"),
        served(*POOL_FILE, "--grpc-port", str(picker.grpc), "--grpc-health-port", "0", "--metrics-port", "0"),
        served(*POOL_FILE, "--tokenizer", "m=/nothing-there"),
    ]
    asyncio.run(asked_with_a_compressed_body(picker.grpc))
    picker.config.write_text(picker.config.read_text().replace("type: expected-ttft", "type: expected-tft"))
    context = ssl.create_default_context()
    with socket.create_connection(("127.0.0.1", picker.grpc)) as plain, suppress(OSError):
        context.wrap_socket(plain, server_hostname="localhost")
    reasons = (
        "gateway-not-http2",
        "opaque-body",
        "role-unknown",
        "metrics-stale",
        "kv-events-failed",
        "approximate-events",
    )
    wait_for("config-refused", *reasons)
    text = "\n".join([*said, picker.text()])
    wrong = {symptom: parts_in(message, text) for symptom, message in QUOTED if symptom in LIVE}
    assert {symptom: lines for symptom, lines in wrong.items() if lines} == {}, text
