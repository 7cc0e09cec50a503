"""The pod over real sockets: a plain HTTP client, the official OpenAI SDK, disconnects, faults, the process itself."""

import asyncio
import json
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

import aiohttp
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from epp.sim.engine import LAPTOP
from epp.sim.server import SimulatedPod

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
LONG = {"messages": [{"role": "user", "content": "x" * 800}], "max_tokens": 4000, "ignore_eos": True, "stream": True}


@pytest.fixture
async def pod() -> AsyncIterator[SimulatedPod]:
    async with SimulatedPod(name="pod-a", time_scale=20, lora=("poet",)) as pod:
        yield pod


@pytest.fixture
async def client(pod: SimulatedPod) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(pod.url) as client:
        yield client


@pytest.fixture
async def sdk(pod: SimulatedPod) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 - the engine has no event for what tests ask of it
            await asyncio.sleep(0.002)


async def post(client: aiohttp.ClientSession, path: str, body: Any, status: int = 200) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with client.post(path, data=data) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def sse(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """(event name, decoded data) of a stream; `[DONE]` stays text."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = await response.text()
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *names, data = block.split("\n")
        payload = data.removeprefix("data: ")
        events.append(
            (names[0].removeprefix("event: ") if names else "", payload if payload == "[DONE]" else json.loads(payload))
        )
    return events


async def metric(client: aiohttp.ClientSession, name: str, **labels: str) -> float:
    """The one sample of that name whose labels include these."""
    async with client.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    (value,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return value


# --- the OpenAI SDK -----------------------------------------------------------------------------------------------


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


# --- caching, sampling --------------------------------------------------------------------------------------------


async def test_a_second_turn_finds_the_first_and_its_answer_in_the_cache(client: aiohttp.ClientSession) -> None:
    turn: list[dict[str, str]] = [{"role": "user", "content": "x" * 400}]
    first = await post(client, "/v1/chat/completions", {"messages": turn, "max_tokens": 32, "ignore_eos": True})
    assert first["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    turn += [first["choices"][0]["message"], {"role": "user", "content": "and?"}]
    second = await post(client, "/v1/chat/completions", {"messages": turn, "max_tokens": 1})
    computed = first["usage"]["total_tokens"] - 1
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == computed // 16 * 16
    assert await metric(client, "vllm:prefix_cache_hits_total") == computed // 16 * 16


@pytest.mark.parametrize("other", [{"cache_salt": "tenant"}, {"model": "poet"}])
async def test_salt_and_adapter_share_nothing(client: aiohttp.ClientSession, other: dict[str, str]) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 1}
    for extra, cached in (({}, 0), (other, 0), (other, 96), ({}, 96)):
        answer = await post(client, "/v1/completions", {**body, **extra})
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_the_prefix_cache_can_be_reset_while_idle(client: aiohttp.ClientSession, pod: SimulatedPod) -> None:
    body = {"prompt": "x" * 400, "max_tokens": 1}
    await post(client, "/v1/completions", body)
    async with client.post("/v1/chat/completions", json=LONG) as streaming:
        await streaming.content.readline()
        error = (await post(client, "/reset_prefix_cache", {}, 409))["error"]
        assert "in use" in error["message"]
    await until(lambda: pod.engine.free_blocks == LAPTOP.blocks)
    async with client.post("/reset_prefix_cache") as response:
        assert response.status == 200
    assert (await post(client, "/v1/completions", body))["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


async def test_two_pods_with_one_seed_answer_alike() -> None:
    async def answers(seed: int) -> list[str]:
        async with SimulatedPod(seed=seed, time_scale=50) as pod, aiohttp.ClientSession(pod.url) as client:
            bodies = [{"messages": [{"role": "user", "content": f"question {number}"}]} for number in range(5)]
            done = await asyncio.gather(*(post(client, "/v1/chat/completions", body) for body in bodies))
            return [answer["choices"][0]["message"]["content"] for answer in done]

    one, two, other = await asyncio.gather(answers(1), answers(1), answers(2))
    assert one == two
    assert one != other
    assert len({len(text) for text in one}) > 1, "lengths differ from prompt to prompt"


async def test_stop_strings_cut_the_answer(client: aiohttp.ClientSession) -> None:
    body = {"prompt": "tell me", "max_tokens": 20, "ignore_eos": True}
    text = (await post(client, "/v1/completions", body))["choices"][0]["text"]
    stop = text[18:22]
    cut = await post(client, "/v1/completions", {**body, "stop": [stop]})
    assert cut["choices"][0]["text"] == text[: text.index(stop)]
    assert cut["choices"][0]["finish_reason"] == "stop"
    assert cut["usage"]["completion_tokens"] == -(-(text.index(stop) + 4) // 4)
    streamed = await sse(client, "/v1/completions", {**body, "stop": stop})
    assert "".join(data["choices"][0]["text"] for _, data in streamed[:-1]) == text[: text.index(stop)]


async def test_lengths_asked_for_are_kept(client: aiohttp.ClientSession) -> None:
    for extra, tokens in (({"max_completion_tokens": 3}, 3), ({"max_tokens": 200, "min_tokens": 200}, 200)):
        body = {"messages": HELLO["messages"], **extra}
        assert (await post(client, "/v1/chat/completions", body))["usage"]["completion_tokens"] == tokens


# --- wire formats -------------------------------------------------------------------------------------------------


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
    events = await sse(client, "/v1/messages", body)
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


async def test_tokenize_and_back(client: aiohttp.ClientSession) -> None:
    chat = await post(client, "/tokenize", {"messages": HELLO["messages"]})
    answer = await post(client, "/v1/chat/completions", HELLO)
    assert chat["count"] == len(chat["tokens"]) == answer["usage"]["prompt_tokens"]
    assert chat["max_model_len"] == LAPTOP.capacity
    text = await post(client, "/tokenize", {"prompt": "grüße"})
    assert await post(client, "/detokenize", {"tokens": text["tokens"]}) == {"prompt": "grüße"}


async def test_headers_come_before_the_first_token_and_ids_are_echoed(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"slow": 1000})
    async with client.post("/v1/chat/completions", json=LONG, headers={"x-request-id": "qü7"}) as response:
        assert response.headers["x-request-id"] == "q?7"
        assert response.headers["x-sim-pod"] == "pod-a"
        assert not response.content.is_eof()


async def test_an_id_that_is_no_text_harms_nothing(pod: SimulatedPod) -> None:
    reader, writer = await asyncio.open_connection(*pod.address.split(":"))
    body = json.dumps(HELLO).encode()
    head = f"POST /v1/chat/completions HTTP/1.0\r\nHost: x\r\nContent-Length: {len(body)}\r\n".encode()
    writer.write(head + b"x-request-id: a\xff\xfeb\r\n\r\n" + body)
    answer = await reader.read()
    writer.close()
    await writer.wait_closed()
    assert answer.startswith(b"HTTP/1.0 200")
    assert b'"id":"chatcmpl-a??b"' in answer


async def test_plain_endpoints(client: aiohttp.ClientSession) -> None:
    for path in ("/health", "/ping"):
        async with client.get(path) as response:
            assert (response.status, await response.read()) == (200, b"")
    async with client.get("/version") as response:
        assert (await response.json())["version"].startswith("0.")
    async with client.get("/load") as response:
        assert await response.json() == {"server_load": 0}
    assert await post(client, "/v1/audio/transcriptions", {}, 404) == {"detail": "Not Found"}


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


async def test_a_body_beyond_the_bound_is_refused(
    client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("epp.sim.endpoints.MAX_BODY", 1000)
    async with SimulatedPod() as small, aiohttp.ClientSession(small.url) as client:
        assert (await post(client, "/v1/completions", b" " * 2000, 413))["error"]["code"] == 413


async def test_live_requests_are_bounded(client: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.sim.endpoints.MAX_LIVE", 1)
    async with client.post("/v1/chat/completions", json=LONG):
        error = (await post(client, "/v1/chat/completions", HELLO, 503))["error"]
        assert error["type"] == "ServiceUnavailableError"


# --- metrics ------------------------------------------------------------------------------------------------------

NAMES = """
num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc
prefix_cache_queries_total prefix_cache_hits_total external_prefix_cache_queries_total external_prefix_cache_hits_total
prompt_tokens_total prompt_tokens_by_source_total prompt_tokens_cached_total prompt_tokens_cached_by_source_total
generation_tokens_total num_preemptions_total request_success_total cache_config_info
time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket e2e_request_latency_seconds_bucket
request_queue_time_seconds_bucket request_prefill_time_seconds_bucket request_decode_time_seconds_bucket
request_prefill_kv_computed_tokens_bucket lora_requests_info
"""


async def test_the_metrics_page_has_vllms_names_and_labels(client: aiohttp.ClientSession) -> None:
    await post(client, "/v1/chat/completions", HELLO)
    async with client.get("/metrics") as response:
        assert response.headers["content-type"].startswith("text/plain; version=")
        text = await response.text()
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    names = {sample.name for sample in samples}
    assert {f"vllm:{name}" for name in NAMES.split()} <= names
    for sample in samples:
        if sample.name not in ("vllm:cache_config_info", "vllm:lora_requests_info"):
            assert {"engine": "0", "model_name": "sim"}.items() <= sample.labels.items()
    (config,) = [sample for sample in samples if sample.name == "vllm:cache_config_info"]
    assert (config.labels["block_size"], config.labels["num_gpu_blocks"]) == ("16", "640")
    values = {sample.name: sample.value for sample in samples if not sample.name.endswith("_bucket")}
    assert values["vllm:time_to_first_token_seconds_count"] == 1
    assert values["vllm:inter_token_latency_seconds_count"] == 5
    assert values["vllm:generation_tokens_total"] == 6
    assert await metric(client, "vllm:request_success_total", finished_reason="length") == 1


async def test_running_waiting_and_adapters_are_reported() -> None:
    parameters = replace(LAPTOP, max_running=1)
    async with SimulatedPod(parameters=parameters, lora=("poet", "cook")) as pod:
        async with aiohttp.ClientSession(pod.url) as client:
            async with client.post("/v1/chat/completions", json={**LONG, "model": "poet"}) as first:
                await first.content.readline()
                async with client.post("/v1/chat/completions", json={**LONG, "model": "cook"}):
                    await until(lambda: len(pod.engine.waiting) == 1)
                    assert await metric(client, "vllm:num_requests_running") == 1
                    assert await metric(client, "vllm:num_requests_waiting") == 1
                    assert 0 < await metric(client, "vllm:kv_cache_usage_perc") < 1
                    lora = {"max_lora": "1", "running_lora_adapters": "poet", "waiting_lora_adapters": "cook"}
                    assert await metric(client, "vllm:lora_requests_info", **lora) > 0


async def test_without_adapters_there_is_no_lora_metric() -> None:
    async with SimulatedPod() as pod, aiohttp.ClientSession(pod.url) as client:
        async with client.get("/metrics") as response:
            assert "lora" not in await response.text()


# --- disconnects and faults ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_is_taken_out_of_the_engine(
    pod: SimulatedPod, client: aiohttp.ClientSession, stream: bool
) -> None:
    async with asyncio.TaskGroup() as group:
        asking = group.create_task(post(client, "/v1/chat/completions", {**LONG, "stream": stream}))
        await until(lambda: len(pod.engine.running) == 1)
        asking.cancel()
    await until(lambda: not pod.engine.running)
    assert pod.engine.free_blocks == LAPTOP.blocks
    assert await metric(client, "vllm:request_success_total", finished_reason="abort") == 1


async def test_a_fault_status_hits_the_share_it_is_given(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"status": 503, "rate": 0.5})
    statuses = []
    for _ in range(40):
        async with client.get("/health") as response:
            statuses.append(response.status)
    assert set(statuses) == {200, 503}
    assert 8 <= statuses.count(503) <= 32
    async with client.delete("/admin/faults") as response:
        assert (await response.json())["status"] is None
    async with client.get("/health") as response:
        assert response.status == 200


async def test_a_hanging_pod_says_nothing(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"hang": True})
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await client.get("/health")
    async with client.get("/metrics") as response:
        assert response.status == 200


async def test_a_refusing_pod_cuts_the_connection(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"refuse": True})
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(client, "/v1/chat/completions", HELLO)


@pytest.mark.parametrize("chunks", [0, 3])
async def test_a_stream_is_cut_after_so_many_chunks(
    pod: SimulatedPod, client: aiohttp.ClientSession, chunks: int
) -> None:
    await post(client, "/admin/faults", {"drop_after": chunks})
    received: list[bytes] = []
    async with client.post("/v1/chat/completions", json=LONG) as response:
        assert response.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            received.extend([line async for line in response.content])
    if chunks:
        assert len(received) <= 2 * chunks
    await until(lambda: not pod.engine.running)


async def test_an_answer_that_is_not_streamed_is_cut_too(client: aiohttp.ClientSession) -> None:
    await post(client, "/admin/faults", {"drop_after": 2})
    with pytest.raises(aiohttp.ClientConnectionError):
        await post(client, "/v1/chat/completions", HELLO)


async def test_a_slow_pod_takes_longer(client: aiohttp.ClientSession) -> None:
    async def latency() -> float:
        return await metric(client, "vllm:e2e_request_latency_seconds_sum")

    await post(client, "/v1/chat/completions", HELLO)
    before = await latency()
    await post(client, "/admin/faults", {"slow": 4})
    await post(client, "/v1/chat/completions", HELLO)
    assert await latency() - before > 2 * before, "engine time, not this machine's"


@pytest.mark.parametrize("kind", ["huge", "endless", "binary", "half", "hang", "off"])
async def test_bad_metrics_pages(client: aiohttp.ClientSession, kind: str) -> None:
    async with client.get("/metrics") as response:
        good = await response.read()
    await post(client, "/admin/faults", {"metrics": kind})
    if kind == "hang":
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await client.get("/metrics")
        return
    async with client.get("/metrics") as response:
        assert response.status == (404 if kind == "off" else 200)
        if kind == "half":
            with pytest.raises(aiohttp.ClientPayloadError):
                await response.read()
        elif kind == "binary":
            with pytest.raises(UnicodeDecodeError):
                (await response.read()).decode()
        elif kind in ("huge", "endless"):
            assert len(await response.content.readexactly(1 << 20)) > len(good)
    async with client.get("/health") as response:
        assert response.status == 200


# --- the process --------------------------------------------------------------------------------------------------


async def started(*arguments: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "epp.sim.server",
        *arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_the_process_even_under_a_stream(number: signal.Signals) -> None:
    process = await started("--port", "0", "--name", "pod-b")
    assert process.stdout is not None
    line = (await process.stdout.readline()).decode()
    assert line.startswith("pod-b: simulated vLLM on http://127.0.0.1:")
    async with aiohttp.ClientSession(line.split()[-1]) as client:
        async with client.post("/v1/chat/completions", json=LONG) as response:
            await response.content.readline()
            process.send_signal(number)
            async with asyncio.timeout(10):
                _, errors = await process.communicate()
    assert (process.returncode, errors) == (0, b"")


async def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = await started("--port", str(port))
        output, errors = await process.communicate()
    assert (process.returncode, output) == (2, b"")
    assert errors.decode() == f"pod: cannot listen on 127.0.0.1:{port}: Address already in use\n"


async def test_a_time_scale_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="time_scale"):
        SimulatedPod(time_scale=0)
