import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random

import pytest

from epp.configuration.loader import load_strategy
from epp.errors import ConfigError
from epp.plugin import Request, Response
from epp.replicas.exchange import SharedPool
from epp.replicas.group import ReplicaGroup, ReplicaSettings
from tests.support.process.waiting import beside, until
from tests.support.scheduling.schedulers import fail, pods

POOL = "default/llm"


class Process:
    """What a process has of sharing: a group, and the scheduler of one pool."""

    def __init__(
        self,
        *peers: str,
        secret: Path | None = None,
        dns: str | None = None,
        service: "KnownService | None" = None,
    ) -> None:
        self.degraded: list[str] = []
        self.group = ReplicaGroup(
            ReplicaSettings("127.0.0.1", 0, peers, dns, service, secret),
            time.monotonic,
            Random(),
            lambda reason, detail="", *, lasting=False: self.degraded.append(reason),
            lambda reason: None,
        )
        self.endpoints = tuple(pods("abcd"))
        pipeline = load_strategy("prefix-aware", clock=time.monotonic, random=Random(1))
        self.scheduler = pipeline.scheduler(
            wall_clock=lambda: 0.0,
            on_error=fail,
            others=(self.group.announcer(POOL, lambda *sent: self.scheduler.to_peers(*sent)),),
        )
        by_name = {endpoint.name: endpoint for endpoint in self.endpoints}
        self.group.add_pool(SharedPool(POOL, lambda: True, lambda: by_name, lambda: self.scheduler))
        self.group.open()
        self.address = f"127.0.0.1:{self.group.port}"


class KnownService:
    """A Service whose addresses a test says."""

    name = "ns/replicas"

    def __init__(self) -> None:
        self.found: Callable[[Sequence[str]], None] = lambda addresses: None

    async def follow(self, found: Callable[[Sequence[str]], None]) -> None:
        self.found = found
        await asyncio.Event().wait()


async def started(stack: AsyncExitStack, *peers: str, **options: object) -> Process:
    process = Process(*peers, **options)  # type: ignore[arg-type]
    stack.callback(process.group.close)
    await stack.enter_async_context(beside(process.group.run()))
    return process


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n", encoding="utf-8")
    return file


async def test_a_replica_joins_over_sockets_and_follows_its_peer(secret: Path) -> None:
    prompt = bytes(range(256)) * 16
    async with AsyncExitStack() as stack:
        first = await started(stack, secret=secret)
        await until(lambda: first.group.joined)
        request = Request(id="r", model="llama", prompt=prompt, tokens=1024, stream=True)
        held = first.scheduler.choose(await first.scheduler.prepare(request), first.endpoints)
        second = await started(stack, first.address, secret=secret)
        await until(lambda: second.group.joined)
        assert second.degraded == []
        assert second.group.exchange.open == 1
        shown = second.group.as_dict()
        assert shown["joined"] is True
        assert [(peer["address"], peer["state"]) for peer in shown["peers"]] == [(first.address, "live")]
        again = second.scheduler.choose(await second.scheduler.prepare(request), second.endpoints)
        assert again.endpoint.name == held.endpoint.name
        first.scheduler.finished(held, Response(status=200))
        await until(lambda: second.group.exchange.open == 1)
        assert len(second.group.exchange._own) == 1


async def test_peers_are_found_by_name_and_one_of_them_is_oneself() -> None:
    async with AsyncExitStack() as stack:
        first = await started(stack)
        second = await started(stack, dns=f"localhost:{first.group.port}")
        await until(lambda: any(peer["state"] == "live" for peer in second.group.as_dict()["peers"]))
        await until(lambda: second.group.joined)
        assert second.group.exchange.open == 0


async def test_peers_come_and_go_as_a_service_says_beside_those_that_are_named(secret: Path) -> None:
    async with AsyncExitStack() as stack:
        first, second = await started(stack, secret=secret), await started(stack, secret=secret)
        service = KnownService()
        third = await started(stack, first.address, secret=secret, service=service)

        def live() -> list[str]:
            return [peer["address"] for peer in third.group.as_dict()["peers"] if peer["state"] == "live"]

        await until(lambda: live() == [first.address])
        service.found([second.address, third.address])
        await until(lambda: live() == [first.address, second.address])
        service.found([third.address])
        assert live() == [first.address]
        assert third.degraded == []


@pytest.mark.parametrize("peer", ["nowhere", "host:", ":9004", "host:0", "host:70000", "host:http"])
async def test_a_peer_that_is_no_address_is_refused(peer: str) -> None:
    with pytest.raises(ConfigError, match=r"--peer.*expected HOST:PORT"):
        Process(peer)


async def test_beyond_loopback_a_secret_is_wanted(secret: Path) -> None:
    with pytest.raises(ConfigError, match=r"--replica-secret-file.*beyond loopback"):
        Process("10.0.0.1:9004")
    with pytest.raises(ConfigError, match=r"--replica-secret-file.*as Service ns/replicas is"):
        Process(service=KnownService())
    Process("10.0.0.1:9004", secret=secret).group.close()
    Process("[::1]:9004", "localhost:9004").group.close()


async def test_a_secret_that_is_none_is_refused(tmp_path: Path) -> None:
    short = tmp_path / "short"
    short.write_text("secret", encoding="utf-8")
    with pytest.raises(ConfigError, match="6 bytes, expected 16"):
        Process(secret=short)
    with pytest.raises(ConfigError, match="cannot read"):
        Process(secret=tmp_path / "missing")


async def test_the_end_of_a_replica_is_told() -> None:
    async with AsyncExitStack() as stack:
        first = await started(stack)
        async with AsyncExitStack() as inner:
            second = await started(inner, first.address)
            third = await started(stack, second.address)
            await until(lambda: any(peer["state"] == "live" for peer in third.group.as_dict()["peers"]))
        await until(lambda: [peer["state"] for peer in third.group.as_dict()["peers"]] == ["left"])
        assert third.degraded == []
