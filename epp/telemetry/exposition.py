"""A scrape's answer, made in slices, so that a large page does not hold up the requests of the same event loop."""

import asyncio
from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

END = b"# EOF\n"
"""Ends an OpenMetrics page; the encoder adds it to every slice."""


class _Slice(Collector):
    """One family, as the registry an encoder expects."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


async def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page in the format `accept` asks for (Prometheus text, or OpenMetrics), and its content type."""
    encode, content_type = choose_encoder(accept)
    page: list[bytes] = []
    closing = b""
    for family in registry.collect():
        piece: bytes = encode(_Slice(family))
        if piece.endswith(END):
            piece, closing = piece.removesuffix(END), END
        page.append(piece)
        await asyncio.sleep(0)  # let waiting requests pass
    return b"".join(page) + closing, content_type
