"""The last few thousand decisions, kept for people to ask about. Recording one is a few references; text is made when
someone asks.
"""

from collections import deque
from collections.abc import Iterator
from itertools import islice
from typing import Any

import msgspec

from epp.plugin import Endpoint, Request, Response
from epp.scheduling.decision import Decision

KEPT = 4000
KEPT_ROWS = 100_000
"""Endpoints scored by the decisions kept, added up: the bound that holds in a large pool (about 40 MB)."""


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
    """When the request was complete here."""
    decided_at: float
    size: int
    """Bytes of the request's body."""
    predicted: int | None
    """Tokens of the prompt the chosen endpoint was believed to hold; None where no plugin looked."""
    response: Response | None = None
    """None while the request is under way."""
    ended_at: float = 0.0

    @property
    def duration(self) -> float:
        return self.ended_at - self.complete_at

    @property
    def ttft(self) -> float | None:
        """From the complete request to the first token, where it was seen."""
        seen = self.response.first_token_at if self.response is not None else None
        return None if seen is None else seen - self.complete_at

    def as_dict(self) -> dict[str, Any]:
        """The whole explanation, JSON-ready; no prompt text. `outcome` is null while the request is under way."""
        return {
            "pool": self.pool,
            "namespace": self.namespace,
            **self.decision.as_dict(),
            "predicted_cached_tokens": self.predicted,
            "decision_ms": _ms(self.decided_at - self.complete_at),
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
            "duration_ms": _ms(self.duration),
            "usage": None if usage is None else msgspec.to_builtins(usage),
        }


class Decisions:
    """Records, newest last; the oldest are dropped when there are `kept` of them or `rows` endpoints scored in them."""

    def __init__(self, kept: int = KEPT, rows: int = KEPT_ROWS) -> None:
        self._kept = kept
        self._rows = rows
        self._records: deque[tuple[Record, int]] = deque()
        self._rows_now = 0

    def __len__(self) -> int:
        return len(self._records)

    def add(self, record: Record) -> None:
        rows = 0
        for run in record.decision.runs:
            rows += len(run.endpoints)
        if (shadow := record.decision.shadow) is not None and shadow.run is not None:
            rows += len(shadow.run.endpoints)
        self._records.append((record, rows))
        self._rows_now += rows
        while len(self._records) > self._kept or (self._rows_now > self._rows and len(self._records) > 1):
            self._rows_now -= self._records.popleft()[1]

    def newest(self, limit: int) -> Iterator[Record]:
        """At most `limit` records, newest first."""
        return (record for record, _ in islice(reversed(self._records), limit))

    def find(self, request_id: str) -> Record | None:
        """The newest record of this request id (clients choose theirs, so they may repeat)."""
        for record, _ in reversed(self._records):
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
        opaque=request.opaque,
    )


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
