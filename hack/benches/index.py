"""The prefix index beside a naive one in the same run, then what a request costs around it. A few seconds in all.

Times are medians, in microseconds; `best` is the quickest run, nearest to a quiet core. Ratios are what to trust.
"""

import random
import statistics
import time
import tracemalloc
from collections.abc import Callable
from functools import partial

from epp.plugin import CacheRoom, Endpoint, PrefixMatch, Request, Response
from epp.prefix.approximate import ApproximateCacheRoom, ApproximatePrefixCache
from epp.prefix.index import PrefixIndex
from epp.scheduling.cost import ExpectedTtft

OK = Response(status=200)
draw = random.Random(1)


def measure(work: Callable[[], object], seconds: float = 0.1) -> tuple[float, float]:
    """Median and best time of `work`, in microseconds."""
    times: list[float] = []
    until = time.perf_counter() + seconds
    while len(times) < 7 or time.perf_counter() < until:
        start = time.perf_counter()
        work()
        times.append((time.perf_counter() - start) * 1e6)
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


def hashed(cache: ApproximatePrefixCache, made: Request) -> None:
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
        made.signals[PrefixMatch] = cache.produce(made, endpoints)
        made.signals[CacheRoom] = rooms.produce(made, endpoints)
        prefixes, _ = measure(partial(cache.produce, made, endpoints))
        room, _ = measure(partial(rooms.produce, made, endpoints))
        bill, _ = measure(partial(cost.bill, made, endpoints))
        print(f"{count:9} {prefixes:9.1f} {room:8.1f} {bill:8.1f} {bill / count:18.2f}")


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


if __name__ == "__main__":
    match()
    requests()
    signals()
    memory()
