"""`Chain`: one profile: filters in order, scorers weighed and summed, a picker. `Decision`: the chosen endpoint.

Both say all reasons. Recording keeps references only; text is made when someone asks.

What a broken plugin does to a request:
 · a scorer that raises counts 0 for every endpoint in that request, and is reported (`on_error`): the pick gets worse;
 · a filter or a picker that raises, and any plugin that answers in the wrong shape, fails the request with
   `InternalError` naming the plugin, and is reported: going on would send requests where they must not go.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import chain
from math import inf
from operator import add
from struct import Struct as Packed
from types import MappingProxyType
from typing import Any, Final
from urllib.parse import quote

import msgspec

from epp.errors import InternalError, NoEndpoint
from epp.plugin import (
    Cost,
    Endpoint,
    Filter,
    LatencyPrediction,
    Picker,
    Plugin,
    PrefixMatch,
    Request,
    Scorer,
    SessionState,
    Slo,
    Stage,
    scores_of,
)

NOTHING: Final[Mapping[Any, Any]] = MappingProxyType({})


class Bills(msgspec.Struct, frozen=True, eq=False, gc=False):
    """Bills in one piece of memory. Thousands of decisions are kept, and when one is let go of no cache of the CPU has
    it any more: then each object that it was made of is waited for.
    """

    packed: bytes
    """Seconds, bill after bill, as C's doubles."""
    count: int
    terms: int

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[tuple[float, ...]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, at: int) -> tuple[float, ...]:
        if not 0 <= at < self.count:
            raise IndexError(at)
        return _numbers(self.terms).unpack_from(self.packed, 8 * self.terms * at)


@lru_cache(1024)
def _numbers(count: int) -> Packed:
    return Packed(f"{count}d")


class Scored(msgspec.Struct, eq=False):
    """One scorer's part in a profile. `bills` is set for costs: seconds per term, one row per endpoint; so is
    `meanings`, as `Cost` has it.
    """

    name: str
    weight: float
    scores: Sequence[float]
    terms: tuple[str, ...] = ()
    bills: Bills | Sequence[tuple[float, ...]] = ()
    meanings: Mapping[str, str] = NOTHING


class ProfileRun(msgspec.Struct, eq=False):
    """One profile's run: who came in, who was dropped by which filter, who got which scores, who was picked."""

    profile: str
    dropped: Sequence[tuple[str, Sequence[Endpoint]]]
    endpoints: Sequence[Endpoint]
    """Those that were scored, in the order of `scored[i].scores` and `totals`."""
    scored: list[Scored]
    totals: Sequence[float]
    picks: Sequence[Endpoint]
    others: int = 0
    """Endpoints that could not be the best, as was known without scoring them (`Cost.shortlist`)."""
    stage: Stage = ""
    """For which part of the request it was run, if not for all of it or the decode."""


class Comparison(msgspec.Struct, frozen=True, eq=False):
    """What the shadow profile would have done with a request. None was given to it, and no account knows of it."""

    profile: str
    agreed: bool
    """It would have picked the same endpoint, or scored it as high as its own pick."""
    regret: float
    """Seconds that its pick costs more than ours by `expected-ttft`; below 0 if less."""
    run: ProfileRun | None
    """None: it failed, or its filters left no endpoint."""

    def as_dict(self) -> dict[str, Any]:
        if self.run is None:
            return {"profile": self.profile, "failed": True}
        return {
            "profile": self.profile,
            "endpoint": self.run.picks[0].name,
            "agreed": self.agreed,
            "regret_ms": round(self.regret * 1000, 3),
            "run": _run_as_dict(self.run, {}),
        }


class Decision(msgspec.Struct, eq=False):
    """Where a request goes and why. `at` is seconds since the epoch (for people), taken once per decision."""

    request: Request
    endpoints: Sequence[Endpoint]
    """Chosen endpoint first, then fallbacks in order."""
    headers: Mapping[str, str]
    runs: list[ProfileRun]
    at: float
    shadow: Comparison | None = None
    """Where a shadow profile looked at this request too."""
    waited: float = 0.0
    """Seconds that it waited in flow control."""
    flow: str = ""
    """Its fairness id there; "": there is no flow control."""
    parts: Sequence[tuple[Request, Endpoint]] = ()
    """Stages that have endpoints of their own, as requests to those; while they are on account there."""
    beside: Mapping[Stage, Sequence[str]] = NOTHING
    """Names of these endpoints, for good."""
    ways: Mapping[str, float] = NOTHING
    """Seconds that each way would have taken, where the choice between them was one of time."""
    times: tuple[float, ...] = ()
    """Where it is traced, on the router's clock: preparing began and ended, choosing began and ended."""
    division: str = ""
    """Which stages have endpoints of their own, where a handler divides requests (`epp.plugin.Picked`)."""
    port: int = 0
    """Where the gateway is to send it instead of the endpoints' own ports; 0: there."""
    predictions: Mapping[Endpoint, LatencyPrediction] = NOTHING
    """What was expected of the chosen endpoint; of a request with an SLO, of all that were looked at."""

    @property
    def endpoint(self) -> Endpoint:
        return self.endpoints[0]

    @property
    def computes(self) -> Endpoint:
        """Who computes its prompt; while the parts are on account."""
        if not self.parts:
            return self.endpoint
        return next((endpoint for part, endpoint in self.parts if part.stage == "prefill"), self.endpoint)

    @property
    def predicted(self) -> LatencyPrediction | None:
        """Of the chosen endpoint; None: nobody predicts."""
        return self.predictions.get(self.endpoint)

    @property
    def last_run(self) -> ProfileRun:
        """The last that is of no stage, or the last of all. Not of a decision without runs."""
        return next((run for run in reversed(self.runs) if not run.stage), self.runs[-1])

    @property
    def destination(self) -> str:
        """Value of the destination header and metadata: `ip:port[,ip:port…]`."""
        if len(self.endpoints) == 1 and not self.port:
            return self.endpoints[0].address
        return ",".join(map(self._sent_to, self.endpoints))

    def served_by(self, address: str) -> Endpoint | None:
        """Which of its endpoints was reached at this address; None: none of them."""
        return next((endpoint for endpoint in self.endpoints if self._sent_to(endpoint) == address), None)

    def _sent_to(self, endpoint: Endpoint) -> str:
        return f"{endpoint.address.rpartition(':')[0]}:{self.port}" if self.port else endpoint.address

    def as_dict(self) -> dict[str, Any]:
        """The whole explanation, JSON-ready; costs in milliseconds; no prompt text."""
        return {
            "request_id": self.request.id,
            "model": self.request.model,
            **({"opaque": self.request.opaque} if self.request.opaque else {}),
            "at": self.at,
            "tokens": self.request.tokens,
            "endpoint": self.endpoint.name,
            "address": self.endpoint.address,
            "fallbacks": [endpoint.name for endpoint in self.endpoints[1:]],
            **({"priority": self.request.priority} if self.request.priority else {}),
            **({"waited_ms": round(self.waited * 1000, 3), "flow": self.flow} if self.waited else {}),
            **({"watched": self.request.watched} if self.request.watched else {}),
            **{stage: list(names) for stage, names in self.beside.items()},
            **({"ways_ms": {way: round(s * 1000, 3) for way, s in self.ways.items()}} if self.ways else {}),
            **({} if self.request.slo is None else {"slo": _slo_as_dict(self.request.slo)}),
            **({} if self.predicted is None else {"predicted": _prediction_as_dict(self.predicted)}),
            **_session_as_dict(self.request, self.endpoint),
            "profiles": [_run_as_dict(run, self.predictions) for run in self.runs],
            **({} if self.shadow is None else {"shadow": self.shadow.as_dict()}),
        }


def _session_as_dict(request: Request, endpoint: Endpoint) -> dict[str, Any]:
    state: SessionState | None = request.signals.get(SessionState, {}).get(endpoint)
    if state is None:
        return {}
    found = {"turn": state.turns + 1, "in_flight": state.in_flight, "idle_ms": round(state.idle * 1000, 3)}
    think = {} if state.think is None else {"think_ms": round(state.think * 1000, 3)}
    tokens = {"input_tokens": state.input_tokens, "output_tokens": state.output_tokens}
    return {"session": {**found, **think, **tokens}}


def _slo_as_dict(slo: Slo) -> dict[str, Any]:
    asked = {"ttft_ms": slo.ttft, "tpot_ms": slo.tpot}
    return {
        **{name: round(seconds * 1000, 3) for name, seconds in asked.items() if seconds is not None},
        **({"objective": slo.objective} if slo.objective else {}),
    }


def _prediction_as_dict(seen: LatencyPrediction) -> dict[str, float]:
    found = {"ttft_ms": round(seen.ttft * 1000, 3), "tpot_ms": round(seen.tpot * 1000, 3)}
    if seen.promised < inf:
        found["others_tpot_ms"] = round(seen.tpot_after * 1000, 3)
        found["promised_tpot_ms"] = round(seen.promised * 1000, 3)
    return found


def _run_as_dict(run: ProfileRun, predictions: Mapping[Endpoint, LatencyPrediction]) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    for i, endpoint in enumerate(run.endpoints):
        row = row_as_dict(run, i)
        if endpoint in predictions:
            row["predicted"] = _prediction_as_dict(predictions[endpoint])
        rows.append(row)
    meanings = meanings_of(run)
    return {
        "profile": run.profile,
        **({"stage": run.stage} if run.stage else {}),
        **({"terms": meanings} if meanings else {}),
        "dropped": [{"filter": name, "endpoints": [e.name for e in gone]} for name, gone in run.dropped],
        "endpoints": rows,
        **({"others": run.others} if run.others else {}),
        "picks": [endpoint.name for endpoint in run.picks],
    }


def meanings_of(run: ProfileRun) -> dict[str, str]:
    """What each term of the run's bills is, where its cost says so."""
    return {term: meaning for scored in run.scored for term, meaning in scored.meanings.items()}


def row_as_dict(run: ProfileRun, i: int) -> dict[str, Any]:
    """What a profile's run found of its endpoint `i`, JSON-ready; costs in milliseconds."""
    row: dict[str, Any] = {"endpoint": run.endpoints[i].name, "total": run.totals[i], "scores": {}}
    for scored in run.scored:
        row["scores"][scored.name] = {"score": scored.scores[i], "weight": scored.weight}
        if scored.bills:
            bill = scored.bills[i]
            row["bill_ms"] = {t: round(s * 1000, 3) for t, s in zip(scored.terms, bill, strict=True)}
            row["cost_ms"] = round(sum(bill) * 1000, 3)
    return row


_LONGEST: Final = 256
"""Characters of a name or an id in a summary."""


def summary(decision: Decision) -> str:
    """Why the request goes where it goes, in one line of at most 2 KB of visible ASCII, for a header.

    `key=value; …`: `id` (as `/decisions/ID` has it), `endpoint`, `tokens` (of the prompt, estimated), `cached` and,
    where there are some, `l1` and `l2` (of these, what each tier holds), `ttft-ms` (predicted), `queue` (requests that
    wait in the engine, as last scraped), `waited-ms` (in flow control), `prefill` (who computes the prompt), `cost-ms`
    or `score`, and the same of the `next` best. Names and the id are percent-encoded. Where a retry went elsewhere,
    `epp.route` adds `served`.
    """
    request, chosen = decision.request, decision.endpoint
    parts = [("id", _plain(request.id)), ("endpoint", _plain(chosen.name)), ("tokens", str(request.tokens))]
    held = request.signals.get(PrefixMatch, {}).get(chosen)
    if held is not None:
        parts.append(("cached", str(held.tokens)))
        parts += [(tier, str(tokens)) for tier, tokens in (("l1", held.l1), ("l2", held.l2)) if tokens]
    if decision.predicted is not None:
        parts.append(("ttft-ms", _ms(decision.predicted.ttft)))
    if chosen.load.at is not None:
        parts.append(("queue", str(chosen.load.waiting)))
    if decision.waited:
        parts.append(("waited-ms", _ms(decision.waited)))
    if prefill := decision.beside.get("prefill"):
        parts.append(("prefill", _plain(prefill[0])))
    run = next((run for run in decision.runs if not run.stage and chosen in run.endpoints), None)
    if run is not None:
        parts.append(_judged(run, run.endpoints.index(chosen)))
        others = [i for i, endpoint in enumerate(run.endpoints) if endpoint is not chosen]
        if others:
            best = max(others, key=lambda i: run.totals[i])
            parts.append(("next", f"{_plain(run.endpoints[best].name)} {'='.join(_judged(run, best))}"))
    return "; ".join(f"{key}={value}" for key, value in parts)


def _judged(run: ProfileRun, i: int) -> tuple[str, str]:
    costs = [scored.bills[i] for scored in run.scored if scored.bills]
    return ("cost-ms", _ms(sum(costs[0]))) if costs else ("score", f"{run.totals[i]:.3g}")


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def _plain(text: str) -> str:
    return quote(text, safe="/:@,+")[:_LONGEST]


OnError = Callable[[str, Exception], None]
"""Called with (name of the plugin, what it raised). The owner counts it as a degradation."""


def name_of(plugin: Plugin) -> str:
    """The name in the configuration, or the class where a plugin was built by hand."""
    return plugin.name or type(plugin).__name__


def failed(plugin: str, error: Exception, on_error: OnError) -> InternalError:
    """Report a plugin's failure and make the error the client gets."""
    on_error(plugin, error)
    return InternalError(f"plugin {plugin!r} failed")


class BestPicker(Picker):
    """All endpoints, the highest score first, of equals the first: for explanations, where no turn is taken."""

    takes_best = True

    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        return [endpoint for endpoint, _ in sorted(scored, key=lambda each: -each[1])]


class Chain:
    """A scheduling profile: `filters`, `scorers` with their weights, `picker`, under the profile's `name`.

    The semantics are GIE's and llm-d's: each score is clamped to 0..1 (NaN is 0), multiplied by its weight and summed.
    """

    __slots__ = ("_filters", "_picker_name", "_plugins", "_scorers", "lone_cost", "name", "picker")

    def __init__(
        self, name: str, filters: Sequence[Filter], scorers: Sequence[tuple[Scorer, float]], picker: Picker
    ) -> None:
        self.name = name
        self.picker = picker
        self._plugins = filters, scorers
        self._picker_name = name_of(picker)
        self._filters = [_Filtering(plugin) for plugin in filters]
        self._scorers = [_Weighed(name_of(plugin), plugin, float(weight)) for plugin, weight in scorers]
        self.lone_cost = _lone_cost(self._filters, scorers, picker)
        """The cost that decides alone where the profile does not narrow; None: others have to see all endpoints."""

    def with_picker(self, picker: Picker) -> "Chain":
        """The same with another picker."""
        return Chain(self.name, *self._plugins, picker)

    def narrows(self, request: Request) -> bool:
        """Whether one of the filters may drop endpoints for this request. Raises what a filter raises."""
        return any(each.applies is None or each.applies(request) for each in self._filters)

    def run(self, request: Request, endpoints: Sequence[Endpoint], on_error: OnError) -> ProfileRun:
        """Choose among `endpoints` (never empty). Raises NoEndpoint (a filter left no endpoint) or InternalError."""
        dropped: tuple[tuple[str, Sequence[Endpoint]], ...] = ()
        for filter in self._filters:
            kept = filter.run(request, endpoints, on_error)
            if len(kept) != len(endpoints):
                dropped = *dropped, (filter.name, _without(endpoints, kept))
            endpoints = kept
        scored: list[Scored] = []
        totals: Sequence[float] | None = None
        for scorer in self._scorers:
            entry = scorer.run(request, endpoints, on_error)
            scored.append(entry)
            scores, weight = entry.scores, entry.weight
            if weight != 1.0:
                scores = [weight * score for score in scores]
            totals = scores if totals is None else [*map(add, totals, scores)]
        if totals is None:
            totals = [0.0] * len(endpoints)
        try:
            picks = self.picker.pick(request, [*zip(endpoints, totals, strict=True)])
            if not picks:
                raise ValueError("a picker must return at least one endpoint")
        except Exception as error:
            raise failed(self._picker_name, error, on_error) from error
        return ProfileRun(self.name, dropped, endpoints, scored, totals, picks)


def _without(endpoints: Sequence[Endpoint], kept: Sequence[Endpoint]) -> Sequence[Endpoint]:
    remain = set(kept)
    return [endpoint for endpoint in endpoints if endpoint not in remain]


class _Filtering:
    """A filter in a profile."""

    __slots__ = ("_filter", "applies", "name")

    def __init__(self, plugin: Filter) -> None:
        self.name = name_of(plugin)
        self._filter = plugin.filter
        self.applies = None if type(plugin).applies is Filter.applies else plugin.applies
        """None: to every request."""

    def run(self, request: Request, endpoints: Sequence[Endpoint], on_error: OnError) -> Sequence[Endpoint]:
        try:
            if self.applies is not None and not self.applies(request):
                return endpoints
            kept = self._filter(request, endpoints)
            found = len(kept)
        except Exception as error:
            raise failed(self.name, error, on_error) from error
        if not found:
            raise NoEndpoint(f"filter {self.name!r} left none of {len(endpoints)} endpoints for this request")
        return kept


def _lone_cost(filters: Sequence[_Filtering], scorers: Sequence[tuple[Scorer, float]], picker: Picker) -> Cost | None:
    if len(scorers) != 1 or not picker.takes_best or any(each.applies is None for each in filters):
        return None
    (scorer, weight) = scorers[0]
    return scorer if isinstance(scorer, Cost) and weight > 0 else None


class _Weighed:
    """A scorer in a profile."""

    __slots__ = ("_cost", "_lengths", "_meanings", "_name", "_scorer", "_terms", "_weight")

    def __init__(self, name: str, scorer: Scorer, weight: float) -> None:
        self._name = name
        self._scorer = scorer
        self._weight = weight
        self._cost = scorer if isinstance(scorer, Cost) else None
        self._terms = scorer.terms if isinstance(scorer, Cost) else ()
        self._meanings = scorer.meanings if isinstance(scorer, Cost) else {}
        self._lengths = {len(self._terms)}

    def run(self, request: Request, endpoints: Sequence[Endpoint], on_error: OnError) -> Scored:
        """Its part. Mistakes in the answer's shape are InternalErrors; what it raises makes it count 0."""
        bills: Bills | Sequence[tuple[float, ...]] = ()
        well_formed = True
        try:
            if self._cost is not None:
                rows = self._cost.bill(request, endpoints)
                scores: Sequence[float] = scores_of(rows)
                if rows and (well_formed := {*map(len, rows)} == self._lengths):
                    count, terms = len(rows), len(self._terms)
                    bills = Bills(_numbers(count * terms).pack(*chain.from_iterable(rows)), count, terms)
            else:
                scores = self._scorer.score(request, endpoints)
            # The comparisons with NaN, which the sum is if one score is, are false.
            if not (scores and min(scores) >= 0.0 and max(scores) <= 1.0 and sum(scores) >= 0.0):
                scores = [score if 0.0 <= score <= 1.0 else (1.0 if score > 1.0 else 0.0) for score in scores]
        except Exception as error:
            on_error(self._name, error)
            return Scored(self._name, self._weight, [0.0] * len(endpoints))
        if len(scores) != len(endpoints) or not well_formed:
            wrong = ValueError(
                f"{len(scores)} scores for {len(endpoints)} endpoints"
                if well_formed
                else f"a bill must have {len(self._terms)} terms: {', '.join(self._terms)}"
            )
            raise failed(self._name, wrong, on_error) from wrong
        return Scored(self._name, self._weight, scores, self._terms, bills, self._meanings)
