"""`SentPrompts`: which prompts were sent to which endpoint, in blocks of their bytes; what routers without events go
by.
"""

from collections import OrderedDict
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from epp.plugin import Endpoint, Request, Slot


def chain_of(request: Request, size: int) -> list[int]:
    """Hashes of the prompt's full blocks of `size` bytes, each of all before it too."""
    prompt, parent = request.prompt, xxh3_64_intdigest(request.model.encode("utf-8", "surrogatepass"))
    found = []
    for start in range(0, len(prompt) - size + 1, size):
        parent = xxh3_64_intdigest(prompt[start : start + size], parent)
        found.append(parent)
    return found


class SentPrompts:
    """For each endpoint the blocks sent there: at most `capacity`, the least recently sent go first.

    A block's hash covers all before it, so blocks held from the first on are a common prefix. `block`: bytes.
    """

    def __init__(self, block: int, capacity: int) -> None:
        self._block = block
        self._capacity = capacity
        self._chains = Slot[list[int]]()
        self._held: dict[Endpoint, OrderedDict[int, None]] = {}

    def chain(self, request: Request) -> list[int]:
        """The blocks of a request's prompt, hashed once."""
        found = self._chains.get(request)
        return self._chains.set(request, chain_of(request, self._block)) if found is None else found

    def take(self, request: Request, chain: Sequence[int] | None) -> None:
        """The blocks of a request of which another replica says them."""
        self._chains.set(request, list(chain or ()))

    def match(self, request: Request, endpoints: Sequence[Endpoint]) -> list[float]:
        """The share of the prompt's blocks that each was sent before, 0..1."""
        chain = self.chain(request)
        return [
            self._depth(chain, self._held.get(endpoint, {})) / len(chain) if chain else 0.0 for endpoint in endpoints
        ]

    def add(self, request: Request, endpoint: Endpoint) -> None:
        held = self._held.setdefault(endpoint, OrderedDict())
        for block in reversed(self.chain(request)):  # the first block is the last to go
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._capacity:
            held.popitem(last=False)

    def size(self, endpoint: Endpoint) -> int:
        """Blocks held."""
        return len(self._held.get(endpoint, ()))

    def forget(self, endpoint: Endpoint) -> None:
        self._held.pop(endpoint, None)

    @staticmethod
    def _depth(chain: Sequence[int], held: "OrderedDict[int, None] | dict[int, None]") -> int:
        depth = 0
        while depth < len(chain) and chain[depth] in held:
            depth += 1
        return depth
