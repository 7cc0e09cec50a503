"""The pod's KV events on the wire, as vLLM 0.32 publishes them: zmq PUB, a ROUTER that repeats, and who asks where.

An engine reports which block hashes it stored and evicted; what the events say beyond that (tokens, the block before,
the adapter, the salt) is added here.
"""

import asyncio
import re
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Final, Literal, Self

import msgspec
import zmq
import zmq.asyncio

from tooling.simulator.engine import Change, Cleared, Evicted, Stored
from tooling.simulator.generation import Said
from tooling.simulator.tokenizer import unpack

END: Final = (1 << 64) - 1
"""Number of the message that ends a replay."""

_pack: Final = msgspec.msgpack.Encoder().encode


def events_of(changes: Sequence[Change], block_size: int) -> list[dict[str, Any]]:
    """What became of a prefix cache as vLLM 0.32 says it. The jobs' `about` is a `Said`."""
    events: list[dict[str, Any]] = []
    for change in changes:
        if isinstance(change, Evicted):  # vLLM reports each by itself
            events += [
                {"type": "BlockRemoved", "block_hashes": [each], "medium": "GPU", "group_idx": 0}
                for each in change.hashes
            ]
        else:
            events.append(_event(change, block_size))
    return events


def _event(change: Stored | Cleared, size: int) -> dict[str, Any]:
    if isinstance(change, Cleared):
        return {"type": "AllBlocksCleared"}
    job, start, end = change
    said: Said = job.about
    adapter = [job.adapter] if job.adapter else []
    salted = [*adapter, said.salt] if said.salt else adapter
    return {
        "type": "BlockStored",
        "block_hashes": job.hashes[start:end],
        "parent_block_hash": job.hashes[start - 1] if start else None,
        "token_ids": unpack(said.tokens[4 * start * size : 4 * end * size]),
        "block_size": size,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": job.adapter or None,
        "extra_keys": [(adapter if i else salted) or None for i in range(start, end)],
        "group_idx": 0,
        "kv_cache_spec_kind": "full_attention",
    }


class KvEventsConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's `--kv-events-config`. Of the addresses only the ports count: a pod publishes where it listens."""

    enable_kv_cache_events: bool = False
    publisher: Literal["zmq"] = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    """Batches kept to be repeated."""
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""

    def __post_init__(self) -> None:
        for name, address in (("endpoint", self.endpoint), ("replay_endpoint", self.replay_endpoint or "tcp://*:0")):
            if not re.fullmatch(r"tcp://.+:\d{1,5}", address):
                raise ValueError(f"{name}: expected tcp://HOST:PORT, got {address!r}")


def kv_events_from(text: str) -> KvEventsConfig:
    """The flag's value. ValueError says what is wrong with it."""
    try:
        return msgspec.json.decode(text, type=KvEventsConfig)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(str(error)) from None


class Publisher:
    """`async with Publisher("127.0.0.1", KvEventsConfig()) as publisher: publisher.publish([...])`.

    Each entering is a process of its own: numbers begin at 0. Port 0 picks a free one. `wall`: seconds since the epoch.
    """

    def __init__(self, host: str, config: KvEventsConfig, wall: Callable[[], float], *, rank: int = 0) -> None:
        self._host = f"[{host}]" if ":" in host else host
        self._config = config
        self._topic = config.topic
        self._wall = wall
        self._rank = rank
        self._number = 0
        self._sent: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        self.muted = False
        """Number and keep messages but do not send them: a subscriber misses them."""

    async def __aenter__(self) -> Self:
        self._context = zmq.asyncio.Context()
        self._context.setsockopt(zmq.IPV6, int(":" in self._host))
        self._context.setsockopt(zmq.LINGER, 0)
        self._number, self.muted = 0, False
        self._sent.clear()
        self._socket, self._router = self._context.socket(zmq.PUB), self._context.socket(zmq.ROUTER)
        try:
            self._socket.bind(self._at(self._config.endpoint))
            self._router.bind(self._at(self._config.replay_endpoint or "tcp://*:0"))
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise OSError(error.errno, f"KV events on {self._host}: {error.strerror}") from None
        self._tasks = await asyncio.TaskGroup().__aenter__()
        self._task = self._tasks.create_task(self._repeat())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._task.cancel()
        try:
            await self._tasks.__aexit__(kind, error, trace)
        finally:
            self._context.destroy(linger=0)

    def sources(self) -> Mapping[str, Mapping[str, Any]]:
        """The answer to GET /kv_event_sources."""
        repeats = self._config.replay_endpoint is not None
        bound = {
            "endpoint": self._bound(self._socket),
            "replay_endpoint": self._bound(self._router) if repeats else None,
        }
        return {str(self._rank): msgspec.to_builtins(self._config) | bound}

    def publish(self, events: Sequence[Any]) -> None:
        """One step's events, as they go on the wire."""
        payload = _pack([self._wall(), events, self._rank])
        self.send(payload)

    def send(self, payload: bytes) -> None:
        """A message's payload as it is."""
        self._sent.append((self._number, payload))
        if not self.muted:
            frames = (self._topic.encode(), struct.pack(">Q", self._number), payload)
            zmq.Socket.shadow(self._socket.underlying).send_multipart(frames)
        self._number += 1

    async def _repeat(self) -> None:
        """Answer requests for what was sent, for ever."""
        while True:
            frames = await self._router.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, start = frames[0], int.from_bytes(frames[2], "big")
            for number, payload in list(self._sent):
                if number >= start:
                    answer = (client, b"", self._topic.encode(), struct.pack(">Q", number), payload)
                    await self._router.send_multipart(answer)
            await self._router.send_multipart((client, b"", b"", struct.pack(">Q", END), b""))

    def _at(self, address: str) -> str:
        """Where to listen: at the pod's host, on the address's port."""
        port = int(address.rpartition(":")[2])
        return f"tcp://{self._host}:{port or '*'}"

    @staticmethod
    def _bound(socket: zmq.asyncio.Socket) -> str:
        return socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
