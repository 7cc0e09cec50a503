"""Wrong requests are refused with the field at fault, odd ones are answered."""

from base64 import b64encode
from typing import Any

import aiohttp
import pytest

from tests.support.engines.simulated import HELLO, post
from tooling.simulator.requests import Chat, Messages, Responses
from tooling.simulator.tokenizer import count


@pytest.mark.parametrize(
    ("path", "body", "param", "message"),
    [
        ("/v1/chat/completions", b'{"messages":', None, "JSON"),
        ("/v1/chat/completions", b"[" * 100_000, None, "Expected `object`"),
        ("/v1/chat/completions", b'{"messages":[{"content":' + b"[" * 100_000, None, "JSON"),
        ("/v1/chat/completions", b"\xff\xfe", None, "JSON"),
        ("/v1/chat/completions", {"model": "sim"}, "messages", "missing required field"),
        ("/v1/chat/completions", {"messages": []}, "messages", "at least one"),
        ("/v1/chat/completions", {"messages": "hi"}, "messages", "Expected `array"),
        ("/v1/chat/completions", {**HELLO, "max_tokens": 0}, "max_tokens", "at least 1"),
        ("/v1/chat/completions", {**HELLO, "max_tokens": "many"}, "max_tokens", "Expected `int"),
        ("/v1/chat/completions", {**HELLO, "n": 65}, "n", "expected 1 to 64"),
        ("/v1/chat/completions", {**HELLO, "max_tokens": 10_240}, "input_tokens", "maximum context length"),
        ("/v1/completions", {"prompt": ""}, "prompt", "empty"),
        ("/v1/completions", {"prompt": []}, "prompt", "empty list"),
        ("/v1/completions", {"prompt": [1, -1]}, "prompt", "token ids"),
        ("/v1/completions", {"prompt": ["a"] * 65}, "prompt", "at most 64"),
        ("/v1/completions", {"prompt": ["a"] * 33, "n": 2}, "n", "66 answers in all"),
        ("/v1/responses", {"input": []}, "input", "at least one"),
        ("/v1/embeddings", {"input": "a", "dimensions": 0}, "dimensions", "expected 1 to 4096"),
        ("/v1/embeddings", {"input": "a", "encoding_format": "hex"}, "encoding_format", "'float' or 'base64'"),
        ("/tokenize", {}, "prompt", "expected `prompt` or `messages`"),
        ("/detokenize", {"tokens": [-1]}, "tokens", "token ids"),
        ("/admin/faults", {"status": 200}, "status", ">= 400"),
        ("/admin/faults", {"stauts": 503}, "stauts", "unknown field"),
    ],
)
async def test_wrong_requests_name_the_field(
    client: aiohttp.ClientSession, path: str, body: Any, param: str | None, message: str
) -> None:
    error = (await post(client, path, body, 400))["error"]
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param)
    assert message in error["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": 5, "content": 7}]},
        {"messages": [{}]},
        {"messages": [{"content": [None, 3, {"text": 4}, {"text": "a"}]}], "tools": [{}]},
        {"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "c"}]}]},
        {**HELLO, "stream": None, "stop": None, "n": None, "temperature": "hot", "unknown": {"a": [1]}},
        {**HELLO, "messages": [{"role": "user", "content": "\u0000\ud83d\ude00"}], "max_tokens": None},
    ],
)
async def test_odd_requests_are_answered(client: aiohttp.ClientSession, body: Any) -> None:
    assert (await post(client, "/v1/chat/completions", body))["object"] == "chat.completion"


async def test_responses_take_items_of_every_kind(client: aiohttp.ClientSession) -> None:
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "hi"}]},
        {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "42"},
    ]
    assert (await post(client, "/v1/responses", {"input": items}))["object"] == "response"
    error = (await post(client, "/v1/responses", {"input": "hi", "previous_response_id": "resp_1"}, 404))["error"]
    assert error["param"] == "previous_response_id"


def test_a_picture_has_the_tokens_that_it_becomes() -> None:
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (640).to_bytes(4, "big") * 2 + bytes(90_000)
    url = "data:image/png;base64," + b64encode(png).decode()
    image = {"type": "image_url", "image_url": {"url": url}}
    source = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": b64encode(png).decode()}}
    for body in (
        Chat(messages=[{"role": "user", "content": [image]}]),
        Messages(messages=[{"role": "user", "content": [source]}]),
        Responses(input=[{"role": "user", "content": [{"type": "input_image", "image_url": url}]}]),
    ):
        (prompt,) = body.prompts()
        assert 400 < count(prompt) < 450
