"""OpenAI's request formats as vLLM serves them: chat completions, completions, responses, embeddings."""

from typing import ClassVar

from msgspec import Raw

from epp.parsing.body import ABSENT, Body, joined, require
from epp.parsing.request import Api


class Chat(Body):
    """`/v1/chat/completions`. Chat templates put tool definitions before the conversation."""

    api: ClassVar[Api] = "chat"

    messages: Raw = ABSENT
    tools: Raw = ABSENT
    max_completion_tokens: Raw = ABSENT

    def prompt(self) -> bytes:
        messages = require(self.messages, "messages", b"[", "an array of messages")
        return joined(self.tools, messages)

    def output_limit(self) -> Raw:
        return self.max_completion_tokens if memoryview(self.max_completion_tokens) else self.max_tokens


class Completion(Body, rename={"text": "prompt"}):
    """`/v1/completions`. The prompt is text, token ids, or several of either; vLLM also takes `prompt_embeds`."""

    api: ClassVar[Api] = "completions"

    text: Raw = ABSENT
    prompt_embeds: Raw = ABSENT

    def prompt(self) -> bytes:
        if not memoryview(self.text) and memoryview(self.prompt_embeds):
            return bytes(self.prompt_embeds)
        return bytes(require(self.text, "prompt", b'"[', "a string, an array of strings or an array of token ids"))


class Responses(Body):
    """`/v1/responses`. Instructions become the system message."""

    api: ClassVar[Api] = "responses"

    input: Raw = ABSENT
    instructions: Raw = ABSENT
    tools: Raw = ABSENT
    max_output_tokens: Raw = ABSENT

    def prompt(self) -> bytes:
        given = require(self.input, "input", b'"[', "a string or an array of items")
        return joined(self.instructions, self.tools, given)

    def output_limit(self) -> Raw:
        return self.max_output_tokens


class Embeddings(Body):
    """`/v1/embeddings`. vLLM also takes a conversation, in `messages`."""

    api: ClassVar[Api] = "embeddings"

    input: Raw = ABSENT
    messages: Raw = ABSENT

    def prompt(self) -> bytes:
        if not memoryview(self.input) and memoryview(self.messages):
            return bytes(require(self.messages, "messages", b"[", "an array of messages"))
        return bytes(require(self.input, "input", b'"[', "a string, an array of strings or an array of token ids"))
