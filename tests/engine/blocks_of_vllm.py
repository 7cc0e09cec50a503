"""Runs under the engines' Python: gives random requests to vLLM's own `KVCacheManager` and prints what became of them.

Reads JSON from standard input: lists of a number of blocks, their size, and events of
`tests.support.engines.block_requests`, whose `outcomes` it prints. Needs no GPU and no model: block accounts are plain
Python in vLLM.
"""

import json
import sys
from collections.abc import Sequence

import torch
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from tests.support.engines.block_requests import outcomes


class VllmPool:
    """vLLM's blocks, named from 0 on: its own first one is the null block, which no request gets."""

    def __init__(self, count: int, size: int) -> None:
        spec = FullAttentionSpec(block_size=size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=count + 1, kv_cache_tensors=[], kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)]
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(size, sha256)
        self.manager = KVCacheManager(config, max_model_len=1 << 20, scheduler_block_size=size, hash_block_size=size)
        self.live: dict[int, Request] = {}

    def request(self, name: str, tokens: Sequence[int]) -> Request:
        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            sampling_params=SamplingParams(max_tokens=1 << 16),
            pooling_params=None,
            block_hasher=self.hasher,
        )

    def blocks_of(self, request: int) -> list[int]:
        (group,) = self.manager.get_block_ids(str(request))
        return [block - 1 for block in group]

    def start(self, request: int, tokens: Sequence[int]) -> list[int]:
        made = self.request(str(request), tokens)
        found, computed, _ = self.manager.get_computed_blocks(made)
        if self.manager.allocate_slots(made, len(tokens) - computed, computed, found) is None:
            return []
        made.num_computed_tokens = len(tokens)
        self.live[request] = made
        return self.blocks_of(request)

    def grow(self, request: int, tokens: Sequence[int]) -> list[int]:
        if request not in self.live:
            return []
        made = self.live[request]
        for token in tokens:
            made.append_output_token_ids(token)
            if self.manager.allocate_slots(made, 1) is None:
                break
            made.num_computed_tokens += 1
        return self.blocks_of(request)

    def end(self, request: int) -> None:
        if request in self.live:
            self.manager.free(self.live.pop(request))

    def cached(self, tokens: Sequence[int]) -> list[int]:
        found, _, _ = self.manager.get_computed_blocks(self.request("look", [*tokens, 0]))
        return [block.block_id - 1 for block in found.blocks[0]]

    def drain(self) -> list[int]:
        pool = self.manager.block_pool
        return [block.block_id - 1 for block in pool.get_new_blocks(pool.get_num_free_blocks())]


if __name__ == "__main__":
    asked = json.load(sys.stdin)
    print(json.dumps([list(outcomes(events, VllmPool(count, size))) for count, size, events in asked]))
