"""What goes on the wire, and what is repeated to whom."""

import random
import struct
from dataclasses import replace

import msgspec
import pytest
import zmq
import zmq.asyncio

from epp.plugin import Endpoint
from epp.prefix.events.engine_cache import EngineCache, KvEventIndex
from epp.prefix.events.wire import decode
from epp.prefix.tokens.block_hashes import chain_of_tokens
from tooling.simulator.engine import LAPTOP, Engine
from tooling.simulator.generation import Said
from tooling.simulator.publisher import END, KvEventsConfig, Publisher, events_of, kv_events_from
from tooling.simulator.tokenizer import hash_chain, unpack

CONFIG = KvEventsConfig(True, endpoint="tcp://*:0", replay_endpoint="tcp://*:0", topic="kv@pod@sim")


async def asked(publisher: Publisher, start: int) -> list[list[bytes]]:
    """All frames of the answer to a request for messages from `start` on."""
    with zmq.asyncio.Context() as context:
        socket = context.socket(zmq.DEALER)
        socket.connect(publisher.sources()["0"]["replay_endpoint"])
        await socket.send_multipart([b"", struct.pack(">Q", start)])
        answer = []
        while True:
            frames = await socket.recv_multipart()
            answer.append(frames)
            if frames[2] == struct.pack(">Q", END):
                socket.close(linger=0)
                return answer


async def test_messages_are_numbered_and_repeated_from_where_they_are_asked_for() -> None:
    async with Publisher("127.0.0.1", CONFIG, lambda: 7.5) as publisher:
        for event in ({"type": "AllBlocksCleared"}, {"type": "BlockRemoved", "block_hashes": [1]}, {"type": "X"}):
            publisher.publish([event])
        assert len(await asked(publisher, 0)) == 4
        one, end = await asked(publisher, 2)
        assert one == [b"", b"kv@pod@sim", struct.pack(">Q", 2), msgspec.msgpack.encode([7.5, [{"type": "X"}], 0])]
        assert end == [b"", b"", b"\xff" * 8, b""]


async def test_a_subscriber_gets_what_is_published_but_for_what_is_muted() -> None:
    async with Publisher("127.0.0.1", CONFIG, lambda: 7.5, rank=2) as publisher:
        with zmq.asyncio.Context() as context:
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.SUBSCRIBE, b"kv@")
            monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
            socket.connect(publisher.sources()["2"]["endpoint"])
            await monitor.recv_multipart()
            numbers: list[int] = []
            while not numbers:  # its subscription may arrive after its connection
                publisher.publish([])
                if await socket.poll(10):
                    numbers.append(int.from_bytes((await socket.recv_multipart())[1], "big"))
            while await socket.poll(50):
                numbers.append(int.from_bytes((await socket.recv_multipart())[1], "big"))
            publisher.muted = True
            publisher.publish([])
            publisher.muted = False
            publisher.publish([])
            topic, number, payload = await socket.recv_multipart()
            assert (topic, int.from_bytes(number, "big")) == (b"kv@pod@sim", numbers[-1] + 2)
            assert msgspec.msgpack.decode(payload) == [7.5, [], 2]
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)


async def test_each_entering_is_a_new_process() -> None:
    publisher = Publisher("127.0.0.1", CONFIG, lambda: 0.0)
    async with publisher:
        publisher.publish([])
    async with publisher:
        assert len(await asked(publisher, 0)) == 1


async def test_a_port_in_use_is_an_os_error() -> None:
    async with Publisher("127.0.0.1", CONFIG, lambda: 0.0) as first:
        port = int(first.sources()["0"]["endpoint"].rpartition(":")[2])
        with pytest.raises(OSError, match=r"KV events on 127\.0\.0\.1"):
            async with Publisher("127.0.0.1", KvEventsConfig(endpoint=f"tcp://*:{port}"), lambda: 0.0):
                pass


def test_an_engines_changes_are_events_that_another_can_follow() -> None:
    """Prompts of random length and sharing; a listener knows in the end exactly what the engine has cached."""
    draw = random.Random(5)
    engine = Engine(replace(LAPTOP, blocks=40, block_size=4))
    engine.watch()
    cache, said = EngineCache(Endpoint("a", "10.0.0.1:8000"), KvEventIndex(1000)), 0
    shared, sequences = draw.randbytes(4 * 24), list[bytes]()
    for number in range(60):
        tokens = shared[: 4 * draw.randint(0, 24)] + draw.randbytes(4 * draw.randint(4, 40))
        sequences.append(tokens)
        count = len(tokens) // 4
        engine.add(str(number), hash_chain(tokens, 4), prompt=count - 3, output=3, now=0.0, about=Said(tokens, ""))
        for _ in range(draw.randint(0, 8)):
            engine.step(0.0)
        events = events_of(engine.changes(), 4)
        said += len(events)
        cache.apply(decode(msgspec.msgpack.encode([1.0, events, 0])))
    while engine.step(0.0):
        pass
    cache.apply(decode(msgspec.msgpack.encode([1.0, events_of(engine.changes(), 4), 0])))
    device = cache.tiers["device"]
    device.check()
    for tokens in sequences:
        held = len(engine._kv.match(hash_chain(tokens, 4), 1000))
        assert device.index.depth(chain_of_tokens(unpack(tokens), 4), device.bit) == held
    assert said > 100
    assert engine.reset_prefix_cache()
    cache.apply(decode(msgspec.msgpack.encode([1.0, events_of(engine.changes(), 4), 0])))
    assert device.index.holdings == 0


def test_salt_and_adapter_stand_where_vllm_puts_them() -> None:
    engine = Engine(LAPTOP)
    engine.watch()
    tokens = bytes(4 * 48)
    for name, adapter, salt in (("a", "", ""), ("b", "", "tenant"), ("c", "lora", ""), ("d", "lora", "tenant")):
        chain = hash_chain(tokens, 16, salt=salt, adapter=adapter)
        engine.add(name, chain, prompt=48, output=1, now=0.0, adapter=adapter, about=Said(tokens, salt))
    while engine.step(0.0):
        pass
    keys = [event["extra_keys"] for event in events_of(engine.changes(), 16)]
    lora = ["lora"]
    assert keys == [[None] * 3, [["tenant"], None, None], [lora] * 3, [["lora", "tenant"], lora, lora]]


def test_the_flag_is_vllms() -> None:
    text = '{"enable_kv_cache_events":true,"endpoint":"tcp://*:5557","replay_endpoint":"tcp://*:5657","topic":"kv@a"}'
    assert kv_events_from(text) == KvEventsConfig(True, "zmq", "tcp://*:5557", "tcp://*:5657", topic="kv@a")


@pytest.mark.parametrize(
    "wrong", ["", "[]", '{"enabled": true}', '{"publisher": "null"}', '{"a": ' + "[" * 9_000, '{"endpoint": "5557"}']
)
def test_a_flag_that_makes_no_sense_is_refused(wrong: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        kv_events_from(wrong)
