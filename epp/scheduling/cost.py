"""`expected-ttft`: the default scorer. What sending a request to an endpoint costs all requests, in seconds.

For a request of n prompt tokens and an endpoint that holds all but u of them:

    work   = lin * u + att * u * (n - u / 2)                                     seconds of prefill, attention included
    crowd  = (base + c * decodes + d * their context) / seconds of a full prefill chunk
    memory = max(0, used + n - shared - capacity) / tokens that come free in a second
    stall  = s * requests * (work * (1 + work / residence) + min(pending, work))
    load   = tokens loaded from lower tiers / their speed                        instead of more work, if that is sooner
    shared = factor * work * (g - 1 + busy) + load * (2 + busy)                  or without a load, if that is less
    adapter = turns * residence / slots + what loading it takes * (1 + s * requests + 1 if it displaces another)
    cost   = (1 + crowd) * (factor * (pending + work + stall) + shared) + load + memory + adapter + failing
    failing = excess ** 2 / (1 - excess) * (failure + all of the above)          excess: failures beyond a single one

In these formulas `g` is the parameter `workWeight`, `s` `stallWeight`, `lin` `prefillSecondsPerToken`, `att`
`attentionSecondsPerTokenPair`, `base` `stepSeconds`, `c` `stepSecondsPerDecode`, `d` `stepSecondsPerContextToken`,
`failure` `failureSeconds`; YAML takes these short names too.

`failing` is the time of asking again, `excess / (1 - excess)` times in the mean, and of what an error is worth to a
client. The more surely they are no chance, the more it counts: hence the square. Single failures cost nothing.

`pending` is the work of what was sent there and has no first token yet, with flow control less what must be done of
the first; `busy` the share of the last minute in which there was some; `requests` are those in flight there, and
`residence` is how long requests are in flight in the mean. By Little's law `requests / residence` come in a second. So
a prompt that takes long to compute stalls the requests that it finds and `requests * work / residence` more, which come
meanwhile; of a short prompt these are next to none.

`adapter` is 0 but for a LoRA adapter that is in no slot there, or has to wait for one (`epp.scheduling.adapters`). It
is loaded before a step, so all requests of the batch wait for it.

An engine goes on with its steps while it loads KV, so that stalls no request; but it takes memory from others'
prefixes, which are loaded again when they are asked for, and its way from those who load next: `pending` counts it as
work.

Everything is our own account, exact and instant; the engines' metrics only say what is *not* ours. Which terms matter
was found in virtual time against published policies (docs/policies.md); the constants are priors for an 8B model on one
H100. `factor` is what is learned of the endpoint's speed (`epp.scheduling.speeds`), from first tokens where they are
seen and from what the engine counts between scrapes: its steps, the prompt tokens it computed and the tokens it
generated, foreign ones among them. From these `base`, `c` and `d` are fitted to the pool too, all by one ratio to
`lin` (`epp.scheduling.constants`). So the constants may be wrong by three times. Where first tokens are not seen (the
lean wiring) `pending` ends by the modelled clock, which is put right by those that are asked for (of the prompts that
take longest) and at each scrape by the first tokens that the engine has counted; of one that does not count these
(others than vLLM) `factor` is 1 there unless `speeds` says otherwise. In `work / residence` `factor` counts too:
`residence` is by the clock.
"""

from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import exp, inf
from statistics import median
from typing import Any, ClassVar, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from epp.plugin import (
    ALONE,
    Admitter,
    CacheRoom,
    Cost,
    Detector,
    Endpoint,
    FailureShare,
    LatencyPrediction,
    Level,
    Load,
    PrefixMatch,
    Request,
    Response,
    RoleView,
    Services,
    Slo,
    Slot,
    apart,
)
from epp.scheduling.adapters import NOTHING as NO_NEED
from epp.scheduling.adapters import Adapters, Need
from epp.scheduling.constants import Ratios, Stretch
from epp.scheduling.failures import ONE
from epp.scheduling.fullness import Seats
from epp.scheduling.heaviest import Heaviest
from epp.scheduling.overhead import Overhead
from epp.scheduling.parts import Parts
from epp.scheduling.shortlist import NS, Cheapest, Order, Place, Terms
from epp.scheduling.slo import WINDOW, Promises, Verdict, busy_share, judge
from epp.scheduling.speeds import Speed, Speeds

_SMOOTHING: Final = 0.5
"""Weight of one more scrape in the estimate of foreign traffic."""
_LEAST: Final = 0.1
"""Requests. Less foreign traffic than this is none."""
_HALF_LIFE: Final = 10.0
"""Seconds after which what the last scrape said of foreign traffic counts half."""
_WEIGHT: Final = 0.02
"""Of one more request in the running means: the last fifty or so count."""
_MEMORY: Final = 60.0
"""Seconds over which the share of busy time is remembered."""
_EPOCH: Final = 10 * _MEMORY
"""Seconds after which the weights are scaled anew: exp of much more is no number."""
_LARGE: Final = 32
"""Endpoints. Bills of fewer take no longer than finding those that come into question."""
_SHORTEST: Final = 1e-3
"""Seconds. No request counts as in flight for less, so that their mean can be divided by."""
_DISPLACED: Final = 2.0
"""How often a load counts again, for the prefixes it displaces. Mean TTFT of documents in docs/replay.md, tiers: at 1
1.97 s, at 2 1.74, at 3 1.77; of the chats there within 1 % of each other."""
_SUSPENDED: Final = 60.0
"""Seconds that an endpoint costs which should get nothing: more than any wait that is worth it."""
_CERTAIN: Final = 0.95
"""Most that a share of failures counts as."""
_SLOWER: Final = (1, 1, 2, 8, 64)
"""How many times as long a transfer takes, by `epp.plugin.apart`."""
_ABOVE_0: Final = (
    "prefill_seconds_per_token", "max_num_batched_tokens", "l1_tokens_per_second", "l2_tokens_per_second",
    "transfer_tokens_per_second", "residence_seconds", "full_seconds", "slo_seconds",
)  # fmt: skip
_AT_LEAST_0: Final = (
    "work_weight", "stall_weight", "attention_seconds_per_token_pair", "step_seconds", "step_seconds_per_decode",
    "step_seconds_per_context_token", "failure_seconds", "transfer_seconds", "adapter_load_seconds",
)  # fmt: skip
_FASTER: Final = 0.8
"""Times what a pool's seconds were, from which what waits there is thought to have begun earlier than by them."""
_SUPPOSED: Final = 64
"""Requests of an endpoint of which it is remembered that they were thought to have begun: more than begin in a second.
"""
_RETURNS: Final = 3
"""Times that one may turn out not to have: the count is off where a client left, and keeps nobody waiting for ever."""
_UNDER_WAY: Final = 0.5
"""Of a step that an engine is computing when a request comes: what is left of it in the mean. It is not interrupted."""
_ERRORS: Final = 100
"""Predictions kept that were compared with what came."""
_NOTHING: Final = PrefixMatch(0, 0, 0)
_LAST: Final = 0.1
"""Share of an endpoint's seats, and of its memory, in which it goes from free to full for flow control: what is held
back from lower priorities is a part of that, and not of all."""
_MEAN_TOKENS: Final = 1000
"""Prompt tokens of a foreign request before any of our own was seen."""


def _near(used: float, most: float) -> float:
    """How full: 0 up to the last tenth, 1 at `most`; inf: it is never."""
    return 0.0 if most == inf else max(0.0, 1.0 - (most - used) / (_LAST * most))


def _match(request: Request, endpoint: Endpoint) -> PrefixMatch:
    """What it holds of the prompt; nothing where nobody found that out."""
    match: PrefixMatch = request.signals.get(PrefixMatch, {}).get(endpoint, _NOTHING)
    return match


class _Sent(Struct, eq=False):
    """A request on its way, in one endpoint's account."""

    account: "_Account"
    tokens: int
    work: int
    sent: float
    lasts: tuple[float, float, float]
    """Modelled seconds from its turn to its first token: of loading, and of computing at factor 1, beside who decodes
    there and alone."""
    predicted: LatencyPrediction | None
    """As it was when it was sent."""
    tpot: float | None
    """What it was promised, seconds."""
    observed: bool = True
    """Its first token will be seen."""
    ends: bool = False
    """It ends with its first token: it is decoded elsewhere, or was not seen to begin before it ended."""
    ahead: float = 0.0
    """Modelled seconds of what has to be done before its turn, at factor 1; where its first token will be seen."""
    here: bool = True
    first_at: float | None = None
    """When its first token was seen."""
    adapter: str = ""
    """The LoRA adapter it uses."""
    turns: float = 0.0
    """Requests that it had to wait for until there was a slot for that: then it does not tell the speed."""
    waiting: bool = True
    supposed_at: float = inf
    """When it was first thought to have begun."""
    returns: int = 0
    """Times that it turned out not to have."""


class _Decay:
    """How what was forgets: what counted 1 at time t counts `scale(now) / scale(t)` at `now`."""

    __slots__ = ("epoch",)

    def __init__(self) -> None:
        self.epoch = 0.0

    def scale(self, now: float) -> float:
        return exp((self.epoch - now) / _MEMORY)


class _Account:
    """What one endpoint was given, and what the metrics say it has beyond that."""

    __slots__ = (
        "begun", "busy_from", "busy_since", "busy_until", "context", "counted", "decay", "decodes", "due", "endpoint",
        "foreign_decodes", "foreign_used", "foreign_waiting", "load", "loading_until", "lone", "order", "peak",
        "pending", "place", "promises", "queue", "requests", "seats", "served_at", "since", "speed", "supposed",
        "tokens", "watched", "weight",
    )  # fmt: skip

    def __init__(self, endpoint: Endpoint, now: float, speed: Speed, decay: _Decay) -> None:
        self.endpoint = endpoint
        self.speed = speed
        self.decay = decay
        self.order: Order | None = None
        """Where it has its place, which it keeps true."""
        self.place: Place | None = None
        self.busy_since = now
        """Since when it serves what is in `queue`, as far as `speed` has not observed it."""
        self.watched = True
        """All it did since then was seen."""
        self.weight = 0.0
        """Times `decay`'s scale, and 1 more while a request waits in `queue`: the share of the last minute in which
        one did, the latest seconds counting most."""
        self.pending = 0
        """Nanoseconds of work of the requests in `queue`."""
        self.queue: OrderedDict[_Sent, None] = OrderedDict()
        """Sent, without a first token yet; in order."""
        self.counted = endpoint.load.first_tokens
        """First tokens that the engine had counted when it was looked at last."""
        self.begun = 0
        """Requests that have had theirs since then, or are thought to."""
        self.supposed: deque[_Sent] = deque(maxlen=_SUPPOSED)
        """Those of them that are thought to."""
        self.lone: _Sent | None = None
        """The last one sent, if it found no request of ours here and none has come since."""
        self.decodes = 0
        self.context = 0
        """Prompt tokens of the decodes."""
        self.requests = 0
        self.tokens = 0
        """Prompt tokens of the requests in flight."""
        self.promises = Promises()
        self.served_at = now
        """When the last first token came, or is thought to have come."""
        self.due = inf
        """When the next is thought to come; inf where it will be seen, or no request waits."""
        self.load: Load | None = None
        self.busy_from, self.busy_until = inf, now
        """When requests of ours were there last without a gap; `busy_until` is inf while they are."""
        self.since = now
        """Start of the window of `peak`: when the last scrape was looked at."""
        self.peak = 0
        """Most requests in flight in that window. What a scrape counts beyond it cannot be ours."""
        self.foreign_waiting = self.foreign_decodes = self.foreign_used = 0.0
        self.loading_until = 0.0
        """When the last adapter that we know of has been loaded: until then steps do not tell its speed."""
        self.seats: Seats | None = None
        """Where flow control asks."""

    def start(self, sent: _Sent) -> None:
        first = not self.queue
        if first:
            self.weight -= 1 / self.decay.scale(sent.sent)
            self.busy_since, self.watched = sent.sent, True
        self.queue[sent] = None
        self.pending += sent.work
        self._come(sent)
        if first:
            self.pace()
        else:
            self.rank()

    def decode(self, sent: _Sent) -> None:
        """It comes with its prompt computed elsewhere. What it reads counts from now on, though it may take a while."""
        sent.waiting = False
        self.begun += 1
        self.decodes += 1
        self.context += sent.tokens
        self._come(sent)
        self.rank()

    def _come(self, sent: _Sent) -> None:
        if self.requests:
            self.lone = None
        else:
            self.lone, self.busy_from, self.busy_until = sent, sent.sent, inf
        self.requests += 1
        self.tokens += sent.tokens
        self.promises.start(sent.tpot, sent.lasts[2], sent.sent)
        if self.requests > self.peak:
            self.peak = self.requests

    def _go(self, sent: _Sent, now: float) -> None:
        sent.here = False
        del sent.account  # which may still name it: when the account is let go, no cycle is left for the collector
        self.requests -= 1
        self.tokens -= sent.tokens
        if sent.tpot is not None:
            self.promises.end(sent.tpot)
        if not self.requests:
            self.busy_until = now

    def ahead(self, now: float) -> float:
        """Modelled seconds, at factor 1, of what waits; of the first what is left, by the model."""
        if not self.queue:
            return 0.0
        head = next(iter(self.queue))
        done = (now - max(head.sent, self.served_at)) / self.speed.factor
        return self.pending / NS - min(max(done, 0.0), head.work / NS)

    @property
    def floor(self) -> int:
        """Nanoseconds of the work in `queue` that bills count, at least and whenever.

        Without flow control that is all of it: many wait there, and share steps with the rest of the first. With flow
        control an endpoint has a prompt or two to compute, so who comes next waits for what is left of it, by `ahead`.
        """
        if self.seats is None or not self.queue:
            return self.pending
        return self.pending - next(iter(self.queue)).work

    def first_token(self, sent: _Sent, at: float) -> None:
        """`sent` begins to decode. Service is in order, so those before it whose first tokens are not seen have begun
        too.
        """
        if next(iter(self.queue)) is not sent:
            for earlier in [*takewhile(lambda each: each is not sent, self.queue)]:
                if not earlier.observed:
                    self._begun(earlier, at)
        self._begun(sent, at)
        self.served_at = at
        self.pace()

    def _begun(self, sent: _Sent, at: float) -> None:
        """Its prompt is computed, so it waits no more."""
        self.begun += 1
        self._leave_queue(sent, at)
        if sent.ends:
            self._go(sent, at)
        else:
            self.decodes += 1
            self.context += sent.tokens

    def expire(self, now: float) -> None:
        """Let those begin to decode whose modelled first token is past."""
        while self.due <= now:
            self.watched = False
            head = next(iter(self.queue))
            if self.due < head.supposed_at:
                head.supposed_at = self.due
            self.supposed.append(head)
            self._begun(head, self.due)
            self.served_at = self.due
            self.pace()

    def count(self, load: Load, now: float) -> None:
        """Put right who has begun, by the first tokens that the engine has counted until `now`.

        What cannot be ours teaches nothing.
        """
        self.expire(now)
        counted = load.first_tokens - self.counted
        if load.first_tokens and counted >= 0 and load.waiting + load.running <= self.peak:
            more = counted - self.begun
            if more > 0:
                self._begin(more, now)
            elif more < 0:
                back = [one for one in reversed(self.supposed) if one.here and one.returns < _RETURNS]
                self._return(back[:-more], now)
        self.counted, self.begun = load.first_tokens, 0
        self.supposed.clear()

    def _begin(self, count: int, now: float) -> None:
        """So many more of those that wait have begun, as far as they are not seen themselves.

        How far the next has come is not known: half way, if there was time for it.
        """
        since = self.served_at
        while count and self.queue and not (head := next(iter(self.queue))).observed:
            self.watched = False
            self.first_token(head, now)
            count -= 1
        if self.queue:
            load, work, _ = next(iter(self.queue)).lasts
            self.served_at = max(since, now - 0.5 * (load + self.speed.factor * work))
        self.pace()

    def _return(self, latest: Sequence[_Sent], now: float) -> None:
        """These have not begun: they are the first of those that wait, the last of them foremost.

        They come as late again as they are now, and together: engines compute prompts in batches. What is done of the
        one behind them stays done.
        """
        if not latest:
            return
        if self.queue:
            head = next(iter(self.queue))
            load, work, alone = head.lasts
            done = max(0.0, now - max(head.sent, self.served_at))
            computed = max(0.0, done - load) / self.speed.factor
            head.lasts = max(0.0, load - done), max(0.0, work - computed), alone
        else:
            self.weight -= 1 / self.decay.scale(now)
        self.watched = False
        for sent in latest:
            sent.waiting = True
            sent.returns += 1
            self.queue[sent] = None
            self.queue.move_to_end(sent, last=False)
            self.pending += sent.work
            self.begun -= 1
            self.decodes -= 1
            self.context -= sent.tokens
            sent.lasts = now - sent.supposed_at if sent is latest[-1] else 0.0, 0.0, sent.lasts[2]
        self.served_at = now
        self.pace()

    def end(self, sent: _Sent, now: float) -> None:
        self._go(sent, now)
        if sent.waiting:
            self.watched = False
            if next(iter(self.queue)) is sent:
                self.served_at = now
            self._leave_queue(sent, now)
            self.pace()
        else:
            self.decodes -= 1
            self.context -= sent.tokens
            self.rank()

    def hasten(self) -> None:
        """Serve what waits anew, from when its first was sent: by the speed known until now that began too late."""
        head = next(iter(self.queue), None)
        if head is not None:
            self.served_at = min(self.served_at, head.sent)
            self.pace()

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

    def busy(self, start: float, end: float) -> bool:
        """Whether requests of ours were there all the time between the two."""
        return self.busy_from <= start and end <= self.busy_until

    def _leave_queue(self, sent: _Sent, now: float) -> None:
        del self.queue[sent]
        sent.waiting = False
        self.pending -= sent.work
        if not self.queue:
            self.weight += 1 / self.decay.scale(now)

    def pace(self) -> None:
        """Say anew when the next first token is thought to come: another request is first, or the speed another."""
        self.due = inf
        if self.queue and not (head := next(iter(self.queue))).observed:
            load, work, _ = head.lasts
            began = self.served_at if self.served_at > head.sent else head.sent
            self.due = began + load + self.speed.factor * work
        self.rank()

    def rank(self) -> None:
        """Keep its place true."""
        if self.order is not None:
            self.order.put(self)


def _smooth(old: float, new: float) -> float:
    value = old + _SMOOTHING * (new - old)
    return value if value >= _LEAST else 0.0


class _Costs:
    """What bills of a request would say, but for memory (`shortlist.Costs`)."""

    def __init__(self, scorer: "ExpectedTtft", request: Request, now: float, scale: float) -> None:
        self._scorer = scorer
        self._tokens = request.tokens
        self._failures = request.signals.get(FailureShare, {})
        self._now = now
        self._scale = scale
        self._adapter = scorer.adapter_of(request)
        self.fit = scorer.adapters.holders(self._adapter) if self._adapter else {}
        self.beyond = scorer.adapter_load_seconds if self._adapter else 0.0
        self._behind_others, self._part = scorer._parts.look(scorer._work)

    def terms(self, match: PrefixMatch) -> Terms:
        one = self._scorer
        work, _, _ = one._work_and_load(self._tokens, match)
        calm = one._base * one._per_chunk
        return Terms(work, one.work_weight - 1, one.stall_weight, calm, 1 / one._residence, self._scale)

    def of(self, account: _Account, terms: Terms) -> tuple[float, bool]:
        one, factor = self._scorer, account.speed.factor
        busy = account.weight * terms.scale + (1.0 if account.queue else 0.0)
        rate = one._step(account) * one._per_chunk
        waits = account.pending if account.seats is None else account.ahead(self._now) * NS
        sum_ = terms.least(factor, account.requests, busy, waits) / (1 + terms.calm)
        cost, certain = (1 + rate) * sum_, True
        if account.foreign_waiting or account.foreign_decodes:
            certain = account.load is account.endpoint.load
            if certain:
                cost += one._foreign(account, self._now, factor * terms.work, sum_, rate)[0]
        if self._behind_others and account.endpoint not in self._part:
            cost += factor * self._behind_others
        if self._adapter:
            cost += one._adapter_seconds(account, one.adapters.need(account.endpoint, self._adapter))
        if account.endpoint in self._failures:
            cost += one._failing(self._failures[account.endpoint], cost)
        return cost, certain


@dataclass(eq=False)
class ExpectedTtft(Cost, Detector, Admitter):
    """Seconds of waiting that a pick causes, to this request and to others; the lowest bill wins."""

    needs: ClassVar[tuple[type, ...]] = (PrefixMatch, CacheRoom, FailureShare)
    meanings: ClassVar[Mapping[str, str]] = {
        "pending": "prefill of requests sent there before that have no first token yet",
        "own": "prefill of what of this prompt is not cached there, or loading it from lower tiers where that is less",
        "shared": "the same work again, for requests that come after and wait for it; of a load twice and more, for "
        "those whose prefixes it displaces, but no more than computing it instead",
        "stall": "what requests in flight there, and those that come meanwhile, lose by this prompt's prefill",
        "crowd": "what the decodes there take from each engine step, so from all of the above",
        "foreign": "what all of this grows by traffic that other pickers or clients send there, as the engine's "
        "metrics show it, and by what other replicas of this picker may have sent there and not told yet",
        "memory": "waiting until running requests have freed enough KV memory",
        "adapter": "loading the LoRA adapter that is asked for, for all requests that wait for that, and waiting for a "
        "slot for it",
        "failing": "what its recent failures are likely to cost",
        "slo": "SLOs that are expected to be missed there, this request's own and those of requests in flight, and the "
        "room that is left below them",
    }
    terms: ClassVar[tuple[str, ...]] = tuple(meanings)
    looks_at: ClassVar[tuple[type, ...]] = (CacheRoom,)
    shortlist_from: ClassVar[float] = _LARGE

    work_weight: float = field(default=1.5, metadata={"alias": "g"})
    """How often a request's own work counts where no request waited in the last minute, and once more where one always
    did: once for itself, the rest for those behind it. At 1 in all, shared documents are copied to idle endpoints to
    save one request a second, and all requests wait longer. No unit."""
    stall_weight: float = field(default=0.2, metadata={"alias": "s"})
    """Seconds of TTFT that a second's stall of one request in flight is worth."""
    prefill_seconds_per_token: float = field(default=1 / 20_000, metadata={"alias": "lin"})
    """Seconds per prefilled token. Published: 15-25 thousand tokens/s for 8B on an H100 (16 GFLOP a token)."""
    attention_seconds_per_token_pair: float = field(default=1.65e-9, metadata={"alias": "att"})
    """Seconds per pair of a prefilled token and one before it; 3.3e-5 of a token's prefill from the shape of Llama 8B:
    4 * 4096 * 32 FLOP a pair to 16 GFLOP a token."""
    step_seconds: float = field(default=6.5e-3, metadata={"alias": "base"})
    """Seconds of an engine step whatever is in it: reading 16 GB of weights at three quarters of 3.35 TB/s."""
    step_seconds_per_decode: float = field(default=15e-6, metadata={"alias": "c"})
    """Seconds per decode in a step: 16 GFLOP at the dense peak; the rest hides behind the reading of the weights."""
    step_seconds_per_context_token: float = field(default=48e-9, metadata={"alias": "d"})
    """Seconds per token of context a decode reads: 128 KiB of KV at 80 % of 3.35 TB/s."""
    max_num_batched_tokens: int = field(default=8192, metadata={"alias": "chunk"})
    """Prefill tokens of a full step: vLLM's flag of this name, with its default on an H100."""
    l1_tokens_per_second: float = field(default=300_000, metadata={"alias": "l1Speed"})
    """Tokens a second that come from a node's memory to the device: 128 KiB of KV each over PCIe 5.0 x16, 63 GB/s by
    its specification, of which three fifths are taken to be reached. An estimate; only its ratio to the speed of
    prefill counts."""
    l2_tokens_per_second: float = field(default=30_000, metadata={"alias": "l2Speed"})
    """Tokens a second from shared storage: a third of 100 Gbit/s, as much as one client's connections are taken to
    reach. Measured on CPUs with a small model: l2 takes four to six times as long as l1 (LMCache over Redis)."""
    transfer_tokens_per_second: float = field(default=200_000, metadata={"alias": "transferSpeed"})
    """Where one endpoint prefills and another decodes: tokens a second that pass between them. 128 KiB of KV each over
    400 Gbit/s, of which half is taken to be reached; an estimate. Where topology labels say that they are in different
    racks, zones or regions, it is a half, an eighth, a sixty-fourth."""
    transfer_seconds: float = field(default=0.01, metadata={"alias": "transfer"})
    """Seconds that such a transfer takes whatever its size: a second request, and asking for the blocks."""
    residence_seconds: float = field(default=10.0, metadata={"alias": "residence"})
    """Seconds a request stays at an endpoint, until the first have been seen. What runs fills the memory and is gone
    after that time, so memory comes free at capacity / residence, and as many come as go (Little's law)."""
    failure_seconds: float = field(default=2.0, metadata={"alias": "failure"})
    """Seconds that a client loses by an error, beside those of asking again."""

    adapter_load_seconds: float = field(default=0.5, metadata={"alias": "adapterLoad"})
    """Seconds that an engine stands still to load a LoRA adapter. An estimate for 80 MB (rank 16, Llama 8B)."""

    full_seconds: float = field(default=0.02, metadata={"alias": "full"})
    """For flow control: an endpoint is full when what waits there takes so long, or as long as one of its steps if that
    is more: engines look at what waits once a step. With 0.01 in place of 0.02 the TTFT of chats beside batches is the
    same, with 0.05 a third longer (p95), and the batches' tokens a second stay within 2 %."""

    slo: Literal["best-effort", "shed", "ignore"] = "best-effort"
    """What becomes of a request whose SLO no endpoint would keep: it goes where it costs least, which counts those of
    others, or gets 429. `ignore`: a request with an SLO is picked for as any other."""
    slo_seconds: float = field(default=10.0, metadata={"alias": "missed"})
    """Seconds that a missed SLO costs. Where one is likely to be missed, another endpoint may cost so much more."""
    slo_packing: float = field(default=0.0, metadata={"alias": "packing"})
    """Seconds of cost that an endpoint's room is worth, which is a share of an SLO. Above 0 a request with an SLO goes
    where it just fits among those that keep it; below 0 where most is left; 0: where it costs least."""

    learn_speeds: bool = True
    """Learn how fast each endpoint is, from first tokens that are seen and from what the engine counts."""
    speeds: Mapping[str, float] = field(default_factory=dict)
    """Speeds that are known: shell pattern of an endpoint's name (`default/llama-l4-*`) to its speed, 1 as modelled,
    0.5 half as fast. The first that matches counts, and nothing is learned of these endpoints."""

    accounts: dict[Endpoint, _Account] = field(default_factory=dict, init=False)
    adapters: Adapters = field(default_factory=Adapters, init=False)
    _sent: Slot[_Sent] = field(default_factory=Slot, init=False, repr=False)
    _predicted: Slot[dict[Endpoint, LatencyPrediction]] = field(default_factory=Slot, init=False, repr=False)
    """Of a request with an SLO: what was predicted of each endpoint that was looked at."""

    def __post_init__(self) -> None:
        for name in _ABOVE_0:
            if (value := getattr(self, name)) <= 0:
                raise ValueError(f"{name}: {value}, expected more than 0")
        for name in _AT_LEAST_0:
            if (value := getattr(self, name)) < 0:
                raise ValueError(f"{name}: {value}, expected 0 or more")
        for pattern, speed in self.speeds.items():
            if not 0 < speed < inf:
                raise ValueError(f"speeds: {pattern}: {speed}, expected more than 0")
        full_chunk = self.prefill_seconds_per_token * self.max_num_batched_tokens
        self._speeds = Speeds(self.speeds, full_chunk)
        self._overhead = Overhead()
        """Of predictions alone: bills have none."""
        self._residence = self.residence_seconds
        self._tokens = float(_MEAN_TOKENS)
        self._work = _MEAN_TOKENS * self.prefill_seconds_per_token
        """Mean of the seconds of computing a request's prompt, at factor 1; and of the tokens computed."""
        self._computed = float(_MEAN_TOKENS)
        self._squares = self._work**2
        """Mean of the squares of the work: over its mean, the work in which a moment of prefill falls."""
        self._heaviest = Heaviest(_MEAN_TOKENS)
        """Of prompts by the tokens that are computed, where answers are seen if they are asked for."""
        self._asked = 0
        self._errors: deque[float] = deque(maxlen=_ERRORS)
        self._tpot_errors: deque[float] = deque(maxlen=_ERRORS)
        """Of predicted against measured TTFT and TPOT, where tokens were seen and not asked for; shares of what was
        measured."""
        self._per_chunk = 1 / full_chunk
        self._decay = _Decay()
        self._endpoints: Callable[[], Sequence[Endpoint]] = tuple
        self._parts = Parts(tuple, lambda: ALONE)
        self._order: Order | None = None
        """Of a large pool: its accounts, as they were in order when speeds had the version `_ordered`."""
        self._ordered = 0
        self._roles = RoleView()
        self._ratios, self._pool = Ratios(0.0, 0.0), 1.0
        self._adopt()

    def _adopt(self) -> None:
        """Take over what was learned of the pool."""
        ratios, pool = self._speeds.ratios, self._speeds.pool
        if ratios is not self._ratios:  # what `factor` times these is this pool's
            self._ratios = ratios
            self._base, self._c = ratios.steps * self.step_seconds, ratios.decodes * self.step_seconds_per_decode
            self._d = ratios.decodes * self.step_seconds_per_context_token
        if pool < _FASTER * self._pool:
            for account in self.accounts.values():
                account.hasten()
        if pool != self._pool:
            self._pool = pool if pool < _FASTER * self._pool else max(pool, self._pool)

    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        """One row per endpoint, in the order of `terms`."""
        now, n = self.clock(), request.tokens
        matches, rooms = request.signal(PrefixMatch), request.signal(CacheRoom)
        again, s, base, c, d = self.work_weight - 1, self.stall_weight, self._base, self._c, self._d
        lin, att = self.prefill_seconds_per_token, self.attention_seconds_per_token_pair
        per_chunk, accounts = self._per_chunk, self.accounts
        calm, leaving, scale = base * per_chunk, 1 / self._residence, self._scale(now)
        rows: list[tuple[float, ...]] = []
        adapter = self.adapter_of(request)
        work, load, whole, last = 0.0, 0.0, 0.0, None
        behind_others, part = self._parts.look(self._work)
        for endpoint in endpoints:
            if (account := accounts.get(endpoint)) is None:
                account = self._open(endpoint, now)
            room = rooms[endpoint]
            if endpoint.load is not account.load:
                self._scraped(account, room, now)
            if account.due <= now:
                account.expire(now)
            if (match := matches[endpoint]) is not last:  # most endpoints hold the same
                last = match
                u = n - match.tokens
                work = whole = lin * u + att * u * (n - 0.5 * u)
                load = 0.0
                if match.l1 or match.l2:
                    work, load, _ = self._work_and_load(n, match)
            factor = account.speed.factor
            own = factor * work
            busy = account.weight * scale
            if requests := account.requests:
                busy += 1.0 if account.queue else 0.0
                pending = factor * (account.pending / NS if account.seats is None else account.ahead(now))
                stall = s * requests * (own * (1 + own * leaving) + (pending if pending < own else own))
                rate = (base + c * account.decodes + d * account.context) * per_chunk
            else:
                pending = stall = 0.0
                rate = calm
            shared = (again + busy) * own
            if load:
                most = (again + busy) * factor * whole
                shared = min(most, shared + (_DISPLACED + busy) * load)
            sum_ = pending + own + shared + stall
            foreign = 0.0
            over: float = room.pinned + n - room.shared - room.capacity
            if account.foreign_waiting or account.foreign_decodes:
                foreign, used = self._foreign(account, now, own, sum_, rate)
                over += used
            if behind_others and endpoint not in part:
                foreign += factor * behind_others
            memory = over / room.capacity * self._residence if over > 0 and room.capacity else 0.0
            other = self._adapter_seconds(account, self.adapters.need(endpoint, adapter)) if adapter else 0.0
            rows.append((pending, own + load, shared, stall, rate * sum_, foreign, memory, other, 0.0, 0.0))
        if request.peer is not None and request.stage == "prefill":
            self._add_transfers(request, endpoints, request.peer, rows)
        if failures := request.signals.get(FailureShare):
            self._add_failures(failures, endpoints, rows)
        return rows if request.slo is None else self._judged(request, request.slo, endpoints, rows)

    def _scraped(self, account: _Account, room: CacheRoom, now: float) -> None:
        """Its endpoint has a new load."""
        before, load = account.load, account.endpoint.load
        account.compare(load, room, now)
        if before is not None and self.learn_speeds:
            self._learn(account, before, load, now)

    def adapter_of(self, request: Request) -> str:
        """The LoRA adapter it asks for; "" where it is not known to be one."""
        return request.model if request.model in self.adapters.known else ""

    def _adapter_seconds(self, account: _Account, need: Need) -> float:
        """What an adapter's request costs there beside what any request does."""
        load = self.adapter_load_seconds * need.loads
        return need.turns * self._residence + load * (1 + self.stall_weight * account.requests + need.displaces)

    def _add_failures(
        self, failures: Mapping[Endpoint, FailureShare], endpoints: Sequence[Endpoint], rows: list[tuple[float, ...]]
    ) -> None:
        for i, endpoint in enumerate(endpoints):
            if endpoint in failures:
                rows[i] = (*rows[i][:-2], self._failing(failures[endpoint], sum(rows[i])), 0.0)

    def _add_transfers(
        self, request: Request, endpoints: Sequence[Endpoint], decode: Endpoint, rows: list[tuple[float, ...]]
    ) -> None:
        for i, endpoint in enumerate(endpoints):
            pending, own, *rest = rows[i]
            rows[i] = (pending, own + self._transfer(request, endpoint, decode), *rest)

    def _transfer(self, request: Request, prefill: Endpoint, decode: Endpoint) -> float:
        """Seconds until one has from the other what it does not hold of the prompt."""
        match = _match(request, decode)
        distance = apart(prefill, decode)
        slower = _SLOWER[distance] if distance is not None else 1
        return self.transfer_seconds + slower * (request.tokens - match.tokens) / self.transfer_tokens_per_second

    def might_split(self, request: Request, decode: Endpoint) -> bool:
        """Whether all that a prefill at `decode` costs is more than the least that a transfer does."""
        account = self.accounts.get(decode)
        match = _match(request, decode)
        work, load, _ = self._work_and_load(request.tokens, match)
        if account is None:
            return work + load > self.transfer_seconds
        own = account.speed.factor * (work + account.pending / NS)
        return own * (1 + account.requests) + load > self.transfer_seconds

    def ways(self, request: Request, decode: Endpoint, prefill: Endpoint) -> Mapping[str, float]:
        """Seconds that all requests together lose, until their last tokens, by a prefill `here` (where it is decoded)
        and `apart`.

        A prefill stalls each answer in flight there for as long as it takes, whole: who waits for the last token does
        not mind which of them comes late. Memory and the adapter are not compared: who decodes needs them either way. A
        way that is expected to miss SLOs takes as much longer as the bill's `slo` would say.
        """
        (there, row), account = self.bill(request, (prefill, decode)), self.accounts[decode]
        pending, own, shared, stall, crowd, foreign, _, _, failing, _ = row
        sum_ = pending + own + shared + stall
        rate = crowd / sum_ if sum_ else 0.0
        stalled = account.requests * own * (1 + own / self._residence)
        here = (1 + rate) * (pending + own) + stalled + foreign + failing
        ways = {"here": here, "apart": sum(there[:-1]) + self._transfer(request, prefill, decode)}
        if request.slo is not None and self.slo != "ignore":
            local, split = self.looked(request, (decode,))[decode], self._split(request, decode, prefill)
            for way, seen in (("here", local), ("apart", split)):
                ways[way] += self._missing(judge(request.slo, request.waited, 0.0, seen), account, seen)
        return ways

    # --- SLOs

    def predict(
        self, request: Request, endpoints: Sequence[Endpoint], *, computed: bool = False
    ) -> Mapping[Endpoint, LatencyPrediction]:
        """What the request would find at each of `endpoints` now. `computed`: its prompt comes computed."""
        now, n = self.clock(), request.tokens
        matches, rooms = request.signals.get(PrefixMatch, {}), request.signals.get(CacheRoom, {})
        found, adapter = {}, self.adapter_of(request)
        for endpoint in endpoints:
            account = self.accounts.get(endpoint) or self._open(endpoint, now)
            if account.due <= now:
                account.expire(now)
            work, load = (0.0, 0.0) if computed else self._work_and_load(n, matches.get(endpoint, _NOTHING))[:2]
            need = self.adapters.need(endpoint, adapter) if adapter else NO_NEED
            found[endpoint] = self._predict(account, (n, work, load), need, rooms.get(endpoint), now)
        return found

    def _predict(
        self, account: _Account, prompt: tuple[int, float, float], need: Need, room: CacheRoom | None, now: float
    ) -> LatencyPrediction:
        """`prompt`: its tokens, and modelled seconds of computing and of loading it."""
        n, work, load = prompt
        factor, promises = account.speed.factor, account.promises
        step = self._step(account)
        requests: float = account.requests
        context: float = account.tokens
        ahead = account.ahead(now)
        over = 0.0
        if account.foreign_waiting or account.foreign_decodes:
            at = account.load.at if account.load is not None else None
            weight = 0.5 ** (max(0.0, now - at) / _HALF_LIFE) if at is not None else 0.0
            ahead += weight * account.foreign_waiting * self._work
            requests += weight * (account.foreign_waiting + account.foreign_decodes)
            context += weight * (account.foreign_waiting + account.foreign_decodes) * self._tokens
            over = weight * account.foreign_used
        if room is not None and room.capacity:
            over += room.pinned + n - room.shared - room.capacity
        c, d, prefill = self._c, self._d, promises.prefill(now)
        left = 1 - busy_share(factor * prefill)
        before = factor * (self._base + c * requests + d * context)
        each = before + factor * (c + d * n)
        computing = factor * (ahead + work) * (1 + step * self._per_chunk)
        besides = factor * step + load + self.adapter_load_seconds * need.loads
        if account.decodes or account.foreign_decodes:  # of prompts that are computed `ahead` has what is left
            besides += _UNDER_WAY * before / left
        ttft = self._overhead.seconds + self._overhead.share * computing + besides
        parts: tuple[float, float] | None = (computing / self._speeds.pool, besides)
        if need.turns:
            ttft, parts = ttft + need.turns * self._residence, None
        if over > 0 and room is not None and room.capacity:
            ttft, parts = ttft + over / room.capacity * self._residence, None
        after = each / (1 - busy_share(factor * (prefill + work / WINDOW)))
        return LatencyPrediction(ttft, each / left, before / left, after, promises.tightest, account.requests, parts)

    def looked(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, LatencyPrediction]:
        """The same, found once for a pick."""
        known = self._predicted.get(request)
        if known is None or not known.keys() >= {*endpoints}:
            known = self._predicted.set(request, {**self.predict(request, endpoints)})
        return known

    def _split(self, request: Request, decode: Endpoint, prefill: Endpoint) -> LatencyPrediction:
        """What it would find if it was prefilled at one endpoint and decoded at another: the wait and the prefill
        there, the transfer, and a step here, of a prompt that is not computed.
        """
        there = self.predict(request, (prefill,))[prefill]
        here = self.predict(request, (decode,), computed=True)[decode]
        return replace(here, ttft=there.ttft + self._transfer(request, prefill, decode) + here.ttft, parts=None)

    def _prospects(
        self, request: Request, slo: Slo, endpoints: Sequence[Endpoint]
    ) -> Mapping[Endpoint, LatencyPrediction]:
        """What the request would find at each of `endpoints`: where others prefill, by the way that suits its SLO best,
        with the one that is chosen for that, or the one where its first token comes soonest.
        """
        if request.stage == "prefill":
            decode = request.peer
            return (
                self.predict(request, endpoints)
                if decode is None
                else {each: self._split(request, decode, each) for each in endpoints}
            )
        seen, pool = self.looked(request, endpoints), self._endpoints()
        others = self._roles.of(pool).prefill if request.peer is None else (request.peer,)
        if not others:
            return seen
        there = self.predict(request, others)
        found = {}
        for endpoint in endpoints:
            prefill = min((each for each in others if each is not endpoint), key=lambda e: there[e].ttft, default=None)
            ways = [seen[endpoint]]
            if prefill is not None:
                ways.append(self._split(request, endpoint, prefill))
            verdicts = [judge(slo, request.waited, 0.0, way) for way in ways]
            found[endpoint] = ways[min(range(len(ways)), key=lambda i: (not verdicts[i].kept, verdicts[i].excess))]
        return found

    def _judged(
        self, request: Request, slo: Slo, endpoints: Sequence[Endpoint], rows: Sequence[tuple[float, ...]]
    ) -> Sequence[tuple[float, ...]]:
        """The bills with what SLOs make of them."""
        if self.slo == "ignore" or request.stage == "encode":
            return rows
        if request.stage == "prefill":  # its tokens come from elsewhere
            slo = Slo(slo.ttft)
        seen, failures = self._prospects(request, slo, endpoints), request.signals.get(FailureShare, {})
        judged = []
        for row, endpoint in zip(rows, endpoints, strict=True):
            verdict = judge(slo, request.waited, row[1], seen[endpoint])
            term = self._missing(verdict, self.accounts[endpoint], seen[endpoint])
            if self.slo_packing and request.stage != "prefill":  # rooms are kept where it is decoded
                broken = endpoint in failures and failures[endpoint].suspended
                term += self._packed(verdict.room if verdict.kept and not broken else None)
            judged.append((*row[:-1], term))
        return judged

    def _missing(self, verdict: Verdict, account: _Account, seen: LatencyPrediction) -> float:
        """Seconds for the SLOs that it is expected to miss by going there: its own, and those of requests there."""
        return self.slo_seconds * (verdict.missed + account.promises.harm(seen.tpot_before, seen.tpot_after))

    def _packed(self, room: float | None) -> float:
        """Seconds for the room that an endpoint has; None: it keeps nothing."""
        if room is None:
            return abs(self.slo_packing)
        return self.slo_packing * room if self.slo_packing > 0 else -self.slo_packing * (1 - room)

    def refusal(self, request: Request, endpoints: Sequence[Endpoint]) -> str:
        if (slo := request.slo) is None or self.slo != "shed":
            return ""
        roles = self._roles.of(endpoints)
        if not roles.decode:
            return ""
        seen = self._prospects(request, slo, roles.decode)
        if any(judge(slo, request.waited, 0.0, each).kept for each in seen.values()):
            return ""
        ttft = min(each.ttft for each in seen.values())
        tpot = min(each.tpot for each in seen.values())
        wanted = [f"{name} {what * 1000:g} ms" for name, what in (("TTFT", slo.ttft), ("TPOT", slo.tpot)) if what]
        return (
            f"no endpoint would keep the SLO ({', '.join(wanted)}) of this request and those of the requests that run "
            f"there: the best now are a TTFT of {ttft * 1000:.0f} ms and a TPOT of {tpot * 1000:.0f} ms; retry later"
        )

    def predictions(self, request: Request) -> Mapping[Endpoint, LatencyPrediction]:
        """Of all that were looked at; of the chosen one where only it was, or where another one prefills."""
        if not request.stage and (seen := self._predicted.get(request)) is not None:
            return seen
        sent = self._sent.get(request)
        return {} if sent is None or sent.predicted is None else {sent.account.endpoint: sent.predicted}

    def _expected(
        self, request: Request, account: _Account, prompt: tuple[int, float, float], need: Need, now: float
    ) -> LatencyPrediction:
        """What was predicted when it was picked; if nothing was, what is now."""
        seen = self._predicted.get(request)
        if seen is not None and (found := seen.get(account.endpoint)) is not None:
            return found
        return self._predict(account, prompt, need, request.signals.get(CacheRoom, {}).get(account.endpoint), now)

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """Modelled seconds of computing its prompt there and of loading from lower tiers; and its TPOT SLO."""
        sent = self._sent.get(request)
        return None if sent is None else (sent.lasts[2], sent.lasts[0], sent.tpot)

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        """What its picker knew of the cache there counts here too, so all replicas have the same on account."""
        work, load, tpot = state or (*self._work_and_load(request.tokens, _NOTHING)[:2], None)
        if work < 0 or load < 0 or not (tpot is None or tpot > 0):
            raise ValueError(f"{work} s of computing, {load} s of loading, {tpot} s per token")
        now = self.clock()
        account = self.accounts.get(endpoint) or self._open(endpoint, now)
        self._enter(request, account, (work, load), tpot, now)

    def _learn(self, account: _Account, before: Load, load: Load, now: float) -> None:
        """Compare the time between two scrapes with the work that the engine itself counts in it, whoever sent that.

        Only where requests of ours were there all the time: then it was at work all the time.
        """
        if before.at is None or load.at is None or not account.busy(before.at, load.at):
            return
        if before.at < account.loading_until:
            return
        steps, first = load.steps - before.steps, load.first_tokens - before.first_tokens
        decoded = load.generated_tokens - before.generated_tokens - first
        computed = load.computed_tokens - before.computed_tokens
        if steps <= 0 or first < 0 or decoded < 0 or computed < 0:
            return  # restarted, or not counted there
        context = account.context / account.decodes if account.decodes else self._tokens
        prefill = computed * self._work / self._computed
        decodes = (self.step_seconds_per_decode + self.step_seconds_per_context_token * context) * decoded
        prompt = self._squares / self._work if self._work else 0.0
        one = Stretch(prefill, self.step_seconds * steps, decodes, load.at - before.at)
        self._speeds.counted(account.speed, one, now, prompt=prompt)
        self._adopt()
        account.pace()

    def _failing(self, known: FailureShare, cost: float) -> float:
        """What is to be added to the cost of an endpoint that failed lately."""
        excess = max(0.0, min(known.share, _CERTAIN) - ONE) / (1 - ONE)
        return excess * excess / (1 - excess) * (self.failure_seconds + cost) + (_SUSPENDED if known.suspended else 0.0)

    def _work_and_load(self, n: int, match: PrefixMatch) -> tuple[float, float, int]:
        """Seconds of computing, of loading from l1 alone or both where less of both is needed then, and the tokens that
        are computed.
        """
        lin, att = self.prefill_seconds_per_token, self.attention_seconds_per_token_pair
        load, u = 0.0, n - match.tokens
        least = lin * u + att * u * (n - 0.5 * u), load, u
        if match.l1 or match.l2:
            for tokens, speed in ((match.l1, self.l1_tokens_per_second), (match.l2, self.l2_tokens_per_second)):
                u = max(0, u - tokens)
                load += tokens / speed
                rest = lin * u + att * u * (n - 0.5 * u)
                if load + rest < least[0] + least[1]:
                    least = rest, load, u
        return least

    def _foreign(self, account: _Account, now: float, work: float, sum_: float, rate: float) -> tuple[float, float]:
        """What foreign traffic adds to the cost, and the KV tokens it uses. It fades as its scrape gets old."""
        at = account.load.at if account.load is not None else None
        weight = 0.5 ** (max(0.0, now - at) / _HALF_LIFE) if at is not None else 0.0
        decodes = weight * account.foreign_decodes
        more = weight * account.foreign_waiting * self._work * account.speed.factor
        more += self.stall_weight * decodes * work * (1 + work / self._residence)
        step = self._c + self._d * self._tokens
        busier = decodes * step * self._per_chunk
        return more * (1 + rate + busier) + sum_ * busier, weight * account.foreign_used

    def _open(self, endpoint: Endpoint, now: float) -> _Account:
        self._scale(now)
        account = self.accounts[endpoint] = _Account(endpoint, now, self._speeds.open(endpoint), self._decay)
        return account

    def _scale(self, now: float) -> float:
        """What the accounts' weights are to be multiplied with."""
        decay = self._decay
        if now - decay.epoch > _EPOCH:
            lost, decay.epoch = decay.scale(now), now
            for account in self.accounts.values():
                account.weight *= lost
            self._forget_order()
        return decay.scale(now)

    def start(self, services: Services) -> None:
        self._endpoints = services.endpoints
        self._parts = Parts(services.endpoints, services.replicas)

    def shortlist(
        self,
        request: Request,
        endpoints: Sequence[Endpoint],
        levels: Iterator[Level],
        count: int,
        up_to: float | None = None,
    ) -> tuple[Sequence[Endpoint], float] | None:
        if endpoints is not self._endpoints():  # a gateway's subset, which may be another each time
            return None
        now = self.clock()
        scale, order = self._scale(now), self._order
        if order is None or order.endpoints is not endpoints or self._ordered != self._speeds.version:
            order = self._put_in_order(endpoints, now)
        order.expire(now)
        return order.find(levels, _Costs(self, request, now, scale), Cheapest(count, up_to))

    def _put_in_order(self, endpoints: Sequence[Endpoint], now: float) -> Order:
        self._forget_order()
        accounts = [self.accounts.get(endpoint) or self._open(endpoint, now) for endpoint in endpoints]
        order = self._order = Order(endpoints, accounts)
        self._ordered = self._speeds.version
        for account in accounts:
            account.order = order
        return order

    def _forget_order(self) -> None:
        self._order = None
        for account in self.accounts.values():
            account.order = None

    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        """For flow control: the mean over endpoints of how full they are, none counted as more than full.

        An endpoint is full when what waits there for a first token takes `full_seconds` or a step, when it has as many
        requests as it runs at once (`Seats`), or when the request does not fit in its memory beside those in flight. So
        it is told by our own accounts, which know of each request at once.
        """
        return self._saturation(endpoints, 0, {})

    def saturation_for(self, request: Request, endpoints: Sequence[Endpoint]) -> float:
        return self._saturation(endpoints, request.tokens, request.signals.get(CacheRoom, {}))

    def _saturation(self, endpoints: Sequence[Endpoint], tokens: int, rooms: Mapping[Endpoint, CacheRoom]) -> float:
        now, sum_ = self.clock(), 0.0
        for endpoint in endpoints:
            full = self._fullness(endpoint, now)
            if (room := rooms.get(endpoint)) is not None and room.capacity:
                full = max(full, _near(room.pinned + tokens - room.shared, room.capacity))
            sum_ += min(1.0, full)
        return sum_ / len(endpoints)

    def scarce(self, request: Request) -> str:
        return self.adapter_of(request)

    def ready(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those with a slot for its LoRA adapter: the adapter is in one, or one is free or idle."""
        need, adapter = self.adapters.need, self.adapter_of(request)
        return [endpoint for endpoint in endpoints if not need(endpoint, adapter).turns] if adapter else endpoints

    def falls_in(self, endpoints: Sequence[Endpoint]) -> float:
        now, soonest = self.clock(), inf
        for endpoint in endpoints:
            account = self.accounts.get(endpoint)
            if account is None or not account.queue:
                continue
            more = account.speed.factor * account.ahead(now) - self._full_after(account)
            if 0 <= more < soonest:
                soonest = more
        return soonest

    def _full_after(self, account: _Account) -> float:
        """Seconds of work waiting there at which it is full."""
        return max(self.full_seconds, account.speed.factor * self._step(account))

    def _fullness(self, endpoint: Endpoint, now: float) -> float:
        account = self.accounts.get(endpoint)
        if account is None:
            return 0.0
        if account.due <= now:
            account.expire(now)
        if (seats := account.seats) is None:
            seats = account.seats = Seats()
            account.rank()
        seats.look(endpoint.load)
        wait = account.speed.factor * account.ahead(now) / self._full_after(account)
        there = account.requests + account.foreign_waiting + account.foreign_decodes
        return max(wait, _near(there, seats.most))

    def asks_for_answer(self, request: Request, endpoint: Endpoint) -> bool:
        """The first tokens of prompts that take longest: what the clock says of these is off by most, and whoever was
        sent there before has begun when they do.
        """
        if not (request.stream or request.stage):  # then it is seen when it ends
            return False
        match = _match(request, endpoint)
        asked = self._heaviest.has(request.tokens - match.tokens, request.watchable)
        self._asked += asked
        return asked

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        now, n = self.clock(), request.tokens
        account = self.accounts.get(endpoint) or self._open(endpoint, now)
        tpot = None if request.slo is None or request.stage == "prefill" else request.slo.tpot
        if request.stage == "decode":
            self._enter(request, account, (0.0, 0.0), tpot, now)
            return
        work, load, computed = self._work_and_load(n, _match(request, endpoint))
        self._work += _WEIGHT * (work - self._work)
        self._squares += _WEIGHT * (work * work - self._squares)
        self._computed += _WEIGHT * ((computed or 1) - self._computed)
        self._tokens += _WEIGHT * (n - self._tokens)
        self._enter(request, account, (work, load), tpot, now)

    def _enter(
        self, request: Request, account: _Account, prompt: tuple[float, float], tpot: float | None, now: float
    ) -> None:
        """Put a request on account. `prompt`: modelled seconds of computing and of loading it; of another replica's
        request loading an adapter is among them. `tpot`: its SLO.
        """
        if now - self._decay.epoch > _EPOCH:
            self._scale(now)
        endpoint, (work, load) = account.endpoint, prompt
        need, adapter = NO_NEED, self.adapter_of(request)
        if adapter:
            need = self.adapters.need(endpoint, adapter)
            self.adapters.start(endpoint, adapter)
        expected: LatencyPrediction | None = None
        if request.stage == "decode":
            expected = None if request.peer is None else self._split(request, endpoint, request.peer)
            sent = self._sent.set(request, _Sent(account, request.tokens, 0, now, (0.0, 0.0, 0.0), expected, tpot))
            sent.adapter = adapter
            account.decode(sent)
            return
        prefills = request.stage == "prefill"
        # How right a prediction was counts where it was made. An answer in one piece has no first token of its own.
        if not prefills and not request.elsewhere and request.is_timed:
            expected = self._expected(request, account, (request.tokens, work, load), need, now)
        if need.loads:
            load += 0.0 if request.elsewhere else self.adapter_load_seconds
            account.loading_until = now + account.speed.factor * account.ahead(now) + load
        # An answer that is not streamed comes as a whole: its first byte says nothing of its first token.
        observed = request.sees_answer and (request.stream or prefills)
        lasts = load, work * (1 + self._step(account) * self._per_chunk), work
        whole = round((work + load) * NS)
        ahead = account.ahead(now) if observed else 0.0
        sent = _Sent(account, request.tokens, whole, now, lasts, expected, tpot, observed, prefills, ahead)
        self._sent.set(request, sent)
        if adapter:
            sent.adapter, sent.turns = adapter, need.turns
        account.start(sent)

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        sent = self._sent.get(request)
        if sent is None or not sent.waiting:
            return
        account, now = sent.account, self.clock()
        sent.first_at = now
        if now > sent.sent and sent.observed and (predicted := sent.predicted) is not None:
            if request.is_sample:
                self._errors.append(abs(predicted.ttft / (now - sent.sent) - 1))
            if predicted.parts is not None and self.learn_speeds:
                self._overhead.observe(*predicted.parts, predicted.ttft, now - sent.sent, self._speeds.pool)
        before, step, decodes, context = account.pending, self._step(account), account.decodes, account.context
        account.first_token(sent, now)
        elapsed, account.busy_since = now - account.busy_since, now
        if self.learn_speeds and not (account.foreign_waiting or account.foreign_decodes or sent.turns):
            work = (before - account.pending) / NS
            if not account.watched:  # what was done meanwhile is not known, what was to be done when it came is
                work, elapsed = sent.ahead + sent.work / NS, now - sent.sent
            # First tokens of one step come together: only the first of them measures the step.
            steps = 1 + work * self._per_chunk
            if steps * step > elapsed:
                steps = elapsed / step
            generated = self.step_seconds_per_decode * decodes + self.step_seconds_per_context_token * context
            one = Stretch(work, steps * self.step_seconds, steps * generated, elapsed)
            self._speeds.observe(account.speed, one, now, lone=account.lone is sent)
            self._adopt()
            account.rank()
        account.watched = True

    def _step(self, account: _Account) -> float:
        """Modelled seconds of a step beside its prefill."""
        return self._base + self._c * account.decodes + self._d * account.context

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        if (sent := self._sent.take(request)) is None:
            return
        if sent.adapter:
            self.adapters.end(endpoint, sent.adapter)
        now = self.clock()
        if 200 <= response.status < 300 and sent.here:
            if (seen := sent.predicted) is not None and (began := sent.first_at) is not None and request.is_sample:
                generated = response.usage.completion if response.usage is not None else 0
                if generated > 1 and now > began:
                    self._tpot_errors.append(abs(seen.tpot * (generated - 1) / (now - began) - 1))
            if not sent.ends:
                seconds = now - sent.sent
                self._residence += _WEIGHT * ((seconds if seconds > _SHORTEST else _SHORTEST) - self._residence)
            if sent.waiting:
                sent.account.watched = False
                sent.ends = True
                sent.account.first_token(sent, now)
        if sent.here:
            sent.account.end(sent, now)

    def snapshot(self) -> Iterator[Any]:
        """What was learned: mean seconds in flight, means of tokens, of work and of the tokens it computes, [endpoint,
        observations of speed] ..., and those of the pool's constants; with an empty name what predictions learned; then
        for each endpoint its name, slots for adapters, and those idle in them.
        """
        stretches = list(self._speeds.constants.stretches)
        yield self._residence, self._tokens, self._work, self._computed, self._speeds.learned(), stretches
        if sums := self._overhead.learned():
            yield "", sums
        yield from [*self.adapters.remembered()]

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        if isinstance(piece[0], str):
            if not piece[0]:
                self._overhead.restore(piece[1], self._speeds.pool)
            elif (endpoint := endpoints.get(piece[0])) is not None:
                self.adapters.restore(endpoint, int(piece[1]), piece[2])
            return
        residence, tokens, work, computed, speeds, stretches = piece
        if not (residence >= _SHORTEST and tokens >= 0 and work >= 0 and computed > 0):
            raise ValueError(f"{residence} s in flight, {tokens} tokens, {computed} of them computed in {work} s")
        now = self.clock()
        self._residence, self._tokens = float(residence), float(tokens)
        self._work, self._computed = float(work), float(computed)
        self._speeds.constants.restore(stretches)
        for name, seen in speeds:
            if (endpoint := endpoints.get(name)) is not None:
                account = self.accounts.get(endpoint) or self._open(endpoint, now)
                self._speeds.restore(account.speed, seen, now)
        self._adopt()

    def on_removed(self, endpoint: Endpoint) -> None:
        self.accounts.pop(endpoint, None)
        self.adapters.forget(endpoint)
        self._speeds.close(endpoint)

    def on_scraped(self, endpoint: Endpoint) -> None:
        self.adapters.see(endpoint)
        if (account := self.accounts.get(endpoint)) is not None:
            account.count(endpoint.load, self.clock())

    def statistics(self) -> Mapping[str, float]:
        """Constants of the bill as this pool's own, and their standard errors as shares, where they were fitted; and of
        predicted TTFT (`ttft_`).
        """
        accounts, factor, fitted = self.accounts.values(), self._speeds.pool, self._speeds.constants
        errors = {
            "ttft_error": median(self._errors) if self._errors else None,
            "tpot_error": median(self._tpot_errors) if self._tpot_errors else None,
            "prefill_error": fitted.prefill_error,
            "step_error": fitted.steps_error,
            "decode_error": fitted.decodes_error,
        }
        return {
            "pending_seconds": sum(account.pending for account in accounts) / NS,
            "decodes": sum(account.decodes for account in accounts),
            "foreign_requests": sum(account.foreign_waiting + account.foreign_decodes for account in accounts),
            "residence_seconds": self._residence,
            "pool_speed": 1 / factor,
            "speed_observations": self._speeds.observations,
            "answers_asked_for": self._asked,
            "prefill_seconds_per_token": factor * self.prefill_seconds_per_token,
            "attention_seconds_per_token_pair": factor * self.attention_seconds_per_token_pair,
            "ttft_overhead_seconds": self._overhead.seconds,
            "ttft_seconds_per_token": self._overhead.share * factor * self.prefill_seconds_per_token,
            "step_seconds": factor * self._base,
            "step_seconds_per_decode": factor * self._c,
            "step_seconds_per_context_token": factor * self._d,
            **{name: error for name, error in errors.items() if error is not None},
        }

    def endpoint_statistics(self) -> Mapping[Endpoint, Mapping[str, float]]:
        """`speed`: 1 as modelled, 0.5 half as fast; `speed_observations`: how many of the last it rests on;
        `speed_error`: its standard error as a share, where they are enough.
        """
        return {
            endpoint: {
                "speed": 1 / account.speed.factor,
                "speed_observations": len(account.speed.logs),
                **({"speed_error": error} if (error := account.speed.error) is not None else {}),
            }
            for endpoint, account in self.accounts.items()
        }
