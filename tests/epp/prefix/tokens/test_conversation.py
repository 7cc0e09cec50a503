"""Messages and tools as templates get them: what is taken over, what is changed, and what is not rendered."""

import json
from typing import Any

import pytest

from epp.prefix.tokens.conversation import Unsupported, conversation, tool_list
from tests.support.prompts.bodies import CALL, USER, WEATHER


def one(message: dict[str, Any], *, parts: bool = False) -> dict[str, Any]:
    return conversation([message], parts=parts, developer=True)[0]


def test_content_is_one_string_or_a_list_of_parts() -> None:
    parts = {
        "role": "user",
        "content": ["a", {"type": "text", "text": "b", "cache": 1}, {"type": "refusal", "refusal": "c"}],
    }
    assert one(parts) == {"role": "user", "content": "a\nb\nc"}
    listed = [{"type": "text", "text": "a"}, {"type": "text", "text": "b", "cache": 1}, {"type": "text", "text": "c"}]
    assert one(parts, parts=True) == {"role": "user", "content": listed}
    assert one({"role": "user", "content": "a"}, parts=True) == {"role": "user", "content": listed[:1]}
    assert one({"role": "user"}) == {"role": "user", "content": ""}
    assert one({"role": "user", "content": [{"type": "text", "text": None}]}, parts=True) == {
        "role": "user",
        "content": [],
    }


@pytest.mark.parametrize(
    "content",
    [
        [{"type": "image_url", "image_url": {"url": "http://x/y.png"}}],
        [{"image_url": {"url": "http://x/y.png"}}],
        [{"type": "text", "text": "a", "uuid": "u"}],
        [{"type": "text", "text": 1}],
        [{"type": "thinking"}],
        [{"type": 1}],
        [1],
        1,
        {"text": "a"},
    ],
)
def test_content_that_is_not_text_is_not_rendered(content: Any) -> None:
    with pytest.raises(Unsupported):
        one({"role": "user", "content": content})
    with pytest.raises(Unsupported):
        one({"role": "assistant", "content": "a", "reasoning": {"type": "prompt_embeds", "prompt_embeds": "AAAA"}})


def test_a_message_keeps_the_fields_templates_read() -> None:
    message = {"role": "assistant", "content": "a", "name": "al", "reasoning_content": "hm", "refusal": None, "x": 1}
    wanted = {"role": "assistant", "content": "a", "reasoning": "hm", "reasoning_content": "hm", "name": "al"}
    assert one(message) == wanted
    assert one({"role": "user", "content": "a", "reasoning": "hm", "tool_calls": [CALL]}) == {
        "role": "user",
        "content": "a",
    }


def test_a_tool_call_s_arguments_become_an_object_and_its_fields_their_order() -> None:
    call = one({"role": "assistant", "tool_calls": [CALL]})["tool_calls"][0]
    assert json.dumps(call) == json.dumps(
        {
            "id": "call12345",
            "function": {"arguments": {"city": "Zürich", "days": 3, "exact": 1.0}, "name": "get_weather"},
            "type": "function",
            "index": 0,
        }
    )


@pytest.mark.parametrize("arguments", ["", "[1]", "{", "null", "7"])
def test_arguments_that_are_no_object_become_an_empty_one(arguments: str) -> None:
    call = {**CALL, "function": {"name": "f", "arguments": arguments}}
    assert one({"role": "assistant", "tool_calls": [call]})["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    "call",
    [
        1,
        {},
        {**CALL, "type": "custom"},
        {**CALL, "id": None},
        {**CALL, "function": {"name": "f", "arguments": {}}},
        {**CALL, "function": {"arguments": ""}},
    ],
)
def test_tool_calls_that_vllm_refuses_are_not_rendered(call: Any) -> None:
    with pytest.raises(Unsupported):
        one({"role": "assistant", "tool_calls": [call]})


def test_a_tool_s_answer_in_parts_becomes_text_unless_it_refers_to_tools() -> None:
    text, reference = {"type": "text", "text": "a"}, {"type": "tool_reference", "name": "t"}
    assert one({"role": "tool", "content": [text, text]}, parts=True)["content"] == "a\na"
    assert one({"role": "tool", "content": [text, reference]}, parts=True)["content"] == [text, reference]
    assert one({"role": "tool", "content": [text, reference], "tool_call_id": "1"})["content"] == "a\nt"


def test_a_billing_header_is_not_part_of_the_system_s_text() -> None:
    header = "x-anthropic-billing-header: cch=1"
    assert one({"role": "system", "content": f"{header}\nBe brief."})["content"] == "Be brief."
    assert one({"role": "system", "content": [header, {"type": "text", "text": header}, "a"]})["content"] == "a"
    assert one({"role": "user", "content": header})["content"] == header


def test_developers_speak_for_the_system_where_the_template_does_not_know_them() -> None:
    said: list[dict[str, Any]] = [
        {"role": "system", "content": "a"},
        USER,
        {"role": "developer", "content": "b", "tools": []},
    ]
    assert conversation(said, parts=False, developer=False) == [{"role": "system", "content": "a\n\nb"}, USER]
    assert conversation(said[2:], parts=False, developer=False) == [{"role": "system", "content": "b"}]
    parts = conversation(said, parts=True, developer=False)
    assert parts[0] == {"role": "system", "content": "a\n\nb"}
    assert [message["role"] for message in conversation(said, parts=False, developer=True)][-1] == "developer"


def test_tools_have_the_fields_vllm_shows_to_templates() -> None:
    found = json.dumps(tool_list([WEATHER, {"function": {"name": "f", "strict": False}, "defer_loading": True}]))
    parameters = WEATHER["function"]["parameters"]
    first = {"name": "get_weather", "description": None, "parameters": parameters}
    second = {"name": "f", "description": None, "parameters": None, "strict": False, "defer_loading": True}
    wanted = [{"type": "function", "function": first}, {"type": "function", "function": second, "defer_loading": True}]
    assert found == json.dumps(wanted)
    for tool in ({"type": "web_search"}, {"function": 1}, {"function": {"description": "no name"}}):
        with pytest.raises(Unsupported):
            tool_list([tool])
