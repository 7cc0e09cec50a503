"""`Scheduler`: signals, profiles, decision and accounts of one configuration. `epp.route` is its only driver.

Choosing and accounting are one synchronous step (`choose`), so no pick is made on state older than the pick before it.
A hook that raises never breaks the request or another plugin's accounts: it goes to `on_error`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from heapq import nlargest, nsmallest
from itertools import islice
from math import inf
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from epp import protocol
from epp.errors import EppError, SloUnmet
from epp.parsing.request import NO_HEADERS, NO_SIGNALS, asked_for, forwarded
from epp.plugin import (
    Admitter,
    Endpoint,
    KvEventFigures,
    LatencyPrediction,
    Picked,
    Plugin,
    PrefixMatch,
    Producer,
    ProfileHandler,
    Request,
    Response,
    RoleView,
    Stage,
)
from epp.scheduling.decision import BestPicker, Chain, Decision, OnError, ProfileRun, failed, name_of
from epp.scheduling.shadow import ShadowPolicy

_NOT_PREFILLED: Final = 502
"""Status of a prefill that came to nothing."""
Hooks = list[tuple[str, Callable[..., Any]]]
OnPartsEnded = Callable[[Sequence[tuple[Request, Endpoint]]], None]
_Produce = tuple[str, type[Any], Callable[[Request, Sequence[Endpoint]], Mapping[Endpoint, Any]]]


class Scheduler:
    """One configuration at work. A reload makes a new one; requests under way stay with the one that chose for them.

    `producers` find signals, `handler` runs the `profiles` (by name), `plugins` are all of the configuration's plugins,
    each once: those above and every other that has hooks. `wall_clock` gives seconds since the epoch (for people only);
    `on_error(plugin, exception)` is called for every failure of a plugin. `fallbacks` endpoints are named after the
    chosen one, the next best by score, for gateways that walk a list on retry; a picker that names more is left alone.
    `shadow` compares some of the picks with those of another profile. `on_parts_ended` hears of the parts of a request
    that other endpoints have done, once.
    """

    def __init__(
        self,
        producers: Sequence[Producer[Any]],
        profiles: Mapping[str, Chain],
        handler: ProfileHandler,
        plugins: Sequence[Plugin],
        *,
        wall_clock: Callable[[], float],
        on_error: OnError,
        fallbacks: int = 0,
        shadow: ShadowPolicy | None = None,
        on_parts_ended: OnPartsEnded = lambda parts: None,
    ) -> None:
        self.profiles = profiles
        self.handler = handler
        self.plugins = plugins
        self._names = tuple(profiles)
        self._roles = RoleView()
        self._wall_clock = wall_clock
        self._on_error = on_error
        self._on_parts_ended = on_parts_ended
        self._named = 1 + fallbacks
        self._shadow = shadow
        self._producers = [(name_of(p), p.produces, p.produce) for p in producers]
        self._of_pool, self._of_few = (
            [(name_of(p), p.produces, p.produce) for p in producers if p.whole_pool is whole] for whole in (True, False)
        )
        self._wanted = self._named
        """How many of the cheapest have to be known."""
        self._large = inf
        """Endpoints of a pool of which a shortlist is made."""
        chain = next(iter(profiles.values())) if len(profiles) == 1 and shadow is None else None
        prefixes = next((p for p in producers if p.produces is PrefixMatch), None)
        if chain is not None and chain.lone_cost is not None and prefixes is not None:
            self._cost, self._prefixes, self._large = chain.lone_cost, prefixes, chain.lone_cost.shortlist_from
            self._narrows = chain.narrows
            self._wanted = max(self._named, chain.picker.max_num_of_endpoints)
        self._prepare: Hooks = [(name_of(p), p.prepare) for p in producers if _overrides(p, Producer, "prepare")]
        self.waits = any(p.waits for p in producers if _overrides(p, Producer, "prepare"))
        """Whether `prepare` may wait."""
        sharing = [plugin for plugin in plugins if _takes_part(plugin)]
        self._to_peers = _hooks(plugins, "to_peers")
        self._from_peer: Hooks = [(name_of(p), p.from_peer) for p in sharing if _puts_on_account(p)]
        self._snapshots = _hooks(plugins, "snapshot")
        self._restores = dict(_hooks(plugins, "restore"))
        self._asks_for_answer = _hooks(plugins, "asks_for_answer")
        self._on_picked = _hooks(plugins, "on_picked")
        self._on_answered = _hooks(plugins, "on_answered")
        self._on_first_token, self._on_finished = _hooks(plugins, "on_first_token"), _hooks(plugins, "on_finished")
        self._of_peers = _hooks(sharing, "on_first_token"), _hooks(sharing, "on_finished")  # of peers' requests
        self._on_removed, self._on_scraped = _hooks(plugins, "on_removed"), _hooks(plugins, "on_scraped")
        self._request_headers = _hooks(plugins, "request_headers")
        self._answer_headers = _hooks(plugins, "answer_headers")
        self._statistics = _hooks(plugins, "statistics")
        self._endpoint_statistics = _hooks(plugins, "endpoint_statistics")
        self._kv_events = _hooks(plugins, "kv_events")
        self._predictions = _hooks(plugins, "predictions")
        self._admitters: Hooks = [(name_of(p), p.refusal) for p in plugins if isinstance(p, Admitter)]
        self._open: dict[Decision, bool] = {}
        """Decisions whose accounts are not closed, and whether their first token was seen."""

    async def prepare(self, request: Request) -> Request:
        """What producers can find out without looking at endpoints; may wait. Returns the request to choose for."""
        for name, hook in self._prepare:
            try:
                tokens = await hook(request)
                if tokens is not None:
                    request = replace(request, tokens=tokens)
            except Exception as error:
                self._on_error(name, error)
        return request

    def look(self, request: Request, endpoints: Sequence[Endpoint], kinds: Collection[type[Any]]) -> Request:
        """The request with its signals of these kinds, beside those that it has; nothing is chosen."""
        missing = [each for each in self._producers if each[1] in kinds and each[1] not in request.signals]
        return self._with_signals(request, endpoints, missing, request.signals) if missing else request

    def stages(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
        """The groups of `endpoints` of which the request needs one each, at least one; who decodes comes first."""
        if not self._roles.of(endpoints).apart:
            return (endpoints,)
        try:
            found = self.handler.stages(self.look(request, endpoints, (PrefixMatch,)), endpoints)
        except Exception as error:
            self._on_error(name_of(self.handler), error)
            found = ()
        return found or (endpoints,)

    def choose(self, request: Request, endpoints: Sequence[Endpoint]) -> Decision:
        """Decide among `endpoints` (never empty) and put the request on the chosen one's account, in one step.

        The caller ends it with `finished`, however the request ends. Raises EppError: then no account was opened.
        """
        request, few = self._look(request, endpoints)
        if self._admitters:
            self._admit(request, few)
        decision = self._decided(request, _Runs(self.profiles, request, few, endpoints, self._on_error))
        if self._shadow is not None:  # it sees what the pick saw
            decision.shadow = self._shadow.compare(request, few, decision.endpoint)
        if request.watchable and self._is_asked_for(decision):
            decision.request = asked_for(decision.request)
            decision.parts = [(asked_for(part), endpoint) for part, endpoint in decision.parts]
        self._open[decision] = False
        self._call(self._on_picked, decision.request, decision.endpoint)
        for part, endpoint in decision.parts:
            self._call(self._on_picked, part, endpoint)
        if self._predictions and request.is_timed:
            decision.predictions = self._expected(decision.request)
        return decision

    def _is_asked_for(self, decision: Decision) -> bool:
        """Whether a plugin wants to see its answer."""
        request, computes = decision.request, decision.computes
        for name, hook in self._asks_for_answer:
            try:
                if hook(request, computes):
                    return True
            except Exception as error:
                self._on_error(name, error)
        return False

    def explain(self, request: Request, endpoints: Sequence[Endpoint]) -> Decision:
        """What `choose` would decide now, with every one of `endpoints` in it; nothing is put on account.

        Of what a picker does beyond taking the best (turns, chance) nothing is said: endpoints are in order of score.
        """
        profiles = {name: chain.with_picker(BestPicker()) for name, chain in self.profiles.items()}
        request = self._with_signals(request, endpoints, self._producers)
        decision = self._decided(request, _Runs(profiles, request, endpoints, endpoints, self._on_error))
        if self._predictions and decision.request.is_timed:
            decision.predictions = self._expected(decision.request)
        return decision

    def _decided(self, request: Request, run: "_Runs") -> Decision:
        try:
            picked = self.handler.handle(request, self._names, run)
            if not picked.endpoints:
                raise ValueError("a profile handler must return at least one endpoint")
        except EppError:
            raise
        except Exception as error:
            raise failed(name_of(self.handler), error, self._on_error) from error
        chosen, rank = picked.endpoints, picked.endpoints[0].rank
        if len(chosen) > 1:
            chosen = [endpoint for endpoint in chosen if endpoint.rank == rank]
        if len(chosen) < self._named and (ran := run.of(chosen[0])) is not None:
            chosen = [*chosen, *_next_best(ran, chosen, self._named - len(chosen))]
            if rank is not None and ran.others:  # a short list may have none of its rank; any would do
                more = (each for each in run.candidates if each.rank == rank and each not in chosen)
                chosen = [*chosen, *islice(more, self._named - len(chosen))]
        if rank is not None and picked.prefill is not None:
            picked = replace(picked, prefill=_of_rank(rank, picked.prefill, run.candidates))
        decision = Decision(request, chosen, picked.headers, run.runs, self._wall_clock())
        decision.division = picked.division
        if picked.prefill is not None or picked.encode or picked.port or picked.ways:
            _divide(decision, picked)
        if rank is not None and _may_name_rank(decision):
            decision.headers = {**decision.headers, protocol.DATA_PARALLEL_RANK: str(rank)}
        if self._request_headers:
            self._add_headers(decision)
        return decision

    def _add_headers(self, decision: Decision) -> None:
        headers, computes = dict(decision.headers), decision.computes
        for name, hook in self._request_headers:
            try:
                headers.update(hook(decision.request, computes))
            except Exception as error:
                self._on_error(name, error)
        decision.headers = headers

    def to_peers(self, request: Request, endpoint: Endpoint) -> dict[str, Any]:
        """What plugins of other replicas need of a request that was given to `endpoint` here: name of the plugin -> its
        state.
        """
        states = {}
        for name, hook in self._to_peers:
            try:
                if (state := hook(request, endpoint)) is not None:
                    states[name] = state
            except Exception as error:
                self._on_error(name, error)
        return states

    def adopt(self, request: Request, endpoint: Endpoint, states: Mapping[str, Any]) -> "Adopted":
        """Another replica has sent `request` to `endpoint`: put it on our accounts as if we had.

        `states` are what its `to_peers` gave.
        """
        for name, hook in self._from_peer:
            try:
                hook(request, endpoint, states.get(name))
            except Exception as error:
                self._on_error(name, error)
        return Adopted(self, request, endpoint)

    def forwarded(self, decision: Decision) -> None:
        """The request is on its way: let go of its prompt and body, which may be large."""
        decision.request = forwarded(decision.request)
        if decision.parts:
            decision.parts = [(forwarded(part), endpoint) for part, endpoint in decision.parts]

    def moved(self, decision: Decision, endpoint: Endpoint, response: Response) -> None:
        """The gateway's retry was served by `endpoint`: the account moves there, and the decision says so.

        The old endpoint's hooks see a response of which nothing came (status 0) but who served instead.
        """
        old = decision.endpoint
        if decision not in self._open or endpoint is old:
            return
        self._tell(self._on_finished, decision.request, old, Response(served=response.served))
        decision.endpoints = [endpoint, *(other for other in decision.endpoints if other is not endpoint)]
        self._call(self._on_picked, decision.request, endpoint)
        if self._predictions and decision.request.is_timed:
            decision.predictions = self._expected(decision.request)

    def answered(self, decision: Decision, response: Response) -> None:
        """The answer's headers were seen. To be called once. What came before the decode has ended then."""
        if decision in self._open:
            self._tell(self._on_answered, decision.request, decision.endpoint, response)
            if decision.parts:
                self._end_parts(decision, response)

    def first_token(self, decision: Decision) -> None:
        """The first token was seen; later calls for the same decision do nothing."""
        if self._open.get(decision, True):
            return
        self._open[decision] = True
        self._call(self._on_first_token, decision.request, decision.endpoint)
        if decision.parts:
            self._end_parts(decision, Response(status=200))

    def answer_headers(self, decision: Decision) -> Mapping[str, str]:
        """Headers the plugins add to the answer, for the endpoint that served."""
        if not self._answer_headers:
            return NO_HEADERS
        headers: dict[str, str] = {}
        for name, hook in self._answer_headers:
            try:
                headers.update(hook(decision.request, decision.endpoint))
            except Exception as error:
                self._on_error(name, error)
        return headers

    def finished(self, decision: Decision, response: Response) -> None:
        """The request has left its endpoint. Closes the accounts once; a second call does nothing."""
        if self._open.pop(decision, None) is not None:
            if decision.parts:
                self._end_parts(decision, response)
            self._tell(self._on_finished, decision.request, decision.endpoint, response)

    def _end_parts(self, decision: Decision, response: Response) -> None:
        """Close the accounts of the other stages. Whose fault an error is cannot be seen, so it is on all of them; but
        a sidecar may say that who was to prefill did not.
        """
        parts, decision.parts = decision.parts, ()
        self._on_parts_ended(parts)
        for part, endpoint in parts:
            failed = response.prefill_failed and part.stage == "prefill"
            status = _NOT_PREFILLED if failed else response.status
            self._tell(self._on_finished, part, endpoint, Response(status=status, lost=response.lost))

    def snapshot(self) -> Iterator[tuple[str, Any]]:
        """What plugins know, for a replica that joins: (name of the plugin, a piece of it)."""
        for name, hook in self._snapshots:
            try:
                for piece in hook():
                    yield name, piece
            except Exception as error:
                self._on_error(name, error)

    def restore(self, name: str, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        """Take over a piece of another replica's `snapshot`; of a plugin that is not here nothing is done."""
        hook = self._restores.get(name)
        if hook is not None:
            try:
                hook(piece, endpoints)
            except Exception as error:
                self._on_error(name, error)

    def removed(self, endpoint: Endpoint) -> None:
        """The endpoint left the pool for good. Its requests still end with `finished`."""
        for name, hook in self._on_removed:
            try:
                hook(endpoint)
            except Exception as error:
                self._on_error(name, error)

    def scraped(self, endpoint: Endpoint) -> None:
        """The endpoint has a new load."""
        for name, hook in self._on_scraped:
            try:
                hook(endpoint)
            except Exception as error:
                self._on_error(name, error)

    def statistics(self) -> Mapping[str, Mapping[str, float]]:
        """Every plugin's figures: name of the plugin -> figure -> value. Plugins without figures are left out."""
        return self._figures(self._statistics)

    def endpoint_statistics(self) -> Mapping[str, Mapping[Endpoint, Mapping[str, float]]]:
        """The same of single endpoints: name of the plugin -> endpoint -> figure -> value."""
        return self._figures(self._endpoint_statistics)

    def kv_events(self, endpoints: Sequence[Endpoint]) -> KvEventFigures | None:
        """The state of the KV event streams of `endpoints`; None: no plugin receives them."""
        for name, hook in self._kv_events:
            try:
                figures: KvEventFigures | None = hook(endpoints)
            except Exception as error:
                self._on_error(name, error)
            else:
                if figures is not None:
                    return figures
        return None

    def _look(self, request: Request, endpoints: Sequence[Endpoint]) -> tuple[Request, Sequence[Endpoint]]:
        """The request with its signals, and those of `endpoints` that can be the best for it."""
        if len(endpoints) >= self._large and request.slo is None and not self.handler.divides(endpoints):
            try:
                found = None if self._narrows(request) else self._shortlisted(request, endpoints)
            except Exception as error:
                self._on_error(name_of(self._cost), error)
            else:
                if found is not None:
                    return found
        return self._with_signals(request, endpoints, self._producers), endpoints

    def _shortlisted(
        self, request: Request, endpoints: Sequence[Endpoint]
    ) -> tuple[Request, Sequence[Endpoint]] | None:
        """What `_look` says, where the cost makes a shortlist. Bills show whether the first was too short."""
        whole = self._with_signals(request, endpoints, self._of_pool)
        up_to = None
        while (levels := self._prefixes.levels(request)) is not None:
            found = self._cost.shortlist(whole, endpoints, levels, self._wanted, up_to)
            if found is None or not found[0]:
                break
            few, rest = found
            looked = self._with_signals(request, few, self._of_few, whole.signals)
            if up_to is not None or rest == inf:
                return looked, few
            up_to = nsmallest(self._wanted, map(sum, self._cost.bill(looked, few)))[-1]
            if up_to <= rest:
                return looked, few
        return None

    def _with_signals(
        self,
        request: Request,
        endpoints: Sequence[Endpoint],
        producers: Sequence[_Produce],
        known: Mapping[type[Any], Mapping[Endpoint, Any]] = NO_SIGNALS,
    ) -> Request:
        """The request with what `producers` find, beside `known`; each sees what those before it found."""
        signals: dict[type[Any], Mapping[Endpoint, Any]] = {**known}
        request = replace(request, signals=signals)
        for name, kind, produce in producers:
            try:
                signals[kind] = produce(request, endpoints)
            except Exception as error:
                self._on_error(name, error)
        return request

    def _admit(self, request: Request, endpoints: Sequence[Endpoint]) -> None:
        """Raises SloUnmet where an admitter says no; one that fails says nothing."""
        for name, refusal in self._admitters:
            try:
                why = refusal(request, endpoints)
            except Exception as error:
                self._on_error(name, error)
            else:
                if why:
                    raise SloUnmet(why, request.slo.objective if request.slo is not None else "")

    def _expected(self, request: Request) -> Mapping[Endpoint, LatencyPrediction]:
        for name, predictions in self._predictions:
            try:
                found: Mapping[Endpoint, LatencyPrediction] = predictions(request)
            except Exception as error:
                self._on_error(name, error)
            else:
                if found:
                    return found
        return {}

    def _figures(self, hooks: Hooks) -> dict[str, Any]:
        figures: dict[str, Any] = {}
        for name, hook in hooks:
            try:
                figures[name] = dict(hook())
            except Exception as error:
                self._on_error(name, error)
        return figures

    def _call(self, hooks: Hooks, request: Request, endpoint: Endpoint) -> None:
        for name, hook in hooks:
            try:
                hook(request, endpoint)
            except Exception as error:
                self._on_error(name, error)

    def _tell(self, hooks: Hooks, request: Request, endpoint: Endpoint, response: Response) -> None:
        for name, hook in hooks:
            try:
                hook(request, endpoint, response)
            except Exception as error:
                self._on_error(name, error)


class Adopted(msgspec.Struct, eq=False):
    """A request that another replica has sent to `endpoint`, on the accounts of `scheduler`."""

    scheduler: Scheduler
    request: Request
    endpoint: Endpoint
    begun: bool = False
    """Its first token was seen, or it has ended."""
    ended: bool = False

    def first_token(self) -> None:
        """The first token was seen; later calls do nothing."""
        if not self.begun:
            self.begun = True
            self.scheduler._call(self.scheduler._of_peers[0], self.request, self.endpoint)

    def finished(self, response: Response) -> None:
        """It has left its endpoint. Closes the accounts once; a second call does nothing."""
        if self.ended:
            return
        self.begun = self.ended = True
        self.scheduler._tell(self.scheduler._of_peers[1], self.request, self.endpoint, response)


class _Runs:
    """What a profile handler runs for one request: `epp.plugin.RunProfile`."""

    __slots__ = ("_endpoints", "_on_error", "_profiles", "_request", "candidates", "runs")

    def __init__(
        self,
        profiles: Mapping[str, Chain],
        request: Request,
        endpoints: Sequence[Endpoint],
        candidates: Sequence[Endpoint],
        on_error: OnError,
    ) -> None:
        self.candidates = candidates
        self.runs: list[ProfileRun] = []
        self._profiles = profiles
        self._request = request
        self._endpoints = endpoints
        """Those of the candidates that can be the best."""
        self._on_error = on_error

    def __call__(
        self, profile: str, request: Request | None = None, endpoints: Sequence[Endpoint] | None = None
    ) -> Sequence[Endpoint]:
        if endpoints is None:
            endpoints = self._endpoints
        done = self._profiles[profile].run(request or self._request, endpoints, self._on_error)
        done.others = len(self.candidates) - len(self._endpoints)
        if request is not None and request.stage:
            done.stage = request.stage
        self.runs.append(done)
        return done.picks

    def of(self, endpoint: Endpoint) -> ProfileRun | None:
        """The last that picked this endpoint for the request itself."""
        return next((run for run in reversed(self.runs) if not run.stage and endpoint in run.picks), None)


def _divide(decision: Decision, picked: Picked) -> None:
    """Give the other stages' parts to their endpoints, and tell the sidecar of the one that decodes by headers."""
    request, headers = decision.request, dict(decision.headers)
    beside: dict[Stage, Sequence[str]] = {}
    parts = []
    if picked.prefill is not None:
        kept = dict(request.kept)
        part = replace(request, stage="prefill", peer=decision.endpoint, stream=False, max_tokens=1, kept=kept)
        parts.append((part, picked.prefill))
        beside["prefill"] = (picked.prefill.name,)
        headers[protocol.PREFILLER] = picked.prefill.address
        if picked.prefill in decision.endpoints[1:]:  # a retry there would be prefilled and decoded in one place
            others = [endpoint for endpoint in decision.endpoints if endpoint is not picked.prefill]
            decision.endpoints = [*others, picked.prefill]
        decision.request = replace(request, stage="decode", peer=picked.prefill)
    if picked.encode:
        part = replace(request, stage="encode", stream=False, tokens=0, max_tokens=0, kept={})
        parts += [(part if at == 0 else replace(part, kept={}), e) for at, e in enumerate(picked.encode)]
        beside["encode"] = tuple(endpoint.name for endpoint in picked.encode)
        headers[protocol.ENCODERS] = ",".join(endpoint.address for endpoint in picked.encode)
    if picked.port:
        headers[protocol.DATA_PARALLEL] = decision.endpoint.address
    decision.headers, decision.parts, decision.beside = headers, tuple(parts), beside
    decision.ways, decision.port = picked.ways, picked.port


def _next_best(run: ProfileRun, chosen: Sequence[Endpoint], count: int) -> list[Endpoint]:
    """The `count` best of a run that are not chosen; equals in the pool's order from the chosen one on, in a circle.

    They have the rank of the chosen one, which a retry names like the first try.
    """
    endpoints, totals, rank = run.endpoints, run.totals, chosen[0].rank
    start = endpoints.index(chosen[0]) if chosen[0] in endpoints else 0
    circle = (*range(start, len(endpoints)), *range(start))
    others = [i for i in circle if endpoints[i].rank == rank and endpoints[i] not in chosen]
    return [endpoints[i] for i in nlargest(count, others, key=totals.__getitem__)]


def _of_rank(rank: int, endpoint: Endpoint, candidates: Sequence[Endpoint]) -> Endpoint:
    """The endpoint of this rank at the same address, if there is one: a sidecar passes the same headers on to all."""
    there = (each for each in candidates if each.rank == rank and each.address == endpoint.address)
    return next(there, endpoint)


def _may_name_rank(decision: Decision) -> bool:
    """Whether all that get the request's headers have such a rank, and its engine showed that it exists: vLLM refuses a
    number that it has not.
    """
    rank = decision.endpoint.rank
    return decision.endpoint.load.at is not None and all(part.rank == rank for _, part in decision.parts)


def _hooks(plugins: Sequence[Plugin], hook: str) -> Hooks:
    """The bound hooks of the plugins that override it; found once, since most plugins have none."""
    return [(name_of(plugin), getattr(plugin, hook)) for plugin in plugins if _overrides(plugin, Plugin, hook)]


def _takes_part(plugin: Plugin) -> bool:
    """It is called for requests of other replicas too: it can do without a prompt."""
    prepares = isinstance(plugin, Producer) and _overrides(plugin, Producer, "prepare")
    return not plugin.own_only and (not prepares or _overrides(plugin, Plugin, "from_peer"))


def _puts_on_account(plugin: Plugin) -> bool:
    return _overrides(plugin, Plugin, "from_peer") or _overrides(plugin, Plugin, "on_picked")


def _overrides(plugin: Plugin, base: type[Plugin], hook: str) -> bool:
    return getattr(type(plugin), hook) is not getattr(base, hook)
