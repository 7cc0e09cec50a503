"""Conversations that an engine keeps, asked for by `previous_response_id` through a real Envoy and two replicas."""

from pathlib import Path
from typing import Any

import pytest

from epp import protocol
from epp.configuration.loader import strategy_text
from gateway.wiring import Wiring
from tests.support.gateway.chain import Laptop, eventually, laptop

pytestmark = pytest.mark.envoy

ANSWERS = 6


async def respond(chain: Laptop, name: str, previous: str | None = None) -> Any:
    """The answer; simulated pods keep none, so they say of each that is named that they do not have it."""
    body = {"model": "sim", "input": "hello", "max_output_tokens": 2, "previous_response_id": previous}
    headers = {protocol.REQUEST_ID: name}
    async with chain.http.post(f"{chain.url}/v1/responses", json=body, headers=headers) as answer:
        assert answer.status == (404 if previous else 200)
        return await answer.json()


async def picked(chain: Laptop, name: str) -> str:
    """The endpoint that a request was sent to, by the replica that picked it."""
    for replica in chain.chain.replicas:
        async with chain.http.get(f"{replica.admin}/decisions/{name}") as answer:
            if answer.status == 200:
                return str((await answer.json())["endpoint"])
    raise AssertionError(f"no replica knows of {name}")


async def known(chain: Laptop) -> list[float]:
    """Answers that each replica knows the endpoint of."""
    return [
        await chain.metric("warmpath_plugin_statistic", at=replica.admin, statistic="responses")
        for replica in chain.chain.replicas
    ]


@pytest.mark.parametrize("wiring", ["full-duplex", "lean"])
async def test_whoever_gave_an_answer_is_asked_to_go_on_from_it(tmp_path: Path, wiring: Wiring) -> None:
    async with laptop(tmp_path, wiring=wiring, replicas=2) as chain:
        await chain.chain.reconfigure(chain.config, strategy_text("round-robin"))
        given = {(await respond(chain, f"first-{n}"))["id"]: await picked(chain, f"first-{n}") for n in range(ANSWERS)}
        assert len({*given.values()}) > 1
        await eventually(lambda: known(chain), lambda counts: counts == [ANSWERS] * 2)
        for n in range(2):  # Envoy asks the replicas in turn
            for number, (previous, endpoint) in enumerate(given.items()):
                await respond(chain, f"next-{n}-{number}", previous)
                assert await picked(chain, f"next-{n}-{number}") == endpoint
        for number, (previous, endpoint) in enumerate(given.items()):
            headers = {protocol.REQUEST_ID: f"read-{number}"}
            async with chain.http.get(f"{chain.url}/v1/responses/{previous}", headers=headers) as answer:
                await answer.read()
            assert await picked(chain, f"read-{number}") == endpoint
