"""Anthropic's request format as vLLM serves it: `/v1/messages`."""

from typing import ClassVar

from msgspec import Raw

from epp.parsing.body import ABSENT, Body, joined, require
from epp.parsing.request import Api


class Messages(Body):
    """`/v1/messages`. The system prompt is a field of its own."""

    api: ClassVar[Api] = "messages"

    messages: Raw = ABSENT
    system: Raw = ABSENT
    tools: Raw = ABSENT

    def prompt(self) -> bytes:
        messages = require(self.messages, "messages", b"[", "an array of messages")
        return joined(self.system, self.tools, messages)
