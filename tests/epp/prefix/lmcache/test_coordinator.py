import asyncio
import json
import socket

import pytest

from epp.prefix.lmcache.chunk_keys import chunks_of, salted
from epp.prefix.lmcache.coordinator import Away, Coordinator
from epp.prefix.lmcache.directory import L2, Directory
from tests.support.engines.coordinator import StandIn

IDS = list(range(64))
NAMES = chunks_of(IDS, 16, "sha256_cbor")


async def test_a_page_says_who_holds_what() -> None:
    async with StandIn().running() as stand_in:
        stand_in.store(IDS[:16], "a", "b", "l2")
        stand_in.store(IDS[:16], "l2", salt="tenant")
        stand_in.store(IDS[:16], "private-l2", model="other")
        coordinator, directory = Coordinator(stand_in.url), Directory(10)
        page = await coordinator.keys(0)
        coordinator.close()
    assert (page.total, page.chunk, page.models) == (3, 16, {"m", "other"})
    a, b = directory.bit("a"), directory.bit("b")
    assert list(page.chunks(directory, "")) == [(NAMES[0], a | b | L2), (salted(NAMES[0], "tenant"), L2)]
    assert list(page.chunks(directory, "other")) == []


async def test_a_connection_that_was_closed_is_made_anew() -> None:
    async with StandIn().running() as stand_in:
        coordinator = Coordinator(stand_in.url)
        await coordinator.keys(0)
        coordinator.close()
        stand_in.store(IDS, "a")
        assert (await coordinator.keys(2)).total == 4
        coordinator.close()


def row(**fields: object) -> str:
    """A page of one key, with these fields beside or instead of its own."""
    key = {"chunk_hash_hex": "00", "model_name": "m"}
    return json.dumps({"total": 1, "keys": [{"key": key, "placements": [], "num_tokens": 16} | fields]})


@pytest.mark.parametrize(
    "page",
    [
        "",
        "[]",
        "{}",
        '{"total": "x", "keys": []}',
        '{"total": 1, "keys": [{"key": {}}]}',
        '{"total": -1, "keys": []}',
        '{"total": 1e300, "keys": []}',
        f'{{"total": {10**400}, "keys": []}}',
        '{"total": 1, "keys": [], "more": %s}' % ("[" * 100_000),
        '{"total": 0, "keys": []}' + " " * (2 << 20),
        row(num_tokens=-16),
        row(num_tokens=10**30),
        row(key={"chunk_hash_hex": "00", "model_name": "m" * 5000}),
        row(placements=[{"tier": "l1", "instance_id": "n" * 5000}]),
        json.dumps({"total": 2000, "keys": [json.loads(row())["keys"][0]] * 1001}),
        json.dumps({"total": 10**9, "keys": [json.loads(row())["keys"][0]]}),
    ],
    ids=lambda page: page[:60],
)
async def test_an_answer_that_makes_no_sense_is_none(page: str) -> None:
    async with StandIn().running() as stand_in:
        stand_in.broken = page
        coordinator = Coordinator(stand_in.url)
        with pytest.raises(Away):
            await coordinator.keys(0)
        coordinator.close()


async def test_hashes_that_are_none_cost_their_page() -> None:
    async with StandIn().running() as stand_in:
        stand_in.store(IDS, "a")
        stand_in.rows[1]["key"]["chunk_hash_hex"] = "not hex"
        coordinator = Coordinator(stand_in.url)
        with pytest.raises(Away, match="hex"):
            list((await coordinator.keys(0)).chunks(Directory(10), ""))
        coordinator.close()


async def test_nobody_there_and_nobody_who_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        coordinator = Coordinator(f"http://127.0.0.1:{port}", timeout=0.05)
        with pytest.raises(Away, match="TimeoutError"):
            await coordinator.keys(0)
    with pytest.raises(Away, match="Connect"):
        await coordinator.keys(0)
    coordinator.close()


async def test_a_page_that_is_too_large_is_asked_for_in_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    async with StandIn().running() as stand_in:
        stand_in.store(range(16 * 100), *(f"node-{number}" for number in range(10)))
        monkeypatch.setattr("epp.prefix.lmcache.coordinator._LARGEST", 60_000)
        coordinator = Coordinator(stand_in.url)
        page = await coordinator.keys(0)
        assert (page.total, 20 <= len(page.keys) < 100) == (100, True)
        coordinator.close()
        monkeypatch.setattr("epp.prefix.lmcache.coordinator._LARGEST", 1000)
        coordinator = Coordinator(stand_in.url)
        with pytest.raises(Away, match="a body of more than 1000 bytes"):
            await coordinator.keys(0)
        coordinator.close()


async def test_requests_take_turns() -> None:
    async with StandIn().running() as stand_in:
        coordinator = Coordinator(stand_in.url)
        await asyncio.gather(*(coordinator.keys(offset) for offset in range(5)))
        coordinator.close()
        assert sorted(stand_in.offsets) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("url", ["", "coordinator:9300", "https://c:9300", "http://", "http://c:9300/x", "http://c?x"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="expected http://HOST:PORT"):
        Coordinator(url)
