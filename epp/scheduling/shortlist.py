"""Which endpoints of a large pool can be the cheapest for a request, found without a bill for each.

Endpoints that hold the same part of a prompt differ in what can be kept in order: how fast they are, how many requests
they serve, what waits there and how busy they were. `Order` keeps them so and walks them from the cheapest on, as far
as what one costs at least is below what the best found so far costs. What keeps no order (memory, failures, foreign
traffic) adds to a cost and never takes away, so nobody is left out who could be picked. Where a LoRA adapter is
asked for, those that have it are looked at each; all others cost at least what loading it takes more than
their place says.
"""

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator, Sequence
from heapq import heapify, heappop, heappush
from math import inf
from typing import Any, Final, NamedTuple, Protocol

from epp.plugin import Endpoint, Level, PrefixMatch
from epp.scheduling.speeds import Speed

_FEW: Final = 16
"""So many endpoints that hold something are all looked at."""
_STALE: Final = 16
"""Times as many dues are kept as there are accounts, those among them that are not true any more."""
_EQUAL: Final = 1 - 1e-9
"""Costs that differ by less than this share count as equal."""
NS: Final = 1_000_000_000
"""Work is summed in whole nanoseconds: what is added can be taken away again without a trace."""


class Account(Protocol):
    """What an order has to know of an endpoint."""

    endpoint: Endpoint
    speed: Speed
    requests: int
    queue: Any
    """What waits there for a first token; empty: nothing does."""
    weight: float
    """Its share of busy time, as far as it differs between endpoints with an empty queue: `Terms.scale` times this."""
    due: float
    place: "Place | None"

    @property
    def floor(self) -> int:
        """Work of what is in `queue`, in nanoseconds, at least."""

    def expire(self, now: float) -> None: ...


class Terms(NamedTuple):
    """What one request costs anywhere, for one length of what is held of its prompt."""

    work: float
    """Seconds of its prefill, as modelled."""
    again: float
    stall: float
    calm: float
    leaving: float
    scale: float

    def least(self, factor: float, requests: int, busy: float, pending: float) -> float:
        """What it costs at least. `busy`: the share of busy time, `pending`: nanoseconds of work that wait."""
        own, waits = factor * self.work, factor * pending / NS
        stalls = own * (1 + own * self.leaving) + min(waits, own)
        return (1 + self.calm) * (waits + own * (1 + self.again + busy) + self.stall * requests * stalls)


class Place(NamedTuple):
    """Where an account is in an order: `entry` in `entries`, of the group with this key."""

    key: tuple[float, int]
    entries: "list[Entry]"
    entry: "Entry"


Entry = tuple[int, float, int, Account]
"""Pending work and weight, the endpoint's place in the pool, and the account."""


class Costs(Protocol):
    """What bills would say, but for memory."""

    beyond: float
    """Seconds that all cost more, at least, than their level says, but those that are `fit`."""

    @property
    def fit(self) -> Collection[Endpoint]: ...

    def terms(self, match: PrefixMatch) -> Terms: ...

    def of(self, account: Any, terms: Terms) -> tuple[float, bool]:
        """Seconds, and whether that is all; else a bill may find more."""


class Cheapest:
    """The costs of the `count` cheapest so far. With `up_to` all that cost so much or less are among them."""

    def __init__(self, count: int, up_to: float | None) -> None:
        self._costs = [inf] * count
        self._fixed = up_to is not None
        self.most = inf if up_to is None else up_to / _EQUAL
        """What costs as much or more is none of them."""

    def add(self, cost: float) -> None:
        if not self._fixed and cost < self.most:
            insort(self._costs, cost)
            del self._costs[-1]
            self.most = self._costs[-1] * _EQUAL


class Order:
    """The accounts of a pool's endpoints, in order. Each is to be `put` again whenever it changes."""

    def __init__(self, endpoints: Sequence[Endpoint], accounts: Sequence[Account]) -> None:
        self.endpoints = endpoints
        self.groups: dict[tuple[float, int], tuple[list[Entry], list[Entry]]] = {}
        """(factor, requests) -> those with an empty queue by `weight`, and the others by `floor` and `weight`."""
        self.keys: list[tuple[float, int]] = []
        """Of `groups`, sorted."""
        self.numbers = {account.endpoint: number for number, account in enumerate(accounts)}
        self.accounts = accounts
        self._due: list[tuple[float, int]] = []
        """A heap: when an account expires next, and its number. Some are not true any more."""
        for account in accounts:
            account.place = None
            self.put(account)

    def put(self, account: Account) -> None:
        """To where it belongs now."""
        if account.place is not None:
            self._take(account.place)
        number = self.numbers[account.endpoint]
        key = account.speed.factor, account.requests
        group = self.groups.get(key)
        if group is None:
            group = self.groups[key] = ([], [])
            insort(self.keys, key)
        entries, pending = (group[1], account.floor) if account.queue else (group[0], 0)
        entry = (pending, account.weight, number, account)
        insort(entries, entry)
        account.place = Place(key, entries, entry)
        if account.due < inf:
            heappush(self._due, (account.due, number))
            if len(self._due) > _STALE * len(self.accounts):  # as where only other replicas pick, so nobody expires
                self._due = [(each.due, n) for n, each in enumerate(self.accounts) if each.due < inf]
                heapify(self._due)

    def expire(self, now: float) -> None:
        """Let what is due be done."""
        due = self._due
        while due and due[0][0] <= now:
            account = self.accounts[heappop(due)[1]]
            if account.due <= now:
                account.expire(now)

    def find(self, levels: Iterator[Level], costs: Costs, cheapest: Cheapest) -> tuple[Sequence[Endpoint], float]:
        """Who can be among the `cheapest`, in the pool's order, and what any other costs at least."""
        few = max(_FEW, len(self.accounts) // 8)
        of_many: list[Level] = []
        of_few: list[Level] = []
        for level in levels:
            (of_few if level.count <= few else of_many).append(level)
        search = _Search(self, costs, cheapest, few)
        search.look_at(of_few, of_many)
        for level in reversed(of_many):
            search.walk(level)
        return sorted(search.found, key=self.numbers.__getitem__), search.rest

    def _take(self, place: Place) -> None:
        entries = place.entries
        del entries[bisect_left(entries, place.entry)]
        if not entries and not any(self.groups[place.key]):
            del self.groups[place.key]
            del self.keys[bisect_left(self.keys, place.key)]


class _Search:
    """For one request. Fills `found`; `rest` is what the others cost at least."""

    def __init__(self, order: Order, costs: Costs, cheapest: Cheapest, few: int) -> None:
        self.found: dict[Endpoint, None] = {}
        self._all_fit = len(costs.fit) <= few
        """Those that are fit have been looked at, before any is walked to."""
        self.rest = inf
        self._order = order
        self._costs = costs
        self._cheapest = cheapest

    def look_at(self, levels: Sequence[Level], of_many: Sequence[Level]) -> None:
        """Find the candidates of levels with few members, and those to be looked at first: each costs what the last of
        the levels says that it is in.
        """
        numbers, accounts, costs = self._order.numbers, self._order.accounts, self._costs
        known: dict[Endpoint, tuple[float, bool, int]] = {}
        for level in reversed(levels):
            terms = costs.terms(level.match)
            for endpoint in level.members():
                if endpoint not in known and (number := numbers.get(endpoint)) is not None:
                    known[endpoint] = (*costs.of(accounts[number], terms), number)
        if costs.fit and self._all_fit:
            priced = [(level.holds, costs.terms(level.match)) for level in reversed(of_many)]
            for endpoint in costs.fit:
                if endpoint not in known and (number := numbers.get(endpoint)) is not None:
                    terms = next(terms for holds, terms in priced if holds is None or holds(endpoint))
                    known[endpoint] = (*costs.of(accounts[number], terms), number)
        for cost, certain, number in sorted(known.values()):
            self._consider(accounts[number].endpoint, cost, certain)

    def walk(self, level: Level) -> None:
        """Find the candidates of a level that many have reached."""
        terms, keys, at = self._costs.terms(level.match), self._order.keys, 0
        beyond = self._costs.beyond if self._all_fit else 0.0
        while at < len(keys):
            factor, requests = keys[at]
            if self._are_too_dear(terms.least(factor, requests, 0.0, 0) + beyond):  # and so with more requests
                at = bisect_left(keys, (factor, inf), at)
                continue
            idle, queued = self._order.groups[keys[at]]
            self._walk_group(level, terms, idle, 0.0, beyond)
            self._walk_group(level, terms, queued, 1.0, beyond)
            at += 1

    def _walk_group(self, level: Level, terms: Terms, entries: Sequence[Entry], queued: float, beyond: float) -> None:
        at, costs = 0, self._costs
        while at < len(entries):
            pending, weight, _, account = entries[at]
            factor, requests = account.speed.factor, account.requests
            least = terms.least(factor, requests, queued + weight * terms.scale, pending) + beyond
            if self._are_too_dear(least):
                if not queued or self._are_too_dear(terms.least(factor, requests, 0.0, pending) + beyond):
                    return
                at = bisect_left(entries, (pending, inf), at)
                continue
            at += 1
            unfit = costs.beyond > beyond and account.endpoint not in costs.fit
            if unfit and self._are_too_dear(least + costs.beyond):
                continue
            if account.endpoint not in self.found and (level.holds is None or level.holds(account.endpoint)):
                self._consider(account.endpoint, *costs.of(account, terms))

    def _are_too_dear(self, cost: float) -> bool:
        """Those that cost so much or more."""
        if cost < self._cheapest.most:
            return False
        self.rest = min(self.rest, cost)
        return True

    def _consider(self, endpoint: Endpoint, cost: float, certain: bool) -> None:
        if not self._are_too_dear(cost):
            self.found[endpoint] = None
            self._cheapest.add(cost if certain else inf)
