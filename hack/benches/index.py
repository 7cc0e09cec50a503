"""The prefix index beside a naive one in the same run, then what a request costs around it. A few seconds in all.

Times are medians, in microseconds; `best` is the quickest run, nearest to a quiet core. Ratios are what to trust.
"""

import random
import statistics
import time
import tracemalloc
from array import array
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from epp.plugin import CacheRoom, Endpoint, PrefixMatch, Request, Response
from epp.prefix.approximate import ApproximateCacheRoom, ApproximatePrefixCache, PrefixCache
from epp.prefix.events.engine_cache import EngineCache, KvEventIndex
from epp.prefix.events.wire import decode
from epp.prefix.index import PrefixIndex
from epp.prefix.precise import PrecisePrefixCache
from epp.prefix.tokens.block_hashes import chain_of_tokens
from epp.scheduling.cost import ExpectedTtft
from epp.testing import services
from tests.support.engines.kv_events import block_stored

OK = Response(status=200)
draw = random.Random(1)


def measure(
    work: Callable[[], object], seconds: float = 0.1, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, float]:
    """Median and best time of `work`, in microseconds of `clock`."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 7 or time.perf_counter() < until:
        start = clock()
        work()
        times.append((clock() - start) * 1e6)
    return statistics.median(times), min(times)


def pool(count: int) -> list[Endpoint]:
    return [Endpoint(f"pod-{i}", f"10.0.{i // 250}.{i % 250}:8000") for i in range(count)]


def naive(holders: dict[int, set[Endpoint]], chain: list[int]) -> dict[Endpoint, int]:
    """Block by block, endpoint by endpoint: the obvious index."""
    depths: dict[Endpoint, int] = {}
    for block in chain:
        if not (found := holders.get(block)):
            break
        for endpoint in found:
            depths[endpoint] = depths.get(endpoint, 0) + 1
    return depths


def match() -> None:
    print("match of one chain for all endpoints: an eighth of it is held by all, half by two, all of it by one")
    print(f"{'endpoints':>9} {'blocks':>6} {'us':>8} {'best':>8} {'naive us':>9} {'ratio':>7}")
    for count in (8, 64, 512):
        for blocks in (256, 1024, 4096):
            endpoints, chain = pool(count), [draw.getrandbits(64) for _ in range(blocks)]
            index, sets = PrefixIndex(10**9), dict[int, set[Endpoint]]()
            for number, endpoint in enumerate(endpoints):
                held = chain[: blocks if number == 0 else blocks // 2 if number < 3 else blocks // 8]
                index.add(held, index.join(endpoint))
                for block in held:
                    sets.setdefault(block, set()).add(endpoint)
            found = {one: depth for depth, mask in index.match(chain) for one in index.holders(mask)}
            assert found == naive(sets, chain)
            ours, best = measure(partial(index.match, chain))
            theirs, _ = measure(partial(naive, sets, chain))
            print(f"{count:9} {blocks:6} {ours:8.1f} {best:8.1f} {theirs:9.0f} {theirs / ours:7.0f}")

    chain = [draw.getrandbits(64) for _ in range(4096)]
    index = PrefixIndex(10**9)
    for endpoint in pool(64):
        index.add(chain[: draw.randint(1, 4096)], index.join(endpoint))
    print(f"64 endpoints at as many different depths of 4096 blocks: {measure(partial(index.match, chain))[0]:.0f} us")


def hashed(cache: PrefixCache, made: Request) -> None:
    """Run `prepare`, which never waits, without an event loop."""
    try:
        cache.prepare(made).send(None)
    except StopIteration:
        return


def prepared(cache: ApproximatePrefixCache, prompt: bytes) -> Request:
    made = Request(id="r", model="m", prompt=prompt, tokens=len(prompt) // 4)
    hashed(cache, made)
    return made


def requests() -> None:
    print("\none endpoint, its cache full: every prompt new, so each insertion evicts as much (us, median)")
    print(f"{'prompt':>8} {'hash':>8} {'on_picked':>10} {'on_finished':>12}")
    endpoint = pool(1)[0]
    for size in (2048, 32_768, 262_144):
        cache = ApproximatePrefixCache()
        rows: list[tuple[float, float, float]] = []
        for _ in range(2_000_000 // size + 40):  # so many fill the default capacity of 500,000 tokens
            made = Request(id="r", model="m", prompt=draw.randbytes(size), tokens=size // 4)
            start = time.perf_counter()
            hashed(cache, made)
            prepared_at = time.perf_counter()
            cache.on_picked(made, endpoint)
            picked = time.perf_counter()
            cache.on_finished(made, endpoint, OK)
            rows.append(
                ((prepared_at - start) * 1e6, (picked - prepared_at) * 1e6, (time.perf_counter() - picked) * 1e6)
            )
        hash_, pick, finish = (statistics.median(column) for column in zip(*rows[-40:], strict=True))
        print(f"{size // 1024:6}KB {hash_:8.1f} {pick:10.1f} {finish:12.1f}")


def signals() -> None:
    print("\nwhat a pick looks at, 32 KB prompt, a system prompt known to all (us)")
    print(f"{'endpoints':>9} {'prefixes':>9} {'rooms':>8} {'bill':>8} {'bill per endpoint':>18}")
    for count in (8, 64, 512):
        cache, cost, endpoints = ApproximatePrefixCache(), ExpectedTtft(), pool(count)
        rooms, system = ApproximateCacheRoom(cache), draw.randbytes(4096)
        for endpoint in endpoints:
            for _ in range(2):
                made = prepared(cache, system + draw.randbytes(8192))
                cache.on_picked(made, endpoint)
                cache.on_finished(made, endpoint, OK)
        made = prepared(cache, system + draw.randbytes(28_672))
        cache.on_picked(made, endpoints[1])
        made = replace(made, signals={**made.signals, PrefixMatch: cache.produce(made, endpoints)})
        made = replace(made, signals={**made.signals, CacheRoom: rooms.produce(made, endpoints)})
        prefixes, _ = measure(partial(cache.produce, made, endpoints))
        room, _ = measure(partial(rooms.produce, made, endpoints))
        bill, _ = measure(partial(cost.bill, made, endpoints))
        print(f"{count:9} {prefixes:9.1f} {room:8.1f} {bill:8.1f} {bill / count:18.2f}")


class Ids:
    """A prompt's tokens, known at once."""

    def __init__(self, ids: list[int]) -> None:
        self._ids = array("I", ids)

    async def of(self, request: Request) -> Sequence[int]:
        return self._ids


def precise() -> None:
    print("\nkv-aware, a prompt of 8,192 tokens, half of it known to all, all of it to one (us)")
    print(f"{'endpoints':>9} {'links':>8} {'prefixes':>9} {'on_picked':>10} {'on_finished':>12}")
    for count in (8, 64, 512):
        cache, endpoints = PrecisePrefixCache(), pool(count)
        ids = [draw.randrange(128_000) for _ in range(8192)]
        cache.start(services(tokens=Ids(ids).of))
        names = [draw.getrandbits(64) for _ in range(512)]
        for number, endpoint in enumerate(endpoints):
            kv_state = cache.kv_index.state_of(endpoint)
            kv_state.state = "live"
            kv_state.engine(0).apply(decode(message(ids, 0, names if number == 3 else names[:256], [])))
        rows: list[tuple[float, ...]] = []
        for _ in range(60):
            made = Request(id="r", model="m", prompt=b"x" * 32_768, tokens=8192)
            hashed(cache, made)
            at = [time.perf_counter()]
            chain_of_tokens(array("I", ids), SIZE)
            at.append(time.perf_counter())
            cache.produce(made, endpoints)  # once more for the links, which are made when they are needed
            at.append(time.perf_counter())
            made = replace(made, signals={**made.signals, PrefixMatch: cache.produce(made, endpoints)})
            at.append(time.perf_counter())
            cache.on_picked(made, endpoints[0])
            at.append(time.perf_counter())
            cache.on_finished(made, endpoints[0], OK)
            at.append(time.perf_counter())
            rows.append(tuple((at[i + 1] - at[i]) * 1e6 for i in (0, 2, 3, 4)))
        links, prefixes, pick, finish = (statistics.median(column) for column in zip(*rows, strict=True))
        print(f"{count:9} {links:8.1f} {prefixes:9.1f} {pick:10.1f} {finish:12.1f}")


def memory() -> None:
    print("\nmemory, 64 endpoints, chats of 8 KB with a system prompt of 4 KB")
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    cache, endpoints, system = ApproximatePrefixCache(), pool(64), draw.randbytes(4096)
    for endpoint in endpoints:
        for _ in range(40):
            made = prepared(cache, system + draw.randbytes(4096))
            cache.on_picked(made, endpoint)
            cache.on_finished(made, endpoint, OK)
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    figures = cache.statistics()
    print(
        f"{figures['blocks']:.0f} blocks, {figures['holdings']:.0f} holdings: {taken / figures['holdings']:.0f} bytes"
    )
    print(f"a holding measured, {figures['bytes'] / figures['holdings']:.0f} reported")


SIZE = 16
"""Tokens per block of the engines whose events are read: vLLM's default."""


def message(prompt: list[int], start: int, names: list[int], gone: list[int]) -> bytes:
    """A step's events as vLLM 0.32 sends them: blocks stored together, removals one by one."""
    return step([block_stored(prompt, names, start, SIZE)], gone)


def step(stored: list[dict[str, Any]], gone: list[int]) -> bytes:
    removed = [{"type": "BlockRemoved", "block_hashes": [name], "medium": "GPU", "group_idx": 0} for name in gone]
    return msgspec.msgpack.encode([time.time(), [*removed, *stored], 0])  # noqa: TID251


def histories(blocks: int, each: int, evict: bool, chats: int = 1) -> list[bytes]:
    """Messages of chats behind a system prompt: `blocks` stored in all, `each` at once, of so many `chats` in a step;
    with as many removals."""
    messages, system = [], [draw.randrange(128_000) for _ in range(4 * SIZE)]
    names = [draw.getrandbits(64) for _ in range(4)]
    old: list[int] = []
    messages.append(message(system, 0, names, []))
    for _ in range(blocks // each // chats):
        new = [[draw.getrandbits(64) for _ in range(each)] for _ in range(chats)]
        prompts = [system + [draw.randrange(128_000) for _ in range(each * SIZE)] for _ in range(chats)]
        stored = [block_stored(ids, names + its, 4, SIZE) for ids, its in zip(prompts, new, strict=True)]
        messages.append(step(stored, old))
        old = [name for its in new for name in reversed(its)] if evict else []
    return messages


def naively(messages: list[bytes], holders: dict[int, set[str]], joined: dict[int, int]) -> None:
    """Events into a dict of sets: each block's key from its tokens as a tuple and the key before."""
    for data in messages:
        for event in msgspec.msgpack.decode(data)[1]:
            if event["type"] == "BlockRemoved":
                for name in event["block_hashes"]:
                    holders[joined.pop(name)].discard("pod")
                continue
            key = joined.get(event["parent_block_hash"], 0)
            for i, name in enumerate(event["block_hashes"]):
                key = joined[name] = hash((key, tuple(event["token_ids"][i * SIZE : (i + 1) * SIZE])))
                holders.setdefault(key, set()).add("pod")


def events() -> None:
    print(
        "\nKV events of one engine, blocks of 16: thousand stored in a second of CPU time (full: and as many removed)"
    )
    print(
        f"{'blocks at once':>14} {'chats a step':>12} {'cache':>6} {'1000/s':>8} {'best':>8} {'naive':>8} {'ratio':>7}"
    )
    shapes = ((512, 1, False), (64, 1, False), (8, 1, False), (1, 4, False), (1, 1, False))
    for each, chats, evict in (*shapes, (64, 1, True), (8, 1, True), (1, 4, True)):
        messages = histories(32_768, each, evict, chats)

        def ours(messages: list[bytes] = messages) -> None:
            cache = EngineCache(pool(1)[0], KvEventIndex(10**7))
            for data in messages:
                cache.apply(decode(data))

        median, best = measure(ours, 0.5, time.thread_time)
        theirs, _ = measure(partial(naively, messages, {}, {}), 0.5, time.thread_time)
        print(
            f"{each:14} {chats:12} {'full' if evict else 'empty':>6} {32_768e3 / median:8.0f} {32_768e3 / best:8.0f}"
            f" {32_768e3 / theirs:8.0f} {theirs / median:7.2f}"
        )
    ids = [draw.randrange(128_000) for _ in range(65_536)]
    median, _ = measure(partial(chain_of_tokens, ids, SIZE))
    print(f"a prompt of 65,536 tokens to its 4,096 links: {median:.0f} us")


def holding() -> None:
    print("\nmemory of what events say, 16 engines with 8,192 blocks each, chats behind one system prompt")
    histories_ = [histories(8192, 64, evict=False) for _ in range(16)]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    kv_index = KvEventIndex(10**7)
    caches = [EngineCache(endpoint, kv_index) for endpoint in pool(16)]
    for cache, messages in zip(caches, histories_, strict=True):
        for data in messages:
            cache.apply(decode(data))
    taken = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    print(f"{kv_index.budget.used} blocks: {taken / kv_index.budget.used:.0f} bytes each measured, ", end="")
    print(f"{kv_index.bytes / kv_index.budget.used:.0f} reported")


if __name__ == "__main__":
    match()
    events()
    holding()
    requests()
    signals()
    precise()
    memory()
