"""A scrape's answer, made in slices, so that a large page does not hold up the requests of the same event loop."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from epp.telemetry.pace import Pace

END = b"# EOF\n"
"""Ends an OpenMetrics page; the encoder adds it to every slice."""


class _Slice(Collector):
    """A family or a part of it, as the registry an encoder expects."""

    def __init__(self, family: Metric) -> None:
        self._family = family

    def collect(self) -> Iterator[Metric]:
        yield self._family


async def render(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """The page in the format `accept` asks for (Prometheus text, or OpenMetrics), and its content type."""
    encode, content_type = encoder(accept)
    page: list[bytes] = []
    closing = b""
    before = ""
    pace = Pace()
    for family in registry.collect():
        piece: bytes = encode(_Slice(family))
        if piece.endswith(END):
            piece, closing = piece.removesuffix(END), END
        page.append(_without_head(piece) if family.name == before else piece)
        before = family.name
        await pace.rest()
    return b"".join(page) + closing, content_type


def encoder(accept: str) -> tuple[Callable[[Collector], bytes], str]:
    """What writes the format that `accept` asks for, and its content type; text where that cannot be read."""
    try:
        return choose_encoder(accept)
    except TypeError:  # the library's answer to a version such as 1.x
        return choose_encoder("")


def _without_head(piece: bytes) -> bytes:
    """A later slice of a family: its HELP, TYPE and UNIT were said with the first."""
    start = 0
    while piece.startswith(b"# ", start):
        start = piece.index(b"\n", start) + 1
    return piece[start:]
