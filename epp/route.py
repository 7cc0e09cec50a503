"""The path of a request: parse, rewrite, guard, admit, look, choose, forward, finish."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Final, Protocol

from epp import protocol
from epp.errors import EppError, InternalError, NoEndpoint, OwnAnswer, Rejected
from epp.flow.control import FlowControl, again_in
from epp.flow.guards import Guards
from epp.flow.limits import Limits
from epp.parsing.grpc import GrpcUsage, usage_reader
from epp.parsing.parser import Parser, asks_for_models
from epp.parsing.request import NO_HEADERS, RawRequest, Response, ResponsesReader, UsageReader, forwarded
from epp.plugin import Detector, Endpoint, Request, stages_of
from epp.pool.store import Pool
from epp.scheduling.decision import Decision, summary
from epp.scheduling.scheduler import Scheduler

NEW_POOL_SECONDS: Final = 5.0
"""A request waits so long for a pool's first state. A replica is not ready until then, but a gateway that sees no
healthy replica sends to any (Envoy's panic threshold), as while a loaded node replaces one replica by another."""
_NOT_ASKED: Final = ("", "0", "false")
"""Values of `protocol.EXPLAIN` that ask for nothing."""


class RequestObserver(Protocol):
    """Records what becomes of each request: either `decided` and later `finished`, or `failed`."""

    def decided(self, decision: Decision, complete_at: float) -> None:
        """A decision was made for a request that was complete at `complete_at`, on the router's clock."""

    def finished(self, decision: Decision, response: Response) -> None:
        """The request has left its endpoint."""

    def failed(self, raw: RawRequest, error: EppError) -> None:
        """The client gets `error` instead."""


class RoutedRequest:
    """A routed request. The ext_proc server reports here what is seen of the answer; leaving `route` ends it."""

    __slots__ = (
        "_clock", "_content_type", "_pool", "_scheduler", "_usage", "body", "decision", "destination", "explanation",
        "renamed", "response", "watched",
    )  # fmt: skip

    def __init__(
        self, decision: Decision, body: bytes | None, scheduler: Scheduler, pool: Pool, clock: Callable[[], float]
    ) -> None:
        request = decision.request
        self.decision = decision
        self.destination = decision.destination
        self.renamed: tuple[str, str] | None = None
        """The model that is asked for and the one that was, where they differ: the answer is to say the second."""
        if request.asked and request.asked != request.model:
            self.renamed = request.model, request.asked
        self.watched = request.watched == "asked"
        """A plugin wants to see the answer."""
        self.body = body
        """The body to forward if it differs from the one that came (model rewritten), else None."""
        self.explanation = ""
        """Why it goes where, for a header of the answer; empty where the client did not ask, or may not."""
        self.response = Response()
        self._scheduler = scheduler
        self._pool = pool
        self._clock = clock
        self._content_type = ""
        self._usage: UsageReader | GrpcUsage | None = None

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to set on the request towards the endpoint, beside the destination."""
        return self.decision.headers

    def answered(
        self, status: int, served: str, content_type: str = "", prefill_fallback: str = ""
    ) -> Mapping[str, str]:
        """The answer's headers were seen; returns headers to add to it.

        `served` (`ip:port`, empty if the gateway does not say) moves the account when a retry landed elsewhere.
        `prefill_fallback`: why the prompt was not computed elsewhere, where a sidecar says so.
        """
        decision, response, scheduler = self.decision, self.response, self._scheduler
        response.status = status
        response.served = served
        if prefill_fallback:
            response.prefill_failed = prefill_fallback in protocol.PREFILLER_FAULTS
        if served and served != decision.endpoints[0].address:
            elsewhere = decision.served_by(served) or self._pool.endpoint_at(served, decision.endpoint.rank)
            if elsewhere is not None:
                if self.explanation:
                    self.explanation += f"; served={elsewhere.address}"
                scheduler.moved(decision, elsewhere, response)
        scheduler.answered(decision, response)
        self._content_type = content_type
        headers = scheduler.answer_headers(decision) if status < 400 else NO_HEADERS
        return {**headers, protocol.EXPLANATION: self.explanation} if self.explanation else headers

    def answer_chunk(self, chunk: bytes, *, end: bool) -> None:
        """A piece of the answer's body passed by (only where the gateway shows it). The first is the first token.

        An error's text is none: it comes at once, and would pass for quick service.
        """
        response, usage = self.response, self._usage
        if response.first_token_at is None and chunk and response.status < 300:
            response.first_token_at = self._clock()
            self._scheduler.first_token(self.decision)
        if usage is None:
            usage = self._usage = usage_reader(self._content_type, self.decision.request.api)
        usage.feed(chunk)
        if end:
            response.usage = usage.finish()
            if isinstance(usage, ResponsesReader) and response.status < 300:
                response.id = usage.id
            response.complete = True


@dataclass(frozen=True)
class Admission:
    """Sheds requests of negative priority while the pool is saturated; what GIE and llm-d do without flow control."""

    detector: Detector

    def admit(self, request: Request, endpoints: Sequence[Endpoint]) -> None:
        """Return if `request` may be sent to one of `endpoints` now. Raises Rejected (429)."""
        if request.priority >= 0:
            return
        try:
            found = [(self.detector.saturation(stage), stage) for stage in stages_of(endpoints)]
            saturation = max(full for full, _ in found)
            if not saturation >= 1.0:
                return
            wait = max(self.detector.falls_in(stage) for full, stage in found if full >= 1.0)
        except Exception as error:
            raise InternalError(f"plugin {self.detector.name!r} failed") from error
        raise Rejected(
            f"the pool is full (saturation {saturation:.2f}) and requests of priority {request.priority} wait "
            "for better times; retry later",
            headers=again_in(wait) if wait < inf else NO_HEADERS,
        )


@dataclass(frozen=True)
class Policy:
    """What one configuration decides with: who is admitted and where requests go. A reload replaces it as a whole."""

    admission: Admission
    scheduler: Scheduler
    flow: FlowControl | None = None
    """Decides instead of `admission`, where there is one."""
    guards: Guards | None = None
    limits: Limits | None = None


class Router:
    """Everything a request passes, joined at start-up. A reload replaces `policy`; requests under way keep theirs."""

    def __init__(
        self,
        pool: Pool,
        parser: Parser,
        policy: Policy,
        observer: RequestObserver,
        clock: Callable[[], float],
        *,
        honour_subset: bool = True,
        explains: bool = False,
        models: Callable[[Sequence[Endpoint], Callable[[str], bool] | None], bytes | None] | None = None,
    ) -> None:
        """`honour_subset`: pick only from what the gateway allows, where it says so; the protocol's default.

        `explains`: clients may ask to be told in a header why their request went where it did.

        `models`: the list of all models that endpoints serve, or of those that a tenant may use, with which GET
        /v1/models is answered; None: where that is not known, the request is routed.
        """
        self.honour_subset = honour_subset
        self.explains = explains
        self.models = models
        self.pool = pool
        self.parser = parser
        self.policy = policy
        self.observer = observer
        self.clock = clock

    def route(self, raw: RawRequest) -> "RequestScope":
        """The life of one request; leaving the block, however it is left, ends it exactly once.

        Raises EppError: the error the client gets instead of an answer.
        """
        return RequestScope(self, raw)

    async def explain(self, raw: RawRequest) -> Decision:
        """What would be decided for this request now. Nothing is sent, and no account, queue or limit knows of it.

        Guards are asked; limits and flow control are not. Raises EppError as `route` does.
        """
        policy = self.policy
        request, _ = self.parser.parse(raw)
        if policy.guards is not None:
            request = policy.guards.check(request)
        request = await policy.scheduler.prepare(request)
        endpoints = self.pool.candidates(raw.subset if self.honour_subset else None)
        if not endpoints:
            raise NoEndpoint(self.pool.why_empty(raw.subset))
        return policy.scheduler.explain(request, endpoints)


def _nothing() -> None:
    """Nobody wants to know."""


class RequestScope:
    """`Router.route`: a class, which takes fewer steps than a generator made a context manager."""

    __slots__ = ("_policy", "_raw", "_routed", "_router", "queued")

    routed: ClassVar[type[RoutedRequest]] = RoutedRequest

    def __init__(self, router: Router, raw: RawRequest) -> None:
        self.queued: Callable[[], None] = _nothing
        """Called where the request has to wait in flow control, which has its own bounds on how long."""
        self._router = router
        self._raw = raw
        self._policy = router.policy  # a reload replaces it for the next request, never for this one

    @property
    def waits(self) -> bool:
        """Whether entering may wait for anything but flow control. Leaving never does."""
        return self._router.pool.is_new or self._policy.scheduler.waits

    async def __aenter__(self) -> RoutedRequest:
        router, raw, policy = self._router, self._raw, self._policy
        scheduler = policy.scheduler
        complete_at = router.clock()
        admitted: Request | None = None
        """For its limits, without what is large."""
        try:
            if router.pool.is_new:
                await router.pool.first_state(NEW_POOL_SECONDS)
            request, body = router.parser.parse(raw)
            if policy.guards is not None:
                request = policy.guards.check(request)
            subset = raw.subset if router.honour_subset else None
            if router.models is not None and asks_for_models(raw):
                may = None if policy.limits is None else policy.limits.models_for(request)
                listed = router.models(router.pool.candidates(subset), may)
                if listed is not None:
                    raise OwnAnswer(listed)
            if policy.limits is not None:
                request = policy.limits.admit(request)
                admitted = forwarded(request)
            request = await scheduler.prepare(request)
            if policy.flow is not None:
                turn = policy.flow.turn(request, subset, scheduler, self.queued)
                del request  # so that flow control can let go of its prompt
                decision, queued = await turn
                decision.flow, decision.waited = queued.flow, queued.seconds
            else:
                # Nothing waits any more: what was seen when choosing is still true when accounting.
                endpoints = router.pool.candidates(subset)
                if not endpoints:
                    raise NoEndpoint(router.pool.why_empty(subset))
                policy.admission.admit(request, endpoints)
                decision = scheduler.choose(request, endpoints)
        except BaseException as error:  # the client may be gone, too
            if admitted is not None and policy.limits is not None:
                policy.limits.given_back(admitted)
            if isinstance(error, EppError) and not isinstance(error, OwnAnswer):
                router.observer.failed(raw, error)
            raise
        del self._raw  # it may be large and the answer long
        self._routed = self.routed(decision, body, scheduler, router.pool, router.clock)
        try:
            if router.explains and decision.request.headers.get(protocol.EXPLAIN, "") not in _NOT_ASKED:
                self._routed.explanation = summary(decision)
            router.observer.decided(decision, complete_at)
            scheduler.forwarded(decision)
        except BaseException:
            self._end()
            raise
        return self._routed

    async def __aexit__(self, *error: object) -> None:
        self._end()

    def _end(self) -> None:
        policy, decision, response = self._policy, self._routed.decision, self._routed.response
        if policy.limits is not None:
            policy.limits.ended(decision.request, response)
        policy.scheduler.finished(decision, response)
        self._router.observer.finished(decision, response)
