"""PUBLIC: everything a plugin author imports.

A plugin is a class. If it is a dataclass, its fields are its YAML `parameters` (fields with `init=False` are state).
`type: my_scorers.WarmFirst` in an EndpointPickerConfig, or an entry point in group `warmpath.plugins`, names it; there
is nothing to register. Every hook is synchronous and runs on the event loop between two requests: it must not block.

    @dataclass
    class ShortQueue(Scorer):
        '''Prefer endpoints with fewer waiting requests.'''

        def score(self, request, endpoints):
            return least(e.load.waiting for e in endpoints)

A request passes: `Guard.check` -> `Producer.prepare` (may wait) -> one synchronous step: `Producer.produce`, filters,
scorers, picker, `on_picked` -> `on_answered` -> `on_first_token` -> `on_finished`: this once per `on_picked`, however
the request ends.

A plugin's life: it is built from its parameters, `start` gives it the process's `Services`, and `run` is a task of its
own from then until a reload drops it or the process ends. A reload that leaves its parameters as they are takes it
over: it is not started again, and `run` goes on.

    class Advised(Filter):
        async def run(self, services):
            while True:
                self.full = await ask_the_planner(services.endpoints())
                await asyncio.sleep(1.0)
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from random import Random
from typing import Any, ClassVar, Final, Generic, Literal, NamedTuple, Protocol, TypeVar

import msgspec

from epp.errors import BadRequest, NoEndpoint
from epp.parsing.request import NO_HEADERS, Api, Request, Response, Slo, Slot, Stage, Usage
from epp.pool.roles import Roles, RoleView, apart, computes_prompts, serves, stages_of
from epp.pool.store import Endpoint, Load, ServedModel
from epp.telemetry.series import KvEventFigures

__all__ = [
    "AGENT_IDENTITY",
    "ALONE",
    "NO_HEADERS",
    "Admitter",
    "Api",
    "BadRequest",
    "BandSelectionPolicy",
    "CacheRoom",
    "Cost",
    "Decider",
    "Detector",
    "EncoderMatch",
    "Endpoint",
    "FailureShare",
    "FairnessPolicy",
    "Filter",
    "Flow",
    "FlowBand",
    "FlowKey",
    "Guard",
    "InFlight",
    "KvEventFigures",
    "LatencyPrediction",
    "Level",
    "Load",
    "NoEndpoint",
    "NoTokens",
    "OrderingPolicy",
    "Picked",
    "Picker",
    "Plugin",
    "PrefixMatch",
    "Producer",
    "ProfileHandler",
    "ReadsPrefixMatch",
    "Reference",
    "Refusal",
    "Replicas",
    "Report",
    "Request",
    "Response",
    "RoleView",
    "Roles",
    "RunProfile",
    "Scorer",
    "ServedModel",
    "Services",
    "SessionState",
    "Slo",
    "Slot",
    "Stage",
    "Usage",
    "UsageLimitPolicy",
    "Waiting",
    "annotated",
    "apart",
    "computes_prompts",
    "least",
    "most",
    "scores_of",
    "serves",
    "stages_of",
]

S = TypeVar("S")


# --- signals: facts about (request, endpoint), found just before the pick -------------------------------------------


class PrefixMatch(msgspec.Struct, frozen=True, gc=False):
    """How much of the request's prompt an endpoint holds, longest prefix first. Tokens are estimates."""

    tokens: int
    blocks: int
    total_blocks: int
    l1: int = 0
    """Tokens that follow those and lie in the memory of its node."""
    l2: int = 0
    """Tokens that follow those and lie in storage it can load from."""

    @property
    def share(self) -> float:
        """Held share of the prompt's blocks, 0..1."""
        return self.blocks / self.total_blocks if self.total_blocks else 0.0


class CacheRoom(msgspec.Struct, frozen=True, gc=False):
    """An endpoint's KV memory as our own requests use it, in tokens. `capacity` 0 = unknown, treat as endless."""

    pinned: int
    """In use; where a request would not fit otherwise, with what answers in flight will take."""
    capacity: int
    shared: int = 0
    """Of `pinned`, what this request's prompt has in common with those in flight, so what it uses without taking more;
    reported where it would not fit otherwise. What is cached and idle counts as free until a request uses it again."""


class EncoderMatch(msgspec.Struct, frozen=True, gc=False):
    """How many of a request's different images, videos and audio clips an endpoint has encoded lately."""

    held: int
    items: int


class InFlight(NamedTuple):
    """What we have sent to an endpoint and not seen the end of."""

    requests: int
    uncached_tokens: int
    """Prompt tokens it does not hold, of requests without a first token yet."""


class FailureShare(msgspec.Struct, frozen=True, gc=False):
    """How often an endpoint failed lately, by its own fault. The defaults are those of a healthy one."""

    share: float = 0.0
    """Of its last answers those that failed, 0..1; the latest count most, and all fade within seconds."""
    suspended: bool = False
    """It fails so often that it should get nothing, while another endpoint is there."""
    trial: bool = False
    """It would be suspended, but one request should go there now, to see whether it is healthy again."""


class SessionState(msgspec.Struct, frozen=True, gc=False):
    """What is known of the session that a request belongs to, before that request; the same for every endpoint. The
    defaults are those of a session's first request."""

    turns: int = 0
    """Requests before it."""
    seconds: float = 0.0
    """Since the first of them."""
    idle: float = 0.0
    """Seconds since its last answer ended; 0 while one is in flight."""
    in_flight: int = 0
    """Its requests that have not ended, as where sub-agents work side by side."""
    input_tokens: int = 0
    """Prompt tokens so far, as answers reported them."""
    output_tokens: int = 0
    think: float | None = None
    """Seconds between an answer's end and the next request, the latest counting most; None: not known yet."""


class LatencyPrediction(msgspec.Struct, frozen=True, gc=False):
    """What a request would find at an endpoint, if it was sent there now. Seconds."""

    ttft: float
    """Until its first token."""
    tpot: float
    """For each of its tokens after that."""
    tpot_before: float = 0.0
    """For each token of those in flight there, as long as it has not come."""
    tpot_after: float = 0.0
    """The same once it has."""
    promised: float = inf
    """The least TPOT SLO of those in flight there; inf: none has one."""
    requests: int = 0
    """In flight there."""
    parts: tuple[float, float] | None = None
    """What `ttft` is made of beside overhead: modelled seconds of computing, on an endpoint as fast as the pool; and
    what else is known. None: what it takes says nothing of these."""


class Level(msgspec.Struct, frozen=True, gc=False):
    """The endpoints that hold as much of a prompt as `match` says, or more."""

    match: PrefixMatch
    count: int
    """How many at most."""
    members: Callable[[], Sequence[Endpoint]]
    """They, and perhaps some that are not in the pool any more."""
    holds: Callable[[Endpoint], bool] | None
    """Whether an endpoint is one of them; None: all are."""


# --- services: what the process gives to its plugins ----------------------------------------------------------------


class NoTokens(Exception):
    """This request's tokens are not known in time. `reason` is a word for a metric, the text is for a log.

    no-tokenizer: neither files nor a pod for this model · late: the deadline passed, or too many wait ·
    unsupported: not a prompt of text, or a format that is not rendered · failed: the template, the tokenizer or the
    pod has an error
    """

    Reason = Literal["no-tokenizer", "late", "unsupported", "failed"]

    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason: NoTokens.Reason = reason
        self.detail = detail


class Report(Protocol):
    def __call__(self, reason: str, detail: str = "", *, lasting: bool = False) -> None:
        """Count a degradation in `warmpath_degraded_total` and log it, at most once a minute.

        `reason` is a fixed word, `detail` is only logged. `lasting`: it goes on until `Services.recovered`, or until
        the plugin's life ends.
        """


class Replicas(NamedTuple):
    """The replicas of the picker that serve a pool, as one of them knows them."""

    number: int = 0
    """Of this one: each of them has another, from 0 on."""
    total: int = 1
    unreported: float = 0.0
    """Requests of the pool that the others have sent to endpoints and that are not known here yet, in the mean."""


ALONE: Final = Replicas()


@dataclass(frozen=True)
class Services:
    """What the process gives to the plugins of one pool, beside their `clock` and `random`."""

    endpoints: Callable[[], Sequence[Endpoint]]
    """The pool's endpoints now, in its order; an endpoint is the same object as long as it is in the pool."""
    for_each_endpoint: Callable[
        [str, Callable[[Endpoint], Coroutine[Any, Any, None]], Callable[[Endpoint], None]], Awaitable[None]
    ]
    """`(what, work, left)`: for ever, a task called `what` does the `work` of each endpoint of the pool as long as it
    is there; `left` is called with each that leaves."""
    tokens: Callable[[Request], Awaitable[Sequence[int]]]
    """The token ids the engine will see of a request's prompt, before `on_picked` only. Raises NoTokens, after half a
    second at the latest."""
    samples: Callable[[str, str, str], Awaitable[Sequence[tuple[Mapping[str, str], float]]]]
    """`(address, path, metric)`: labels and value of each sample of a metric in a page for Prometheus, read now over
    HTTP. Raises OSError, and TimeoutError after a second."""
    degraded: Report
    recovered: Callable[[str], None]
    """A lasting degradation of this reason is over, as far as this plugin knows."""
    wall_clock: Callable[[], float]
    """Seconds since the epoch: for people and for what others' clocks say, never for a decision."""
    engine_of: Callable[[Endpoint], str]
    """The engine an endpoint runs, by its labels and by what `core-metrics-extractor` says of those without: `vllm`,
    `sglang` and so on."""
    hash_seed: int = 0
    """Of 64 bits, for hashes of what clients send by functions that are not cryptographic: who does not know it cannot
    choose them. The same in all replicas."""
    replicas: Callable[[], Replicas] = lambda: ALONE
    """As they are now."""
    instead: Mapping[type[Any], Callable[..., Any]] = field(default_factory=dict)
    """What a plugin makes in place of a class it would use to reach outside; a replay has its own for virtual time."""


# --- the contract ---------------------------------------------------------------------------------------------------


class Reference(NamedTuple):
    """A plugin that another one works with: by its `name` in the configuration, and of a `kind`."""

    name: str
    kind: type["Plugin"]
    add: bool = False
    """The name may be a built-in type too: one of that type, or one that is added."""


class Plugin:
    """What every plugin may have. `clock` (seconds, monotonic) and `random` are set by the loader: use no others."""

    needs: ClassVar[tuple[type[Any], ...]] = ()
    """Signals it reads. The loader adds a producer for each, or refuses to start."""
    own_only: ClassVar[bool] = False
    """It is not called for the requests of other replicas."""

    name: str = ""
    """Set by the loader: the name in the configuration."""
    clock: Callable[[], float] = staticmethod(time.monotonic)
    random: Random = Random()

    def __init_subclass__(cls, **options: Any) -> None:
        """A plugin equals itself alone, whatever a decorator makes of its class: `@dataclass` leaves alone what a class
        has, and would else compare fields and forbid hashing.
        """
        super().__init_subclass__(**options)
        for method in ("__eq__", "__hash__"):
            if cls.__dict__.get(method) is None:
                setattr(cls, method, getattr(object, method))

    def refers(self) -> Mapping[str, Reference]:
        """The plugins it works with, by the parameter that names each. The loader finds them and calls `connect`."""
        return {}

    def connect(self, plugins: Mapping[str, Any]) -> None:
        """Here they are, by the same parameters; called again when a reload has made one of them anew."""

    def start(self, services: Services) -> None:
        """Its life begins: keep of `services` what the hooks need. Called before the first request it sees."""

    async def run(self, services: Services) -> None:
        """What it does for as long as it lives, beside requests; cancelled at its end. May return at once, as here.

        What it raises is reported (`plugin-failed`) and ends this task alone: its hooks are called as before.
        """

    def asks_for_answer(self, request: Request, endpoint: Endpoint) -> bool:
        """Whether this plugin needs to see the answer, where the gateway shows it only if it is asked to
        (`request.watchable`): then `on_first_token` is called for it, and `on_finished` gets its usage.

        Called with the signals of the pick, before `on_picked`, and not for other replicas' requests; `endpoint`
        computes its prompt. Each answer that is shown costs time for every token: `watchable` is the share of them that
        all plugins together should ask for.
        """
        return False

    def on_picked(self, request: Request, endpoint: Endpoint) -> None:
        """The request was given to this endpoint (also: moved here by the gateway's retry)."""

    def on_answered(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        """The answer's headers were seen: `response.status` is known. At most once; not all gateways show them."""

    def on_first_token(self, request: Request, endpoint: Endpoint) -> None:
        """The first token was seen. At most once, and never when the gateway does not show us answers."""

    def on_finished(self, request: Request, endpoint: Endpoint, response: Response) -> None:
        """The request left this endpoint: answered, failed, abandoned or retried elsewhere. Once per `on_picked`."""

    def on_removed(self, endpoint: Endpoint) -> None:
        """The endpoint left the pool for good; forget it. Its requests still end with `on_finished`."""

    def on_scraped(self, endpoint: Endpoint) -> None:
        """The endpoint's `load` is a new one. Not called for the first, where the endpoint came with it."""

    def to_peers(self, request: Request, endpoint: Endpoint) -> Any:
        """What the same plugin of other replicas needs of a request, asked for after its `on_picked`; None: nothing.

        Of what msgpack knows (numbers, text, bytes, lists, maps), and no prompt text. Most plugins need nothing: the
        request's own fields and the hooks are passed on anyway.
        """
        return None

    def from_peer(self, request: Request, endpoint: Endpoint, state: Any) -> None:
        """Another replica gave `request` to this endpoint, and its `to_peers` said `state` (None: nothing, or no such
        plugin). Called in place of `on_picked`, which it calls as it stands; the other hooks follow as for any request.

        Such a request has neither prompt nor signals: what they say of it is to be in `state`. A plugin that has
        `prepare` and not this is not called for the requests of other replicas.
        """
        self.on_picked(request, endpoint)

    def snapshot(self) -> Iterator[Any]:
        """What it knows, for a replica that joins: pieces of some kilobytes, as `to_peers` has them.

        Requests pass between two pieces. Those in flight are passed on beside, and so are no part of it.
        """
        return iter(())

    def restore(self, piece: Any, endpoints: Mapping[str, Endpoint]) -> None:
        """Take over a piece of another replica's `snapshot`; `endpoints` are the pool's by name."""

    def predictions(self, request: Request) -> Mapping[Endpoint, LatencyPrediction]:
        """What it expected of a request when it was picked: of the chosen endpoint, and of others where it looked.

        Asked for after `on_picked` of requests that are streamed or have an SLO; the first answer that is not empty is
        kept with the decision.
        """
        return {}

    def request_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        """Headers to set on the request; `endpoint` computes its prompt. Called with the signals of the pick."""
        return {}

    def answer_headers(self, request: Request, endpoint: Endpoint) -> Mapping[str, str]:
        """Headers to add to the answer the client gets."""
        return {}

    def statistics(self) -> Mapping[str, float]:
        """Figures for /metrics (`warmpath_plugin_statistic`): few, fixed names."""
        return {}

    def endpoint_statistics(self) -> Mapping[Endpoint, Mapping[str, float]]:
        """Figures of single endpoints (`warmpath_plugin_endpoint_statistic` and the page): few, fixed names."""
        return {}

    def kv_events(self, endpoints: Sequence[Endpoint]) -> KvEventFigures | None:
        """Of a plugin that receives KV events: how each of `endpoints` is followed. The first answer is shown."""
        return None


class Refusal(NamedTuple):
    """What the client of a request that a guard refuses gets, as an OpenAI error."""

    status: int
    """400 to 599."""
    message: str
    code: str | None = None
    """A word by which programs know the error, `error.code`."""


class Guard(Plugin, ABC):
    """Sees each request first of all, before it waits or takes anything: to refuse it, or to say more of it."""

    @abstractmethod
    def check(self, request: Request) -> Request | Refusal | None:
        """None: it passes as it is. Another Request, made by `annotated`: it passes as that.

        Guards are asked in the order of the configuration; each sees what those before it said. One that raises
        refuses: what cannot be checked does not pass.
        """


@dataclass
class ReadsPrefixMatch(Plugin):
    """A plugin that reads `PrefixMatch`, of the producer it names where a configuration has several."""

    needs: ClassVar[tuple[type[Any], ...]] = (PrefixMatch,)

    prefix_match_info_producer_name: str = ""
    """Name of the producer; empty: the first one of the configuration."""
    prefix_match: type[PrefixMatch] = field(default=PrefixMatch, init=False, repr=False)
    """Under which that producer's signal is; set by the loader."""

    def matches(self, request: Request) -> Mapping[Endpoint, PrefixMatch]:
        """What each candidate holds of the prompt; empty where the producer failed."""
        return request.signals.get(self.prefix_match, {})


class Filter(Plugin, ABC):
    @abstractmethod
    def filter(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """The endpoints to keep, in order. `endpoints` is never empty; an empty answer ends in 503."""

    def applies(self, request: Request) -> bool:
        """False: it would keep all endpoints whichever they are, so it is not asked. A filter that can say so costs
        others' requests nothing, and leaves a `Cost` beside it its shortlist.
        """
        return True


class Scorer(Plugin, ABC):
    @abstractmethod
    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        """One score per endpoint, same order, 0..1 (clamped), more is better."""


class Cost(Scorer):
    """A scorer in seconds: the lowest bill wins, and the bill is kept as the explanation of the pick."""

    terms: ClassVar[tuple[str, ...]]
    """Names of a bill's terms, in order."""
    meanings: ClassVar[Mapping[str, str]] = {}
    """What each term is, in some words: the pages show it, and explanations of requests have it."""

    @abstractmethod
    def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
        """One bill per endpoint, same order: seconds per term, their sum is the cost."""

    def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
        return scores_of(self.bill(request, endpoints))

    shortlist_from: ClassVar[float] = inf
    """Endpoints of a pool from which on it is asked for a `shortlist`."""

    def shortlist(
        self,
        request: Request,
        endpoints: Sequence[Endpoint],
        levels: Iterator[Level],
        count: int,
        up_to: float | None = None,
    ) -> tuple[Sequence[Endpoint], float] | None:
        """Those of `endpoints` that can be among the `count` cheapest, in order, and the least that any other costs.

        Then signals and bills are made for these only. Asked where no filter, other scorer or shadow profile has to see
        all endpoints, and of requests without an SLO; `request` has the signals of producers with `whole_pool`,
        `levels` is what is held of its prompt, least first. `up_to`: all that can cost so much or less are to be named;
        asked where the bills show that the first answer was too short. None, as here: ask for the bills of all.
        """
        return None


class Admitter(Plugin, ABC):
    """Says no to requests before anything is picked for them. It works by being declared."""

    @abstractmethod
    def refusal(self, request: Request, endpoints: Sequence[Endpoint]) -> str:
        """Why `request` is refused (429), in words for its client; "": it is not. `endpoints` is never empty."""


class Picker(Plugin, ABC):
    max_num_of_endpoints: int = 1
    """It names at most so many."""
    takes_best: ClassVar[bool] = False
    """It names none but those with the highest scores, so nobody else need be scored."""

    @abstractmethod
    def pick(self, request: Request, scored: Sequence[tuple[Endpoint, float]]) -> Sequence[Endpoint]:
        """The endpoint to use, then fallbacks in order; at least one. `scored` is never empty, in pool order."""


class Picked(msgspec.Struct, frozen=True):
    """What a profile handler decided: endpoints in order of preference, and headers to set on the request.

    `endpoints` serve all of the request, or decode it where another one prefills.
    """

    endpoints: Sequence[Endpoint]
    headers: Mapping[str, str] = {}
    prefill: Endpoint | None = None
    """Who computes the prompt, if not the first of `endpoints`."""
    encode: Sequence[Endpoint] = ()
    """Who makes embeddings of its images, if not they."""
    port: int = 0
    """Where the gateway is to send it instead of the endpoints' own ports; 0: there."""
    ways: Mapping[str, float] = {}
    """Seconds that each way would have taken, to explain the choice between them."""
    division: str = ""
    """Of a handler that divides requests: which stages have endpoints of their own, to be counted by it: `decode-only`,
    `prefill-decode`, `encode-decode`, `encode-prefill-decode`."""


class RunProfile(Protocol):
    """Runs profiles of the configuration, for one request."""

    @property
    def candidates(self) -> Sequence[Endpoint]:
        """All endpoints that it may go to, in the pool's order."""

    def __call__(
        self, profile: str, request: Request | None = None, endpoints: Sequence[Endpoint] | None = None
    ) -> Sequence[Endpoint]:
        """Run the profile of this name; returns its picks, best first. Raises NoEndpoint if filters drop all.

        `request` is what its plugins see, with the signals of the one given to `handle`; `endpoints` are some of the
        candidates, at least one. None: that request itself, all of them.
        """


class ProfileHandler(Plugin, ABC):
    @abstractmethod
    def handle(self, request: Request, profiles: Sequence[str], run: RunProfile) -> Picked:
        """Run one or more of `profiles` and say whose picks count. Raises BadRequest where the request itself is wrong
        (400)."""

    def check(self, profiles: Sequence[str]) -> None:
        """Raise ValueError if it cannot work with these profiles. Called once, when a configuration is loaded."""

    def stages(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Sequence[Endpoint]]:
        """The groups of `endpoints`, none empty, of which the request needs one each, as far as can be said before the
        pick; who decodes comes first. Flow control has it wait for these only. Asked where endpoints have roles.
        """
        return [*stages_of(endpoints)]

    def divides(self, endpoints: Sequence[Endpoint]) -> bool:
        """Whether it may run profiles for some of these endpoints apart from the others; asked of large pools only."""
        return False


class Decider(Plugin, ABC):
    """Says whether a stage of a request is to be done at an endpoint of its own."""

    @abstractmethod
    def wants(self, request: Request, decode: Endpoint | None) -> bool:
        """Asked first; `decode` is who decodes, where that is known already."""

    def accepts(self, request: Request, decode: Endpoint, other: Endpoint) -> Mapping[str, float] | bool:
        """Asked again when `other` was found for the stage. True, as here: go ahead; False: stay at `decode`.

        Where it compares, the seconds of both ways: it goes ahead if `apart` takes less than `here`.
        """
        return True


class Producer(Plugin, ABC, Generic[S]):
    """Finds a signal. `produces` names its type; one producer per type is active in a configuration, and of
    `PrefixMatch` those too that another plugin names (`ReadsPrefixMatch`)."""

    produces: ClassVar[type[Any]]
    waits: ClassVar[bool] = True
    """Whether `prepare` may wait for anything. Where none of a configuration does, a request takes no task."""

    async def prepare(self, request: Request) -> int | None:
        """What can be found out without looking at endpoints (hashes, tokens); may wait. Keep it in a `Slot`.

        Returns the prompt's length in tokens where it became known: from then on `request.tokens` says it. Else None.
        """

    whole_pool: ClassVar[bool] = False
    """It has to see the pool even where only some endpoints come into question (`Cost.shortlist`), and takes no longer
    for that."""

    @abstractmethod
    def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> Mapping[Endpoint, S]:
        """The signal for every endpoint given. Runs in the same step as the pick, so it is never stale."""

    def levels(self, request: Request) -> Iterator[Level] | None:
        """Of a producer of `PrefixMatch`: the different matches, least first, that of all endpoints before the others.

        None, as here: it has to be asked for each endpoint.
        """
        return None


class Detector(Plugin, ABC):
    @abstractmethod
    def saturation(self, endpoints: Sequence[Endpoint]) -> float:
        """How full the pool is: 0 idle, 1 and above full."""

    looks_at: ClassVar[tuple[type[Any], ...]] = ()
    """Signals that `saturation_for` reads; the loader adds their producers. Empty: it asks `saturation` alone."""

    def saturation_for(self, request: Request, endpoints: Sequence[Endpoint]) -> float:
        """The same, as it is for this request: one of many tokens may find no room where others would."""
        return self.saturation(endpoints)

    def scarce(self, request: Request) -> str:
        """What it needs beside an endpoint's room and each endpoint has for a few requests only, by its name: a slot
        for a LoRA adapter. "", as here: nothing. A request that waits for it lets others pass.
        """
        return ""

    def ready(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[Endpoint]:
        """Those of `endpoints` that have it now; asked where `scarce` names something."""
        return endpoints

    def falls_in(self, endpoints: Sequence[Endpoint]) -> float:
        """Seconds after which `saturation` may be less although no request comes, begins or ends and nothing is
        scraped; inf: never, as here.
        """
        return inf


class Waiting(Protocol):
    """A request that waits in flow control."""

    @property
    def request(self) -> Request: ...
    @property
    def since(self) -> float:
        """When it came, on the plugins' clock."""

    @property
    def expires(self) -> float:
        """When it is refused if it still waits; inf: never."""


class Flow(Protocol):
    """The requests of one fairness id that wait in a band; at least one."""

    @property
    def id(self) -> str: ...
    @property
    def head(self) -> Waiting:
        """The one whose turn it is in the flow."""

    @property
    def turn(self) -> int:
        """Of two flows the one that was served later, or came later, has the larger one."""

    def __len__(self) -> int: ...


FlowKey = Callable[[Flow], float | tuple[float, ...] | None]
"""A flow's place in an order, least first; None: it is not in it."""


class FlowBand(Protocol):
    """The flows of one priority that wait. Where flows are listed, those are left out of which it is known, when the
    next one is asked for, that none of their requests may go now.
    """

    @property
    def priority(self) -> int: ...
    @property
    def several(self) -> int:
        """How many flows have two requests or more."""

    @property
    def in_turn(self) -> Iterable[Flow]:
        """The one that was served longest ago first; who did not wait then comes last."""

    @property
    def by_head(self) -> Iterable[Flow]:
        """By the `OrderingPolicy.place` of their heads."""

    def by(self, key: FlowKey) -> Iterable[Flow]:
        """By a key, of equals the one that was served longest ago first. A function, or a method, that is the same at
        each call: the order is kept. A flow is asked for its key again when its requests have changed, it was served,
        or `again` named it.
        """

    def first(self, key: FlowKey) -> Flow | None:
        """The first in the order of `key`, whether its requests may go now or not; None: there is none."""

    def last(self, key: FlowKey) -> Flow | None:
        """The last of the same."""

    def again(self, flow: str) -> None:
        """The keys of this fairness id's flow, if it waits, may be others than they were."""


class OrderingPolicy(Plugin, ABC):
    """Says in which order the requests of a flow are let go."""

    @abstractmethod
    def place(self, waiting: Waiting) -> float:
        """Its place, least first; of equals the one that came first. Asked once, when it comes."""


class FairnessPolicy(Plugin, ABC):
    """Says whose turn it is among the flows of a band."""

    @abstractmethod
    def turns(self, band: FlowBand) -> Iterable[Flow]:
        """The flows in the order in which they should be served. Mostly only the first is looked at: be lazy, and ask
        the band for orders that it keeps rather than sort all flows at each look.
        """

    def dispatched(self, flow: str, waiting: Waiting, now: float) -> None:
        """A request of this fairness id was let go."""

    def share(self, band: FlowBand) -> float:
        """Up to which share of the band's ceiling flows of several requests are let go: 1, as here, or less, to leave
        room to the others.
        """
        return 1.0


class BandSelectionPolicy(Plugin, ABC):
    """Says which band is asked first for a request to let go; without one, the highest priority always is."""

    @abstractmethod
    def turns(self, priorities: Sequence[int]) -> Sequence[int]:
        """The `priorities` of the bands in use (the highest first) in the order in which they are to be asked."""

    def dispatched(self, priority: int, waiting: Waiting, now: float) -> None:
        """A request of this priority was let go."""


class UsageLimitPolicy(Plugin, ABC):
    """Says up to which saturation requests of a priority are let go."""

    @abstractmethod
    def ceilings(self, saturation: float, priorities: Sequence[int]) -> Sequence[float]:
        """One for each of `priorities`, which are those in use, the highest first. None may be above the one before
        it. A band is let go while `saturation` is below its ceiling.
        """


# --- helpers --------------------------------------------------------------------------------------------------------


AGENT_IDENTITY: Final = "agent-identity"
"""Attribute of a request: the session of the coding agent that sent it. Flow control takes it for the fairness id where
nothing else says one and clients' control headers are trusted."""


def annotated(
    request: Request,
    *,
    priority: int | None = None,
    tenant: str | None = None,
    attributes: Mapping[str, str] = NO_HEADERS,
) -> Request:
    """The request with another priority, or as that of a tenant: for flow control, and `limits` of the configuration.
    None leaves what it has. `attributes`: what else was found, by name, for other plugins; added to those it has.
    """
    return msgspec.structs.replace(
        request,
        priority=request.priority if priority is None else priority,
        tenant=request.tenant if tenant is None else tenant,
        attributes={**request.attributes, **attributes} if attributes else request.attributes,
    )


def least(values: Iterable[float]) -> list[float]:
    """Scale to 0..1, the smallest scores 1; all 1 when equal. The formula of llm-d's queue-scorer."""
    found = list(values)
    low, high = min(found, default=0.0), max(found, default=0.0)
    if low == high:
        return [1.0] * len(found)
    return [(high - v) / (high - low) for v in found]


def most(values: Iterable[float]) -> list[float]:
    """Scale to 0..1, the largest scores 1; all 1 when equal."""
    return least([-v for v in values])


def scores_of(bills: Sequence[tuple[float, ...]]) -> list[float]:
    """Bills in seconds to scores in 0..1: the cheapest scores 1, order is kept, ties stay ties."""
    costs = [sum(bill) + 1e-3 for bill in bills]
    low = min(costs) if costs else 0.0
    return [low / cost for cost in costs]
