from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from epp.configuration.lifecycle import Lifecycle
from epp.plugin import Endpoint, Load
from epp.prefix.lmcache import coordinator as coordinator_module
from epp.prefix.lmcache import tiers as tiers_module
from epp.prefix.lmcache.coordinator import Away
from epp.prefix.lmcache.tiers import Lmcache, Tiers
from epp.prefix.precise import PrecisePrefixCache
from epp.testing import services
from tests.support.engines.coordinator import StandIn
from tests.support.process.waiting import beside, until

IDS = list(range(100))
BUSY = Load(waiting=1)
A, B, NOWHERE = (Endpoint(f"pod-{node}", "10.0.0.1:8000", load=BUSY, node=node) for node in ("a", "b", ""))


@pytest.fixture(autouse=True)
def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (coordinator_module, tiers_module):
        monkeypatch.setattr(module, "PAGE", 4)


@asynccontextmanager
async def tiers_of(**config: object) -> AsyncIterator[tuple[StandIn, Tiers]]:
    async with StandIn().running() as stand_in:
        made = Tiers(
            Lmcache(stand_in.url, "sha256_cbor", **config),  # type: ignore[arg-type]
            lambda: stand_in.now,
            interval=0.002,
        )
        try:
            yield stand_in, made
        finally:
            made._coordinator.close()


async def loads(tiers: Tiers, endpoint: Endpoint, held: int = 0, salt: str = "", length: int = 100) -> tuple[int, int]:
    return tiers.loads(tiers.held(await tiers.names(IDS, salt)), endpoint, held, length)


async def test_l1_is_the_nodes_and_l2_is_everybodys() -> None:
    async with tiers_of() as (stand_in, tiers):
        assert await tiers.names(IDS, "") == ()
        stand_in.store(IDS[:48], "a", "l2")
        await tiers.read()
        assert (tiers.chunk, tiers.reached) == (16, True)
        assert [await loads(tiers, endpoint) for endpoint in (A, B, NOWHERE)] == [(48, 0), (0, 48), (0, 48)]
        assert await loads(tiers, A, held=40) == (8, 0)
        assert await loads(tiers, A, salt="tenant") == (0, 0)


@pytest.mark.parametrize(("length", "loaded"), [(96, (32, 63)), (97, (32, 64)), (33, (32, 0)), (32, (31, 0))])
async def test_the_last_token_is_computed(length: int, loaded: tuple[int, int]) -> None:
    async with tiers_of() as (stand_in, tiers):
        stand_in.store(IDS[:32], "a")
        names = IDS[:length]
        stand_in.store(IDS[:96], "l2")
        del stand_in.rows[2:4]  # the first two once only, in L1
        await tiers.read()
        assert tiers.loads(tiers.held(await tiers.names(names, "")), A, 0, length) == loaded


async def test_long_prompts_are_named_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    async with tiers_of() as (stand_in, tiers):
        stand_in.store(IDS, "a")
        await tiers.read()
        inline = await tiers.names(IDS, "salt")
        monkeypatch.setattr(tiers_module, "_INLINE", 10)
        assert await tiers.names(IDS, "salt") == inline


async def test_what_is_new_is_read_from_the_end() -> None:
    async with tiers_of() as (stand_in, tiers):
        stand_in.store(IDS[:96], "l2")
        await tiers.read()
        assert stand_in.offsets == [0, 4]
        stand_in.store(range(200, 296), "a")
        await tiers.read()
        assert stand_in.offsets == [0, 4, 6, 10]
        assert tiers.loads(tiers.held(await tiers.names(range(200, 296), "")), A, 0, 97) == (96, 0)


async def test_what_went_is_forgotten_when_all_is_read_again() -> None:
    async with tiers_of() as (stand_in, tiers):
        stand_in.store(IDS[:96], "l2")
        await tiers.read()
        stand_in.rows[1]["placements"] = []
        await tiers.read()
        assert await loads(tiers, A) == (0, 96)  # stale, which is allowed
        stand_in.now = 16.0
        await tiers.read()
        assert await loads(tiers, A) == (0, 16)
        del stand_in.rows[:]
        await tiers.read()  # fewer than before: read at once
        assert await loads(tiers, A) == (0, 0)


async def test_memory_is_bounded_and_what_is_left_out_is_reported() -> None:
    async with tiers_of(max_chunks=5) as (stand_in, tiers):
        stand_in.store(range(16 * 20), "l2")
        for _ in range(3):
            await tiers.read()
        assert len(tiers.directory) == 5
        assert tiers.statistics()["tier_chunks_left_out"] == 15


async def test_while_the_coordinator_is_away_nothing_is_held_and_it_is_reported_once() -> None:
    reported: list[str] = []
    async with tiers_of() as (stand_in, tiers):
        stand_in.store(IDS, "a")
        async with beside(tiers.run(lambda reason, detail: reported.append(f"{reason}: {detail}"))):
            await until(lambda: tiers.reached)
            stand_in.broken = "nonsense"
            await until(lambda: not tiers.reached)
            assert await tiers.names(IDS, "") == ()
            seen = len(stand_in.offsets)
            stand_in.broken = None
            await until(lambda: tiers.reached and len(stand_in.offsets) > seen)
            assert await loads(tiers, A) == (96, 0)
    assert len(reported) == 1
    assert reported[0].startswith("tiers-away: LMCache's coordinator at http://127.0.0.1:")


async def test_what_lies_in_l2_is_prefetched_where_others_wait() -> None:
    async with tiers_of(prefetch=True) as (stand_in, tiers):
        stand_in.store(IDS, "l2", model="the/model")
        async with beside(tiers.run(lambda reason, detail: None)):
            await until(lambda: tiers.reached)
            tiers.picked(B, 96, IDS, "s")
            tiers.picked(A, 0, IDS, "")
            tiers.picked(NOWHERE, 96, IDS, "")
            tiers.picked(Endpoint("pod-idle", "10.0.0.1:8000", node="b"), 96, IDS, "")
            await until(lambda: bool(stand_in.prefetches))
    [asked] = stand_in.prefetches
    assert asked == {
        "instance_id": "b",
        "model_name": "the/model",
        "world_size": 1,
        "token_ids": IDS,
        "cache_salt": "s",
    }


async def test_a_prefetch_for_nobody_knows_which_model_is_reported() -> None:
    reported: list[str] = []
    async with tiers_of(prefetch=True) as (stand_in, tiers):
        stand_in.store(IDS, "l2", model="the/model")
        stand_in.store(IDS, "l2", model="another/model")
        async with beside(tiers.run(lambda reason, detail: reported.append(f"{reason}: {detail}"))):
            await until(lambda: tiers.reached)
            tiers.picked(B, 96, IDS, "")
            await until(lambda: bool(reported))
    assert stand_in.prefetches == []
    assert reported == [
        "tier-request-failed: more than one model is in LMCache's directory: `model` has to say which is ours"
    ]


async def test_a_prefetch_is_asked_after_until_it_ended() -> None:
    """LMCache remembers each of them until then, and for ever if nobody asks."""
    async with tiers_of(prefetch=True) as (stand_in, tiers):
        stand_in.store(IDS, "l2", model="the/model")
        async with beside(tiers.run(lambda reason, detail: None)):
            await until(lambda: tiers.reached)
            for _ in range(2):
                tiers.picked(B, 96, IDS, "")
            await until(lambda: tiers.statistics()["tier_prefetched_chunks"] == 12)
            assert (tiers.statistics()["tier_prefetches"], stand_in.jobs) == (2, {})
            tiers.picked(B, 96, IDS, "")
            await until(lambda: tiers.statistics()["tier_prefetches"] == 3)
            stand_in.jobs.clear()  # its server was started anew
            await until(lambda: not tiers._jobs)
            assert tiers.reached


async def test_a_prompt_is_looked_up_where_the_directory_is_larger_than_we_remember() -> None:
    async with tiers_of(max_chunks=48) as (stand_in, tiers):
        stand_in.store(range(1000, 1000 + 16 * 50), "l2")
        stand_in.store(IDS, "a", "l2", salt="s")
        async with beside(tiers.run(lambda reason, detail: None)):
            await until(lambda: tiers.reached)
            assert await loads(tiers, A, salt="s") == (0, 0)
            tiers.picked(B, 0, IDS, "s")
            await until(lambda: tiers.looked_up == 1)
            assert await loads(tiers, A, salt="s") == (96, 0)
            assert await loads(tiers, A) == (0, 0)
            assert len(tiers.directory) == 48 + 6


async def test_prefetching_is_off_by_default() -> None:
    async with tiers_of() as (stand_in, tiers):
        tiers.picked(B, 96, IDS, "")
        assert not tiers._wanted
        assert stand_in.prefetches == []


async def test_a_page_that_makes_no_sense_is_as_none() -> None:
    async with tiers_of() as (stand_in, tiers):
        stand_in.store(IDS, "a")
        stand_in.rows[0]["key"]["chunk_hash_hex"] = "zz"
        with pytest.raises(Away):
            await tiers.read()


async def test_a_reading_that_breaks_off_changes_nothing_but_that_nothing_is_held() -> None:
    async with tiers_of() as (stand_in, tiers):
        stand_in.store(IDS, "a")
        await tiers.read()
        assert await loads(tiers, A) == (96, 0)
        stand_in.rows[5]["key"]["chunk_hash_hex"] = "zz"
        stand_in.now = 1000.0
        with pytest.raises(Away):
            await tiers.read()
        assert await loads(tiers, A) == (96, 0)


async def test_a_reload_follows_the_new_coordinator_and_leaves_the_old() -> None:
    errors: list[Exception] = []
    lifecycle = Lifecycle(services(), {}, lambda plugin, error: errors.append(error))
    async with StandIn().running() as one, StandIn().running() as other, beside(lifecycle.run()):
        caches = [PrecisePrefixCache(lmcache=Lmcache(each.url, "sha256_cbor")) for each in (one, other)]
        first, second = (cache.tiers for cache in caches)
        assert first is not None
        assert second is not None
        lifecycle.use(caches[:1])
        await until(lambda: first.reached)
        lifecycle.use(caches[1:])
        await until(lambda: second.reached and not first.reached)
        lifecycle.use([])
        await until(lambda: not second.reached)
    assert errors == []
    assert not first.reached


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"coordinator": "there"}, "expected http://HOST:PORT"),
        ({"max_chunks": 0}, "maxChunks: 0, expected at least 1"),
        ({"prefetch": True}, "expected with a coordinator only"),
    ],
)
def test_a_wrong_configuration_is_refused(config: dict[str, object], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        Lmcache(**config)  # type: ignore[arg-type]
