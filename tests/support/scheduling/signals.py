"""Requests with signals that a test says instead of a producer."""

from collections.abc import Mapping
from typing import Any

from msgspec.structs import replace

from epp.plugin import Endpoint, Request


def with_signal(request: Request, kind: type[Any], found: Mapping[Endpoint, Any]) -> Request:
    """`request` with the signal `kind`; what it has of other kinds stays."""
    return replace(request, signals={**request.signals, kind: found})
