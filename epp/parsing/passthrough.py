"""Requests nobody here looks into (api `other`): routed by load alone."""

from typing import Final

from epp.parsing.request import RawRequest

OPAQUE: Final = "opaque"
"""Key in `Request.notes`: why a body of a known path was not read (text)."""


def why_opaque(raw: RawRequest) -> str:
    """Why this body cannot be read as JSON although its path promises it; "" = it can."""
    if "content-encoding" not in raw.headers and raw.headers.get("content-type") == "application/json":
        return ""
    coding = raw.headers.get("content-encoding", "").strip().lower()
    if coding not in ("", "identity"):
        return f"content-encoding: {coding}"
    kind = raw.headers.get("content-type", "").strip().lower()
    if kind.startswith("multipart/"):
        return f"content-type: {kind.partition(';')[0]}"
    return ""
