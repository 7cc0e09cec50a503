import sys
from collections.abc import Iterable
from typing import Final

import pytest

from tests.support.ext_proc.faulty_pickers import Bend, Broken, Reply, Request, failing

DEEP: Final = {"8.5"} if sys.version_info < (3, 14) else set[str]()
"""The case of deep JSON: from Python 3.14 on it is read, as far as the stack reaches."""


class FailsInsteadOf400(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.immediate_response.status.code == 400:
            raise Broken
        yield reply


class Says422(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.immediate_response.status.code == 400:
            reply.immediate_response.status.code = 422
        yield reply


class Says200(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("immediate_response"):
            reply.immediate_response.status.code = 200
        yield reply


class PlainText(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        if reply.HasField("immediate_response"):
            reply.immediate_response.body = b"inference error"
        yield reply


class Repeats(Bend):
    def said(self, reply: Reply) -> Iterable[Reply]:
        yield reply
        if reply.HasField("immediate_response"):
            yield reply


class KnowsPaths(Bend):
    def asked(self, message: Request) -> Iterable[Request]:
        for entry in message.request_headers.headers.headers:
            if entry.key == b":path" and entry.raw_value == b"/conformance/unknown":
                raise Broken
        yield message


@pytest.mark.parametrize(
    ("bend", "fail"),
    [
        (FailsInsteadOf400, {"5.1", "5.2", "5.3", "5.4", "5.5", *DEEP}),
        (Says422, {"5.2", "5.4"}),
        (Says200, {"3.3", "3.4", "3.5", "3.7", "5.1", "5.2", "5.3", "5.4", "5.5", *DEEP}),
        (PlainText, {"5.8"}),
        (Repeats, {"5.7"}),
        (KnowsPaths, {"5.6"}),
    ],
)
async def test_a_bent_refusal_is_noticed(bend: type[Bend], fail: set[str]) -> None:
    assert await failing(bend) == fail
