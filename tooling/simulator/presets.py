"""Pods by name: how fast and how large a model is on a GPU, worked out from published figures; or pods from a file.

A roofline, not a measurement: what a step reads and computes, divided by what the hardware can, times a share that
kernels reach. The shares are those that make Llama 8B on one H100 come out at its published speeds (see `H100_8B`).
Trust ratios between pods more than seconds. A file has what was measured of a real engine (`hack/bench calibrate`).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path
from typing import Final

from epp.documents.files import content_of
from epp.documents.strict import MAX_BYTES, decode, nearest, read, short
from epp.errors import ConfigError, ConfigErrors
from tooling.simulator.engine import H100_8B, LAPTOP, EngineParameters
from tooling.simulator.tiers import CHUNK, L1_SPEED, L2_SPEED, Lower, Tier, TierParameters

_GIB: Final = 1 << 30
_SUFFIXES: Final = (".yaml", ".yml", ".json")
_BYTES: Final = 2
"""Of a bf16 number."""
_READING: Final = 0.75
"""Share of the memory's bandwidth at which weights are read."""
_CONTEXT: Final = 0.8
"""The same for KV blocks, which are read in larger pieces."""
_PRODUCTS: Final = 0.36
"""Share of the peak that prefill's matrix products reach: 22,000 tokens/s for 8B on an H100."""
_ATTENTION: Final = 0.354
"""Share of the peak that attention kernels reach: 350 of 989 TFLOP/s (FlashAttention-2 on an H100)."""
_USABLE: Final = 0.9
"""vLLM's `--gpu-memory-utilization`."""
_WORKSPACE: Final = 0.06
"""Of the memory, for activations and CUDA graphs."""
_ALL_REDUCE: Final = 10e-6
"""Seconds of a small all-reduce over NVLink; two a layer."""
_SPLIT: Final = 0.8
"""What is left of prefill's speed per GPU where a model is split over several."""


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet: dense bf16 FLOP/s, bytes/s, GiB; dollars an hour in a cloud; vLLM's default budget."""

    flops: float
    bandwidth: float
    memory: float
    price: float
    max_batched_tokens: int = 8192


@dataclass(frozen=True)
class Model:
    """A model by its `config.json`: parameters, layers, width of all query heads together, KV heads of 128 numbers."""

    parameters: float
    layers: int
    width: int
    kv_heads: int = 8


@dataclass(frozen=True)
class PodKind:
    """Hardware and model of a pod."""

    name: str
    parameters: EngineParameters
    price: float
    """Dollars an hour."""
    l1: TierParameters | None = None
    """Memory of its node for KV, which all pods of a node share; None = it has none."""
    l2_speed: float | None = None
    """Tokens a second that it loads from the pool's shared storage; None = as that says of itself."""


@dataclass(frozen=True, kw_only=True)
class _L2:
    """How a pod reaches the shared storage."""

    speed: float | None = None
    """Tokens a second."""

    def __post_init__(self) -> None:
        if self.speed is not None and not 0 < self.speed < inf:
            raise ValueError(f"speed: {self.speed}, expected more than 0")


@dataclass(frozen=True, kw_only=True)
class _PodFile:
    """What a file of a pod kind has: `price`, dollars an hour, the engine's `parameters` in camelCase, lower tiers."""

    price: float = 1.0
    parameters: EngineParameters
    l1: TierParameters | None = None
    l2: _L2 = field(default_factory=_L2)

    def __post_init__(self) -> None:
        if self.price < 0:
            raise ValueError(f"price: {self.price}, expected 0 or more")


GPUS: Final[Mapping[str, Gpu]] = {
    "h100": Gpu(989e12, 3.35e12, 80, 55.04 / 8),
    "h200": Gpu(989e12, 4.8e12, 141e9 / _GIB, 63.30 / 8),
    "a100": Gpu(312e12, 2.04e12, 80, 27.45 / 8, 2048),
    "l4": Gpu(121e12, 0.3e12, 24, 0.80, 2048),
}
"""NVIDIA's data sheets of H100 SXM, H200 SXM, A100 SXM 80 GB and L4 (figures without sparsity). Prices are AWS's list
prices on demand in us-east-1 (late 2025) for p5, p5en, p4de and g6.xlarge, divided by the GPUs of the machine. Budgets
are vLLM's defaults for its API server: 8192 tokens on Hopper, 2048 elsewhere."""

MODELS: Final[Mapping[str, Model]] = {
    "8b": Model(8.03e9, 32, 4096),
    "32b": Model(32.5e9, 64, 5120),
    "70b": Model(70.6e9, 80, 8192),
}
"""Llama 3.1 8B, Qwen 2.5 32B, Llama 3.1 70B: their `config.json` and model cards."""

A100_GPT_OSS_120B: Final = EngineParameters(
    blocks=7600,
    max_batched_tokens=2048,
    base=8e-3,
    per_decode=70e-6,
    per_context_token=22e-9,
    linear=65e-6,
    attention=1e-9,
)
"""gpt-oss-120b (MXFP4) on one A100 80 GB, so that two of them show about what llm-d-batch-gateway #491 measured with
prompts of 512 and answers of 128 tokens: at 25 requests a second TTFT p50 63 ms, p95 125 ms and 18 ms a token, at 30 a
second 71, 131 and 20 ms, and 32 a second at most. Of the memory 9 GB are left beside the weights."""

_BUILT: Final = (
    ("h200", 1, "8b"), ("a100", 1, "8b"), ("l4", 1, "8b"),
    ("h100", 2, "32b"), ("h200", 1, "32b"), ("a100", 2, "32b"),
    ("h100", 8, "70b"), ("h100", 4, "70b"), ("h200", 2, "70b"), ("a100", 4, "70b"),
)  # fmt: skip


def derived(gpu: Gpu, count: int, model: Model) -> EngineParameters:
    """Speed and size of `model` on `count` GPUs, split by tensor parallelism. ValueError if it does not fit."""
    weights = model.parameters * _BYTES
    kv = model.layers * 2 * model.kv_heads * 128 * _BYTES
    split = _SPLIT if count > 1 else 1.0
    room = count * gpu.memory * _GIB * (_USABLE - _WORKSPACE) - weights
    if room <= 0:
        raise ValueError(f"{weights / 1e9:.0f} GB of weights do not fit on {count} GPUs of {gpu.memory:.0f} GiB")
    return EngineParameters(
        blocks=int(room / kv / 16),
        max_batched_tokens=gpu.max_batched_tokens,
        base=weights / (count * gpu.bandwidth * _READING) + (2 * model.layers * _ALL_REDUCE if count > 1 else 0.0),
        per_decode=2 * model.parameters / (count * gpu.flops),
        per_context_token=kv / (count * gpu.bandwidth * _CONTEXT),
        linear=2 * model.parameters / (count * gpu.flops * _PRODUCTS * split),
        attention=4 * model.width * model.layers / (count * gpu.flops * _ATTENTION * split),
    )


_MOST_PODS: Final = 512
_ROLES: Final = {"p": "prefill", "d": "decode", "b": "both"}


def _presets() -> dict[str, PodKind]:
    kinds = {
        "h100-8b": PodKind("h100-8b", H100_8B, GPUS["h100"].price),
        "laptop": PodKind("laptop", LAPTOP, 1.0),
        "a100-gpt-oss-120b": PodKind("a100-gpt-oss-120b", A100_GPT_OSS_120B, GPUS["a100"].price),
    }
    for gpu, count, model in _BUILT:
        name = f"{gpu}-{model}" if count == 1 else f"{count}x{gpu}-{model}"
        kinds[name] = PodKind(name, derived(GPUS[gpu], count, MODELS[model]), count * GPUS[gpu].price)
    return kinds


PRESETS: Final[Mapping[str, PodKind]] = _presets()
"""Name -> kind. `8xh100-70b` is Llama 70B on the eight H100 of one p5.48xlarge; `laptop` costs a dollar an hour."""


def preset(name: str) -> PodKind:
    """A kind by name or file, `@SPEED` behind it for one slower or faster: `h100-8b@0.5`. Raises ConfigError."""
    base, _, speed = name.partition("@")
    kind = PRESETS.get(base)
    if kind is None and Path(base).suffix in _SUFFIXES:
        kind = _from_file(Path(base))
    if kind is None:
        known = nearest(base, PRESETS) or "; expected a FILE.yaml or one of " + ", ".join(PRESETS)
        raise ConfigError("pods", f"no kind of pod is called {short(base)}{known}")
    if not speed:
        return kind
    try:
        factor = float(speed)
        slower = {
            field: getattr(kind.parameters, field) / factor
            for field in ("base", "per_decode", "per_context_token", "linear", "attention")
        }
        return replace(kind, name=f"{kind.name}@{speed}", parameters=replace(kind.parameters, **slower))
    except (ValueError, ZeroDivisionError):
        raise ConfigError("pods", f"expected a speed of more than 0 behind @, got {short(name)}") from None


def _from_file(path: Path) -> PodKind:
    try:
        found = decode(_PodFile, read(content_of(path, MAX_BYTES)), "")
    except ConfigErrors as several:
        raise ConfigErrors([ConfigError(_within(path, each), each.message) for each in several.errors]) from None
    except ConfigError as error:
        raise ConfigError(_within(path, error), error.message) from None
    return PodKind(path.stem, found.parameters, found.price, found.l1, found.l2.speed)


def _within(path: Path, error: ConfigError) -> str:
    return str(path) if error.path in ("", str(path)) else f"{path}: {error.path}"


def tier(text: str, flag: str, speed: float) -> TierParameters:
    """A tier from `TOKENS` or `TOKENS@SPEED`, as in 4000000@300000. Raises ConfigError."""
    size, at, speed_text = text.partition("@")
    try:
        return TierParameters(tokens=int(size), speed=float(speed_text) if at else speed)
    except ValueError as error:
        what = f": {error}" if "expected" in str(error) else ""
        raise ConfigError(
            flag, f"expected TOKENS or TOKENS@TOKENS_PER_SECOND, as in 4000000@300000, got {short(text)}{what}"
        ) from None


def with_l1(kinds: Sequence[PodKind], l1: TierParameters | None) -> list[PodKind]:
    """The pods, with this L1 where they do not say themselves what they have."""
    return [kind if kind.l1 is not None else replace(kind, l1=l1) for kind in kinds]


def lowers(kinds: Sequence[PodKind], l2: TierParameters | None, per_node: int) -> list[tuple[str, Lower | None]]:
    """Each pod's node and the tiers below it, all empty; ("", None) where there are none.

    Nodes have `per_node` pods each, in their order, and one L1; the L2 is everybody's. Raises ConfigError.
    """
    shared, l2_speed = (None, L2_SPEED) if l2 is None else (Tier(l2.tokens), l2.speed)
    found: list[tuple[str, Lower | None]] = []
    for start in range(0, len(kinds), per_node):
        mates = kinds[start : start + per_node]
        l1 = mates[0].l1
        if any(kind.l1 != l1 for kind in mates):
            names = ", ".join(dict.fromkeys(kind.name for kind in mates))
            raise ConfigError("pods-per-node", f"pods of a node share its l1; {names} do not say the same of it")
        memory = None if l1 is None else Tier(l1.tokens)
        for kind in mates:
            if memory is None and shared is None:
                found.append(("", None))
                continue
            if CHUNK % kind.parameters.block_size:
                raise ConfigError(
                    "pods",
                    f"{kind.name} has blocks of {kind.parameters.block_size} tokens; below it KV is kept in chunks of "
                    f"{CHUNK}, expected a divisor of that",
                )
            l1_speed = L1_SPEED if l1 is None else l1.speed
            found.append((f"node-{start // per_node + 1}", Lower(memory, shared, l1_speed, kind.l2_speed or l2_speed)))
    return found


def roles(text: str) -> tuple[str, ...]:
    """Labels of pods from `2p2d`: two that prefill, two that decode; `b` do both. Raises ConfigError."""
    parts = re.findall(r"(\d{1,3})([pdb])", text)
    labels = tuple(_ROLES[letter] for count, letter in parts for _ in range(int(count)))
    if "".join(count + letter for count, letter in parts) != text or not 0 < len(labels) <= _MOST_PODS:
        raise ConfigError(
            "roles", f"expected numbers of p (prefill), d (decode) and b (both), as 2p2d; got {short(text)}"
        )
    if not {"decode", "both"} & set(labels):
        raise ConfigError("roles", f"expected somebody to decode (d or b), got {short(text)}")
    return labels


def pods(text: str) -> list[PodKind]:
    """Kinds of pods from `8*h100-8b`, `6*h100-8b,2*h100-8b@0.5` or `2*my-pod.yaml`. Raises ConfigError."""
    kinds: list[PodKind] = []
    for part in text.split(","):
        count, star, name = part.strip().rpartition("*")
        if star and not (count.strip().isdigit() and 1 <= int(count) <= 512):
            raise ConfigError("pods", f"expected a number from 1 to 512 before *, got {short(part.strip())}")
        kinds += [preset(name.strip())] * (int(count) if star else 1)
    return kinds
