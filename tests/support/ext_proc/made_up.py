"""Requests in which all that a client may name is named anew, and an answer: what an attack on tables and labels is."""

import base64
import json

from epp import protocol
from epp.extproc.proto import ext_proc_pb2 as pb
from tests.support.ext_proc.messages import (
    HEADERS,
    LEAN,
    answer_headers,
    metadata,
    request_body,
    request_headers,
)
from tests.support.ext_proc.server import Gateway

NAMED = (
    *("x-request-id", "x-session-id", "x-claude-code-session-id", "x-tenant", "user-agent", ":authority", "accept"),
    *(*protocol.FAIRNESS_ID, *protocol.OBJECTIVE),
)
"""Headers that are read, some of them or all; each has another value each time."""


async def made_up(gateway: Gateway, n: int, endpoint: str) -> str:
    """The `n`th; it may go to `endpoint`. What became of it: routed or refused."""
    call = gateway.channel.stream_stream(f"/{protocol.EXT_PROC_SERVICE}/Process")()
    await call.write(request_headers(_headers(n), config=LEAN, context=_subset(n, endpoint)))
    await call.write(request_body(_body(n), end=True))
    reply = pb.ProcessingResponse.FromString(await call.read())
    became = "refused" if reply.HasField("immediate_response") else "routed"
    if became == "routed":
        status = 500 + n % 100 if n % 100 == 1 else 400 + n % 100 if n % 3 else 200
        await call.write(
            answer_headers({":status": str(status), "content-type": f"text/x-{n}"}, f"10.0.0.1:{n % 60000}")
        )
    await call.done_writing()
    while isinstance(await call.read(), bytes):
        pass
    return became


def _headers(n: int) -> dict[str, str]:
    headers = {**HEADERS, **{name: f"{name}-{n}" for name in NAMED}, f"x-{n}": "made up"}
    headers["traceparent"] = f"00-{n + 1:032x}-{n + 1:016x}-01"
    headers[":path"] = f"/v1/chat/completions?key={n}" if n % 7 else f"/v1/made-up/{n}"
    headers[":method"] = "POST" if n % 11 else f"M{n}"
    headers["content-type"] = f"application/json; made-up={n}" if n % 13 else f"application/x-{n}"
    return headers


def _subset(n: int, endpoint: str) -> pb.Metadata | None:
    """Of three requests one may go anywhere; one of ten may go nowhere that there is."""
    if n % 3 == 0:
        return None
    there = "" if n % 10 == 1 else f"{endpoint},"
    allowed = pb.Value(string_value=f"{there}10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}:8000".encode())
    return metadata(protocol.SUBSET_NAMESPACE, protocol.SUBSET, allowed)


def _body(n: int) -> bytes:
    image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(b'%d' % n).decode()}"}}
    content = [{"type": "text", "text": f"{n} " * 600}, image]
    named = {name: f"{name}-{n}" for name in ("cache_salt", "prompt_cache_key", "user", "service_tier", f"made-up-{n}")}
    # One of four is refused, for its tenant.
    made = {"model": f"model-{n}", "messages": [{"role": "user", "content": content}], **named}
    return json.dumps(made | {"max_tokens": 1000 if n % 4 == 0 else 10, "priority": n}).encode()
