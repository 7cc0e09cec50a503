"""TokenCache of text whose token ids are remembered: least recently used first out, bounded by bytes."""

from array import array
from collections import OrderedDict
from hashlib import blake2b
from threading import Lock
from typing import Final, TypeAlias

Ids: TypeAlias = "array[int]"
"""Token ids, four bytes each: `array("I")`."""

_OVERHEAD: Final = 250
"""Bytes of an entry beside its ids: key, array object, place in the table. Measured."""


class TokenCache:
    """Text of a tokenizer -> ids. Used by several threads. `limit` in bytes bounds all that is kept.

    Keys are digests of 128 bits, so the text itself is not kept: no prompt lies about in memory because of it.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._lock = Lock()
        self._kept: OrderedDict[bytes, Ids] = OrderedDict()
        self.bytes = 0
        """Taken now, overhead included."""
        self.encoded = 0
        """Bytes of text that had to be tokenized, since the start."""

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, key: bytes) -> "Ids | None":
        with self._lock:
            ids = self._kept.get(key)
            if ids is not None:
                self._kept.move_to_end(key)
            return ids

    def put(self, key: bytes, ids: Ids, encoded: int) -> None:
        """Remember what `encoded` bytes of text gave.

        A piece larger than a quarter of that is not kept, for it would push out all others.
        """
        size = _size(ids)
        with self._lock:
            self.encoded += encoded
            if size > self._limit // 4:
                return
            if (old := self._kept.pop(key, None)) is not None:
                self.bytes -= _size(old)
            self._kept[key] = ids
            self.bytes += size
            while self.bytes > self._limit:
                _, forgotten = self._kept.popitem(last=False)
                self.bytes -= _size(forgotten)


def key_of(seed: bytes, text: str) -> bytes:
    """What stands for `text` as one tokenizer (`seed`, up to 16 bytes) reads it."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16, salt=seed).digest()


def _size(ids: Ids) -> int:
    return len(ids) * ids.itemsize + _OVERHEAD
