"""Real SGLang on CPUs, as pods of a chain."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tooling.laptop.engines import SIDECAR, SOURCE, EngineError, LaptopPod, Layout, Program, made_model, with_sidecars
from tooling.laptop.models import cached_model
from tooling.laptop.ports import free_ports

PYTHON: Final = SOURCE / ".venv-sglang" / "bin" / "python"
"""Made by `hack/install sglang`."""
ON_CPU: Final = Path(__file__).parent / "on_cpu"


@dataclass(frozen=True)
class Sglang:
    """One that prefills, and publishes its KV events; those that decode, each behind a sidecar. KV comes by NIXL."""

    page: int = 32
    """Tokens of a page of its KV cache."""
    tokens: int = 8192
    """Of its KV cache."""
    roles: Sequence[str] = ("prefill", "decode")

    what = "SGLang pod"
    model = "tiny"
    ready_seconds = 600.0

    @property
    def picker_flags(self) -> Sequence[str]:
        return ("--tokenizer", f"{self.model}={cached_model(self.model)}")

    def lay_out(self, names: Sequence[str]) -> Layout:
        if not PYTHON.is_file():
            raise EngineError("SGLang is not installed: run `hack/install sglang`")
        model = made_model(PYTHON, self.model)
        ports = iter(free_ports(4 * len(self.roles) + 1))
        bootstrap = next(ports)
        pods = [
            LaptopPod(name, next(ports), role, engine="sglang") for name, role in zip(names, self.roles, strict=True)
        ]

        def program(pod: LaptopPod, port: int) -> Program:
            return self._program(pod, port, bootstrap, model, (next(ports), next(ports)))

        sidecar = (*SIDECAR, "--kv-connector", "sglang", "--sglang-bootstrap-port", str(bootstrap))
        return with_sidecars(pods, ports, program, sidecar)

    def _program(self, pod: LaptopPod, port: int, bootstrap: int, model: Path, publishing: tuple[int, int]) -> Program:
        events, replay = publishing
        command = [
            *(str(PYTHON), "-m", "sglang.launch_server", "--device", "cpu", "--host", "127.0.0.1"),
            *("--port", str(port), "--model-path", str(model), "--served-model-name", self.model),
            *("--page-size", str(self.page), "--max-total-tokens", str(self.tokens), "--dtype", "float32"),
            *("--attention-backend", "torch_native", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--disable-overlap-schedule", "--disable-cuda-graph", "--mem-fraction-static", "0.1"),
            *("--enable-metrics", "--enable-cache-report"),
            *("--disaggregation-mode", pod.role, "--disaggregation-transfer-backend", "nixl"),
            *("--disaggregation-bootstrap-port", str(bootstrap)),
        ]
        if pod.role == "prefill":
            told = {"publisher": "zmq", "endpoint": f"tcp://*:{events}", "replay_endpoint": f"tcp://*:{replay}"}
            command += ["--kv-events-config", json.dumps(told)]
        else:  # of its choice by default is memory that CUDA registers
            command += ["--disaggregation-decode-retraction-backup", "cpu_tensor"]
        environment = {
            "CUDA_VISIBLE_DEVICES": "",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ON_CPU),
            "UCX_TLS": "tcp,sm,self",
            "UCX_NET_DEVICES": "lo",
        }
        return Program(pod.name, command, f"http://127.0.0.1:{port}/health", environment, children=True)
