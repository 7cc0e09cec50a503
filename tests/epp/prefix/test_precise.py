"""What events, prompts in flight and doubt make of a match; and when the approximate answer is given instead."""

import random
from array import array
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import pytest
from msgspec.structs import replace

from epp.configuration.loader import load_text
from epp.errors import ConfigError
from epp.plugin import CacheRoom, Endpoint, Load, NoTokens, PrefixMatch, Request, Response, Usage
from epp.prefix.approximate import ApproximateCacheRoom
from epp.prefix.events.wire import decode
from epp.prefix.lmcache.tiers import Lmcache
from epp.prefix.precise import PrecisePrefixCache
from epp.scheduling.cost import ExpectedTtft
from epp.testing import services
from tests.support.engines.coordinator import StandIn
from tests.support.engines.kv_events import SIZE, batch, names_of, removed, stored
from tests.support.process.waiting import beside, until
from tests.support.scheduling.signals import with_signal
from tooling.simulator.engine import H100_8B, Engine
from tooling.simulator.tokenizer import hash_chain

OK = Response(status=200, complete=True)


class Simulated:
    """The simulator's tokenizer: four bytes are a token."""

    def __init__(self) -> None:
        self.fails: NoTokens.Reason | None = None

    async def of(self, request: Request) -> Sequence[int]:
        if self.fails:
            raise NoTokens(self.fails, "")
        return ids_of(request.prompt)


def ids_of(prompt: bytes) -> list[int]:
    return array("I", prompt[: len(prompt) // 4 * 4]).tolist()


def text(tokens: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(4 * tokens)


class Rig:
    """A producer with endpoints that speak, or do not."""

    def __init__(self, count: int = 2, **parameters: object) -> None:
        self.endpoints = [Endpoint(f"pod-{i}", f"10.0.0.{i}:8000") for i in range(count)]
        self.cache = PrecisePrefixCache(**parameters)  # type: ignore[arg-type]
        self.now = 0.0
        self.cache.clock = lambda: self.now
        self.source = Simulated()
        self.reasons = Counter[str]()
        self.start(self.source.of)
        for endpoint in self.endpoints:
            self.cache.kv_index.state_of(endpoint).state = "live"

    def start(self, tokens: Callable[[Request], Awaitable[Sequence[int]]]) -> None:
        self.cache.start(services(tokens=tokens, degraded=self.degraded, hash_seed=2**64 - 1))

    def degraded(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        self.reasons.update([reason])

    def say(self, endpoint: Endpoint, *events: object) -> None:
        kv_state = self.cache.kv_index.state_of(endpoint)
        kv_state.received(self.now, 0.0)
        kv_state.engine(0).apply(decode(batch(*events)))

    async def ask(self, prompt: bytes, **fields: str) -> Request:
        made = Request(id="r", prompt=prompt, **{"model": "m"} | fields, tokens=len(prompt) // 3)  # type: ignore[arg-type]
        if (tokens := await self.cache.prepare(made)) is not None:
            made = replace(made, tokens=tokens)
        return with_signal(made, PrefixMatch, self.cache.produce(made, self.endpoints))

    async def held(self, prompt: bytes, **fields: str) -> list[int]:
        made = await self.ask(prompt, **fields)
        return [made.signal(PrefixMatch)[endpoint].tokens for endpoint in self.endpoints]

    async def send(self, endpoint: Endpoint, prompt: bytes, response: Response = OK) -> None:
        made = await self.ask(prompt)
        self.cache.on_picked(made, endpoint)
        self.cache.on_finished(made, endpoint, response)


async def test_each_endpoint_holds_what_it_said() -> None:
    rig = Rig(3)
    a, b, c = rig.endpoints
    prompt = text(100)
    rig.say(a, stored(ids_of(prompt)))
    rig.say(b, stored(ids_of(prompt)[:40]))
    rig.say(c, stored(ids_of(text(50, 2))))
    made = await rig.ask(prompt + text(20, 3))
    assert made.tokens == 120
    assert made.signal(PrefixMatch) == {
        a: PrefixMatch(100, 25, 30),
        b: PrefixMatch(40, 10, 30),
        c: PrefixMatch(0, 0, 30),
    }
    assert not rig.reasons


async def test_the_last_token_is_computed_anew() -> None:
    rig = Rig(1)
    rig.say(rig.endpoints[0], stored(ids_of(text(100))))
    assert await rig.held(text(100)) == [96]
    assert await rig.held(text(99)) == [96]


async def test_salts_and_adapters_are_kept_apart() -> None:
    rig = Rig(1)
    ids = ids_of(text(40))
    rig.say(rig.endpoints[0], stored(ids, extra_keys=[["tenant"], *[None] * 9]))
    rig.say(rig.endpoints[0], stored(ids, block_hashes=list(range(10)), lora_name="lora", extra_keys=[["lora"]] * 10))
    more = text(40) + text(4, 2)
    assert await rig.held(more, salt="tenant") == [40]
    assert await rig.held(more, model="lora") == [40]
    assert await rig.held(more, model="another name of the base") == [0]


async def test_a_prompt_in_flight_is_held_whatever_events_say() -> None:
    rig = Rig()
    a, _ = rig.endpoints
    rig.say(a, stored(ids_of(text(8, 9))))
    made = await rig.ask(text(100))
    rig.cache.on_picked(made, a)
    assert await rig.held(text(100) + text(4, 2)) == [100, 0]
    rig.say(a, stored(ids_of(text(100))), *(removed(ids_of(text(100)), block) for block in range(24, -1, -1)))
    assert await rig.held(text(100) + text(4, 2)) == [100, 0]
    rig.cache.on_finished(made, a, Response())
    assert rig.cache.statistics()["in_flight_blocks"] == 25  # nobody has shown a status yet: it may have been answered
    rig.now = 3.0
    assert await rig.held(text(100) + text(4, 2)) == [0, 0]


async def test_an_answered_prompt_is_held_until_its_events_should_have_come() -> None:
    rig = Rig()
    a, _ = rig.endpoints
    a.load = Load(block_size=SIZE, at=0.0)
    await rig.send(a, text(100))
    rig.now = 1.9
    assert await rig.held(text(100) + text(4, 2)) == [100, 0]
    rig.say(a, stored(ids_of(text(100))[:40]))
    rig.now = 2.0
    assert await rig.held(text(100) + text(4, 2)) == [40, 0]
    assert rig.cache.statistics()["in_flight_blocks"] == 0


@pytest.mark.parametrize("how", ["cleared", "another process"])
async def test_an_emptied_cache_holds_nothing_but_what_is_in_flight(how: str) -> None:
    rig = Rig()
    a, _ = rig.endpoints
    a.load = Load(block_size=SIZE, blocks=1000, at=0.0)
    rig.say(a, stored(ids_of(text(100, 2))))
    await rig.send(a, text(640))
    waits = await rig.ask(text(320, 3))
    rig.cache.on_picked(waits, a)
    if how == "cleared":
        rig.say(a, {"type": "AllBlocksCleared"})
    else:
        rig.cache.kv_index.state_of(a).engine(0).clear(emptied=True)
    assert [await rig.held(text(n, seed) + text(4, 9)) for n, seed in ((640, 1), (100, 2), (320, 3))] == [
        [0, 0],
        [0, 0],
        [320, 0],
    ]
    rig.source.fails = "late"
    assert [(await rig.held(text(n, seed)))[0] > 0 for n, seed in ((640, 1), (320, 3))] == [False, True]
    rig.cache.on_finished(waits, a, OK)
    rig.now = 9.0
    assert rig.cache.statistics()["in_flight_blocks"] == 0


async def test_what_was_only_missed_is_not_taken_for_gone() -> None:
    rig = Rig()
    a, _ = rig.endpoints
    a.load = Load(block_size=SIZE, blocks=1000, at=0.0)
    await rig.send(a, text(640))
    rig.cache.kv_index.state_of(a).engine(0).clear(emptied=False)
    rig.source.fails = "late"
    assert (await rig.held(text(640)))[0] > 600


async def test_a_prompt_that_failed_is_not_held() -> None:
    rig = Rig()
    a, _ = rig.endpoints
    a.load = Load(block_size=SIZE, at=0.0)
    await rig.send(a, text(100), Response(status=503))
    assert await rig.held(text(100)) == [0, 0]


@pytest.mark.parametrize("reason", ["no-tokenizer", "late", "unsupported", "failed"])
async def test_without_tokens_the_answer_is_approximate(reason: NoTokens.Reason) -> None:
    rig = Rig()
    a, _ = rig.endpoints
    await rig.send(a, text(640))
    rig.source.fails = reason
    made = Request(id="r", model="m", prompt=text(640), tokens=640)
    await rig.cache.prepare(made)
    assert [match.tokens for match in rig.cache.produce(made, rig.endpoints).values()] == [640, 0]
    assert rig.reasons[f"approximate-{reason}"] == 1


async def test_a_source_that_breaks_or_is_not_there_harms_nobody() -> None:
    rig = Rig()

    class Broken:
        async def of(self, request: Request) -> Sequence[int]:
            raise ZeroDivisionError

    rig.start(Broken().of)
    assert await rig.held(text(640)) == [0, 0]
    rig.start(services().tokens)
    assert await rig.held(text(640)) == [0, 0]
    assert (rig.reasons["approximate-failed"], rig.reasons["approximate-no-tokenizer"]) == (1, 1)


@pytest.mark.parametrize(
    ("state", "reason"),
    [("off", "events-off"), ("connecting", "events-never"), ("replaying", "events-stale"), ("lost", "events-stale")],
)
async def test_an_endpoint_that_is_not_received_is_matched_approximately_and_the_others_are_not(
    state: str, reason: str
) -> None:
    rig = Rig()
    a, b = rig.endpoints
    rig.say(b, stored(ids_of(text(640))))
    await rig.send(a, text(640))
    rig.say(a, stored(ids_of(text(4, 2))))
    rig.now = 3.0
    assert await rig.held(text(640) + text(2, 3)) == [0, 640]
    rig.cache.kv_index.state_of(a).state = state  # type: ignore[assignment]
    assert await rig.held(text(640) + text(2, 3)) == [640, 640]
    assert rig.reasons == {"approximate-block-size": 1, f"approximate-{reason}": 1}


async def test_a_prompt_is_not_read_where_nobody_is_live() -> None:
    rig = Rig()
    for endpoint in rig.endpoints:
        rig.cache.kv_index.state_of(endpoint).state = "connecting"
    made = await rig.ask(text(640))
    assert made.tokens == 640 * 4 // 3
    assert rig.reasons == {"approximate-events": 1}


async def test_an_unknown_block_size_makes_a_match_approximate_until_metrics_or_events_tell_it() -> None:
    rig = Rig(1)
    (a,) = rig.endpoints
    await rig.ask(text(64))
    assert rig.reasons == {"approximate-block-size": 1}
    a.load = Load(block_size=SIZE, at=0.0)
    await rig.ask(text(64))
    assert rig.reasons == {"approximate-block-size": 1}


async def test_an_engine_that_computes_and_says_nothing_is_not_believed_to_hold_nothing() -> None:
    rig = Rig(1)
    (a,) = rig.endpoints
    a.load = Load(block_size=SIZE, at=0.0)
    await rig.send(a, text(640))
    rig.now = 4.9
    assert await rig.held(text(640) + text(1, 2)) == [0]
    rig.now = 5.1
    assert await rig.held(text(640) + text(1, 2)) == [640]
    assert rig.reasons == {"approximate-events-silent": 1}
    rig.say(a)
    assert await rig.held(text(640) + text(1, 2)) == [0]


async def test_one_that_said_it_already_owes_nothing() -> None:
    rig = Rig(1)
    (a,) = rig.endpoints
    rig.say(a, stored(ids_of(text(640))))
    await rig.send(a, text(640))
    rig.now = 10.0
    assert await rig.held(text(640)) == [636]
    assert not rig.reasons


async def test_tiers_count_from_where_the_one_before_ends() -> None:
    rig = Rig(3)
    a, b, c = rig.endpoints
    ids = ids_of(text(100))
    rig.say(a, stored(ids[:40]), stored(ids[:80], medium="CPU"), stored(ids, medium="STORAGE"))
    rig.say(b, stored(ids[:40]), stored(ids[:16], medium="cpu"), stored(ids[:60], medium="STORAGE"))
    names = names_of(ids)[3::4]
    rig.say(c, stored(ids, medium="CPU", block_hashes=names[:5], block_size=16, extra_keys=None))
    found = (await rig.ask(text(100) + text(4, 2))).signal(PrefixMatch)
    assert [(found[each].tokens, found[each].l1, found[each].l2) for each in (a, b)] == [(40, 40, 20), (40, 0, 20)]
    assert rig.reasons == {"approximate-block-size": 1}
    c.load = Load(block_size=SIZE, at=0.0)
    found = (await rig.ask(text(100) + text(4, 2))).signal(PrefixMatch)
    assert (found[c].tokens, found[c].l1, found[c].l2) == (0, 80, 0)


async def test_block_sizes_may_differ_between_endpoints() -> None:
    rig = Rig()
    a, b = rig.endpoints
    ids = ids_of(text(100))
    rig.say(a, stored(ids))
    rig.say(b, stored(ids, block_hashes=names_of(ids)[7::8], block_size=32, extra_keys=None))
    made = await rig.ask(text(100) + text(4, 2))
    assert made.signal(PrefixMatch) == {a: PrefixMatch(100, 25, 26), b: PrefixMatch(96, 3, 3)}
    rig.cache.on_picked(made, b)
    assert await rig.held(text(100) + text(4, 2) + text(40, 3)) == [100, 96]


async def test_all_ranks_of_an_endpoint_count() -> None:
    rig = Rig(1)
    kv_state = rig.cache.kv_index.state_of(rig.endpoints[0])
    for rank, seed in ((0, 1), (1, 2)):
        kv_state.engine(rank).apply(decode(batch(stored(ids_of(text(100, seed))))))
    assert [await rig.held(text(100, seed) + text(4, 3)) for seed in (1, 2)] == [[100], [100]]


async def test_who_does_not_keep_its_promises_is_believed_less_and_earns_it_back() -> None:
    rig = Rig()
    a, b = rig.endpoints
    for endpoint in rig.endpoints:
        rig.say(endpoint, stored(ids_of(text(4000))))
    prompt = text(4000) + text(4, 2)
    for _ in range(20):
        await rig.send(a, prompt, Response(status=200, usage=Usage(4004, 10, 0)))
        await rig.send(b, prompt, Response(status=200, usage=Usage(4004, 10, 4000)))
    doubted, believed = await rig.held(prompt)
    assert doubted < 2000
    assert believed == 4000
    rows = {name: trust for name, _, _, trust in rig.cache.kv_events(rig.endpoints).endpoints}
    assert rows == {"pod-0": pytest.approx(doubted / 4000, abs=0.01), "pod-1": 1.0}
    for _ in range(300):
        await rig.send(a, prompt, Response(status=200, usage=Usage(4004, 10, 4000)))
    assert await rig.held(prompt) == [4000, 4000]


async def test_where_answers_do_not_tell_the_engines_counters_do() -> None:
    rig = Rig(1)
    (a,) = rig.endpoints
    rig.say(a, stored(ids_of(text(4000))))
    prompt, hits = text(4000) + text(4, 2), 0
    for scrape in range(40):
        a.load = Load(block_size=SIZE, at=float(scrape), prefix_hits=hits, prefix_queries=scrape)
        await rig.send(a, prompt)
        hits += 1000
    assert 1000 < (await rig.held(prompt))[0] < 2500


async def test_the_limit_on_a_prompts_length_bounds_what_is_looked_up() -> None:
    rig = Rig(1, max_prefix_tokens_to_match=40)
    rig.say(rig.endpoints[0], stored(ids_of(text(100))))
    made = await rig.ask(text(100))
    assert made.signal(PrefixMatch)[rig.endpoints[0]] == PrefixMatch(40, 10, 25)
    assert made.tokens == 100


async def test_a_removed_endpoint_is_forgotten_and_its_requests_still_end() -> None:
    rig = Rig()
    a, b = rig.endpoints
    rig.say(a, stored(ids_of(text(100))))
    await rig.send(a, text(100, 2))
    made = await rig.ask(text(100, 3))
    rig.cache.on_picked(made, a)
    rig.cache.on_removed(a)
    rig.cache.on_finished(made, a, OK)
    rig.now = 100.0
    assert rig.cache.produce(made, [b])[b].tokens == 0
    figures = rig.cache.statistics()
    assert (figures["event_blocks"], figures["in_flight_blocks"], figures["holdings"]) == (0, 0, 0)


async def test_memory_is_the_approximate_producers() -> None:
    rig = Rig(1)
    (a,) = rig.endpoints
    a.load = Load(block_size=16, blocks=100, at=0.0)
    made = await rig.ask(text(100))
    rig.cache.on_picked(made, a)
    assert ApproximateCacheRoom(rig.cache).produce(made, [a])[a] == CacheRoom(112, 1600)


async def test_a_burst_of_one_cold_prompt_goes_where_it_is_reused() -> None:
    """Events come when it is over: what is in flight has to be enough."""
    rig = Rig(8)
    engines = {endpoint: Engine(H100_8B) for endpoint in rig.endpoints}
    for endpoint in rig.endpoints:
        endpoint.load = Load(block_size=16, blocks=27_000, at=0.0)
    room, cost = ApproximateCacheRoom(rig.cache), ExpectedTtft()
    cost.clock = lambda: 0.0
    for name in range(30):
        made = await rig.ask(text(8192) + text(16, name + 2))
        made = with_signal(made, CacheRoom, room.produce(made, rig.endpoints))
        costs = [sum(row) for row in cost.bill(made, rig.endpoints)]
        endpoint = rig.endpoints[min(range(8), key=lambda i: (costs[i], (i - name) % 8))]
        rig.cache.on_picked(made, endpoint)
        cost.on_picked(made, endpoint)
        engines[endpoint].add(str(name), hash_chain(made.prompt, 16), prompt=8208, output=50, now=0.0)
    for engine in engines.values():
        now = 0.0
        while step := engine.step(now):
            now = step.ends_at
    hits = sum(engine.totals.prefix_hits for engine in engines.values())
    assert hits / (30 * 8208) >= 0.8
    assert not rig.reasons


async def test_of_a_prompt_in_many_small_blocks_the_first_are_looked_up() -> None:
    """An engine says how small its blocks are, and each block of a prompt costs a pick."""
    rig = Rig(1, max_prefix_tokens_to_match=10**6)
    (a,) = rig.endpoints
    prompt = text(200_000)
    first = ids_of(prompt)[:1]
    rig.say(a, stored(first, block_hashes=[1], token_ids=first, block_size=1, extra_keys=None))
    made = await rig.ask(prompt)
    assert made.signal(PrefixMatch)[a] == PrefixMatch(1, 1, 200_000)
    rig.cache.on_picked(made, a)
    assert rig.cache.statistics()["in_flight_blocks"] == 1 << 16


def test_parameters_without_meaning_are_refused() -> None:
    with pytest.raises(ValueError, match="max_event_blocks: 0, expected at least 1"):
        PrecisePrefixCache(max_event_blocks=0)


def test_configurations_of_llm_d_load() -> None:
    from epp.configuration.loader import load_text

    text_ = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: endpoint-notification-source
- type: precise-prefix-cache-producer
  parameters:
    tokenProcessorConfig: {blockSizeTokens: 64, hashSeed: "42"}
    indexerConfig: {kvBlockIndexConfig: {enableMetrics: true}}
    kvEventsConfig:
      topicFilter: "kv@"
      concurrency: 8
      discoverPods: true
      podDiscoveryConfig: {socketPort: 5556, replaySocketPort: 5559}
    speculativeIndexing: true
    speculativeTTL: 3s
- type: prefix-cache-scorer
  parameters: {prefixMatchInfoProducerName: precise-prefix-cache-producer}
- type: max-score-picker
dataLayer:
  sources:
  - pluginRef: endpoint-notification-source
    extractors:
    - pluginRef: precise-prefix-cache-producer
schedulingProfiles:
- name: default
  plugins:
  - pluginRef: prefix-cache-scorer
  - pluginRef: max-score-picker
"""
    pipeline = load_text(text_, clock=lambda: 0.0, random=random.Random(1))
    (precise,) = [each for each in pipeline.producers if isinstance(each, PrecisePrefixCache)]
    assert precise.kv_events_config.pod_discovery_config.socket_port == 5556
    assert precise.speculative_ttl.total_seconds() == 3
    older = text_.replace("precise-prefix-cache-producer\n  parameters", "precise-prefix-cache-scorer\n  parameters")
    older = (
        older.replace("dataLayer:\n", "").split("  sources:")[0]
        + "schedulingProfiles:"
        + older.split("schedulingProfiles:")[1]
    )
    pipeline = load_text(older, clock=lambda: 0.0, random=random.Random(1))
    (precise,) = [each for each in pipeline.producers if isinstance(each, PrecisePrefixCache)]
    assert precise.kv_events_config.topic_filter == "kv@"
    with pytest.raises(ConfigError, match="zmqEndpoint"):
        load_text(text_.replace("concurrency: 8", "zmqEndpoint: nonsense"), clock=lambda: 0.0, random=random.Random(1))


async def test_lmcaches_tiers_are_part_of_a_match() -> None:
    async with StandIn().running() as stand_in:
        rig = Rig(2, lmcache=Lmcache(stand_in.url, "sha256_cbor"))
        a, b = rig.endpoints
        a.node, b.node = "a", "b"
        b.load = Load(block_size=SIZE, blocks=1000)
        prompt = text(100)
        stand_in.store(ids_of(prompt)[:64], "a", "l2")
        rig.say(a, stored(ids_of(prompt)[:20]))
        assert rig.cache.tiers is not None
        await rig.cache.tiers.read()
        made = await rig.ask(prompt)
        assert made.signal(PrefixMatch) == {a: PrefixMatch(20, 5, 25, l1=44), b: PrefixMatch(0, 0, 25, l2=64)}
        assert rig.cache.statistics()["tier_chunks"] == 4
        cost = ExpectedTtft()
        made = with_signal(made, CacheRoom, dict.fromkeys(rig.endpoints, CacheRoom(0, 1_000_000)))
        near, far = (bill[cost.terms.index("own")] for bill in cost.bill(made, rig.endpoints))
        made = with_signal(made, PrefixMatch, {a: PrefixMatch(20, 5, 25), b: PrefixMatch(0, 0, 25)})
        nothing = [bill[cost.terms.index("own")] for bill in cost.bill(made, rig.endpoints)]
        assert near < nothing[0]
        assert far < nothing[1]
        rig.cache.tiers._coordinator.close()


async def test_tiers_count_also_where_events_are_not_received() -> None:
    async with StandIn().running() as stand_in:
        rig = Rig(2, lmcache=Lmcache(stand_in.url, "sha256_cbor"))
        a, b = rig.endpoints
        a.node = "a"
        stand_in.store(ids_of(text(100))[:64], "a")
        rig.say(b, stored(ids_of(text(8, 9))))
        rig.cache.kv_index.state_of(a).state = "lost"
        assert rig.cache.tiers is not None
        await rig.cache.tiers.read()
        matches = (await rig.ask(text(100))).signal(PrefixMatch)
        assert [(matches[each].tokens, matches[each].l1) for each in (a, b)] == [(0, 64), (0, 0)]
        rig.cache.tiers._coordinator.close()


async def test_what_lies_in_l2_is_prefetched_to_the_chosen_endpoint() -> None:
    async with StandIn().running() as stand_in:
        rig = Rig(2, lmcache=Lmcache(stand_in.url, "sha256_cbor", prefetch=True))
        rig.endpoints[1].node = "b"
        rig.endpoints[1].load = Load(waiting=1)
        stand_in.store(ids_of(text(100)), "l2")
        tiers = rig.cache.tiers
        assert tiers is not None
        async with beside(tiers.run(rig.degraded)):
            await until(lambda: tiers.reached)
            rig.cache.on_picked(await rig.ask(text(100)), rig.endpoints[1])
            await until(lambda: bool(stand_in.prefetches))
    assert [(asked["instance_id"], asked["token_ids"]) for asked in stand_in.prefetches] == [("b", ids_of(text(100)))]


def test_lmcache_is_configured_beside_the_events() -> None:
    plugin = "{type: precise-prefix-cache-producer, parameters: {lmcache: %s}}"
    config = f"apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins: [{plugin}]"
    lmcache = "{coordinator: 'http://c:9300', hashAlgorithm: sha256_cbor, maxChunks: 10, model: m, prefetch: true}"
    pipeline = load_text(config % lmcache, clock=lambda: 0.0, random=random.Random(), where="f")
    [precise] = [each for each in pipeline.plugins if isinstance(each, PrecisePrefixCache)]
    assert precise.lmcache == Lmcache("http://c:9300", "sha256_cbor", "m", 10, True)
    assert precise.tiers is not None
    with pytest.raises(ConfigError, match=r"hashAlgorithm"):
        load_text(config % "{hashAlgorithm: md5}", clock=lambda: 0.0, random=random.Random(), where="f")
    with pytest.raises(ConfigError, match=r"expected http://HOST:PORT, got 'c:9300'"):
        load_text(config % "{coordinator: 'c:9300'}", clock=lambda: 0.0, random=random.Random(), where="f")


async def test_pods_that_come_and_go_leave_nothing_behind() -> None:
    """A thousand pods, each of which said something, was sent something and left."""
    rig = Rig(1)
    cache = rig.cache
    tables = (cache.kv_index._kv_index, cache._pinned, cache._trust, cache._doubted, cache.approximate.shadows)
    for turn in range(1000):
        pod = Endpoint(
            f"pod-{turn}", f"10.1.{turn // 250}.{turn % 250}:8000", load=Load(block_size=4, blocks=100, at=0.0)
        )
        rig.endpoints = [pod]
        rig.cache.kv_index.state_of(pod).state = "live"
        rig.say(
            pod,
            stored(ids_of(text(20, turn)), lora_name=f"adapter-{turn}"),
            stored([1] * 8, parent_block_hash=7, medium="CPU"),
        )
        made = await rig.ask(text(20, turn))
        rig.cache.on_picked(made, pod)
        if turn % 2:
            rig.cache.on_finished(made, pod, OK)
        rig.cache.on_removed(pod)
        if not turn % 2:
            rig.cache.on_finished(made, pod, OK)
    kv_index = rig.cache.kv_index
    assert [len(table) for table in tables] == [1, 0, 0, 0, 0]
    assert (kv_index.adapters, kv_index.waiting, kv_index.budget.used) == ({}, 0, 0)
    assert all(len(index._slots) <= 2 for index in (*kv_index.indexes.values(), rig.cache._in_flight))
    assert (len(rig.cache._lingering), rig.cache.statistics()["holdings"]) == (0, 0)


async def test_a_peer_s_request_is_pinned_as_if_it_were_ours() -> None:
    here, there = Rig(), Rig()
    prompt = text(100)
    for rig in (here, there):
        rig.say(rig.endpoints[1], stored(ids_of(text(8, 2))))
        rig.say(rig.endpoints[0], stored(ids_of(text(8, 3))))
    made = await here.ask(prompt)
    here.cache.on_picked(made, here.endpoints[0])
    sent = Request(id="", model="m", tokens=made.tokens, elsewhere=True)
    there.cache.from_peer(sent, there.endpoints[0], here.cache.to_peers(made, here.endpoints[0]))
    assert await there.held(prompt) == await here.held(prompt) == [96, 0]
    there.cache.on_finished(sent, there.endpoints[0], Response(status=503))
    assert await there.held(prompt) == [0, 0]


async def test_of_a_peer_s_request_whose_tokens_are_not_known_the_approximate_part_is() -> None:
    here, there = Rig(), Rig()
    here.source.fails = there.source.fails = "late"
    prompt = text(1000)
    made = await here.ask(prompt)
    here.cache.on_picked(made, here.endpoints[0])
    sent = Request(id="", model="m", tokens=made.tokens, elsewhere=True)
    there.cache.from_peer(sent, there.endpoints[0], here.cache.to_peers(made, here.endpoints[0]))
    assert await there.held(prompt) == await here.held(prompt) != [0, 0]
