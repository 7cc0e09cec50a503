"""Talking to a simulated pod in tests."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

HELLO = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 6}
LONG = {"messages": [{"role": "user", "content": "x" * 800}], "max_tokens": 4000, "ignore_eos": True, "stream": True}


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.002)


async def post(client: aiohttp.ClientSession, path: str, body: Any, status: int = 200) -> Any:
    data = body if isinstance(body, bytes) else json.dumps(body)
    async with client.post(path, data=data) as response:
        assert response.status == status, await response.text()
        return await response.json()


async def sse(client: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[tuple[str, Any]]:
    """(event name, decoded data) of a stream; `[DONE]` stays text."""
    async with client.post(path, json={**body, "stream": True}) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        text = await response.text()
    assert text.endswith("\n\n")
    events = []
    for block in text.removesuffix("\n\n").split("\n\n"):
        *names, data = block.split("\n")
        payload = data.removeprefix("data: ")
        events.append(
            (names[0].removeprefix("event: ") if names else "", payload if payload == "[DONE]" else json.loads(payload))
        )
    return events


async def metric(client: aiohttp.ClientSession, name: str, **labels: str) -> float:
    """The one sample of that name whose labels include these."""
    async with client.get("/metrics") as response:
        families = text_string_to_metric_families(await response.text())
    samples = [sample for family in families for sample in family.samples if sample.name == name]
    (value,) = [sample.value for sample in samples if labels.items() <= sample.labels.items()]
    return value
