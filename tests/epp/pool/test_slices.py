import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from epp.pool import watch as module
from epp.pool.apiserver import ApiServer
from epp.pool.slices import SLICES, ServiceAddresses
from tests.support.kubernetes.api_server import FakeApiServer, Object, use
from tests.support.process.waiting import beside, until
from tests.support.scheduling.degradations import RecordedMetrics

KIND = str(SLICES)


def endpoints_slice(*ips: str, of: str = "replicas", ports: Any = ({"name": "replicas", "port": 9004},)) -> Object:
    """Endpoints that are not ready, as one that joins is."""
    labels = {"kubernetes.io/service-name": of}
    endpoints = [{"addresses": [ip], "conditions": {"ready": False}} for ip in ips]
    return {"metadata": {"labels": labels}, "endpoints": endpoints, "ports": ports}


@pytest.fixture
async def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[FakeApiServer]:
    for pause in ("_SHORTEST_PAUSE", "_ABSENT_PAUSE", "_LONGEST_PAUSE", "_AWAY_PAUSE"):
        monkeypatch.setattr(module, pause, 0.01)
    fake = FakeApiServer()
    fake.installed.add(KIND)
    async with fake.running():
        use(fake.host, tmp_path, monkeypatch)
        yield fake


class Followed:
    """Addresses as they were found last, and what was degraded."""

    def __init__(self, api: ApiServer) -> None:
        self.metrics = RecordedMetrics()
        self.addresses: list[str] | None = None
        self.service = ServiceAddresses(
            "ns", "replicas", "replicas", api, self.metrics, "replicas-service", random.Random(1)
        )

    async def run(self) -> None:
        await self.service.follow(lambda addresses: setattr(self, "addresses", addresses))

    async def until(self, *addresses: str) -> None:
        await until(lambda: self.addresses == [*addresses])


@asynccontextmanager
async def following() -> AsyncIterator[Followed]:
    async with ApiServer() as api:
        followed = Followed(api)
        async with beside(followed.run()):
            yield followed


async def test_all_slices_of_the_service_are_followed_and_no_others(fake: FakeApiServer) -> None:
    await fake.put(KIND, "a", endpoints_slice("10.0.0.2", "10.0.0.1"))
    await fake.put(KIND, "other", endpoints_slice("10.0.0.9", of="other"))
    async with following() as followed:
        await followed.until("10.0.0.1:9004", "10.0.0.2:9004")
        await fake.put(KIND, "b", endpoints_slice("10.0.0.2", "10.0.0.3"))
        await followed.until("10.0.0.1:9004", "10.0.0.2:9004", "10.0.0.3:9004")
        await fake.put(KIND, "a", endpoints_slice())
        await followed.until("10.0.0.2:9004", "10.0.0.3:9004")
        await fake.delete(KIND, "b")
        await followed.until()
        assert followed.metrics.degradations == []


async def test_of_both_families_of_addresses_one_counts(fake: FakeApiServer) -> None:
    await fake.put(KIND, "six", endpoints_slice("fd00:0::1", "fd00::2"))
    async with following() as followed:
        await followed.until("[fd00::1]:9004", "[fd00::2]:9004")
        await fake.put(KIND, "four", endpoints_slice("10.0.0.1", "10.0.0.2"))
        await followed.until("10.0.0.1:9004", "10.0.0.2:9004")
        assert followed.metrics.degradations == []


@pytest.mark.parametrize(
    ("ports", "port"),
    [
        ([{"name": "", "port": 9104}], 9104),
        ([{"port": 9104}], 9104),
        ([{"name": "grpc", "port": 9002}, {"name": "replicas", "port": 9105}], 9105),
    ],
)
async def test_the_port_is_the_one_that_is_named_or_the_only_one(fake: FakeApiServer, ports: Any, port: int) -> None:
    await fake.put(KIND, "a", endpoints_slice("10.0.0.1", ports=ports))
    async with following() as followed:
        await followed.until(f"10.0.0.1:{port}")
        assert followed.metrics.degradations == []


async def test_what_has_no_such_port_is_reported_and_what_was_known_stays(fake: FakeApiServer) -> None:
    await fake.put(KIND, "a", endpoints_slice("10.0.0.1"))
    async with following() as followed:
        await followed.until("10.0.0.1:9004")
        await fake.put(KIND, "names", endpoints_slice("pods.example"))
        both = [{"name": "grpc", "port": 9002}, {"name": "health", "port": 9003}]
        await fake.put(KIND, "a", endpoints_slice("10.0.0.2", ports=both))
        await until(lambda: bool(followed.metrics.degradations))
        expected = f"{KIND} ns/a: ports: expected one named 'replicas', or one alone"
        assert followed.metrics.degradations == [("replicas-service", expected)]
        assert followed.addresses == ["10.0.0.1:9004"]


@pytest.mark.parametrize("status", [403, 503])
async def test_while_the_api_server_says_no_those_known_last_stay(fake: FakeApiServer, status: int) -> None:
    await fake.put(KIND, "a", endpoints_slice("10.0.0.1"))
    async with following() as followed:
        await followed.until("10.0.0.1:9004")
        fake.answers[KIND] = status
        await fake.drop()
        await until(lambda: followed.metrics.going_on() == {"replicas-service"})
        assert followed.addresses == ["10.0.0.1:9004"]
        assert "Service ns/replicas: " in followed.metrics.degradations[0][1]
        await fake.put(KIND, "a", endpoints_slice("10.0.0.2"))
        del fake.answers[KIND]
        await followed.until("10.0.0.2:9004")
        await until(lambda: not followed.metrics.going_on())
