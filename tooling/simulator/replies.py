"""Small things all endpoints of the pod share: JSON, vLLM's error objects, ids, cutting a connection."""

import asyncio
import re
from typing import Any

import msgspec
from aiohttp import web

from tooling.simulator.requests import Refused


def json_reply(value: Any, status: int = 200) -> web.Response:
    """`value` as an application/json answer."""
    return web.Response(body=msgspec.json.encode(value), status=status, content_type="application/json")


def error_reply(request: web.Request, refused: Refused) -> web.Response:
    """vLLM's error object; Anthropic's on its endpoints."""
    if request.path.startswith("/v1/messages"):
        kind = {400: "invalid_request_error", 404: "not_found_error", 413: "request_too_large"}.get(refused.status)
        error = {"type": kind or "api_error", "message": refused.message}
        return json_reply({"type": "error", "error": error}, refused.status)
    details = {"message": refused.message, "type": refused.kind, "param": refused.param, "code": refused.status}
    return json_reply({"error": details}, refused.status)


def printable(text: str) -> str:
    """A client's id, safe in a header and in JSON whatever bytes it was made of."""
    return re.sub(r"[^\x21-\x7e]", "?", text)[:256]


async def cut(request: web.Request) -> None:
    """Close the client's connection after what was written; aiohttp then cancels the handler: this never returns."""
    if request.transport is not None:
        request.transport.close()
    await asyncio.Event().wait()
