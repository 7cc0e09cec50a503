"""The plugins: what they tell of a prompt, when they forget, what they refuse; and bursts, together with the cost."""

import random
import tracemalloc
from collections import Counter
from typing import Final

import pytest

from epp.plugin import CacheRoom, Endpoint, Load, PrefixMatch, Request, Response, Usage
from epp.prefix.approximate import ApproximateCacheRoom, ApproximatePrefixCache
from epp.prefix.index import LONG_FROM
from epp.scheduling.cost import ExpectedTtft
from epp.testing import services
from tests.support.scheduling.signals import with_signal
from tooling.simulator.engine import H100_8B, Engine
from tooling.simulator.tokenizer import hash_chain

OK = Response(status=200, complete=True)


def pool(count: int) -> list[Endpoint]:
    return [Endpoint(f"pod-{i}", f"10.0.0.{i}:8000") for i in range(count)]


def text(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


async def asked(
    cache: ApproximatePrefixCache, prompt: bytes, *, model: str = "m", salt: str = "", max_tokens: int | None = None
) -> Request:
    made = Request(id="r", model=model, prompt=prompt, tokens=len(prompt) // 4, salt=salt, max_tokens=max_tokens)
    await cache.prepare(made)
    return made


async def serve_unchecked(
    cache: ApproximatePrefixCache, endpoint: Endpoint, prompt: bytes, response: Response = OK
) -> None:
    made = await asked(cache, prompt)
    cache.on_picked(made, endpoint)
    cache.on_finished(made, endpoint, response)


async def serve(cache: ApproximatePrefixCache, endpoint: Endpoint, prompt: bytes, response: Response = OK) -> None:
    await serve_unchecked(cache, endpoint, prompt, response)
    cache.shadows[endpoint].check()


async def match(cache: ApproximatePrefixCache, endpoints: list[Endpoint], prompt: bytes) -> list[int]:
    found = cache.produce(await asked(cache, prompt), endpoints)
    return [found[endpoint].tokens for endpoint in endpoints]


async def test_each_endpoint_matches_as_far_as_it_was_sent() -> None:
    cache, endpoints = ApproximatePrefixCache(), pool(4)
    prompt = text(20_000)
    await serve(cache, endpoints[0], prompt)
    await serve(cache, endpoints[1], prompt[:5000] + text(3000, 2))
    await serve(cache, endpoints[2], text(3000, 3))
    found = cache.produce(await asked(cache, prompt), endpoints)
    total = (LONG_FROM + 3 * 1024) // 256
    assert found[endpoints[0]] == PrefixMatch((LONG_FROM + 3 * 1024) // 4, total, total)
    assert found[endpoints[1]] == PrefixMatch(19 * 64, 19, total)
    assert found[endpoints[2]] == found[endpoints[3]] == PrefixMatch(0, 0, total)
    assert found[endpoints[0]].share == 1


async def test_a_prompt_in_flight_counts_as_held() -> None:
    cache, (a, b) = ApproximatePrefixCache(), pool(2)
    prompt = text(2560)
    cache.on_picked(await asked(cache, prompt), a)
    assert await match(cache, [a, b], prompt) == [640, 0]


async def test_tokens_are_counted_at_the_requests_own_ratio() -> None:
    cache, (a,) = ApproximatePrefixCache(), pool(1)
    prompt = text(2560)
    await serve(cache, a, prompt)
    made = Request(id="r", model="m", prompt=prompt + text(440, 2), tokens=1000)  # three bytes a token
    await cache.prepare(made)
    assert cache.produce(made, [a])[a].tokens == round(2560 / 3)


@pytest.mark.parametrize(("model", "salt"), [("adapter", ""), ("m", "tenant")])
async def test_models_and_salts_share_nothing(model: str, salt: str) -> None:
    cache, (a,) = ApproximatePrefixCache(), pool(1)
    await serve(cache, a, text(2560))
    made = await asked(cache, text(2560), model=model, salt=salt)
    assert cache.produce(made, [a])[a].tokens == 0


@pytest.mark.parametrize("size", [0, 1, 255])
async def test_prompts_under_a_block_are_known_to_nobody(size: int) -> None:
    cache, (a,) = ApproximatePrefixCache(), pool(1)
    await serve(cache, a, text(size))
    assert cache.produce(await asked(cache, text(size)), [a])[a] == PrefixMatch(0, 0, 0)


@pytest.mark.parametrize(
    ("response", "remembered"),
    [
        (OK, True),
        (Response(status=200), True),
        (Response(first_token_at=1.0), True),
        (Response(), False),
        (Response(status=503, first_token_at=1.0), False),
        (Response(status=400), False),
        (Response(status=200, served="10.9.9.9:1"), False),
        (Response(status=200, served="10.0.0.0:8000"), True),
    ],
)
async def test_only_what_was_computed_is_remembered(response: Response, remembered: bool) -> None:
    cache, (a,) = ApproximatePrefixCache(), pool(1)
    await serve(cache, a, text(256, 9))
    await serve(cache, a, text(2560), response)
    assert await match(cache, [a], text(2560)) == [640 if remembered else 0]
    assert cache.statistics()["pinned_tokens"] == 0


async def test_a_gateway_that_never_shows_a_status_is_not_taken_for_one_that_always_fails() -> None:
    cache, (a,) = ApproximatePrefixCache(), pool(1)
    await serve(cache, a, text(2560), Response())
    assert await match(cache, [a], text(2560)) == [640]


async def test_a_retry_elsewhere_moves_the_pin() -> None:
    cache, (a, b) = ApproximatePrefixCache(), pool(2)
    await serve(cache, a, text(256, 9))
    made = await asked(cache, text(2560))
    answer = Response(status=200, served=b.address)
    cache.on_picked(made, a)
    cache.on_finished(made, a, answer)
    cache.on_picked(made, b)
    assert await match(cache, [a, b], text(2560)) == [0, 640]
    cache.on_finished(made, b, answer)
    assert await match(cache, [a, b], text(2560)) == [0, 640]


async def test_capacity_is_the_engines_own_and_follows_it() -> None:
    cache, (a, b) = ApproximatePrefixCache(lru_capacity_per_server=100), pool(2)
    room = ApproximateCacheRoom(cache)
    made = await asked(cache, text(2560))
    a.load = Load(block_size=32, blocks=1000, at=1.0)
    assert room.produce(made, [a, b]) == {a: CacheRoom(0, 32_000), b: CacheRoom(0, 1600)}
    a.load = Load(block_size=16, blocks=50, at=2.0)
    cache.on_picked(made, a)
    assert room.produce(made, [a, b])[a] == CacheRoom(640 + 256, 800, 640)
    a.load = Load(at=3.0)  # a scrape that does not tell keeps what was known
    assert room.produce(made, [a])[a].capacity == 800
    fixed = ApproximatePrefixCache(auto_tune=False, block_size_tokens=8, lru_capacity_per_server=100)
    a.load = Load(block_size=16, blocks=50, at=4.0)
    assert ApproximateCacheRoom(fixed).produce(made, [a])[a] == CacheRoom(0, 800)


async def test_where_memory_ends_answers_and_idle_prompts_count() -> None:
    cache, (a,) = ApproximatePrefixCache(lru_capacity_per_server=200), pool(1)
    room, cost = ApproximateCacheRoom(cache), ExpectedTtft()

    async def bill(prompt: bytes) -> float:
        made = await asked(cache, prompt)
        made = with_signal(made, PrefixMatch, cache.produce(made, [a]))
        made = with_signal(made, CacheRoom, room.produce(made, [a]))
        (row,) = cost.bill(made, [a])
        return dict(zip(cost.terms, row, strict=True))["memory"]

    await serve(cache, a, text(4096, 1))
    cache.on_picked(await asked(cache, text(4096, 2)), a)  # 1024 of 3200 tokens, its answer will be a few hundred
    assert await bill(text(4096, 1)) == 0
    cache.on_picked(await asked(cache, text(4096, 3)), a)
    assert await bill(text(4096, 1)) > 0  # idle memory, no longer free for answers once it is used again
    assert await bill(text(4096, 3)) == 0  # in use already, so it takes no more


async def test_answers_are_as_long_as_reported_or_as_those_seen() -> None:
    cache, (a,) = ApproximatePrefixCache(), pool(1)
    made = await asked(cache, text(2560))
    cache.on_picked(made, a)
    cache.on_finished(made, a, Response(status=200, usage=Usage(640, 1601, 0)))
    assert cache.statistics()["idle_tokens"] == 640 + 1600
    await serve(cache, a, text(2560, 2))
    assert cache.statistics()["idle_tokens"] > 2 * 640 + 1600 + 256
    before = cache.statistics()["idle_tokens"]
    made = await asked(cache, text(2560, 3), max_tokens=17)
    cache.on_picked(made, a)
    cache.on_finished(made, a, OK)
    assert cache.statistics()["idle_tokens"] == before + 640 + 16


FORGED: Final = (
    b"U]H&(T&CG4y,jLPLgHcYa*/;(hYmyfl,U3[<xvXzi{j,f.59%Y{2H^sdY3xit~j~"
    b"rC.{;,?hoDUe}xdx);<B;6u~gx|zrUVedIk2w7}L2>?e}ziAK}yIcy:T|6r~/r|~"
    b"FY-V){F[cF^v~ttt|a/.frg3.xRZ}R9vV)G?{+t.IYlvrm<>6QYjaDL}R,SgEo=~"
    b"/hNW+om`dUrRzYyYzCyB6g+WC{|o}brRX#wOm8iIe&-RWsEZ)BgfT]#E|nz?-n9{",
    b"3Kef,XRG%aI{{L}Vj[}H&/f[qlL~q^K{Dyt2#0[dasst|aof+S$C40#vqk}{]lrH"
    b"h-/G2#sGJ}|Khx|A<x5PjVd9bCxw#g]J@@#aBoW0Prpszyysb#R-B-7Zbh|wgC{y"
    b"28wVPdt/_zIpbtm10&.]imbY43txT7U+Z>)+^<V_5M{yxvzpuq(*xM%_4]}}k3z{"
    b"w25<%@lzF}j4hY]=mR`8gC}zn$Yve4K0+_vQC&&<X^yvxvnw)X[RU~lkn~}un$uu",
)
"""Blocks that make all factors of xxh3's last sum 0, the first with the seed of model `m` and the second behind such a
block, so that both have the hash that comes of none. Each takes milliseconds to make."""


async def test_a_client_who_forges_hashes_harms_nobody() -> None:
    cache, endpoints = ApproximatePrefixCache(lru_capacity_per_server=500), pool(3)
    first, again = FORGED
    assert len({*cache.chain(await asked(cache, first + 40 * again))}) == 1
    for turn in range(60):
        endpoint = endpoints[turn % 3]
        await serve(cache, endpoint, first + (turn % 7) * again + text(600, turn))
        await serve(cache, endpoint, text(2000, turn % 9))
    assert await match(cache, endpoints, text(2000, 0)) == [448, 0, 0]
    assert [cache.shadows[endpoint].pinned for endpoint in endpoints] == [0, 0, 0]
    for endpoint in endpoints:
        cache.on_removed(endpoint)
    assert (cache.index.holdings, len(cache.index)) == (0, 0)
    cache.start(services(hash_seed=1))
    assert len({*cache.chain(await asked(cache, first + 40 * again))}) == 41, "no client knows the seed"


async def test_a_removed_endpoint_is_forgotten_and_its_requests_still_end() -> None:
    cache, (a, b) = ApproximatePrefixCache(), pool(2)
    made = await asked(cache, text(2560))
    cache.on_picked(made, a)
    await serve(cache, b, text(2560))
    cache.on_removed(a)
    cache.on_removed(a)
    assert await match(cache, [b], text(2560)) == [640]
    cache.on_finished(made, a, OK)
    cache.on_finished(made, a, OK)
    cache.on_removed(b)
    assert (cache.statistics()["holdings"], cache.statistics()["endpoints"]) == (0, 0)


@pytest.mark.parametrize("own", [256, 8192])
async def test_the_memory_it_reports_is_the_memory_it_takes(own: int) -> None:
    cache, endpoints = ApproximatePrefixCache(), pool(8)
    prompts = [text(1024) + text(own, number) for number in range(500)]
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        for number, prompt in enumerate(prompts):
            await serve_unchecked(cache, endpoints[number % 8], prompt)
        taken = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert 0.6 < cache.statistics()["bytes"] / taken < 1.4


@pytest.mark.parametrize(
    ("cache", "tokens"),
    [
        (ApproximatePrefixCache(max_prefix_tokens_to_match=1000), 960),
        (ApproximatePrefixCache(max_prefix_tokens_to_match=0, max_prefix_blocks_to_match=10), 640),
        (
            ApproximatePrefixCache(max_prefix_tokens_to_match=0, max_prefix_blocks_to_match=10, block_size_tokens=128),
            1280,
        ),
    ],
)
async def test_a_limit_on_the_match_still_counts_the_whole_prompts_room(
    cache: ApproximatePrefixCache, tokens: int
) -> None:
    (a,) = pool(1)
    cache.on_picked(await asked(cache, text(10_240)), a)
    assert await match(cache, [a], text(10_240)) == [tokens]
    assert 2560 <= cache.statistics()["pinned_tokens"] <= 2688


@pytest.mark.parametrize(
    "name", ["block_size_tokens", "max_prefix_blocks_to_match", "max_prefix_tokens_to_match", "lru_capacity_per_server"]
)
def test_parameters_without_meaning_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: -1, expected at least"):
        ApproximatePrefixCache(**{name: -1})  # type: ignore[arg-type]


class Pool:
    """Eight pods of the simulator, picked for by the cost alone; ties go round."""

    def __init__(self) -> None:
        self.endpoints = pool(8)
        self.cache = ApproximatePrefixCache()
        self.room = ApproximateCacheRoom(self.cache)
        self.cost = ExpectedTtft()
        self.cost.clock = lambda: 0.0
        self.engines = {endpoint: Engine(H100_8B) for endpoint in self.endpoints}
        self.picks: Counter[Endpoint] = Counter()

    async def send(self, name: int, prompt: bytes) -> None:
        made = await asked(self.cache, prompt)
        made = with_signal(made, PrefixMatch, self.cache.produce(made, self.endpoints))
        made = with_signal(made, CacheRoom, self.room.produce(made, self.endpoints))
        costs = [sum(row) for row in self.cost.bill(made, self.endpoints)]
        best = min(range(8), key=lambda i: (costs[i], (i - name) % 8))
        endpoint = self.endpoints[best]
        self.cache.on_picked(made, endpoint)
        self.cost.on_picked(made, endpoint)
        self.picks[endpoint] += 1
        self.engines[endpoint].add(str(name), hash_chain(prompt, 16), prompt=len(prompt) // 4, output=50, now=0.0)

    def reused(self) -> float:
        """Share of prompt tokens the engines did not have to compute."""
        for engine in self.engines.values():
            now = 0.0
            while step := engine.step(now):
                now = step.ends_at
        hits = sum(engine.totals.prefix_hits for engine in self.engines.values())
        return hits / sum(engine.totals.prompt_tokens for engine in self.engines.values())


async def test_a_burst_of_one_cold_prompt_reuses_it() -> None:
    pods = Pool()
    for name in range(30):
        await pods.send(name, text(32_768) + text(64, name + 2))
    assert pods.reused() >= 0.8


async def test_a_burst_of_different_prompts_spreads() -> None:
    pods = Pool()
    for name in range(30):
        await pods.send(name, text(32_768, name))
    assert sorted(pods.picks.values()) == [3, 3, 4, 4, 4, 4, 4, 4]
    assert pods.reused() == 0
