"""Prefill and decode apart on two real vLLM servers: KV over NIXL, our sidecar, real Envoy, our picker."""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from tests.support.engines.real_engines import PICKING, TIMEOUT, eventually, killed, started
from tests.support.gateway.chain import Laptop, laptop
from tooling.laptop.engines import Vllm

pytestmark = pytest.mark.asyncio(loop_scope="session")

SPLITTING = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins:
- type: expected-ttft
- type: prefix-based-pd-decider
  parameters: {nonCachedTokens: 128}
- type: role-profile-handler
  parameters: {decider: prefix-based-pd-decider}
"""
SHORT, LONG, LONGEST = 40, 200, 600
"""Words, of two tokens each."""
KEY_VALUE_BYTES = 2 * 12 * 4 * 64 * 4
"""Of a token of the model: keys and values of 12 layers, 4 heads of 64 numbers of 32 bits."""
SYLLABLES = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]


@dataclass(frozen=True)
class Counted:
    """What an engine's metrics have counted since it started."""

    computed: float
    fetched: float
    """Tokens of prompts, by where their KV came from: computed by itself, or fetched from another engine."""
    transfers: float
    bytes: float
    failed: float
    """Of transfers."""
    first_tokens: float
    first_token_seconds: float

    def since(self, before: "Counted") -> "Counted":
        return Counted(**{name: value - getattr(before, name) for name, value in vars(self).items()})


@dataclass(frozen=True)
class Answer:
    tokens: Sequence[int]
    prompt: int
    """Tokens of it."""
    fallback: str | None
    """Why the sidecar had it computed where it is decoded."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pair(python: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    """`pod-a` prefills; `pod-b` decodes, behind a sidecar.

    Numbers of 32 bits: of 16, an answer may differ with how many tokens are computed at once.
    """
    flags = ("--dtype", "float32", "--max-num-batched-tokens", "256", "--enable-scale-out")
    engine = Vllm(python, context=4096, roles=("prefill", "decode"), flags=flags)
    async with laptop(tmp_path_factory.mktemp("pair"), pods=2, flags=PICKING, engine=engine) as made:
        await made.chain.reconfigure(made.config, SPLITTING)
        yield made


def words(seed: int, count: int) -> str:
    chance = Random(seed)
    return " ".join("".join(chance.choices(SYLLABLES, k=2)) for _ in range(count))


async def ask(
    fleet: Laptop, url: str, prompt: str, more: Mapping[str, Any] = {}, headers: Mapping[str, str] = {}
) -> Answer:
    """Sixteen tokens, greedily."""
    body = {"model": "small", "prompt": prompt, "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    body |= {"return_token_ids": True, **more}
    async with fleet.http.post(f"{url}/v1/completions", json=body, headers=headers, timeout=TIMEOUT) as answer:
        assert answer.status == 200, await answer.text()
        content = await answer.json()
        fallback = answer.headers.get("x-prefill-fallback")
    return Answer(content["choices"][0]["token_ids"], content["usage"]["prompt_tokens"], fallback)


async def through(fleet: Laptop, request_id: str, prompt: str) -> tuple[Answer, list[str]]:
    """An answer of the gateway, and who was to prefill."""
    answer = await ask(fleet, fleet.url, prompt, headers={"x-request-id": request_id})
    decision = await fleet.chain.get(f"{fleet.chain.replicas[0].admin}/decisions/{request_id}")
    assert decision["endpoint"] == "default/pod-b"
    return answer, decision.get("prefill", [])


async def alone_at(fleet: Laptop, pod: str, prompt: str) -> Answer:
    """An answer past the picker, of an engine that held nothing before: it computes all of it."""
    async with fleet.http.post(f"{fleet.pod(pod).url}/reset_prefix_cache", timeout=TIMEOUT) as reset:
        assert reset.status == 200
    return await ask(fleet, fleet.pod(pod).url, prompt)


async def counted(fleet: Laptop, pod: str) -> Counted:
    async with fleet.http.get(f"{fleet.pod(pod).url}/metrics", timeout=TIMEOUT) as answer:
        families = text_string_to_metric_families(await answer.text())
    samples = [sample for family in families for sample in family.samples]

    def total(name: str, **labels: str) -> float:
        return sum(each.value for each in samples if each.name == name and labels.items() <= each.labels.items())

    return Counted(
        computed=total("vllm:prompt_tokens_by_source_total", source="local_compute"),
        fetched=total("vllm:prompt_tokens_by_source_total", source="external_kv_transfer"),
        transfers=total("vllm:nixl_xfer_time_seconds_count"),
        bytes=total("vllm:nixl_bytes_transferred_sum"),
        failed=total("vllm:nixl_num_failed_transfers_total"),
        first_tokens=total("vllm:time_to_first_token_seconds_count"),
        first_token_seconds=total("vllm:time_to_first_token_seconds_sum"),
    )


async def after(fleet: Laptop, pod: str, before: Counted, requests: int = 1) -> Counted:
    """What was counted of so many requests; vLLM answers first and counts then."""

    async def look() -> Counted:
        return (await counted(fleet, pod)).since(before)

    found = await eventually(look, lambda seen: seen.first_tokens >= requests)
    assert isinstance(found, Counted)
    return found


async def prefilled(fleet: Laptop, prompt: str) -> Any:
    """What `pod-a` says of where the KV of a prompt lies that it has computed."""
    remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    order = {"do_remote_decode": True, "do_remote_prefill": False, **remote}
    body = {"model": "small", "prompt": prompt, "max_tokens": 1, "kv_transfer_params": order}
    async with fleet.http.post(f"{fleet.pod('pod-a').url}/v1/completions", json=body, timeout=TIMEOUT) as answer:
        return (await answer.json())["kv_transfer_params"]


async def test_a_long_prompt_is_computed_by_one_and_its_kv_fetched_by_the_other(pair: Laptop) -> None:
    before = {pod: await counted(pair, pod) for pod in ("pod-a", "pod-b")}
    answer, prefill = await through(pair, "long", words(1, LONG))
    assert (prefill, answer.fallback) == (["default/pod-a"], None)
    prefilled, decoded = [await after(pair, pod, before[pod]) for pod in ("pod-a", "pod-b")]
    assert (prefilled.computed, prefilled.fetched) == (answer.prompt, 0)
    assert (decoded.computed, decoded.fetched) == (0, answer.prompt)
    assert (decoded.transfers, decoded.failed) == (1, 0)
    assert decoded.bytes >= answer.prompt * KEY_VALUE_BYTES


async def test_a_short_prompt_is_computed_where_it_is_decoded(pair: Laptop) -> None:
    before = {pod: await counted(pair, pod) for pod in ("pod-a", "pod-b")}
    answer, prefill = await through(pair, "short", words(2, SHORT))
    assert (prefill, answer.fallback) == ([], None)
    decoded = await after(pair, "pod-b", before["pod-b"])
    assert (decoded.computed, decoded.fetched, decoded.transfers) == (answer.prompt, 0, 0)
    assert (await counted(pair, "pod-a")).since(before["pod-a"]).first_tokens == 0


async def test_a_prompt_of_token_ids_is_computed_by_one_and_answered_by_the_other(pair: Laptop) -> None:
    ids = Random(5).choices(range(10, 250), k=2 * LONG)
    sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
    body = {"model": "small", "token_ids": ids, "sampling_params": sampling}

    async def answer(url: str, **headers: str) -> list[int]:
        to = f"{url}/inference/v1/generate"
        async with pair.http.post(to, json=body, headers=headers, timeout=TIMEOUT) as response:
            assert (response.status, response.headers.get("x-prefill-fallback")) == (200, None), await response.text()
            tokens: list[int] = (await response.json())["choices"][0]["token_ids"]
            return tokens

    before = {pod: await counted(pair, pod) for pod in ("pod-a", "pod-b")}
    tokens = await answer(pair.url, **{"x-request-id": "ids"})
    prefilled, decoded = [await after(pair, pod, before[pod]) for pod in ("pod-a", "pod-b")]
    assert (prefilled.computed, decoded.computed, decoded.fetched) == (len(ids), 0, len(ids))
    assert len(tokens) == 8
    assert await answer(pair.pod("pod-a").url) == tokens


async def test_answers_are_those_of_one_server(pair: Laptop) -> None:
    for seed, count, apart in ((3, LONG, True), (4, SHORT, False)):
        answer, prefill = await through(pair, f"same-{seed}", words(seed, count))
        assert (bool(prefill), answer.fallback) == (apart, None)
        alone = await alone_at(pair, "pod-a", words(seed, count))
        assert (answer.tokens, answer.prompt) == (alone.tokens, alone.prompt)


async def test_many_at_once_come_apart_and_whole(pair: Laptop) -> None:
    before = await counted(pair, "pod-b")
    lengths = [LONG, SHORT, SHORT, LONG, SHORT]
    answers = await asyncio.gather(
        *(through(pair, f"many-{number}", words(10 + number, count)) for number, count in enumerate(lengths))
    )
    assert [(bool(prefill), answer.fallback) for answer, prefill in answers] == [
        (count == LONG, None) for count in lengths
    ]
    decoded = await after(pair, "pod-b", before, len(lengths))
    assert decoded.fetched == sum(answer.prompt for answer, prefill in answers if prefill)
    assert decoded.computed == sum(answer.prompt for answer, prefill in answers if not prefill)
    assert (decoded.transfers, decoded.failed) == (2, 0)
    await pair.idle()


async def test_the_first_token_after_a_transfer_beside_that_of_a_cold_prompt(pair: Laptop) -> None:
    """Prints the ratio, of vLLM's own times at the engine that decodes."""
    before = await counted(pair, "pod-b")
    _, prefill = await through(pair, "fetched", words(20, LONGEST))
    fetched = await after(pair, "pod-b", before)
    between = await counted(pair, "pod-b")
    answer = await ask(pair, pair.pod("pod-b").url, words(21, LONGEST))
    cold = await after(pair, "pod-b", between)
    assert prefill == ["default/pod-a"]
    assert (fetched.computed, cold.fetched, cold.computed) == (0, 0, answer.prompt)
    ratio = fetched.first_token_seconds / cold.first_token_seconds
    print(
        f"decode's TTFT of {answer.prompt} tokens: {fetched.first_token_seconds:.2f} s after a transfer, "
        f"{cold.first_token_seconds:.2f} s cold: {ratio:.2f} times"
    )


async def test_a_prefiller_that_is_killed_under_way_costs_time_alone(pair: Laptop) -> None:
    stranded = await prefilled(pair, words(31, LONG))
    failed = await pair.metric("warmpath_degraded_total", reason="prefill-failed")

    async def running() -> bool:
        loads = {each["name"]: each["load"] for each in await pair.endpoints()}
        return bool(loads["default/pod-a"] and loads["default/pod-a"]["running"])

    async with asyncio.TaskGroup() as tasks:
        under_way = tasks.create_task(through(pair, "killed", words(30, LONGEST)))
        await eventually(running, bool)
        assert not under_way.done()
        await killed(pair, "pod-a")
    answer, prefill = under_way.result()
    assert (prefill, answer.fallback) == (["default/pod-a"], "unreachable")
    assert answer.tokens == (await alone_at(pair, "pod-b", words(30, LONGEST))).tokens
    assert await pair.metric("warmpath_degraded_total", reason="prefill-failed") == failed + 1

    # And one that was done, and is killed before its KV is fetched: the engine that decodes computes it.
    before = await counted(pair, "pod-b")
    answer = await ask(pair, pair.pod("pod-b").url, words(31, LONG), {"kv_transfer_params": stranded})
    assert (await after(pair, "pod-b", before)).computed == answer.prompt
    assert answer.tokens == (await alone_at(pair, "pod-b", words(31, LONG))).tokens

    _, prefill = await through(pair, "nobody", words(32, LONG))
    assert prefill == []
    assert await pair.metric("warmpath_degraded_total", reason="no-prefiller") >= 1


async def test_a_prefiller_that_comes_back_prefills_again(pair: Laptop) -> None:
    await started(pair, "pod-a")

    async def loads() -> list[bool]:
        return [each["load"] is not None for each in await pair.endpoints()]

    await eventually(loads, lambda known: known == [True, True])
    before = await counted(pair, "pod-b")
    answer, prefill = await through(pair, "again", words(40, LONG))
    assert (prefill, answer.fallback) == (["default/pod-a"], None)
    assert (await after(pair, "pod-b", before)).fetched == answer.prompt
