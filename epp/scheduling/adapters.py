"""Which LoRA adapters each endpoint has in its slots, by our own account; and what it takes to serve one there.

An engine has `slots` adapters on its device (vLLM's `--max-loras`, of its metrics). A batch has no more: a request for
one more waits until an adapter's requests have all ended, while others pass it by. One that is not there is loaded in
the place of the one unused longest, and every request of the batch waits meanwhile. Which are idle in a slot engines do
not say, so it is remembered here: what was sent there, and what scrapes say is running though it was not sent by us.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from epp.plugin import Endpoint, Load, ServedModel

_MOST: Final = 10_000
"""Adapters known of a pool; the names are the engines' own."""
_MOST_IDLE: Final = 1_000
"""Remembered of an endpoint that does not say how many slots it has."""


_NOBODY: Final[Mapping[Endpoint, None]] = {}


class Need(NamedTuple):
    """What an adapter takes at an endpoint before a request for it can begin there."""

    turns: float
    """Requests that have to end first, one after the other, for a slot to come free."""
    loads: int
    """1: it has to be loaded."""
    displaces: int
    """1: and in the place of another that was used lately."""


NOTHING: Final = Need(0.0, 0, 0)
LOADED: Final = Need(0.0, 1, 0)


class Slots:
    """Of one endpoint."""

    __slots__ = ("active", "foreign", "idle", "models", "most")

    def __init__(self, most: int) -> None:
        self.most = most
        """Slots; 0: not known."""
        self.active: dict[str, int] = {}
        """Adapter -> our requests in flight for it."""
        self.idle: OrderedDict[str, None] = OrderedDict()
        """In a slot and not in `active`, unused longest first."""
        self.foreign: frozenset[str] = frozenset()
        """Running, by the last scrape, for requests that are not ours."""
        self.models: tuple[ServedModel, ...] | None = None
        """What it served when it was looked at last."""

    def holds(self, adapter: str) -> bool:
        return adapter in self.active or adapter in self.idle

    def need(self, adapter: str) -> Need:
        if adapter in self.active or adapter in self.foreign:
            return NOTHING
        if self.most:
            used = len(self.active) + len(self.foreign)
            if (behind := used + 1 - self.most) > 0:
                each = max(1.0, sum(self.active.values()) / len(self.active)) if self.active else 1.0
                return Need(behind * each / self.most, adapter not in self.idle, 0)
            if adapter not in self.idle:
                return Need(0.0, 1, len(self.active) + len(self.idle) >= self.most)
        return NOTHING if adapter in self.idle else LOADED

    def start(self, adapter: str) -> list[str]:
        """A request for it was sent there. Returns those that are in no slot any more."""
        self.active[adapter] = self.active.get(adapter, 0) + 1
        self.idle.pop(adapter, None)
        self.foreign -= {adapter}
        return self.settle()

    def end(self, adapter: str) -> list[str]:
        """One of these requests has ended."""
        left = self.active[adapter] - 1
        if left:
            self.active[adapter] = left
            return []
        del self.active[adapter]
        self.idle[adapter] = None
        return self.settle()

    def see(self, load: Load) -> list[str]:
        """A new scrape."""
        self.most = load.lora_max or self.most
        self.foreign = load.lora_running.difference(self.active) if load.lora_running else load.lora_running
        for adapter in self.foreign:
            self.idle.pop(adapter, None)
            self.idle[adapter] = None
        return self.settle()

    def settle(self) -> list[str]:
        """Forget what has no slot any more."""
        gone = []
        room = max(0, (self.most or _MOST_IDLE) - len(self.active))
        while len(self.idle) > room:
            gone.append(self.idle.popitem(last=False)[0])
        self.foreign = self.foreign.difference(gone)
        return gone


class Adapters:
    """Of a pool's endpoints."""

    def __init__(self) -> None:
        self.slots: dict[Endpoint, Slots] = {}
        self.known: OrderedDict[str, None] = OrderedDict()
        """Adapters; named longest ago first."""
        self._holders: dict[str, dict[Endpoint, None]] = {}
        """Adapter -> those that have it."""
        self._most = 0
        """Slots of the endpoint that said so last: of those that have not said it yet too."""

    def know(self, adapters: Iterable[str]) -> None:
        """These models are adapters."""
        known = self.known
        for adapter in adapters:
            known[adapter] = None
            known.move_to_end(adapter)
            if len(known) > _MOST:
                known.popitem(last=False)

    def holders(self, adapter: str) -> Mapping[Endpoint, None]:
        return self._holders.get(adapter, _NOBODY)

    def need(self, endpoint: Endpoint, adapter: str) -> Need:
        slots = self.slots.get(endpoint)
        return LOADED if slots is None else slots.need(adapter)

    def see(self, endpoint: Endpoint) -> None:
        """The endpoint was scraped."""
        load, slots, models = endpoint.load, self.slots.get(endpoint), endpoint.models
        if slots is None:
            if not load.lora_max and not any(model.parent for model in models or ()):
                return
            slots = self.slots[endpoint] = Slots(load.lora_max or self._most)
        if models is not slots.models:
            slots.models = models
            self.know(model.id for model in models or () if model.parent)
        self._most = load.lora_max or self._most
        self.know(load.lora_running)
        self.know(load.lora_waiting)
        gone = slots.see(load)
        for adapter in slots.foreign:
            self._held(endpoint, adapter)
        self._gone(endpoint, gone)

    def start(self, endpoint: Endpoint, adapter: str) -> None:
        """A request for it was sent there."""
        if (slots := self.slots.get(endpoint)) is None:
            slots = self.slots[endpoint] = Slots(self._most)
        self._gone(endpoint, slots.start(adapter))
        self._held(endpoint, adapter)

    def end(self, endpoint: Endpoint, adapter: str) -> None:
        """It has ended."""
        if (slots := self.slots.get(endpoint)) is not None and adapter in slots.active:
            self._gone(endpoint, slots.end(adapter))

    def forget(self, endpoint: Endpoint) -> None:
        if (slots := self.slots.pop(endpoint, None)) is not None:
            self._gone(endpoint, [*slots.active, *slots.idle])

    def remembered(self) -> Iterator[tuple[str, int, list[str]]]:
        """[endpoint, slots, adapters that are idle in them] of each."""
        for endpoint, slots in self.slots.items():
            yield endpoint.name, slots.most, [*slots.idle]

    def restore(self, endpoint: Endpoint, most: int, idle: Sequence[str]) -> None:
        """What another replica remembers."""
        slots = self.slots.setdefault(endpoint, Slots(most))
        slots.most = slots.most or most
        self.know(idle)
        for adapter in idle:
            if not slots.holds(adapter):
                slots.idle[adapter] = None
                self._held(endpoint, adapter)
        self._gone(endpoint, slots.settle())

    def _held(self, endpoint: Endpoint, adapter: str) -> None:
        self._holders.setdefault(adapter, {})[endpoint] = None

    def _gone(self, endpoint: Endpoint, adapters: Iterable[str]) -> None:
        for adapter in adapters:
            if (holders := self._holders.get(adapter)) is not None:
                holders.pop(endpoint, None)
                if not holders:
                    del self._holders[adapter]
