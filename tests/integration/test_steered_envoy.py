"""What GIE's Gateway conformance suite asks of a picker, through a real Envoy; and that nobody gets it unasked."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest

from tests.support.gateway.chain import Laptop, eventually, laptop

pytestmark = pytest.mark.envoy

TOLD = ("x-conformance-test-served-endpoint", "x-conformance-test-selected-endpoint", "x-conformance-test-epp-pool")
SELECTION = "test-epp-endpoint-selection"


@asynccontextmanager
async def chain(directory: Path, *flags: str, wiring: str = "full-duplex") -> AsyncIterator[Laptop]:
    async with laptop(directory, wiring=wiring, flags=flags) as made:  # type: ignore[arg-type]
        yield made


async def addresses(chain: Laptop) -> list[str]:
    found = await eventually(chain.endpoints, lambda endpoints: len(endpoints) == 3)
    return [endpoint["address"] for endpoint in found]


async def ask(chain: Laptop, n: int, **headers: str) -> aiohttp.ClientResponse:
    return await chain.chat(f"question {n}", headers=headers)


@pytest.mark.parametrize("wiring", ["full-duplex", "lean"])
async def test_with_the_flag_requests_say_where_they_go(tmp_path: Path, wiring: str) -> None:
    async with chain(tmp_path, "--conformance-testing", wiring=wiring) as here:
        first, second, third = await addresses(here)
        for wanted in ((second,), (first, third), (first, second, third)):
            answers = [await ask(here, n, **{SELECTION: ",".join(wanted)}) for n in range(6)]
            assert {answer.status for answer in answers} == {200}
            for answer in answers:
                served, selected, pool = (answer.headers[name] for name in TOLD)
                assert served == selected
                assert served in wanted
                assert pool == "default/sim"
        by_ip = await ask(here, 0, **{SELECTION: "127.0.0.1"})
        assert by_ip.status == 200
        assert (await ask(here, 0, **{SELECTION: "10.9.9.9"})).status == 503
        async with here.http.get(f"{here.url}/v1/models", headers={SELECTION: third}) as models:
            assert (models.status, models.headers[TOLD[0]]) == (200, third)


async def test_without_it_the_header_means_nothing_and_nothing_is_reported(tmp_path: Path) -> None:
    async with chain(tmp_path) as here:
        first, *_ = await addresses(here)
        served = set()
        for n in range(9):
            headers = {SELECTION: first, "x-gateway-destination-endpoint": first}
            answer = await ask(here, n, **headers)
            assert answer.status == 200
            assert not {name.lower() for name in answer.headers} & {*TOLD, "x-went-into-resp-headers"}
            served.add(answer.headers["x-sim-pod"])
        assert len(served) == 3
        assert (await ask(here, 0, **{SELECTION: "10.9.9.9"})).status == 200


async def test_a_configuration_of_the_suite_is_taken(tmp_path: Path) -> None:
    async with chain(tmp_path, "--conformance-testing") as here:
        _, second, _ = await addresses(here)
        here.config.write_text(CONFIG)
        await eventually(lambda: config_of(here), lambda text: "header-based-testing-filter" in text)
        answers = [await ask(here, n, **{SELECTION: second}) for n in range(4)]
        assert {answer.headers[TOLD[0]] for answer in answers} == {second}


async def config_of(chain: Laptop) -> str:
    async with chain.http.get(f"{chain.chain.replicas[0].admin}/config") as answer:
        return await answer.text()


CONFIG = """
apiVersion: inference.networking.x-k8s.io/v1alpha1
kind: EndpointPickerConfig
plugins:
- type: header-based-testing-filter
- type: destination-endpoint-served-verifier
schedulingProfiles:
- name: conformance-profile
  plugins:
  - pluginRef: header-based-testing-filter
"""
