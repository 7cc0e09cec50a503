"""Limits of tenants and a guard, through a real Envoy and two replicas that count together."""

import asyncio
import json
import re
from base64 import urlsafe_b64encode
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.gateway.chain import Laptop, eventually, laptop

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

CONFIG = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: round-robin-picker}]
schedulingProfiles:
- name: default
  plugins: [{pluginRef: round-robin-picker}]
limits:
  tenant: {header: authorization, claim: org.team}
  requestsPerMinute: 6
  maxPromptTokens: 2000
  maxOutputTokens: 100
  models: [sim]
  tenants:
    tokens: {requestsPerMinute: 0, tokensPerMinute: 300}
    few: {requestsPerMinute: 0, concurrentRequests: 2}
    other: {models: [big]}
"""


def token(team: str) -> dict[str, str]:
    claims = urlsafe_b64encode(json.dumps({"org": {"team": team}}).encode()).decode().rstrip("=")
    return {"authorization": f"Bearer head.{claims}.signature"}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    async with laptop(tmp_path_factory.mktemp("limits"), wiring="full-duplex", replicas=2, pods=2) as made:
        await made.chain.reconfigure(made.config, CONFIG)
        yield made


async def test_both_replicas_count_a_tenants_requests(chain: Laptop) -> None:
    answers = []
    for _ in range(8):
        answers.append(await chain.chat("hello", headers=token("a")))
        await asyncio.sleep(0.2)  # more than a replica takes to tell
    assert [answer.status for answer in answers] == [200] * 6 + [429] * 2
    left = [int(answer.headers["x-ratelimit-remaining-requests"]) for answer in answers]
    assert left == [5, 4, 3, 2, 1, 0, 0, 0]
    refused = answers[-1]
    assert int(refused.headers["retry-after"]) in range(1, 11)
    assert refused.headers["x-ratelimit-limit-requests"] == "6"
    assert refused.headers["x-llm-d-request-dropped-reason"] == "rejected-limit"
    error = (await refused.json())["error"]
    assert (error["code"], error["type"]) == ("rate_limit_exceeded", "rate_limit_error")
    assert (await chain.chat("hello", headers=token("b"))).status == 200
    counted = 0
    for replica in chain.chain.replicas:
        page = await (await chain.http.get(f"{replica.admin}/metrics")).text()
        found = re.findall(r'warmpath_limit_refused_total{limit="requests",pool="sim",tenant="a"} (\S+)', page)
        counted += sum(int(float(each)) for each in found)
    assert counted == 2


async def test_a_client_whose_headers_do_not_count_is_not_told_where_its_request_went(chain: Laptop) -> None:
    answer = await chain.chat("hello", headers={**token("asks-why"), "x-warmpath-explain": "1"})
    assert answer.status == 200
    assert "x-warmpath-decision" not in answer.headers


async def test_tokens_count_as_the_answer_reports_them(chain: Laptop) -> None:
    first = await chain.chat("hello", max_tokens=100, headers=token("tokens"))
    usage = (await first.json())["usage"]["total_tokens"]
    await asyncio.sleep(0.3)
    second = await chain.chat("hello", max_tokens=1, headers=token("tokens"))
    left = int(second.headers["x-ratelimit-remaining-tokens"])
    assert 300 - usage - 30 <= left <= 300


async def test_what_a_request_may_be_is_said_as_openai_says_it(chain: Laptop) -> None:
    long = await chain.chat("word " * 4000, headers=token("c"))
    much = await chain.chat("hi", max_tokens=101, headers=token("c"))
    unknown = await chain.chat("hi", model="nobody", headers=token("c"))
    foreign = await chain.chat("hi", model="big", headers=token("c"))
    assert [answer.status for answer in (long, much, unknown, foreign)] == [400, 400, 404, 403]
    assert (await long.json())["error"]["code"] == "context_length_exceeded"
    assert (await much.json())["error"]["param"] == "max_tokens"


async def test_requests_at_once_count_over_replicas_and_end_with_their_clients(chain: Laptop) -> None:
    for pod in chain.chain.pods:
        await chain.faults(pod, hang=True)
    holding = [asyncio.ensure_future(chain.chat("hold", headers=token("few"))) for _ in range(2)]
    await eventually(chain.hanging, lambda count: count == len(holding))
    for pod in chain.chain.pods:
        await chain.faults(pod)

    async def refused() -> bool:
        """Whether all are, whichever replica they come to."""
        return all([(await chain.chat("one more", headers=token("few"))).status == 429 for _ in range(4)])

    assert await eventually(refused, bool)
    for task in holding:
        task.cancel()

    async def status() -> int:
        return (await chain.chat("again", headers=token("few"))).status

    await eventually(status, lambda found: found == 200)
