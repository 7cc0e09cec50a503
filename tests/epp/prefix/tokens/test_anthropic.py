"""Anthropic's messages as chats. What vLLM makes of them: tests/engine/test_tokens.py."""

import json
from typing import Any

import msgspec
import pytest

from epp.plugin import Request
from epp.prefix.tokens.anthropic import MessagesBody, as_chat
from epp.prefix.tokens.conversation import Unsupported, conversation
from epp.prefix.tokens.prompt import Chat, prompt_of
from tests.support.prompts.bodies import ANTHROPIC, ASKED, RESULT, USER


def chat(body: dict[str, Any]) -> dict[str, Any]:
    return as_chat(msgspec.convert(body, MessagesBody))


@pytest.mark.parametrize("body", ANTHROPIC.values(), ids=ANTHROPIC)
def test_every_body_of_the_corpus_is_read(body: dict[str, Any]) -> None:
    found = prompt_of(Request(id="1", model="m", api="messages", body=json.dumps({**body, "max_tokens": 9}).encode()))
    assert isinstance(found, Chat)
    assert conversation(found.messages, parts=False, developer=True)


def test_the_system_s_blocks_are_one_text_without_the_billing_header() -> None:
    first = chat(ANTHROPIC["system in blocks"])["messages"][0]
    assert first == {"role": "system", "content": "Be brief. Be kind."}


def test_a_message_s_blocks_are_parts_and_a_single_one_is_its_text() -> None:
    messages = chat(ANTHROPIC["blocks"])["messages"]
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert [message["content"] for message in messages] == [parts, "c", " d "]


def test_tool_use_becomes_a_call_and_its_result_a_message_before_the_user_s_words() -> None:
    messages = chat(ANTHROPIC["tool result in blocks, and words"])["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user"]
    (call,) = messages[1]["tool_calls"]
    assert (call["id"], json.loads(call["function"]["arguments"])) == ("toolu_1", {"city": "Zürich", "days": 3})
    assert messages[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": "21\ndegrees"}
    assert len(messages[3]["content"]) == 2


def test_references_in_a_result_are_a_message_of_their_own() -> None:
    content = [{"type": "text", "text": "a"}, {"type": "tool_reference", "tool_name": "get_time"}]
    messages = chat({"messages": [*ASKED, {"role": "user", "content": [{**RESULT, "content": content}]}]})["messages"]
    assert [message["content"] for message in messages[2:]] == ["a", [{"type": "tool_reference", "name": "get_time"}]]


def test_a_schema_without_a_type_is_an_object_s() -> None:
    functions = [tool["function"] for tool in chat(ANTHROPIC["tools"])["tools"]]
    assert functions[0]["parameters"] == {"properties": {"city": {"type": "string"}}, "type": "object"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "system", "content": "a"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
        {"messages": [{"role": "user", "content": [{"type": "document"}]}]},
        {"messages": [{"role": "user", "content": [1]}]},
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{"type": "image", "source": {}}]}]}]},
        {"messages": [{"role": "assistant", "content": [{**RESULT, "content": "a"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "name": "f"}]}]},
        {"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "1", "input": [1]}]}]},
        {"messages": [{"role": "user", "content": [{"type": "tool_removal", "tool": {}}]}]},
        {"messages": [USER], "thinking": {"type": "disabled"}},
        {"messages": [USER], "tools": [{"type": "web_search", "name": "web_search"}]},
    ],
)
def test_what_is_left_out_is_reported(body: dict[str, Any]) -> None:
    with pytest.raises(Unsupported):
        chat(body)
