"""Token ids as a chain of 64-bit block hashes: the keys under which prompts and KV events meet.

A chain is made for one block size, the engine's own, so an engine's block is one link: where sizes differ, a prompt has
one chain for each. Each link covers its block and everything before it: `h = xxh3_64(ids, seed=h)`, ids packed in four
bytes each. What an engine mixes into a block's hash beside the tokens (multimodal items, the cache salt) is mixed in at
the same position; a LoRA adapter starts a chain of its own.
"""

from array import array
from collections.abc import Sequence
from typing import Any, Final

import msgspec
from xxhash import xxh3_64_intdigest

from epp.parsing.request import short_salt

WIDTH: Final = array("I").itemsize
"""Bytes of a packed token id: 4 wherever Python runs on a server."""
_pack: Final = msgspec.msgpack.Encoder().encode


def root_of(size: int, adapter: str, hash_seed: int = 0) -> int:
    """Where the chains of `size` tokens a block start; "" = no LoRA adapter. `hash_seed`: see `epp.plugin.Services`."""
    return xxh3_64_intdigest(adapter.encode("utf-8", "surrogatepass"), hash_seed ^ size)


def mixed(link: int, extras: Sequence[Any]) -> int:
    """A link whose block has `extras` (as KV events carry them, the adapter left out).

    Texts are shortened as a request's salt is, so that both meet, whichever side shortened it.
    """
    return xxh3_64_intdigest(_pack([short_salt(each) if isinstance(each, str) else each for each in extras]), link)


def chain_of_tokens(
    tokens: Sequence[int], size: int, adapter: str = "", salt: str = "", hash_seed: int = 0
) -> list[int]:
    """Links of the full blocks of `size` tokens, first block first. 0.15 us a block.

    Raises OverflowError or TypeError for what is no token id (0..2**32 - 1).
    """
    data = (tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)).tobytes()
    digest, step, link = xxh3_64_intdigest, WIDTH * size, root_of(size, adapter, hash_seed)
    chain = []
    for at in range(0, len(data) - step + 1, step):
        link = digest(data[at : at + step], link)
        if salt and not at:
            link = mixed(link, (salt,))
        chain.append(link)
    return chain
