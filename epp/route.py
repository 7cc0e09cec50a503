"""The way of a request: parse, rewrite, admit, look, choose, forward, finish."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Protocol

from epp.errors import EppError, NoEndpoint
from epp.flow.admission import Admission
from epp.parsing.parser import Parser
from epp.parsing.request import NO_HEADERS, RawRequest, Response
from epp.parsing.usage import UsageReader
from epp.pool.store import Pool
from epp.scheduling.decision import Decision
from epp.scheduling.scheduler import Scheduler


class Witness(Protocol):
    """Who writes down what becomes of each request: either `decided` and later `finished`, or `failed`."""

    def decided(self, decision: Decision, complete_at: float) -> None:
        """A decision was made for a request that was complete at `complete_at`, on the router's clock."""

    def finished(self, decision: Decision, response: Response) -> None:
        """The request has left its endpoint."""

    def failed(self, raw: RawRequest, error: EppError) -> None:
        """The client is told `error` instead."""


class Routed:
    """A request on its way. The door reports here what it sees of the answer; leaving `route` ends the accounting."""

    __slots__ = ("_clock", "_pool", "_scheduler", "_usage", "body", "decision", "response")

    def __init__(
        self, decision: Decision, body: bytes | None, scheduler: Scheduler, pool: Pool, clock: Callable[[], float]
    ) -> None:
        self.decision = decision
        self.body = body
        """The body to forward if it differs from the one that came (model rewritten), else None."""
        self.response = Response()
        self._scheduler = scheduler
        self._pool = pool
        self._clock = clock
        self._usage: UsageReader | None = None

    @property
    def destination(self) -> str:
        return self.decision.destination

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers to set on the request towards the endpoint, beside the destination."""
        return self.decision.headers

    def answered(self, status: int, served: str, content_type: str = "") -> Mapping[str, str]:
        """The answer's headers were seen; returns headers to add to it.

        `served` (`ip:port`, empty if the gateway does not tell) moves the account when a retry landed elsewhere.
        """
        self.response.status = status
        self.response.served = served
        elsewhere = self._pool.endpoint_at(served) if served and served != self.decision.endpoint.address else None
        if elsewhere is not None:
            self._scheduler.moved(self.decision, elsewhere, self.response)
        self._usage = UsageReader(content_type)
        return self._scheduler.answer_headers(self.decision) if status < 400 else NO_HEADERS

    def answer_chunk(self, chunk: bytes, *, end: bool) -> None:
        """A piece of the answer's body passed by (only where the gateway shows it). The first is the first token."""
        if self.response.first_token_at is None and chunk:
            self.response.first_token_at = self._clock()
            self._scheduler.first_token(self.decision)
        if self._usage is not None:
            self._usage.feed(chunk)
            if end:
                self.response.usage = self._usage.finish()
        self.response.complete = self.response.complete or end


class Router:
    """Everything a request passes on its way, joined at start-up. A reload replaces `scheduler`."""

    def __init__(
        self,
        pool: Pool,
        parser: Parser,
        admission: Admission,
        scheduler: Scheduler,
        witness: Witness,
        clock: Callable[[], float],
    ) -> None:
        self.pool = pool
        self.parser = parser
        self.admission = admission
        self.scheduler = scheduler
        self._witness = witness
        self._clock = clock

    @asynccontextmanager
    async def route(self, raw: RawRequest) -> AsyncIterator[Routed]:
        """The life of one request; leaving the block, however it is left, ends it exactly once.

        Raises EppError: what the client is to be told instead of an answer.
        """
        complete_at = self._clock()
        scheduler = self.scheduler  # a reload swaps it for the next request, never under this one
        try:
            request, body = self.parser.parse(raw)
            await scheduler.prepare(request)
            # From here to the yield nothing waits: what was seen when choosing is still true when accounting.
            endpoints = self.pool.candidates(raw.subset)
            if not endpoints:
                raise NoEndpoint(self.pool.why_empty(raw.subset))
            self.admission.admit(request, endpoints)
            decision = scheduler.choose(request, endpoints)
        except EppError as error:
            self._witness.failed(raw, error)
            raise
        routed = Routed(decision, body, scheduler, self.pool, self._clock)
        try:
            self._witness.decided(decision, complete_at)
            yield routed
        finally:
            scheduler.finished(decision, routed.response)
            self._witness.finished(decision, routed.response)
