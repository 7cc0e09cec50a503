"""Token ids as LMCache names them: a hash for each full chunk, over it and all before it. Pure.

LMCache hashes as vLLM does if configured to (`--hash-algorithm sha256_cbor`), else with BLAKE3
(`lmcache/v1/multiprocess/token_hasher.py`, 0.5.6). Names are distinguished by their low 64 bits, as vLLM's events do.
The cache salt is no part of a chunk's hash there, but stands beside it; `salted` makes one name of both.
"""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from functools import lru_cache
from sys import byteorder
from typing import Final, Literal

import blake3
import cbor2
from xxhash import xxh3_64_intdigest

from epp.parsing.request import short_salt

Algorithm = Literal["blake3", "sha256_cbor"]


def chunks_of(tokens: Sequence[int], size: int, algorithm: Algorithm) -> list[int]:
    """Names of the full chunks of `size` tokens, first chunk first. Some 3 us a chunk.

    Raises OverflowError or TypeError for what is no token id (0..2**32 - 1).
    """
    ids = tokens if isinstance(tokens, array) and tokens.typecode == "I" else array("I", tokens)
    first, name = _WAYS[algorithm]
    link, chain = first(), []
    for at in range(0, len(ids) - size + 1, size):
        link = name(link, ids[at : at + size])
        chain.append(low(link))
    return chain


def low(name: bytes) -> int:
    """The 64 bits by which a name is known here."""
    return int.from_bytes(name[-8:], "big")


def salted(name: int, salt: str) -> int:
    """The name of the same chunk under a cache salt, which may be shortened."""
    return xxh3_64_intdigest(short_salt(salt).encode("utf-8", "surrogatepass"), name) if salt else name


@lru_cache(1)
def _sha256_first() -> bytes:
    # vLLM's NONE_HASH where PYTHONHASHSEED is not set; LMCache takes it from vLLM.
    return hashlib.sha256(cbor2.dumps("vllm-none-hash", canonical=True)).digest()


def _sha256_name(before: bytes, ids: "array[int]") -> bytes:
    return hashlib.sha256(cbor2.dumps((before, tuple(ids), None), canonical=True)).digest()


@lru_cache(1)
def _blake3_first() -> bytes:
    return blake3.blake3(bytes(8) + bytes(4)).digest()


def _blake3_name(before: bytes, ids: "array[int]") -> bytes:
    if byteorder == "little":
        ids.byteswap()  # a copy: used here only
    return blake3.blake3(before + ids.tobytes()).digest()


_WAYS: Final[dict[Algorithm, tuple[Callable[[], bytes], Callable[[bytes, "array[int]"], bytes]]]] = {
    "blake3": (_blake3_first, _blake3_name),
    "sha256_cbor": (_sha256_first, _sha256_name),
}
