"""`p2p-source-producer`: from whose KV cache the endpoint that computes a prompt can take what it does not hold."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import xxhash

from epp.plugin import NO_HEADERS, Endpoint, ReadsPrefixMatch, Request

_HEADER: Final = "x-kv-cache-source-host-port"
_WHOLE: Final = 2.0**64


@dataclass(eq=False)
class P2pSource(ReadsPrefixMatch):
    """`p2p-source-producer`: names one of those that hold most of the prompt, in a header for llm-d's sidecar.

    Of the endpoints within one block of the most, each with a chance of 1 / (1 + requests that wait there); the same
    for the same request id. Parameters:
      min_cached_token_delta           1; tokens more than the endpoint itself holds
      prefix_match_info_producer_name  see `ReadsPrefixMatch`
      prefill_profile_name             without effect: it is known who computes the prompt
    Needs engines with vLLM's OffloadingConnector and its p2p tier, and llm-d's sidecar with `--kv-connector=offloading`
    or `--enable-p2p-pull`. Source: llm-d-router.
    """

    min_cached_token_delta: int = 1
    prefill_profile_name: str = ""

    def __post_init__(self) -> None:
        if self.min_cached_token_delta < 1:
            raise ValueError(f"minCachedTokenDelta: expected 1 or more, got {self.min_cached_token_delta}")

    def request_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        matches = self.matches(request)
        own = matches.get(endpoint)
        others = [(other, match) for other, match in matches.items() if other is not endpoint and match.tokens]
        if own is None or not others:
            return NO_HEADERS
        best = max((match for _, match in others), key=lambda match: match.tokens)
        if best.tokens - own.tokens < self.min_cached_token_delta:
            return NO_HEADERS
        block = best.tokens / best.blocks if best.blocks else 0.0
        sources = [
            other
            for other, match in others
            if match.tokens >= best.tokens - block and match.tokens - own.tokens >= self.min_cached_token_delta
        ]
        weights = [1.0 / (1 + source.load.waiting) for source in sources]
        place = xxhash.xxh3_64_intdigest(request.id.encode("utf-8", "replace")) / _WHOLE * sum(weights)
        for source, weight in zip(sources, weights, strict=True):
            place -= weight
            if place < 0:
                return {_HEADER: source.address}
        return {_HEADER: sources[-1].address}
