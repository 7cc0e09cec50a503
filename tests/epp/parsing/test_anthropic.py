"""Anthropic's format of `epp.parsing.body`."""

import msgspec
import pytest

from epp.errors import BadRequest
from epp.parsing.body import Messages


def test_system_and_tools_stand_before_the_messages() -> None:
    body = b'{"messages": [{"role": "user"}], "system": "be kind", "tools": [1], "max_tokens": 3}'
    read = msgspec.json.decode(body, type=Messages)
    assert b"".join(read.parts()) == b'"be kind"[1][{"role": "user"}]'
    assert read.answer_tokens() == 3


def test_messages_are_needed() -> None:
    with pytest.raises(BadRequest, match="messages: missing; expected an array of messages"):
        msgspec.json.decode(b'{"system": "be kind"}', type=Messages).parts()
