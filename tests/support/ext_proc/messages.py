"""The gateway's side of ext_proc for tests: messages to send, replies in words, a player of scripts."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from epp import protocol
from epp.errors import EppError
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.stream import Action, AnswerChunk, Answered, Memory, Stream
from epp.parsing.request import RawRequest

Mode = pb.ProcessingMode
HEADERS = {":method": "POST", ":path": "/v1/chat/completions", "content-type": "application/json"}
ANSWER = {":status": "200", "content-type": "application/json"}
EVENTS = {":status": "200", "content-type": "text/event-stream; charset=utf-8"}
TO = "10.0.0.1:8000,10.0.0.2:8000"


def header_map(headers: Mapping[str, str | bytes]) -> pb.HeaderMap:
    pairs = [(k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in headers.items()]
    return pb.HeaderMap(headers=[pb.HeaderValue(key=k, raw_value=v) for k, v in pairs])


def modes(request: int, response: int, *, swh: bool = False) -> pb.ProtocolConfiguration:
    return pb.ProtocolConfiguration(
        request_body_mode=Mode.BodySendMode.ValueType(request),
        response_body_mode=Mode.BodySendMode.ValueType(response),
        send_body_without_waiting_for_header_response=swh,
    )


DUPLEX = modes(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED)
LEAN = modes(Mode.FULL_DUPLEX_STREAMED, Mode.NONE)


def metadata(namespace: str, key: str, value: pb.Value) -> pb.Metadata:
    fields = pb.Struct(fields=[pb.Struct.Entry(key=key.encode(), value=value)])
    return pb.Metadata(filter_metadata=[pb.Metadata.Entry(key=namespace.encode(), value=fields)])


def request_headers(
    headers: Mapping[str, str | bytes] = HEADERS,
    *,
    end: bool = False,
    config: pb.ProtocolConfiguration | None = DUPLEX,
    context: pb.Metadata | None = None,
) -> bytes:
    what = pb.HttpHeaders(headers=header_map(headers), end_of_stream=end)
    return pb.ProcessingRequest(
        request_headers=what, protocol_config=config, metadata_context=context
    ).SerializeToString()


def request_body(body: bytes, *, end: bool = False) -> bytes:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=body, end_of_stream=end)).SerializeToString()


def request_trailers() -> bytes:
    return pb.ProcessingRequest(request_trailers=pb.HttpTrailers(trailers=header_map({"x-t": "1"}))).SerializeToString()


def answer_headers(headers: Mapping[str, str | bytes] = ANSWER, served: str = "", *, end: bool = False) -> bytes:
    context = metadata(protocol.LB_NAMESPACE, protocol.SERVED, pb.Value(string_value=served.encode()))
    what = pb.HttpHeaders(headers=header_map(headers), end_of_stream=end)
    return pb.ProcessingRequest(response_headers=what, metadata_context=context if served else None).SerializeToString()


def answer_body(body: bytes, *, end: bool = False, served: str = "") -> bytes:
    """`served`: as Envoy repeats it in each message of an answer."""
    context = metadata(protocol.LB_NAMESPACE, protocol.SERVED, pb.Value(string_value=served.encode()))
    what = pb.HttpBody(body=body, end_of_stream=end)
    return pb.ProcessingRequest(response_body=what, metadata_context=context if served else None).SerializeToString()


def answer_trailers() -> bytes:
    return pb.ProcessingRequest(response_trailers=pb.HttpTrailers()).SerializeToString()


# --- replies in words ------------------------------------------------------------------------------------------------


def words(reply: bytes) -> str:
    """One line that says all a reply says, so that a test can state it whole."""
    message = pb.ProcessingResponse.FromString(reply)
    kind = message.WhichOneof("response")
    if kind is None:
        mode = message.mode_override
        return f"override request={mode.request_body_mode} answer={mode.response_body_mode}"
    if kind == "immediate_response":
        return _refusal(message.immediate_response)
    side = kind.replace("_", " ").replace("response", "answer")
    if kind.endswith("trailers"):
        return side
    response = getattr(message, kind).response
    parts = [side, *_mutations(response, message)]
    if message.HasField("mode_override"):
        mode = message.mode_override
        request = f" request={mode.request_body_mode}" if kind == "request_headers" else ""
        parts.append(f"override{request} answer={mode.response_body_mode}")
    if kind.endswith("body") and response.HasField("body_mutation"):
        parts.append(_body(response.body_mutation))
    return " ".join(parts)


def _refusal(immediate: pb.ImmediateResponse) -> str:
    headers = {o.header.key.decode(): o.header.raw_value.decode() for o in immediate.headers.set_headers}
    error = json.loads(immediate.body)["error"]
    assert headers.pop("content-type") == "application/json"
    assert headers.get(protocol.DROP_REASON) == error["code"]
    return f"refused {immediate.status.code} {error['type']}" + (f" {error['code']}" if error["code"] else "")


def _mutations(response: pb.CommonResponse, message: pb.ProcessingResponse) -> Iterable[str]:
    sets = {o.header.key.decode(): o.header.raw_value.decode() for o in response.header_mutation.set_headers}
    assert all(o.append_action == o.OVERWRITE_IF_EXISTS_OR_ADD for o in response.header_mutation.set_headers)
    destination = sets.pop(protocol.DESTINATION, None)
    reported = {
        (outer.key.decode(), inner.key.decode()): inner.value.string_value.decode()
        for outer in message.dynamic_metadata.fields
        for inner in outer.value.struct_value.fields
    }
    assert reported == ({(protocol.LB_NAMESPACE, protocol.DESTINATION): destination} if destination else {})
    if destination:
        assert response.clear_route_cache
        yield f"to {destination}"
    yield from (f"set {name}={value}" for name, value in sets.items())
    yield from (f"drop {name}" for name in response.header_mutation.remove_headers)


def _body(mutation: pb.BodyMutation) -> str:
    if mutation.HasField("streamed_response"):
        piece = mutation.streamed_response
        return f"echo {short(piece.body)}" + (" end" if piece.end_of_stream else "")
    return "cleared" if mutation.clear_body else f"replaced by {short(mutation.body)}"


def short(body: bytes) -> str:
    return repr(body)[1:] if len(body) < 40 else f"{len(body)} bytes"


# --- scripts ---------------------------------------------------------------------------------------------------------


@dataclass
class Script:
    """What comes in and, after each message, what must go out. How `TO` is answered is `headers`, `body`, `error`."""

    name: str
    steps: list[tuple[bytes, list[str]]]
    routes: int = 1
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | None = None
    renamed: tuple[str, str] | None = None
    error: EppError | None = None
    answer_headers: dict[str, str] = field(default_factory=dict)
    seen: list[Answered | AnswerChunk] | None = None
    """What whoever watches the answer must have been shown, where that is the point."""
    ends: bool = False
    """The server ends the stream itself."""


class Play:
    """Runs a `Stream` as a server does, without sockets."""

    def __init__(self, script: Script, memory: Memory | None = None, max_body: int = 1 << 20) -> None:
        self.script = script
        self.memory = memory or Memory(1 << 30)
        self.stream = Stream(max_body, self.memory)
        self.requests: list[RawRequest] = []
        self.seen: list[Answered | AnswerChunk] = []

    def send(self, message: bytes) -> list[bytes]:
        replies: list[bytes] = []
        actions: list[Action] = list(self.stream.receive(message))
        while actions:
            action = actions.pop(0)
            if isinstance(action, bytes):
                replies.append(action)
            elif isinstance(action, RawRequest):
                self.requests.append(action)
                script = self.script
                if script.error is not None:
                    actions += self.stream.failed(script.error)
                else:
                    actions += self.stream.routed(TO, script.headers, script.body, script.renamed)
            else:
                self.seen.append(action)
                if isinstance(action, Answered):
                    actions.append(self.stream.answered(self.script.answer_headers))
        if self.requests:
            self.stream.sent()
        return replies
