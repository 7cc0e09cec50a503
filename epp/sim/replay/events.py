"""KV events in virtual time: what engines do to their prefix caches, as a picker that listens hears of it.

The messages are left out: events reach the production code as what it makes of vLLM's bytes. Tokens are known exactly,
as they are where a model's tokenizer is mounted.
"""

from array import array
from collections.abc import Sequence

from epp.plugin import Endpoint, Plugin, Request
from epp.prefix.events import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event
from epp.prefix.precise import PrecisePrefixCache
from epp.sim.engine import Change, Cleared, Evicted


def batch_of(changes: Sequence[Change], block_size: int, now: float) -> Batch:
    """What became of a prefix cache, as its engine tells it. The jobs' `about` are the ids of prompt and answer."""
    return Batch(now, [_event(change, block_size) for change in changes])


def _event(change: Change, size: int) -> Event:
    if isinstance(change, Cleared):
        return AllBlocksCleared()
    if isinstance(change, Evicted):
        return BlockRemoved([change.hash], "GPU")
    job, start, end = change
    ids: array[int] = job.about
    return BlockStored(
        list(job.hashes[start:end]),
        job.hashes[start - 1] if start else None,
        ids[start * size : end * size].tolist(),
        size,
        medium="GPU",
    )


class Ears:
    """What a picker hears with, where its configuration listens."""

    def __init__(self, precise: PrecisePrefixCache) -> None:
        precise.source = _Ids()
        self._shelves = precise.shelves

    def join(self, endpoint: Endpoint) -> None:
        """An endpoint's events are heard from now on."""
        self._shelves.shelf(endpoint).state = "live"

    def hear(self, endpoint: Endpoint, batch: Batch, now: float) -> None:
        """A batch arrives."""
        shelf = self._shelves.shelf(endpoint)
        shelf.engine(0).apply(batch)
        shelf.heard(now, now - batch.ts)

    def restarted(self, endpoint: Endpoint) -> None:
        """Its messages count from 0 again: a new process."""
        self._shelves.shelf(endpoint).engine(0).clear(emptied=True)


def ears_of(plugins: Sequence[Plugin]) -> Ears | None:
    """The ears of a pipeline; None if nothing in it listens."""
    precise = next((plugin for plugin in plugins if isinstance(plugin, PrecisePrefixCache)), None)
    return None if precise is None else Ears(precise)


class _Ids:
    """A prompt of the replay has four bytes a token, so it is its tokens."""

    async def of(self, request: Request) -> Sequence[int]:
        return array("I", request.prompt)
