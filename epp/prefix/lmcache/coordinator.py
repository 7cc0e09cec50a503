"""LMCache's coordinator over HTTP: what its directory says, page by page. Version 0.5.6.

Its answers are read as untrusted: bounded in size, and what makes no sense costs the page it stands on.
"""

import asyncio
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Final
from urllib.parse import quote, urlsplit

import msgspec

from epp.pool.http import BadAnswer, Kept, TooLarge
from epp.prefix.lmcache.chunk_keys import low, salted
from epp.prefix.lmcache.directory import L2, Directory

PAGE: Final = 1000
"""Keys asked for at once, where a page of them is not too large: about half a megabyte, a few milliseconds to read. A
key that many nodes hold has a row of kilobytes."""
_LEAST: Final = 20
"""Keys asked for at once at least, and returned at once where there are more."""
_LARGEST: Final = 2 << 20
"""Bytes of an answer."""


class Away(Exception):
    """The coordinator gave no good answer. The text says why. `large`: it was too large."""

    def __init__(self, why: str, *, large: bool = False) -> None:
        super().__init__(why)
        self.large = large


_Count = Annotated[int, msgspec.Meta(ge=0, le=1 << 53)]
_Name = Annotated[str, msgspec.Meta(max_length=1024)]


class _Key(msgspec.Struct, gc=False):
    chunk_hash_hex: _Name
    model_name: _Name = ""
    cache_salt: str = ""


class _Placement(msgspec.Struct, gc=False):
    tier: str
    instance_id: _Name = ""
    shared: bool = False


class _Row(msgspec.Struct, gc=False):
    key: _Key
    placements: list[_Placement] = []
    num_tokens: _Count = 0


class Rows(msgspec.Struct, gc=False):
    """Some of the directory's keys."""

    keys: list[_Row]

    @property
    def chunk(self) -> int:
        """Tokens of a chunk; 0 where the page does not say."""
        return max((row.num_tokens for row in self.keys), default=0)

    @property
    def models(self) -> set[str]:
        return {row.key.model_name for row in self.keys}

    def chunks(self, directory: Directory, model: str) -> Iterator[tuple[int, int]]:
        """(name, mask) for `directory`; only of `model`, unless that is empty. Raises Away.

        L2 that is not shared can be loaded by its instance alone, so it counts as nothing here.
        """
        for key, placements in ((row.key, row.placements) for row in self.keys):
            if model and key.model_name != model:
                continue
            mask = 0
            for placement in placements:
                if placement.tier == "l1":
                    mask |= directory.bit(placement.instance_id)
                elif placement.tier == "l2" and placement.shared:
                    mask |= L2
            if mask:
                try:
                    name = bytes.fromhex(key.chunk_hash_hex)
                except ValueError as error:
                    raise Away(f"a hash that is not hex: {error}") from None
                yield salted(low(name), key.cache_salt), mask


class Page(Rows, gc=False):
    """Of all keys, in the order in which they came into the directory."""

    total: _Count


class _Found(msgspec.Struct, gc=False):
    results: list[_Row]


class _Job(msgspec.Struct, gc=False):
    request_id: _Name = ""
    status: str = ""
    found_keys: _Count = 0


_JOB: Final = msgspec.json.Decoder(_Job)
_PAGE: Final = msgspec.json.Decoder(Page)
_FOUND: Final = msgspec.json.Decoder(_Found)
_FAULTS: Final = (BadAnswer, OSError, TimeoutError, msgspec.MsgspecError, ValueError, RecursionError)


class Coordinator:
    """One coordinator at `url` (`http://host:port`); `timeout` seconds an answer."""

    def __init__(self, url: str, timeout: float = 5.0) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname or parts.path not in ("", "/") or parts.query:
            raise ValueError(f"expected http://HOST:PORT, got {url!r}")
        self._head = f"Host: {parts.netloc}\r\nAccept: application/json\r\n"
        self._timeout = timeout
        self._page = PAGE
        self._server = Kept(parts.hostname, parts.port or 80, _LARGEST)
        self._turn = asyncio.Lock()

    async def keys(self, offset: int) -> Page:
        """Some keys, from that place on. Raises Away."""
        while True:
            try:
                page: Page = await self._ask(f"GET /directory/keys?offset={offset}&limit={self._page}", b"", _PAGE)
                count = len(page.keys)
                if count > self._page or (count < min(_LEAST, self._page) and offset + count < page.total):
                    raise Away(f"{count} keys of {page.total} from {offset} on, where {self._page} were asked for")
                return page
            except Away as error:
                if not error.large or self._page <= _LEAST:
                    raise
                self._page //= 2

    async def find(self, model: str, tokens: Sequence[int], salt: str) -> Rows:
        """The keys of a prompt's chunks. Raises Away."""
        what = {"model_name": model, "world_size": 1, "token_ids": list(tokens), "cache_salt": salt}
        found: _Found = await self._ask("POST /directory/lookup", msgspec.json.encode(what), _FOUND)
        return Rows(found.results)

    async def prefetch(self, instance: str, model: str, tokens: Sequence[int], salt: str) -> str:
        """Have an instance load into its L1 what L2 holds of a prompt. Raises Away.

        Returns the name of the job, for `prefetched`; "" where the prompt has no full chunk.
        """
        what = {"instance_id": instance, "model_name": model, "world_size": 1, "token_ids": list(tokens)}
        body = msgspec.json.encode({**what, "cache_salt": salt})
        job: _Job = await self._ask("POST /cache/prefetches", body, _JOB)
        return job.request_id

    async def prefetched(self, instance: str, job: str) -> int | None:
        """Chunks that a prefetch loaded; None while it is at it. Raises Away, also where the job is unknown.

        An instance remembers each job until it was asked for after its end.
        """
        done: _Job = await self._ask(f"GET /cache/prefetches/{quote(instance, '')}/{quote(job, '')}", b"", _JOB)
        return done.found_keys if done.status == "completed" else None

    def close(self) -> None:
        self._server.close()

    async def _ask(self, what: str, body: bytes, decoder: "msgspec.json.Decoder[Any]") -> Any:
        about = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        message = f"{what} HTTP/1.1\r\n{self._head}{about}\r\n".encode() + body
        try:
            async with self._turn, asyncio.timeout(self._timeout):
                return decoder.decode(await self._server.exchange(message))
        except _FAULTS as error:
            why = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            raise Away(why, large=isinstance(error, TooLarge)) from None
