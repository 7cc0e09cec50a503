"""A chain under load whose files, pods and replicas change: no request is lost, and what is wrong is refused.

Every test gets all pods alive, whatever the test before killed.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
import yaml

from epp.configuration.loader import strategy_text
from tests.support.engines.real_engines import following, restored
from tests.support.gateway.chain import Laptop, eventually, laptop
from tooling.laptop.engines import LaptopPod, Simulated

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="module")]

FOLLOWS = "the gateway follows the changed files"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Laptop]:
    async with laptop(tmp_path_factory.mktemp("chain"), replicas=2) as made:
        yield made


@pytest_asyncio.fixture(loop_scope="module")
async def chain(running: Laptop) -> Laptop:
    await restored(running)
    return running


class Users:
    """Some that ask again and again, each for a stream."""

    def __init__(self, chain: Laptop) -> None:
        self.chain = chain
        self.lost: list[str] = []
        self.served: list[str] = []
        """Names of pods, in the order of the answers."""

    async def ask(self, number: int) -> None:
        body = {"messages": [{"role": "user", "content": f"I am {number}. " * 30}], "max_tokens": 5, "stream": True}
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as http:
            while True:
                try:
                    url = f"{self.chain.url}/v1/chat/completions"
                    async with http.post(url, json={"model": "sim", **body}) as answer:
                        text = await answer.text()
                except (aiohttp.ClientError, TimeoutError) as error:
                    self.lost.append(repr(error))
                    continue
                if answer.status == 200 and text.endswith("data: [DONE]\n\n"):
                    self.served.append(answer.headers["x-sim-pod"])
                else:
                    self.lost.append(f"{answer.status} {text[-200:]}")
                await asyncio.sleep(0.01)  # leave some of the machine to others

    async def some_more(self) -> None:
        """Return when twenty more requests were answered, or one was lost."""
        count = len(self.served)
        await eventually(self._served, lambda served: served >= count + 20 or bool(self.lost))

    async def _served(self) -> int:
        return len(self.served)


@asynccontextmanager
async def users(chain: Laptop) -> AsyncIterator[Users]:
    asking = Users(chain)
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(asking.ask(number)) for number in range(2)]
        await asking.some_more()
        yield asking
        await asking.some_more()
        for task in running:
            task.cancel()
    assert asking.lost == []


async def degraded(chain: Laptop, reason: str) -> float:
    return await chain.metric("warmpath_degraded_total", reason=reason)


async def test_a_new_configuration_takes_effect_between_two_requests(chain: Laptop) -> None:
    async with users(chain) as asking:
        await following(chain, strategy_text("round-robin"))
        assert "round-robin-picker" in await chain.chain.config(chain.chain.replicas[0])
        await asking.some_more()
        refused = await degraded(chain, "config-refused")
        chain.config.write_text("kind: EndpointPickerConfig\nplugins: [{type: no-such-plugin}]\n")
        try:
            await eventually(lambda: degraded(chain, "config-refused"), lambda count: count > refused)
            assert "round-robin-picker" in await chain.chain.config(chain.chain.replicas[0])
        finally:
            chain.config.write_text(strategy_text("round-robin"))
    assert set(asking.served) == {"pod-a", "pod-b", "pod-c"}


async def test_a_pod_comes_and_goes_without_loss(chain: Laptop) -> None:
    await following(chain, strategy_text("round-robin"))  # which asks a new pod too, however warm the others are
    names = {endpoint["name"] for endpoint in await chain.endpoints()}
    followed = chain.reported.count(FOLLOWS)
    before = chain.chain.endpoints_file.read_text()
    layout = Simulated().lay_out(["extra"])
    [extra], program = layout.pods, layout.programs["extra"]
    await chain.chain.start(program)
    await chain.chain.ready(program.ready, program.name)
    entries: list[Any] = yaml.safe_load(before)["endpoints"]
    entries.append({"name": "extra", "address": "127.0.0.1", "port": extra.port, "labels": {"app": "sim"}})
    async with users(chain) as asking:
        chain.chain.endpoints_file.write_text(yaml.safe_dump({"endpoints": entries}))
        await eventually(lambda: _served_by(asking, "extra"), bool)
        chain.chain.endpoints_file.write_text(before)
        await eventually(lambda: _endpoints(chain), lambda found: found == names)
        await eventually(lambda: _envoy_knows(chain, extra), lambda known: not known)
    await chain.chain.processes.stop("extra")
    assert chain.reported.count(FOLLOWS) >= followed + 2


async def _served_by(asking: Users, name: str) -> int:
    return asking.served.count(name)


async def _endpoints(chain: Laptop) -> set[str]:
    return {endpoint["name"] for endpoint in await chain.endpoints()}


async def _envoy_knows(chain: Laptop, pod: LaptopPod) -> bool:
    return pod.address in await chain.chain.envoy.admin("/clusters")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("kind: HTTPRoute\nspec: [", "not valid YAML"),
        ("endpoints: [{name: x, address: nowhere, port: 1}]", "expected an IPv4 or IPv6 address"),
        (
            "apiVersion: inference.networking.k8s.io/v1\nkind: InferencePool\nmetadata: {name: new}\nspec:\n"
            "  selector: {matchLabels: {app: new}}\n  targetPorts: [{number: 1}]\n"
            "  endpointPickerRef: {name: x, port: {number: 1}}\n",
            "InferencePools came or went",
        ),
    ],
)
async def test_a_wrong_file_is_refused_in_one_line(chain: Laptop, text: str, reason: str) -> None:
    reported, refused = len(chain.reported), await degraded(chain, "pool-file-refused")
    wrong = chain.manifests / "wrong.yaml"
    wrong.write_text(text)

    async def last() -> list[str]:
        return [line for line in chain.reported[reported:] if line != FOLLOWS]  # which may be about the test before

    try:
        [line] = await eventually(last, bool)
        assert reason in line
        assert "\n" not in line
        await eventually(lambda: degraded(chain, "pool-file-refused"), lambda count: count == refused + 1)
        assert (await chain.chat("still there?")).status == 200
    finally:
        wrong.unlink()


async def test_a_route_is_changed_under_load(chain: Laptop) -> None:
    file = chain.manifests / "all.yaml"
    before = file.read_text()

    async def status() -> int:
        async with chain.http.get(f"{chain.url}/v1/models", headers={"x-pool": "closed"}) as answer:
            return answer.status

    assert await status() == 200
    async with users(chain):
        closed = before.replace("value: nobody}", "value: closed}")
        file.write_text(closed)
        await eventually(status, lambda seen: seen == 503)
        file.write_text(before)
        await eventually(status, lambda seen: seen == 200)


async def test_a_replica_that_dies_is_done_without(chain: Laptop) -> None:
    [first, second] = chain.chain.replicas
    os.kill(chain.chain.processes.pid(first.name), signal.SIGKILL)

    async def replicas() -> list[str]:
        return [replica.name for replica in chain.chain.replicas]

    assert await eventually(replicas, lambda names: first.name not in names) == [second.name]
    assert any(line.startswith(f"{first.name} was killed by SIGKILL") for line in chain.reported)
    assert (await chain.chat("are you well?")).status == 200


async def test_a_pod_that_dies_is_done_without(chain: Laptop) -> None:
    os.kill(chain.chain.processes.pid("pod-c"), signal.SIGKILL)
    for number in range(12):  # before and after its death is noticed
        answer = await chain.chat(f"{number} " * 40)
        assert (answer.status, answer.headers["x-sim-pod"] in ("pod-a", "pod-b")) == (200, True)
    await eventually(lambda: _endpoints(chain), lambda found: found == {"default/pod-a", "default/pod-b"})
    assert chain.chain.gone == ["pod-c"]
    assert any(line.startswith("pod-c was killed by SIGKILL") for line in chain.reported)


async def test_a_file_that_lost_its_meaning_keeps_the_dead_pod(chain: Laptop) -> None:
    file = chain.chain.endpoints_file
    before = file.read_text()
    file.write_text("endpoints: [")
    try:
        os.kill(chain.chain.processes.pid("pod-b"), signal.SIGKILL)

        async def reported() -> list[str]:
            return [line for line in chain.reported if line.startswith("endpoints.yaml still has pod-b")]

        await eventually(reported, bool)
        assert (await chain.chat("who is left?")).headers["x-sim-pod"] in ("pod-a", "pod-c")
    finally:
        file.write_text(before)
