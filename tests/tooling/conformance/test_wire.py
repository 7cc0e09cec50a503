import json

from epp import protocol
from epp.extproc import messages
from tooling.conformance import wire


def test_bodies_have_the_size_asked_for() -> None:
    assert json.loads(wire.chat("m", "ü"))["messages"] == [{"role": "user", "content": "ü"}]
    body = wire.long_chat("m", 100_000)
    assert len(body) == 100_000
    assert json.loads(body)["model"] == "m"
    assert json.loads(wire.completion("m"))["prompt"] == "hello "
    assert 99_990 < len(wire.completion("m", 100_000)) <= 100_000


def test_headers_go_into_the_field_asked_for() -> None:
    raw = wire.header_map({"a": "1", "b": b"\xff"}).headers
    assert [(entry.key, entry.value, entry.raw_value) for entry in raw] == [(b"a", b"", b"1"), (b"b", b"", b"\xff")]
    assert wire.header_map({"a": "1"}, raw=False).headers[0].value == b"1"


def received(message: wire.Message) -> messages.Incoming:
    return messages.decode(message.SerializeToString())


def test_the_doors_reader_understands_both_forms_of_a_subset() -> None:
    addresses = ("10.0.0.1:80", "[::1]:80")
    for context in (wire.subset_list(addresses), wire.subset_text(addresses)):
        assert messages.subset(received(wire.request_headers({}, context=context)).metadata_context) == addresses
    assert messages.subset(received(wire.request_headers({}, context=wire.subset_list([]))).metadata_context) == ()
    assert messages.subset(received(wire.request_headers({})).metadata_context) is None


def test_answers_carry_status_and_who_served() -> None:
    message = received(wire.answer_headers({":status": "200", "content-type": "a/b"}, served="10.0.0.1:80"))
    assert messages.answer(message, message.metadata_context) == (200, "10.0.0.1:80", "a/b")
    assert protocol.SERVED.encode() not in wire.answer_headers({":status": "200"}).SerializeToString()


def test_the_other_messages_say_what_they_are() -> None:
    restricted = wire.request_body(b"x", end=True, context=wire.subset_list(["10.0.0.1:80"]))
    assert restricted.request_body.end_of_stream
    assert messages.subset(received(restricted).metadata_context) == ("10.0.0.1:80",)
    assert wire.answer_body(b"x").response_body.body == b"x"
    assert wire.request_trailers().HasField("request_trailers")
    assert wire.answer_trailers().HasField("response_trailers")
    assert wire.LEAN.response_body_mode == wire.Mode.NONE
