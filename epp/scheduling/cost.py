"""`expected-ttft`: the default scorer. What sending a request to an endpoint costs everybody, in seconds.

For a request of n prompt tokens and an endpoint that holds all but u of them:

    work   = lin * u + att * u * (n - u / 2)                                     seconds of prefill, attention included
    crowd  = (base + c * decodes + d * their context) / seconds of a full prefill chunk
    memory = max(0, used + u - capacity) / tokens that come free in a second
    cost   = (1 + crowd) * (pending + work * (g + s * decodes)) + memory

`pending` is the work of what was sent there and has no first token yet. Everything is our own account, exact and
instant; the engines' metrics only tell what is *not* ours. Which terms matter, and that g = 2, was found in a study of
published policies in virtual time; the constants are priors for an 8B model on one H100 and may be wrong by three times
on a uniform pool, because only the ratios between endpoints and `memory` depend on them.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import ClassVar, Final

from epp.plugin import CacheRoom, Cost, Endpoint, Load, PrefixMatch, Request, Response

_NS: Final = 1_000_000_000
"""Work is summed in whole nanoseconds: what is added can be taken away again without a trace."""
_SMOOTHING: Final = 0.5
"""Weight of one more scrape in what is believed of foreign traffic."""
_LEAST: Final = 0.1
"""Requests. Less foreign traffic than this is none."""
_HALF_LIFE: Final = 10.0
"""Seconds after which what the last scrape said of foreign traffic counts half."""
_WEIGHT: Final = 0.02
"""Of one more request in the running means: the last fifty or so count."""
_MEAN_TOKENS: Final = 1000
"""Prompt tokens of a foreign request before any of our own was seen."""


class _Sent:
    """A request on its way, in one endpoint's account."""

    __slots__ = ("account", "lasts", "observed", "sent", "tokens", "waiting", "work")

    def __init__(self, account: "_Account", tokens: int, work: int, sent: float, lasts: float, observed: bool) -> None:
        self.account = account
        self.tokens = tokens
        self.work = work
        self.sent = sent
        self.lasts = lasts
        """Modelled seconds from its turn to its first token."""
        self.observed = observed
        """We will be told of its first token."""
        self.waiting = True


class _Account:
    """What one endpoint was given, and what the metrics say it has beyond that."""

    __slots__ = (
        "context", "decodes", "due", "foreign_decodes", "foreign_used", "foreign_waiting", "load", "peak", "pending",
        "queue", "requests", "served_at", "since",
    )  # fmt: skip

    def __init__(self, now: float) -> None:
        self.pending = 0
        """Nanoseconds of work of the requests in `queue`."""
        self.queue: OrderedDict[_Sent, None] = OrderedDict()
        """Sent, without a first token yet; in order."""
        self.decodes = 0
        self.context = 0
        """Prompt tokens of the decodes."""
        self.requests = 0
        self.served_at = now
        """When the last first token came, or is thought to have come."""
        self.due = inf
        """When the next is thought to come; inf where we shall be told, or nobody waits."""
        self.load: Load | None = None
        self.since = now
        """Start of the window of `peak`: when the last scrape was looked at."""
        self.peak = 0
        """Most requests in flight in that window. What a scrape counts beyond it cannot be ours."""
        self.foreign_waiting = self.foreign_decodes = self.foreign_used = 0.0

    def start(self, sent: _Sent) -> None:
        self.queue[sent] = None
        self.pending += sent.work
        self.requests += 1
        self.peak = max(self.peak, self.requests)
        self._next()

    def first_token(self, sent: _Sent, at: float) -> None:
        """`sent` begins to decode. Service is in order, so those before it of whom we are not told have begun too."""
        begun = [sent]
        for earlier in self.queue:
            if earlier is sent:
                break
            if not earlier.observed:
                begun.append(earlier)
        for one in begun:
            self._leave_queue(one)
            self.decodes += 1
            self.context += one.tokens
        self.served_at = at
        self._next()

    def expire(self, now: float) -> None:
        """Let those begin to decode whose modelled first token is past."""
        while self.due <= now:
            self.first_token(next(iter(self.queue)), self.due)

    def end(self, sent: _Sent, now: float) -> None:
        if sent.waiting:
            if next(iter(self.queue)) is sent:
                self.served_at = now
            self._leave_queue(sent)
            self._next()
        else:
            self.decodes -= 1
            self.context -= sent.tokens
        self.requests -= 1

    def compare(self, load: Load, room: CacheRoom, now: float) -> None:
        """A new scrape: what it counts beyond the most we had in flight since the last one is not ours."""
        self.load = load
        if load.at is None or load.at < self.since:
            return
        excess = max(0, load.waiting + load.running - self.peak)
        waiting = min(excess, max(0, load.waiting - len(self.queue)))
        used = max(0.0, load.kv_usage * room.capacity - room.pinned) if excess else 0.0
        self.foreign_waiting = _smooth(self.foreign_waiting, waiting)
        self.foreign_decodes = _smooth(self.foreign_decodes, excess - waiting)
        self.foreign_used = _smooth(self.foreign_used, used) if self.foreign_waiting or self.foreign_decodes else 0.0
        self.since, self.peak = now, self.requests

    def _leave_queue(self, sent: _Sent) -> None:
        del self.queue[sent]
        sent.waiting = False
        self.pending -= sent.work

    def _next(self) -> None:
        head = next(iter(self.queue), None)
        self.due = inf if head is None or head.observed else max(head.sent, self.served_at) + head.lasts


def _smooth(old: float, new: float) -> float:
    value = old + _SMOOTHING * (new - old)
    return value if value >= _LEAST else 0.0


@dataclass(eq=False)
class ExpectedTtft(Cost):
    """Seconds of waiting that a pick causes, to this request and to others; the lowest bill wins.

    Terms of the bill, which sum to the cost:
      pending   prefill sent there before, still without a first token
      own       this request's own prefill, of what is not cached there
      shared    the same work again (g - 1 times), for those who come after and wait behind it
      stall     what the answers being generated there lose while this prompt is prefilled
      crowd     what those answers take from every step, so from all of the above
      foreign   all that grows by traffic which is not ours, as far as the engine's metrics show it
      memory    waiting until running requests have freed enough KV memory
    """

    needs: ClassVar[tuple[type, ...]] = (PrefixMatch, CacheRoom)
    terms: ClassVar[tuple[str, ...]] = ("pending", "own", "shared", "stall", "crowd", "foreign", "memory")

    g: float = 2.0
    """How often a request's own work counts: once for itself, once for those behind it. At 1 shared documents are
    copied to idle endpoints to save one request a second, and everybody waits longer (policy study)."""
    s: float = 0.03
    """Seconds of TTFT that a second of one stalled decode is worth (policy study)."""
    lin: float = 1 / 20_000
    """Seconds per prefilled token. Published: 15-25 thousand tokens/s for 8B on an H100 (16 GFLOP a token)."""
    att: float = 1.65e-9
    """Seconds per pair of a prefilled token and one before it; att/lin = 3.3e-5 from the shape of Llama 8B: 4 * 4096 *
    32 FLOP a pair to 16 GFLOP a token."""
    base: float = 6.5e-3
    """Seconds of an engine step whatever is in it: reading 16 GB of weights at three quarters of 3.35 TB/s."""
    c: float = 15e-6
    """Seconds per decode in a step: 16 GFLOP at the dense peak; the rest hides behind the reading of the weights."""
    d: float = 48e-9
    """Seconds per token of context a decode reads: 128 KiB of KV at 80 % of 3.35 TB/s."""
    chunk: int = 8192
    """Prefill tokens of a full step (vLLM's --max-num-batched-tokens on an H100)."""
    residence: float = 10.0
    """Seconds a request stays at an endpoint, until the first have been seen. What runs fills the memory and is gone
    after that time, so memory comes free at capacity / residence (Little's law)."""

    accounts: dict[Endpoint, _Account] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for name in ("lin", "chunk", "residence"):
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name}: {value}, expected more than 0")
        for name in ("g", "s", "att", "base", "c", "d"):
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}: {value}, expected 0 or more")
        self._residence = self.residence
        self._tokens = float(_MEAN_TOKENS)
        self._work = _MEAN_TOKENS * self.lin
        self._per_chunk = 1 / (self.lin * self.chunk)

    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        """One row per endpoint, in the order of `terms`."""
        now, n = self.clock(), request.tokens
        matches, rooms = request.signal(PrefixMatch), request.signal(CacheRoom)
        g, s, lin, att, c, d = self.g, self.s, self.lin, self.att, self.c, self.d
        per_chunk, base, accounts = self._per_chunk, self.base, self.accounts
        rows = []
        for endpoint in endpoints:
            if (account := accounts.get(endpoint)) is None:
                account = self._open(endpoint, now)
            room = rooms[endpoint]
            if endpoint.load is not account.load:
                account.compare(endpoint.load, room, now)
            if account.due <= now:
                account.expire(now)
            u = n - matches[endpoint].tokens
            work = lin * u + att * u * (n - 0.5 * u)
            decodes = account.decodes
            pending = account.pending / _NS
            shared = (g - 1) * work
            stall = s * decodes * work
            sum_ = pending + work + shared + stall
            rate = (base + c * decodes + d * account.context) * per_chunk
            foreign, used = 0.0, float(room.pinned)
            if account.foreign_waiting or account.foreign_decodes:
                foreign, more = self._foreign(account, now, work, sum_, rate)
                used += more
            over = used + u - room.capacity
            memory = over / room.capacity * self._residence if over > 0 and room.capacity else 0.0
            rows.append((pending, work, shared, stall, rate * sum_, foreign, memory))
        return rows

    def _foreign(self, account: _Account, now: float, work: float, sum_: float, rate: float) -> tuple[float, float]:
        """What foreign traffic adds to the cost, and the KV tokens it uses. It fades as its scrape gets old."""
        at = account.load.at if account.load is not None else None
        weight = 0.5 ** (max(0.0, now - at) / _HALF_LIFE) if at is not None else 0.0
        decodes = weight * account.foreign_decodes
        more = weight * account.foreign_waiting * self._work + self.s * decodes * work
        busier = decodes * (self.c + self.d * self._tokens) * self._per_chunk
        return more * (1 + rate + busier) + sum_ * busier, weight * account.foreign_used

    def _open(self, endpoint: Endpoint, now: float) -> _Account:
        account = self.accounts[endpoint] = _Account(now)
        return account

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        now, n = self.clock(), request.tokens
        account = self.accounts.get(endpoint) or self._open(endpoint, now)
        match = request.signals.get(PrefixMatch, {}).get(endpoint)
        u = n - (match.tokens if match is not None else 0)
        work = self.lin * u + self.att * u * (n - 0.5 * u)
        self._work += _WEIGHT * (work - self._work)
        self._tokens += _WEIGHT * (n - self._tokens)
        crowd = (self.base + self.c * account.decodes + self.d * account.context) * self._per_chunk
        # An answer that is not streamed comes as a whole: its first byte tells nothing of its first token.
        observed = request.sees_answer and request.stream
        sent = _Sent(account, n, round(work * _NS), now, work * (1 + crowd), observed)
        request.notes.setdefault(self, {})[endpoint] = sent
        account.start(sent)

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        sent: _Sent | None = request.notes.get(self, {}).get(endpoint)
        if sent is not None and sent.waiting:
            sent.account.first_token(sent, self.clock())

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        sent: _Sent | None = request.notes.get(self, {}).pop(endpoint, None)
        if sent is None:
            return
        now = self.clock()
        if 200 <= response.status < 300:
            self._residence += _WEIGHT * (now - sent.sent - self._residence)
            if sent.waiting:
                sent.account.first_token(sent, now)
        sent.account.end(sent, now)

    def on_removed(self, endpoint: Endpoint) -> None:
        self.accounts.pop(endpoint, None)

    def statistics(self) -> Mapping[str, float]:
        accounts = self.accounts.values()
        return {
            "pending_seconds": sum(account.pending for account in accounts) / _NS,
            "decodes": sum(account.decodes for account in accounts),
            "foreign_requests": sum(account.foreign_waiting + account.foreign_decodes for account in accounts),
            "residence_seconds": self._residence,
        }
