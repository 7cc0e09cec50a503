"""Anthropic's messages as the chat completion that vLLM 0.33 makes of them.

What it does with tools that change on the way, images and disabled thinking is left out: `Unsupported`.
"""

import json
from typing import Any

import msgspec

from epp.prefix.tokens.conversation import Message, Unsupported

_BILLING = "x-anthropic-billing-header"


class MessagesBody(msgspec.Struct):
    """The fields that change what a prompt becomes."""

    messages: list[Message]
    system: str | list[Message] | None = None
    tools: list[Message] | None = None
    thinking: Message | None = None
    output_config: Message | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    kv_transfer_params: dict[str, Any] | None = None


def as_chat(body: MessagesBody) -> dict[str, Any]:
    """The fields of the chat completion. Raises Unsupported."""
    if body.thinking is not None and body.thinking.get("type") not in ("enabled", "adaptive"):
        raise Unsupported("thinking switched off: which effort that is, only the engine knows")
    messages: list[Message] = []
    if system := _system(body.system):
        messages.append({"role": "system", "content": system})
    for message in body.messages:
        messages += _messages(message)
    fields: dict[str, Any] = {"messages": messages}
    if body.tools is not None:
        fields["tools"] = [_tool(tool) for tool in body.tools]
    if (effort := (body.output_config or {}).get("effort")) is not None:
        fields["reasoning_effort"] = effort
    return {
        **fields,
        "chat_template_kwargs": body.chat_template_kwargs,
        "kv_transfer_params": body.kv_transfer_params,
    }


def _system(given: str | list[Message] | None) -> str:
    if not isinstance(given, list):
        return given or ""
    texts = [block["text"] for block in given if block.get("type") == "text" and isinstance(block.get("text"), str)]
    return "".join(text for text in texts if not text.startswith(_BILLING))


def _messages(message: Message) -> list[Message]:
    """What one message becomes: answers of tools first, then itself, if anything is left of it."""
    role, content = message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise Unsupported("a message of neither user nor assistant")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list):
        raise Unsupported("content that is neither text nor a list")
    answers: list[Message] = []
    parts: list[Message] = []
    calls: list[Message] = []
    thoughts: list[str] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if kind == "text" and isinstance(block.get("text"), str):
            parts += [{"type": "text", "text": block["text"]}] if block["text"] else []
        elif kind == "thinking" and isinstance(block.get("thinking"), str):
            thoughts.append(block["thinking"])
        elif kind == "tool_use":
            calls.append(_call(block))
        elif kind == "tool_result" and role == "user":
            answers += _answers(block)
        elif kind not in ("redacted_thinking", "tool_reference"):
            raise Unsupported("content that is not text, or tools that change")
    made: Message = {"role": role}
    made |= {"reasoning": "".join(thoughts)} if thoughts else {}
    made |= {"tool_calls": calls} if calls else {}
    if parts:
        made["content"] = parts[0]["text"] if len(parts) == 1 else parts
    return [*answers, *([] if role == "user" and not parts else [made])]


def _call(block: Message) -> Message:
    given = block.get("input") or {}
    if not isinstance(block.get("id"), str) or not block["id"] or not isinstance(given, dict):
        raise Unsupported("a tool call without an id, or with input that is no object")
    function = {"name": block.get("name") or "", "arguments": json.dumps(given)}
    return {"id": block["id"], "type": "function", "function": function}


def _answers(block: Message) -> list[Message]:
    content, of = block.get("content"), block.get("tool_use_id") or ""
    items = content if isinstance(content, list) else []
    if any(not isinstance(item, dict) or item.get("type") == "image" for item in items):
        raise Unsupported("content that is not text")
    texts = [item.get("text", "") for item in items if item.get("type") == "text"]
    text = content if isinstance(content, str) else "\n".join(texts)
    names = [item.get("tool_name") or item.get("name") for item in items if item.get("type") == "tool_reference"]
    answers: list[Message] = [{"role": "tool", "tool_call_id": of, "content": text}]
    if references := [{"type": "tool_reference", "name": name} for name in names if name]:
        answers.append({"role": "tool", "tool_call_id": of, "content": references})
    return answers


def _tool(tool: Message) -> Message:
    schema = tool.get("input_schema")
    if not isinstance(schema, dict):
        raise Unsupported("a tool without an input schema")
    function = {"name": tool.get("name"), "description": tool.get("description")}
    function["parameters"] = schema if "type" in schema else {**schema, "type": "object"}
    return {
        "type": "function",
        "function": {**function, "strict": tool.get("strict"), "defer_loading": tool.get("defer_loading")},
    }
