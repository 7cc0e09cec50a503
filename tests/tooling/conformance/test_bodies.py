import json
import time
from collections.abc import Iterable

import pytest

from epp.extproc.proto import ext_proc_pb2 as pb
from tests.support.ext_proc.faulty_pickers import (
    ALL,
    HEAVY,
    Bend,
    Reply,
    Request,
    Together,
    failing,
    piece_of,
    streamed,
)


class LargeChunks(Together):
    pass


class WritesJsonAnew(Together):
    def changed(self, body: bytes) -> bytes:
        try:
            return json.dumps(json.loads(body)).encode()
        except ValueError:
            return body


class BodyFirst(Bend):
    def __init__(self) -> None:
        self.headers: Reply | None = None
        self.waits = False

    def asked(self, message: Request) -> Iterable[Request]:
        if message.HasField("request_headers"):
            buffered = message.protocol_config.request_body_mode == pb.ProcessingMode.BUFFERED
            self.waits = not buffered and not message.request_headers.end_of_stream
        yield message

    def said(self, reply: Reply) -> Iterable[Reply]:
        if self.waits and reply.HasField("request_headers"):
            self.headers = reply
            return
        yield reply
        if self.headers is not None:
            yield self.headers
            self.headers = None


class WholeBody(Together):
    def said(self, reply: Reply) -> Iterable[Reply]:
        for whole in super().said(reply):
            if (piece := piece_of(whole, "request_body")) is not None:
                whole.request_body.response.body_mutation.body = piece.body
            yield whole


class SaysNothingOfBodies(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if piece_of(reply, "request_body") is not None:
            reply.request_body.response.ClearField("body_mutation")
        yield reply


class EveryChunkEnds(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if (piece := piece_of(reply, "request_body")) is not None:
            piece.end_of_stream = True
        yield reply


class ActsOnSecondEnd(Bend):
    ended = False

    def early(self, message: Request) -> Iterable[Reply]:
        if message.request_body.end_of_stream:
            if self.ended:
                yield Reply(request_body=pb.BodyResponse(response=streamed(b"", end=True)))
            self.ended = True


class DropsLastByte(Together):
    def changed(self, body: bytes) -> bytes:
        return body[:-1]


class IgnoresTrailers(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if not message.HasField("request_trailers"):
            yield message


class SaysNothingOfTrailers(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if not reply.HasField("request_trailers"):
            yield reply


class WrongLength(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("request_headers"):
            option = reply.request_headers.response.header_mutation.set_headers.add()
            option.header.key, option.header.raw_value = b"Content-Length", b"1"
        yield reply


class AnswersHeadersEarly(Bend):
    """Until the whole body is known: says where to go at once, to whom it has been told nothing else."""

    early_replies = 0

    def early(self, message: Request) -> Iterable[Reply]:
        plain = message.HasField("request_headers") and message.protocol_config.request_body_mode == 4
        if plain and not message.request_headers.end_of_stream and not message.metadata_context.filter_metadata:
            self.early_replies = 1
            yield Reply(request_headers=pb.HeadersResponse(response=pb.CommonResponse()))

    def said(self, reply: Reply) -> Iterable[Reply]:
        if not (self.early_replies and reply.HasField("request_headers")):
            yield reply


class Stalls(AnswersHeadersEarly):
    """Says where to go when the first part of the body comes, and by then the time that counts as silence is over."""

    def early(self, message: Request) -> Iterable[Reply]:
        if message.HasField("request_body") and not self.early_replies:
            self.early_replies = 1
            time.sleep(0.3)  # nothing else in this process goes on
            yield Reply(request_headers=pb.HeadersResponse(response=pb.CommonResponse()))


DUPLEX = {
    "1.1", "1.2", "1.3", "1.4", "1.5", "1.6", "1.7", "1.8", "1.9",
    "2.1", "2.2", "2.4", "2.5", "2.6", "2.7", "2.9", "2.12", "2.13", "2.14", "2.15", "2.16",
    "3.1", "3.2", "3.8", "3.9", "3.10",
    "4.1", "4.2", "4.3", "4.5", "4.6", "4.7", "4.8", "4.9", "4.11",
    "5.6",
    "6.1", "6.3", "6.4", "6.6", "6.7", "6.8", "6.9",
    "8.1", "8.2", "8.4", "8.5", "8.6",
}  # fmt: skip
"""Cases whose request has a body that is routed in full duplex."""
FEW = frozenset({"1.2", "1.6", "2.8", "2.13", "3.3", "3.6", "5.1", "7.1"})


@pytest.mark.parametrize(
    ("bend", "fail"),
    [
        (BodyFirst, DUPLEX),
        (WholeBody, DUPLEX),
        (SaysNothingOfBodies, DUPLEX),
        (LargeChunks, {"2.12"}),
        (WritesJsonAnew, {"2.12", "2.14", "2.15", "2.16"}),
        (DropsLastByte, {"2.2", "2.4", "2.5", "2.7", "2.12", "2.14", "2.15", "2.16", "6.6", "6.7", "6.8"}),
        (ActsOnSecondEnd, {"2.6"}),
        (IgnoresTrailers, {"2.7"}),
        (SaysNothingOfTrailers, {"2.7"}),
        (WrongLength, {"2.9"}),
    ],
)
async def test_a_bent_body_is_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail


async def test_a_body_that_ends_with_each_chunk_is_noticed_where_there_are_several() -> None:
    assert await failing(EveryChunkEnds, frozenset({"2.1", "2.2", "2.10", "2.11"})) == {"2.10", "2.11"}


async def test_headers_that_are_answered_too_early_are_noticed() -> None:
    assert await failing(AnswersHeadersEarly, FEW) == {"1.2", "1.6", "2.13"}


async def test_headers_that_are_answered_too_early_are_noticed_on_a_machine_that_stood_still() -> None:
    assert await failing(Stalls, frozenset({"2.13"})) == {"2.13"}


def test_the_heavy_cases_exist() -> None:
    assert HEAVY <= ALL
