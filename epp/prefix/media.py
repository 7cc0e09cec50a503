"""Which endpoint has encoded an image, video or audio clip lately: `mm-embeddings-cache-producer` and its scorer.

An engine keeps the output of its encoder for a while, so a picture that comes again costs nothing where it was before.
What identifies an item is what the client sent: its address or its data, as it stands in the body.
"""

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import xxhash

from epp.plugin import EncoderMatch, Endpoint, Producer, Request, Scorer, Services, Slot

_ITEM: Final = re.compile(rb'"(?:url|data|file_data)"\s*+:\s*+"((?:[^"\\]++|\\.)*+)"', re.DOTALL)
"""Where OpenAI's parts (image_url, video_url, input_audio, file) and Anthropic's sources have what they show."""
_KINDS: Final = re.compile(rb'"type"\s*+:\s*+"(?:image|image_url|video_url|input_audio|audio_url|file|document)"')
_MOST: Final = 256
"""Items of a request that count."""
_MEBIBYTES_EACH: Final = 2
"""Of an engine's cache, that one item is taken to need. Source: llm-d-router."""
_PIECE: Final = 500
"""Items in a piece of a snapshot."""


_NONE: Final = EncoderMatch(0, 0)


def items_of(body: bytes, hash_seed: int = 0) -> list[int]:
    """Hashes of the items in a body, each once, in order; none for a body without any. `hash_seed`: see
    `epp.plugin.Services`.
    """
    if _KINDS.search(body) is None:
        return []
    found: dict[int, None] = {}
    for item in _ITEM.finditer(body):
        found[xxhash.xxh3_64_intdigest(item[1], hash_seed)] = None
        if len(found) == _MOST:
            break
    return list(found)


@dataclass(eq=False)
class EncoderCaches(Producer[EncoderMatch]):
    """`mm-embeddings-cache-producer`: remembers which items each endpoint was sent, as many as its cache has room for.

    `cache_size_in_mb_per_server` (4096): of an engine's encoder cache, in MiB; an item counts as 2 MiB. The older name
    is `cacheSizeInMB`. Source: llm-d-router.
    """

    produces: ClassVar[type[Any]] = EncoderMatch
    waits: ClassVar[bool] = False

    cache_size_in_mb_per_server: int = field(default=4096, metadata={"alias": "cacheSizeInMB"})
    _held: dict[Endpoint, "OrderedDict[int, None]"] = field(default_factory=dict, init=False, repr=False)
    _items: Slot[list[int]] = field(default_factory=Slot, init=False, repr=False)
    _hash_seed: int = field(default=0, init=False, repr=False)

    def start(self, services: Services) -> None:
        self._hash_seed = services.hash_seed

    async def prepare(self, request: Request) -> None:
        if items := items_of(request.prompt, self._hash_seed):
            self._items.set(request, items)

    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, EncoderMatch]:
        items = self._items.get(request)
        if not items:
            return dict.fromkeys(endpoints, _NONE)
        count, nothing = len(items), EncoderMatch(0, len(items))
        matches = {}
        for endpoint in endpoints:
            held = self._held.get(endpoint)
            matches[endpoint] = EncoderMatch(sum(item in held for item in items), count) if held else nothing
        return matches

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        self._take(endpoint, self._items.get(request) or ())

    def on_removed(self, endpoint: Endpoint) -> None:
        self._held.pop(endpoint, None)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """The hashes of its items."""
        return self._items.get(request)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        if state:
            self._take(endpoint, [int(item) for item in state[:_MOST]])

    def snapshot(self) -> Iterator[Any]:
        """[endpoint, item, ...], those sent longest ago first."""
        for endpoint, held in [*self._held.items()]:
            items = list(held)
            for start in range(0, len(items), _PIECE):
                yield [endpoint.name, *items[start : start + _PIECE]]

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        name, *items = piece
        if (endpoint := endpoints.get(name)) is not None:
            self._take(endpoint, [int(item) for item in items])

    def statistics(self) -> Mapping[str, float]:
        """`items` remembered, of all endpoints together."""
        return {"items": sum(map(len, self._held.values()))}

    def _take(self, endpoint: Endpoint, items: Sequence[int]) -> None:
        if not items:
            return
        held = self._held.setdefault(endpoint, OrderedDict())
        for item in items:
            held[item] = None
            held.move_to_end(item)
        size = self.cache_size_in_mb_per_server if self.cache_size_in_mb_per_server > 0 else 4096
        while len(held) > max(1, size // _MEBIBYTES_EACH):
            held.popitem(last=False)


class EncoderCacheScorer(Scorer):
    """`mm-embeddings-cache-scorer`: share of the request's items that the endpoint has encoded; 0 for one without any.

    No parameters. Source: llm-d-router.
    """

    needs = (EncoderMatch,)

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        matches = request.signal(EncoderMatch)
        return [match.held / match.items if (match := matches[e]).items else 0.0 for e in endpoints]
