"""`Endpoint`: one model server address, and `Load`: what its metrics said last."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec


class Load(msgspec.Struct, frozen=True):
    """One scrape of an endpoint's metrics. Zero where the engine does not report a figure.

    Names and meanings are vLLM's (0.32, `GET /metrics`); other engines are mapped onto them by `pool.scrape`.
    """

    waiting: int = 0
    """Requests queued in the engine (`vllm:num_requests_waiting`)."""
    running: int = 0
    """Requests in the running batch (`vllm:num_requests_running`)."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0..1 (`vllm:kv_cache_usage_perc`)."""
    block_size: int = 0
    """Tokens per KV block (`vllm:cache_config_info`)."""
    blocks: int = 0
    """KV blocks on the device (`vllm:cache_config_info` num_gpu_blocks)."""
    lora_running: frozenset[str] = frozenset()
    lora_waiting: frozenset[str] = frozenset()
    lora_max: int = 0
    """Adapter slots (`vllm:lora_requests_info` max_lora)."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache since the engine started (`vllm:prefix_cache_queries_total`)."""
    prefix_hits: int = 0
    """Tokens of those found (`vllm:prefix_cache_hits_total`)."""
    prompt_tokens: int = 0
    """Prompt tokens processed since start (`vllm:prompt_tokens_total`)."""
    at: float | None = None
    """When it was scraped, seconds on the monotonic clock; None = never."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Endpoint:
    """One model server address. Identity is the object: it lives as long as the server does.

    `load` is replaced, never edited, by each scrape; so state that plugins key by endpoint outlives scrapes, and a
    pod that comes back under the same address is a new endpoint with nothing remembered about it.
    """

    name: str
    """Unique in its pool: `namespace/pod`, with `-rank-N` where a pod has several ports."""
    address: str
    """`ip:port`, IPv6 in brackets: exactly what Envoy gets."""
    labels: Mapping[str, str] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    node: str = ""
    """The machine it runs on, by its name; "" where it is unknown. Endpoints of a node share the node's KV memory."""

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"
