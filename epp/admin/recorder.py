"""What becomes of each request, written down: the last few thousand decisions, metrics and the audit log.

Recording a decision is a few references; text is made when someone asks.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from epp import protocol
from epp.errors import EppError, SloUnmet
from epp.parsing.request import NO_HEADERS, RawRequest, Response, Slot, Usage, Watched
from epp.plugin import Endpoint, PrefixMatch, Request
from epp.scheduling.decision import Decision
from epp.telemetry.audit import AuditEntry, AuditLog
from epp.telemetry.metrics import Metrics
from epp.telemetry.metrics_table import ANSWER, WATCHED

KEPT = 4000
KEPT_ROWS = 100_000
"""Endpoints scored by the decisions kept, added up: the bound that holds in a large pool (about 40 MB)."""
_SOURCES: Mapping[Watched, str | None] = {"": ANSWER, "sampled": WATCHED, "asked": None}
"""What figures of an answer count as: a plugin does not ask by chance, so those would say nothing of the others."""


class Record(msgspec.Struct, eq=False):
    """A decision and how it ended. Times are seconds on the monotonic clock of the one who records."""

    decision: Decision
    endpoint: Endpoint
    """The one chosen at first; a retry of the gateway's may have moved the request since."""
    pool: str
    namespace: str
    """Of the pool: files may bring two of one name."""
    model: str
    complete_at: float
    """When the request was complete."""
    decided_at: float
    size: int
    """Bytes of the request's body."""
    predicted: int | None
    """Tokens of the prompt the chosen endpoint was predicted to hold; None where no producer looked."""
    response: Response | None = None
    """None while the request is under way."""
    ended_at: float = 0.0
    held: PrefixMatch | None = None
    """`predicted` by tier."""
    rows: int = 0
    """Endpoints that were scored, and predictions, while it is among `Decisions`."""

    @property
    def duration(self) -> float:
        return self.ended_at - self.complete_at

    @property
    def ttft(self) -> float | None:
        """From the complete request to the first token, where it was seen."""
        seen = self.response.first_token_at if self.response is not None else None
        return None if seen is None else seen - self.complete_at

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first, of a streamed answer of which enough was seen."""
        ttft, usage = self.ttft, self.response.usage if self.response is not None else None
        if ttft is None or usage is None or usage.completion < 2 or not self.decision.request.stream:
            return None
        return max(0.0, self.duration - ttft) / (usage.completion - 1)

    @property
    def slo_outcome(self) -> str:
        """What became of its SLO; "" while it is under way, or where it has none."""
        slo, response, request = self.decision.request.slo, self.response, self.decision.request
        if slo is None or response is None:
            return ""
        if response.failed or response.status >= 400:
            return "failed"
        ttft, tpot = self.ttft if request.stream else None, self.tpot
        late = slo.ttft is not None and ttft is not None and ttft > slo.ttft
        slow = slo.tpot is not None and tpot is not None and tpot > slo.tpot
        if late or slow:
            return "missed-both" if late and slow else "missed-ttft" if late else "missed-tpot"
        one = response.usage is not None and response.usage.completion == 1
        seen = ttft is not None and (tpot is not None or slo.tpot is None or one)
        return "met" if seen else "unseen"

    def as_dict(self) -> dict[str, Any]:
        """The whole explanation, JSON-ready; no prompt text. `outcome` is null while the request is under way."""
        return {
            "pool": self.pool,
            "namespace": self.namespace,
            **self.decision.as_dict(),
            "predicted_cached_tokens": self.predicted,
            "decision_ms": _ms(self.decided_at - self.complete_at - self.decision.waited),
            "outcome": self._outcome(),
        }

    def _outcome(self) -> dict[str, Any] | None:
        if (response := self.response) is None:
            return None
        ttft, usage = self.ttft, response.usage
        return {
            "status": response.status,
            "complete": response.complete,
            "ttft_ms": None if ttft is None else _ms(ttft),
            "tpot_ms": None if self.tpot is None else _ms(self.tpot),
            "duration_ms": _ms(self.duration),
            **({"slo": outcome} if (outcome := self.slo_outcome) else {}),
            "usage": None if usage is None else msgspec.to_builtins(usage),
        }


class Decisions:
    """Records, newest last; the oldest make room when there are `kept` of them or `rows` endpoints scored in them."""

    def __init__(self, kept: int = KEPT, rows: int = KEPT_ROWS) -> None:
        self._kept = kept
        self._rows = rows
        self._records: deque[Record] = deque()
        self._rows_now = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        decision = record.decision
        rows = len(decision.predictions)
        for run in decision.runs:
            rows += len(run.endpoints)
        if (shadow := decision.shadow) is not None and shadow.run is not None:
            rows += len(shadow.run.endpoints)
        record.rows = rows
        self._records.append(record)
        self._rows_now += rows
        while len(self._records) > self._kept or (self._rows_now > self._rows and len(self._records) > 1):
            self._rows_now -= self._records.popleft().rows

    def newest(self, limit: int) -> Iterator[Record]:
        """At most `limit` records, newest first."""
        return islice(reversed(self._records), limit)

    def find(self, request_id: str) -> Record | None:
        """The newest record of this request id (clients choose theirs, so they may repeat)."""
        for record in reversed(self._records):
            if record.decision.request.id == request_id:
                return record
        return None


def without_prompt(request: Request) -> Request:
    """What a record may keep of a request for long: no body, no prompt, no headers, nothing plugins hung on it."""
    return Request(
        id=request.id,
        model=request.model,
        asked=request.asked,
        api=request.api,
        tokens=request.tokens,
        stream=request.stream,
        max_tokens=request.max_tokens,
        priority=request.priority,
        slo=request.slo,
        opaque=request.opaque,
        watched=request.watched,
        kept=_NOTHING_KEPT,
    )


_NOTHING_KEPT: Final[dict[Slot[Any], Any]] = {}
"""One for all records: nobody writes to it."""


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)


NO_USAGE = Usage()


class Recorder:
    """One per pool. Each request is either `decided` and later `finished`, or `failed`.

    `clock`: seconds, monotonic, the one that stamps `Response.first_token_at`. `wall_clock`: seconds since the epoch,
    for people only.
    """

    def __init__(
        self,
        pool: str,
        metrics: Metrics,
        decisions: Decisions,
        audit: AuditLog | None = None,
        *,
        namespace: str = "default",
        clock: Callable[[], float] = time.monotonic,
        wall_clock: Callable[[], float],
    ) -> None:
        self._pool = pool
        self._namespace = namespace
        self._metrics = metrics
        self._decisions = decisions
        self._audit = audit
        self._clock = clock
        self._wall_clock = wall_clock
        self._open: dict[Decision, Record] = {}
        self._series = metrics.add_pool_series(pool)

    def decided(self, decision: Decision, complete_at: float) -> None:
        """A decision was made for a request that was complete at `complete_at` (on our clock)."""
        now = self._clock()
        request, endpoint = decision.request, decision.endpoint
        matches = request.signals.get(PrefixMatch)
        match = matches.get(endpoint) if matches is not None and request.stage != "decode" else None
        predicted: int | None = None
        if match is not None:
            series, predicted = self._series, match.tokens + match.l1 + match.l2
            series.device += match.tokens
            series.l1 += match.l1
            series.l2 += match.l2
        size = len(request.body)
        record = Record(
            decision,
            endpoint,
            self._pool,
            self._namespace,
            request.model,
            complete_at,
            now,
            size,
            predicted,
            held=match,
        )
        self._open[decision] = record
        if request.opaque:
            self._metrics.degraded("opaque-body", request.opaque)
        if (shadow := decision.shadow) is not None:
            self._metrics.shadow_compared(
                self._pool, shadow.profile, shadow.agreed, shadow.regret, failed=shadow.run is None
            )
        self._decisions.add(record)
        for _, beside in decision.parts:
            self._metrics.endpoint(beside).in_flight += 1
        self._metrics.request_decided(
            endpoint, request.model, now - complete_at - decision.waited, request.tokens, predicted
        )

    def parts_ended(self, parts: Sequence[tuple[Request, Endpoint]]) -> None:
        """Other endpoints than the one that answers have done their parts of a request."""
        for _, endpoint in parts:
            self._metrics.endpoint(endpoint).in_flight -= 1

    def finished(self, decision: Decision, response: Response) -> None:
        """The request has left its endpoint, however; call it after the scheduler's. A second call does nothing."""
        record = self._open.pop(decision, None)
        if record is None:
            return
        record.response = response
        record.ended_at = self._clock()
        usage, request = response.usage or NO_USAGE, decision.request
        moved = decision.endpoint is not record.endpoint
        if moved:
            self._metrics.endpoint_failed(record.endpoint)
        if response.failed:
            self._metrics.endpoint_failed(decision.endpoint)
        seconds, ttft = record.duration, record.ttft
        self._series.took(request.priority, seconds, ttft if request.is_sample else None)
        self._metrics.request_finished(
            record.endpoint,
            record.model,
            response.status,
            seconds,
            size=record.size,
            source=_SOURCES[request.watched],
            ttft=ttft,
            prompt=usage.prompt,
            completion=usage.completion,
            cached=usage.cached,
            predicted=None if moved else record.predicted,
            stages=(self._pool, decision.division) if decision.division else None,
        )
        if request.slo is not None or (request.stream and decision.predictions):
            self._compare(record)
        if self._audit is not None:
            self._audit.write(_entry(record, usage))
        # Bodies, and headers that say what a client sent, would fill the memory: the last thousands are kept.
        decision.request = without_prompt(request)
        decision.headers = NO_HEADERS

    def _compare(self, record: Record) -> None:
        """What was predicted and promised, with what came."""
        decision, request = record.decision, record.decision.request
        if outcome := record.slo_outcome:
            assert request.slo is not None
            if not request.is_sample and outcome != "failed":
                outcome = "unseen"
            self._metrics.slo_ended(self._pool, request.slo.objective, outcome)
        seen = decision.predicted
        if seen is None or record.ttft is None or not (request.stream and request.is_sample):
            return
        sent = record.decided_at - record.complete_at
        if decision.endpoint is record.endpoint and seen.ttft > 0 and record.ttft > sent:
            tpot = record.tpot / seen.tpot if record.tpot is not None and seen.tpot > 0 else None
            self._metrics.predicted((record.ttft - sent) / seen.ttft, tpot)

    def failed(self, raw: RawRequest, error: EppError) -> None:
        """The request got its answer from us: refused, shed or no endpoint to send it to. The ext_proc
        server counts these, and those that it refuses before routing.
        """
        if isinstance(error, SloUnmet):
            self._metrics.slo_ended(self._pool, error.objective, "shed")
        if self._audit is not None:
            self._audit.write(
                AuditEntry(
                    at=self._wall_clock(),
                    request_id=raw.headers.get(protocol.REQUEST_ID, ""),
                    objective=_header(raw, protocol.OBJECTIVE),
                    fairness_id=_header(raw, protocol.FAIRNESS_ID),
                    priority=0 if error.queued is None else error.queued.priority,
                    flow="" if error.queued is None else error.queued.flow,
                    waited_ms=None if error.queued is None else _ms(error.queued.seconds),
                    status=error.status,
                    why=error.reason or error.kind,
                )
            )


def brief(decision: Decision) -> str:
    """A decision in one line: out of how many, at what cost, who was dropped by what.

    The last profile that ran is the one described: where there are several, its picks go to the request itself. Those
    of other stages are named.
    """
    if not decision.runs:
        return "no profile ran"
    run = decision.last_run
    found = [f"{run.profile}: 1 of {len(run.endpoints) + run.others}"]
    chosen = decision.endpoint
    for i, endpoint in enumerate(run.endpoints):
        if endpoint is not chosen:
            continue
        for scored in run.scored:
            if scored.bills:
                terms = ", ".join(
                    f"{t} {s * 1000:.1f}" for t, s in zip(scored.terms, scored.bills[i], strict=True) if s
                )
                found.append(f"{sum(scored.bills[i]) * 1000:.1f} ms" + (f" ({terms})" if terms else ""))
            else:
                found.append(f"{scored.name} {scored.scores[i]:.2f}")
    found.extend(f"{len(gone)} dropped by {name}" for name, gone in run.dropped if gone)
    found.extend(f"{stage} by {' and '.join(names)}" for stage, names in decision.beside.items())
    return ", ".join(found)


def _entry(record: Record, usage: Usage) -> AuditEntry:
    decision, response = record.decision, record.response or Response()
    request = decision.request
    return AuditEntry(
        at=decision.at,
        request_id=request.id,
        objective=request.header(protocol.OBJECTIVE) or "",
        fairness_id=request.header(protocol.FAIRNESS_ID) or "",
        priority=request.priority,
        flow=decision.flow if decision.waited else "",
        model=request.model,
        endpoint=decision.endpoint.name,
        address=decision.endpoint.address,
        why=brief(decision),
        status=response.status,
        estimated_tokens=request.tokens,
        predicted_cached_tokens=-1 if record.predicted is None else record.predicted,
        prompt_tokens=usage.prompt,
        completion_tokens=usage.completion,
        cached_tokens=usage.cached,
        decision_ms=_ms(record.decided_at - record.complete_at - decision.waited),
        waited_ms=_ms(decision.waited) if decision.waited else None,
        ttft_ms=None if record.ttft is None else round(record.ttft * 1000, 3),
        duration_ms=round(record.duration * 1000, 3),
    )


def _header(raw: RawRequest, names: tuple[str, ...]) -> str:
    return next((raw.headers[name] for name in names if name in raw.headers), "")
