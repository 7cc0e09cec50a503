"""Listening to a publisher while something new is sent."""

import asyncio
import socket

from tooling.doctor.kv_events import hear
from tooling.simulator.publisher import KvEventsConfig, Publisher

FREE = KvEventsConfig(enable_kv_cache_events=True, endpoint="tcp://*:0")
STORED = {"type": "BlockStored", "block_hashes": [7], "parent_block_hash": None, "token_ids": [1, 2], "block_size": 2}


async def test_blocks_that_are_stored_are_received() -> None:
    async with Publisher("127.0.0.1", FREE, lambda: 0.0) as publisher:

        async def provoke(attempt: int) -> None:
            publisher.send(b"no batch")
            publisher.publish([{"type": "AllBlocksCleared"}])
            publisher.publish([{**STORED, "medium": "CPU"}])
            publisher.publish([{**STORED, "medium": "GPU"}])

        received = await hear([publisher.sources()["0"]["endpoint"]], provoke, 5.0)
    assert received is not None
    assert [event.token_ids for event in received] == [[1, 2]]


async def test_a_publisher_that_says_nothing_is_tried_twice() -> None:
    attempts = []
    async with Publisher("127.0.0.1", FREE, lambda: 0.0) as publisher:

        async def provoke(attempt: int) -> None:
            attempts.append(attempt)

        assert await hear([publisher.sources()["0"]["endpoint"]], provoke, 0.05) == []
    assert attempts == [0, 1]


async def test_where_nobody_listens_nothing_is_provoked() -> None:
    async def provoke(attempt: int) -> None:
        raise AssertionError("sent")

    with socket.socket() as taken:  # bound, not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        async with asyncio.timeout(20):
            assert await hear([f"tcp://127.0.0.1:{taken.getsockname()[1]}"], provoke, 5.0) is None
