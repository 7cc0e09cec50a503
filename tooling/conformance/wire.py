"""What a gateway says: ext_proc messages in the shapes that gateways give them."""

import json
from collections.abc import Iterable, Mapping
from typing import Final

from epp import protocol
from epp.extproc.proto import ext_proc_pb2 as pb

Message = pb.ProcessingRequest
Mode = pb.ProcessingMode
Headers = Mapping[str, str | bytes]


def modes(request: int, answer: int) -> pb.ProtocolConfiguration:
    """The body modes a gateway was configured with."""
    return pb.ProtocolConfiguration(
        request_body_mode=Mode.BodySendMode.ValueType(request), response_body_mode=Mode.BodySendMode.ValueType(answer)
    )


DUPLEX: Final = modes(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
LEAN: Final = modes(Mode.FULL_DUPLEX_STREAMED, Mode.NONE)
BUFFERED: Final = modes(Mode.BUFFERED, Mode.BUFFERED)


def chat(model: str, text: str = "Say hello.") -> bytes:
    """A chat completion's body, compact."""
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()


def completion(model: str, size: int = 0) -> bytes:
    """A completion's body, with a prompt that fills it up to `size` bytes."""
    body = json.dumps({"model": model, "prompt": ""}, separators=(",", ":")).encode()
    return body[:-2] + b"hello " * max(1, (size - len(body)) // 6) + b'"}'


def long_chat(model: str, size: int) -> bytes:
    """The same with a prompt of text that repeats nothing, of `size` bytes in all."""
    words = " ".join(str(number) for number in range(size // 4))
    empty = len(chat(model, ""))
    return chat(model, words[: size - empty])


def header_map(headers: Headers, *, raw: bool = True) -> pb.HeaderMap:
    """`raw`: in `raw_value`, as Envoy sends them; otherwise in `value`."""
    found = pb.HeaderMap()
    for name, value in headers.items():
        data = value if isinstance(value, bytes) else value.encode()
        entry = found.headers.add(key=name.encode())
        if raw:
            entry.raw_value = data
        else:
            entry.value = data
    return found


def request_headers(
    headers: Headers,
    *,
    end: bool = False,
    config: pb.ProtocolConfiguration | None = DUPLEX,
    context: pb.Metadata | None = None,
    raw: bool = True,
) -> Message:
    what = pb.HttpHeaders(headers=header_map(headers, raw=raw), end_of_stream=end)
    return Message(request_headers=what, protocol_config=config, metadata_context=context)


def request_body(body: bytes, *, end: bool = False, context: pb.Metadata | None = None) -> Message:
    """Envoy repeats the metadata context in each message, and some EPPs look at the last alone."""
    return Message(request_body=pb.HttpBody(body=body, end_of_stream=end), metadata_context=context)


def request_trailers() -> Message:
    return Message(request_trailers=pb.HttpTrailers(trailers=header_map({"x-checksum": "1"})))


def answer_headers(headers: Headers, *, served: str = "", end: bool = False) -> Message:
    what = pb.HttpHeaders(headers=header_map(headers), end_of_stream=end)
    value = pb.Value(string_value=served.encode())
    context = metadata(protocol.LB_NAMESPACE, protocol.SERVED, value) if served else None
    return Message(response_headers=what, metadata_context=context)


def answer_body(body: bytes, *, end: bool = False) -> Message:
    return Message(response_body=pb.HttpBody(body=body, end_of_stream=end))


def answer_trailers() -> Message:
    return Message(response_trailers=pb.HttpTrailers(trailers=header_map({"grpc-status": "0"})))


def metadata(namespace: str, key: str, value: pb.Value) -> pb.Metadata:
    fields = pb.Struct(fields=[pb.Struct.Entry(key=key.encode(), value=value)])
    return pb.Metadata(filter_metadata=[pb.Metadata.Entry(key=namespace.encode(), value=fields)])


def subset_list(addresses: Iterable[str]) -> pb.Metadata:
    """The restriction as the protocol has it."""
    values = [pb.Value(string_value=address.encode()) for address in addresses]
    return metadata(protocol.SUBSET_NAMESPACE, protocol.SUBSET, pb.Value(list_value=pb.ListValue(values=values)))


def subset_text(addresses: Iterable[str]) -> pb.Metadata:
    """The restriction as one comma-separated string."""
    text = ",".join(addresses).encode()
    return metadata(protocol.SUBSET_NAMESPACE, protocol.SUBSET, pb.Value(string_value=text))
