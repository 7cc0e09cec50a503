"""KV events over zmq: a subscriber for each engine of a pool, or one that engines connect to. zmq is only here.

Each endpoint is asked where it publishes, then listened to, and asked again when its publisher is gone for good.
Sockets, tasks and what engines said live as long as their endpoint is in the pool.
"""

import asyncio
import struct
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Any, Final, NamedTuple

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from epp.plugin import Endpoint, Services
from epp.pool.http import BadAnswer, TooLarge
from epp.pool.scrape import Visit
from epp.pool.store import ranks_by_address
from epp.prefix.events.engine_cache import KvEventIndex
from epp.prefix.events.sources import (
    MOST,
    RANKS,
    KvEvents,
    Source,
    conventional,
    named_in,
    sources_in,
    sources_of,
    sources_on,
)
from epp.prefix.events.stream import END, EventStream, Replay
from epp.prefix.events.wire import MalformedBatch, rank_of

_FRAME: Final = 4
"""Times the largest message that zmq takes off the wire. Between the two a message is reported as too large; beyond,
zmq closes the connection, which is reported as lost."""
_QUEUE_BYTES: Final = 64 << 20
"""Of messages of one endpoint that wait for us, if all are as large as zmq takes them. What is beyond waits at the
publisher, which drops what is too much; it is asked for again."""
_REPLAY_BYTES: Final = 32 << 20
"""Taken of a replay before any of it is read; the rest is asked for after that."""
_MESSAGE_BYTES: Final = 256
"""Memory of a message beside its payload."""
_TOLD: Final = 64 << 10
"""Bytes of an answer to `/kv_event_sources`."""
_DESCRIBED: Final = 1 << 20
"""Of one to `/server_info`, which says all of SGLang's settings, twice for each rank."""
_TURN: Final = 0.001
"""Seconds for which all endpoints' messages together are taken in one turn of the event loop."""
_SOME: Final = 64
"""Messages taken off a socket before a replay gets its turn."""
_KNOWN: Final = 0.9
"""Share of its cache that has to be known of an engine of which something was missed for good."""
_ASK: Final = 2.0
"""Seconds to answer either, connecting included."""
_RETRY: Final = (0.5, 10.0)
"""Seconds before an endpoint that does not answer is asked again: at first, at most."""
_OFF: Final = 30.0
"""Seconds before an endpoint that publishes nothing is asked again."""
_GONE: Final = 1.0
"""Seconds without a connection after which an endpoint is asked again where it publishes."""
_REPLAY_IDLE: Final = 2.0
_REPLAY_WHOLE: Final = 60.0
_REPLAYS: Final = 8
"""At once, of all endpoints."""
_COOL: Final = (10.0, 160.0)
"""Seconds before a publisher that did not repeat is asked again: at first, at most."""


class Subscribers:
    """Keeps `kv_index` true for a pool's endpoints. `clock` in seconds, monotonic."""

    def __init__(
        self, kv_index: KvEventIndex, config: KvEvents, services: Services, clock: Callable[[], float]
    ) -> None:
        self._kv_index = kv_index
        self._config = config
        self._services = services
        self._clock = clock
        self._replays = asyncio.Semaphore(_REPLAYS)
        self.turns = Turns(clock)

    async def run(self) -> None:
        """Listen for ever, following the pool."""
        kv_index, config = self._kv_index, self._config
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.IPV6, 1)
        central = _Central(self._services)
        try:
            async with asyncio.TaskGroup() as group:
                if config.zmq_endpoint:
                    group.create_task(self._central(context, config, central))

                def work(endpoint: Endpoint) -> Coroutine[Any, Any, None]:
                    return EndpointSubscription(endpoint, kv_index, config, context, self, central).run()

                await self._services.for_each_endpoint("KV events of", work, kv_index.leave)
        finally:
            context.destroy(linger=0)

    async def _central(self, context: zmq.asyncio.Context, config: KvEvents, central: "_Central") -> None:
        """Listen where engines connect to, or have one listen that does so for another pool of this process."""
        key = config.zmq_endpoint, config.topic_filter, config.max_message_bytes
        shared = _SHARED.setdefault(key, _Shared(asyncio.Lock(), []))
        shared.centrals.append(central)
        try:
            async with shared.socket:
                await self._listen(context, config, shared.centrals)
        finally:
            shared.centrals.remove(central)
            if not shared.centrals:
                del _SHARED[key]

    async def _listen(self, context: zmq.asyncio.Context, config: KvEvents, centrals: Sequence["_Central"]) -> None:
        """Hand on what engines say to the subscriptions of their endpoint."""
        while True:
            socket = _subscriber(context, config, MOST)
            try:
                socket.bind(config.zmq_endpoint)
                while True:
                    await self.turns.wait()
                    frames = await socket.recv_multipart()
                    taken = [central.put(frames) for central in centrals]
                    if not any(taken):
                        topic = ascii(frames[0][:100]) if frames else ""
                        what = f"a topic that names no endpoint: {topic}"
                        self._services.degraded("kv-events-unknown", what)
            except zmq.ZMQError as error:
                self._services.degraded("kv-events-bind", f"{config.zmq_endpoint}: {error}")
                await asyncio.sleep(_RETRY[0])
            finally:
                socket.close(linger=0)


class Turns:
    """Bounds what is done about events in one turn of the event loop: `_TURN` seconds, and what was begun in them."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until = inf

    async def wait(self) -> None:
        """Return in a turn of the event loop that has time left for events: in this one, if it has."""
        while (now := self._clock()) >= self._until:
            await asyncio.sleep(0)
        if self._until == inf:
            self._until = now + _TURN
            asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        self._until = inf


class _Queue:
    """Messages that wait for the subscription of their endpoint."""

    def __init__(self) -> None:
        self._messages: deque[list[bytes]] = deque()
        self._bytes = 0
        self._some = asyncio.Event()

    def put(self, frames: list[bytes]) -> None:
        size = _size(frames)
        if self._bytes + size <= _QUEUE_BYTES:  # what is dropped shows as a gap
            self._messages.append(frames)
            self._bytes += size
            self._some.set()

    async def get(self) -> list[bytes]:
        while not self._messages:
            self._some.clear()
            await self._some.wait()
        frames = self._messages.popleft()
        self._bytes -= _size(frames)
        return frames


class _Central:
    """What came over the socket that engines connect to, by endpoint."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._queues: dict[Endpoint, _Queue] = {}
        self._named: Sequence[Endpoint] = ()
        self._names: Mapping[str, Sequence[Endpoint]] = {}

    def queue(self, endpoint: Endpoint) -> _Queue:
        return self._queues.setdefault(endpoint, _Queue())

    def drop(self, endpoint: Endpoint) -> None:
        self._queues.pop(endpoint, None)

    def put(self, frames: list[bytes]) -> bool:
        """Whether it is of an endpoint of the pool."""
        if (endpoints := self._services.endpoints()) is not self._named:
            self._named = endpoints
            self._names = _names(self._named)
        there = named_in(frames[0], self._names) if frames else None
        queue = self._queues.get(_rank_in(frames, there)) if there else None
        if queue is not None:
            queue.put(frames)
        return queue is not None


class _Shared(NamedTuple):
    """A socket that engines connect to, of all pools that listen there."""

    socket: asyncio.Lock
    """Whoever has it has the socket; when that pool listens no more, the next one does."""
    centrals: list[_Central]


_SHARED: Final[dict[tuple[str, str, int], _Shared]] = {}
"""Of this process, by where and to what they listen: an address can be bound once."""


def _names(endpoints: Sequence[Endpoint]) -> Mapping[str, Sequence[Endpoint]]:
    """All that a topic may call an endpoint -> it, or the ranks at its address. Of addresses that share an ip, the
    first has it.
    """
    names: dict[str, Sequence[Endpoint]] = {}
    for address, there in ranks_by_address(endpoints).items():
        first = there[0].name if there[0].rank is None else there[0].name.rpartition("-rank-")[0]
        for name in (address, first, first.rpartition("/")[2], address.rpartition(":")[0].strip("[]")):
            names.setdefault(name, there)
    return names


def _rank_in(frames: list[bytes], there: Sequence[Endpoint]) -> Endpoint:
    """Which of the ranks at an address a message is of. An engine's number counts on from server to server; so of ranks
    of several servers the last part of it is taken.
    """
    if len(there) == 1:
        return there[0]
    try:
        return there[rank_of(frames[-1]) % len(there)]
    except MalformedBatch:
        return there[0]


class EndpointSubscription:
    """One endpoint: where it publishes, a stream for each of its ranks, and whether all of them are received."""

    def __init__(
        self,
        endpoint: Endpoint,
        kv_index: KvEventIndex,
        config: KvEvents,
        context: zmq.asyncio.Context,
        owner: Subscribers,
        central: _Central,
    ) -> None:
        self._endpoint = endpoint
        self._kv_state = kv_index.state_of(endpoint)
        self._config = config
        self._context = context
        self._owner = owner
        self._central = central
        self._kv_index = kv_index
        self._streams: dict[int, EventStream] = {}
        self.clock = owner._clock
        self._live: set[int] = set()
        self._replaying: set[int] = set()
        self._ranks: set[int] = set()

    async def run(self) -> None:
        """Listen for ever. What goes wrong ends in another try, never in an error."""
        async with asyncio.TaskGroup() as group:
            if self._config.zmq_endpoint:
                group.create_task(self._hear_central())
            if self._config.discover_pods:
                group.create_task(self._hear_direct())

    async def _hear_direct(self) -> None:
        delay = _RETRY[0]
        while True:
            try:
                sources = await self._discover()
                if not sources:
                    self._kv_state.state = "off"
                    await asyncio.sleep(_OFF)
                    continue
                self._ranks = {source.rank for source in sources}
                self._live.clear()
                if not self._config.zmq_endpoint:
                    self._keep(self._ranks)
                if await self._hear(sources):
                    delay = _RETRY[0]
            except* (OSError, zmq.ZMQError, ValueError) as errors:
                self._owner._services.degraded("kv-events-failed", f"{self._endpoint.name}: {_first(errors)!r}")
            self._kv_state.lost()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY[1])

    async def _discover(self) -> list[Source]:
        address = self._endpoint.address
        try:
            sources = sources_on(await self._page("/kv_event_sources", _TOLD), address)
        except TooLarge as error:
            raise ValueError(f"/kv_event_sources: {error}") from None
        except BadAnswer:  # a server that does not know the question
            try:
                sources = sources_in(await self._page("/server_info", _DESCRIBED), address)
            except (OSError, BadAnswer, ValueError):
                return conventional(self._endpoint.name, address, self._config.pod_discovery_config)
        return sources_of(self._endpoint.rank, sources)

    async def _page(self, path: str, largest: int) -> bytes:
        """BadAnswer or OSError if there is none."""
        visit = Visit(self._endpoint.address, path, largest)
        try:
            async with asyncio.timeout(_ASK):
                return await visit.page()
        finally:
            visit.close()

    async def _hear(self, sources: list[Source]) -> bool:
        """Receive from all until one is gone for good; whether any was ever connected."""
        streams = [(source, self.stream(source.rank, replays=bool(source.replay))) for source in sources]
        subscriptions = [
            _Subscription(self, source, stream, len(streams)) for source, stream in streams if stream is not None
        ]
        if not subscriptions:
            return False
        gone = asyncio.Event()

        async def receive(one: _Subscription) -> None:
            await one.run()
            gone.set()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(receive(one)) for one in subscriptions]
            await gone.wait()
            for task in tasks:
                task.cancel()
        return any(one.was_connected for one in subscriptions)

    async def _hear_central(self) -> None:
        """Messages from the socket that engines connect to. There is no telling when one is gone: it is silent then."""
        queue = self._central.queue(self._endpoint)
        try:
            while True:
                frames = await queue.get()
                await self.turn()
                if len(frames) != 3 or len(frames[1]) != 8:
                    self.count("malformed")
                    continue
                try:
                    rank = rank_of(frames[2])
                except MalformedBatch:
                    self.count("malformed")
                    continue
                if (stream := self.stream(rank, replays=False)) is None:
                    continue
                number = int.from_bytes(frames[1], "big")
                if not stream.receive(number, frames[2]):
                    stream.settle(number, frames[2])
                await self.finish(stream)
                self._ranks.add(rank)
                self.set_live(rank, True)
        finally:
            self._central.drop(self._endpoint)

    def stream(self, rank: int, *, replays: bool) -> EventStream | None:
        """The stream of a rank; None, and reported, where it can be none or the endpoint has too many already."""
        stream = self._streams.get(rank)
        if stream is None:
            if not 0 <= rank < RANKS or len(self._streams) >= MOST:
                self.count("rank")
                return None
            largest = self._config.max_message_bytes
            stream = EventStream(self._kv_state.engine(rank), self.count, replays=replays, largest=largest)
            stream.lag_of = self._lag_at
            self._streams[rank] = stream
        stream.replays = replays
        return stream

    def _keep(self, ranks: set[int]) -> None:
        """The endpoint has these ranks and no others any more."""
        for rank in self._streams.keys() - ranks:
            del self._streams[rank]
            self._kv_state.engines.pop(rank).leave()

    async def turn(self) -> None:
        """Wait until the event loop has time for events."""
        await self._owner.turns.wait()

    async def finish(self, stream: EventStream) -> None:
        """Take over what a stream left of its last message, a part at a time."""
        while stream.unfinished:
            await self.turn()
            stream.step()
        if stream.cache.partial or self._kv_state.state != "live":
            self._tell()

    def count(self, fault: str) -> None:
        """A fault of the subscription; the last words say which endpoint it was."""
        self._kv_index.faults[fault] = self._kv_index.faults.get(fault, 0) + 1
        self._owner._services.degraded(f"kv-events-{fault}", self._endpoint.name)

    def set_live(self, rank: int, live: bool) -> None:
        (self._live.add if live else self._live.discard)(rank)
        self._tell()

    def set_replaying(self, rank: int, replaying: bool) -> None:
        (self._replaying.add if replaying else self._replaying.discard)(rank)
        self._tell()

    def _tell(self) -> None:
        if self._replaying:
            self._kv_state.state = "replaying"
        elif self._live >= self._ranks and self._whole():
            self._kv_state.state = "live"
        else:
            self._kv_state.lost()

    def _whole(self) -> bool:
        """Whether what is known of its engines is what they hold, or as good as that."""
        partial = [stream.cache for stream in self._streams.values() if stream.cache.partial]
        if partial:
            blocks = self._endpoint.load.blocks
            if not blocks or self._kv_state.held < _KNOWN * blocks:
                return False
            for cache in partial:
                cache.partial = False
        return True

    def _lag_at(self, ts: float) -> None:
        lag = self._owner._services.wall_clock() - ts
        self._kv_state.received(self.clock(), lag if 0.0 <= lag < inf else 0.0)


class _Subscription:
    """One publisher, while it is there."""

    def __init__(self, subscription: EndpointSubscription, source: Source, stream: EventStream, ranks: int) -> None:
        self._subscription_of = subscription
        self._source = source
        self._stream = stream
        self._ranks = ranks
        self._lock = asyncio.Lock()
        """One at a time: messages, or a replay."""
        self._connected = asyncio.Event()
        self._gone = asyncio.Event()
        self._owed = asyncio.Event()
        """A replay failed."""
        self.was_connected = False

    async def run(self) -> None:
        """Until it is gone for `_GONE` seconds."""
        socket = _subscriber(self._subscription_of._context, self._subscription_of._config, self._ranks)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self._source.publisher)
            async with asyncio.TaskGroup() as group:
                work = self._messages(socket), self._watch(monitor), self._ask_again()
                tasks = [group.create_task(each) for each in work]
                await self._until_gone()
                for task in tasks:
                    task.cancel()
        finally:
            self._subscription_of.set_live(self._source.rank, False)
            socket.disable_monitor()
            monitor.close(linger=0)
            socket.close(linger=0)

    async def _until_gone(self) -> None:
        while True:
            try:
                async with asyncio.timeout(_GONE):
                    await self._connected.wait()
            except TimeoutError:
                return
            self._gone.clear()
            await self._gone.wait()

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        """Connections made and lost, as zmq makes them anew by itself."""
        while True:
            event = (await recv_monitor_message(monitor))["event"]
            if event == zmq.EVENT_DISCONNECTED:
                self._connected.clear()
                self._gone.set()
                self._subscription_of.set_live(self._source.rank, False)
                continue
            self.was_connected = True
            self._connected.set()
            async with self._lock:
                if self._stream.connected():
                    await self._replay()
            self._subscription_of.set_live(self._source.rank, self._connected.is_set())

    async def _messages(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            async with self._lock:
                await self._message(frames)
                for _ in range(_SOME):
                    if not (more := _more(socket)):
                        break
                    await self._message(more)

    async def _message(self, frames: list[bytes]) -> None:
        await self._subscription_of.turn()
        if len(frames) != 3 or len(frames[1]) != 8:
            self._subscription_of.count("malformed")
            return
        number = int.from_bytes(frames[1], "big")
        if not self._stream.receive(number, frames[2]):
            if self._source.replay and not self._stream.owed:  # else `_ask_again` does, which takes its time
                await self._replay()
            self._stream.settle(number, frames[2])
        await self._subscription_of.finish(self._stream)

    async def _replay(self) -> None:
        """Ask for what was missed until it is there; if that fails, it is owed."""
        subscription = self._subscription_of
        subscription.set_replaying(self._source.rank, True)
        replay = self._stream.replay()
        try:
            async with subscription._owner._replays, asyncio.timeout(_REPLAY_WHOLE):
                while True:
                    if not await self._request(replay):
                        replay.broken_off()
                    elif replay.done():
                        break
            subscription._kv_index.faults["replay"] = subscription._kv_index.faults.get("replay", 0) + 1
        except (TimeoutError, zmq.ZMQError):
            subscription.count("replay-failed")
            self._stream.gave_up()
        finally:
            if self._stream.owed:
                self._owed.set()
            subscription.set_replaying(self._source.rank, False)

    async def _ask_again(self) -> None:
        """For a replay that failed, ever more rarely, until it comes."""
        while True:
            await self._owed.wait()
            self._owed.clear()
            delay = _COOL[0]
            while self._stream.owed:
                await asyncio.sleep(delay)
                delay = min(2 * delay, _COOL[1])
                async with self._lock:
                    if self._stream.owed and self._connected.is_set():
                        await self._replay()

    async def _request(self, replay: Replay) -> bool:
        """Ask once. False: the answer was cut off for lack of space."""
        answer, ended = await self._answer(replay.start)
        while answer:
            await self._subscription_of.turn()
            replay.take(*answer.popleft())
            await self._subscription_of.finish(self._stream)
        return ended

    async def _answer(self, start: int) -> tuple[deque[tuple[int, bytes]], bool]:
        """What the publisher repeats from a number on, as far as there is space; and whether that was all.

        It is taken as fast as it comes: a publisher drops what a slow link does not take.
        """
        subscription, answer, size = self._subscription_of, deque[tuple[int, bytes]](), 0
        socket = subscription._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, _FRAME * subscription._config.max_message_bytes)
        socket.setsockopt(zmq.RCVHWM, 0)
        try:
            socket.connect(self._source.replay)
            await socket.send_multipart((b"", struct.pack(">Q", start)))
            while size < _REPLAY_BYTES:
                frames = _more(socket)
                if not frames:
                    async with asyncio.timeout(_REPLAY_IDLE):
                        frames = await socket.recv_multipart()
                size += _size(frames)
                await subscription.turn()
                if len(frames) != 4 or len(frames[2]) != 8:
                    subscription.count("malformed")
                    continue
                number = int.from_bytes(frames[2], "big")
                if number == END:
                    return answer, True
                answer.append((number, frames[3]))
            return answer, False
        finally:
            socket.close(linger=0)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _subscriber(context: zmq.asyncio.Context, config: KvEvents, publishers: int) -> zmq.asyncio.Socket:
    """A socket for one of `publishers` that share the space for messages."""
    largest = _FRAME * config.max_message_bytes
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.MAXMSGSIZE, largest)
    socket.setsockopt(zmq.RCVHWM, max(2, _QUEUE_BYTES // (largest * publishers)))
    socket.setsockopt(zmq.SUBSCRIBE, config.topic_filter.encode())
    return socket


def _size(frames: list[bytes]) -> int:
    """Memory of a message."""
    return sum(map(len, frames)) + _MESSAGE_BYTES


def _more(socket: zmq.asyncio.Socket) -> list[bytes]:
    """The next message if it is here already, without the price of a future; [] if not."""
    try:
        return zmq.Socket.shadow(socket.underlying).recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return []
