"""An LMCache server and its coordinator, by `/config`, `/status`, `/metrics` and `/instances` of LMCache 0.5.6."""

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple, get_args

from epp.prefix.lmcache.chunk_keys import Algorithm
from tooling.doctor.engine import ProbedEndpoint
from tooling.doctor.finding import Finding, hint, problem
from tooling.doctor.http import HttpClient, Trouble
from tooling.doctor.names import examine_names

_TRIES: Final = 20
"""Looks at a server, a tenth of a second apart, until what was begun with L2 has ended."""


class Stores(NamedTuple):
    """What a server did with L2 since it began.

    Of its writes the requests and chunks begun, the requests that ended and the chunks that arrived; and prompts that
    it looked up.
    """

    begun: int = 0
    chunks: int = 0
    ended: int = 0
    arrived: int = 0
    lookups: int = 0


def _counter(name: bytes) -> re.Pattern[bytes]:
    return re.compile(rb"^lmcache_mp_l2_%b_total\{?[^\n]* ([0-9.e+]+)$" % name, re.MULTILINE)


_STORES: Final = {
    "begun": _counter(b"store_submitted_requests"),
    "chunks": _counter(b"store_submitted_objects_chunks"),
    "ended": _counter(b"store_completed_requests"),
    "arrived": _counter(b"store_completed_objects_chunks"),
    "lookups": _counter(b"prefetch_lookup_requests"),
}


def stores(page: bytes) -> Stores:
    """From a page of `/metrics`; all adapters together."""
    return Stores(**{name: round(sum(map(float, form.findall(page)))) for name, form in _STORES.items()})


async def stores_of(url: str, ask: HttpClient) -> Stores | None:
    """The server's stores now, or None if it does not say."""
    try:
        return stores(await ask.bytes(f"{url}/metrics"))
    except (Trouble, ValueError):
        return None


async def examine_server(
    url: str, ask: HttpClient, pods: Sequence[ProbedEndpoint], before: Stores | None
) -> list[Finding]:
    """What is wrong with one server. `before`: its stores before the pods were sent something new."""
    try:
        config = await ask.json(f"{url}/config")
        status, after = await _settled(url, ask)
    except Trouble as trouble:
        fix = "lmcache server --http-host HOST --http-port PORT; give that port here"
        return [problem(url, "lmcache-unreachable", str(trouble), fix)]
    return [*findings_of(url, config, status, pods), *stuck(url, before, after), *held_up(url, status, after)]


async def _settled(url: str, ask: HttpClient) -> tuple[Mapping[str, Any], Stores | None]:
    """Its state and its stores, when what was begun has ended or had the time to."""
    for _ in range(_TRIES):
        status, found = await ask.json(f"{url}/status"), await stores_of(url, ask)
        if found is None or (found.ended >= found.begun and not held_up(url, status, found)):
            break
        await asyncio.sleep(0.1)
    return status, found


def findings_of(
    url: str, config: Mapping[str, Any], status: Mapping[str, Any], pods: Sequence[ProbedEndpoint]
) -> list[Finding]:
    """What its configuration and state say. Pure."""
    return [
        *_engines(url, status),
        *_chunk(url, config, status, pods),
        *_hashes(url, config, pods),
        *_l2(url, config),
        *_reports(url, config),
    ]


def _engines(url: str, status: Mapping[str, Any]) -> list[Finding]:
    if driving := status.get("registered_non_cuda_instance_ids"):
        found = f"{len(driving)} of its engines send it their memory (engine_driven): which tokens a chunk is, is lost"
        fix = 'in vLLM\'s --kv-transfer-config: "lmcache.mp.mp_transfer_mode": "lmcache_driven"'
        return [problem(url, "lmcache-transfer", found, fix)]
    if not status.get("registered_gpu_ids"):
        fix = "vLLM's --kv-transfer-config with LMCacheMPConnector, lmcache.mp.host and lmcache.mp.port of this server"
        return [hint(url, "lmcache-engines", "no engine is registered with it", fix)]
    return []


def _chunk(
    url: str, config: Mapping[str, Any], status: Mapping[str, Any], pods: Sequence[ProbedEndpoint]
) -> list[Finding]:
    chunk = _at(config, "mp", "chunk_size")
    blocks = _blocks(status) or {pod.block_size for pod in pods if pod.block_size}
    if not isinstance(chunk, int) or not blocks or blocks == {chunk}:
        return []
    found = f"its chunk is {chunk} tokens, the engines' block {', '.join(map(str, sorted(blocks)))}"
    fix = f"lmcache server --chunk-size {min(blocks)}"
    if any(chunk % block for block in blocks):
        return [
            problem(
                url, "lmcache-chunk", f"{found}: not a multiple, so chunks cannot be distinguished from blocks", fix
            )
        ]
    return [problem(url, "lmcache-chunk", f"{found}: a chunk and a block never have the same hash", fix)]


def _blocks(status: Mapping[str, Any]) -> set[int]:
    """Block sizes of the engines that are registered."""
    metas = status.get("cache_context_meta")
    sizes = set()
    for meta in metas.values() if isinstance(metas, dict) else ():
        for group in _at(meta, "kv_cache_layout", "kernel_groups") or ():
            if isinstance(size := _at(group, "tokens_per_block"), int):
                sizes.add(size)
    return sizes


def _hashes(url: str, config: Mapping[str, Any], pods: Sequence[ProbedEndpoint]) -> list[Finding]:
    own, theirs = _at(config, "mp", "hash_algorithm"), {pod.algorithm for pod in pods if pod.algorithm}
    if own is not None and own not in get_args(Algorithm):
        found = f"it hashes with {own}, by which the picker finds nothing"
        return [problem(url, "lmcache-hash", found, f"--hash-algorithm {' or '.join(get_args(Algorithm))}")]
    if not theirs or theirs == {own}:
        return []
    found = f"it hashes with {own}, the engines with {', '.join(sorted(theirs))}: two names for every block"
    fix = (
        "--hash-algorithm sha256_cbor here, --prefix-caching-hash-algo sha256_cbor and lmcache.mp.hash_algorithm there"
    )
    return [hint(url, "lmcache-hash", found, fix)]


def _l2(url: str, config: Mapping[str, Any]) -> list[Finding]:
    adapters = _at(config, "storage_manager", "l2_adapter_config", "adapters") or ()
    if not adapters:
        fix = '--l2-adapter \'{"type": "fs_native", "base_path": DIRECTORY, "shared": true}\''
        return [hint(url, "l2-shared", "it has no L2: what its node forgets is computed again", fix)]
    own = [each for each in adapters if isinstance(each, dict) and not each.get("shared")]
    if own:
        found = f"{len(own)} of {len(adapters)} L2 adapters are its own: other nodes do not find what it stores"
        return [problem(url, "l2-shared", found, 'in --l2-adapter: "shared": true')]
    return []


def _reports(url: str, config: Mapping[str, Any]) -> list[Finding]:
    said = config.get("coordinator")
    where = _at(said, "url") if isinstance(said, dict) else None
    if not where:
        fix = "--coordinator-url URL --coordinator-event-reporting"
        return [hint(url, "coordinator-unset", "it reports to no coordinator: its L1 and L2 are not seen", fix)]
    if not _at(said, "event_reporting"):
        found = f"it is registered at {where} and does not report to it what it holds"
        return [problem(url, "coordinator-unset", found, "--coordinator-event-reporting")]
    return []


def stuck(url: str, before: Stores | None, after: Stores | None) -> list[Finding]:
    """Chunks that were handed to L2 and did not arrive. Pure.

    LMCache's adapters for Redis (`resp`) and S3 do not connect again after those were away: every store fails from then
    on, and the server calls itself healthy.
    """
    if before is None or after is None or after.ended < after.begun:
        return []
    chunks, arrived = after.chunks - before.chunks, after.arrived - before.arrived
    if chunks > 0 and arrived <= 0:
        found = f"of {chunks} new chunks none arrived in its L2, and it calls itself healthy: was Redis away?"
        return [problem(url, "l2-stuck", found, "start this LMCache server again: its Redis client does not reconnect")]
    if after.arrived < after.chunks and chunks <= 0:
        found = f"{after.chunks - after.arrived} of {after.chunks} chunks never arrived in its L2"
        return [hint(url, "l2-stuck", found, "name its pods with --endpoint too, to see whether it still loses them")]
    return []


def held_up(url: str, status: Mapping[str, Any], after: Stores | None) -> list[Finding]:
    """Prompts that wait for an L2 which never answered one. Pure.

    LMCache's Redis adapter connects once, when its server starts; where nobody was there then, what is handed to it
    neither ends nor fails, and the engine waits with the prompt.
    """
    waiting = _at(status, "storage_manager", "prefetch_controller", "lookup_phase_count")
    if after is None or not after.lookups or not isinstance(waiting, int) or waiting < after.lookups:
        return []
    found = f"none of the {after.lookups} prompts that it looked up in L2 came back: was Redis there when it began?"
    return [problem(url, "l2-stuck", found, "start this LMCache server again while its Redis answers")]


async def examine_coordinator(
    url: str, ask: HttpClient, servers: Sequence[str], pods: Sequence[ProbedEndpoint], event_timeout: float
) -> list[Finding]:
    """What is wrong with the coordinator, and with what is reported to it. `servers`: URLs of LMCache servers it should
    know.

    `pods` were sent something new. `event_timeout`: seconds until the coordinator knows of it.
    """
    try:
        await ask.json(f"{url}/healthz")
        listed = (await ask.json(f"{url}/instances")).get("instances") or ()
    except Trouble as trouble:
        return [problem(url, "coordinator-unreachable", str(trouble), "lmcache coordinator --host HOST --port PORT")]
    known = {
        f"http://{each.get('ip')}:{each.get('http_port')}": str(each.get("instance_id"))
        for each in listed
        if isinstance(each, dict)
    }
    findings = []
    for server in servers:
        if server not in known:
            found = f"it does not know the LMCache server {server}, only {', '.join(sorted(known)) or 'none'}"
            fix = f"there: --coordinator-url {url} --coordinator-advertise-ip IP"
            findings.append(problem(url, "coordinator-unreachable", found, fix))
    firsts = {tokens for pod in pods for tokens in pod.hashes}
    looks = (examine_names(each, url, known[each], ask, firsts, event_timeout) for each in servers if each in known)
    return findings + [finding for found in await asyncio.gather(*looks) for finding in found]


def _at(value: Any, *keys: str) -> Any:
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value
