"""A pod twenty times faster than the laptop's, and clients for it."""

from collections.abc import AsyncIterator

import aiohttp
import openai
import pytest

from tooling.simulator.server import SimulatedPod


@pytest.fixture
async def pod() -> AsyncIterator[SimulatedPod]:
    async with SimulatedPod(name="pod-a", time_scale=20, lora=("poet",)) as pod:
        yield pod


@pytest.fixture
async def client(pod: SimulatedPod) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(pod.url) as client:
        yield client


@pytest.fixture
async def sdk(pod: SimulatedPod) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=f"{pod.url}/v1", api_key="none", max_retries=0) as sdk:
        yield sdk
