"""Group 2: the request's body in full duplex, on its way through the EPP."""

import json

from tooling.conformance import wire
from tooling.conformance.case import ENVOY_MODE, PROTOCOL, Group
from tooling.conformance.replies import Forwarded, check_same, kind, quoted, set_headers, streamed, text
from tooling.conformance.talk import routed, talk
from tooling.conformance.target import Target
from tooling.conformance.verdict import require

GROUP = Group(2, "request body")
LIMIT = 65_536
BYTES = "warmpath: an endpoint picker is no editor of prompts"


def check_json(forwarded: Forwarded, body: bytes) -> None:
    """Raises Failed unless the forwarded body says the same as `body`."""
    try:
        same = json.loads(forwarded.body) == json.loads(body)
    except ValueError:
        same = False
    require(same, f"the JSON of {len(body)} bytes that was sent", f"{len(forwarded.body)}: {quoted(forwarded.body)}")


async def echoed(target: Target, *pieces: bytes) -> None:
    """The request's JSON comes back whole. Raises Failed."""
    check_json(await routed(target, *pieces), b"".join(pieces))


async def untouched(target: Target, body: bytes) -> None:
    """The request's bytes come back as they were. Raises Failed."""
    check_same((await routed(target, body)).body, body, "a body")


def odd(target: Target, text: str) -> bytes:
    """A chat completion with something more in it, as text."""
    return wire.chat(target.options.model)[:-1] + b"," + text.encode() + b"}"


@GROUP.case("MUST", "headers are answered before the body, and the body ends once", ENVOY_MODE)
async def order(target: Target) -> None:
    """A chat completion; after the chunk that ends the body nothing may come."""
    async with talk(target) as one:
        await one.ask(wire.chat(target.options.model))
        await one.forwarded()
        await one.silence("nothing after the body's end")


@GROUP.case("MUST", "a small body comes back whole", ENVOY_MODE)
async def small(target: Target) -> None:
    """A chat completion in one message."""
    await echoed(target, wire.chat(target.options.model))


@GROUP.case("MUST", "a body may be split anywhere", ENVOY_MODE)
async def split(target: Target) -> None:
    """A chat completion with text that is not ASCII, a byte a message, and cut in two at several places."""
    body = wire.chat(target.options.model, "Füße, 日本語, 🙂")
    await echoed(target, *(bytes([byte]) for byte in body))
    for at in (1, len(body) // 2, len(body) - 3, len(body) - 1):
        await echoed(target, body[:at], body[at:])


@GROUP.case("MUST", "an empty last message ends the body", ENVOY_MODE)
async def empty_end(target: Target) -> None:
    """A chat completion whose last message is empty and carries the end of stream."""
    await echoed(target, wire.chat(target.options.model), b"")


@GROUP.case("MUST", "an empty message within the body changes nothing", ENVOY_MODE)
async def empty_middle(target: Target) -> None:
    """A chat completion with an empty message before, in and after it."""
    body = wire.chat(target.options.model)
    await echoed(target, b"", body[:9], b"", body[9:], b"")


@GROUP.case("MUST", "a second end of stream is ignored", "envoyproxy/envoy#46237: sent for bodies over 1 MB")
async def second_end(target: Target) -> None:
    """After a chat completion's end another empty message with the end; then the answer passes as ever."""
    async with talk(target) as one:
        await one.ask(wire.chat(target.options.model))
        await one.send(wire.request_body(b"", end=True))
        await one.forwarded()
        await one.silence("nothing more about the request")
        await one.answer({":status": "200"})


@GROUP.case("MUST", "trailers end the body, and are answered after it", ENVOY_MODE)
async def trailers(target: Target) -> None:
    """A chat completion without an end of stream in its body, and trailers."""
    body = wire.chat(target.options.model)
    async with talk(target) as one:
        await one.send(wire.request_headers(one.headers()), wire.request_body(body), wire.request_trailers())
        first = await one.reply("a reply to the request's headers, once the trailers have come")
        require(first.WhichOneof("response") == "request_headers", "a reply to the request's headers", kind(first))
        forwarded = Forwarded(first)
        while (reply := await one.reply("the body and a reply to the trailers")).HasField("request_body"):
            piece = streamed(reply, "request_body")
            require(not piece.end_of_stream, "no end of stream in the body, as trailers follow", "one")
            forwarded.chunks.append(piece.body)
        require(reply.HasField("request_trailers"), "a reply to the trailers", kind(reply))
        check_json(forwarded, body)


@GROUP.case("MUST", "a request without a body is routed at once", PROTOCOL)
async def no_body(target: Target) -> None:
    """GET /v1/files with the end of stream on its headers."""
    require(bool((await routed(target)).destination), "a destination", "none")


@GROUP.case("MUST", "a content-length that the EPP sets is the body's", "RFC 9110 8.6")
async def content_length(target: Target) -> None:
    """A chat completion whose headers carry its length."""
    forwarded = await routed(target, wire.chat(target.options.model))
    for option in set_headers(forwarded.common).get("content-length", []):
        length = text(option.header.raw_value or option.header.value)
        require(length == str(len(forwarded.body)), f"{len(forwarded.body)}, the body's length", length)


@GROUP.case("MUST", "a body of 1 MB comes back whole", f"{ENVOY_MODE}; GIE issue 2988")
async def megabyte(target: Target) -> None:
    """A chat completion of 1 MiB in messages of 64 KiB."""
    await echoed(target, *pieces(wire.long_chat(target.options.model, 1 << 20)))


@GROUP.case("MUST", "a body of 4 MB comes back whole", f"{ENVOY_MODE}; long contexts")
async def four_megabytes(target: Target) -> None:
    """A chat completion of 4 MiB and 1 KiB in messages of 64 KiB."""
    await echoed(target, *pieces(wire.long_chat(target.options.model, (4 << 20) + 1024)))


@GROUP.case("SHOULD", "no chunk is larger than 64 KiB", f"{ENVOY_MODE}: recommended")
async def chunks(target: Target) -> None:
    """A chat completion of 300 KiB in messages of 64 KiB."""
    forwarded = await routed(target, *pieces(wire.long_chat(target.options.model, 300 << 10)))
    largest = max(map(len, forwarded.chunks))
    require(largest <= LIMIT, f"at most {LIMIT} bytes", f"{largest}")


@GROUP.case("SHOULD", "headers are answered only when the whole body is known", ENVOY_MODE)
async def late_headers(target: Target) -> None:
    """Headers and half a chat completion: an EPP that answers now picks without having read the prompt."""
    body = wire.chat(target.options.model)
    async with talk(target) as one:
        await one.send(wire.request_headers(one.headers(length=len(body))), wire.request_body(body[:20]))
        await one.silence("no reply before the body's end")
        await one.send(wire.request_body(body[20:], end=True))
        await one.forwarded()


@GROUP.case("SHOULD", "formatting stays byte for byte", BYTES)
async def formatting(target: Target) -> None:
    """A chat completion with odd white space, keys out of order and twice, and a line break at its end."""
    body = odd(target, '"z" :\t1 ,\r\n "a":\n[ ],"a":[ 2 ]')
    await untouched(target, b"  " + body + b"\n")


@GROUP.case("SHOULD", "text stays byte for byte", BYTES)
async def escapes(target: Target) -> None:
    """A chat completion with <>&, escaped and plain characters beyond ASCII, and escaped slashes."""
    await untouched(target, odd(target, r'"user":"<b>&amp;</b> \u00fc ü \ud83d\ude42 🙂 \/ \u2028"'))


@GROUP.case("SHOULD", "numbers stay byte for byte", BYTES)
async def numbers(target: Target) -> None:
    """A chat completion with a seed beyond 2^53, 1.0, 1e3 and a long fraction."""
    numbers = '"seed":9007199254740993,"temperature":1.0,"top_p":1e0,"x":0.12345678901234567890123'
    await untouched(target, odd(target, numbers))


def pieces(body: bytes) -> list[bytes]:
    """In messages of 64 KiB, as Envoy reads them."""
    return [body[at : at + LIMIT] for at in range(0, len(body), LIMIT)]
