"""Real SGLang: prefill and decode on two servers, KV over NIXL, our sidecar, real Envoy, our picker."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from random import Random
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from epp.configuration.loader import strategy_text
from tests.support.engines.real_engines import PICKING, TIMEOUT, blocks_stored, eventually, killed
from tests.support.engines.sglang import Sglang
from tests.support.gateway.chain import Laptop, laptop

pytestmark = pytest.mark.asyncio(loop_scope="session")

PAGE, TOKENS = 32, 8192
PODS = "pod-a", "pod-b"
PREFILLS, DECODES = (f"default/{pod}" for pod in PODS)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    """`pod-a` prefills; `pod-b` decodes, behind a sidecar."""
    engine = Sglang(page=PAGE, tokens=TOKENS)
    folder = tmp_path_factory.mktemp("pair")
    async with laptop(folder, wiring="full-duplex", pods=2, flags=PICKING, engine=engine) as made:
        await made.chain.reconfigure(made.config, strategy_text("kv-aware"))
        yield made


async def asked(fleet: Laptop, path: str, body: Mapping[str, Any], **headers: str) -> aiohttp.ClientResponse:
    """An answer of the gateway, read."""
    given = {"model": "tiny", "temperature": 0, **body}
    async with fleet.http.post(f"{fleet.url}{path}", json=given, headers=headers, timeout=TIMEOUT) as answer:
        await answer.read()
        return answer


async def decided(fleet: Laptop, request: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = await fleet.chain.get(f"{fleet.chain.replicas[0].admin}/decisions/{request}")
    return found


async def counted(fleet: Laptop, pod: str, metric: str, **labels: str) -> float:
    """What an engine's own page says, read by Prometheus' parser."""
    async with fleet.http.get(f"{fleet.pod(pod).url}/metrics", timeout=TIMEOUT) as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [sample for family in families for sample in family.samples]
    return sum(each.value for each in samples if each.name == metric and labels.items() <= each.labels.items())


async def generated(fleet: Laptop) -> float:
    """Tokens, by the pod that decodes."""
    return await counted(fleet, "pod-b", "sglang:realtime_tokens_total", mode="decode")


async def loads(fleet: Laptop) -> Mapping[str, Any]:
    return {each["name"]: each["load"] for each in await fleet.endpoints() if each["load"]}


async def events(fleet: Laptop) -> Sequence[str]:
    """How far the KV events of each are received."""
    found = {each["name"]: each["kv_events"]["state"] for each in await fleet.endpoints()}
    return found[PREFILLS], found[DECODES]


async def in_flight(fleet: Laptop, name: str) -> int:
    found: int = next(each["in_flight"] for each in await fleet.endpoints() if each["name"] == name)
    return found


def words(seed: int, count: int) -> str:
    return " ".join(Random(seed).choices(["bela", "domi", "fasu", "gori", "kelu", "lapo", "mity", "nuri"], k=count))


async def test_a_server_that_has_served_nobody_has_a_load(pair: Laptop) -> None:
    """SGLang says how many run only after 40 steps of decoding."""
    found = await eventually(lambda: loads(pair), lambda known: len(known) == 2)
    for name in (PREFILLS, DECODES):
        assert (found[name]["blocks"], found[name]["block_size"]) == (TOKENS // PAGE, PAGE)
        assert (found[name]["waiting"], found[name]["running"]) == (0, 0)
    assert await counted(pair, "pod-b", "sglang:num_running_reqs") == 0


async def test_each_prompt_is_computed_by_one_and_answered_by_the_other(pair: Laptop) -> None:
    for number, (path, body) in enumerate(
        (
            ("/v1/completions", {"prompt": words(1, 100), "max_tokens": 48}),
            ("/v1/completions", {"prompt": "short", "max_tokens": 4}),  # where vLLM would compute it as it decodes
            ("/v1/completions", {"prompt": [words(2, 50), words(3, 50)], "max_tokens": 4}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": words(4, 50)}], "max_tokens": 4}),
            ("/v1/messages", {"messages": [{"role": "user", "content": words(5, 50)}], "max_tokens": 4}),
            ("/v1/responses", {"input": words(6, 50), "max_output_tokens": 4}),
        )
    ):
        answer = await asked(pair, path, body, **{"x-request-id": f"path-{number}"})
        assert (answer.status, answer.headers.get("x-prefill-fallback")) == (200, None), await answer.text()
        decision = await decided(pair, f"path-{number}")
        assert (decision["endpoint"], decision["prefill"]) == (DECODES, [PREFILLS]), path
    computed = [await counted(pair, pod, "sglang:realtime_tokens_total", mode="prefill_compute") for pod in PODS]
    assert computed[0] > 400
    assert computed[1] == 0
    assert await generated(pair) >= 47


async def test_an_answer_comes_in_pieces_and_is_the_same_again(pair: Laptop) -> None:
    body = {"prompt": words(10, 60), "max_tokens": 12, "ignore_eos": True}
    whole = (await (await asked(pair, "/v1/completions", body)).json())["choices"][0]["text"]
    streamed = await asked(pair, "/v1/completions", {**body, "stream": True})
    assert streamed.content_type == "text/event-stream"
    lines = [line.removeprefix("data: ") for line in (await streamed.text()).splitlines() if line.startswith("data: {")]
    pieces = [choice["text"] for line in lines for choice in json.loads(line)["choices"]]
    assert len(pieces) > 4
    assert "".join(pieces) == whole


async def test_what_the_prefiller_holds_is_known_by_its_events(pair: Laptop) -> None:
    """Of a request past the picker nothing else tells. Where it publishes it says by itself; the other does not."""
    await eventually(lambda: events(pair), lambda known: known == ("live", "off"))
    stored = await blocks_stored(pair)
    messages = [{"role": "user", "content": words(11, 200)}]
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    direct, named = f"{pair.pod('pod-b').url}/v1/chat/completions", {"x-prefiller-host-port": pair.pod("pod-a").address}
    async with pair.http.post(direct, json=body, headers=named, timeout=TIMEOUT) as answer:
        pages = (await answer.json())["usage"]["prompt_tokens"] // PAGE
    await blocks_stored(pair, stored + pages)
    own = {}
    for request, content in (("known", messages[0]["content"]), ("new", words(12, 200))):
        ask = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        usage = (await (await asked(pair, "/v1/chat/completions", ask, **{"x-request-id": request})).json())["usage"]
        decision = await decided(pair, request)
        assert decision["tokens"] == usage["prompt_tokens"], "as SGLang's template has it"
        (profile,) = [each for each in decision["profiles"] if each.get("stage") == "prefill"]
        own[request] = profile["endpoints"][0]["bill_ms"]["own"], usage["prompt_tokens_details"]["cached_tokens"]
    assert (own["known"][1], own["new"][1]) == (pages * PAGE, 0)
    assert own["new"][0] - own["known"][0] > 0.03 * pages * PAGE
    assert await pair.metric("warmpath_kv_events_total", outcome="malformed") == 0


async def test_a_client_that_leaves_takes_both_along(pair: Laptop) -> None:
    most = 4000
    body = {"prompt": words(20, 50), "max_tokens": most, "ignore_eos": True, "stream": True, "model": "tiny"}
    before = await generated(pair)
    async with pair.http.post(f"{pair.url}/v1/completions", json=body, timeout=TIMEOUT) as answer:
        assert answer.status == 200
        await answer.content.readany()
        answer.close()
    await pair.idle()

    async def same() -> bool:
        count = await generated(pair)
        await asyncio.sleep(3.0)  # SGLang ends it two seconds after the client has left
        return await generated(pair) == count

    await eventually(same, bool)
    assert await generated(pair) - before < most, "it went on with nobody there"


async def test_a_prefiller_that_cannot_be_reached_is_an_error_and_the_other_waits_for_nobody(pair: Laptop) -> None:
    body = {"model": "tiny", "prompt": words(30, 50), "max_tokens": 4}
    url = f"{pair.pod('pod-b').url}/v1/completions"
    async with pair.http.post(
        url, json=body, headers={"x-prefiller-host-port": "127.0.0.1:1"}, timeout=TIMEOUT
    ) as answer:
        assert (answer.status, answer.headers["x-prefill-fallback"]) == (502, "unreachable")
        assert "127.0.0.1:1/v1/completions: ClientConnectorError" in (await answer.json())["error"]["message"]
    assert (await asked(pair, "/v1/completions", body)).status == 200


async def test_a_prompt_that_is_too_long_is_refused_in_the_engines_words(pair: Laptop) -> None:
    answer = await asked(pair, "/v1/completions", {"prompt": words(40, 9000), "max_tokens": 4})
    assert answer.status == 400
    assert "tokens" in (await answer.text())
    assert "x-prefill-fallback" not in answer.headers


async def test_a_prefiller_that_is_killed_is_an_error_soon_and_nobody_elses(pair: Laptop) -> None:
    """The last of these: it takes a minute to start again."""
    os.kill(pair.chain.processes.pid("pod-a"), signal.SIGSTOP)  # so that it is not done before
    async with asyncio.TaskGroup() as tasks:
        under_way = tasks.create_task(asked(pair, "/v1/completions", {"prompt": words(50, 50), "max_tokens": 4}))
        await eventually(lambda: in_flight(pair, DECODES), bool)
        await killed(pair, "pod-a")
    answer = under_way.result()
    assert (answer.status, answer.headers["x-prefill-fallback"]) == (502, "unreachable")
    assert [each["failures"] for each in await pair.endpoints() if each["name"] == DECODES] == [0]
    answer = await asked(pair, "/v1/completions", {"prompt": "nobody prefills"})
    assert answer.status == 503
    assert "SGLang computes no prompt where it decodes" in await answer.text()
