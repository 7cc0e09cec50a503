import pytest

from epp.errors import NoEndpoint
from epp.extproc import messages
from epp.extproc.proto import ext_proc_pb2 as pb
from tooling.conformance import replies
from tooling.conformance.verdict import Failed


def reply(data: bytes) -> replies.Reply:
    return replies.decoded(data)


ROUTED = reply(messages.routed_headers("10.0.0.1:80, [::1]:81", {"X-A": "1"}, frozenset({"x-b"}), 3))


def test_a_routed_request_is_read() -> None:
    forwarded = replies.Forwarded(ROUTED, [b"a", b"bc"])
    assert forwarded.body == b"abc"
    assert forwarded.addresses == ["10.0.0.1:80", "[::1]:81"]
    assert replies.destination_metadata(ROUTED) == forwarded.destination
    assert set(replies.set_headers(forwarded.common)) == {"x-a", "content-length", "x-gateway-destination-endpoint"}
    assert str(forwarded) == "the request routed to 10.0.0.1:80, [::1]:81"


def test_each_kind_of_reply_has_its_words() -> None:
    assert replies.kind(ROUTED) == "a reply to the request's headers"
    assert replies.kind(reply(messages.ANSWER_TRAILERS)) == "a reply to the answer's trailers"
    assert replies.kind(pb.ProcessingResponse()) == "a message without a reply"
    assert replies.kind(reply(messages.refusal(NoEndpoint("gone")))).startswith("an ImmediateResponse 503 '{")


def test_bytes_that_are_no_reply_are_a_failure() -> None:
    with pytest.raises(Failed, match="a ProcessingResponse; got bytes that are none"):
        replies.decoded(b"\xff")


def test_a_missing_and_an_empty_destination_are_failures() -> None:
    with pytest.raises(Failed, match="a reply without it"):
        replies.destination_header(pb.CommonResponse())
    with pytest.raises(Failed, match="an empty one"):
        replies.destination_header(replies.Forwarded(reply(messages.routed_headers("", {}, frozenset(), None))).common)
    assert replies.destination_metadata(pb.ProcessingResponse()) is None


def test_addresses_are_compared_as_addresses() -> None:
    replies.check_addresses(["10.0.0.1:80", "[::1]:80"])
    replies.check_within(["[0:0::1]:80"], ("[::1]:80",))
    with pytest.raises(Failed, match=r"got ::1:80, 10\.0\.0\.1"):
        replies.check_addresses(["::1:80", "10.0.0.1"])
    with pytest.raises(Failed, match=r"one of 10\.0\.0\.1:80; got 10\.0\.0\.1:81"):
        replies.check_within(["10.0.0.1:80", "10.0.0.1:81"], ("10.0.0.1:80",))


def test_only_a_streamed_response_is_a_piece_of_a_body() -> None:
    [chunk] = messages.request_chunks(b"x", end=True)
    piece = replies.streamed(reply(chunk), "request_body")
    assert (piece.body, piece.end_of_stream) == (b"x", True)
    with pytest.raises(Failed, match="got a reply to the request's body"):
        replies.streamed(reply(messages.REQUEST_BODY), "response_body")
    with pytest.raises(Failed, match="without body_mutation"):
        replies.streamed(reply(messages.REQUEST_BODY), "request_body")
    with pytest.raises(Failed, match="body_mutation body"):
        replies.streamed(reply(messages.replaced_chunk(b"x")), "request_body")


def test_a_difference_is_shown_where_it_is() -> None:
    replies.check_same(b"same", b"same", "a body")
    with pytest.raises(Failed, match=r"a body of 20 bytes unchanged, at byte 15 '.*'; got 16 bytes, there '.*!'"):
        replies.check_same(b"012345678901234!", b"01234567890123456789", "a body")
    with pytest.raises(Failed, match="at byte 3"):
        replies.check_same(b"012", b"0123", "a body")
    assert replies.quoted(b"\xff" + b"a" * 100).endswith("a'…")
