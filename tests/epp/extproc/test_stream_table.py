"""The table in `Stream`'s docstring against `Stream`: each message in each phase."""

from collections.abc import Sequence
from inspect import cleandoc

import pytest

from epp.errors import NoEndpoint
from epp.extproc import stream as module
from epp.extproc.stream import Action, AnswerChunk, Answered, Memory, Stream
from epp.parsing.request import RawRequest
from tests.support.ext_proc.messages import (
    TO,
    answer_body,
    answer_headers,
    answer_trailers,
    request_body,
    request_headers,
    request_trailers,
    words,
)  # fmt: skip

PHASES = ("HEADERS", "BODY", "ROUTING", "REPLIED", "ABANDONED")
KINDS = {
    "request headers": ("request_headers", request_headers()),
    "headers, no body": ("request_headers", request_headers(end=True)),
    "request body": ("request_body", request_body(b"x")),
    "body's end": ("request_body", request_body(b"x", end=True)),
    "request trailers": ("request_trailers", request_trailers()),
    "answer headers": ("response_headers", answer_headers()),
    "answer body": ("response_body", answer_body(b"x")),
    "answer trailers": ("response_trailers", answer_trailers()),
    "not a message": (None, b"\xff"),
}
CALLS = ("routed()", "failed()")
TO_REACH = {
    "HEADERS": (),
    "BODY": ("request headers",),
    "ROUTING": ("request headers", "body's end"),
    "REPLIED": ("request headers", "body's end", "routed()"),
    "ABANDONED": ("request headers", "answer headers"),
    "FINISHED": ("request headers", "body's end", "request headers"),
}


def table() -> dict[tuple[str, str], str]:
    """(message, phase) -> cell, by the places where the columns of the table begin."""
    lines = cleandoc(Stream.__doc__ or "").splitlines()
    rule = next(n for n, line in enumerate(lines) if line.startswith("---"))
    starts = [0, *(at for at, (a, b) in enumerate(zip(lines[rule], lines[rule][1:], strict=False), 1) if a + b == " -")]

    def cells(line: str) -> list[str]:
        return [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]

    phases = cells(lines[rule - 1])[1:]
    rows = [cells(line) for line in lines[rule + 1 : lines.index("", rule)]]
    return {(row[0], phase): cell for row in rows for phase, cell in zip(phases, row[1:], strict=True)}


TABLE = table()


def act(stream: Stream, message: str) -> Sequence[Action]:
    if message == "routed()":
        return list(stream.routed(TO, {}, None))
    if message == "failed()":
        return stream.failed(NoEndpoint("nobody"))
    return stream.receive(KINDS[message][1])


def phase_of(stream: Stream) -> str:
    return "FINISHED" if stream.finished else next(p for p in PHASES if getattr(module, p) == stream._phase)


def test_every_pair_of_message_and_phase_is_in_the_table() -> None:
    numbers = [getattr(module, phase) for phase in PHASES]
    assert numbers == list(range(5)), "the phases of the module"
    assert set(module._RECEIVERS) == {kind for kind, _ in KINDS.values()} - {None}
    assert set(TABLE) == {(message, phase) for message in (*KINDS, *CALLS) for phase in TO_REACH}
    assert all(TABLE.values())


@pytest.mark.parametrize(("message", "phase"), TABLE)
def test_the_stream_does_what_the_table_says(message: str, phase: str) -> None:
    memory = Memory(1 << 30)
    stream = Stream(1 << 20, memory)
    for before in TO_REACH[phase]:
        act(stream, before)
    assert phase_of(stream) == phase
    held = memory.held
    actions = act(stream, message)
    after = phase_of(stream)
    done = named(actions, message, grew=memory.held > held, ended=after == "FINISHED" != phase)
    assert (done if after == phase else f"{done} {after}") == TABLE[message, phase]


def named(actions: Sequence[Action], message: str, *, grew: bool, ended: bool) -> str:
    if not actions:
        return "end" if ended else "hold" if grew else "ignore"
    if any(isinstance(action, Answered | AnswerChunk) for action in actions):
        return "show"
    if isinstance(actions[0], RawRequest):
        return "route"
    assert isinstance(actions[0], bytes)
    if words(actions[0]).startswith("refused"):
        return "refuse"
    return "send" if message == "routed()" else "pass"
