"""What serves the model in a chain: simulated pods, or real vLLM with LMCache tiers; as commands to run.

An engine lays out its pods: their ports, the command of each, and the services that have to run before them.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import yaml

from epp.configuration.schema import parse
from epp.documents.strict import read
from tooling.laptop.models import SIZES, cached_model
from tooling.laptop.ports import free_ports

SOURCE: Final = Path(__file__).parents[2]
ENGINE_PYTHON: Final = SOURCE / ".venv-engine" / "bin" / "python"
"""Made by `hack/install engine`."""
L2_GIGABYTES: Final = 0.5
"""Of what each node has stored there; what was not used for longest goes first."""
REDIS_WORKERS: Final = 8
"""Connections of an LMCache server to Redis, each with one request at a time."""
REDIS_SECONDS: Final = 0.5
"""What a request to Redis may take; it finds nothing then. While Redis is away each prompt waits so long for every
`REDIS_WORKERS` of its chunks."""
_QUIET: Final = {
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "LMCACHE_TRACK_USAGE": "false",
}
_LOOPBACK: Final = "127.0.0.1"
SIDECAR: Final = (sys.executable, "-m", "epp.cli", "sidecar", "--host", _LOOPBACK)
_EVENTS: Final = {"enable_kv_cache_events": True, "endpoint": "tcp://*:0", "replay_endpoint": "tcp://*:0"}
"""Every pod publishes what becomes of its cache; a strategy that has no use for it does not listen."""


class EngineError(Exception):
    """The engine cannot be had on this machine. `str()` is one sentence that says what to do."""


@dataclass(frozen=True)
class LaptopPod:
    """A model server of the chain."""

    name: str
    port: int
    role: str = ""
    """Its label `llm-d.ai/role`; "" where it has none."""
    node: str = ""
    """The machine it is said to run on, where it shares that machine's KV memory."""
    ranks: int = 1
    """Data-parallel ranks behind its port, which are endpoints of their own."""
    engine: str = ""
    """Its label `llm-d.ai/engine-type`; "" where it has none."""

    @property
    def address(self) -> str:
        return f"{_LOOPBACK}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"


@dataclass(frozen=True)
class Program:
    """A process of the chain: how it is started, and the sign that it is ready."""

    name: str
    command: Sequence[str]
    ready: str
    """`http://...`, which answers 200 then; or `tcp://ip:port`, which accepts then."""
    environment: Mapping[str, str] = field(default_factory=dict)
    children: bool = False
    """Whether it starts processes of its own."""


@dataclass(frozen=True)
class Layout:
    """What an engine runs: services first, each after the one before, then the pods, all at once."""

    pods: Sequence[LaptopPod]
    programs: Mapping[str, Program]
    """By pod."""
    services: Sequence[Program] = ()
    caches: Sequence[str] = ()
    """URLs that empty the caches beside the pods' own, by POST."""
    coordinator: str = ""
    """URL of LMCache's coordinator, if there is one."""
    tidy: Callable[[], None] = lambda: None
    """Removes what the processes leave behind; to be called when they have ended."""


class Engine(Protocol):
    """What a chain needs to know of its engine."""

    @property
    def what(self) -> str:
        """A pod of it, in words."""

    @property
    def model(self) -> str:
        """What clients ask for."""

    @property
    def ready_seconds(self) -> float:
        """For a pod to answer, on a machine that has other things to do."""

    @property
    def picker_flags(self) -> Sequence[str]:
        """Flags of `warmpath serve` for it."""

    @property
    def roles(self) -> Sequence[str]:
        """Labels of the pods, in their order; () = none has one, and any number of pods may be laid out."""

    def lay_out(self, names: Sequence[str]) -> Layout:
        """Pods of these names on free ports. EngineError if the engine cannot be had here."""


@dataclass(frozen=True)
class Simulated:
    """`tooling.simulator.server`: a vLLM pod as a model; needs nothing."""

    seed: int = 1
    flags: Sequence[str] = ()
    roles: Sequence[str] = ()
    """Of the pods, in their order; () = none has one. Those that decode have a sidecar."""
    sidecar: Sequence[str] = SIDECAR
    """The command of such a sidecar, but for its ports; llm-d's takes the same flags for these."""
    ranks: int = 1
    """Data-parallel ranks of each pod."""

    what = "simulated pod"
    model = "sim"
    ready_seconds = 60.0
    picker_flags = ()

    def lay_out(self, names: Sequence[str]) -> Layout:
        roles = self.roles or ("",) * len(names)
        ports = iter(free_ports(len(names) + len(roles)))
        pods = [LaptopPod(name, next(ports), role, ranks=self.ranks) for name, role in zip(names, roles, strict=True)]
        return with_sidecars(pods, ports, self._program, self.sidecar)

    def _program(self, pod: LaptopPod, port: int) -> Program:
        own = ["--port", str(port), "--name", pod.name, "--seed", str(self.seed)]
        own += ["--kv-events-config", json.dumps(_EVENTS), "--data-parallel-size", str(self.ranks)]
        return Program(
            pod.name, [sys.executable, "-m", "tooling.simulator.server", *own, *self.flags], f"{pod.url}/health"
        )


def with_sidecars(
    pods: Sequence[LaptopPod],
    ports: Iterator[int],
    program: Callable[[LaptopPod, int], Program],
    sidecar: Sequence[str] = SIDECAR,
) -> Layout:
    """Pods whose engines `program` makes, on the ports it is given. In front of one that decodes there is a sidecar."""
    programs, sidecars = {}, []
    for pod in pods:
        if pod.role in ("", "prefill"):
            programs[pod.name] = program(pod, pod.port)
            continue
        port = next(ports)
        programs[pod.name] = program(pod, port)
        command = [*sidecar, "--port", str(pod.port), "--model-server-port", str(port)]
        sidecars.append(Program(f"{pod.name}-sidecar", command, f"tcp://{pod.address}"))
    return Layout(pods, programs, tuple(sidecars))


@dataclass(frozen=True)
class Tiers:
    """LMCache beside the pods: a server each, as if each pod were a node; a coordinator, and an L2 for all."""

    l1_gigabytes: float = 0.5
    l2: Literal["directory", "redis"] | None = "directory"
    """What the nodes share: a directory, or a Redis, which is empty whenever it starts; None: nothing."""
    directory: Path | None = None
    """The one for L2, which then stays; None: one that is removed at the end."""


@dataclass(frozen=True)
class Vllm:
    """Real vLLM on CPUs, one thread each.

    `size` names a model of `tooling.laptop.models`, which is made when it is not there. `block` is vLLM's block and
    LMCache's chunk: equal, and hashed alike (sha256_cbor), a block has one name in the device, in L1 and in L2.
    """

    python: Path
    size: str = "small"
    block: int = 32
    blocks: int | None = None
    """KV blocks on the device; None: what 1 GiB holds."""
    context: int = 8192
    """Longest prompt with its answer, in tokens."""
    tiers: Tiers | None = None
    """Not with roles."""
    roles: Sequence[str] = ()
    """Of the pods, in their order; () = none has one. KV comes by NIXL to those that decode, which have a sidecar."""
    flags: Sequence[str] = ()
    """For vLLM."""
    ranks: int = 1
    """Data-parallel ranks of each pod; more than one run in processes of their own."""

    what = "vLLM pod"
    ready_seconds = 600.0

    @property
    def model(self) -> str:
        return self.size

    @property
    def picker_flags(self) -> Sequence[str]:
        return ("--tokenizer", f"{self.model}={cached_model(self.size)}")

    def lay_out(self, names: Sequence[str]) -> Layout:
        model = made_model(self.python, self.size)
        if self.roles:
            return self._by_role(names, model)
        count = len(names)
        coordinator, redis, *free = free_ports(2 + 3 * count)
        servers, http_ports = free[:count], free[count : 2 * count]
        tiers = self.tiers
        pods = [
            LaptopPod(name, port, node=f"node-{name}" if tiers else "", ranks=self.ranks)
            for name, port in zip(names, free[2 * count :], strict=True)
        ]
        services: list[Program] = []
        own: list[Path] = []
        if tiers is not None:
            adapter: Mapping[str, Any] | None = None
            if tiers.l2 == "redis":
                services.append(_redis(redis, count * L2_GIGABYTES))
                adapter = _in_redis(redis)
            elif tiers.l2 == "directory":
                if (directory := tiers.directory) is None:
                    own = [directory := Path(tempfile.mkdtemp(prefix="warmpath-l2-"))]
                adapter = _in_directory(directory)
            services.append(self._coordinator(coordinator))
            for pod, server, http_port in zip(pods, servers, http_ports, strict=True):
                services.append(self._node(pod, server, http_port, coordinator, adapter, tiers.l1_gigabytes))
        programs = {
            pod.name: self._program(pod, pod.port, model, _lmcache(server) if tiers else None)
            for pod, server in zip(pods, servers, strict=True)
        }
        caches = [f"http://{_LOOPBACK}:{http_port}/cache/clear" for http_port in http_ports] if tiers else []
        url = f"http://{_LOOPBACK}:{coordinator}" if tiers else ""

        def tidy() -> None:
            _free_shared_memory()
            for each in own:
                shutil.rmtree(each, ignore_errors=True)

        return Layout(pods, programs, services, caches, url, tidy)

    def _by_role(self, names: Sequence[str], model: Path) -> Layout:
        ports = iter(free_ports(3 * len(self.roles)))
        pods = [LaptopPod(name, next(ports), role) for name, role in zip(names, self.roles, strict=True)]

        def program(pod: LaptopPod, port: int) -> Program:
            return self._program(pod, port, model, _nixl(pod.role), _side_channel(next(ports)))

        return with_sidecars(pods, ports, program)

    def _program(
        self,
        pod: LaptopPod,
        port: int,
        model: Path,
        connector: Mapping[str, Any] | None,
        more: Mapping[str, str] = {},
    ) -> Program:
        command = [
            *(str(self.python), "-m", "vllm.entrypoints.openai.api_server"),
            *("--model", str(model), "--served-model-name", self.model),
            *("--host", _LOOPBACK, "--port", str(port), "--enforce-eager"),
            *("--max-model-len", str(self.context), "--block-size", str(self.block), "--dtype", number_format()),
            *("--prefix-caching-hash-algo", "sha256_cbor", "--enable-prompt-tokens-details"),
            *("--kv-events-config", json.dumps({**_EVENTS, "topic": f"kv@{pod.name}@{self.model}"})),
        ]
        if self.ranks > 1:
            command += ["--data-parallel-size", str(self.ranks)]
        if self.blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.blocks)]
        if connector is not None:
            command += ["--kv-transfer-config", json.dumps(connector)]
        environment = {
            **_QUIET,
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_HOST_IP": _LOOPBACK,  # also where the KV events' sockets listen
            "VLLM_SERVER_DEV_MODE": "1",  # for /reset_prefix_cache
            # The model runs in the engine's process. In one of its own both spin while they wait for the other, and a
            # second longer: two processors for each pod, of which one computes.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0" if self.ranks == 1 else "1",
            "PYTHONPATH": "",  # its packages are its own
            **more,
        }
        return Program(pod.name, [*command, *self.flags], f"{pod.url}/health", environment, children=True)

    def _coordinator(self, port: int) -> Program:
        command = [
            *(str(self.python.parent / "lmcache"), "coordinator", "--host", _LOOPBACK, "--port", str(port)),
            *("--chunk-size", str(self.block), "--hash-algorithm", "sha256_cbor"),
            *("--instance-timeout", "15", "--health-check-interval", "3"),
        ]
        return Program("coordinator", command, f"http://{_LOOPBACK}:{port}/healthz", _QUIET)

    def _node(
        self,
        pod: LaptopPod,
        port: int,
        http_port: int,
        coordinator: int,
        adapter: Mapping[str, Any] | None,
        l1_gigabytes: float,
    ) -> Program:
        command = [
            *(str(self.python.parent / "lmcache"), "server", "--instance-id", pod.node),
            *("--host", _LOOPBACK, "--port", str(port), "--http-host", _LOOPBACK, "--http-port", str(http_port)),
            *("--chunk-size", str(self.block), "--hash-algorithm", "sha256_cbor"),
            *("--l1-size-gb", str(l1_gigabytes), "--eviction-policy", "LRU"),
            *("--supported-transfer-mode", "auto", "--l2-prefetch-policy", "retain"),
            *("--coordinator-url", f"http://{_LOOPBACK}:{coordinator}", "--coordinator-advertise-ip", _LOOPBACK),
            "--coordinator-event-reporting",
        ]
        if adapter is not None:
            command += ["--l2-adapter", json.dumps({**adapter, "shared": True})]
        return Program(f"lmcache-{pod.name}", command, f"http://{_LOOPBACK}:{http_port}/healthcheck", _QUIET)


def _in_directory(path: Path) -> Mapping[str, Any]:
    """LMCache's adapter of an L2 in a directory."""
    adapter = {"type": "fs_native", "base_path": str(path), "num_workers": 2, "max_capacity_gb": L2_GIGABYTES}
    return {**adapter, "eviction": {"eviction_policy": "LRU"}}


def _in_redis(port: int) -> Mapping[str, Any]:
    """LMCache's adapter of an L2 in Redis; not `resp`, which does not connect again."""
    return {
        "type": "valkey",
        "startup_nodes": f"{_LOOPBACK}:{port}",
        "num_workers": REDIS_WORKERS,
        "request_timeout": REDIS_SECONDS,
    }


def _redis(port: int, gigabytes: float) -> Program:
    """A Redis that writes nothing to disk; what was not used for longest goes first. EngineError if there is none."""
    if shutil.which("redis-server") is None:
        raise EngineError("redis-server was not found: install it (Debian and Ubuntu: apt-get install redis-server)")
    command = [
        *("redis-server", "--bind", _LOOPBACK, "--port", str(port), "--save", "", "--appendonly", "no"),
        *("--maxmemory", f"{round(1024 * gigabytes)}mb", "--maxmemory-policy", "allkeys-lru"),
    ]
    return Program("redis", command, f"tcp://{_LOOPBACK}:{port}")


def _lmcache(port: int) -> Mapping[str, Any]:
    """vLLM's side of LMCache. `lmcache_driven`: only then are L1's blocks announced with their tokens."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "lmcache.mp.host": f"tcp://{_LOOPBACK}",
            "lmcache.mp.port": port,
            "lmcache.mp.mp_transfer_mode": "lmcache_driven",
            "lmcache.mp.hash_algorithm": "sha256_cbor",
            "lmcache.mp.heartbeat_interval": 3,
        },
    }


def _nixl(role: str) -> Mapping[str, Any]:
    """vLLM's connector between engines. `recompute`: where a prefiller is gone before its KV was fetched, the prompt is
    computed by the engine that decodes, which answers with an error else."""
    return {
        "kv_connector": "NixlConnector",
        "kv_role": {"prefill": "kv_producer", "decode": "kv_consumer"}.get(role, "kv_both"),
        "kv_buffer_device": "cpu",
        "kv_load_failure_policy": "recompute",
    }


def _side_channel(port: int) -> Mapping[str, str]:
    """Where an engine tells others how its memory is reached, and what they reach it by."""
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": _LOOPBACK,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_TLS": "tcp,sm,self",
        "UCX_NET_DEVICES": "lo",
    }


def knowing_tiers(config: str, layout: Layout) -> str:
    """An EndpointPickerConfig whose precise producer, if it has one, knows `layout`'s LMCache, if there is one.

    Raises ConfigError for what is no such configuration.
    """
    parse(config)
    content = read(config)
    for plugin in content["plugins"]:
        if layout.coordinator and plugin.get("type") == "precise-prefix-cache-producer":
            lmcache = {"coordinator": layout.coordinator, "hashAlgorithm": "sha256_cbor"}
            plugin["parameters"] = {"lmcache": lmcache, **(plugin.get("parameters") or {})}
            return str(yaml.safe_dump(content, sort_keys=False))
    return config


def engine_python() -> Path:
    """The Python that has vLLM: ours, or the one of `hack/install engine`. EngineError if neither is there."""
    if find_spec("vllm") is not None:
        return Path(sys.executable)
    if (ENGINE_PYTHON.parents[1] / "installed").is_file():
        return ENGINE_PYTHON
    raise EngineError(
        "vLLM is not installed: run `hack/install engine` in a checkout (Linux on x86-64, no GPU needed), or "
        "install the extra, pip install 'warmpath[vllm]'"
    )


def number_format(cpu: Path = Path("/proc/cpuinfo")) -> str:
    """vLLM's `--dtype` for this machine: `float32` where its 16 bits are slower, else `auto`, what the model is in.

    Without AVX-512 PyTorch multiplies bfloat16 one by one: a prompt takes four to six times as long (vLLM 0.32, on a
    processor with AVX2).
    """
    try:
        lines = cpu.read_text(encoding="utf-8").splitlines()
    except OSError:
        return "auto"
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return "float32" if "avx2" in flags and "avx512f" not in flags else "auto"


def has_lmcache(python: Path) -> bool:
    return (python.parent / "lmcache").is_file()


def has_nixl(python: Path) -> bool:
    found = "import importlib.util, sys; sys.exit(importlib.util.find_spec('nixl') is None)"
    return subprocess.run([str(python), "-c", found], env={**os.environ, "PYTHONPATH": ""}).returncode == 0


def _free_shared_memory(directory: Path = Path("/dev/shm")) -> None:
    """LMCache's connector puts vLLM's KV memory there, under its worker's process id, and leaves it when that ends."""
    for file in directory.glob("lmcache_kv_*"):
        pid = file.name.split("_")[2]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            with suppress(OSError):
                file.unlink()


def made_model(python: Path, size: str) -> Path:
    """The directory of the model of that size, made by the engine's Python if it is not there."""
    if size not in SIZES:
        raise EngineError(f"no model {size!r}; there are {', '.join(SIZES)}")
    directory = cached_model(size)
    if not (directory / "config.json").is_file():
        environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
        command = [str(python), "-m", "tooling.laptop.models", size, str(directory)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise EngineError(
                f"the model could not be made: {(done.stderr.strip() or 'it said nothing').splitlines()[-1]}"
            )
    return directory
