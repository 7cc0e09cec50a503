"""Group 6: the message shapes of gateways in use, and of modes beyond full duplex."""

from tooling.conformance import wire
from tooling.conformance.answers import JSON, STREAM, passes
from tooling.conformance.bodies import check_json
from tooling.conformance.case import ENVOY_API, PROTOCOL, Group
from tooling.conformance.replies import (
    Forwarded,
    Refused,
    check_addresses,
    check_same,
    destination_metadata,
    kind,
    streamed,
)
from tooling.conformance.talk import CHAT_PATH, talk
from tooling.conformance.target import Target
from tooling.conformance.verdict import Failed, require

GROUP = Group(6, "gateways")
SHIM = "NGINX Gateway Fabric, cmd/gateway/endpoint_picker.go"
AGENT = "agentgateway, crates/agentgateway/src/http/ext_proc.rs"
AI_GATEWAY = "Envoy AI Gateway, annotation processing-body-mode: buffered"


async def through_shim(target: Target, body: bytes) -> None:
    """As the NGINX shim asks: new connection, one body message, half-close, read to the end. Raises Failed.

    It names no path, and EPPs that guess take such a body for a completion's, which it therefore is.
    """
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **target.options.headers}
    async with target.connect() as channel, talk(target, channel) as one:
        await one.send(wire.request_headers(headers, config=None, raw=False), wire.request_body(body, end=True))
        await one.half_close()
        check_addresses((await one.forwarded()).addresses)
        await one.end()


@GROUP.case("MUST", "NGINX: half-closed after the request, no method, no path, no answer shown", SHIM)
async def shim(target: Target) -> None:
    """Canonical header names in `value`, no pseudo-headers, no protocol_config; three times, a connection each."""
    for _ in range(3):
        await through_shim(target, wire.completion(target.options.model))


@GROUP.case("SHOULD", "NGINX: a body beyond 4 MiB in one message", f"{SHIM}; gRPC's default limit is 4 MiB")
async def shim_large(target: Target) -> None:
    """The same with a body of 5 MiB."""
    await through_shim(target, wire.completion(target.options.model, 5 << 20))


@GROUP.case("MUST", "agentgateway: the end comes alone, answers have no trailers", AGENT)
async def agentgateway(target: Target) -> None:
    """protocol_config, body, an empty end; the answer with the served endpoint, events, an empty end; half-close."""
    async with talk(target) as one:
        await one.ask(wire.chat(target.options.model), b"")
        forwarded = await one.forwarded()
        await one.answer({**JSON, "content-type": "text/event-stream"}, served=forwarded.addresses[0])
        await passes(one, [*STREAM, b""])
        await one.half_close()
        await one.end()


@GROUP.case("SHOULD", "agentgateway: a single address, unless fallbacks were asked for", f"{AGENT}: one SocketAddr")
async def single(target: Target) -> None:
    """A chat completion. A comma list is the protocol's, but older agentgateways refuse it."""
    async with talk(target) as one:
        await one.ask(wire.chat(target.options.model))
        addresses = (await one.forwarded()).addresses
    require(len(addresses) == 1, "one ip:port", f"{len(addresses)} of them")


@GROUP.case("SHOULD", "Envoy AI Gateway: a BUFFERED body is not waited for", AI_GATEWAY)
async def buffered(target: Target) -> None:
    """Headers with BUFFERED modes: a reply has to come before the body is sent; the destination by the body's reply."""
    body = wire.chat(target.options.model)
    async with talk(target) as one:
        await one.send(wire.request_headers(one.headers(length=len(body)), config=wire.BUFFERED))
        first = await one.reply("a reply to the headers, before the body")
        require(first.WhichOneof("response") == "request_headers", "a reply to the request's headers", kind(first))
        await one.send(wire.request_body(body, end=True))
        second = await one.reply("a reply to the body")
        require(second.WhichOneof("response") == "request_body", "a reply to the body", kind(second))
        mutation = second.request_body.response.body_mutation.WhichOneof("mutation")
        require(mutation != "streamed_response", "the body replaced or left", "a streamed_response")
        metadata = destination_metadata(second) or destination_metadata(first)
        require(metadata is not None, "a destination by then", "none")


@GROUP.case("MUST", "an answer's body that is not sent is not waited for", f"{ENVOY_API}, ProtocolConfiguration")
async def lean(target: Target) -> None:
    """response_body_mode NONE: request, the answer's headers, and a half-close when the answer has ended."""
    body = wire.chat(target.options.model)
    async with talk(target) as one:
        await one.ask(body, config=wire.LEAN)
        check_json(await one.forwarded(), body)
        await one.answer(JSON)
        await one.silence("nothing while the answer runs")
        await one.half_close()
        await one.end()


@GROUP.case("MUST", "protocol_config may be missing", f"{ENVOY_API}: optional; Envoy before 1.33 sends none")
async def no_config(target: Target) -> None:
    """A chat completion in full duplex without it."""
    body = wire.chat(target.options.model)
    async with talk(target) as one:
        await one.ask(body, config=None)
        check_json(await one.forwarded(), body)
        await one.answer(JSON)
        await passes(one, STREAM)


@GROUP.case("MUST", "fields that are newer than the EPP are skipped", "Protocol Buffers, unknown fields")
async def unknown_fields(target: Target) -> None:
    """A chat completion with attributes and an unknown field in its first message."""
    body = wire.chat(target.options.model)
    async with talk(target) as one:
        message = wire.request_headers(one.headers(length=len(body))).SerializeToString()
        attributes = b"\x4a\x10\x0a\x0cenvoy.future\x12\x00"
        unknown = b"\x82\x7d\x03new"
        await one.send_raw(message + attributes + unknown)
        await one.send_body([body])
        check_json(await one.forwarded(), body)


@GROUP.case("MUST", "a retried request is routed again", f"{PROTOCOL}: each stream stands for itself")
async def retried(target: Target) -> None:
    """The same request with the same x-request-id: cut off half-way, then whole, twice at once."""
    body = wire.chat(target.options.model)
    async with talk(target) as first, talk(target) as second, talk(target) as third:
        headers = first.headers(path=CHAT_PATH, length=len(body))
        await first.send(wire.request_headers(headers), wire.request_body(body[:10]))
        first.cancel()
        for one in (second, third):
            await one.ask(body, headers=headers)
        for one in (second, third):
            outcome: Forwarded | Refused = await one.outcome()
            if isinstance(outcome, Refused):
                raise Failed("a destination each time", str(outcome))


@GROUP.case("SHOULD", "a WebSocket is routed before anything follows its headers", "RFC 6455 4.1; Envoy issue 47161")
async def websocket(target: Target) -> None:
    """The handshake of vLLM's /v1/realtime, whose client sends nothing before it is answered; then a piece each way."""
    async with talk(target) as one:
        handshake = {**one.headers("GET", "/v1/realtime"), "connection": "Upgrade", "upgrade": "websocket"}
        await one.send(wire.request_headers(handshake))
        check_addresses((await one.forwarded(body=False)).addresses)
        await one.answer({":status": "101", "connection": "Upgrade", "upgrade": "websocket"})
        await one.send(wire.request_body(b"from the client"))
        sent = streamed(await one.reply("what the client sends"), "request_body")
        check_same(sent.body, b"from the client", "what the client sends")
        await one.send(wire.answer_body(b"from the endpoint"))
        got = await one.answer_piece()
        check_same(got.body, b"from the endpoint", "what the endpoint sends")
