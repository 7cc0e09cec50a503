"""`Limits`: what each tenant may ask of a pool, kept before anything waits for an engine.

A minute's requests and tokens are a bucket that empties steadily: who has used nothing for a minute may use all of it
at once. Tokens are taken at the estimate (the prompt's, and those the answer may have) and corrected by what the
answer reports; of an answer without a bound that is not shown, by how long such answers are in the mean. Replicas tell
each other what they took: each counts what all did, `TELL` seconds late at most.

Names of headers and codes of errors are those of OpenAI's API.
"""

import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from typing import Any, Final, Literal, NamedTuple, NoReturn, Protocol

import msgspec

from epp import protocol
from epp.errors import UNREADABLE, BadRequest, EppError, NotAllowed, RateLimited, UnknownModel, UnsupportedMedia
from epp.flow.tenants import ANONYMOUS, TenantSource
from epp.parsing.request import NO_HEADERS
from epp.plugin import Endpoint, Plugin, Request, Response, Slot, annotated

Limit = Literal["model", "prompt-tokens", "output-tokens", "requests", "tokens", "concurrent-requests"]
"""Which limit refused a request, in metrics."""
MAX_TENANTS: Final = 10_000
"""Tenants with counters of their own. Of more, those that have used nothing lately make room; else the newcomer counts
as one with all others that found none."""
OVERFLOW: Final = "other"
TELL: Final = 0.1
"""Seconds after which replicas hear at the latest of what was taken."""
ALIVE: Final = 1.0
"""Seconds after which requests in flight are told again."""
FORGET: Final = 3.0
"""Seconds for which a replica's requests in flight count when nothing more is received of it."""
_MINUTE: Final = 60.0
_ROWS: Final = 200
"""Tenants in one message to replicas."""
_MOST_PEERS: Final = 256
_MODELS: Final = 1000
"""Models and APIs of which the length of answers is remembered; the one unused for longest makes room."""
_LATEST: Final = 0.05
"""What the latest answer counts in that mean; more of the first ones."""
_NEARLY: Final = 1e-6
"""What rounding may make of a request."""
_RATE_CODE: Final = "rate_limit_exceeded"
_FIELDS: Final = {"chat": "messages", "messages": "messages", "completions": "prompt"}
"""API -> the field with its prompt; of others `input`."""


@dataclass(frozen=True)
class TenantLimits:
    """What one tenant may use; inf: as much as it likes. `models`: names, or beginnings of names before a `*`; None:
    all.
    """

    requests_per_minute: float = inf
    tokens_per_minute: float = inf
    concurrent_requests: float = inf
    max_prompt_tokens: float = inf
    max_output_tokens: float = inf
    models: tuple[str, ...] | None = None

    def allows(self, model: str) -> bool:
        if self.models is None or model in self.models:
            return True
        return any(model.startswith(each[:-1]) for each in self.models if each.endswith("*"))

    @property
    def reads_body(self) -> bool:
        """Whether something in a request's body counts."""
        tokens = min(self.tokens_per_minute, self.max_prompt_tokens, self.max_output_tokens)
        return self.models is not None or tokens < inf


@dataclass(frozen=True)
class LimitSettings:
    """What one configuration says. `usual` holds for each tenant that is not among `own`; without a `source` all
    requests are one tenant's, unless a guard says whose they are.
    """

    usual: TenantLimits
    own: Mapping[str, TenantLimits] = field(default_factory=dict)
    source: TenantSource | None = None

    def of(self, tenant: str) -> TenantLimits:
        return self.own.get(tenant, self.usual)

    def somebody_may(self, model: str) -> bool:
        return any(limits.allows(model) for limits in (self.usual, *self.own.values()))


class Timer(Protocol):
    def cancel(self) -> None: ...


class _Tenant:
    """A tenant's counters: what is left in its buckets of what it and all replicas put in."""

    __slots__ = ("at", "elsewhere", "limits", "name", "open", "requests", "tokens", "unreported")

    def __init__(self, name: str, limits: TenantLimits, now: float) -> None:
        self.name = name
        self.limits = limits
        self.at = now
        self.requests = 0.0
        self.tokens = 0.0
        self.open = 0
        self.unreported = [0, 0]
        """Requests and tokens that other replicas were not told of."""
        self.elsewhere: dict[int, tuple[int, float]] = {}
        """Other replica -> its requests in flight, and until when that counts."""

    def empty(self, now: float) -> None:
        """The buckets empty as time passes."""
        minutes = (now - self.at) / _MINUTE
        self.at = now
        self.requests = _less(self.requests, minutes, self.limits.requests_per_minute)
        self.tokens = _less(self.tokens, minutes, self.limits.tokens_per_minute)

    def in_flight(self, now: float) -> int:
        return self.open + sum(count for count, until in self.elsewhere.values() if until > now)

    def is_idle(self, now: float) -> bool:
        self.empty(now)
        return not (self.requests or self.tokens or self.unreported[0] or self.unreported[1] or self.in_flight(now))


def _less(level: float, minutes: float, limit: float) -> float:
    return 0.0 if limit == inf else max(0.0, level - minutes * limit)


class _Counts(msgspec.Struct, array_like=True, tag="counts"):
    """What a replica took since it told last: (tenant, requests, tokens, requests in flight now)."""

    instance: int
    rows: list[tuple[str, int, int, int]]


class _Levels(msgspec.Struct, array_like=True, tag="levels"):
    """What is in tenants' buckets: (tenant, requests, tokens)."""

    rows: list[tuple[str, float, float]]


class _Taken(NamedTuple):
    """What a request that passed took."""

    tenant: _Tenant
    tokens: int
    unbounded: int
    """Answers whose tokens are none of these, since the request names no bound of them."""


class _Lengths:
    """Tokens of an answer without a bound, by API and model: a mean of those that were seen."""

    def __init__(self) -> None:
        self._means: OrderedDict[tuple[str, str], tuple[int, float]] = OrderedDict()
        """How many were seen, and their mean; unused longest first."""

    def seen(self, request: Request, tokens: float) -> None:
        key = request.api, request.model
        count, mean = self._means.pop(key, (0, 0.0))
        self._means[key] = count + 1, mean + max(_LATEST, 1 / (count + 1)) * (tokens - mean)
        if len(self._means) > _MODELS:
            self._means.popitem(last=False)

    def of(self, request: Request) -> float:
        """0 where none was seen."""
        return self._means.get((request.api, request.model), (0, 0.0))[1]


class Limits(Plugin):
    """The counters of one pool. A request that `admit` lets pass ends with `ended`, or `given_back`.

    `refused(tenant, limit)` hears of each refusal, `full()` that a tenant found no counters of its own. `tell(piece)`
    sends a piece to the `restore` of other replicas, which know this one by `instance`; None: there are none.
    """

    def __init__(
        self,
        settings: LimitSettings,
        clock: Callable[[], float],
        refused: Callable[[str, Limit], None],
        full: Callable[[], None],
        *,
        instance: int = 0,
        tell: Callable[[Any], None] | None = None,
        later: Callable[[float, Callable[[], None]], Timer] | None = None,
    ) -> None:
        self.name = "limits"
        self.clock = clock
        self._settings = settings
        self._refused = refused
        self._full = full
        self._instance = instance
        self._tell = tell if later is not None else None
        self._later = later
        self._tenants: OrderedDict[str, _Tenant] = OrderedDict()
        """The one asked for longest ago first."""
        self._unreported: dict[_Tenant, None] = {}
        self._busy: dict[_Tenant, None] = {}
        """With requests in flight here."""
        self._timer: tuple[float, Timer] | None = None
        """When it rings."""
        self._told = 0.0
        """When requests in flight were told last."""
        self._lengths = _Lengths()
        self._taken = Slot[_Taken]()

    def configure(self, settings: LimitSettings) -> None:
        """Other limits; what was used stays used."""
        now = self.clock()
        self._settings = settings
        for tenant in self._tenants.values():
            tenant.empty(now)
            tenant.limits = settings.of(tenant.name)

    # --- one request ------------------------------------------------------------------------------------------------

    def models_for(self, request: Request) -> Callable[[str], bool] | None:
        """Which models its tenant may use; None: any. Nothing counts as used."""
        limits = self._settings.of(self._with_tenant(request).tenant)
        return None if limits.models is None else limits.allows

    def _with_tenant(self, request: Request) -> Request:
        if request.tenant:
            return request
        source = self._settings.source
        return annotated(request, tenant=ANONYMOUS if source is None else source.name_of(request))

    def admit(self, request: Request) -> Request:
        """The request, with its tenant. Raises BadRequest, UnknownModel, NotAllowed, RateLimited, UnsupportedMedia."""
        request, now = self._with_tenant(request), self.clock()
        if request.api == "other" and not request.body:
            return request  # a list of models, health: nothing an engine computes for
        tenant = self._tenant(request.tenant, now)
        self._check(request, tenant)
        tokens, unbounded = request.tokens, 0
        if request.max_tokens != 0 and tenant.limits.tokens_per_minute < inf:
            answers = answers_of(request)
            if request.max_tokens is None:
                unbounded = answers
            else:
                tokens += request.max_tokens * answers
        self._check_counts(tenant, tokens, now)
        tenant.open += 1
        self._busy[tenant] = None
        self._count(tenant, 1, tokens)
        self._taken.set(request, _Taken(tenant, tokens, unbounded))
        return request

    def ended(self, request: Request, response: Response) -> None:
        """It has left its endpoint. What it used takes the place of the estimate, where that was seen."""
        if (taken := self._taken.take(request)) is None:
            return
        tenant, tokens, unbounded = taken
        usage = response.usage
        if usage is not None and (usage.prompt >= 0 or usage.completion >= 0):
            used = max(0, usage.prompt) + max(0, usage.completion)
            if unbounded and usage.completion >= 0 and request.is_sample:
                self._lengths.seen(request, usage.completion / unbounded)
        elif response.status >= 400:
            used = 0
        else:
            used = tokens + round(self._lengths.of(request) * unbounded)
        self._end(tenant, 0, used - tokens)

    def given_back(self, request: Request) -> None:
        """It got no endpoint: it has used nothing."""
        if (taken := self._taken.take(request)) is not None:
            self._end(taken.tenant, -1, -taken.tokens)

    def answer_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        taken = self._taken.get(request)
        return NO_HEADERS if taken is None else self._headers(taken.tenant)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _check(self, request: Request, tenant: _Tenant) -> None:
        """What the request is, beside whose."""
        limits = tenant.limits
        if request.opaque and limits.reads_body:
            why = "models and tokens are limited here, for which the body has to be read"
            raise UnsupportedMedia(f"{request.opaque}; expected JSON without a content-encoding: {why}")
        if (request.api != "other" or request.asked) and not limits.allows(request.asked):
            text = f"model: {request.asked!r} does not exist, or you do not have access to it"
            known = self._settings.somebody_may(request.asked)
            kind: type[EppError] = NotAllowed if known else UnknownModel
            self._refuse(tenant, "model", kind(text, param="model", code="model_not_found", reason=protocol.DROP_LIMIT))
        if request.tokens > limits.max_prompt_tokens:
            name = _FIELDS.get(request.api, "input")
            text = f"{name}: about {request.tokens} tokens; expected at most {limits.max_prompt_tokens:.0f}"
            code = "context_length_exceeded"
            self._refuse(tenant, "prompt-tokens", BadRequest(text, param=name, code=code, reason=protocol.DROP_LIMIT))
        if (asked := request.max_tokens or 0) > limits.max_output_tokens:
            name = _output_field(request)
            text = f"{name}: got {asked}; expected at most {limits.max_output_tokens:.0f}"
            self._refuse(
                tenant, "output-tokens", BadRequest(text, param=name, code="invalid_value", reason=protocol.DROP_LIMIT)
            )

    def _check_counts(self, tenant: _Tenant, tokens: int, now: float) -> None:
        tenant.empty(now)
        limits = tenant.limits
        if limits.concurrent_requests < inf and (open_ := tenant.in_flight(now)) >= limits.concurrent_requests:
            text = f"{open_} requests at once; the limit is {limits.concurrent_requests:.0f}; retry later"
            self._refuse_rate(tenant, "concurrent-requests", text, 1.0)
        for what, level, size, limit in (
            ("requests", tenant.requests, 1, limits.requests_per_minute),
            ("tokens", tenant.tokens, tokens, limits.tokens_per_minute),
        ):
            if level + size <= limit + _NEARLY:
                continue
            name: Limit = "requests" if what == "requests" else "tokens"
            if size > limit:
                text = f"the request may use {size} tokens; the limit is {limit:.0f} a minute"
                self._refuse_rate(tenant, name, text, inf)
            wait = (level + size - limit) / limit * _MINUTE
            text = f"{limit:.0f} {what} a minute are the limit, {level:.0f} are used, {size} asked for; retry later"
            self._refuse_rate(tenant, name, text, wait)

    def _refuse_rate(self, tenant: _Tenant, limit: Limit, text: str, wait: float) -> NoReturn:
        """`wait`: seconds after which it would pass; inf: never."""
        again = {"x-should-retry": "false"} if wait == inf else {"retry-after": str(max(1, ceil(wait - _NEARLY)))}
        error = RateLimited(
            f"rate limit reached for {tenant.name!r}: {text}",
            code=_RATE_CODE,
            reason=protocol.DROP_LIMIT,
            headers={**again, **self._headers(tenant)},
        )
        self._refuse(tenant, limit, error)

    def _refuse(self, tenant: _Tenant, limit: Limit, error: EppError) -> NoReturn:
        self._refused(tenant.name, limit)
        raise error

    def _headers(self, tenant: _Tenant) -> dict[str, str]:
        """OpenAI's: the limit, what is left of it, and when all of it is there again."""
        tenant.empty(self.clock())
        found: dict[str, str] = {}
        for what, level, limit in (
            ("requests", tenant.requests, tenant.limits.requests_per_minute),
            ("tokens", tenant.tokens, tenant.limits.tokens_per_minute),
        ):
            if limit < inf:
                found[f"x-ratelimit-limit-{what}"] = f"{limit:.0f}"
                found[f"x-ratelimit-remaining-{what}"] = f"{max(0, int(limit - level + _NEARLY))}"
                found[f"x-ratelimit-reset-{what}"] = _duration(level / limit * _MINUTE)
        return found

    # --- counters ---------------------------------------------------------------------------------------------------

    def _tenant(self, name: str, now: float) -> _Tenant:
        found = self._tenants.get(name)
        if found is not None:
            self._tenants.move_to_end(name)
            return found
        if len(self._tenants) >= MAX_TENANTS:
            oldest = next(iter(self._tenants.values()))
            if oldest.is_idle(now):
                del self._tenants[oldest.name]
            elif name != OVERFLOW:
                self._full()
                self._tenants.move_to_end(oldest.name)
                return self._tenant(OVERFLOW, now)
        found = self._tenants[name] = _Tenant(name, self._settings.of(name), now)
        return found

    def _count(self, tenant: _Tenant, requests: int, tokens: int) -> None:
        """Taken here, or given back; the buckets are as they are now."""
        tenant.requests = max(0.0, tenant.requests + requests)
        tenant.tokens = max(0.0, tenant.tokens + tokens)
        if self._tell is not None:
            tenant.unreported[0] += requests
            tenant.unreported[1] += tokens
            self._unreported[tenant] = None
            self._ring_in(TELL)

    def _end(self, tenant: _Tenant, requests: int, tokens: int) -> None:
        tenant.open -= 1
        if not tenant.open:
            self._busy.pop(tenant, None)
        tenant.empty(self.clock())
        self._count(tenant, requests, tokens)

    # --- replicas ---------------------------------------------------------------------------------------------------

    def snapshot(self) -> Iterator[Any]:
        now = self.clock()
        for tenant in self._tenants.values():
            tenant.empty(now)
        used = [(each.name, each.requests, each.tokens) for each in self._tenants.values()]
        used = [row for row in used if row[1] or row[2]]
        for start in range(0, len(used), _ROWS):
            yield msgspec.to_builtins(_Levels(used[start : start + _ROWS]))

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        said, now = msgspec.convert(piece, _Counts | _Levels), self.clock()
        if isinstance(said, _Levels):
            for name, requests, tokens in said.rows:
                tenant = self._tenant(name, now)
                tenant.empty(now)
                tenant.requests, tenant.tokens = max(tenant.requests, requests), max(tenant.tokens, tokens)
            return
        for name, took, used, open_ in said.rows:
            tenant = self._tenant(name, now)
            tenant.empty(now)
            tenant.requests = max(0.0, tenant.requests + took)
            tenant.tokens = max(0.0, tenant.tokens + used)
            elsewhere = tenant.elsewhere
            if open_ and (said.instance in elsewhere or len(elsewhere) < _MOST_PEERS):
                elsewhere[said.instance] = (open_, now + FORGET)
            else:
                elsewhere.pop(said.instance, None)

    def _ring_in(self, seconds: float) -> None:
        at = self.clock() + seconds
        assert self._later is not None
        if self._timer is not None:
            if self._timer[0] <= at:
                return
            self._timer[1].cancel()
        self._timer = at, self._later(seconds, self._ring)

    def _ring(self) -> None:
        """Tell what was taken since the last time, and what is in flight."""
        assert self._tell is not None
        self._timer, now = None, self.clock()
        tenants = self._unreported
        if now - self._told >= ALIVE:
            tenants, self._told = {**tenants, **self._busy}, now
        rows = [(each.name, *each.unreported, each.open) for each in tenants]
        for each in tenants:
            each.unreported = [0, 0]
        self._unreported = {}
        for start in range(0, len(rows), _ROWS):
            self._tell(msgspec.to_builtins(_Counts(self._instance, _rows(rows[start : start + _ROWS]))))
        if self._busy:
            self._ring_in(ALIVE)


def _rows(rows: Sequence[tuple[Any, ...]]) -> list[tuple[str, int, int, int]]:
    return [(name, requests, tokens, open_) for name, requests, tokens, open_ in rows]


_prompts: Final = msgspec.json.Decoder(list[msgspec.Raw])
_TEXTS: Final = re.compile(rb'\s*\[\s*["\[]')
"""How a list of prompts begins; one of numbers is one prompt, of token ids."""


def answers_of(request: Request) -> int:
    """How many answers it asks for, of all its prompts."""
    if request.api != "completions" or not _TEXTS.match(request.prompt):
        return request.answers
    try:
        return request.answers * len(_prompts.decode(request.prompt))
    except UNREADABLE:
        return request.answers


def _output_field(request: Request) -> str:
    if request.api == "responses":
        return "max_output_tokens"
    newer = "max_completion_tokens"
    return newer if request.api == "chat" and f'"{newer}"'.encode() in request.body else "max_tokens"


def _duration(seconds: float) -> str:
    """As OpenAI has it: 120ms, 1.5s, 6m0s."""
    if seconds < 1.0:
        return f"{ceil(seconds * 1000)}ms"
    if seconds < _MINUTE:
        return f"{seconds:.3g}s"
    minutes, rest = divmod(ceil(seconds), 60)
    return f"{minutes}m{rest}s"
