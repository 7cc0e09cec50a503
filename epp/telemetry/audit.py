"""The audit log: one JSON line a request, for those who must know later who asked which model where, and what it cost.

No prompt, no answer, no header but those named here. Writing never waits: lines are buffered and written by `run`.
"""

import asyncio
import os
from collections import deque
from pathlib import Path

import msgspec

from epp.telemetry.metrics import Metrics

CAPACITY = 20_000
"""Entries kept while the disk is slow; more are dropped, counted and said."""
FLUSH_S = 0.5
LONGEST = 256
"""Characters of any text in an entry: most of them are a client's."""


class AuditEntry(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One request. Tokens -1 and times None: not known. Times in milliseconds, `at` in seconds since the epoch."""

    at: float
    request_id: str
    objective: str = ""
    fairness_id: str = ""
    priority: int = 0
    flow: str = ""
    """The fairness id under which flow control knew it, where it waited or was refused there."""
    model: str = ""
    endpoint: str = ""
    address: str = ""
    why: str = ""
    """The decision in brief, or why there was none: the drop reason, or the error's kind."""
    status: int = 0
    """0: no answer was seen."""
    estimated_tokens: int = -1
    predicted_cached_tokens: int = -1
    prompt_tokens: int = -1
    completion_tokens: int = -1
    cached_tokens: int = -1
    decision_ms: float | None = None
    waited_ms: float | None = None
    """In flow control; None: it did not have to wait."""
    ttft_ms: float | None = None
    duration_ms: float | None = None


class AuditLog:
    """Appends entries to the file at `path`, made readable to its owner alone.

    The file is opened anew for each flush, so it may be moved away (logrotate) at any time. Raises OSError at once if
    it cannot be opened; later failures lose the entries at hand and are `degraded("audit-failed")`.
    """

    def __init__(self, path: Path, metrics: Metrics, *, capacity: int = CAPACITY) -> None:
        self.path = path
        self._metrics = metrics
        self._entries: deque[AuditEntry] = deque()
        self._capacity = capacity
        self._torn = False
        """The last write failed and may have left half a line."""
        self._append(b"")

    def write(self, entry: AuditEntry) -> None:
        """Take an entry; it is in the file soon. Never waits, never raises."""
        if len(self._entries) >= self._capacity:
            self._metrics.degraded("audit-failed", f"{self.path} is slower than the requests; entries are dropped")
            return
        self._entries.append(_cut(entry))  # now: texts of clients would wait here as long as they came

    async def run(self) -> None:
        """Write what is taken, until cancelled; then write the rest."""
        try:
            while True:
                await asyncio.sleep(FLUSH_S)
                await self.flush()
        finally:
            self._written(self._write(self._taken()))

    async def flush(self) -> None:
        """Write everything taken so far; returns when it is in the file, or lost and said so."""
        entries = self._taken()
        if entries:
            self._written(await asyncio.to_thread(self._write, entries))  # if cancelled, the thread still writes them

    def _taken(self) -> list[AuditEntry]:
        entries = list(self._entries)
        self._entries.clear()
        return entries

    def _write(self, entries: list[AuditEntry]) -> str:
        """Returns what went wrong, or nothing."""
        if not entries:
            return ""
        try:
            lines = [b"\n" if self._torn else b"", *(msgspec.json.encode(entry) + b"\n" for entry in entries)]
            self._append(b"".join(lines))
        except (OSError, UnicodeEncodeError) as error:
            self._torn = True
            return f"{len(entries)} entries lost: {error}"
        self._torn = False
        return ""

    def _written(self, failure: str) -> None:
        if failure:
            self._metrics.degraded("audit-failed", failure)

    def _append(self, data: bytes) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while data:
                data = data[os.write(file, data) :]
        finally:
            os.close(file)


def _cut(entry: AuditEntry) -> AuditEntry:
    long = {
        field: value[:LONGEST] + "…"
        for field in ("request_id", "objective", "fairness_id", "model", "endpoint", "address", "why")
        if len(value := getattr(entry, field)) > LONGEST
    }
    return msgspec.structs.replace(entry, **long) if long else entry
