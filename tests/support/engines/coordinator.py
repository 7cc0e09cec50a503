"""LMCache's coordinator as far as the picker asks it, over a real socket, with a directory that a test writes.

Shapes are those of LMCache 0.5.6; the real one is in tests/engine.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from epp.prefix.lmcache.chunk_keys import chunks_of


class StandIn:
    """Rows are in the order in which keys came, as there."""

    def __init__(self, chunk: int = 16) -> None:
        self.chunk = chunk
        self.rows: list[dict[str, Any]] = []
        self.offsets: list[int] = []
        """Of the pages that were asked for."""
        self.prefetches: list[dict[str, Any]] = []
        self.jobs: dict[str, int] = {}
        """Of prefetches that nobody saw the end of: how often they are still `pending`."""
        self.broken: str | None = None
        """Answered instead of a page."""
        self.url = ""
        self.now = 0.0
        """Of a clock that stands still, for whoever mirrors it."""

    def store(self, ids: Sequence[int], *tiers: str, salt: str = "", model: str = "m") -> None:
        """All full chunks of `ids` are in each of `tiers`: `l2`, `private-l2`, or an instance's name for its L1."""
        placements = [
            {"tier": tier[-2:], "instance_id": "writer", "backend": "resp", "shared": tier == "l2"}
            if tier.endswith("l2")
            else {"tier": "l1", "instance_id": tier, "backend": "dram", "shared": False}
            for tier in tiers
        ]
        for name in chunks_of(ids, self.chunk, "sha256_cbor"):
            key = {"chunk_hash_hex": f"{name:064x}", "model_name": model, "kv_rank": 1, "cache_salt": salt}
            self.rows.append({"key": key, "placements": placements, "num_tokens": self.chunk, "access_count": 0})

    @asynccontextmanager
    async def running(self) -> AsyncIterator["StandIn"]:
        app = web.Application()
        app.add_routes(
            [
                web.get("/directory/keys", self._keys),
                web.post("/directory/lookup", self._lookup),
                web.post("/cache/prefetches", self._prefetch),
                web.get("/cache/prefetches/{instance}/{job}", self._progress),
            ]
        )
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _keys(self, request: web.Request) -> web.Response:
        if self.broken is not None:
            return web.Response(text=self.broken)
        offset, limit = int(request.query["offset"]), int(request.query["limit"])
        self.offsets.append(offset)
        return web.json_response({"total": len(self.rows), "keys": self.rows[offset : offset + limit]})

    async def _lookup(self, request: web.Request) -> web.Response:
        asked = await request.json()
        keys = [
            {"chunk_hash_hex": f"{name:064x}", "model_name": asked["model_name"], "cache_salt": asked["cache_salt"]}
            for name in chunks_of(asked["token_ids"], self.chunk, "sha256_cbor")
        ]
        known = {(row["key"]["chunk_hash_hex"], row["key"]["cache_salt"]): row["placements"] for row in self.rows}
        results = [
            {"key": key, "placements": known.get((key["chunk_hash_hex"], key["cache_salt"]), []), "token_ids": []}
            for key in keys
        ]
        return web.json_response({"chunks": len(keys), "results": results})

    async def _prefetch(self, request: web.Request) -> web.Response:
        self.prefetches.append(await request.json())
        job = str(len(self.prefetches))
        self.jobs[job] = 2
        return web.json_response({"instance_id": "", "request_id": job, "chunks": 1, "status": "submitted"})

    async def _progress(self, request: web.Request) -> web.Response:
        job = request.match_info["job"]
        if job not in self.jobs:
            raise web.HTTPNotFound
        if self.jobs[job]:
            self.jobs[job] -= 1
            return web.json_response({"request_id": job, "status": "pending"})
        del self.jobs[job]
        return web.json_response({"request_id": job, "status": "completed", "found_keys": 6, "total_keys": 6})
