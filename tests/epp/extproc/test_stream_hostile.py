"""Broken, hostile and unlucky gateways: 20,000 mutated streams, each with a defined outcome and nothing left behind."""

import random
from collections.abc import Iterator

from hypothesis import given, settings
from hypothesis import strategies as st

from epp import protocol
from epp.errors import NoEndpoint
from epp.extproc.proto import ext_proc_pb2 as pb
from tests.support.ext_proc.hostile import GIANT, MESSAGES, mutated
from tests.support.ext_proc.messages import (
    Play,
    Script,
    answer_body,
    answer_headers,
    metadata,
    request_body,
)  # fmt: skip

STREAMS = 20_000
MAX_BODY = 200_000


BEHAVIOURS = [
    Script("plain", []),
    Script("headers", [], headers={"x-a": "1"}, answer_headers={"x-b": "2"}),
    Script("body", [], body=GIANT),
    Script("empty body", [], body=b""),
    Script("error", [], error=NoEndpoint("nobody")),
]


def lawful(replies: list[bytes]) -> Iterator[str]:
    """What each reply is, having checked what must hold of any sequence of them."""
    kinds: list[str] = []
    destinations = 0
    for reply in replies:
        assert "immediate_response" not in kinds, "something was said after the refusal"
        message = pb.ProcessingResponse.FromString(reply)
        kind = message.WhichOneof("response") or "mode_override"
        if kind in ("request_body", "request_trailers"):
            assert "request_headers" in kinds, "body before headers"
        if kind in ("request_body", "response_body"):
            piece = getattr(message, kind).response.body_mutation.streamed_response
            assert len(piece.body) <= protocol.MAX_CHUNK
        if kind == "request_headers":
            assert kinds.count(kind) == 0
        destinations += message.HasField("dynamic_metadata")
        kinds.append(kind)
    assert destinations <= 1
    yield from kinds


def run(stream: list[bytes], behaviour: Script) -> set[str]:
    play = Play(behaviour, max_body=MAX_BODY)
    replies: list[bytes] = []
    for message in stream:
        was_finished = play.stream.finished
        said = play.send(message)
        assert not (was_finished and said), "a finished stream spoke"
        assert play.memory.held <= MAX_BODY + max(map(len, stream))
        replies += said
    assert len(play.requests) <= 1
    if play.requests:
        assert len(play.requests[0].body) <= MAX_BODY
    play.stream.release()
    assert play.memory.held == 0
    return set(lawful(replies))


def test_mutated_streams() -> None:
    rnd = random.Random(3)
    kinds: set[str] = set()
    for _ in range(STREAMS):
        kinds |= run(mutated(rnd), rnd.choice(BEHAVIOURS))
    assert kinds == {
        "request_headers", "request_body", "request_trailers", "response_headers", "response_body",
        "response_trailers", "immediate_response", "mode_override",
    }  # fmt: skip


@settings(max_examples=200)
@given(
    st.lists(st.one_of(st.sampled_from(MESSAGES), st.binary(max_size=200)), max_size=12), st.sampled_from(BEHAVIOURS)
)
def test_any_messages_in_any_order(stream: list[bytes], behaviour: Script) -> None:
    run(stream, behaviour)


headers = st.dictionaries(st.binary(max_size=30), st.binary(max_size=60), max_size=12)
values = st.recursive(
    st.one_of(
        st.builds(lambda raw: pb.Value(string_value=raw), st.binary(max_size=80)),
        st.builds(lambda number: pb.Value(number_value=number), st.floats()),
        st.just(pb.Value()),
    ),
    lambda inner: st.builds(lambda many: pb.Value(list_value=pb.ListValue(values=many)), st.lists(inner, max_size=4)),
    max_leaves=8,
)


@settings(max_examples=200)
@given(headers, values, st.integers(0, 9), st.integers(0, 9), st.booleans())
def test_any_headers_metadata_and_modes(
    pairs: dict[bytes, bytes], value: pb.Value, request: int, answer: int, end: bool
) -> None:
    entries = [pb.HeaderValue(key=key, raw_value=raw) for key, raw in pairs.items()]
    config = pb.ProtocolConfiguration()
    config.ParseFromString(bytes([8, request, 16, answer]))
    first = pb.ProcessingRequest(
        request_headers=pb.HttpHeaders(headers=pb.HeaderMap(headers=entries), end_of_stream=end),
        metadata_context=metadata(protocol.SUBSET_NAMESPACE, protocol.SUBSET, value),
        protocol_config=config,
    )
    stream = [first.SerializeToString(), request_body(b"{}", end=True), answer_headers(), answer_body(b"x", end=True)]
    run(stream, BEHAVIOURS[0])
