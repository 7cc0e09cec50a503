"""Helpers for tests over a fleet of real engines: what to wait for, what to fill, what to break and restore."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
import openai
from openai.types import CompletionUsage

from epp.configuration.loader import strategy_text
from tests.support.engines.lmcache import tokens_found
from tests.support.engines.talk import Talk
from tests.support.gateway.chain import PATIENT, Laptop
from tests.support.gateway.chain import eventually as eventually_within
from tests.support.process.waiting import until
from tooling.laptop.chain import write_endpoints
from tooling.laptop.engines import LaptopPod, knowing_tiers

LIMIT = 180.0
"""Seconds that anything may take where a dozen processes of real engines share a machine with others."""
TIMEOUT: Final = aiohttp.ClientTimeout(total=LIMIT)
PICKING: Final = ("--refresh-metrics-interval=0.2", *PATIENT)
"""Flags of the pickers before them."""


async def eventually(look: Callable[[], Any], true: Callable[[Any], bool], every: float = 0.05) -> Any:
    """What `look` (async) returns as soon as it is `true` of it."""
    return await eventually_within(look, true, LIMIT, every)


def kv_aware(fleet: Laptop) -> str:
    """The strategy of that name, with the fleet's LMCache."""
    return knowing_tiers(strategy_text("kv-aware"), fleet.chain.layout)


async def statistic(fleet: Laptop, name: str) -> float:
    """What the picker's plugins count under this name."""
    return await fleet.metric("warmpath_plugin_statistic", pool="sim", statistic=name)


async def blocks_stored(fleet: Laptop, at_least: float = 0) -> float:
    """What the picker has received of KV events so far; return when it is so much."""
    look = lambda: fleet.metric("warmpath_kv_events_total", outcome="stored")  # noqa: E731
    count: float = await eventually(look, lambda stored: stored >= at_least)
    return count


async def following(fleet: Laptop, text: str) -> None:
    """Return when the picker follows this configuration, and knows what it says can be known of the fleet."""
    if fleet.config.read_text() != text:
        await fleet.chain.reconfigure(fleet.config, text)
    if "coordinator:" in text:
        await eventually(lambda: statistic(fleet, "tier_reached"), bool)
    if "precise-prefix-cache-producer" in text:
        await received(fleet, len(fleet.chain.pods))


async def restored(fleet: Laptop) -> None:
    """Return when all pods and services run and know each other, whatever was broken; what is dead is started."""
    processes, layout = fleet.chain.processes, fleet.chain.layout
    names = [*(service.name for service in layout.services), *layout.programs]
    down = [name for name in names if not processes.runs(name)]
    if back := [*down, *(name for name in fleet.chain.gone if name not in down)]:
        await started(fleet, *back)
    await eventually(lambda: missing(fleet), lambda names: not names)


async def idle(fleet: Laptop) -> None:
    """Return when no endpoint has a request, by its own metrics and by the picker's accounts.

    Metrics come an interval late: what a test before left there would count as traffic past the picker in this one.
    """

    async def requests() -> Any:
        reported = await fleet.endpoints()
        loads = [each["load"] for each in reported if each["load"]]
        return sum(each["in_flight"] for each in reported) + sum(load["waiting"] + load["running"] for load in loads)

    await eventually(requests, lambda count: count == 0)


async def missing(fleet: Laptop) -> list[str]:
    """Pods that are no endpoints with a load, and LMCache servers without their engine."""
    reported = {each["name"].rpartition("/")[2] for each in await fleet.endpoints() if each["load"]}
    found = [pod.name for pod in fleet.chain.pods if pod.name not in reported]
    for service in fleet.chain.layout.services:
        if service.name.startswith("lmcache-"):
            status = await fleet.chain.get(f"http://{fleet.service(service.name)}/status")
            found += [] if status["registered_gpu_ids"] else [service.name]
    return found


async def settled(fleet: Laptop) -> None:
    """Return when the mirror has all that the coordinator has, and that does not change any more."""

    async def look() -> tuple[float, int]:
        stats = await fleet.chain.get(f"{fleet.chain.layout.coordinator}/directory/stats")
        return await statistic(fleet, "tier_chunks"), stats["num_keys"]

    async def same() -> bool:
        before = await look()
        await asyncio.sleep(2.5)  # LMCache reports, and we read, once a second
        return before == await look() and before[0] == before[1]

    await eventually(same, bool)


async def swept(fleet: Laptop) -> None:
    """Return when the picker has read the whole directory since: of a large one it finds only then what is gone."""
    before = await statistic(fleet, "tier_sweeps")
    # The next may have begun already.
    await eventually(lambda: statistic(fleet, "tier_sweeps"), lambda count: count >= before + 2)


async def loaded(fleet: Laptop, pod: str) -> tuple[float, float]:
    """Tokens that the LMCache server of a pod's node has found so far: in its L1, in L2."""
    async with fleet.http.get(f"http://{fleet.service(f'lmcache-{pod}')}/metrics") as answer:
        found = tokens_found(await answer.text())
    return found["l1"], found["l2"]


async def in_l1(fleet: Laptop, node: str) -> int:
    """Chunks that the coordinator knows in the L1 of a node."""
    url = f"{fleet.chain.layout.coordinator}/directory/keys?tier=l1&instance_id={node}&limit=1"
    return int((await fleet.chain.get(url))["total"])


def direct_to(pod: LaptopPod) -> openai.AsyncOpenAI:
    """A client that goes past the picker."""
    return openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none", timeout=120)


async def asked_directly(pod: LaptopPod, messages: list[Any]) -> CompletionUsage:
    """What a pod reports of a request that did not come through the picker, with an answer of one token."""
    async with direct_to(pod) as direct:
        reported = await direct.chat.completions.create(model="tiny", messages=messages, max_tokens=1)
    assert reported.usage is not None
    return reported.usage


async def remembered(fleet: Laptop, *pods: str) -> None:
    """Return when chunks that these pods store now are known to be in their L1 again."""
    for pod in pods:
        async with direct_to(fleet.pod(pod)) as direct:

            async def stored(direct: openai.AsyncOpenAI = direct, node: str = fleet.pod(pod).node) -> int:
                await direct.completions.create(model="tiny", prompt=Talk(fleet, direct).words(32), max_tokens=1)
                return await in_l1(fleet, node)

            await eventually(stored, bool, every=1.0)


async def fill(fleet: Laptop, client: openai.AsyncOpenAI, pod: str) -> None:
    """Have a pod compute so much else that its device holds nothing that it held."""
    async with direct_to(fleet.pod(pod)) as direct:
        for _ in range(3):
            other = Talk(fleet, direct)
            await direct.completions.create(model="tiny", prompt=other.words(1300), max_tokens=1)


@asynccontextmanager
async def saturated(fleet: Laptop, pod: str) -> AsyncIterator[None]:
    """A pod with a queue that did not come through the picker, which knows it by the pod's metrics.

    Who asks waits for the last answer: vLLM 0.32 may end when a request is given up whose blocks are just being loaded
    (vllm-project/vllm#43226).
    """
    direct = openai.AsyncOpenAI(base_url=f"{fleet.pod(pod).url}/v1", api_key="none", timeout=300, max_retries=0)
    body: Any = {"ignore_eos": True}
    enough = asyncio.Event()

    async def keep_asking() -> None:
        other = Talk(fleet, direct)
        while not enough.is_set():
            await direct.completions.create(model="tiny", prompt=other.words(900), max_tokens=150, extra_body=body)

    async def load() -> Any:
        return next(each["load"] for each in await fleet.endpoints() if each["name"].endswith(f"/{pod}"))

    async with direct, asyncio.TaskGroup() as group:
        for _ in range(12):
            group.create_task(keep_asking())
        try:
            await eventually(load, lambda seen: seen["waiting"] >= 8)
            yield
        finally:
            enough.set()
    await eventually(load, lambda seen: not seen["waiting"] + seen["running"])


async def received(fleet: Laptop, count: int) -> None:
    """Return when the KV events of so many pods are received."""
    live = lambda: fleet.metric("warmpath_endpoint_kv_events", pool="sim", state="live")  # noqa: E731
    await eventually(live, lambda seen: seen == count)


async def killed(fleet: Laptop, name: str) -> None:
    """Kill a pod or a service as the kernel would, and return when it is gone; a pod is no endpoint any more then."""
    os.kill(fleet.chain.processes.pid(name), signal.SIGKILL)
    if any(pod.name == name for pod in fleet.chain.pods):
        await until(lambda: name in fleet.chain.gone, LIMIT)
        reported = lambda: fleet.endpoints()  # noqa: E731
        await eventually(reported, lambda found: all(each["name"].rpartition("/")[2] != name for each in found))
    else:
        await fleet.chain.processes.stop(name)


async def started(fleet: Laptop, *names: str) -> None:
    """Start those pods or services that do not run; return when all of them answer. Pods are endpoints again then."""
    layout = fleet.chain.layout
    programs = {program.name: program for program in (*layout.services, *layout.programs.values())}
    for name in names:
        if not fleet.chain.processes.runs(name):
            await fleet.chain.start(programs[name])
    for name in names:
        await fleet.chain.ready(programs[name].ready, name, fleet.chain.shape.engine.ready_seconds)
    if back := [name for name in names if name in fleet.chain.gone]:
        fleet.chain.gone[:] = [name for name in fleet.chain.gone if name not in back]
        write_endpoints([pod for pod in layout.pods if pod.name not in fleet.chain.gone], fleet.chain.endpoints_file)


async def well(fleet: Laptop, talk: Talk) -> None:
    """The conversation goes on, and the picker knows exactly what of it is cached."""
    await talk.say(talk.words(100))
    await settled(fleet)
    turn = await talk.say(talk.words(30))
    assert turn.predicted == turn.cached > 0
