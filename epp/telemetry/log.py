"""Logging of the process: one line an event on stderr, for people (`text`) or machines (`json`).

What is never logged, anywhere: prompts, answers, header values beyond the request id, tokens and keys. Code that logs
names things by id. Lines are cut and characters that do not print escaped, so that no client can forge or flood a line.
"""

import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

import msgspec

from epp.telemetry.text import printable, printable_lines

LEVELS = ("debug", "info", "warning", "error")
FORMATS = ("text", "json")
LONGEST = 2000
"""Characters of a message; tracebacks are cut at four times as many, keeping their end."""

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        message = record.getMessage()
        if len(message) > LONGEST:
            message = message[:LONGEST] + "…"
        return self.line(at, record.levelname.lower(), record.name, printable(message), self._trace(record))

    def _trace(self, record: logging.LogRecord) -> str:
        return self.formatException(record.exc_info)[-4 * LONGEST :] if record.exc_info else ""

    def line(self, at: str, level: str, logger: str, message: str, trace: str) -> str:
        head = f"{at} {level:<7} {message}" if logger == "warmpath" else f"{at} {level:<7} {logger}: {message}"
        indented = printable_lines(trace).replace("\n", "\n  ")
        return f"{head}\n  {indented}" if trace else head


class _Json(_Lines):
    def line(self, at: str, level: str, logger: str, message: str, trace: str) -> str:
        entry = {"at": at, "level": level, "logger": logger, "message": message}
        if trace:
            entry["trace"] = trace
        return msgspec.json.encode(entry).decode()


def set_up(level: Level = "info", format: Format = "text", stream: TextIO | None = None) -> None:
    """Send all logging of the process to `stream` (stderr), replacing what was set up before.

    `level` is ours; libraries speak from `warning` on, at `debug` from `info` on.
    """
    handler = logging.StreamHandler(stream if stream is not None else sys.stderr)
    handler.setFormatter(_Json() if format == "json" else _Lines())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO if level == "debug" else max(logging.WARNING, logging.getLevelName(level.upper())))
    logging.getLogger("warmpath").setLevel(level.upper())
    logging.captureWarnings(True)
