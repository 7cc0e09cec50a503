"""Group 4: the endpoint's answer on its way back."""

from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager

from tooling.conformance import wire
from tooling.conformance.bodies import LIMIT, pieces
from tooling.conformance.case import ENVOY_API, ENVOY_MODE, PROTOCOL, Group
from tooling.conformance.replies import Forwarded, check_same, kind
from tooling.conformance.talk import Talk, talk
from tooling.conformance.target import Target
from tooling.conformance.verdict import require

GROUP = Group(4, "answer")
JSON = {":status": "200", "content-type": "application/json"}
EVENTS = {":status": "200", "content-type": "text/event-stream"}
COMPLETION = (
    b'{"id": "c-1", "object":"chat.completion","choices":[{"index":0,"message":{"role":"assistant",'
    b'"content":"hi <&> \\u00fc"},"finish_reason":"stop"}],\n "usage":{"prompt_tokens":3,"completion_tokens":1,'
    b'"total_tokens":4}}\n'
)
EVENT = 'data: {"choices":[{"index":0,"delta":{"content":"Füße 🙂"}}]}\n\n'.encode()
STREAM = [
    EVENT,
    EVENT[:30],  # events are cut where the network cuts them
    EVENT[30:58],
    EVENT[58:] + b": a comment\r\n\r\n",
    b'data:{"choices":[],"usage":{"prompt_tokens":3,"completion_tokens":2,"total_tokens":5}}\n\n',
    b"data: [DONE]\n\n",
]
SERVED = f"{PROTOCOL}, Destination Endpoint Served"


@asynccontextmanager
async def answered(target: Target) -> AsyncIterator[tuple[Talk, Forwarded]]:
    """A chat completion that is on its way."""
    async with talk(target) as one:
        await one.ask(wire.chat(target.options.model))
        yield one, await one.forwarded()


async def passes(one: Talk, parts: Iterable[bytes]) -> list[bytes]:
    """Send an answer's body, the last part with the end; its chunks. Raises Failed unless the bytes are the same."""
    parts = list(parts)
    for number, part in enumerate(parts, 1):
        await one.send(wire.answer_body(part, end=number == len(parts)))
    chunks = await one.answer_chunks()
    check_same(b"".join(chunks), b"".join(parts), "an answer's body")
    return chunks


@GROUP.case("MUST", "the answer's headers are answered at once", "agentgateway holds the body until then")
async def headers(target: Target) -> None:
    """Headers of an answer, and no body before the reply."""
    async with answered(target) as (one, _):
        await one.answer(JSON)


@GROUP.case("MUST", "a JSON answer comes back byte for byte", ENVOY_MODE)
async def whole(target: Target) -> None:
    """A chat completion's answer in three parts and an empty end."""
    async with answered(target) as (one, forwarded):
        await one.answer(JSON, served=forwarded.addresses[0])
        await passes(one, [COMPLETION[:40], COMPLETION[40:90], COMPLETION[90:], b""])
        await one.silence("nothing after the answer's end")


@GROUP.case("MUST", "streamed events come back as they come, byte for byte", f"{PROTOCOL}: streaming mode")
async def events(target: Target) -> None:
    """Server-sent events cut anywhere: each part has to come back before the next is sent."""
    async with answered(target) as (one, forwarded):
        await one.answer(EVENTS, served=forwarded.addresses[0])
        for part in STREAM:
            await one.send(wire.answer_body(part))
            back = b""
            while len(back) < len(part):
                back += (await one.answer_piece()).body
            check_same(back, part, "a part of an event stream")
        await passes(one, [b""])


@GROUP.case("MUST", "an answer of 1 MB comes back byte for byte", ENVOY_MODE)
async def large(target: Target) -> None:
    """A JSON answer of 1 MiB in parts of 64 KiB."""
    async with answered(target) as (one, _):
        await one.answer(JSON)
        await passes(one, pieces(wire.long_chat("m", 1 << 20)))


@GROUP.case("SHOULD", "no chunk of an answer is larger than 64 KiB", f"{ENVOY_MODE}: recommended")
async def chunks(target: Target) -> None:
    """A JSON answer of 200 KiB in one message."""
    async with answered(target) as (one, _):
        await one.answer(JSON)
        largest = max(map(len, await passes(one, [wire.long_chat("m", 200 << 10)])))
        require(largest <= LIMIT, f"at most {LIMIT} bytes", f"{largest}")


@GROUP.case("MUST", "an answer's trailers are answered", f"{ENVOY_MODE}: trailer mode SEND")
async def trailers(target: Target) -> None:
    """An event without an end of stream, then trailers, as gRPC endpoints send them."""
    async with answered(target) as (one, _):
        await one.answer(EVENTS)
        await one.send(wire.answer_body(EVENT))
        check_same((await one.answer_piece()).body, EVENT, "a part of an event stream")
        await one.send(wire.answer_trailers())
        reply = await one.reply("a reply to the answer's trailers")
        require(reply.HasField("response_trailers"), "a reply to the answer's trailers", kind(reply))


@GROUP.case("MUST", "an answer without a body is answered", ENVOY_API)
async def no_body(target: Target) -> None:
    """Headers of an answer with the end of stream on them."""
    async with answered(target) as (one, _):
        await one.answer({":status": "204"}, end=True)
        await one.half_close()
        await one.end()


@GROUP.case("MUST", "an endpoint's error comes back byte for byte", ENVOY_MODE)
async def errors(target: Target) -> None:
    """A 500 whose body is no JSON though it says so, then a 404 of plain text."""
    for fields in ({**JSON, ":status": "500"}, {":status": "404", "content-type": "text/plain"}):
        async with answered(target) as (one, _):
            await one.answer(fields)
            await passes(one, [b"{not js", b"on", b""])


@GROUP.case("MUST", "an endpoint other than the chosen one may have served", SERVED)
async def served(target: Target) -> None:
    """The served endpoint is another than the first of the destination; after it, one that is no address."""
    for address in (target.options.endpoints[-1:] or ("192.0.2.7:8000",))[0], "nobody":
        async with answered(target) as (one, _):
            await one.answer(JSON, served=address)
            await passes(one, [COMPLETION])


@GROUP.case("SHOULD", "an answer by the gateway itself is answered before the request is complete", ENVOY_API)
async def early(target: Target) -> None:
    """Headers and half a body, then the headers of the gateway's own 413."""
    async with talk(target) as one:
        await one.send(wire.request_headers(one.headers()), wire.request_body(b'{"model"'))
        await one.answer({":status": "413"}, end=True)


@GROUP.case(
    "MUST", "a stream that is half-closed after the answer ends in order", "gRPC; in-flight accounts end with it"
)
async def ends(target: Target) -> None:
    """A whole exchange, then the gateway's half-close."""
    async with answered(target) as (one, _):
        await one.answer(JSON)
        await passes(one, [COMPLETION])
        await one.half_close()
        await one.end()
