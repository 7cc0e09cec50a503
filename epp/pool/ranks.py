"""Data-parallel ranks that share a port: an endpoint for each, where a label says how many there are."""

import re
from typing import Final

from epp import protocol
from epp.pool.store import Endpoint

MOST: Final = 64
"""Of one port; vLLM's own is `--data-parallel-size`."""
_PORT: Final = re.compile(r"(.*)-rank-(\d{1,3})\Z", re.DOTALL)


def ranks_of(endpoint: Endpoint) -> list[Endpoint]:
    """An endpoint for each rank behind its address, as its label counts them; itself where it has no such label.

    They are called `NAME-rank-N`. Of the ports of one pod each has as many, and they are counted on from port to port,
    as vLLM counts engines. ValueError for a label that is no such number.
    """
    text = endpoint.labels.get(protocol.DATA_PARALLEL_SIZE_LABEL)
    if text is None:
        return [endpoint]
    if not (text.isascii() and text.isdigit() and 1 <= int(text[:3]) <= MOST and len(text) <= 3):
        label, expected = protocol.DATA_PARALLEL_SIZE_LABEL, f"expected the ranks behind one port, 1 to {MOST}"
        raise ValueError(f"{label}: got {text[:40]!r}; {expected}")
    if (size := int(text)) == 1:
        return [endpoint]
    found = _PORT.match(endpoint.name)
    name, first = (found[1], int(found[2]) * size) if found else (endpoint.name, 0)
    return [
        Endpoint(
            f"{name}-rank-{first + rank}",
            endpoint.address,
            endpoint.labels,
            node=endpoint.node,
            node_address=endpoint.node_address,
            rank=rank,
        )
        for rank in range(size)
    ]
