"""What models the endpoints of a pool serve: each endpoint's `/v1/models`, read beside requests, and one list of all.

Engines say it in OpenAI's form; vLLM names the base model of a LoRA adapter as its `parent`. Where an endpoint does not
answer (it wants a key, or has no such path) its models are not known.
"""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, Final

import msgspec

from epp.errors import UNREADABLE
from epp.parsing.body import MAX_MODEL
from epp.pool.http import BadAnswer
from epp.pool.rounds import Rounds
from epp.pool.scrape import Visit
from epp.pool.store import Endpoint, Pool, ServedModel

_LARGEST: Final = 256 * 1024
"""Bytes of an endpoint's list: some five hundred models. A longer one is not read."""
_AGAIN: Final = 60.0
"""Seconds after which an endpoint is asked again that has no such list."""
_OWNER: Final = "warmpath"


class _Entry(msgspec.Struct):
    id: str
    parent: str | None = None


class _List(msgspec.Struct):
    data: list[msgspec.Raw]


_LIST: Final = msgspec.json.Decoder(_List)
_ENTRY: Final = msgspec.json.Decoder(_Entry)


def models_of(page: bytes) -> tuple[ServedModel, ...] | None:
    """The models of an endpoint's answer; None if it is no list of them. An entry without a name is left out."""
    try:
        entries = _LIST.decode(page).data
    except UNREADABLE:
        return None
    return tuple(_entries(entries))


def _entries(entries: Sequence[msgspec.Raw]) -> Iterator[ServedModel]:
    for raw in entries:
        try:
            entry = _ENTRY.decode(raw)
        except UNREADABLE:
            continue
        if 0 < len(entry.id) <= MAX_MODEL:
            yield ServedModel(entry.id, entry.parent or "", bytes(raw))


class ModelReader:
    """Keeps `Endpoint.models` of a pool's endpoints fresh, and makes one list of them.

    `interval` and `timeout` (of one reading, connecting included) are seconds. At most `concurrency` readings run at
    once. An endpoint that cannot be reached keeps the models it had. `differ` hears the models of a pool whose
    endpoints have no base model in common, and None when they have one again.
    """

    def __init__(
        self,
        pool: Pool,
        random: Random,
        differ: Callable[[Sequence[str] | None], None],
        *,
        interval: float = 10.0,
        timeout: float = 2.0,
        concurrency: int = 16,
    ) -> None:
        self._tell_differ = differ
        self._differs = False
        self._bases: dict[Endpoint, frozenset[str]] = {}
        """Names of the models that an endpoint serves, without adapters; none where they are not known."""
        self._served: Counter[frozenset[str]] = Counter()
        """How many endpoints serve the same: few kinds, however many endpoints."""
        self._pool = pool
        self._rounds = Rounds(pool, random, interval)
        self._timeout = timeout
        self._slots = asyncio.Semaphore(concurrency)
        self._made: tuple[object, object, bytes | None] = (None, None, None)
        """The last list of the whole pool, for which endpoints and rewrites; None: there is none."""

    async def run(self) -> None:
        """Read for ever, following the pool as it changes."""
        await self._pool.run_for_each("models", self._follow, self._left)

    def answer(self, endpoints: Sequence[Endpoint], may: Callable[[str], bool] | None = None) -> bytes | None:
        """OpenAI's list of what these endpoints serve and of the names that are rewritten, as far as the asker `may`
        use them (None: all); None while no endpoint's models are known.
        """
        pool = self._pool
        if may is not None or endpoints is not pool.endpoints:  # a gateway's subset
            return self._list_of(endpoints, may)
        for_endpoints, for_rewrites, made = self._made
        if for_endpoints is not endpoints or for_rewrites is not pool.targets:
            made = self._list_of(endpoints)
            self._made = (endpoints, pool.targets, made)
        return made

    def _list_of(self, endpoints: Sequence[Endpoint], may: Callable[[str], bool] | None = None) -> bytes | None:
        entries: dict[str, Any] = {}
        known = False
        for endpoint in endpoints:
            if endpoint.models is not None:
                known = True
                for model in endpoint.models:
                    entries.setdefault(model.id, msgspec.Raw(model.entry))
        if not known:
            return None
        for name, target in self._pool.targets.items():
            if name not in entries:
                served: dict[str, Any] = {"object": "model", "created": 0, "owned_by": _OWNER}
                if isinstance(there := entries.get(target), msgspec.Raw):
                    served = msgspec.json.decode(there)
                entries[name] = {**served, "id": name, "root": target, "parent": None}
        data = [entry for name, entry in entries.items() if may is None or may(name)]
        return msgspec.json.encode({"object": "list", "data": data})

    def _left(self, endpoint: Endpoint) -> None:
        self._serves(endpoint, ())
        self._changed()

    def _serves(self, endpoint: Endpoint, models: Sequence[ServedModel]) -> None:
        """It does from now on; to be followed by `_changed` when all that changes together is known."""
        if before := self._bases.pop(endpoint, None):
            self._served[before] -= 1
            if not self._served[before]:
                del self._served[before]
        if base := frozenset(model.id for model in models if not model.parent):
            self._bases[endpoint] = base
            self._served[base] += 1

    def _changed(self) -> None:
        """The list is to be made anew."""
        self._made = (None, None, None)
        differs = len(self._served) > 1 and not frozenset.intersection(*self._served)
        if differs != self._differs:
            self._differs = differs
            self._tell_differ(sorted(frozenset().union(*self._served)) if differs else None)

    async def _follow(self, endpoint: Endpoint) -> None:
        if endpoint.rank:  # its list is that of rank 0, which is read for all of them
            return
        visit = Visit(endpoint.address, "/v1/models", _LARGEST)
        try:
            await self._rounds.first()
            while True:
                there = await self._read(endpoint, visit)
                await self._rounds.next(None if there else _AGAIN)
        finally:
            visit.close()

    async def _read(self, endpoint: Endpoint, visit: Visit) -> bool:
        """Whether it is worth while to ask again soon."""
        try:
            async with self._slots, asyncio.timeout(self._timeout):
                models = models_of(await visit.page())
        except (OSError, TimeoutError):
            return True
        except BadAnswer:
            models = None
        changed = False
        for rank in self._pool.ranks_at(endpoint.address):
            if models is None or rank.models is None or not _same(models, rank.models):
                rank.models = models
                self._serves(rank, models or ())
                changed = True
        if changed:
            self._changed()
        return models is not None


def _same(new: Sequence[ServedModel], old: Sequence[ServedModel]) -> bool:
    """But for what vLLM says anew each time: when they were created."""
    return [(model.id, model.parent) for model in new] == [(model.id, model.parent) for model in old]
