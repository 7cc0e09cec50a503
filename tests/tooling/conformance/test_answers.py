from collections.abc import Iterable

import pytest

from epp.extproc.proto import ext_proc_pb2 as pb
from tests.support.ext_proc.faulty_pickers import (
    Bend,
    Broken,
    Left,
    Reply,
    Request,
    Together,
    failing,
    piece_of,
    results,
)


class DefersHeaders(Bend):
    def __init__(self) -> None:
        self.headers: Reply | None = None

    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("response_headers"):
            self.headers = reply
            return
        if self.headers is not None:
            yield self.headers
            self.headers = None
        yield reply


class HoldsBody(Bend):
    def __init__(self) -> None:
        self.held: list[Reply] = []

    def said(self, reply: Reply) -> Iterable[Reply]:
        if not reply.HasField("response_body"):
            yield reply
            return
        self.held.append(reply)
        if reply.response_body.response.body_mutation.streamed_response.end_of_stream:
            yield from self.held


class LargeChunks(Together):
    which = "response_body"

    def said(self, reply: Reply) -> Iterable[Reply]:
        large = len(reply.response_body.response.body_mutation.streamed_response.body) == 62_000
        return super().said(reply) if large or self.held else iter([reply])


class ChangesText(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("response_body"):
            piece = reply.response_body.response.body_mutation.streamed_response
            piece.body = piece.body.replace(b"data:{", b"data: {")
        yield reply


class NotStreamed(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("response_body"):
            mutation = reply.response_body.response.body_mutation
            mutation.body = mutation.streamed_response.body
        yield reply


class NoTrailers(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if not reply.HasField("response_trailers"):
            yield reply


class WantsBodies(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if not message.response_headers.end_of_stream:
            yield message


class WantsJson(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        if message.response_body.body.startswith(b"{not"):
            raise Broken
        yield message


class WantsServed(Bend):
    """Only an address of its own may have served."""

    def asked(self, message: Request) -> Iterable[Request]:
        for entry in message.metadata_context.filter_metadata:
            if message.HasField("response_headers") and b":" not in entry.value.fields[0].value.string_value:
                raise Broken
        yield message


class HearsNoEarlyAnswer(Bend):
    whole = False

    def asked(self, message: Request) -> Iterable[Request]:
        self.whole = self.whole or message.request_body.end_of_stream
        if self.whole or not message.HasField("response_headers"):
            yield message


class Lingers(Bend):
    obeys_half_close = False


class SaysMore(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        yield reply
        if reply.response_body.response.body_mutation.streamed_response.end_of_stream:
            yield Reply(response_trailers=pb.TrailersResponse())


class EndsAfterHeaders(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        yield reply
        if reply.HasField("response_headers"):
            raise Broken


REPLIES = {"4.1", "4.2", "4.3", "4.5", "4.6", "4.7", "4.8", "4.9", "4.11", "6.3", "6.7"}
BODIES = {"4.2", "4.3", "4.5", "4.6", "4.8", "4.9", "4.11", "6.3", "6.7"}


@pytest.mark.parametrize(
    ("bend", "fail"),
    [
        (DefersHeaders, REPLIES | {"2.6", "4.10", "6.6"}),
        (HoldsBody, {"4.3", "4.6"}),
        (LargeChunks, {"4.5"}),
        (ChangesText, {"4.3", "6.3", "6.7"}),
        (NotStreamed, BODIES),
        (NoTrailers, {"4.6"}),
        (WantsBodies, {"4.7", "4.10"}),
        (WantsJson, {"4.8"}),
        (WantsServed, {"4.9"}),
        (HearsNoEarlyAnswer, {"4.10"}),
        (Lingers, {"4.7", "4.11", "6.1", "6.3", "6.6", "8.2", "8.6"}),
        (SaysMore, {"4.2", "4.11", "6.3"}),
        (EndsAfterHeaders, BODIES | {"4.7", "6.6"}),
    ],
)
async def test_a_bent_answer_is_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail


class Leaves(Bend):
    """Ends its stream in order once the request is routed, which Envoy allows."""

    def said(self, reply: Reply) -> Iterable[Reply]:
        yield reply
        if (piece := piece_of(reply, "request_body")) is not None and piece.end_of_stream:
            raise Left


async def test_an_epp_that_leaves_after_the_request_is_not_asked_about_answers() -> None:
    found = await results(Leaves, frozenset({"2.2", "4.1", "4.3", "4.10"}))
    print([(result.case.id, result.outcome, result.detail) for result in found])
    assert {result.case.id: result.outcome for result in found} == {
        "2.2": "pass",
        "4.1": "skip",
        "4.3": "skip",
        "4.10": "pass",
    }
