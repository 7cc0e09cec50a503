"""The state machine alone: the scripts, what it holds, and what it hands on."""

import tracemalloc
from itertools import pairwise

import pytest

from epp.errors import InternalError
from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.stream import KNOWN_ENDS, LONGEST_END, AnswerChunk, Answered, Memory, Stream, _ends
from epp.parsing.request import RawRequest
from tests.support.ext_proc.messages import (
    LEAN,
    TO,
    Play,
    Script,
    answer_body,
    answer_headers,
    answer_trailers,
    metadata,
    modes,
    request_body,
    request_headers,
    words,
)  # fmt: skip
from tests.support.ext_proc.scripts import BIG, BUFFERED, NONE, ROUTED, SCRIPTS, SWH, WEBSOCKET

END = pb.HttpBody(end_of_stream=True)


def about(text: str) -> pb.Metadata:
    """Metadata that say this."""
    return metadata("here", "said", pb.Value(string_value=text.encode()))


ENDS_WITH_METADATA = (
    pb.ProcessingRequest(request_body=END, metadata_context=about("request")).SerializeToString(),
    pb.ProcessingRequest(response_body=END, metadata_context=about("answer")).SerializeToString(),
)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_script(script: Script) -> None:
    play = Play(script)
    for number, (message, expected) in enumerate(script.steps):
        assert [words(reply) for reply in play.send(message)] == expected, f"after message {number}"
    assert len(play.requests) == script.routes
    assert play.stream.finished == script.ends
    if script.seen is not None:
        assert play.seen == script.seen
    play.stream.release()
    assert play.memory.held == 0


def test_which_pieces_of_an_answer_need_not_be_received() -> None:
    play = Play(Script("", []))
    for message in (request_headers(), request_body(b"{}", end=True)):
        play.send(message)
        assert play.stream.tail is None
    data = answer_headers(served=TO)
    play.send(data)
    assert play.stream.tail == data.removeprefix(answer_headers()), "those with the same metadata"
    for served in ("", TO, ""):
        data = answer_body(b"word", served=served)
        play.send(data)
        assert play.stream.tail == data.removeprefix(answer_body(b"word"))
    play.send(answer_body(b"", end=True))
    assert play.stream.tail is None
    play.send(answer_body(b"late"))
    assert play.stream.tail is None
    play.send(answer_headers(served=TO))
    assert play.stream.tail is None, "what comes after the end is not passed on"


@pytest.mark.parametrize("message", [b"\xff", request_headers(), answer_trailers(), answer_body(b"x" * 62_001)])
def test_after_other_messages_the_next_piece_is_received(message: bytes) -> None:
    play = Play(Script("", []))
    for each in (request_headers(), request_body(b"{}", end=True), answer_headers(), *[answer_body(b"word")] * 2):
        play.send(each)
    assert play.stream.tail == b""
    play.send(message)
    assert play.stream.tail is None


def test_ends_that_are_known_are_as_those_that_are_not() -> None:
    """A body's end has the same bytes for many requests, and is decoded once."""
    for ends in ((request_body(b"", end=True), answer_body(b"", end=True)), ENDS_WITH_METADATA) * 2:
        play = Play(Script("", []))
        for message in (request_headers(), request_body(b"{}"), ends[0]):
            play.send(message)
        assert [request.body for request in play.requests] == [b"{}"]
        for message in (answer_headers(), answer_body(b"word"), ends[1]):
            play.send(message)
        assert play.seen[1:] == [AnswerChunk(b"word", False), AnswerChunk(b"", True)]
        assert play.send(answer_body(b"late")) == []
    assert {*ENDS_WITH_METADATA} <= {*_ends}
    early = Play(Script("", []))
    assert [words(reply)[:11] for reply in early.send(ENDS_WITH_METADATA[0])] == ["refused 400"]


def test_few_ends_are_known_and_no_long_ones() -> None:
    for number in range(KNOWN_ENDS + 1):
        play = Play(Script("", []))
        play.send(request_headers())
        play.send(pb.ProcessingRequest(request_body=END, metadata_context=about(f"{number}")).SerializeToString())
        assert len(play.requests) == 1
        assert len(_ends) <= KNOWN_ENDS
    play = Play(Script("", []))
    play.send(request_headers())
    long = pb.ProcessingRequest(request_body=END, metadata_context=about("x" * LONGEST_END)).SerializeToString()
    play.send(long)
    assert len(play.requests) == 1
    assert long not in _ends


@pytest.mark.parametrize("first", [None, pb.Metadata(), about("this")])
@pytest.mark.parametrize("later", [None, pb.Metadata(), about("this"), about("that")])
def test_pieces_of_a_request_arrive_whatever_metadata_come_with_them(
    first: pb.Metadata | None, later: pb.Metadata | None
) -> None:
    play = Play(Script("", []))
    play.send(request_headers(context=first))
    for piece in (b"some ", b"words", b" and " * 100):
        message = pb.ProcessingRequest(request_body=pb.HttpBody(body=piece), metadata_context=later)
        assert play.send(message.SerializeToString()) == []
    play.send(request_body(b"more", end=True))
    assert [request.body for request in play.requests] == [b"some words" + b" and " * 100 + b"more"]


def test_where_an_answer_is_not_echoed_as_it_is_all_of_it_is_received() -> None:
    for script, config in (
        (Script("", [], body=b"{}", renamed=("a", "b")), None),
        (Script("", []), modes(BUFFERED, BUFFERED)),
    ):
        play = Play(script)
        messages = (request_headers(config=config), request_body(b"{}", end=True), answer_headers())
        for each in (*messages, *[answer_body(b"word")] * 3):
            play.send(each)
        assert play.stream.tail is None


@pytest.mark.parametrize("cuts", [[], [0], [1], [7, 7, 8], [61_999, 62_000, 62_001], list(range(0, 153_600, 1_009))])
@pytest.mark.parametrize("own_end", [True, False])
def test_a_body_split_anywhere_arrives_whole(cuts: list[int], own_end: bool) -> None:
    play = Play(Script("", []))
    play.send(request_headers())
    pieces = [BIG[a:b] for a, b in pairwise([0, *cuts, len(BIG)])]
    messages = [request_body(piece, end=own_end and i == len(pieces) - 1) for i, piece in enumerate(pieces)]
    if not own_end:
        messages.append(request_body(b"", end=True))
    replies = [words(reply) for message in messages for reply in play.send(message)]
    assert replies[1:] == ["request body echo 62000 bytes"] * 2 + ["request body echo 29600 bytes end"]
    assert play.requests[0].body == BIG


def test_what_a_websocket_sends_before_it_is_routed_follows_it_and_is_bounded() -> None:
    stream = Stream(8, Memory(1 << 30))
    [request] = stream.receive(request_headers(WEBSOCKET))
    assert isinstance(request, RawRequest)
    assert (request.method, request.body, request.sees_answer) == ("GET", b"", False)
    assert [stream.receive(request_body(each)) for each in (b"ear", b"ly")] == [[], []]
    assert [words(reply) for reply in stream.routed(TO, {}, None)] == [ROUTED, "request body echo 'early'"]
    stream = Stream(8, Memory(1 << 30))
    stream.receive(request_headers(WEBSOCKET))
    stream.receive(request_body(b"12345678"))
    [refused] = stream.receive(request_body(b"9"))
    assert isinstance(refused, bytes)
    assert words(refused).startswith("refused 413")


def test_pieces_of_a_websocket_are_all_received() -> None:
    """They are passed on, but are no answer's, so nobody is shown them."""
    play = Play(Script("", []))
    for message in (request_headers(WEBSOCKET), answer_headers({":status": "101"}), *[answer_body(b"word")] * 3):
        play.send(message)
        assert play.stream.tail is None
    assert play.seen == [Answered(101, "", "")]


def test_a_large_body_is_neither_joined_nor_cut_up_at_once() -> None:
    play, piece = Play(Script("", []), max_body=1 << 25), bytes(1 << 16)
    tracemalloc.start()
    try:
        play.stream.receive(request_headers())
        for _ in range(256):
            play.stream.receive(request_body(piece))
        (raw,) = play.stream.receive(request_body(b"", end=True))
        assert isinstance(raw, RawRequest)
        replies = play.stream.routed(TO, {}, None)
        assert sum(1 for _ in replies) > 256
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(raw.body) == 1 << 24
    assert most < 1.5 * len(raw.body), "no second copy was made of it"


def test_what_is_echoed_is_what_came() -> None:
    from epp.extproc.proto import ext_proc_pb2 as pb

    play = Play(Script("", []))
    play.send(request_headers())
    parsed = [pb.ProcessingResponse.FromString(reply) for reply in play.send(request_body(BIG, end=True))]
    pieces = [message.request_body.response.body_mutation.streamed_response for message in parsed[1:]]
    assert b"".join(piece.body for piece in pieces) == BIG
    assert [piece.end_of_stream for piece in pieces] == [False, False, True]


def test_the_request_handed_on() -> None:
    play = Play(Script("", []))
    play.send(request_headers({":method": "POST", ":path": "/v1/x", "X-Mixed": b"\xff\xe9"}, config=LEAN))
    play.send(request_body(b"{}", end=True))
    (raw,) = play.requests
    assert (raw.method, raw.path, raw.body, raw.subset) == ("POST", "/v1/x", b"{}", None)
    assert raw.headers["x-mixed"] == "\\xff\\xe9"


@pytest.mark.parametrize(("config", "sees"), [(LEAN, False), (modes(4, 4), True), (modes(4, 1), True), (None, True)])
def test_it_is_reported_whether_the_answer_will_be_seen(config: object, sees: bool) -> None:
    play = Play(Script("", []))
    play.send(request_headers(config=config, end=True))  # type: ignore[arg-type]
    assert play.requests[0].sees_answer is sees


@pytest.mark.parametrize("config", [LEAN, SWH, modes(BUFFERED, NONE)])
def test_the_body_is_let_go_once_the_request_is_on_its_way(config: object) -> None:
    play = Play(Script("", []))
    play.send(request_headers(config=config))  # type: ignore[arg-type]
    play.send(request_body(BIG, end=True))
    play.requests.clear()
    assert play.memory.held == len(request_headers(config=config))  # type: ignore[arg-type]
    assert _bytes_reachable(play.stream) < 1_000


def _bytes_reachable(stream: object) -> int:
    slots = [getattr(stream, name) for name in stream.__slots__]  # type: ignore[attr-defined]
    return sum(len(value) for value in slots if isinstance(value, bytes))


def test_all_streams_together_hold_no_more_than_the_door_allows() -> None:
    memory = Memory(250_000)
    first, second = (Play(Script("", []), memory) for _ in range(2))
    for play in (first, second):
        play.send(request_headers())
    assert first.send(request_body(BIG)) == []
    (refused,) = second.send(request_body(BIG))
    assert words(refused) == "refused 429 rate_limit_error rejected-saturated"
    assert memory.held == len(BIG) + len(request_headers())
    first.stream.release()
    assert memory.held == 0


def test_an_error_that_comes_too_late_ends_the_stream_without_a_word_to_the_client() -> None:
    play = Play(Script("", []))
    play.send(request_headers(end=True))
    assert play.stream.failed(InternalError("x")) == []
    assert play.stream.finished
    assert play.stream.refused is not None
    assert play.stream.too_late
    assert play.send(answer_headers()) == []


def test_a_decision_that_comes_too_late_changes_nothing() -> None:
    play = Play(Script("", []))
    (raw,) = play.stream.receive(request_headers(end=True))
    assert isinstance(raw, RawRequest)
    assert [words(r) for r in play.stream.receive(answer_headers()) if isinstance(r, bytes)] == ["answer headers"]
    assert play.stream.routed(TO, {}, None) == []
    assert [words(r) for r in play.send(answer_body(b"x", end=True))] == ["answer body echo 'x' end"]


# --- the answer of a model that was rewritten -----------------------------------------------------------------------

RENAMED = Script("", [], body=b'{"model":"tuned"}', renamed=("tuned", "base"))
ANSWER = b'{"model":"tuned","choices":[]}'


def renaming(config: object) -> Play:
    play = Play(RENAMED)
    play.send(request_headers(config=config))  # type: ignore[arg-type]
    play.send(request_body(b'{"model":"base"}', end=True))
    return play


def said(replies: list[bytes]) -> list[str]:
    return [words(reply) for reply in replies]


def test_in_full_duplex_the_name_is_put_back_across_pieces() -> None:
    play = renaming(modes(4, 4))
    assert said(play.send(answer_headers())) == ["answer headers drop content-length"]
    assert said(play.send(answer_body(ANSWER[:12]))) == ["answer body echo '{'"]
    assert said(play.send(answer_body(ANSWER[12:14]))) == []
    assert said(play.send(answer_body(ANSWER[14:], end=True))) == [
        """answer body echo '"model":"base","choices":[]}' end"""
    ]
    # What was shown is what the endpoint said.
    assert b"".join(chunk.chunk for chunk in play.seen[1:]) == ANSWER  # type: ignore[union-attr]


def test_what_is_held_back_goes_before_trailers() -> None:
    play = renaming(modes(4, 4))
    play.send(answer_headers())
    assert said(play.send(answer_body(b'{"x":"mod'))) == ["""answer body echo '{"x":'"""]
    assert said(play.send(answer_trailers())) == ["""answer body echo '"mod'""", "answer trailers"]


@pytest.mark.parametrize("config", [modes(BUFFERED, BUFFERED), modes(2, 2, swh=True)])
def test_elsewhere_the_name_is_put_back_within_a_piece(config: object) -> None:
    play = renaming(config)
    assert said(play.send(answer_headers())) == ["answer headers drop content-length"]
    (reply,) = said(play.send(answer_body(ANSWER, end=True)))
    assert reply == """answer body replaced by '{"model":"base","choices":[]}'"""


def test_a_piece_without_the_name_is_left_to_the_gateway() -> None:
    play = renaming(modes(BUFFERED, BUFFERED))
    play.send(answer_headers())
    assert said(play.send(answer_body(b'{"id":1}', end=True))) == ["answer body"]


def test_an_answer_that_is_not_shown_is_not_touched() -> None:
    play = renaming(LEAN)
    assert said(play.send(answer_headers())) == ["answer headers"]


@pytest.mark.parametrize(
    ("sent", "seen"), [({"x-prefiller-host-port": "10.0.0.9:8000"}, "timeout"), ({"x-other": "1"}, "")]
)
def test_what_a_sidecar_says_is_read_where_a_prefiller_was_named(sent: dict[str, str], seen: str) -> None:
    script = Script("prefill elsewhere", [], headers=sent)
    gateway = Play(script)
    gateway.send(request_headers())
    gateway.send(request_body(b"{}", end=True))
    gateway.send(answer_headers({":status": "200", "content-type": "text/plain", "x-prefill-fallback": "timeout"}))
    assert gateway.seen == [Answered(200, "", "text/plain", seen)]
