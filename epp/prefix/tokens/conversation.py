"""A conversation as a chat template gets it: what vLLM 0.33 does to messages and tools before it renders them.

Written down as data changes. What vLLM would refuse, and what is not made of text alone, is `Unsupported`.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

Message = dict[str, Any]

_TEXTS: Final = {
    "text": "text",
    "refusal": "refusal",
    "thinking": "thinking",
}
"""Type of a part that is text -> its field."""
_KNOWN_FIELDS: Final = frozenset(
    (
        "audio_embeds",
        "audio_url",
        "closed",
        "data",
        "file",
        "image_embeds",
        "image_pil",
        "image_url",
        "input_audio",
        "name",
        "prompt_cache_breakpoint",
        "refusal",
        "text",
        "thinking",
        "type",
        "uuid",
        "video_embeds",
        "video_url",
    )
)
"""Fields of parts that vLLM reads itself; a template sees the others."""
_BILLING: Final = "x-anthropic-billing-header"
"""vLLM drops a first line of a system text that begins so: it changes with every request."""


class Unsupported(Exception):
    """The prompt's tokens cannot be found here. The text says why, without a word of the prompt."""


def conversation(messages: Sequence[Message], *, parts: bool, developer: bool) -> list[Message]:
    """`messages` as vLLM hands them to a template: known fields only, tool arguments as objects, one kind of content.

    `parts`: content as a list of parts instead of one string. `developer`: whether the template knows that role; else
    such messages become the system's, and all of the system's become one at the front. Raises Unsupported.
    """
    made = [_message(message, parts) for message in messages]
    if not developer and any(message["role"] == "developer" for message in made):
        made = _without_developer(made)
    return made


def tool_list(tools: Sequence[Message]) -> list[Message]:
    """Tool definitions with the fields, and in the order, that vLLM shows to templates. Raises Unsupported."""
    return [_tool(tool) for tool in tools]


def _message(message: Message, parts: bool) -> Message:
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not isinstance(content, (str, list, type(None))):
        raise Unsupported("a message without a role, or with content that is neither text nor a list")
    pieces = [] if content is None else [content] if isinstance(content, str) else content
    if role == "system":
        pieces = _without_billing(pieces)
    read = [found for piece in pieces if (found := _part(piece)) is not None]
    made: Message = {"role": role}
    if parts:
        made["content"] = read
    else:
        made["content"] = "\n".join(part["text" if part["type"] == "text" else "name"] for part in read)
    if role == "assistant":
        _assistant(message, made)
    elif role == "tool":
        if "tool_call_id" in message:
            made["tool_call_id"] = message["tool_call_id"]
        if parts and all(part["type"] == "text" for part in read):
            made["content"] = "\n".join(part["text"] for part in read)
    for field in ("name", "task"):
        if isinstance(message.get(field), str):
            made[field] = message[field]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made


def _part(part: Any) -> Message | None:
    """A part as a template sees it; None for one that vLLM skips."""
    if isinstance(part, str):
        return {"type": "text", "text": part}
    kind = part.get("type") if isinstance(part, dict) and part.get("uuid") is None else None
    if kind == "tool_reference" and isinstance(part.get("name"), str):
        return {"type": kind, "name": part["name"]}
    if not isinstance(kind, str) or (field := _TEXTS.get(kind)) is None:
        raise Unsupported("content that is not text")
    if (text := part.get(field)) is None and kind in ("text", "refusal"):
        return None
    if not isinstance(text, str):
        raise Unsupported("a part whose text is no string")
    return {"type": "text", "text": text, **{key: part[key] for key in part if key not in _KNOWN_FIELDS}}


def _assistant(message: Message, made: Message) -> None:
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list):
        raise Unsupported("tool_calls that are no array")
    if calls:
        made["tool_calls"] = [_call(call) for call in calls]
    reasoning = message.get("reasoning")
    if (reasoning := message.get("reasoning_content") if reasoning is None else reasoning) is not None:
        if isinstance(reasoning, dict):
            raise Unsupported("reasoning that is not text")
        made["reasoning"] = made["reasoning_content"] = reasoning


def _call(call: Any) -> Message:
    """A tool call, its fields in the order vLLM's validation leaves them in, its arguments an object."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or call.get("type") != "function" or not isinstance(call.get("id"), str):
        raise Unsupported("a tool call that is no function call with an id")
    if not (isinstance(function.get("name"), str) and isinstance(function.get("arguments"), str)):
        raise Unsupported("a tool call without a name, or with arguments that are no string")
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = {}
    made = {"arguments": arguments if isinstance(arguments, dict) else {}, "name": function["name"]}
    return {"id": call["id"], "function": {**made, **_rest(function, made)}, "type": "function", **_rest(call, _CALL)}


_CALL: Final = ("id", "function", "type")


def _rest(found: Message, taken: Mapping[str, Any] | tuple[str, ...]) -> Message:
    return {key: value for key, value in found.items() if key not in taken}


def _tool(tool: Message) -> Message:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise Unsupported("a tool that is no function")
    if not isinstance(function.get("name"), str):
        raise Unsupported("a tool without a name")
    made = {key: function.get(key) for key in ("name", "description", "parameters")}
    later = tool.get("defer_loading")
    strict = function.get("strict")
    inner = function.get("defer_loading")
    made |= {"strict": strict} if strict is not None else {}
    made |= {"defer_loading": found} if (found := later if inner is None else inner) is not None else {}
    return {"type": "function", "function": made, **({"defer_loading": later} if later is not None else {})}


def _without_billing(pieces: list[Any]) -> list[Any]:
    kept: list[Any] = []
    for piece in pieces:
        typed = isinstance(piece, dict) and piece.get("type") == "text"
        text = piece if isinstance(piece, str) else piece.get("text") if typed else None
        if not (isinstance(text, str) and text.startswith(_BILLING)):
            kept.append(piece)
        elif rest := text.partition("\n")[2]:
            kept.append({**piece, "text": rest} if typed else rest)
    return kept


def _without_developer(messages: list[Message]) -> list[Message]:
    """Developer messages as the system's, all of which become one message at the front."""
    made = []
    for message in messages:
        if message["role"] == "developer":
            message = {key: value for key, value in message.items() if key != "tools"} | {"role": "system"}
        made.append(message)
    of_system = [i for i, message in enumerate(made) if message["role"] == "system"]
    if of_system == [0]:
        return made
    texts = []
    for i in of_system:
        content = made[i]["content"]
        text = content if isinstance(content, str) else "\n".join(part["text"] for part in content if "text" in part)
        texts += [text] if text else []
    others = [message for message in made if message["role"] != "system"]
    return [{"role": "system", "content": "\n\n".join(texts)}, *others]
