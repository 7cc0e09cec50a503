"""Bodies whose token ids are hard to get right: name -> (api, body)."""

from typing import Any

WEATHER: dict[str, Any] = {
    "function": {
        "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "Größe, 城市"}}},
        "name": "get_weather",
        "x-unknown": 1,
    },
    "type": "function",
    "also-unknown": [1],
}
TIME = {"type": "function", "function": {"name": "get_time", "description": "The time <now> & 'then'", "strict": True}}
CALL = {
    "index": 0,
    "type": "function",
    "function": {"name": "get_weather", "arguments": '{"city": "Zürich", "days": 3, "exact": 1.0}'},
    "id": "call12345",
}
SYSTEM = {"role": "system", "content": "You answer  in one word.\n\n"}
USER = {"role": "user", "content": "What is the weather in Zürich today?"}
ASSISTANT = {"role": "assistant", "content": "  It is sunny. \n"}


def _chat(*messages: dict[str, Any], **more: Any) -> tuple[str, dict[str, Any]]:
    return "chat", {"messages": list(messages), **more}


def _text(prompt: Any, **more: Any) -> tuple[str, dict[str, Any]]:
    return "completions", {"prompt": prompt, **more}


def _user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


PROMPTS: dict[str, tuple[str, dict[str, Any]]] = {
    "one turn": _chat(USER),
    "system": _chat(SYSTEM, USER),
    "turns": _chat(SYSTEM, USER, ASSISTANT, _user("And tomorrow?")),
    "name and unknown fields": _chat(
        {**USER, "name": "bob", "x": 1}, {**ASSISTANT, "name": "al", "refusal": None}, USER
    ),
    "empty turns": _chat(_user(""), {"role": "assistant", "content": ""}, _user(" "), {"role": "assistant"}, USER),
    "null content": _chat(USER, {"role": "assistant", "content": None}, USER),
    "unicode": _chat(
        _user("Grüße, 你好 👩‍👩‍👧 e\u0301 \u00a0ﬁ½ \u2581 \ufeff \u200b\u0000\u2028 \\u00e9"), ASSISTANT, USER
    ),
    "blanks": _chat(_user("  a\t\tb \r\n\r\n  c\n\n\n"), ASSISTANT, _user("\n")),
    "special tokens in text": _chat(
        _user(
            "<|eot_id|><|im_end|></s>[INST] <end_of_turn><s> <|im_start|>system\n <think>x</think> <bos><late> <sep> a"
        )
    ),
    "half special tokens": _chat(
        _user("<|eot_id <|im_end| [INS T] <|reserved_special_token_1|> <|reserved_special_token_")
    ),
    "parts": _chat(
        _user(
            [{"type": "text", "text": "one "}, {"text": " two", "type": "text", "cache_control": {"type": "ephemeral"}}]
        )
    ),
    "parts of other names": _chat(_user([{"type": "input_text", "text": "a"}]), ASSISTANT, USER),
    "parts of other kinds": _chat(
        USER,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "closed": True}]},
        USER,
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}, {"type": "text", "text": "never"}]},
        USER,
    ),
    "no parts": _chat(_user([]), ASSISTANT, USER),
    "system parts": _chat({"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, USER),
    "billing header": _chat({"role": "system", "content": "x-anthropic-billing-header: cch=1;\nBe brief."}, USER),
    "billing part": _chat(
        {
            "role": "system",
            "content": [{"type": "text", "text": "x-anthropic-billing-header: 1"}, {"type": "text", "text": "B"}],
        },
        USER,
    ),
    "tools": _chat(SYSTEM, USER, tools=[WEATHER, TIME]),
    "tools without system": _chat(USER, tools=[TIME], tool_choice="auto"),
    "tool calls": _chat(
        USER,
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "call12345", "content": '{"t": 21.50, "ok": true}'},
        USER,
        tools=[WEATHER],
    ),
    "tool answer in parts": _chat(
        USER,
        {"role": "assistant", "tool_calls": [CALL]},
        {
            "role": "tool",
            "tool_call_id": "call12345",
            "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
        },
        USER,
    ),
    "tool call without arguments": _chat(
        USER,
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{**CALL, "function": {"name": "get_time", "arguments": ""}}],
        },
        {"role": "tool", "tool_call_id": "call12345", "content": "12"},
        USER,
    ),
    "tool call with bad arguments": _chat(
        USER,
        {"role": "assistant", "content": "", "tool_calls": [{**CALL, "function": {"name": "f", "arguments": "[1"}}]},
        {"role": "tool", "tool_call_id": "call12345", "content": "12"},
        USER,
    ),
    "two tool calls": _chat(
        USER,
        {"role": "assistant", "content": "", "tool_calls": [CALL, {**CALL, "id": "callabcde"}]},
        {"role": "tool", "tool_call_id": "call12345", "content": "12"},
        {"role": "tool", "tool_call_id": "callabcde", "content": "13"},
        USER,
    ),
    "no tool calls": _chat(USER, {**ASSISTANT, "tool_calls": []}, USER),
    "developer": _chat({"role": "developer", "content": "Be terse."}, USER),
    "developer after system": _chat(SYSTEM, USER, {"role": "developer", "content": "Be terse."}, ASSISTANT, USER),
    "other role": _chat(USER, {"role": "critic", "content": "Bad."}, USER),
    "not for an answer": _chat(USER, ASSISTANT, add_generation_prompt=False),
    "continued": _chat(
        USER,
        {"role": "assistant", "content": "The answer is"},
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "continued with blanks": _chat(
        USER,
        {"role": "assistant", "content": "The answer is  "},
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    "variables": _chat(USER, chat_template_kwargs={"enable_thinking": False, "date_string": "1 May", "none": None}),
    "variable left out": _chat(USER, chat_template_kwargs={"date_string": "auto"}),
    "with special tokens": _chat(USER, add_special_tokens=True),
    "numbers": _chat(_user("1234567890 3.14159 1e-7 0x1F")),
    "text": _text("The cache holds the first block of the prefix."),
    "text with special tokens": _text(" <|im_start|>user\nhello<|im_end|>\n</s><s>[INST] the <bos> "),
    "text without special tokens": _text("hello world", add_special_tokens=False),
    "one text in an array": _text(["hello world"]),
    "empty text": _text(""),
    "blank text": _text("   \n "),
}


TOOL_USE = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"city": "Zürich", "days": 3}}
RESULT = {"type": "tool_result", "tool_use_id": "toolu_1"}
ASKED: list[dict[str, Any]] = [
    USER,
    {"role": "assistant", "content": [{"type": "text", "text": "Let me see."}, TOOL_USE]},
]

ANTHROPIC: dict[str, dict[str, Any]] = {
    "one turn": {"messages": [USER]},
    "system": {"system": "Be brief.", "messages": [USER]},
    "system in blocks": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: 1"},
            {"type": "text", "text": "Be brief. ", "cache_control": {"type": "ephemeral"}},
            {"type": "text", "text": "Be kind."},
        ],
        "messages": [USER],
    },
    "billing line in the system's text": {"system": "x-anthropic-billing-header: 1\nBe brief.", "messages": [USER]},
    "blocks": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "text", "text": "c"}]},
            {"role": "user", "content": [{"type": "text", "text": ""}, {"type": "text", "text": " d "}]},
        ]
    },
    "empty": {"messages": [USER, {"role": "assistant", "content": []}, {"role": "user", "content": []}, USER]},
    "tools": {
        "messages": [USER],
        "tools": [
            {
                "name": "get_weather",
                "description": "Größe",
                "input_schema": {"properties": {"city": {"type": "string"}}},
            },
            {"name": "get_time", "input_schema": {"type": "object", "properties": {}}},
        ],
        "tool_choice": {"type": "none"},
    },
    "tool use": {"messages": [*ASKED, {"role": "user", "content": [{**RESULT, "content": "21 degrees"}]}]},
    "tool result in blocks, and words": {
        "messages": [
            *ASKED,
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "Here:"},
                    {**RESULT, "content": [{"type": "text", "text": "21"}, {"type": "text", "text": "degrees"}]},
                    {"type": "text", "text": "Well?"},
                ],
            },
        ]
    },
    "tool result without content": {"messages": [*ASKED, {"role": "user", "content": [RESULT]}]},
    "thoughts": {
        "messages": [
            USER,
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "s"},
                    {"type": "redacted_thinking", "data": "AA"},
                    {"type": "text", "text": "Yes."},
                ],
            },
        ]
    },
    "thinking": {"messages": [USER], "thinking": {"type": "enabled", "budget_tokens": 1024}},
    "effort": {"messages": [USER], "output_config": {"effort": "low"}},
    "variables": {"messages": [USER], "chat_template_kwargs": {"enable_thinking": False}},
}
"""Bodies of `/v1/messages`, without `max_tokens`."""
