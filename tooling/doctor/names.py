"""Under which names an LMCache server reports to the coordinator what it holds: those by which the picker looks for it?

LMCache 0.5.6 hashes a prompt's tokens in the server. `sha256_cbor` it takes from vLLM, with the seed of its own
environment's PYTHONHASHSEED; where vLLM cannot be imported it takes Python's own hash, and says so in its log alone.
"""

import asyncio
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from epp.prefix.lmcache.chunk_keys import Algorithm, chunks_of, low
from tooling.doctor.finding import Finding, problem
from tooling.doctor.http import HttpClient, Trouble

_NEWEST: Final = 200
"""Chunks of a server that are looked at: those that the coordinator was told of last."""
_EVERY: Final = 0.5
"""Seconds between two looks: servers report once a second."""
_SEED: Final = (
    "start `lmcache server` without PYTHONHASHSEED and where vLLM can be imported, else it takes Python's own hash; "
    "or --hash-algorithm blake3 at every LMCache server and in the picker's lmcache.hashAlgorithm"
)


class Chunk(NamedTuple):
    """The first chunk of a prompt, as the coordinator has it."""

    tokens: Sequence[int]
    name: int
    """The low 64 bits of its hash."""


def findings_of_chunk(server: str, algorithm: str, chunk: Chunk) -> list[Finding]:
    """What a chunk's name says. Pure. `algorithm`: the server's `--hash-algorithm`."""
    names = {each: chunks_of(chunk.tokens, len(chunk.tokens), each)[0] for each in get_args(Algorithm)}
    if names.get(algorithm) == chunk.name:
        return []
    found = f"its chunks have other names than {algorithm} gives them: the picker does not find them in L1 or L2"
    return [problem(server, "lmcache-names", found, _SEED)]


async def examine_names(
    server: str, coordinator: str, instance: str, ask: HttpClient, firsts: Collection[Sequence[int]], seconds: float
) -> list[Finding]:
    """Whether a server's chunks have the names that its algorithm gives them.

    `instance`: what the coordinator calls it. `firsts`: beginnings of prompts that engines were just sent; where none
    of them comes to the coordinator within `seconds`, nothing is said.
    """
    try:
        algorithm: str = (await ask.json(f"{server}/config"))["mp"]["hash_algorithm"]
        if algorithm not in get_args(Algorithm) or not firsts:
            return []
        async with asyncio.timeout(seconds):
            while (chunk := await _first(coordinator, instance, ask, firsts)) is None:
                await asyncio.sleep(_EVERY)
        return findings_of_chunk(server, algorithm, chunk)
    except (Trouble, TimeoutError, ValueError, TypeError, LookupError, AttributeError, OverflowError):
        return []  # what does not answer, or answers nonsense, is reported elsewhere


async def _first(coordinator: str, instance: str, ask: HttpClient, firsts: Collection[Sequence[int]]) -> Chunk | None:
    """A chunk in the server's L1 with which one of those prompts begins."""
    keys = f"{coordinator}/directory/keys?tier=l1&instance_id={instance}"
    total = (await ask.json(f"{keys}&limit=1"))["total"]
    page = await ask.json(f"{keys}&offset={max(0, total - _NEWEST)}&limit={_NEWEST}")
    known: Sequence[Mapping[str, Any]] = [row["key"] for row in page["keys"] if row.get("num_tokens")]
    if not known:
        return None
    for row in (await ask.json(f"{coordinator}/directory/lookup", {"keys": known}))["results"]:
        tokens = row["token_ids"]
        if any(_begins(tokens, first) for first in firsts):
            return Chunk(tokens, low(bytes.fromhex(row["key"]["chunk_hash_hex"])))
    return None


def _begins(tokens: Sequence[int], first: Sequence[int]) -> bool:
    length = min(len(tokens), len(first))
    return length > 0 and list(tokens[:length]) == list(first[:length])
