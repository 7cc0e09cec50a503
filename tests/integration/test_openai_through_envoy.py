"""What clients see of the whole chain: the official OpenAI client, plain HTTP, bytes; in both wirings that stream."""

import asyncio
import gzip
import io
import json
from base64 import b64encode
from collections.abc import AsyncIterator
from typing import Any, cast

import openai
import pytest
import pytest_asyncio

from gateway.wiring import Wiring
from tests.support.gateway.chain import Laptop, eventually, laptop

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

HELLO: Any = [{"role": "user", "content": "Say hello"}]
FLAGS = ("--trust-client-headers", "--refresh-metrics-interval", "0.2")


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["lean", "full-duplex"])
async def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    folder = tmp_path_factory.mktemp(request.param)
    async with laptop(folder, wiring=cast(Wiring, request.param), flags=FLAGS) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def chain(started: Laptop) -> AsyncIterator[Laptop]:
    yield started
    for pod in started.chain.pods:
        await started.faults(pod)
    await started.idle()


@pytest_asyncio.fixture(loop_scope="module")
async def client(chain: Laptop) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{chain.url}/v1", api_key="none", max_retries=0) as made:
        yield made


# --- the official client --------------------------------------------------------------------------------------------


async def test_chat(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="sim", messages=HELLO, max_tokens=8)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 8


async def test_a_picture_is_as_long_as_its_tokens_and_cached_where_it_was(
    client: openai.AsyncOpenAI, chain: Laptop
) -> None:
    png = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + (640).to_bytes(4, "big") + (960).to_bytes(4, "big") + bytes(300_000)
    url = "data:image/png;base64," + b64encode(png).decode()
    parts: Any = [{"type": "text", "text": "what is this? "}, {"type": "image_url", "image_url": {"url": url}}]
    turns: Any = [{"role": "user", "content": parts}]
    first = await client.chat.completions.with_raw_response.create(model="sim", messages=turns, max_tokens=4)
    answer = first.parse()
    assert answer.usage is not None
    assert 600 < answer.usage.prompt_tokens < 680
    _, (decision,) = await chain.chain.seen(1)
    assert decision["tokens"] == pytest.approx(answer.usage.prompt_tokens, rel=0.1)
    turns += [{"role": "assistant", "content": answer.choices[0].message.content}, {"role": "user", "content": "and?"}]
    second = await client.chat.completions.with_raw_response.create(model="sim", messages=turns, max_tokens=4)
    assert second.headers["x-sim-pod"] == first.headers["x-sim-pod"]
    usage = second.parse().usage
    assert usage is not None
    assert usage.prompt_tokens_details is not None
    assert (usage.prompt_tokens_details.cached_tokens or 0) >= 580


async def test_the_list_of_models(client: openai.AsyncOpenAI, chain: Laptop) -> None:
    async def own() -> bool:
        async with chain.http.get(f"{chain.url}/v1/models") as answer:
            assert answer.status == 200
            return "x-sim-pod" not in answer.headers

    await eventually(own, bool)
    assert [model.id async for model in client.models.list()] == ["sim"]


async def test_a_streamed_chat_says_the_same(client: openai.AsyncOpenAI) -> None:
    whole = await client.chat.completions.create(model="sim", messages=HELLO, seed=3)
    stream = await client.chat.completions.create(
        model="sim", messages=HELLO, seed=3, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


async def test_completions(client: openai.AsyncOpenAI) -> None:
    whole = await client.completions.create(model="sim", prompt="Once", max_tokens=6, seed=1)
    stream = await client.completions.create(model="sim", prompt="Once", max_tokens=6, seed=1, stream=True)
    assert "".join([choice.text async for chunk in stream for choice in chunk.choices]) == whole.choices[0].text != ""


async def test_responses(client: openai.AsyncOpenAI) -> None:
    whole = await client.responses.create(model="sim", input="Say hello", max_output_tokens=6)
    assert whole.output_text
    stream = await client.responses.create(model="sim", input="Say hello", max_output_tokens=6, stream=True)
    kinds = [event.type async for event in stream]
    assert (kinds[0], kinds[-1]) == ("response.created", kinds[-1])
    assert kinds[-1] in ("response.completed", "response.incomplete")


async def test_embeddings_and_models(client: openai.AsyncOpenAI) -> None:
    found = await client.embeddings.create(model="sim", input=["one", "two"])
    assert [len(each.embedding) for each in found.data] == [16, 16]
    assert [model.id async for model in client.models.list()] == ["sim"]


async def test_the_client_that_waits(chain: Laptop) -> None:
    def ask() -> tuple[str, str]:
        with openai.OpenAI(base_url=f"{chain.url}/v1", api_key="none", max_retries=0) as client:
            whole = client.chat.completions.create(model="sim", messages=HELLO, seed=5)
            stream = client.chat.completions.create(model="sim", messages=HELLO, seed=5, stream=True)
            pieces = [choice.delta.content or "" for chunk in stream for choice in chunk.choices]
            return whole.choices[0].message.content or "", "".join(pieces)

    whole, streamed = await asyncio.to_thread(ask)
    assert whole == streamed != ""


async def test_an_unknown_model_is_the_pods_to_refuse(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as refused:
        await client.chat.completions.create(model="nothing-like-it", messages=HELLO)
    assert refused.value.param == "model"
    assert "x-sim-pod" in refused.value.response.headers


async def test_a_missing_model_is_ours_to_refuse(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model=cast(Any, openai.omit), messages=HELLO)
    assert (refused.value.param, refused.value.type) == ("model", "invalid_request_error")
    assert "x-sim-pod" not in refused.value.response.headers


async def test_no_endpoint_is_503_in_the_openai_shape(client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as refused:
        await client.chat.completions.create(model="sim", messages=HELLO, extra_headers={"x-pool": "nobody"})
    assert refused.value.status_code == 503
    assert refused.value.message
    assert refused.value.type == "service_unavailable_error"


# --- plain HTTP -----------------------------------------------------------------------------------------------------


async def test_anthropic_messages(chain: Laptop) -> None:
    body = {"model": "sim", "messages": HELLO, "max_tokens": 6, "seed": 1}
    headers = {"anthropic-version": "2023-06-01"}
    async with chain.http.post(f"{chain.url}/v1/messages", json=body, headers=headers) as answer:
        whole = await answer.json()
    assert whole["type"] == "message"
    async with chain.http.post(f"{chain.url}/v1/messages", json={**body, "stream": True}, headers=headers) as answer:
        lines = (await answer.text()).splitlines()
    events = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    assert (events[0]["type"], events[-1]["type"]) == ("message_start", "message_stop")
    said = "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")
    assert said == whole["content"][0]["text"] != ""


async def test_an_unknown_path_goes_to_a_pod(chain: Laptop) -> None:
    async with chain.http.get(f"{chain.url}/not/there") as answer:
        assert (answer.status, await answer.json()) == (404, {"detail": "Not Found"})
        assert "x-sim-pod" in answer.headers


async def test_bad_json_is_refused_where_a_model_is_needed(chain: Laptop) -> None:
    async with chain.http.post(f"{chain.url}/v1/completions", data=b'{"model": ') as answer:
        assert (answer.status, answer.content_type) == (400, "application/json")
        assert (await answer.json())["error"]["type"] == "invalid_request_error"


# --- bytes ----------------------------------------------------------------------------------------------------------

EVENTS = b"".join(b'data: {"choices":[{"delta":{"content":"w\xc3\xb6rd %d"}}]}\n\n' % i for i in range(200))
ODD = b'\r\n\xef\xbb\xbf{"a" :  1,"a":2,\t"\\u00e9":"\xff\xfe" }\n\n\n'
BODIES = {"sse": EVENTS + b"data: [DONE]\n\n", "odd": ODD, "cut": EVENTS[:-7], "large": bytes(range(256)) * 8192}


async def raw_answer(chain: Laptop, body: bytes, **headers: str) -> bytes:
    """The body that the gateway gives for a request to the raw upstream."""
    async with chain.http.post(
        f"{chain.url}/v1/chat/completions", data=io.BytesIO(body), headers={"x-pool": "raw", **headers}
    ) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.read()


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("framing", ["length", "chunked"])
async def test_an_answer_arrives_as_the_pod_sent_it(chain: Laptop, name: str, framing: str) -> None:
    sent = BODIES[name]
    if framing == "length":
        chain.raw.answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(sent), sent)
    else:
        pieces = [sent[at : at + 997] for at in range(0, len(sent), 997)]
        chunks = b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
        kind = b"content-type: text/event-stream\r\n"
        chain.raw.answer = b"HTTP/1.1 200 OK\r\n" + kind + b"transfer-encoding: chunked\r\n\r\n" + chunks + b"0\r\n\r\n"
    assert await raw_answer(chain, b'{"model": "m", "messages": []}') == sent


async def test_a_request_arrives_as_the_client_sent_it(chain: Laptop) -> None:
    chain.raw.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    body = b'{ "model":"m",\t"messages" :[], "x":"\\u00e9 \xc3\xa9", "n": 1.0e2 }\n'
    assert await raw_answer(chain, body) == b"ok"
    assert chain.raw.asked[-1].endswith(b"\r\n\r\n" + body)
    assert chain.raw.asked[-1].startswith(b"POST /v1/chat/completions HTTP/1.1\r\n")


async def test_a_gzip_body_is_passed_as_it_is(chain: Laptop) -> None:
    chain.raw.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    body = gzip.compress(b'{"model": "m", "messages": []}' * 100)
    assert await raw_answer(chain, body, **{"content-encoding": "gzip"}) == b"ok"
    assert chain.raw.asked[-1].endswith(b"\r\n\r\n" + body)


async def test_a_body_of_4_mb(chain: Laptop) -> None:
    chain.raw.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "long word " * 420_000}]}).encode()
    assert len(body) > 4 << 20
    assert await raw_answer(chain, body) == b"ok"
    assert chain.raw.asked[-1].endswith(body)


async def test_a_client_cannot_say_where_its_request_goes(chain: Laptop) -> None:
    chain.raw.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    elsewhere = chain.pod("pod-a").address
    forged = {"x-gateway-destination-endpoint": elsewhere, "x-gateway-destination-endpoint-subset": elsewhere}
    assert await raw_answer(chain, b'{"model": "m", "messages": []}', **forged) == b"ok"
    assert elsewhere.encode() not in chain.raw.asked[-1]


async def test_the_answer_says_where_the_request_went_and_why(chain: Laptop) -> None:
    content, always = "why there " * 400, {"id", "endpoint", "tokens", "cached", "queue", "cost-ms", "next"}
    said = {}
    for turn in range(2):  # the second in pieces, so that there is a first token to predict
        answer = await chain.chat(content, stream=bool(turn), headers={"x-warmpath-explain": "1"})
        assert answer.status == 200
        said = dict(part.split("=", 1) for part in answer.headers["x-warmpath-decision"].split("; "))
        assert (int(said["cached"]) > 500) == bool(turn)
        assert said.keys() == (always | {"ttft-ms"} if turn else always)
    async with chain.http.get(f"{chain.chain.replicas[0].admin}/decisions/{said['id']}") as page:
        decision = await page.json()
    assert (decision["endpoint"], str(decision["tokens"])) == (said["endpoint"], said["tokens"])
    assert "x-warmpath-decision" not in (await chain.chat(content)).headers


async def test_an_endpoint_is_not_told_that_a_client_wants_to_know(chain: Laptop) -> None:
    chain.raw.answer = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok"
    assert await raw_answer(chain, b'{"model": "m", "messages": []}', **{"x-warmpath-explain": "1"}) == b"ok"
    assert b"warmpath" not in chain.raw.asked[-1]


# --- where requests go ----------------------------------------------------------------------------------------------


async def test_a_conversation_stays_where_its_prefix_is(chain: Laptop, client: openai.AsyncOpenAI) -> None:
    messages: Any = [{"role": "system", "content": f"You know this by heart. {'All of it. ' * 300}"}]
    pods, cached = set(), []
    for turn in range(4):
        messages.append({"role": "user", "content": f"Question {turn}: " + "why? " * 50})
        answer = await client.chat.completions.with_raw_response.create(model="sim", messages=messages, max_tokens=20)
        pods.add(answer.headers["x-sim-pod"])
        reported = answer.parse()
        messages.append({"role": "assistant", "content": reported.choices[0].message.content})
        assert reported.usage is not None
        assert reported.usage.prompt_tokens_details is not None
        cached.append(reported.usage.prompt_tokens_details.cached_tokens or 0)
    assert len(pods) == 1
    assert cached[0] < cached[1] < cached[2] < cached[3]


@pytest.mark.parametrize("fault", [{"refuse": True}, {"status": 503}])
async def test_a_pod_that_fails_is_done_without(chain: Laptop, fault: dict[str, Any]) -> None:
    prompt = f"Remember this {fault}. " * 200
    first = (await chain.chat(prompt)).headers["x-sim-pod"]
    await chain.idle()
    await chain.faults(chain.pod(first), **fault)
    again = await chain.chat(prompt, headers={"x-request-id": f"failing-{first}-{fault}"})
    assert again.status == 200
    assert again.headers["x-sim-pod"] != first
    await chain.idle()
    await chain.faults(chain.pod(first))
    kept = await chain.chat(prompt)  # the other pod has the prefix now too: whoever answers, it found it
    assert (await kept.json())["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_a_client_that_leaves_frees_the_pod(chain: Laptop) -> None:
    endless = {"max_tokens": 5000, "ignore_eos": True, "stream": True}
    body = {"model": "sim", "messages": HELLO, **endless}
    answer = await chain.http.post(f"{chain.url}/v1/chat/completions", json=body)
    pod = chain.pod(answer.headers["x-sim-pod"])
    await answer.content.readline()
    assert await chain.in_flight() == 1
    answer.close()

    async def load() -> int:
        return int((await chain.chain.get(f"{pod.url}/load"))["server_load"])

    await eventually(load, lambda count: count == 0)
    await chain.idle()


SATURATED = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: concurrency-detector
  parameters: {maxConcurrency: 1}
- type: round-robin-picker
schedulingProfiles:
- name: default
  plugins: [{pluginRef: round-robin-picker}]
flowControl:
  saturationDetector: {pluginRef: concurrency-detector}
"""


async def test_low_priority_is_shed_while_the_pool_is_full(chain: Laptop) -> None:
    before = chain.config.read_text()
    await chain.chain.reconfigure(chain.config, SATURATED)
    low = {"x-llm-d-inference-objective": "batch"}
    try:
        assert (await chain.chat("there is room", headers=low)).status == 200
        await chain.idle()
        for pod in chain.chain.pods:
            await chain.faults(pod, hang=True)
        async with asyncio.TaskGroup() as tasks:
            holding = [tasks.create_task(chain.chat("hold a place")) for _ in chain.chain.pods]
            await eventually(chain.in_flight, lambda count: count == len(holding))
            shed = await chain.chat("no hurry", headers=low)
            assert shed.status == 429
            assert shed.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
            assert (await shed.json())["error"]["code"] == "rejected-saturated"
            for task in holding:
                task.cancel()
    finally:
        await chain.chain.reconfigure(chain.config, before)
