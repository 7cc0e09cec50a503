"""Reading what gateways say, and the replies that are not made by protobuf."""

import json

import pytest
from google.protobuf.message import DecodeError

from epp import protocol
from epp.errors import EppError, NoEndpoint, OwnAnswer, RateLimited, TooLarge
from epp.extproc import messages
from epp.extproc.proto import ext_proc_pb2 as pb
from tests.support.ext_proc.messages import answer_body, answer_headers, header_map, metadata, request_headers


def subset_of(value: pb.Value) -> tuple[str, ...] | None:
    context = metadata(protocol.SUBSET_NAMESPACE, protocol.SUBSET, value)
    message = messages.decode(request_headers(context=context))
    return messages.subset(message.metadata_context)


def listed(*addresses: str) -> pb.Value:
    return pb.Value(list_value=pb.ListValue(values=[pb.Value(string_value=a.encode()) for a in addresses]))


@pytest.mark.parametrize(
    ("reported", "subset"),
    [
        (listed("10.0.0.1:8000", "10.0.0.2:8001"), ("10.0.0.1:8000", "10.0.0.2:8001")),
        (listed("10.0.0.1"), ("10.0.0.1",)),
        (listed("[2001:DB8:0::1]:8000", "[::1]", "::1", "2001:db8::1"), ("[2001:db8::1]:8000", "::1", "2001:db8::1")),
        (listed(" 10.0.0.1:8000 ", "", "10.0.0.1:8000"), ("10.0.0.1:8000",)),
        (listed("not an address", "x" * 500), ("not an address", "x" * 500)),
        (pb.Value(string_value=b"10.0.0.1:8000, [::1]:80,,10.0.0.2"), ("10.0.0.1:8000", "[::1]:80", "10.0.0.2")),
        (pb.Value(string_value=b"\xff:1"), ("\\xff:1",)),
        (pb.Value(string_value=b""), ()),
        (listed(), ()),
        (pb.Value(number_value=1), ()),
        (pb.Value(null_value=0), ()),
        (pb.Value(bool_value=True), ()),
        (pb.Value(struct_value=pb.Struct()), ()),
        (pb.Value(list_value=pb.ListValue(values=[pb.Value(number_value=1), pb.Value()])), ()),
        (pb.Value(), ()),
    ],
)
def test_subset(reported: pb.Value, subset: tuple[str, ...]) -> None:
    assert subset_of(reported) == subset


@pytest.mark.parametrize(
    "context",
    [
        None,
        pb.Metadata(),
        metadata("envoy.lb", protocol.SUBSET, listed("x")),
        metadata("envoy.lb.subset_hint", "k", listed()),
    ],
)
def test_no_subset(context: pb.Metadata | None) -> None:
    message = messages.decode(request_headers(context=context))
    assert messages.subset(message.metadata_context) is None


def read(headers: pb.HeaderMap) -> dict[str, str]:
    message = received(pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=headers)))
    return messages.request_headers(message.request_headers, 100)


def received(message: pb.ProcessingRequest) -> messages.Incoming:
    return messages.decode(message.SerializeToString())


def test_header_names_are_lower_case_and_values_are_text() -> None:
    headers = pb.HeaderMap(
        headers=[
            pb.HeaderValue(key=b"Content-Type", value=b"text/plain"),
            pb.HeaderValue(key=b"x-raw", value=b"not this", raw_value=b"this"),
            pb.HeaderValue(key=b"x-odd\xff", raw_value=b"\xc3\xa9\xff"),
            pb.HeaderValue(),
        ]
    )
    assert read(headers) == {"content-type": "text/plain", "x-raw": "this", "x-odd\\xff": "é\\xff", "": ""}


def test_a_header_that_comes_again_is_joined() -> None:
    twice = pb.HeaderMap(
        headers=[*header_map({"x": "1", "cookie": "a"}).headers, *header_map({"X": "2", "cookie": "b"}).headers]
    )
    assert read(twice) == {"x": "1, 2", "cookie": "a; b"}


def test_too_many_headers_and_too_many_bytes_of_them() -> None:
    few = pb.ProcessingRequest(request_headers=pb.HttpHeaders())
    many = pb.ProcessingRequest(request_headers=pb.HttpHeaders(headers=header_map({f"h{i}": "" for i in range(1_001)})))
    with pytest.raises(TooLarge, match="1001 fields"):
        messages.request_headers(received(many).request_headers, 100)
    with pytest.raises(TooLarge, match="2000000 bytes"):
        messages.request_headers(received(few).request_headers, 2_000_000)


@pytest.mark.parametrize(
    ("headers", "served", "answer"),
    [
        ({":status": "200", "content-type": "a/b"}, "10.0.0.1:8000", (200, "10.0.0.1:8000", "a/b")),
        ({":Status": "404", "Content-Type": b"\xff"}, "[0::1]:80", (404, "[::1]:80", "\\xff")),
        ({":status": "many"}, "", (0, "", "")),
        ({":status": "²00"}, "", (0, "", "")),
        ({}, "", (0, "", "")),
    ],
)
def test_answer(headers: dict[str, str | bytes], served: str, answer: tuple[int, str, str]) -> None:
    message = messages.decode(answer_headers(headers, served))
    assert messages.answer(message, message.metadata_context) == answer


def test_served_of_a_wrong_type_is_no_address() -> None:
    message = pb.ProcessingRequest(
        response_headers=pb.HttpHeaders(),
        metadata_context=metadata(protocol.LB_NAMESPACE, protocol.SERVED, pb.Value(number_value=3)),
    )
    seen = received(message)
    assert messages.answer(seen, seen.metadata_context) == (0, "", "")


@pytest.mark.parametrize("size", [0, 1, 100, 127, 128, 16_383, 16_384, 61_999, 62_000])
@pytest.mark.parametrize("end", [True, False])
def test_a_chunk_is_the_same_as_protobuf_makes_it(size: int, end: bool) -> None:
    body = bytes(i % 251 for i in range(size))
    piece = pb.BodyResponse(
        response=pb.CommonResponse(
            body_mutation=pb.BodyMutation(streamed_response=pb.StreamedBodyResponse(body=body, end_of_stream=end))
        )
    )
    for made, wanted in (
        (messages.request_chunks(body, end=end), pb.ProcessingResponse(request_body=piece)),
        (messages.answer_chunks(body, end=end), pb.ProcessingResponse(response_body=piece)),
    ):
        assert list(made) == [wanted.SerializeToString()]


@pytest.mark.parametrize("size", [62_001, 124_000, 124_001, 1_000_000])
def test_chunks_are_bounded_and_add_up(size: int) -> None:
    body = bytes(i % 251 for i in range(size))
    parsed = [pb.ProcessingResponse.FromString(m) for m in messages.answer_chunks(body, end=True)]
    pieces = [m.response_body.response.body_mutation.streamed_response for m in parsed]
    assert b"".join(piece.body for piece in pieces) == body
    assert max(len(piece.body) for piece in pieces) == protocol.MAX_CHUNK
    assert [piece.end_of_stream for piece in pieces] == [False] * (len(pieces) - 1) + [True]


SERVED = metadata(protocol.LB_NAMESPACE, protocol.SERVED, pb.Value(string_value=b"10.0.0.1:8000"))


@pytest.mark.parametrize("context", [None, pb.Metadata(), SERVED])
@pytest.mark.parametrize(
    "size", [*range(1, 140), 16_375, 16_380, 16_381, 16_382, 16_383, 16_384, 16_385, 16_386, 61_999, 62_000]
)
def test_a_piece_is_read_as_if_it_had_been_decoded(size: int, context: pb.Metadata | None) -> None:
    chunk = bytes(i % 251 for i in range(size))
    body = pb.HttpBody(body=chunk)
    for direction, message in (
        (messages.ANSWER, pb.ProcessingRequest(response_body=body, metadata_context=context)),
        (messages.REQUEST, pb.ProcessingRequest(request_body=body, metadata_context=context)),
    ):
        data = message.SerializeToString()
        tail = messages.tail(messages.decode(data).metadata_context, data)
        assert tail is not None
        assert messages.piece(data, direction, tail) == chunk
    assert messages.before_answer_chunk(size) + chunk == b"".join(messages.answer_chunks(chunk, end=False))


def test_long_metadata_are_not_looked_for() -> None:
    assert messages.tail(bytes(messages.LONGEST_KNOWN_METADATA + 1), b"") is None


@pytest.mark.parametrize("size", [0, 62_001])
def test_a_piece_that_is_empty_or_large_is_decoded(size: int) -> None:
    assert messages.piece(answer_body(bytes(size)), messages.ANSWER, b"") is None


@pytest.mark.parametrize(
    "message",
    [
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"word", end_of_stream=True)),
        pb.ProcessingRequest(response_body=pb.HttpBody(end_of_stream=True)),
        pb.ProcessingRequest(request_body=pb.HttpBody(body=b"word")),
        pb.ProcessingRequest(response_body=pb.HttpBody(body=b"word"), observability_mode=True),
        pb.ProcessingRequest(response_headers=pb.HttpHeaders()),
        pb.ProcessingRequest(),
    ],
)
@pytest.mark.parametrize("tail", [b"", b"B\0"])
def test_no_other_message_is_taken_for_a_piece(message: pb.ProcessingRequest, tail: bytes) -> None:
    data = message.SerializeToString()
    assert messages.piece(data, messages.ANSWER, tail) is None
    assert messages.piece(data + tail, messages.ANSWER, tail) is None


@pytest.mark.parametrize(
    ("direction", "which"), [(messages.ANSWER, "response_body"), (messages.REQUEST, "request_body")]
)
def test_what_is_taken_for_a_piece_is_what_protobuf_reads(direction: bytes, which: str) -> None:
    """Bytes that a piece's message differs in by one, at every place."""
    context = b"B\x04\x0a\x02\x0a\x00"
    good = direction + answer_body(b"some words")[1:] + context
    taken = 0
    for at in range(len(good)):
        for byte in (0, 1, 2, 9, 10, 11, 12, 13, 14, 34, 42, 66, 127, 128, 255):
            data = good[:at] + bytes([byte]) + good[at + 1 :]
            chunk = messages.piece(data, direction, context)
            if chunk is not None:
                taken += 1
                message = messages.decode(data)
                assert message.WhichOneof("request") == which
                body = message.request_body if which == "request_body" else message.response_body
                assert (body.body, body.end_of_stream) == (chunk, False)
    assert taken > 100, "those whose words differ"


def refused(error: EppError) -> pb.ImmediateResponse:
    return pb.ProcessingResponse.FromString(messages.refusal(error)).immediate_response


def test_a_refusal_is_openai_json() -> None:
    answer = refused(NoEndpoint("nobody", reason=protocol.DROP_NO_ENDPOINTS))
    assert answer.status.code == 503
    assert json.loads(answer.body) == {
        "error": {
            "message": "nobody",
            "type": "service_unavailable_error",
            "param": None,
            "code": "rejected-no-endpoints",
        }
    }
    headers = {option.header.key: option.header.raw_value for option in answer.headers.set_headers}
    assert headers == {
        b"content-type": b"application/json",
        b"x-llm-d-request-dropped-reason": b"rejected-no-endpoints",
    }


def test_an_answer_of_our_own_is_its_body() -> None:
    reply = refused(OwnAnswer(b'{"object":"list","data":[]}'))
    assert (reply.status.code, reply.body) == (200, b'{"object":"list","data":[]}')
    assert [header.header.key for header in reply.headers.set_headers] == [b"content-type"]


def test_a_refusal_has_its_own_code_and_headers() -> None:
    answer = refused(RateLimited("later", code="rate_limit_exceeded", reason="why", headers={"retry-after": "7"}))
    assert answer.status.code == 429
    assert json.loads(answer.body)["error"]["code"] == "rate_limit_exceeded"
    headers = {option.header.key: option.header.raw_value for option in answer.headers.set_headers}
    assert headers[b"retry-after"] == b"7"


def test_a_refusal_of_any_text_is_bounded_json() -> None:
    answer = refused(EppError("\ud800" + "x" * 10_000, param="\udfff"))
    error = json.loads(answer.body)["error"]
    assert error["message"].startswith("\\ud800xxx")
    assert len(error["message"]) == 1_000
    assert error["param"] == "\\udfff"
    assert answer.status.code == 500


def test_bytes_that_are_no_message() -> None:
    for data in (b"\xff", request_headers()[:-1]):
        with pytest.raises(DecodeError):
            messages.decode(data)


def test_parts_that_are_none_are_found_when_they_are_read() -> None:
    broken = pb.Incoming(metadata_context=b"\xff" + protocol.SUBSET_NAMESPACE.encode(), protocol_config=b"\xff")
    broken.request_headers.headers.headers.append(b"\xff")
    for read in (
        lambda: messages.subset(broken.metadata_context),
        lambda: messages.modes(broken),
        lambda: messages.request_headers(broken.request_headers, 100),
    ):
        with pytest.raises(DecodeError):
            read()


def test_more_headers_than_are_kept_are_all_read() -> None:
    for first in range(0, 2 * messages.KNOWN_HEADERS, 1_000):
        sent = {f"x-{number}": str(number) for number in range(first, first + 1_000)}
        assert read(header_map(sent)) == sent
    long = {"x-long": "y" * messages.LONGEST_KNOWN}
    assert read(header_map(long)) == long
    assert len(messages._known_headers) <= messages.KNOWN_HEADERS
    assert max(map(len, messages._known_headers)) <= messages.LONGEST_KNOWN
