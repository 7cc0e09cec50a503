"""Names of chunks at a coordinator that answers as LMCache 0.5.6 does. A real server of another seed: tests/engine."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

from epp.prefix.lmcache.chunk_keys import chunks_of
from tests.support.process import web_server
from tooling.doctor.http import HttpClient
from tooling.doctor.names import Chunk, examine_names, findings_of_chunk

PROMPT = list(range(100, 164))
OTHER = list(range(500, 564))


class Directory:
    """A server's /config, and the coordinator's directory of its L1: (hash, tokens), oldest first."""

    def __init__(self, algorithm: str, chunks: Sequence[tuple[str, Sequence[int]]]) -> None:
        self.algorithm = algorithm
        self.chunks = list(chunks)
        self.asked: list[dict[str, str]] = []

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        app = web.Application()
        app.router.add_get("/config", self._config)
        app.router.add_get("/directory/keys", self._keys)
        app.router.add_post("/directory/lookup", self._lookup)
        async with web_server.serving(app) as address:
            yield f"http://{address}"

    async def _config(self, request: web.Request) -> web.Response:
        return web.json_response({"mp": {"hash_algorithm": self.algorithm}})

    async def _keys(self, request: web.Request) -> web.Response:
        self.asked.append(dict(request.query))
        offset, limit = int(request.query.get("offset", 0)), int(request.query["limit"])
        rows = [{"key": {"chunk_hash_hex": name}, "num_tokens": len(tokens)} for name, tokens in self.chunks]
        return web.json_response({"total": len(rows), "keys": rows[offset : offset + limit]})

    async def _lookup(self, request: web.Request) -> web.Response:
        wanted = [key["chunk_hash_hex"] for key in (await request.json())["keys"]]
        known = dict(self.chunks)
        results = [{"key": {"chunk_hash_hex": name}, "token_ids": list(known[name])} for name in wanted]
        return web.json_response({"chunks": len(results), "results": results})


def name(tokens: Sequence[int], algorithm: Any = "sha256_cbor") -> str:
    return f"{chunks_of(tokens, len(tokens), algorithm)[0]:064x}"


async def checks(directory: Directory, *firsts: Sequence[int], seconds: float = 5.0) -> list[str]:
    async with directory.serving() as url, HttpClient(5.0) as ask:
        return [each.check for each in await examine_names(url, url, "node-a", ask, firsts, seconds)]


@pytest.mark.parametrize("algorithm", ["sha256_cbor", "blake3"])
def test_the_name_that_its_algorithm_gives_is_well(algorithm: str) -> None:
    assert findings_of_chunk("http://s", algorithm, Chunk(PROMPT, int(name(PROMPT, algorithm), 16))) == []


def test_another_name_is_reported_with_what_fixes_it() -> None:
    (finding,) = findings_of_chunk("http://s", "sha256_cbor", Chunk(PROMPT, int(name(PROMPT, "blake3"), 16)))
    assert (finding.subject, finding.check, finding.level) == ("http://s", "lmcache-names", "problem")
    assert "PYTHONHASHSEED" in finding.fix
    assert "--hash-algorithm blake3" in finding.fix


async def test_the_chunk_that_a_prompt_begins_with_is_found_among_others() -> None:
    directory = Directory("sha256_cbor", [("ff" * 32, OTHER), (name(PROMPT), PROMPT)])
    assert await checks(directory, PROMPT[:32]) == []
    directory.chunks[1] = ("ab" * 32, PROMPT)
    assert await checks(directory, PROMPT[:32]) == ["lmcache-names"]
    assert await checks(directory, [*PROMPT, 1, 2, 3]) == ["lmcache-names"]  # a block of several chunks
    assert {(each["tier"], each["instance_id"]) for each in directory.asked} == {("l1", "node-a")}


async def test_only_the_newest_chunks_are_read() -> None:
    many = [(f"{number:064x}", [number]) for number in range(500)]
    directory = Directory("sha256_cbor", [*many, ("ab" * 32, PROMPT)])
    assert await checks(directory, PROMPT) == ["lmcache-names"]
    assert directory.asked[-1]["offset"] == "301"


@pytest.mark.parametrize(
    ("algorithm", "chunks"),
    [
        ("sha256_cbor", [("ff" * 32, OTHER)]),  # none of the prompts has come there
        ("sha256_cbor", [("ff" * 32, [])]),  # engine_driven: no tokens are known
        ("sha256_cbor", [("no hex", PROMPT)]),
        ("sha256", [("ff" * 32, PROMPT)]),  # told by its configuration already
    ],
)
async def test_what_cannot_be_reported_is_not_reported(algorithm: str, chunks: Any) -> None:
    assert await checks(Directory(algorithm, chunks), PROMPT[:32], seconds=0.2) == []


async def test_without_a_prompt_and_without_answers_nothing_is_reported() -> None:
    assert await checks(Directory("sha256_cbor", [("ff" * 32, PROMPT)])) == []
    async with HttpClient(1.0) as ask:
        assert await examine_names("http://127.0.0.1:1", "http://127.0.0.1:1", "a", ask, [PROMPT], 1.0) == []
