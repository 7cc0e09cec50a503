import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from unittest.mock import AsyncMock

import aiohttp
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from epp.pool.models import ModelReader, models_of
from epp.pool.scrape import Visit
from epp.pool.store import Endpoint, Pool, PoolState, Rewrite, ServedModel, Target
from tests.support.process.waiting import until
from tests.support.process.web_server import serving
from tooling.simulator.server import SimulatedPod


def pool_of(*addresses: str, rewrites: tuple[Rewrite, ...] = ()) -> Pool:
    pool = Pool("p", random=random.Random(1))
    endpoints = tuple(Endpoint(f"e{n}", address) for n, address in enumerate(addresses))
    pool.apply(PoolState("p", endpoints=endpoints, rewrites=rewrites))
    return pool


def reader_of(pool: Pool, interval: float = 0.01) -> ModelReader:
    return ModelReader(pool, random.Random(1), lambda names: None, interval=interval)


@asynccontextmanager
async def reading(pool: Pool) -> AsyncIterator[ModelReader]:
    reader = reader_of(pool)
    async with asyncio.TaskGroup() as group:
        task = group.create_task(reader.run())
        yield reader
        task.cancel()


def listed(reader: ModelReader, endpoints: Sequence[Endpoint]) -> dict[str, Any]:
    answer = reader.answer(endpoints)
    assert answer is not None
    found = json.loads(answer)
    assert found["object"] == "list"
    return {entry["id"]: entry for entry in found["data"]}


def served(*ids: str) -> tuple[ServedModel, ...]:
    return tuple(
        ServedModel(id, "", json.dumps({"id": id, "object": "model", "max_model_len": 9}).encode()) for id in ids
    )


async def test_models_and_adapters_of_all_endpoints_are_one_list() -> None:
    async with SimulatedPod(lora=("poet",)) as one, SimulatedPod(lora=("cook",)) as two:
        pool = pool_of(*(pod.url.removeprefix("http://") for pod in (one, two)))
        async with reading(pool) as reader:
            await until(lambda: all(endpoint.models for endpoint in pool.endpoints))
            found = listed(reader, pool.endpoints)
            assert found.keys() == {"sim", "poet", "cook"}
            assert found["poet"]["parent"] == "sim"
            assert {each.id for each in pool.endpoints[0].models or () if each.parent} == {"poet"}
            assert listed(reader, pool.endpoints[1:]).keys() == {"sim", "cook"}
            async with aiohttp.ClientSession(one.url) as client:
                async with client.get("/v1/models") as response:
                    own = {entry["id"]: entry.keys() for entry in (await response.json())["data"]}
            assert own == {id: found[id].keys() for id in ("sim", "poet")}


async def test_ranks_behind_one_port_have_the_models_of_their_server() -> None:
    name = "one"
    connections = set()

    async def models(request: web.Request) -> web.Response:
        assert request.transport is not None
        connections.add(request.transport.get_extra_info("peername"))
        return web.json_response({"data": [{"id": name}]})

    def known(endpoint: Endpoint) -> Sequence[str]:
        return [model.id for model in endpoint.models or ()]

    app = web.Application()
    app.router.add_get("/v1/models", models)
    async with serving(app) as address:
        pool = Pool("p", random=random.Random(1))
        ranks = [Endpoint(f"e-rank-{rank}", address, rank=rank) for rank in range(3)]
        pool.replace(ranks)
        async with reading(pool) as reader:
            await until(lambda: known(ranks[2]) == ["one"])
            name = "two"
            await until(lambda: known(ranks[2]) == ["two"])
            assert [known(rank) for rank in ranks] == [["two"]] * 3
            assert listed(reader, ranks[1:]).keys() == {"two"}
    assert len(connections) == 1


async def test_an_endpoint_that_wants_a_key_is_not_known_and_one_that_leaves_is_forgotten() -> None:
    async with SimulatedPod() as pod:
        address = pod.url.removeprefix("http://")
        pool = pool_of(address)
        async with reading(pool) as reader:
            await until(lambda: reader.answer(pool.endpoints) is not None)
            pool.replace([])
            assert reader.answer(pool.endpoints) is None
            pool.replace([Endpoint("again", address)])
            assert reader.answer(pool.endpoints) is None
            await until(lambda: reader.answer(pool.endpoints) is not None)
            async with aiohttp.ClientSession(pod.url) as client:
                await client.post("/admin/faults", json={"status": 401})
            await until(lambda: pool.endpoints[0].models is None)
            assert reader.answer(pool.endpoints) is None


async def test_endpoints_without_a_common_base_model_are_told_of_until_they_have_one() -> None:
    told: list[Sequence[str] | None] = []
    async with SimulatedPod(lora=("poet",)) as one, SimulatedPod() as two, SimulatedPod(model="other") as three:
        addresses = [pod.url.removeprefix("http://") for pod in (one, two, three)]
        pool = pool_of(*addresses[:2])
        async with asyncio.TaskGroup() as group:
            reader = ModelReader(pool, random.Random(1), told.append, interval=0.01)
            task = group.create_task(reader.run())
            await until(lambda: all(endpoint.models for endpoint in pool.endpoints))
            assert told == [], "an adapter makes no other base model"
            pool.replace([*pool.endpoints, Endpoint("e2", addresses[2])])
            await until(lambda: bool(told))
            assert told == [["other", "sim"]]
            pool.replace(pool.endpoints[:2])
            await until(lambda: len(told) > 1)
            assert told[1:] == [None]
            task.cancel()


@given(st.lists(st.tuples(st.integers(0, 3), st.sets(st.sampled_from("abc")))))
def test_whether_they_have_one_is_said_whatever_changes(changes: list[tuple[int, set[str]]]) -> None:
    """No names: it leaves, or its models are not known."""
    told: list[Sequence[str] | None] = [None]
    reader = ModelReader(pool_of(), random.Random(1), told.append)
    endpoints = [Endpoint(f"e{n}", f"10.0.0.{n}:80") for n in range(4)]
    bases: dict[int, set[str]] = {}
    for number, names in changes:
        bases[number] = names
        reader._serves(endpoints[number], served(*names))
        reader._changed()
        known = [each for each in bases.values() if each]
        differ = bool(known) and not set.intersection(*known)
        assert (told[-1] is not None) == differ
    for endpoint in endpoints:
        reader._left(endpoint)
    assert (told[-1], reader._bases, reader._served) == (None, {}, {})


async def test_ranks_behind_one_port_change_together(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Sequence[str] | None] = []
    pool = Pool("p", random=random.Random(1))
    pool.replace([Endpoint(f"e-rank-{rank}", "10.0.0.1:80", rank=rank) for rank in (0, 1)])
    reader = ModelReader(pool, random.Random(1), told.append)
    visit = Visit("10.0.0.1:80", "/v1/models", 9999)
    for model in ("m", "n"):
        page = json.dumps({"data": [{"id": model}]}).encode()
        monkeypatch.setattr(visit, "page", AsyncMock(return_value=page))
        assert await reader._read(pool.endpoints[0], visit)
    assert [[model.id for model in endpoint.models or ()] for endpoint in pool.endpoints] == [["n"], ["n"]]
    assert told == []


def test_nothing_is_answered_while_nothing_is_known() -> None:
    pool = pool_of("10.0.0.1:8000", "10.0.0.2:8000", rewrites=(Rewrite(("alias",), (Target("m"),)),))
    reader = reader_of(pool)
    assert reader.answer(pool.endpoints) is None
    pool.endpoints[0].models = served("m")
    assert listed(reader_of(pool), pool.endpoints).keys() == {"m", "alias"}


def test_who_may_use_some_models_is_told_of_these() -> None:
    pool = pool_of("10.0.0.1:8000", rewrites=(Rewrite(("alias",), (Target("m"),)),))
    pool.endpoints[0].models = served("m", "n")
    reader = reader_of(pool)
    for may in ({"m"}, {"alias"}, {"n", "m"}, set[str]()):
        body = reader.answer(pool.endpoints, may.__contains__)
        assert body is not None
        assert {one["id"] for one in json.loads(body)["data"]} == may
    assert listed(reader, pool.endpoints).keys() == {"m", "n", "alias"}


def test_rewritten_names_are_listed_as_what_is_asked_for_instead() -> None:
    rules = (
        Rewrite(("alias", "m"), (Target("m", 3), Target("n", 1))),
        Rewrite(("elsewhere",), (Target("nobody-serves-it"),)),
        Rewrite((), (Target("m"),)),
    )
    pool = pool_of("10.0.0.1:8000", rewrites=rules)
    pool.endpoints[0].models = served("m")
    reader = reader_of(pool)
    found = listed(reader, pool.endpoints)
    assert found.keys() == {"m", "alias", "elsewhere"}
    assert found["alias"] == {"id": "alias", "object": "model", "max_model_len": 9, "root": "m", "parent": None}
    assert found["elsewhere"]["root"] == "nobody-serves-it"
    assert found["m"] == {"id": "m", "object": "model", "max_model_len": 9}
    pool.apply(PoolState("p", endpoints=pool.endpoints))
    assert listed(reader, pool.endpoints).keys() == {"m"}, "rules that are gone are not listed any more"


def test_what_is_no_list_of_models_is_not_taken() -> None:
    for page in (b"", b"[]", b"{", b'{"data": 1}', b"\xff"):
        assert models_of(page) is None
    assert models_of(b'{"data": []}') == ()
    entries: list[object] = [{"id": "m"}, {"id": 3}, {"id": ""}, {"id": "x" * 2000}, None, {"id": "a", "parent": "m"}]
    found = models_of(json.dumps({"data": entries}).encode()) or ()
    assert [(model.id, model.parent) for model in found] == [("m", ""), ("a", "m")]
