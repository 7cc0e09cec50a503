"""protobuf <-> ours. The only file that knows what an ext_proc message looks like.

Two replies are not made by protobuf: those that never change are serialised once, and a streamed chunk is its bytes
between two cached strings (one copy instead of four). Numbers: `proto/ext_proc.proto`.
"""

import ipaddress
from collections.abc import Iterable, Mapping
from functools import lru_cache

import msgspec

from epp import protocol
from epp.errors import EppError, OwnAnswer, TooLarge
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.parsing.request import NO_HEADERS, RawRequest, Watched

Incoming = pb.Incoming
Mode = pb.ProcessingMode

MAX_HEADERS = 1_000
MAX_HEADERS_BYTES = 1 << 20
"""Bounds on the request's header message (names, values and metadata together). Envoy's own: 100 and 60 KB."""
MAX_ADDRESS = 64
"""Longest text taken for an address: a bracketed IPv6 with port has 47 bytes."""
MAX_ERROR_TEXT = 1_000
SET = pb.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
SUBSET_NAMESPACE, SUBSET = protocol.SUBSET_NAMESPACE.encode(), protocol.SUBSET.encode()
LB_NAMESPACE, SERVED = protocol.LB_NAMESPACE.encode(), protocol.SERVED.encode()


decode = pb.Incoming.FromString
"""The message; what we do not know in it is skipped. It and all that reads the message's parts raise DecodeError."""


# --- what the gateway says -------------------------------------------------------------------------------------------


def _text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def request_headers(headers: pb.IncomingHeaders, size: int) -> dict[str, str]:
    """Lower-case names, escaped values; a repeated header becomes one, joined as RFC 9110 5.3 has it.

    `size`: bytes of the message. Raises TooLarge.
    """
    entries = headers.headers.headers[:]
    if len(entries) > MAX_HEADERS or size > MAX_HEADERS_BYTES:
        raise TooLarge(
            f"the request's headers are {size} bytes in {len(entries)} fields; "
            f"at most {MAX_HEADERS_BYTES} bytes and {MAX_HEADERS} fields are accepted"
        )
    known, found = _known_headers.get, {}
    for entry in entries:
        name, value = known(entry) or _header(entry)
        found[name] = value
    return found if len(found) == len(entries) else _joined(entries)


_known_headers: dict[bytes, tuple[str, str]] = {}
"""Headers seen lately, by their bytes: most of a request's are the same as those of the request before."""
KNOWN_HEADERS = 4096
LONGEST_KNOWN = 64
"""Bytes; longer ones, such as cookies and tokens, are one client's own."""
_EACH_ITS_OWN = frozenset((protocol.REQUEST_ID, "traceparent", "x-b3-traceid", "x-b3-spanid", "x-amzn-trace-id"))
"""Headers whose values are of one request. To remember them would push out all others, again and again."""


def _header(entry: bytes) -> tuple[str, str]:
    """(lower-case name, escaped value); kept for the next who asks for it."""
    header = pb.HeaderValue.FromString(entry)
    pair = _text(header.key).lower(), _text(header.raw_value or header.value)
    if len(entry) <= LONGEST_KNOWN and pair[0] not in _EACH_ITS_OWN:
        if len(_known_headers) >= KNOWN_HEADERS:
            _known_headers.clear()
        _known_headers[entry] = pair
    return pair


def _joined(entries: Iterable[bytes]) -> dict[str, str]:
    """The same where one comes twice."""
    found: dict[str, str] = {}
    for entry in entries:
        name, value = _known_headers.get(entry) or _header(entry)
        if name in found:
            value = f"{found[name]}{'; ' if name == 'cookie' else ', '}{value}"
        found[name] = value
    return found


def modes(message: pb.Incoming) -> tuple[int, int, bool] | None:
    """The gateway's modes for the bodies of request and answer, and whether a STREAMED request's body waits for our
    reply to its headers; None where it does not say.
    """
    config = message.protocol_config
    if not config and not message.HasField("protocol_config"):
        return None
    return _modes(config) if len(config) <= LONGEST_KNOWN else _modes_of(config)


def _modes_of(config: bytes) -> tuple[int, int, bool]:
    modes = pb.ProtocolConfiguration.FromString(config)
    waits = not modes.send_body_without_waiting_for_header_response
    return modes.request_body_mode, modes.response_body_mode, waits


_modes = lru_cache(64)(_modes_of)
"""The same for those seen lately: a gateway has one, of some bytes."""


def is_websocket(headers: Mapping[str, str]) -> bool:
    """They ask to go on as a WebSocket (RFC 6455 4.1), also where that came as RFC 8441's CONNECT, which Envoy turns
    into this.
    """
    return "upgrade" in headers and headers["upgrade"].lower() == "websocket" and headers.get(":method") == "GET"


def subset(context: bytes) -> tuple[str, ...] | None:
    """The gateway's restriction, in the metadata that come with a request: `ip:port` or bare `ip`, IPv6 with a port in
    brackets, bare IPv6 without them.

    None = unrestricted. A restriction we cannot read (a number, null, a list of such) matches no endpoint: sending a
    request where the gateway may have forbidden it would be worse than a 503 that can be seen.
    """
    hint = _metadata(context, SUBSET_NAMESPACE, SUBSET)
    if hint is None:
        return None
    if hint.WhichOneof("kind") == "string_value":
        texts: Iterable[bytes] = hint.string_value.split(b",")
    else:
        texts = (value.string_value for value in hint.list_value.values)
    return tuple(dict.fromkeys(address for text in texts if (address := _address(text))))


def _metadata(context: bytes, namespace: bytes, key: bytes) -> pb.Value | None:
    if context.find(namespace) < 0:  # `in` of bytes is slow, see `UsageReader.feed`
        return None
    for entry in reversed(pb.Metadata.FromString(context).filter_metadata):
        if entry.key == namespace:
            for field in reversed(entry.value.fields):
                if field.key == key:
                    return field.value
    return None


def _address(raw: bytes) -> str:
    return _canonical(raw) if len(raw) <= MAX_ADDRESS else _text(raw)


@lru_cache(4096)
def _canonical(raw: bytes) -> str:
    text = _text(raw).strip()
    host, bracket, port = text.rpartition("]")
    if bracket:
        host = host.removeprefix("[")
    elif text.count(":") == 1:
        return text
    else:
        host, port = text, ""
    try:
        host = str(ipaddress.ip_address(host))
    except ValueError:
        return text
    return f"[{host}]{port}" if port else host


def answer(message: pb.Incoming, context: bytes, *, body_follows: bool = True) -> tuple[int, str, str]:
    """Of an answer's headers and metadata: status (0 if there is none), endpoint that served (or empty), content type
    (or empty).

    The content type is not looked for where no body follows that it would explain.
    """
    status, content_type, found, known = 0, "", 0 if body_follows else 1, _known_headers.get
    for entry in message.response_headers.headers.headers:
        name, value = known(entry) or _header(entry)
        if name == ":status":
            status = int(value) if len(value) == 3 and value.isascii() and value.isdigit() else 0
        elif name == "content-type" and body_follows:
            content_type = value
        else:
            continue
        found += 1
        if found == 2:  # the rest is the client's business
            break
    return status, _served(context) if len(context) <= LONGEST_KNOWN_METADATA else _served_of(context), content_type


def answer_header(message: pb.Incoming, name: str) -> str:
    """The first of an answer's headers of this name (lower case), or empty."""
    for entry in message.response_headers.headers.headers:
        found, value = _known_headers.get(entry) or _header(entry)
        if found == name:
            return value
    return ""


LONGEST_KNOWN_METADATA = 512


def _served_of(context: bytes) -> str:
    """The endpoint that served, as Envoy's metadata has it."""
    served = _metadata(context, LB_NAMESPACE, SERVED)
    return _address(served.string_value) if served is not None else ""


_served = lru_cache(1024)(_served_of)
"""The same for metadata seen lately: where it says no more, there is one for each endpoint."""


def raw_request(
    headers: Mapping[str, str],
    body: bytes,
    subset: tuple[str, ...] | None,
    *,
    sees_answer: bool,
    watched: Watched,
    watchable: float,
) -> RawRequest:
    method, path = headers.get(":method", ""), headers.get(":path", "")
    return RawRequest(method, path, headers, body, subset, sees_answer, watched, watchable)


# --- what we say -----------------------------------------------------------------------------------------------------


def forged(headers: Mapping[str, str]) -> frozenset[str]:
    """Those of the client's headers that only we may set towards an endpoint."""
    return NOTHING if protocol.SYSTEM_OWNED.isdisjoint(headers) else protocol.SYSTEM_OWNED.intersection(headers)


def routed_headers(destination: str, headers: Mapping[str, str], removed: frozenset[str], length: int | None) -> bytes:
    """The reply to request headers: go to `destination`, with these headers. `length`: of the body, if it changed."""
    if not headers and not removed and length is None:
        return _plainly_routed(destination)
    reply = _to(destination)
    _mutate(reply.request_headers.response, destination, headers, removed, length)
    return reply.SerializeToString()


def routed_upgrade(destination: str, headers: Mapping[str, str], removed: frozenset[str]) -> bytes:
    """The same for a request that becomes a WebSocket: and show nothing more of it but the answer's headers."""
    reply = _to(destination)
    _mutate(reply.request_headers.response, destination, headers, removed, None)
    reply.mode_override.CopyFrom(_overridden(Mode.NONE, Mode.NONE))
    return reply.SerializeToString()


def routed_body(destination: str, headers: Mapping[str, str], removed: frozenset[str], body: bytes | None) -> bytes:
    """The same as the reply to a buffered body; a `body` replaces the one that came."""
    reply = _to(destination)
    common = reply.request_body.response
    _mutate(common, destination, headers, removed, None if body is None else len(body))
    if body is not None:
        common.body_mutation.body = body
    return reply.SerializeToString()


@lru_cache(4096)
def _plainly_routed(destination: str) -> bytes:
    reply = _to(destination)
    _mutate(reply.request_headers.response, destination, NO_HEADERS, NOTHING, None)
    return reply.SerializeToString()


def _to(destination: str) -> pb.ProcessingResponse:
    address = pb.Value(string_value=destination.encode())
    inner = pb.Struct(fields=[pb.Struct.Entry(key=protocol.DESTINATION.encode(), value=address)])
    entry = pb.Struct.Entry(key=protocol.LB_NAMESPACE.encode(), value=pb.Value(struct_value=inner))
    return pb.ProcessingResponse(dynamic_metadata=pb.Struct(fields=[entry]))


def _mutate(
    common: pb.CommonResponse, destination: str, headers: Mapping[str, str], removed: frozenset[str], length: int | None
) -> None:
    common.clear_route_cache = True
    common.header_mutation.set_headers.append(_set(protocol.DESTINATION, destination))
    for name, value in headers.items():
        common.header_mutation.set_headers.append(_set(name, value))
    if length is not None:
        common.header_mutation.set_headers.append(_set("content-length", str(length)))
    common.header_mutation.remove_headers.extend(sorted(removed - headers.keys() - {protocol.DESTINATION}))


def _set(name: str, value: str) -> pb.HeaderValueOption:
    header = pb.HeaderValue(key=name.encode(), raw_value=value.encode("utf-8", "backslashreplace"))
    return pb.HeaderValueOption(header=header, append_action=SET)


def answer_headers(headers: Mapping[str, str], *, resized: bool = False, streamed: bool = False) -> bytes:
    """The reply to the answer's headers, with headers to add for the client.

    `resized`: its body may change; `streamed`: its pieces are to be shown as they come, which the gateway does not do
    by itself.
    """
    if not headers and not resized and not streamed:
        return ANSWER_HEADERS
    reply = pb.ProcessingResponse()
    if streamed:
        # Envoy replaces all modes by those of an override, also that of the request, which is over.
        reply.mode_override.request_body_mode = Mode.STREAMED
        reply.mode_override.response_header_mode = Mode.SEND
        reply.mode_override.response_body_mode = Mode.STREAMED
        reply.mode_override.response_trailer_mode = Mode.SEND
    mutation = reply.response_headers.response.header_mutation
    mutation.set_headers.extend(_set(n, v) for n, v in headers.items())
    if resized:
        mutation.remove_headers.append("content-length")
    reply.response_headers.SetInParent()  # there, even if nothing is in it
    return reply.SerializeToString()


def replaced_answer(body: bytes) -> bytes:
    """The reply to a streamed (not duplex) or buffered piece of an answer's body: these bytes instead."""
    reply = pb.ProcessingResponse()
    reply.response_body.response.body_mutation.body = body
    return reply.SerializeToString()


def replaced_chunk(body: bytes) -> bytes:
    """The reply to a streamed (not duplex) piece of the request's body: these bytes instead; none = drop it."""
    reply = pb.ProcessingResponse()
    if body:
        reply.request_body.response.body_mutation.body = body
    else:
        reply.request_body.response.body_mutation.clear_body = True
    return reply.SerializeToString()


def refusal(error: EppError) -> bytes:
    """The answer to the client, in OpenAI's error shape, instead of an endpoint's."""
    if isinstance(error, OwnAnswer):
        body = error.body
    else:
        param = error.param and _printable(error.param)
        code = error.code or error.reason
        said = {"message": _printable(error.message), "type": error.kind, "param": param, "code": code}
        body = msgspec.json.encode({"error": said})
    headers = [_set("content-type", "application/json")]
    if error.reason:
        headers.append(_set(protocol.DROP_REASON, error.reason))
    headers += [_set(name, value) for name, value in error.headers.items()]
    immediate = pb.ImmediateResponse(
        status=pb.HttpStatus(code=error.status),
        headers=pb.HeaderMutation(set_headers=headers),
        body=body,
        details=f"warmpath_{type(error).__name__}",
    )
    return pb.ProcessingResponse(immediate_response=immediate).SerializeToString()


def _printable(text: str) -> str:
    """Lone surrogates, which a JSON string may hold and UTF-8 may not, escaped; bounded."""
    return text[:MAX_ERROR_TEXT].encode("utf-8", "backslashreplace").decode()[:MAX_ERROR_TEXT]


def override_to_duplex(response_body: int) -> bytes:
    """Instead of a reply to the request's headers: send this request's body in full duplex, the rest as configured."""
    mode = _overridden(Mode.FULL_DUPLEX_STREAMED, response_body)
    return pb.ProcessingResponse(mode_override=mode).SerializeToString()


def _overridden(request_body: int, response_body: int) -> pb.ProcessingMode:
    return pb.ProcessingMode(
        request_body_mode=Mode.BodySendMode.ValueType(request_body),
        request_trailer_mode=Mode.SEND,
        response_header_mode=Mode.SEND,
        response_body_mode=Mode.BodySendMode.ValueType(response_body),
        response_trailer_mode=Mode.SEND,
    )


def request_chunks(body: bytes, *, end: bool) -> Iterable[bytes]:
    """A request's body as streamed responses, each made when it is asked for; `end` = no trailers follow."""
    return _chunks(b"\x1a", body, end)


def answer_chunks(body: bytes, *, end: bool) -> Iterable[bytes]:
    """A piece of an answer's body as streamed responses, each made when it is asked for."""
    return _chunks(b"\x22", body, end)


REQUEST, ANSWER = b"\x22", b"\x2a"
"""How a message begins that shows a piece of the request's body, or of the answer's."""


def piece(data: bytes, direction: bytes, tail: bytes) -> bytes | None:
    """The bytes of a body's piece, where the message is nothing but that piece and then `tail`; else None.

    It says what `decode` would: that a field fills all before `tail` is said by the bytes that begin it.
    """
    end = len(data) - len(tail)
    before, start = _start_of_piece(end, direction)
    return data[start:end] if start and data.startswith(before) and data.endswith(tail) else None


def tail(context: bytes, data: bytes) -> bytes | None:
    """What the messages end in, for `piece`, that have these metadata; where they are empty, as `data` does. None: they
    are too long.
    """
    if not context:
        return NO_METADATA if data.endswith(NO_METADATA) else b""
    return _tail(context) if len(context) <= LONGEST_KNOWN_METADATA else None


NO_METADATA = b"B\0"
"""How metadata of which there are none stand in a message: Envoy writes them even so."""


@lru_cache(1024)
def _tail(context: bytes) -> bytes:
    return b"B" + _varint(len(context)) + context


@lru_cache(8192)
def _start_of_piece(size: int, direction: bytes) -> tuple[bytes, int]:
    """How a field of so many bytes begins that holds a piece which is not the last, and how many bytes that takes; 0
    where none is so long, or the piece counts as large.

    ProcessingRequest{direction: HttpBody{1: body}}
    """
    least = 4 if size < 134 else 6 if size < 16_392 else 8  # bytes of two tags and two lengths
    for start in (least, least + 1):
        length = size - start
        if 0 < length <= protocol.MAX_CHUNK:
            body = b"\x0a" + _varint(length)
            before = direction + _varint(len(body) + length) + body
            if len(before) == start:
                return before, start
    return b"", 0


def _chunks(direction: bytes, body: bytes | memoryview, end: bool) -> Iterable[bytes]:
    size = len(body)
    if size <= protocol.MAX_CHUNK:
        return [b"".join((_before_chunk(direction, size, end), body, b"\x10\x01" if end else b""))]
    return _several_chunks(direction, memoryview(body), end)


def _several_chunks(direction: bytes, body: memoryview, end: bool) -> Iterable[bytes]:
    starts = range(0, len(body), protocol.MAX_CHUNK)
    for at in starts:
        yield from _chunks(direction, body[at : at + protocol.MAX_CHUNK], end and at == starts[-1])


def before_answer_chunk(size: int) -> bytes:
    """What `answer_chunks` puts before a piece of so many bytes that is not the last."""
    return _before_chunk(b"\x22", size, False)


@lru_cache(8192)
def _before_chunk(direction: bytes, size: int, end: bool) -> bytes:
    """All of a streamed body response that stands before the bytes of the chunk.

    ProcessingResponse{direction: BodyResponse{1: CommonResponse{3: BodyMutation{3: StreamedBodyResponse{1: body}}}}}
    """
    start = b"\x0a" + _varint(size) if size else b""
    inside = len(start) + size + (2 if end else 0)
    for tag in (b"\x1a", b"\x1a", b"\x0a", direction):
        head = tag + _varint(inside)
        start, inside = head + start, inside + len(head)
    return start


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


NOTHING: frozenset[str] = frozenset()
_HEADERS = pb.HeadersResponse(response=pb.CommonResponse())
_BODY = pb.BodyResponse(response=pb.CommonResponse())
REQUEST_HEADERS = pb.ProcessingResponse(request_headers=_HEADERS).SerializeToString()
REQUEST_BODY = pb.ProcessingResponse(request_body=_BODY).SerializeToString()
REQUEST_TRAILERS = pb.ProcessingResponse(request_trailers=pb.TrailersResponse()).SerializeToString()
ANSWER_HEADERS = pb.ProcessingResponse(response_headers=_HEADERS).SerializeToString()
ANSWER_BODY = pb.ProcessingResponse(response_body=_BODY).SerializeToString()
ANSWER_TRAILERS = pb.ProcessingResponse(response_trailers=pb.TrailersResponse()).SerializeToString()
"""Replies that change nothing."""
