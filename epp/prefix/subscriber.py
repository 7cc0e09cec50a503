"""The door of KV events: a zmq subscriber for each engine of a pool, or one that engines connect to. zmq is only here.

Each endpoint is asked where it publishes, then listened to, and asked again when its publisher is gone for good.
Sockets, tasks and what engines said live as long as their endpoint is in the pool.
"""

import asyncio
import struct
from collections.abc import Callable, Coroutine, Mapping, Sequence
from math import inf
from typing import Any, Final

import zmq
import zmq.asyncio
from zmq.utils.monitor import recv_monitor_message

from epp.follow import Current
from epp.plugin import Endpoint
from epp.pool.http import BadAnswer
from epp.pool.scrape import Visit
from epp.pool.store import Pool
from epp.prefix.enginecache import Shelves
from epp.prefix.events import MalformedBatch, decode
from epp.prefix.feed import END, Feed
from epp.prefix.sources import KvEvents, Source, conventional, endpoint_of, told
from epp.telemetry.metrics import Metrics

_LARGEST: Final = 16 << 20
"""Bytes of a message; a step of an engine announces some hundred KB at most."""
_QUEUE: Final = 10_000
"""Messages that wait for us; what is beyond is dropped, and asked for again."""
_TURN: Final = 0.001
"""Seconds for which messages are taken before others get their turn on the event loop."""
_ASK: Final = 2.0
"""Seconds to answer `/kv_event_sources`, connecting included."""
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
_COOL: Final = 10.0
"""Seconds before a publisher that did not repeat is asked again."""


class Subscribers:
    """Keeps `shelves` true for a pool's endpoints. `clock` as the pool's, `wall_clock`: seconds since the epoch."""

    def __init__(
        self, pool: Pool, metrics: Metrics, clock: Callable[[], float], wall_clock: Callable[[], float]
    ) -> None:
        self._pool = pool
        self._metrics = metrics
        self._clock = clock
        self._wall_clock = wall_clock
        self._wanted: Current[tuple[Shelves, KvEvents]] = Current(lambda wanted: self._listen(*wanted))
        self._replays = asyncio.Semaphore(_REPLAYS)

    def use(self, shelves: Shelves | None, config: KvEvents | None = None) -> None:
        """Fill these shelves from now on; None: listen to nobody. Those in use already stay as they are."""
        now = self._wanted.value
        if shelves is None:
            self._wanted.use(None)
        elif now is None or shelves is not now[0]:
            self._wanted.use((shelves, config or KvEvents()))

    async def run(self) -> None:
        """Listen for ever, following the pool and the configuration."""
        await self._wanted.run()

    async def _listen(self, shelves: Shelves, config: KvEvents) -> None:
        context = zmq.asyncio.Context()
        context.setsockopt(zmq.IPV6, 1)
        central = _Central(self._pool)
        try:
            async with asyncio.TaskGroup() as group:
                if config.zmq_endpoint:
                    group.create_task(self._central(context, config, central))

                def work(endpoint: Endpoint) -> Coroutine[Any, Any, None]:
                    return Line(endpoint, shelves, config, context, self, central).run()

                await self._pool.tend("KV events of", work, shelves.leave)
        finally:
            context.destroy(linger=0)

    async def _central(self, context: zmq.asyncio.Context, config: KvEvents, central: "_Central") -> None:
        """Listen where engines connect to, and hand on what they say to their endpoint's line."""
        while True:
            socket = _subscriber(context, config.topic_filter)
            try:
                socket.bind(config.zmq_endpoint)
                while True:
                    central.put(await socket.recv_multipart())
            except zmq.ZMQError as error:
                self._metrics.degraded("kv-events-bind", f"{config.zmq_endpoint}: {error}")
                await asyncio.sleep(_RETRY[0])
            finally:
                socket.close(linger=0)


class _Central:
    """What came over the socket that engines connect to, by endpoint."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._queues: dict[str, asyncio.Queue[list[bytes]]] = {}
        self._named: Sequence[Endpoint] = ()
        self._names: Mapping[str, str] = {}
        self.unknown = 0
        """Messages whose topic names no endpoint of the pool."""

    def queue(self, endpoint: Endpoint) -> "asyncio.Queue[list[bytes]]":
        return self._queues.setdefault(endpoint.address, asyncio.Queue(_QUEUE))

    def drop(self, endpoint: Endpoint) -> None:
        self._queues.pop(endpoint.address, None)

    def put(self, frames: list[bytes]) -> None:
        if self._pool.endpoints is not self._named:
            self._named = self._pool.endpoints
            self._names = _names(self._named)
        address = endpoint_of(frames[0], self._names) if frames else None
        queue = self._queues.get(address or "")
        if queue is None:
            self.unknown += 1
        elif not queue.full():  # what is dropped shows as a gap
            queue.put_nowait(frames)


def _names(endpoints: Sequence[Endpoint]) -> Mapping[str, str]:
    """All that a topic may call an endpoint -> its address. Of endpoints that share an ip, the first has it."""
    names: dict[str, str] = {}
    for endpoint in endpoints:
        ip = endpoint.address.rpartition(":")[0].strip("[]")
        for name in (endpoint.address, endpoint.name, endpoint.name.rpartition("/")[2], ip):
            names.setdefault(name, endpoint.address)
    return names


class Line:
    """One endpoint: where it publishes, a feed for each of its ranks, and whether all of them are heard."""

    def __init__(
        self,
        endpoint: Endpoint,
        shelves: Shelves,
        config: KvEvents,
        context: zmq.asyncio.Context,
        owner: Subscribers,
        central: _Central,
    ) -> None:
        self._endpoint = endpoint
        self._shelf = shelves.shelf(endpoint)
        self._config = config
        self._context = context
        self._owner = owner
        self._central = central
        self._shelves = shelves
        self._feeds: dict[int, Feed] = {}
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
                    self._shelf.state = "off"
                    await asyncio.sleep(_OFF)
                    continue
                self._ranks = {source.rank for source in sources}
                self._live.clear()
                if await self._hear(sources):
                    delay = _RETRY[0]
            except* (OSError, zmq.ZMQError, ValueError) as errors:
                self._owner._metrics.degraded("kv-events-failed", f"{self._endpoint.name}: {_first(errors)!r}")
            self._shelf.lost()
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY[1])

    async def _discover(self) -> list[Source]:
        visit = Visit(self._endpoint.address, "/kv_event_sources")
        try:
            async with asyncio.timeout(_ASK):
                page = await visit.page()
        except BadAnswer:  # a server that does not know the question
            return conventional(self._endpoint.name, self._endpoint.address, self._config.pod_discovery_config)
        finally:
            visit.close()
        return told(page, self._endpoint.address)

    async def _hear(self, sources: list[Source]) -> bool:
        """Listen to all until one is gone for good; whether any was ever heard."""
        heard = [_Subscription(self, source) for source in sources]
        gone = asyncio.Event()

        async def hear(one: _Subscription) -> None:
            await one.run()
            gone.set()

        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(hear(one)) for one in heard]
            await gone.wait()
            for task in tasks:
                task.cancel()
        return any(one.was_connected for one in heard)

    async def _hear_central(self) -> None:
        """Messages from the socket that engines connect to. There is no telling when one is gone: it is silent then."""
        queue = self._central.queue(self._endpoint)
        try:
            while True:
                frames = await queue.get()
                if len(frames) != 3 or len(frames[1]) != 8:
                    self.count("malformed")
                    continue
                try:
                    rank = decode(frames[2]).rank
                except MalformedBatch:
                    rank = 0
                number, feed = int.from_bytes(frames[1], "big"), self.feed(rank, replays=False)
                if not feed.receive(number, frames[2]):
                    feed.settle(number, frames[2])
                self._ranks.add(rank)
                self.set_live(rank, True)
        finally:
            self._central.drop(self._endpoint)

    def feed(self, rank: int, *, replays: bool) -> Feed:
        feed = self._feeds.get(rank)
        if feed is None:
            feed = Feed(self._shelf.engine(rank), self.count, replays=replays)
            feed.lag_of = self._heard_at
            self._feeds[rank] = feed
        feed.replays = replays
        return feed

    def count(self, fault: str) -> None:
        """A fault of the line; the last words tell people which endpoint it was."""
        self._shelves.faults[fault] = self._shelves.faults.get(fault, 0) + 1
        self._owner._metrics.degraded(f"kv-events-{fault}", self._endpoint.name)

    def set_live(self, rank: int, live: bool) -> None:
        (self._live.add if live else self._live.discard)(rank)
        self._tell()

    def set_replaying(self, rank: int, replaying: bool) -> None:
        (self._replaying.add if replaying else self._replaying.discard)(rank)
        self._tell()

    def _tell(self) -> None:
        if self._replaying:
            self._shelf.state = "replaying"
        elif self._live >= self._ranks:
            self._shelf.state = "live"
        else:
            self._shelf.lost()

    def _heard_at(self, ts: float) -> None:
        self._shelf.heard(self.clock(), max(0.0, self._owner._wall_clock() - ts))


class _Subscription:
    """One publisher, while it is there."""

    def __init__(self, line: Line, source: Source) -> None:
        self._line = line
        self._source = source
        self._feed = line.feed(source.rank, replays=bool(source.replay))
        self._lock = asyncio.Lock()
        """One at a time: messages, or a replay."""
        self._connected = asyncio.Event()
        self._gone = asyncio.Event()
        self._failed_at = -inf
        self.was_connected = False

    async def run(self) -> None:
        """Until it is gone for `_GONE` seconds."""
        socket = _subscriber(self._line._context, self._line._config.topic_filter)
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self._source.publisher)
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._messages(socket)), group.create_task(self._watch(monitor))]
                await self._until_gone()
                for task in tasks:
                    task.cancel()
        finally:
            self._line.set_live(self._source.rank, False)
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
                self._line.set_live(self._source.rank, False)
                continue
            self.was_connected = True
            self._connected.set()
            async with self._lock:
                if self._feed.connected():
                    await self._replay()
            self._line.set_live(self._source.rank, self._connected.is_set())

    async def _messages(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            async with self._lock:
                until = self._line.clock() + _TURN
                await self._message(frames)
                while self._line.clock() < until and (more := _more(socket)):
                    await self._message(more)
            await asyncio.sleep(0)

    async def _message(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != 8:
            self._line.count("malformed")
            return
        number = int.from_bytes(frames[1], "big")
        if not self._feed.receive(number, frames[2]):
            if self._source.replay and self._line.clock() - self._failed_at >= _COOL:
                await self._replay()
            self._feed.settle(number, frames[2])

    async def _replay(self) -> None:
        """Ask for what was missed until it is there; if that fails, the feed knows that it knows nothing."""
        line = self._line
        line.set_replaying(self._source.rank, True)
        replay = self._feed.replay()
        try:
            async with line._owner._replays, asyncio.timeout(_REPLAY_WHOLE):
                while True:
                    await self._request(replay.start, replay.take)
                    if replay.done():
                        break
            line._shelves.faults["replay"] = line._shelves.faults.get("replay", 0) + 1
        except (TimeoutError, zmq.ZMQError):
            self._failed_at = line.clock()
            line.count("replay-failed")
            self._feed.gave_up()
        finally:
            line.set_replaying(self._source.rank, False)

    async def _request(self, start: int, take: Callable[[int, bytes], None]) -> None:
        socket = self._line._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
        socket.setsockopt(zmq.RCVHWM, 0)
        try:
            socket.connect(self._source.replay)
            await socket.send_multipart((b"", struct.pack(">Q", start)))
            until = self._line.clock() + _TURN
            while True:
                async with asyncio.timeout(_REPLAY_IDLE):
                    frames = await socket.recv_multipart()
                if len(frames) != 4 or len(frames[2]) != 8:
                    self._line.count("malformed")
                    continue
                number = int.from_bytes(frames[2], "big")
                if number == END:
                    return
                take(number, frames[3])
                if self._line.clock() >= until:
                    await asyncio.sleep(0)
                    until = self._line.clock() + _TURN
        finally:
            socket.close(linger=0)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _subscriber(context: zmq.asyncio.Context, topics: str) -> zmq.asyncio.Socket:
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.MAXMSGSIZE, _LARGEST)
    socket.setsockopt(zmq.RCVHWM, _QUEUE)
    socket.setsockopt(zmq.SUBSCRIBE, topics.encode())
    return socket


def _more(socket: zmq.asyncio.Socket) -> list[bytes]:
    """The next message if it is here already, without the price of a future; [] if not."""
    try:
        return zmq.Socket.shadow(socket.underlying).recv_multipart(zmq.NOBLOCK)
    except zmq.Again:
        return []
