"""Group 8: clients that leave, come all at once or send what they should not. Last: some EPPs die of it."""

import asyncio
from contextlib import AsyncExitStack

from epp.extproc.proto import ext_proc_pb2 as pb
from tooling.conformance import wire
from tooling.conformance.case import ENVOY_API, Group
from tooling.conformance.replies import Refused
from tooling.conformance.talk import Talk, routed, talk
from tooling.conformance.target import Target
from tooling.conformance.verdict import Failed, require

GROUP = Group(8, "hardships")
CROWD = 200
DEEP = b"[" * 20_000 + b"]" * 20_000


async def still_serves(target: Target) -> None:
    """A plain request is still routed. Raises Failed."""
    await routed(target, wire.chat(target.options.model))


async def defined(one: Talk) -> None:
    """Routed or refused, and nobody died of it. Raises Failed."""
    outcome = await one.outcome()
    if isinstance(outcome, Refused):
        require(400 <= outcome.status < 600, "an error of HTTP", str(outcome))
    await still_serves(one.target)


@GROUP.case("MUST", "clients that leave at any moment do no harm", "gRPC: streams are cancelled at any moment")
async def cancelled(target: Target) -> None:
    """Streams cancelled after the headers, within the body, after its end, after the destination, within the answer."""
    body = wire.chat(target.options.model)
    for stage in range(5):
        async with talk(target) as one:
            await one.send(wire.request_headers(one.headers()))
            if stage >= 1:
                await one.send(wire.request_body(body[:20]))
            if stage >= 2:
                await one.send(wire.request_body(body[20:], end=True))
            if stage >= 3:
                await one.forwarded()
            if stage >= 4:
                await one.send(wire.answer_headers({":status": "200"}), wire.answer_body(b"data: "))
            one.cancel()
        await still_serves(target)


@GROUP.case("MUST", "a request that is half-closed before its end leaves no stream behind", "gRPC: half-close")
async def abandoned(target: Target) -> None:
    """Headers and half a body, then a half-close: the EPP has to end the stream, however."""
    async with talk(target) as one:
        await one.send(wire.request_headers(one.headers()), wire.request_body(b'{"model"'))
        await one.half_close()
        await one.over()
    await still_serves(target)


@GROUP.case("MUST", f"{CROWD} streams at once are all routed", f"{ENVOY_API}: a stream for each request")
async def crowd(target: Target) -> None:
    """All headers first, then all bodies, on one connection."""
    bodies = [wire.chat(target.options.model, f"Number {number}.") for number in range(CROWD)]
    async with AsyncExitStack() as stack:
        streams = [await stack.enter_async_context(talk(target)) for _ in bodies]
        opened = []

        async def opens(one: Talk, body: bytes) -> None:
            await one.send(wire.request_headers(one.headers(length=len(body))))
            opened.append(one)

        try:
            async with asyncio.timeout(target.options.reply_timeout):
                await asyncio.gather(*map(opens, streams, bodies))
        except TimeoutError:
            raise Failed(f"{CROWD} streams open at once", f"{len(opened)}") from None
        await asyncio.gather(*(one.send_body([body]) for one, body in zip(streams, bodies, strict=True)))
        troubles = [trouble for trouble in await asyncio.gather(*map(_trouble, streams)) if trouble]
    require(not troubles, f"all {CROWD} routed", f"{len(troubles)} not: {troubles[:1]}")


async def _trouble(one: Talk) -> str:
    try:
        await one.forwarded()
    except Failed as failed:
        return str(failed)
    return ""


@GROUP.case("MUST", "header bytes that are not UTF-8 do no harm", f"{ENVOY_API}, HeaderValue.raw_value: bytes")
async def not_utf8(target: Target) -> None:
    """Such bytes in an ordinary header, and in those that an EPP may look at."""
    body = wire.chat(target.options.model)
    names = ("x-odd", "user-agent", "x-request-id", "x-gateway-inference-fairness-id")
    for name in names:
        async with talk(target) as one:
            await one.ask(body, headers={**one.headers(length=len(body)), name: b"\xff\xfe caf\xe9"})
            await defined(one)


@GROUP.case("MUST", "JSON nested too deep does no harm", "RFC 8259 section 9: a parser may limit the depth")
async def deep(target: Target) -> None:
    """A chat completion whose messages are 20,000 arrays within each other."""
    body = wire.chat(target.options.model).replace(b'"messages":[', b'"deep":' + DEEP + b',"messages":[')
    async with talk(target) as one:
        await one.ask(body)
        await defined(one)


@GROUP.case("MUST", "messages out of order do no harm", ENVOY_API)
async def disorder(target: Target) -> None:
    """A body without headers, headers twice, an answer before any request: whatever comes of it, others are served."""
    body = wire.request_body(wire.chat(target.options.model), end=True)
    async with talk(target) as one:
        headers = wire.request_headers(one.headers())
    answer = wire.answer_headers({":status": "200"})
    for messages in ([body], [headers, headers], [answer, body], [pb.ProcessingRequest()]):
        async with talk(target) as one:
            await one.send(*messages)
            await one.half_close()
            await one.over()
        await still_serves(target)
