"""Which answers are watched where a gateway shows none by itself, and how it is asked for them."""

import json
from random import Random

import pytest

from epp.extproc.proto import ext_proc_pb2 as pb
from epp.extproc.stream import AT_FIRST, AnswerChunk, Answered, Memory, Sampler, Stream
from epp.parsing.request import RawRequest
from tests.support.ext_proc.messages import (
    ANSWER,
    EVENTS,
    Mode,
    answer_body,
    answer_headers,
    modes,
    request_body,
    request_headers,
)

OVERRIDDEN = modes(Mode.STREAMED, Mode.NONE)
BUFFERED = modes(Mode.BUFFERED, Mode.NONE)


class Clock:
    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def wanted(sampler: Sampler, clock: Clock, requests: int, apart: float) -> int:
    count = 0
    for _ in range(requests):
        clock.now += apart
        count += sampler.wants()
    return count


def later(share: float, clock: Clock) -> Sampler:
    """One that has watched the first."""
    sampler = Sampler(share, clock, Random(1))
    for _ in range(AT_FIRST):
        assert sampler.wants()
    return sampler


def test_a_share_of_many_and_four_a_second_of_few() -> None:
    clock = Clock()
    assert wanted(later(0.1, clock), clock, 10_000, 0.001) == pytest.approx(1000, rel=0.1)
    assert wanted(later(0.02, clock), clock, 100, 0.25) == 100
    assert wanted(later(0.001, clock), clock, 1000, 0.025) == pytest.approx(100, abs=10)


def test_where_fewer_come_all_are_watched_however_they_are_spaced_but_ten_of_many_at_once() -> None:
    clock, random = Clock(), Random(2)
    sampler = later(1e-9, clock)
    clock.now += 3.0
    assert sum(wanted(sampler, clock, 1, random.expovariate(2.0)) for _ in range(1000)) >= 990
    for _ in range(20):
        clock.now += 5.0
        assert wanted(sampler, clock, 10, 0.0) == 10
    clock.now += 3600
    assert wanted(sampler, clock, 100, 0.0) == 10


@pytest.mark.parametrize(("apart", "share"), [(0.001, 0.023), (0.1, 0.32), (0.25, 0.77), (10.0, 0.9)])
def test_plugins_may_ask_for_as_large_a_share_and_three_a_second_at_least(apart: float, share: float) -> None:
    clock = Clock()
    sampler = later(0.02, clock)
    wanted(sampler, clock, 1000, apart)
    assert sampler.beside == 0.0, "nothing was shown yet"
    sampler.shown()
    assert sampler.beside == pytest.approx(share)
    clock.now += 3600
    sampler.wants()
    assert sampler.beside == 0.9
    wanted(sampler, clock, 1000, apart)
    assert sampler.beside == pytest.approx(share, rel=0.01), "a night without requests is soon forgotten"


def test_the_first_are_watched_whatever_the_share() -> None:
    clock = Clock()
    assert wanted(Sampler(1e-9, clock, Random(1)), clock, AT_FIRST + 100, 0.001) == AT_FIRST


def test_none_where_none_are_to_be_watched() -> None:
    clock = Clock()
    assert wanted(Sampler(0.0, clock, Random(1)), clock, 100, 100.0) == 0


def test_each_that_a_later_request_may_name_and_none_more_where_none_is_shown() -> None:
    clock = Clock()
    sampler = later(0.001, clock)
    assert not sampler.wants()
    assert all(sampler.wants(kept=True) for _ in range(100))
    for _ in range(5):
        sampler.not_shown()
    assert not sampler.wants(kept=True)
    assert not Sampler(0.0, clock, Random(1)).wants(kept=True)


@pytest.mark.parametrize(
    ("path", "body", "watched"),
    [
        ("/v1/responses", b'{"input": "x"}', True),
        ("/tenant/v1/responses?a=b", b'{"input": "x", "store": true}', True),
        ("/v1/responses", b'{"input": "x", "store" : false}', False),
        ("/v1/responses", json.dumps({"input": '"store": false'}).encode(), True),
        ("/v1/chat/completions", b"{}", False),
        ("/v1/responses/resp_1/cancel", b"", False),
    ],
)
def test_answers_that_an_engine_keeps_are_watched(path: str, body: bytes, watched: bool) -> None:
    clock = Clock()
    sampler = later(1e-9, clock)
    stream = Stream(1 << 20, Memory(1 << 30), sampler)
    stream.receive(request_headers({":method": "POST", ":path": path}, config=OVERRIDDEN))
    (raw,) = stream.receive(request_body(body, end=True))
    assert isinstance(raw, RawRequest)
    assert raw.watched == ("sampled" if watched else "")


def test_a_gateway_that_shows_none_is_asked_once_a_minute_and_told_of_once() -> None:
    clock, told = Clock(), []
    sampler = Sampler(1.0, clock, Random(1), lambda: told.append(clock.now))
    sampler.shown()
    for _ in range(5):
        assert sampler.wants()
        assert sampler.works
        sampler.not_shown()
    assert not sampler.works
    assert wanted(sampler, clock, 100, 0.59) == 0
    for _ in range(3):
        clock.now += 60
        assert sampler.wants()
        sampler.not_shown()
    assert len(told) == 1
    sampler.shown()
    assert sampler.works
    assert wanted(sampler, clock, 10, 0.001) == 10


def routed(config: pb.ProtocolConfiguration, sampler: Sampler) -> tuple[Stream, RawRequest]:
    """A stream whose request was forwarded."""
    stream = Stream(1 << 20, Memory(1 << 30), sampler)
    stream.receive(request_headers(config=config))
    (raw,) = stream.receive(request_body(b"{}", end=True))
    assert isinstance(raw, RawRequest)
    assert [*stream.routed("10.0.0.1:8000", {}, None)]
    return stream, raw


def override(stream: Stream, status: int = 200, *, end: bool = False) -> pb.ProcessingMode | None:
    """Of the reply to the answer's headers."""
    (answered,) = stream.receive(answer_headers({**ANSWER, ":status": str(status)}, end=end))
    assert isinstance(answered, Answered)
    reply = pb.ProcessingResponse.FromString(stream.answered({}))
    assert reply.WhichOneof("response") == "response_headers"
    return reply.mode_override if reply.HasField("mode_override") else None


def always() -> Sampler:
    return Sampler(1.0, Clock(), Random(1))


@pytest.mark.parametrize("config", [OVERRIDDEN, BUFFERED])
def test_an_answer_is_asked_for_by_an_override(config: pb.ProtocolConfiguration) -> None:
    sampler = always()
    stream, raw = routed(config, sampler)
    assert not raw.sees_answer, "nothing is known of this gateway yet"
    assert raw.watched
    mode = override(stream)
    assert mode is not None
    assert mode.response_body_mode == Mode.STREAMED
    shown, reply = stream.receive(answer_body(b"data", end=True))
    assert shown == AnswerChunk(b"data", True)
    assert isinstance(reply, bytes)
    assert sampler.works
    stream.release()
    assert routed(config, sampler)[1].sees_answer


def test_what_is_not_taken_plugins_may_ask_for_where_that_works() -> None:
    clock = Clock()
    sampler = later(1e-9, clock)
    _, raw = routed(OVERRIDDEN, sampler)
    assert (raw.watched, raw.watchable) == ("", 0.0), "nothing is known of this gateway yet"
    sampler.shown()
    _, raw = routed(OVERRIDDEN, sampler)
    assert (raw.watched, raw.watchable, raw.sees_answer) == ("", 1e-9, False), "they came at once"
    assert routed(modes(Mode.FULL_DUPLEX_STREAMED, Mode.NONE), sampler)[1].watchable == 0.0, "it takes no override"
    clock.now += 1.0
    _, raw = routed(OVERRIDDEN, sampler)
    assert (raw.watched, raw.watchable, raw.sees_answer) == ("sampled", 0.0, True)
    for _ in range(5):
        sampler.not_shown()
    assert routed(OVERRIDDEN, sampler)[1].watchable == 0.0, "it does not show them any more"


def test_an_answer_that_a_plugin_wants_to_see_is_asked_for() -> None:
    sampler = later(1e-9, Clock())
    for watched in (True, False):
        stream = Stream(1 << 20, Memory(1 << 30), sampler)
        stream.receive(request_headers(config=OVERRIDDEN))
        stream.receive(request_body(b"{}", end=True))
        assert [*stream.routed("10.0.0.1:8000", {}, None, watched=watched)]
        mode = override(stream)
        assert (mode is not None) == watched
    assert mode is None


@pytest.mark.parametrize(("status", "end"), [(500, False), (404, False), (204, True)])
def test_an_answer_without_tokens_is_not_asked_for(status: int, end: bool) -> None:
    sampler = always()
    for _ in range(9):
        stream, _ = routed(OVERRIDDEN, sampler)
        assert override(stream, status, end=end) is None
        stream.release()
    assert sampler.wants(), "a gateway was blamed that was not asked"


def test_only_answers_that_are_not_shown_anyway_are_asked_for() -> None:
    for config in (modes(Mode.FULL_DUPLEX_STREAMED, Mode.FULL_DUPLEX_STREAMED), modes(Mode.BUFFERED, Mode.BUFFERED)):
        stream, raw = routed(config, always())
        assert raw.sees_answer
        assert not raw.watched
        assert override(stream) is None
    stream, raw = routed(modes(Mode.FULL_DUPLEX_STREAMED, Mode.NONE), always())
    assert not raw.sees_answer
    assert override(stream) is None, "a gateway configured for full duplex takes no override"


def test_a_stream_that_ends_before_its_answer_blames_nobody() -> None:
    sampler = always()
    for _ in range(9):
        stream, _ = routed(OVERRIDDEN, sampler)
        stream.release()
        stream.release()
    assert sampler.wants()


@pytest.mark.parametrize(
    ("answers", "times"),
    [
        ([(5000, True)] * 12, 1),
        ([(5000, True)] * 4 + [(5000, False)] + [(5000, True)] * 4, 0),
        ([(4096, True)] * 12, 0),
        ([(5000, False)] * 12, 0),
    ],
)
def test_a_gateway_that_holds_back_streamed_answers_is_told_of_once(
    answers: list[tuple[int, bool]], times: int
) -> None:
    told: list[str] = []
    sampler = Sampler(0.0, Clock(), Random(1), held_back=lambda: told.append("held back"))
    for size, whole in answers:
        stream, _ = routed(modes(Mode.BUFFERED, Mode.BUFFERED), sampler)
        stream.receive(answer_headers(EVENTS))
        stream.receive(answer_body(bytes(size), end=whole))
        stream.receive(answer_body(bytes(9000), end=True))
        stream.release()
    assert len(told) == times
