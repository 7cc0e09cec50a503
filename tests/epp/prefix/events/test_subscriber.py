"""Real sockets: publishers that start late, die, come back as another process, drop messages or send rubbish."""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pytest
import uvloop
import zmq
import zmq.asyncio
from aiohttp import web

from epp.plugin import Endpoint, Load, Services
from epp.pool.store import Pool
from epp.prefix.events.engine_cache import KvEventIndex
from epp.prefix.events.sources import KvEvents, PodDiscovery
from epp.prefix.events.subscriber import _SHARED, Subscribers, _Queue
from epp.testing import services
from tests.support.engines.kv_events import batch, block_stored, depth, stored
from tests.support.process import waiting
from tests.support.process.web_server import serving
from tests.support.scheduling.degradations import RecordedMetrics
from tooling.laptop.ports import free_ports
from tooling.simulator.publisher import KvEventsConfig, Publisher

PROMPTS = [[100 * i + j for j in range(16)] for i in range(1, 9)]


async def until(condition: Callable[[], bool]) -> None:
    """Sockets that connect anew take their time on a machine that has other things to do."""
    await waiting.until(condition, 30)


class Server:
    """A model server, as far as it tells where it publishes."""

    def __init__(self) -> None:
        self.sources: Mapping[str, Any] | None = {}
        self.info: Mapping[str, Any] | None = None
        """What SGLang tells, which knows no other question."""
        self.address = ""
        self.asked = 0

    @asynccontextmanager
    async def running(self) -> AsyncIterator["Server"]:
        app = web.Application()
        app.router.add_get("/kv_event_sources", self._answer)
        app.router.add_get("/server_info", self._describe)
        async with serving(app) as self.address:
            yield self

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        if self.sources is None:
            raise web.HTTPNotFound
        return web.Response(body=json.dumps(self.sources).encode(), content_type="application/json")

    async def _describe(self, request: web.Request) -> web.Response:
        if self.info is None:
            raise web.HTTPNotFound
        page = {"launch_command": "x" * 200_000, **self.info}
        return web.Response(body=json.dumps(page).encode(), content_type="application/json")


def services_of(pool: Pool, metrics: RecordedMetrics) -> Services:
    return replace(
        services(degraded=metrics.degraded, wall_clock=lambda: 3.0),
        endpoints=lambda: pool.endpoints,
        for_each_endpoint=pool.run_for_each,
    )


class Rig:
    """A pool of one endpoint, its server, and subscribers that fill `kv_index`."""

    def __init__(self, server: Server, config: KvEvents) -> None:
        self.pool = Pool("p", random=random.Random(1))
        self.endpoint = Endpoint("ns/pod", server.address)
        self.pool.replace([self.endpoint])
        self.metrics = RecordedMetrics()
        self.kv_index = KvEventIndex(200_000)
        self.config = config
        self.services = services_of(self.pool, self.metrics)
        self.subscribers = Subscribers(self.kv_index, config, self.services, time.monotonic)

    @property
    def state(self) -> str:
        return self.kv_index.state_of(self.endpoint).state

    def knows(self, *prompts: list[int], rank: int = 0) -> bool:
        engine = self.kv_index.state_of(self.endpoint).engine(rank)
        return [depth(engine, ids) for ids in PROMPTS] == [4 if ids in prompts else 0 for ids in PROMPTS]


@asynccontextmanager
async def rig(
    config: KvEvents | None = None, sources: Mapping[str, Any] | None = None
) -> AsyncIterator[tuple[Rig, Server]]:
    async with Server().running() as server:
        server.sources = sources if sources is not None else {}
        made = Rig(server, config or KvEvents())
        async with asyncio.TaskGroup() as group:
            task = group.create_task(made.subscribers.run())
            yield made, server
            task.cancel()


ANY = KvEventsConfig(True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="kv@pod@m")


def publisher(rank: int = 0) -> Publisher:
    return Publisher("127.0.0.1", ANY, lambda: 1.0, rank=rank)


def staying() -> Publisher:
    """One that comes back on the same ports when it is entered again."""
    port, replay_port = free_ports(2)
    at = KvEventsConfig(True, endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://*:{replay_port}")
    return Publisher("127.0.0.1", at, lambda: 1.0)


async def test_what_was_said_before_and_what_is_said_now() -> None:
    async with publisher() as engine:
        engine.publish([stored(PROMPTS[0])])
        async with rig(sources=engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            assert listener.knows(PROMPTS[0])
            engine.publish([stored(PROMPTS[1])])
            await until(lambda: listener.knows(*PROMPTS[:2]))
            assert listener.kv_index.state_of(listener.endpoint).lag == 2.0
            assert not listener.metrics.reasons()


async def test_a_gap_is_asked_for() -> None:
    async with publisher() as engine:
        async with rig(sources=engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            engine.muted = True
            engine.publish([stored(PROMPTS[1])])
            engine.muted = False
            engine.publish([stored(PROMPTS[2])])
            await until(lambda: listener.knows(*PROMPTS[:3]))
            assert listener.kv_index.faults["gap"] == 1
            assert "kv-events-gap" in listener.metrics.reasons()


async def test_a_new_process_under_the_old_address_begins_anew() -> None:
    async with staying() as engine:
        async with rig(sources=engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            await engine.__aexit__(None, None, None)
            await until(lambda: listener.state == "lost")
            await engine.__aenter__()
            engine.publish([stored(PROMPTS[1])])
            await until(lambda: listener.state == "live" and listener.knows(PROMPTS[1]))
            assert listener.kv_index.faults["restart"] == 1


async def test_a_publisher_that_moves_is_asked_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.prefix.events.subscriber._GONE", 0.1)
    async with publisher() as engine:
        async with rig(sources=engine.sources()) as (listener, server):
            await until(lambda: listener.state == "live")
            await engine.__aexit__(None, None, None)
            await engine.__aenter__()
            engine.publish([stored(PROMPTS[1])])
            asked = server.asked
            server.sources = engine.sources()
            await until(lambda: listener.state == "live" and listener.knows(PROMPTS[1]))
            assert server.asked > asked


async def test_all_ranks_are_received_and_missed() -> None:
    async with publisher() as first, publisher(rank=1) as second:
        async with rig(sources={**first.sources(), **second.sources()}) as (listener, _):
            await until(lambda: listener.state == "live")
            first.publish([stored(PROMPTS[0])])
            second.publish([stored(PROMPTS[1])])
            await until(lambda: listener.knows(PROMPTS[0]) and listener.knows(PROMPTS[1], rank=1))
            await second.__aexit__(None, None, None)
            await until(lambda: listener.state == "lost")
            assert listener.knows(PROMPTS[0])
            await second.__aenter__()


async def test_rubbish_is_counted_and_nothing_else_harmed() -> None:
    async with publisher() as engine:
        async with rig(sources=engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            draw = random.Random(7)
            for size in (0, 1, 50, 5000):
                engine.send(draw.randbytes(size))
            engine.send(batch({"type": "BlockStored", "block_hashes": "no"}))
            raw: zmq.Socket[bytes] = zmq.Socket.shadow(engine._socket.underlying)
            raw.send_multipart([b"one frame"])
            raw.send_multipart([b"t", b"short", b""])
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            assert listener.state == "live"
            assert listener.kv_index.faults == {"malformed": 6, "replay": 1}
            assert listener.kv_index.counts["malformed"] == 1


async def test_without_anybody_to_ask_a_lost_connection_costs_what_was_known() -> None:
    async with staying() as engine:
        sources = {"0": dict(engine.sources()["0"], replay_endpoint=None)}
        async with rig(sources=sources) as (listener, _):
            await until(lambda: listener.state == "live")
            # A publisher may learn of a subscription after the subscriber learns that it is connected.
            for _ in range(300):
                engine.publish([stored(PROMPTS[0])])
                if listener.knows(PROMPTS[0]):
                    break
                await asyncio.sleep(0.1)
            assert listener.knows(PROMPTS[0])
            await engine.__aexit__(None, None, None)
            await until(lambda: listener.state == "lost")
            await engine.__aenter__()
            await until(lambda: listener.state == "live")
            assert listener.knows()


async def test_a_server_that_does_not_tell_publishes_by_convention() -> None:
    async with staying() as engine:
        at = engine.sources()["0"]
        port, replay_port = (int(at[each].rpartition(":")[2]) for each in ("endpoint", "replay_endpoint"))
        config = KvEvents(pod_discovery_config=PodDiscovery(port, replay_port))
        async with Server().running() as server:
            server.sources = None
            listener = Rig(server, config)
            engine.publish([stored(PROMPTS[0])])
            async with asyncio.TaskGroup() as group:
                task = group.create_task(listener.subscribers.run())
                await until(lambda: listener.state == "live" and listener.knows(PROMPTS[0]))
                assert server.asked >= 1
                task.cancel()


async def test_sglang_says_where_it_publishes() -> None:
    async with staying() as engine:
        at = engine.sources()["0"]
        port, replay_port = (int(at[each].rpartition(":")[2]) for each in ("endpoint", "replay_endpoint"))
        async with Server().running() as server:
            server.sources = None
            told = {"endpoint_host": "*", "endpoint_port_base": port, "replay_endpoint_port_base": replay_port}
            server.info = {"kv_events": {**told, "dp_size": 1}}
            listener = Rig(server, KvEvents())
            engine.publish([stored(PROMPTS[0])])
            async with asyncio.TaskGroup() as group:
                task = group.create_task(listener.subscribers.run())
                await until(lambda: listener.state == "live" and listener.knows(PROMPTS[0]))
                task.cancel()
        assert not listener.metrics.reasons()


async def test_sglang_that_publishes_nothing_is_off() -> None:
    async with Server().running() as server:
        server.sources, server.info = None, {"kv_events": None}
        listener = Rig(server, KvEvents())
        async with asyncio.TaskGroup() as group:
            task = group.create_task(listener.subscribers.run())
            await until(lambda: listener.state == "off")
            task.cancel()
        assert not listener.metrics.reasons()


async def test_an_endpoint_without_events_is_off() -> None:
    async with rig(sources={}) as (listener, _):
        await until(lambda: listener.state == "off")
        assert not listener.metrics.reasons()


@pytest.mark.parametrize(
    "sources",
    [
        {"0": {"endpoint": "tcp://*:5557", "topic": "x" * 100_000}},
        {"²": {"endpoint": "tcp://*:5557"}, "1": {"endpoint": [["tcp://*:5557"]]}},
    ],
    ids=["more than anybody tells", "of a wrong type"],
)
async def test_sources_that_make_no_sense_are_reported_of(sources: Mapping[str, Any]) -> None:
    async with rig(sources=sources) as (listener, _):
        await until(lambda: "kv-events-failed" in listener.metrics.reasons())
        assert listener.state == "connecting"


async def test_one_that_is_not_there_yet_is_asked_until_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.prefix.events.subscriber._RETRY", (0.01, 0.02))
    async with rig() as (listener, server):
        dead = Endpoint("ns/dead", "127.0.0.1:1")
        listener.pool.replace([dead])
        await until(lambda: "kv-events-failed" in listener.metrics.reasons())
        assert listener.kv_index.state_of(dead).state == "connecting"
        async with publisher() as engine:
            server.sources = engine.sources()
            listener.pool.replace([listener.endpoint, dead])
            await until(lambda: listener.state == "live")


async def test_an_endpoint_that_leaves_takes_all_with_it() -> None:
    async with publisher() as engine:
        async with rig(sources=engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            listener.pool.replace([])
            assert listener.kv_index.budget.used == 0
            engine.publish([stored(PROMPTS[1])])
            await asyncio.sleep(0.02)
            assert listener.kv_index.budget.used == 0


async def test_another_index_is_filled_from_the_beginning() -> None:
    async with publisher() as engine:
        async with rig(sources=engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            listener.kv_index = KvEventIndex(1000)
            again = Subscribers(listener.kv_index, listener.config, listener.services, time.monotonic)
            async with asyncio.TaskGroup() as group:
                task = group.create_task(again.run())
                await until(lambda: listener.state == "live" and listener.knows(PROMPTS[0]))
                task.cancel()
            assert listener.kv_index.budget.used == 4


@asynccontextmanager
async def connecting() -> AsyncIterator[tuple[Rig, zmq.asyncio.Socket]]:
    """A rig that listens itself, and the socket of an engine that connects to it."""
    context = zmq.asyncio.Context()
    (port,) = free_ports(1)
    async with rig(KvEvents(zmq_endpoint=f"tcp://127.0.0.1:{port}", discover_pods=False)) as (listener, _):
        engine = context.socket(zmq.PUB)
        engine.setsockopt(zmq.SNDHWM, 0)
        try:
            engine.connect(f"tcp://127.0.0.1:{port}")
            yield listener, engine
        finally:
            context.destroy(linger=0)


async def test_engines_may_connect_to_us() -> None:
    async with connecting() as (listener, engine):
        numbers = iter(range(10**6))

        async def say(topic: str, prompt: list[int], known: Callable[[], bool]) -> None:
            while not known():  # a subscriber that connects late misses what is said
                number = next(numbers)
                await engine.send_multipart([topic.encode(), number.to_bytes(8, "big"), batch(stored(prompt))])
                await asyncio.sleep(0.01)

        async with asyncio.timeout(5):
            await say("kv@nobody@m", PROMPTS[0], lambda: next(numbers) > 20)
            await say(f"kv@{listener.endpoint.address}@m", PROMPTS[1], lambda: listener.knows(PROMPTS[1]))
        assert listener.state == "live"


async def test_pools_share_the_socket_that_engines_connect_to() -> None:
    """As pools of one picker with one configuration do. When the one that has the socket ends, the other has it."""
    (port,) = free_ports(1)
    config = KvEvents(zmq_endpoint=f"tcp://127.0.0.1:{port}", discover_pods=False)
    numbers, context = iter(range(10**6)), zmq.asyncio.Context()
    engine = context.socket(zmq.PUB)
    engine.connect(config.zmq_endpoint)

    async def until_known(prompts: Mapping[Rig, list[list[int]]]) -> None:
        """Say that the last of them is held too until that is known."""
        while not all(listener.knows(*known) for listener, known in prompts.items()):
            for listener, known in prompts.items():
                topic = f"kv@{listener.endpoint.address}@m".encode()
                await engine.send_multipart([topic, next(numbers).to_bytes(8, "big"), batch(stored(known[-1]))])
            await asyncio.sleep(0.01)

    try:
        async with Server().running() as one, Server().running() as other:
            first, second = Rig(one, config), Rig(other, config)
            async with asyncio.timeout(20), asyncio.TaskGroup() as group:
                has_it = group.create_task(first.subscribers.run())
                await asyncio.sleep(0)
                waits = group.create_task(second.subscribers.run())
                await until_known({first: [PROMPTS[0]], second: [PROMPTS[1]]})
                assert [*first.metrics.reasons(), *second.metrics.reasons()] == []
                has_it.cancel()
                await asyncio.wait([has_it])
                await until_known({second: [PROMPTS[1], PROMPTS[0]]})
                waits.cancel()
    finally:
        context.destroy(linger=0)
    assert _SHARED == {}


def rank_endpoints(listener: Rig) -> list[Endpoint]:
    """The pool's endpoints from now on: two ranks behind the port of the one it had."""
    ranks = [Endpoint(f"ns/pod-rank-{n}", listener.endpoint.address, rank=n) for n in range(2)]
    listener.pool.replace(ranks)
    return ranks


async def test_of_ranks_behind_one_port_each_hears_its_engine() -> None:
    async with publisher(4) as one, publisher(5) as two:
        async with rig(sources={**two.sources(), **one.sources()}) as (listener, _):
            first, second = map(listener.kv_index.state_of, rank_endpoints(listener))
            one.publish([stored(PROMPTS[0])])
            two.publish([stored(PROMPTS[1])])
            await until(lambda: first.held == second.held == 4)
            assert depth(first.engine(4), PROMPTS[0]) == depth(second.engine(5), PROMPTS[1]) == 4
            assert first.state == second.state == "live"
            assert (list(first.engines), list(second.engines)) == ([4], [5])


async def test_of_ranks_that_connect_to_us_each_hears_its_engine() -> None:
    async with connecting() as (listener, engine):
        first, second = map(listener.kv_index.state_of, rank_endpoints(listener))
        number = 0
        # An engine's number counts on from server to server: these may be the second of two.
        while not (first.held == second.held == 4):
            for topic, rank in ((f"kv@{listener.endpoint.address}@m", 2), ("kv@pod@m", 3)):
                await engine.send_multipart([topic.encode(), *claimed(number, rank, PROMPTS[rank])])
            number += 1
            await asyncio.sleep(0.01)
        assert depth(first.engine(2), PROMPTS[2]) == depth(second.engine(3), PROMPTS[3]) == 4
        await engine.send_multipart([b"kv@ns/pod@m", (0).to_bytes(8, "big"), b"\xff"])
        await until(lambda: listener.kv_index.faults.get("malformed") == 1)


async def most_in_a_turn(kv_index: KvEventIndex, blocks: int) -> int:
    """Blocks that were stored between two turns of the event loop at most, until so many are."""
    most = last = kv_index.counts["stored"]
    async with asyncio.timeout(30):
        while last < blocks:
            await asyncio.sleep(0)
            most, last = max(most, kv_index.counts["stored"] - last), kv_index.counts["stored"]
    return most


@pytest.mark.parametrize("live", [True, False], ids=["as it is said", "as it is repeated"])
async def test_a_large_message_leaves_turns_of_the_loop_to_others(monkeypatch: pytest.MonkeyPatch, live: bool) -> None:
    monkeypatch.setattr("epp.prefix.events.subscriber._TURN", 0.0)
    ids = list(range(80_000))
    event = block_stored(ids, range(1, 20_001), 0, 4)
    async with publisher() as engine:
        if not live:
            engine.publish([event])
        async with rig(sources=engine.sources()) as (listener, _):
            if live:
                await until(lambda: listener.state == "live")
                engine.publish([event])
            assert await most_in_a_turn(listener.kv_index, 20_000) <= 1024
            await until(lambda: listener.state == "live")
            assert depth(listener.kv_index.state_of(listener.endpoint).engine(0), ids) == 20_000


async def test_a_flood_leaves_turns_of_the_loop_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two publishers of one endpoint share what there is of a turn."""
    monkeypatch.setattr("epp.prefix.events.subscriber._TURN", 0.0)
    prompts = [list(range(1000 * i, 1000 * i + 400)) for i in range(60)]
    async with publisher() as first, publisher(rank=1) as second:
        async with rig(sources={**first.sources(), **second.sources()}) as (listener, _):
            await until(lambda: listener.state == "live")
            for ids in prompts:
                first.publish([stored(ids)])
                second.publish([stored(ids)])
            assert await most_in_a_turn(listener.kv_index, 2 * 60 * 100) <= 100


async def test_what_is_too_large_is_reported_of_and_approximate_until_all_is_known_again() -> None:
    async with publisher() as engine:
        async with rig(KvEvents(max_message_bytes=1 << 16), engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            engine.send(bytes(1 << 17))
            await until(lambda: listener.state == "lost")
            assert listener.knows()
            assert listener.metrics.degradations == [("kv-events-too-large", "ns/pod")]
            engine.publish([stored(PROMPTS[1])])
            await until(lambda: listener.knows(PROMPTS[1]))
            assert listener.state == "lost"
            engine.publish([{"type": "AllBlocksCleared"}])
            await until(lambda: listener.state == "live")
            assert listener.knows()


async def test_an_engine_of_which_nearly_all_is_known_again_is_live() -> None:
    async with publisher() as engine:
        async with rig(KvEvents(max_message_bytes=1 << 16), engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            listener.endpoint.load = Load(block_size=4, blocks=8, at=0.0)
            engine.send(bytes(1 << 17))
            await until(lambda: listener.state == "lost")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            assert listener.state == "lost"
            engine.publish([stored(PROMPTS[1])])
            await until(lambda: listener.state == "live")


async def test_a_message_beyond_all_measure_costs_the_connection_and_no_more() -> None:
    async with publisher() as engine:
        async with rig(KvEvents(max_message_bytes=1 << 16), engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            engine._sent.clear()
            engine.send(bytes(1 << 20))
            engine._sent.clear()
            await until(lambda: "kv-events-restart" in listener.metrics.reasons())
            engine.publish([stored(PROMPTS[1])])
            await until(lambda: listener.state == "live" and listener.knows(PROMPTS[1]))
            assert listener.kv_index.faults["restart"] == 1


async def test_a_publisher_that_does_not_repeat_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a new picker's packets to that port are dropped at first."""
    monkeypatch.setattr("epp.prefix.events.subscriber._REPLAY_IDLE", 0.1)
    monkeypatch.setattr("epp.prefix.events.subscriber._COOL", (0.1, 0.2))
    (port,) = free_ports(1)
    at = msgspec.structs.replace(ANY, replay_endpoint=f"tcp://*:{port}")
    async with publisher() as engine:
        engine.publish([stored(PROMPTS[0])])
        sources = {"0": dict(engine.sources()["0"], replay_endpoint=at.replay_endpoint)}
        async with rig(sources=sources) as (listener, _):
            await until(lambda: listener.kv_index.faults.get("replay-failed", 0) > 2)
            engine.publish([stored(PROMPTS[1])])
            await until(lambda: listener.knows(PROMPTS[1]))
            assert listener.state in ("replaying", "lost")
            async with Publisher("127.0.0.1", at, lambda: 1.0) as repeating:
                for prompt in PROMPTS[:2]:
                    repeating.publish([stored(prompt)])
                await until(lambda: listener.state == "live")
                assert listener.knows(*PROMPTS[:2])
            engine.publish([stored(PROMPTS[2])])
            await until(lambda: listener.knows(*PROMPTS[:3]))
            assert listener.state == "live"
            assert listener.kv_index.faults["replay"] == 1
            assert "lost" not in listener.kv_index.faults


async def test_a_replay_larger_than_there_is_room_for_comes_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.prefix.events.subscriber._REPLAY_BYTES", 5000)
    async with publisher() as engine:
        prompts = [list(range(1000 * i, 1000 * i + 16)) for i in range(200)]
        for ids in prompts:
            engine.publish([stored(ids)])
        async with rig(sources=engine.sources()) as (listener, _):
            await until(lambda: listener.state == "live")
            cache = listener.kv_index.state_of(listener.endpoint).engine(0)
            assert [depth(cache, ids) for ids in prompts] == [4] * 200
            assert listener.kv_index.faults == {"replay": 1}


def claimed(number: int, rank: Any, prompt: list[int]) -> list[bytes]:
    """A message of a rank, if it can be one."""
    return [number.to_bytes(8, "big"), msgspec.msgpack.encode([1.0, [stored(prompt)], rank])]


async def test_ranks_that_messages_claim_are_bounded() -> None:
    async with connecting() as (listener, engine):
        topic = f"kv@{listener.endpoint.address}@m".encode()
        kv_state = listener.kv_index.state_of(listener.endpoint)
        while not listener.knows(PROMPTS[0], rank=7):
            await engine.send_multipart([topic, *claimed(0, 7, PROMPTS[0])])
            await asyncio.sleep(0.01)
        for strange in (b"", b"\xff" * 99, b"kv@" * 400_000, b"kv@\xff\x1b[2J@m", b"@" * 1_000_000):
            await engine.send_multipart([strange, *claimed(0, 0, PROMPTS[1])])
        for rank in (-1, 2**63, 1.5, "0", 100_000):
            await engine.send_multipart([topic, *claimed(0, rank, PROMPTS[1])])
        for rank in range(20_000):
            await engine.send_multipart([topic, *claimed(0, 3 * rank, PROMPTS[2])])
        await engine.send_multipart([topic, *claimed(9, 7, PROMPTS[3])])
        await until(lambda: listener.knows(PROMPTS[3], rank=7))
        assert len(kv_state.engines) == 64
        faults = listener.kv_index.faults
        assert (faults["malformed"], faults["rank"]) == (2, 3 + 20_000 - 63)
        details = dict(listener.metrics.degradations)
        assert details["kv-events-unknown"].isprintable()
        assert sum(reason == "kv-events-unknown" for reason in listener.metrics.reasons()) == 5


async def test_ranks_that_an_endpoint_does_not_name_any_more_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epp.prefix.events.subscriber._GONE", 0.01)
    monkeypatch.setattr("epp.prefix.events.subscriber._RETRY", (0.01, 0.01))
    async with publisher() as engine:
        (source,) = engine.sources().values()
        nobody = dict(source, endpoint="tcp://*:1", replay_endpoint=None)
        async with rig(sources=engine.sources()) as (listener, server):
            await until(lambda: listener.state == "live")
            engine.publish([stored(PROMPTS[0])])
            await until(lambda: listener.knows(PROMPTS[0]))
            kv_state = listener.kv_index.state_of(listener.endpoint)
            await engine.__aexit__(None, None, None)
            for turn in range(1, 4):
                server.sources = {str(100 * turn + i): nobody for i in range(64)}
                await until(partial(kv_state.engines.__contains__, 100 * turn))
                assert len(kv_state.engines) == 64
            assert listener.kv_index.budget.used == 0
            await engine.__aenter__()


def test_what_waits_for_an_endpoint_is_bounded_by_its_bytes() -> None:
    queue = _Queue()
    for _ in range(100):
        queue.put([b"topic", bytes(8), bytes(1 << 20)])
    for _ in range(10**5):
        queue.put([])
    assert queue._bytes <= 64 << 20


def test_it_runs_on_the_loop_that_the_process_uses() -> None:
    uvloop.run(test_what_was_said_before_and_what_is_said_now())
    uvloop.run(test_a_gap_is_asked_for())
