"""What a pod answers: vLLM's JSON and SSE for each generating endpoint. One class per wire format, no I/O.

A shape is made per request. `whole` is the answer that is not streamed; `begin`, `token`, `end` are the pieces of a
stream, each a list of SSE events.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

Json = dict[str, Any]


def event(data: Json, name: str = "") -> bytes:
    """One server-sent event."""
    head = f"event: {name}\n".encode() if name else b""
    return head + b"data: " + msgspec.json.encode(data) + b"\n\n"


DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Counted:
    """Token counts of one answered request, all its choices together."""

    prompt: int
    completion: int
    cached: int

    @property
    def usage(self) -> Json:
        """`usage` as in chat completions, with vLLM's `--enable-prompt-tokens-details`."""
        return {
            "prompt_tokens": self.prompt,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens": self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }


@dataclass(frozen=True)
class Choice:
    text: str
    reason: str
    """`stop` or `length`."""


@dataclass(frozen=True)
class Frame:
    """What every shape says about the request."""

    id: str
    """Without the prefix that names the kind of object."""
    model: str
    created: int
    """Unix seconds."""
    include_usage: bool = False
    limit: int | None = None
    """The request's own token limit."""


class Shape(Protocol):
    """The wire format of one endpoint."""

    def __init__(self, frame: Frame) -> None: ...

    def whole(self, choices: Sequence[Choice], counted: Counted) -> Json: ...

    def begin(self, counted: Counted) -> list[bytes]:
        """Events that come with the first token of all."""

    def token(self, choice: int, text: str, reason: str | None) -> list[bytes]:
        """Events of one token of a choice; `reason` is set at its last."""

    def end(self, choices: Sequence[Choice], counted: Counted) -> list[bytes]:
        """Events after the last token of all."""


class ChatShape:
    """/v1/chat/completions"""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._begun: set[int] = set()

    def whole(self, choices: Sequence[Choice], counted: Counted) -> Json:
        return {
            **self._head("chat.completion"),
            "choices": [
                {
                    "index": index,
                    "message": {
                        "role": "assistant",
                        "content": choice.text,
                        "refusal": None,
                        "annotations": None,
                        "audio": None,
                        "function_call": None,
                        "tool_calls": [],
                        "reasoning": None,
                    },
                    "logprobs": None,
                    "finish_reason": choice.reason,
                    "stop_reason": None,
                    "token_ids": None,
                }
                for index, choice in enumerate(choices)
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": counted.usage,
            "prompt_logprobs": None,
            "prompt_token_ids": None,
            "kv_transfer_params": None,
        }

    def begin(self, counted: Counted) -> list[bytes]:
        return []

    def token(self, choice: int, text: str, reason: str | None) -> list[bytes]:
        events = []
        if choice not in self._begun:
            self._begun.add(choice)
            events.append(self._chunk(choice, {"role": "assistant", "content": ""}, {"finish_reason": None}))
        if text or reason:
            ending: Json = {"finish_reason": reason, "stop_reason": None} if reason else {"finish_reason": None}
            events.append(self._chunk(choice, {"content": text}, {**ending, "token_ids": None}))
        return events

    def end(self, choices: Sequence[Choice], counted: Counted) -> list[bytes]:
        usage = {**self._head("chat.completion.chunk"), "choices": [], "usage": counted.usage}
        return [event(usage), DONE] if self._frame.include_usage else [DONE]

    def _chunk(self, choice: int, delta: Json, rest: Json) -> bytes:
        parts = {"index": choice, "delta": delta, "logprobs": None, **rest}
        return event({**self._head("chat.completion.chunk"), "choices": [parts]})

    def _head(self, kind: str) -> Json:
        frame = self._frame
        return {"id": f"chatcmpl-{frame.id}", "object": kind, "created": frame.created, "model": frame.model}


class CompletionShape:
    """/v1/completions"""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def whole(self, choices: Sequence[Choice], counted: Counted) -> Json:
        return {
            **self._head(),
            "choices": [
                {**self._choice(index, choice.text, choice.reason), "prompt_logprobs": None}
                for index, choice in enumerate(choices)
            ],
            "service_tier": None,
            "system_fingerprint": None,
            "usage": counted.usage,
            "kv_transfer_params": None,
        }

    def begin(self, counted: Counted) -> list[bytes]:
        return []

    def token(self, choice: int, text: str, reason: str | None) -> list[bytes]:
        if not text and not reason:
            return []
        return [event({**self._head(), "choices": [self._choice(choice, text, reason)]})]

    def end(self, choices: Sequence[Choice], counted: Counted) -> list[bytes]:
        usage = {**self._head(), "choices": [], "usage": counted.usage}
        return [event(usage), DONE] if self._frame.include_usage else [DONE]

    def _choice(self, index: int, text: str, reason: str | None) -> Json:
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}

    def _head(self) -> Json:
        frame = self._frame
        return {"id": f"cmpl-{frame.id}", "object": "text_completion", "created": frame.created, "model": frame.model}


class ResponsesShape:
    """/v1/responses: one choice; its stream has named events, numbered, and no `[DONE]`."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame
        self._number = 0
        self._place = {"item_id": f"msg_{frame.id}", "output_index": 0, "content_index": 0}

    def whole(self, choices: Sequence[Choice], counted: Counted) -> Json:
        choice = choices[0]
        cut = choice.reason == "length"
        return {
            **self._response("incomplete" if cut else "completed"),
            "output": [self._item(choice.text, "incomplete" if cut else "completed")],
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": counted.prompt,
                "input_tokens_details": {"cached_tokens": counted.cached},
                "output_tokens": counted.completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": counted.prompt + counted.completion,
            },
        }

    def begin(self, counted: Counted) -> list[bytes]:
        item = {**self._item("", "in_progress"), "content": []}
        return [
            self._event("response.created", {"response": self._response("in_progress")}),
            self._event("response.in_progress", {"response": self._response("in_progress")}),
            self._event("response.output_item.added", {"output_index": 0, "item": item}),
            self._event("response.content_part.added", {**self._place, "part": self._part("")}),
        ]

    def token(self, choice: int, text: str, reason: str | None) -> list[bytes]:
        delta = {**self._place, "delta": text, "logprobs": []}
        return [self._event("response.output_text.delta", delta)] if text else []

    def end(self, choices: Sequence[Choice], counted: Counted) -> list[bytes]:
        whole = self.whole(choices, counted)
        text = choices[0].text
        kind = f"response.{whole['status']}"
        return [
            self._event("response.output_text.done", {**self._place, "text": text, "logprobs": []}),
            self._event("response.content_part.done", {**self._place, "part": self._part(text)}),
            self._event("response.output_item.done", {"output_index": 0, "item": whole["output"][0]}),
            self._event(kind, {"response": whole}),
        ]

    def _event(self, kind: str, data: Json) -> bytes:
        number, self._number = self._number, self._number + 1
        return event({"type": kind, "sequence_number": number, **data}, kind)

    def _part(self, text: str) -> Json:
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": None}

    def _item(self, text: str, status: str) -> Json:
        content = [self._part(text)]
        return {
            "id": self._place["item_id"],
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": content,
        }

    def _response(self, status: str) -> Json:
        frame = self._frame
        return {
            "id": f"resp_{frame.id}",
            "object": "response",
            "created_at": frame.created,
            "model": frame.model,
            "status": status,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": None,
            "parallel_tool_calls": True,
            "temperature": 1.0,
            "top_p": 1.0,
            "tool_choice": "auto",
            "tools": [],
            "background": False,
            "max_output_tokens": frame.limit,
            "previous_response_id": None,
            "service_tier": "auto",
            "truncation": "disabled",
            "usage": None,
        }


_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens"}


class MessagesShape:
    """/v1/messages (Anthropic): one choice, named events, and vLLM's `[DONE]`, which Anthropic itself does not send."""

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def whole(self, choices: Sequence[Choice], counted: Counted) -> Json:
        choice = choices[0]
        return {
            **self._message(),
            "content": [{"type": "text", "text": choice.text}],
            "stop_reason": _STOP_REASONS[choice.reason],
            "usage": self._usage(counted, counted.completion),
        }

    def begin(self, counted: Counted) -> list[bytes]:
        message = {**self._message(), "usage": self._usage(counted, 0)}
        block = {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
        return [
            event({"type": "message_start", "message": message}, "message_start"),
            event(block, "content_block_start"),
        ]

    def token(self, choice: int, text: str, reason: str | None) -> list[bytes]:
        delta = {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": text}}
        return [event(delta, "content_block_delta")] if text else []

    def end(self, choices: Sequence[Choice], counted: Counted) -> list[bytes]:
        delta = {
            "type": "message_delta",
            "delta": {"stop_reason": _STOP_REASONS[choices[0].reason], "stop_sequence": None},
            "usage": self._usage(counted, counted.completion),
        }
        return [
            event({"type": "content_block_stop", "index": 0}, "content_block_stop"),
            event(delta, "message_delta"),
            event({"type": "message_stop"}, "message_stop"),
            DONE,
        ]

    def _usage(self, counted: Counted, output: int) -> Json:
        """Anthropic counts what came from the cache apart from the rest of the input."""
        fresh = counted.prompt - counted.cached
        return {"input_tokens": fresh, "output_tokens": output, "cache_read_input_tokens": counted.cached}

    def _message(self) -> Json:
        frame = self._frame
        return {
            "id": f"msg_{frame.id}",
            "type": "message",
            "role": "assistant",
            "model": frame.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }
