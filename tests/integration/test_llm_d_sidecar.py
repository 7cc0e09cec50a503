"""llm-d's own sidecar, `pd-sidecar`, between our picker behind a real Envoy and simulated pods: as it is, unchanged.

`PD_SIDECAR` names the program, or it is on the PATH; `go build ./cmd/pd-sidecar` in llm-d-router makes it.
"""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from tests.support.gateway.chain import Laptop
from tests.support.gateway.roles import (
    DECODERS,
    apart,
    check_that_answers_are_what_one_engine_would_say,
    check_that_one_prefills_and_another_decodes,
)

PROGRAM = os.environ.get("PD_SIDECAR") or shutil.which("pd-sidecar")
pytestmark = [
    pytest.mark.envoy,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(not PROGRAM, reason="llm-d's pd-sidecar: neither PD_SIDECAR nor the PATH has it"),
]

LLM_DS = """
apiVersion: llm-d.ai/v1alpha1
kind: EndpointPickerConfig
plugins:
- {type: always-disagg-pd-decider}
- {type: disagg-profile-handler, parameters: {deciders: {prefill: always-disagg-pd-decider}}}
- {type: decode-filter}
- {type: prefill-filter}
- {type: queue-scorer}
- {type: max-score-picker}
schedulingProfiles:
- {name: decode, plugins: [{pluginRef: decode-filter}, {pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}
- {name: prefill, plugins: [{pluginRef: prefill-filter}, {pluginRef: queue-scorer}, {pluginRef: max-score-picker}]}
"""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def chain(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    sidecar = (str(PROGRAM), "--secure-proxy=false", "--kv-connector=nixlv2")
    async with apart(tmp_path_factory.mktemp("llm-d"), LLM_DS, sidecar) as made:
        yield made


async def test_the_prompt_is_computed_where_the_picker_says(chain: Laptop) -> None:
    await check_that_one_prefills_and_another_decodes(chain)


async def test_streamed_answers_are_what_one_engine_would_say(chain: Laptop) -> None:
    await check_that_answers_are_what_one_engine_would_say(chain)


async def test_many_at_once_and_all_accounts_end(chain: Laptop) -> None:
    answers = await asyncio.gather(*(chain.chat(f"{turn} and some more words " * 60) for turn in range(24)))
    assert {answer.status for answer in answers} == {200}
    assert {answer.headers["x-sim-pod"] for answer in answers} == DECODERS
    await chain.idle()
    labels = {"plugin": "disagg-profile-handler", "statistic": "prefill-decode"}
    assert await chain.metric("warmpath_plugin_statistic", **labels) >= 24


async def test_a_prefiller_that_fails_is_an_error_to_the_client_and_counts_against_it(chain: Laptop) -> None:
    # llm-d's sidecar passes the prefiller's error on; ours would compute the prompt itself.
    await chain.faults(chain.pod("pod-a"), status=500)
    answer = await chain.chat("nobody computes this " * 50)
    assert answer.status == 500
    await chain.idle()
    async with chain.http.delete(f"{chain.pod('pod-a').url}/admin/faults") as cleared:
        assert cleared.status == 200
    assert (await chain.chat("and apart again " * 50)).status == 200
