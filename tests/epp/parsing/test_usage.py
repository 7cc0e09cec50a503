"""`UsageReader` of `epp.parsing.request`."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.parsing.grpc import usage_reader
from epp.parsing.request import ResponsesReader, Usage, UsageReader

CHAT = {"prompt_tokens": 12, "completion_tokens": 3, "total_tokens": 15, "prompt_tokens_details": {"cached_tokens": 8}}
RESPONSES = {"input_tokens": 12, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 3}
READ = Usage(12, 3, 8)


def read(content_type: str, *chunks: bytes) -> Usage | None:
    reader = UsageReader(content_type)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.finish()


def events(*payloads: Any, end: str = "\n\n", space: str = " ") -> bytes:
    texts = [each if isinstance(each, str) else json.dumps(each) for each in payloads]
    return "".join(f"data:{space}{text}{end}" for text in texts).encode()


def chat_stream() -> list[Any]:
    tokens: list[Any] = [{"choices": [{"delta": {"content": "usage"}}], "usage": None} for _ in range(3)]
    return [*tokens, {"choices": [], "usage": CHAT}, "[DONE]"]


@pytest.mark.parametrize("indent", [None, 2])
def test_json_answers(indent: int | None) -> None:
    text = json.dumps({"choices": [{"text": 'say "usage": {"prompt_tokens": 1}'}], "usage": CHAT}, indent=indent)
    assert read("application/json", text.encode()) == READ


def test_responses_and_their_last_event() -> None:
    assert read("application/json", json.dumps({"usage": RESPONSES}).encode()) == READ
    stream = b"event: response.completed\n" + events({"type": "response.completed", "response": {"usage": RESPONSES}})
    assert read("text/event-stream", stream) == READ


def test_anthropic_joins_its_first_and_last_event() -> None:
    start = {"type": "message_start", "message": {"usage": {"input_tokens": 12, "output_tokens": 1}}}
    delta = {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 40}}
    assert read("text/event-stream", events(start, {"type": "ping"}), events(delta)) == Usage(12, 40, -1)


def test_anthropic_counts_cached_tokens_beside_the_others() -> None:
    usage = {"input_tokens": 2, "cache_read_input_tokens": 8, "cache_creation_input_tokens": 2, "output_tokens": 3}
    assert read("application/json", json.dumps({"usage": usage}).encode()) == READ


@pytest.mark.parametrize("end", ["\n\n", "\r\n\r\n"])
@pytest.mark.parametrize("space", [" ", ""])
@pytest.mark.parametrize("size", [1, 2, 7, 50, 10_000])
def test_streams_cut_anywhere(end: str, space: str, size: int) -> None:
    stream = events(*chat_stream(), end=end, space=space)
    chunks = [stream[at : at + size] for at in range(0, len(stream), size)]
    assert read("text/event-stream; charset=utf-8", *chunks) == READ


def test_running_counts_end_with_the_last() -> None:
    running = [{"usage": {"prompt_tokens": 12, "completion_tokens": n}} for n in range(1, 4)]
    assert read("text/event-stream", events(*running)) == Usage(12, 3, -1)


def test_a_long_answer_before_the_usage_is_not_kept() -> None:
    reader = UsageReader("application/json")
    reader.feed(b'{"choices": [{"text": "')
    for _ in range(100):
        reader.feed(b"x" * 65536)
        assert len(reader._rest) <= 8192
    reader.feed(b'"}], "usage": ' + json.dumps(CHAT).encode() + b"}")
    assert reader.finish() == READ


def test_a_usage_without_end_is_given_up_within_bounds() -> None:
    reader = UsageReader("application/json")
    reader.feed(b'{"usage": {"x": "')
    for _ in range(100):
        reader.feed(b"}" * 1000)
        assert len(reader._rest) < 10_000
    reader.feed(b'"}, "usage": {"prompt_tokens": 5}}')
    assert reader.finish() == Usage(5, -1, -1)


@pytest.mark.parametrize("kind", ["audio/mpeg", "text/plain"])
def test_answers_of_other_kinds_are_not_looked_at(kind: str) -> None:
    assert read(kind, b'{"usage": {"prompt_tokens": 5}}') is None


@pytest.mark.parametrize(
    "usage",
    [
        b"null",
        b"{}",
        b"[]",
        b'"x"',
        b'{"prompt_tokens": "5"}',
        b'{"prompt_tokens": true}',
        b'{"prompt_tokens": -1}',
        b'{"prompt_tokens": 1e3}',
        b'{"prompt_tokens": ' + b"9" * 5000 + b"}",
        b'{"a":' * 1200 + b"1" + b"}" * 1200,
    ],
)
def test_a_usage_that_says_nothing_is_none(usage: bytes) -> None:
    assert read("application/json", b'{"usage": ' + usage + b"}") is None


FRAGMENTS = st.sampled_from([b'"usage"', b":", b" ", b"{", b"}", b'"prompt_tokens"', b"1", b",", b'"', b"\\", b"\xff"])


@given(st.lists(st.lists(FRAGMENTS | st.binary(max_size=20), max_size=20).map(b"".join), max_size=8))
def test_nothing_makes_it_raise_or_grow(chunks: list[bytes]) -> None:
    reader = UsageReader("")
    for chunk in chunks:
        reader.feed(chunk)
        assert len(reader._rest) <= 8192 + 64
    reader.finish()


@given(st.data())
def test_cuts_do_not_matter(data: st.DataObject) -> None:
    stream = events(*chat_stream())
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=10)))
    bounds = [0, *cuts, len(stream)]
    assert read("text/event-stream", *(stream[a:b] for a, b in pairwise(bounds))) == READ


def response_id(*chunks: bytes) -> str:
    reader = usage_reader("application/json", "responses")
    assert isinstance(reader, ResponsesReader)
    for chunk in chunks:
        reader.feed(chunk)
    return reader.id


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("step", [1, 7, 10_000])
def test_an_answer_s_id_is_found_wherever_its_pieces_are_cut(indent: int | None, step: int) -> None:
    inner = {"id": "msg_1", "content": [{"text": 'my "id": "resp_9"'}]}
    whole = {"id": "resp_1", "object": "response", "output": [inner], "usage": RESPONSES}
    for text in (
        json.dumps(whole, indent=indent).encode(),
        events({"type": "response.created", "response": {**whole, "output": []}}, {"delta": "x", "item_id": "msg_1"}),
    ):
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        assert response_id(*pieces) == "resp_1"
        reader = ResponsesReader("application/json")
        for piece in pieces:
            reader.feed(piece)
        assert reader.finish() == READ


@pytest.mark.parametrize(
    "text", [b"", b"{}", b'{"id": 5}', b'{"id": ""}', b'{"id": "\xc3\xa4"}', b'{"id": "%s"}' % (b"x" * 257)]
)
def test_what_is_no_id_is_none(text: bytes) -> None:
    assert response_id(text) == ""


def test_an_id_is_looked_for_at_an_answer_s_beginning_only() -> None:
    assert response_id(b'{"text": "' + b"x" * 5000, b'", "id": "resp_1"}') == ""


def test_ids_of_other_answers_are_not_read() -> None:
    assert not isinstance(usage_reader("application/json", "chat"), ResponsesReader)
