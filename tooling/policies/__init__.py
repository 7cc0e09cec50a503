"""Other projects' picking policies as plugins, to compare with: `type: tooling.policies.DynamoKv` in a configuration.

Each is written anew from its published formula and defaults, and lives on `epp.plugin` alone like a user's plugin.
None is loaded unless a configuration names it. The configurations beside this file name them all, and those of llm-d
that are made of built-in plugins. Where a project indexes prompts its own way (characters, its own eviction), so does
the plugin here; where it reads the engines' KV events, it gets the best that is known here, `PrefixMatch`.
"""

from tooling.policies.by_cost import DynamoKv, Lmetric
from tooling.policies.by_hash import KubeAiPrefixHash, SessionHash
from tooling.policies.by_prefix import (
    AibrixPrefixCache,
    ProductionStackLoadAware,
    ProductionStackPrefixAware,
    SglangCacheAware,
)

__all__ = [
    "AibrixPrefixCache",
    "DynamoKv",
    "KubeAiPrefixHash",
    "Lmetric",
    "ProductionStackLoadAware",
    "ProductionStackPrefixAware",
    "SessionHash",
    "SglangCacheAware",
]
