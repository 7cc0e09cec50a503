"""Prefill and decode apart through a real Envoy: headers, sidecars, accounts, and what happens without a prefiller."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from tests.support.gateway.chain import Laptop, eventually
from tests.support.gateway.roles import (
    DECODERS,
    apart,
    check_that_answers_are_what_one_engine_would_say,
    check_that_one_prefills_and_another_decodes,
)
from tooling.laptop.chain import write_endpoints

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    async with apart(tmp_path_factory.mktemp("roles")) as made:
        yield made


async def newest(chain: Laptop) -> dict[str, Any]:
    _, decisions = await chain.chain.seen(1)
    found: dict[str, Any] = decisions[0]
    return found


async def test_one_pod_prefills_and_another_decodes(chain: Laptop) -> None:
    await check_that_one_prefills_and_another_decodes(chain)


async def test_answers_are_what_one_engine_would_say(chain: Laptop) -> None:
    await check_that_answers_are_what_one_engine_would_say(chain)


async def test_no_prefiller_ever_decodes_and_all_accounts_end(chain: Laptop) -> None:
    for turn in range(12):
        answer = await chain.chat(f"{turn} and some more words " * (1 + 20 * (turn % 3)))
        assert (answer.status, answer.headers["x-sim-pod"] in DECODERS) == (200, True)
    await chain.idle()
    for figure in ("pending_seconds", "decodes"):
        labels = {"plugin": "expected-ttft", "statistic": figure}
        assert await chain.metric("warmpath_plugin_statistic", **labels) == 0
    assert (
        await chain.metric("warmpath_plugin_statistic", plugin="role-profile-handler", statistic="prefill-decode") >= 12
    )
    labels = {"plugin_type": "role-profile-handler", "model_name": "sim", "decision_type": "prefill-decode"}
    assert await chain.metric("llm_d_epp_disagg_decision_total", **labels) >= 12


async def test_a_request_is_in_flight_where_it_is_prefilled_until_that_is_done(chain: Laptop) -> None:
    async def in_flight() -> list[int]:
        prefills, *decode = sorted(await chain.endpoints(), key=lambda each: str(each["name"]))
        return [prefills["in_flight"], sum(each["in_flight"] for each in decode)]

    prefiller = chain.chain.processes.pid("pod-a")
    os.kill(prefiller, signal.SIGSTOP)
    try:
        async with asyncio.TaskGroup() as tasks:
            answer = tasks.create_task(chain.chat("held back " * 100))
            await eventually(in_flight, lambda counts: counts == [1, 1])
            os.kill(prefiller, signal.SIGCONT)
    finally:
        os.kill(prefiller, signal.SIGCONT)
    assert answer.result().status == 200
    await eventually(in_flight, lambda counts: counts == [0, 0])


async def test_what_the_prefiller_fails_at_is_done_where_it_is_decoded(chain: Laptop) -> None:
    await chain.faults(chain.pod("pod-a"), status=500)
    answer = await chain.chat("computed where it is decoded " * 50)
    assert (answer.status, answer.headers["x-prefill-fallback"]) == (200, "status")
    await chain.idle()
    (found,) = [each for each in await chain.endpoints() if each["name"] == "default/pod-a"]
    assert found["plugins"]["failure-share-producer"]["failure_share"] > 0
    async with chain.http.delete(f"{chain.pod('pod-a').url}/admin/faults") as cleared:
        assert cleared.status == 200
    answer = await chain.chat("and apart again " * 50)
    assert (answer.status, "x-prefill-fallback" in answer.headers) == (200, False)


async def test_a_client_cannot_name_a_prefiller(chain: Laptop) -> None:
    answer = await chain.chat("somewhere else " * 50, headers={"x-prefiller-host-port": "127.0.0.1:1"})
    assert (answer.status, "x-prefill-fallback" in answer.headers) == (200, False)


async def test_without_a_prefiller_it_is_said(chain: Laptop) -> None:
    entries = [pod for pod in chain.chain.pods if pod.role == "decode"]
    write_endpoints(entries, chain.chain.endpoints_file)
    await eventually(chain.endpoints, lambda found: len(found) == 2)
    answer = await chain.chat("nobody prefills " * 50)
    assert (answer.status, answer.headers["x-sim-pod"] in DECODERS) == (200, True)
    assert await chain.metric("warmpath_degraded_total", reason="no-prefiller") >= 1
