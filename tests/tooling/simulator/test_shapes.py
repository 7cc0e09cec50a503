"""Wire formats: what the official OpenAI SDK reads, and the forms it hides."""

import aiohttp
import openai
import pytest

from tests.support.engines.simulated import HELLO, post, sse
from tooling.simulator.engine import LAPTOP


async def test_the_sdk_chats(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}], max_tokens=7)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.prompt_tokens) == (7, 10)
    assert answer.choices[0].message.content is not None
    assert len(answer.choices[0].message.content.split()) == 7


async def test_the_sdk_streams_a_chat_token_by_token(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.chat.completions.create(model="sim", messages=[{"role": "user", "content": "hi"}])
    stream = await sdk.chat.completions.create(
        model="sim", messages=[{"role": "user", "content": "hi"}], stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [chunk.choices[0].delta for chunk in chunks if chunk.choices]
    assert deltas[0].role == "assistant"
    assert "".join(delta.content or "" for delta in deltas) == whole.choices[0].message.content
    assert whole.usage is not None
    assert sum(bool(delta.content) for delta in deltas) == whole.usage.completion_tokens, "one chunk per token"
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_the_sdk_completes_several_prompts(sdk: openai.AsyncOpenAI) -> None:
    answer = await sdk.completions.create(model="sim", prompt=["one", "two"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.text for choice in answer.choices}) == 4
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 12
    stream = await sdk.completions.create(model="sim", prompt=["one", "two"], n=2, max_tokens=3, stream=True)
    texts = ["", "", "", ""]
    async for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in answer.choices]


async def test_the_sdk_uses_responses(sdk: openai.AsyncOpenAI) -> None:
    whole = await sdk.responses.create(model="sim", instructions="be brief", input="hi", max_output_tokens=400)
    assert (whole.status, whole.usage and whole.usage.output_tokens) == ("completed", len(whole.output_text.split()))
    kinds, numbers, text = [], [], ""
    stream = await sdk.responses.create(model="sim", instructions="be brief", input="hi", stream=True)
    async for event in stream:
        kinds.append(event.type)
        numbers.append(event.sequence_number)
        if event.type == "response.output_text.delta":
            text += event.delta
    assert text == whole.output_text
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert numbers == list(range(len(numbers)))


async def test_the_sdk_embeds_in_both_encodings(sdk: openai.AsyncOpenAI) -> None:
    packed = await sdk.embeddings.create(model="sim", input=["a", "b", "a"], dimensions=8)
    plain = await sdk.embeddings.create(model="sim", input=["a"], dimensions=8, encoding_format="float")
    vectors = [item.embedding for item in packed.data]
    assert vectors[0] == vectors[2] != vectors[1]
    assert vectors[0] == pytest.approx(plain.data[0].embedding, rel=1e-6)
    assert sum(value * value for value in vectors[0]) == pytest.approx(1)


async def test_the_sdk_lists_models_and_their_adapters(sdk: openai.AsyncOpenAI) -> None:
    models = {model.id: model for model in (await sdk.models.list()).data}
    assert set(models) == {"sim", "poet"}
    assert (models["sim"].model_extra or {})["max_model_len"] == LAPTOP.capacity
    assert (models["poet"].model_extra or {})["parent"] == "sim"


async def test_the_sdk_understands_our_errors(sdk: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="`gpt` does not exist"):
        await sdk.chat.completions.create(model="gpt", messages=[{"role": "user", "content": "hi"}])
    with pytest.raises(openai.BadRequestError, match="maximum context length is 10240"):
        await sdk.completions.create(model="sim", prompt="x" * 41_000)


async def test_chat_streams_have_vllms_form(client: aiohttp.ClientSession) -> None:
    events = await sse(client, "/v1/chat/completions", HELLO)
    assert events[-1] == ("", "[DONE]")
    chunks = [data for _, data in events[:-1]]
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert len(chunks) == 1 + 6
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in chunk for chunk in chunks), "usage only when asked for"


async def test_anthropic_messages(client: aiohttp.ClientSession) -> None:
    body = {**HELLO, "system": [{"type": "text", "text": "be brief"}]}
    whole = await post(client, "/v1/messages", body)
    assert whole["stop_reason"] == "max_tokens"
    *events, last = await sse(client, "/v1/messages", body)
    assert last == ("", "[DONE]")
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert all(name == data["type"] for name, data in events)
    text = "".join(data["delta"]["text"] for name, data in events if name == "content_block_delta")
    assert text == whole["content"][0]["text"]
    counted = await post(client, "/v1/messages/count_tokens", body)
    assert counted["input_tokens"] == whole["usage"]["input_tokens"]
    error = await post(client, "/v1/messages", {"max_tokens": 1}, 400)
    assert (error["type"], error["error"]["type"]) == ("error", "invalid_request_error")
