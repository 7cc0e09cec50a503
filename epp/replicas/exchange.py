"""`Exchange`: what this replica tells its peers and takes from them. No sockets and no clock of its own.

Each replica counts its frames, so a peer sees what is missing and asks for a snapshot: the requests in flight first,
and then what plugins know, piece by piece between the live frames. All come by one connection in the order they were
sent, so nothing is known twice and nothing falls between the snapshot and what follows it.

A peer that is silent for `SILENT` seconds counts as gone: its requests in flight fade within `FADE` seconds, oldest
first, as if they had ended. If it was only stalled, its next frame says so, and those in flight are asked for anew.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import floor
from typing import Any, Final, Literal, Protocol

import msgspec

from epp.plugin import ALONE, Endpoint, Replicas, Request, Response, Usage
from epp.replicas import wire
from epp.replicas.unreported import Unreported
from epp.telemetry.series import ReplicaFigures

log = logging.getLogger("warmpath")

BEAT: Final = 0.5
"""Seconds from one beat to the next."""
SILENT: Final = 2.0
"""Seconds without a frame after which a peer counts as gone."""
FADE: Final = 10.0
"""Seconds in which the requests of a peer that is gone fade: about as long as answers take."""
JOIN: Final = 3.0
"""Seconds a starting replica waits for its peers, at most."""
_AGAIN: Final = 5.0
"""Seconds after which a snapshot that did not come is asked for again, and between two of one peer."""
_MOST_OPEN: Final = 65_536
"""Requests in flight that are remembered of one peer; beyond, the oldest count as ended."""
_WAITS: Final = 0.001
"""Seconds for which a first token or an end waits for a decision to go with: a frame costs far more than a message."""
_LARGE: Final = wire.MAX_FRAME // 4
"""Bytes of messages that are sent at once."""
_LOST: Final = Response(lost=True)

State = Literal["connecting", "live", "silent", "other-version", "self", "left"]
_LASTING: Final[Mapping[State, str]] = {"silent": "replica-silent", "other-version": "replicas-version"}
"""What is degraded while a peer is in such a state."""


class Adopted(Protocol):
    """Another replica's request, on account."""

    def first_token(self) -> None: ...
    def finished(self, response: Response) -> None: ...


class Accounts(Protocol):
    """The scheduler of one pool, as far as other replicas' requests go."""

    def adopt(self, request: Request, endpoint: Endpoint, states: Mapping[str, Any]) -> Adopted: ...
    def snapshot(self) -> Iterator[tuple[str, Any]]: ...
    def restore(self, name: str, piece: Any, endpoints: Mapping[str, Endpoint]) -> None: ...


@dataclass(frozen=True)
class SharedPool:
    """A pool of which replicas tell each other. A reload of its configuration gives it other accounts."""

    name: str
    """`namespace/name`."""
    ready: Callable[[], bool]
    """Its endpoints are known. Before, nothing can be put on account."""
    endpoints: Callable[[], Mapping[str, Endpoint]]
    """By name."""
    accounts: Callable[[], Accounts]


class Link(Protocol):
    """The sockets."""

    def publish(self, frame: bytes) -> None:
        """To all that asked for its topic. Never waits: what does not fit into a queue is dropped."""

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it after this turn of the event loop and so many seconds."""

    def subscribe(self, address: str, topic: bytes) -> None: ...
    def unsubscribe(self, address: str, topic: bytes) -> None: ...


class Report(Protocol):
    def __call__(self, reason: str, detail: str = "", *, lasting: bool = False) -> None: ...


@dataclass(eq=False)
class Peer:
    """What is known of the replica at one address."""

    address: str
    state: State = "connecting"
    instance: int = 0
    received_at: float = 0.0
    sequence: int = -1
    """Of its last live frame; -1: none came yet."""
    ready: bool = False
    lag: float | None = None
    """Seconds from its socket to us: half of the time a beat takes to it and back."""
    agreement: float | None = None
    """The smaller to the larger of what both of us count as requests in flight, 0..1."""
    beat: tuple[float, float] = (0.0, 0.0)
    """`sent` of its last beat, and when it came."""
    open: dict[int, Adopted | None] = field(default_factory=dict)
    """Its requests in flight; None: of an endpoint that is not known here."""
    fading: int = 0
    """Of them, how many there were when it fell silent."""
    frames: int = 0
    gaps: int = 0
    snapshots: int = 0
    asked: bytes = b""
    """Topic of the snapshot that was asked for."""
    asked_at: float = 0.0
    wanted: bytes = b""
    """Kind of the snapshot that is to be asked for as soon as that may be."""
    pieces: int = 0
    confirmed: set[int] = field(default_factory=set)
    """Requests in flight that the snapshot under way has named."""
    last: int = -1
    """Of its decisions the last before that snapshot; -1: none is under way."""

    def as_dict(self, now: float) -> dict[str, Any]:
        """For people; times in milliseconds."""
        return {
            "address": self.address,
            "state": self.state,
            "instance": f"{self.instance:016x}",
            "ready": self.ready,
            "silent_ms": None if self.sequence < 0 else round((now - self.received_at) * 1000),
            "lag_ms": None if self.lag is None else round(self.lag * 1000, 3),
            "agreement": None if self.agreement is None else round(self.agreement, 3),
            "in_flight": len(self.open),
            "frames": self.frames,
            "gaps": self.gaps,
            "snapshots": self.snapshots,
        }


class Exchange:
    """The one of this process. `instance` is a random number, never 0."""

    def __init__(
        self,
        instance: int,
        link: Link,
        clock: Callable[[], float],
        degraded: Report,
        recovered: Callable[[str], None],
    ) -> None:
        self.instance = instance
        self.peers: dict[str, Peer] = {}
        self.joined = False
        """It knows what its peers know, as far as one answered in time."""
        self.counts = dict.fromkeys(
            (
                "sent", "received", "missing", "malformed", "other-version", "too-large", "unknown-endpoint",
                "snapshot-sent", "snapshot",
            ),
            0,
        )  # fmt: skip
        """Frames sent and received, and what became of them."""
        self._pools: dict[str, SharedPool] = {}
        self._unreported: dict[str, Unreported] = {}
        self._replicas: dict[str, Replicas] = {}
        """By the pool's name, as they were at the last beat."""
        self._link = link
        self._clock = clock
        self._degraded = degraded
        self._recovered = recovered
        self._began = clock()
        self._sequence = 0
        self._numbers = 0
        self._asks = 0
        self._full = False
        """A snapshot of all has been taken from some peer."""
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._urgent = False
        """`_outgoing` is sent at the end of this turn."""
        self._own: dict[int, tuple[bytes, bool]] = {}
        """Our requests in flight, as they were sent, and whether their first token was seen."""
        self._fading: list[tuple[float, Adopted]] = []
        """Requests of instances that are gone for good, and when they count as ended."""

    def figures(self) -> ReplicaFigures:
        """What a scrape is answered."""
        peers = self._others()
        return ReplicaFigures(
            [(peer.address, peer.state, peer.lag, peer.agreement) for peer in peers],
            sum(len(peer.open) for peer in peers),
            self.counts,
        )

    def add_pool(self, pool: SharedPool) -> None:
        """To be called for each pool before the first request."""
        self._pools[pool.name] = pool
        self._unreported[pool.name] = Unreported(self._clock())

    def replicas(self, pool: str) -> Replicas:
        """For `epp.plugin.Services`."""
        return self._replicas.get(pool, ALONE)

    # --- our own requests -------------------------------------------------------------------------------------------

    def decided(self, pool: str, request: Request, endpoint: Endpoint, states: dict[str, Any]) -> int:
        """A request of our own was sent. Returns its number; 0: it is too large to be told."""
        self._numbers += 1
        message = wire.encode(wire.decided(self._numbers, pool, request, endpoint, states))
        if len(message) > wire.MAX_FRAME // 2:
            self.counts["too-large"] += 1
            self._degraded("replicas-too-large", f"a decision of {len(message)} bytes")
            return 0
        self._own[self._numbers] = message, False
        self._publish(message)
        return self._numbers

    def first_token(self, number: int) -> None:
        if number in self._own:
            self._own[number] = self._own[number][0], True
            self._publish(wire.encode(wire.FirstToken(number)), urgent=False)

    def finished(self, number: int, response: Response) -> None:
        if self._own.pop(number, None) is None:
            return
        usage = response.usage
        counts = None if usage is None else (usage.prompt, usage.completion, usage.cached)
        seen = response.first_token_at is not None
        end = wire.Finished(
            number,
            response.status,
            response.served,
            response.complete,
            seen,
            counts,
            response.id,
            response.prefill_failed,
        )
        self._publish(wire.encode(end), urgent=bool(response.id))  # the next request may name it, to any replica

    def tell(self, pool: str, plugin: str, piece: Any) -> None:
        """Something a plugin tells the same plugin of its peers beside requests: it comes to their `restore`."""
        self._publish(wire.encode(wire.Piece(pool, plugin, piece)), urgent=False)

    def leave(self) -> None:
        """This replica ends; its peers need not wait for it."""
        self._publish(wire.encode(wire.Leaving()))
        self.flush()

    @property
    def open(self) -> int:
        """Requests in flight that are known, those of all replicas together."""
        return len(self._own) + sum(len(peer.open) for peer in self.peers.values())

    def snapshot(self, topic: bytes) -> Iterator[bytes]:
        """Frames for whoever asked by `topic`: our requests in flight, then what plugins know."""
        send = self._framed
        self.counts["snapshot-sent"] += 1
        self.flush()  # what follows is said of a time after it
        yield send(topic, wire.Begin(self._numbers))
        count = 0
        for number in list(self._own):
            if (own := self._own.get(number)) is not None:  # it has not ended since the frame before
                count += 1
                yield send(topic, wire.Open(msgspec.Raw(own[0]), own[1]))
        self.flush()
        yield send(topic, wire.Opened(count))
        count = 0
        if topic[:1] == wire.SNAPSHOT:
            for pool in self._pools.values():
                for plugin, piece in pool.accounts().snapshot():
                    data = send(topic, wire.Piece(pool.name, plugin, piece))
                    if len(data) > wire.MAX_FRAME:
                        self._degraded("replicas-too-large", f"a piece of {plugin} of {len(data)} bytes")
                        continue
                    count += 1
                    yield data
        yield send(topic, wire.End(count))

    def _framed(self, topic: bytes, message: wire.AnyMessage) -> bytes:
        return wire.frame(topic, self.instance, 0, [wire.encode(message)])

    def _publish(self, message: bytes, *, urgent: bool = True) -> None:
        """Send it at the end of this turn of the event loop, or (not urgent) with the next that is, but soon."""
        self._outgoing.append(message)
        self._outgoing_bytes += len(message)
        if self._outgoing_bytes > _LARGE:
            self.flush()
        elif not self._urgent and (urgent or len(self._outgoing) == 1):
            self._urgent = urgent
            self._link.later(0.0 if urgent else _WAITS, self.flush)

    def flush(self) -> None:
        """Send what waits to be sent."""
        if not self._outgoing:
            return
        messages, self._outgoing, self._outgoing_bytes, self._urgent = self._outgoing, [], 0, False
        self._sequence += 1
        self.counts["sent"] += 1
        self._link.publish(wire.frame(wire.LIVE, self.instance, self._sequence, messages))

    # --- peers ------------------------------------------------------------------------------------------------------

    def found(self, addresses: Sequence[str]) -> tuple[list[str], list[str]]:
        """These are the peers now, perhaps this replica among them. Returns those to connect to and to leave."""
        new = [address for address in dict.fromkeys(addresses) if address not in self.peers]
        gone = [address for address in self.peers if address not in addresses]
        for address in new:
            self.peers[address] = Peer(address, received_at=self._clock())
            self._link.subscribe(address, wire.LIVE)
        for address in gone:
            self._forget(self.peers.pop(address))
        return new, gone

    def received(self, address: str, data: bytes) -> None:
        """A frame came from the peer at `address`."""
        peer = self.peers.get(address)
        if peer is None or peer.state == "self":
            return
        now = self._clock()
        live = data[:1] == wire.LIVE
        try:
            envelope = wire.decode(data, 1 if live else wire.TOPIC_BYTES)
        except wire.OtherVersion as error:
            self._differs(peer, str(error), now)
            return
        except wire.MalformedFrame as error:
            self.counts["malformed"] += 1
            self._degraded("replicas-malformed", f"{address}: {error}")
            return
        if envelope.sender == self.instance:
            self._becomes(peer, "self")
            self._link.unsubscribe(address, wire.LIVE)
            return
        if envelope.sender != peer.instance:
            self._replaced(peer, envelope.sender)
        peer.frames += 1
        self.counts["received"] += 1
        peer.received_at = now
        if peer.state != "live":
            self._lives(peer)
        if live:
            if peer.sequence >= 0 and envelope.sequence != peer.sequence + 1:
                peer.gaps += 1
                self.counts["missing"] += max(0, envelope.sequence - peer.sequence - 1)
                peer.wanted = wire.SNAPSHOT
                self._degraded(
                    "replicas-gap", f"{envelope.sequence - peer.sequence - 1} frames of {address} are missing"
                )
            peer.sequence = envelope.sequence
            for message in envelope.messages:
                self._take(peer, message, now)
        elif data[: wire.TOPIC_BYTES] == peer.asked:
            for message in envelope.messages:
                self._take_snapshot(peer, message)

    def tick(self) -> None:
        """To be called every `BEAT` seconds: says that we live, and sees who does not."""
        now = self._clock()
        received = {peer.instance: (peer.beat[0], now - peer.beat[1]) for peer in self._others() if peer.beat[1]}
        self._publish(wire.encode(wire.Beat(now, received, self.joined, self.open)))
        for peer in self._others():
            if peer.state in ("live", "other-version") and now - peer.received_at > SILENT:
                self._becomes(peer, "silent")
                peer.lag = peer.agreement = None
                peer.fading = len(peer.open)
                log.warning("replica %s is silent; its %d requests in flight fade", peer.address, len(peer.open))
                self._degraded("replica-silent", peer.address, lasting=True)
            if peer.state in ("silent", "left") and peer.open:
                self._fade(peer, now)
        self._look(now)
        ended = [adopted for at, adopted in self._fading if at <= now]
        self._fading = [each for each in self._fading if each[0] > now]
        for adopted in ended:
            _end(adopted, _LOST)
        if not all(pool.ready() for pool in self._pools.values()):
            self._began = now
            return
        self._ask(now)
        if not self.joined:
            self._join(now)

    def _look(self, now: float) -> None:
        """Which replicas there are, and what they have not told yet."""
        live = [peer for peer in self._others() if peer.state == "live"]
        number = sum(peer.instance < self.instance for peer in live)
        lags = [peer.lag for peer in live if peer.lag is not None]
        for name, unreported in self._unreported.items():
            unreported.look(sum(lags) / len(lags) if lags else 0.0, now)
            self._replicas[name] = Replicas(number, 1 + len(live), unreported.requests)

    def _others(self) -> list[Peer]:
        return [peer for peer in self.peers.values() if peer.state != "self"]

    def _becomes(self, peer: Peer, state: State) -> None:
        """What was degraded for its state so far is so no more, if no other peer is in that."""
        before, peer.state = peer.state, state
        if (reason := _LASTING.get(before)) and not any(each.state == before for each in self._others()):
            self._recovered(reason)

    def _differs(self, peer: Peer, why: str, now: float) -> None:
        """Nothing that it says can be read, so nothing of it is on account."""
        self.counts["other-version"] += 1
        peer.received_at = now
        if peer.state != "other-version":
            self._replaced(peer, 0)
            self._becomes(peer, "other-version")
            self._degraded("replicas-version", f"{peer.address}: {why}", lasting=True)

    def _lives(self, peer: Peer) -> None:
        """It was silent or new, and now speaks: what it has in flight has to be asked for."""
        log.info("replica %s is there", peer.address)
        self._becomes(peer, "live")
        peer.wanted = peer.wanted or (wire.IN_FLIGHT if self._full or self.joined else wire.SNAPSHOT)

    def _replaced(self, peer: Peer, instance: int) -> None:
        """Another process has this address now."""
        self._orphan(peer)
        peer.instance, peer.sequence, peer.beat = instance, -1, (0.0, 0.0)
        peer.ready, peer.lag, peer.agreement = False, None, None
        if peer.state == "live":
            peer.wanted = peer.wanted or wire.IN_FLIGHT
        self._stop_asking(peer)

    def _forget(self, peer: Peer) -> None:
        self._becomes(peer, "left")
        self._orphan(peer)

    def _orphan(self, peer: Peer) -> None:
        """Nobody will say how its requests end."""
        now = self._clock()
        known = [adopted for adopted in peer.open.values() if adopted is not None]
        peer.open.clear()
        self._fading += [(now + FADE * (i + 1) / len(known), adopted) for i, adopted in enumerate(known)]

    def _fade(self, peer: Peer, now: float) -> None:
        """End so many of its requests, oldest first, that none is left `FADE` seconds after it fell silent."""
        left = floor(peer.fading * (1 - (now - peer.received_at - SILENT) / FADE))
        for number in list(peer.open)[: len(peer.open) - max(0, left)]:
            _end(peer.open.pop(number), _LOST)

    # --- what peers say ---------------------------------------------------------------------------------------------

    def _take(self, peer: Peer, message: wire.AnyMessage, now: float) -> None:
        if isinstance(message, wire.Decided):
            if (unreported := self._unreported.get(message.pool)) is not None:
                unreported.add()
            self._adopt(peer, message)
        elif isinstance(message, wire.Finished):
            if (adopted := peer.open.pop(message.number, None)) is not None:
                adopted.finished(_response(message, now))
        elif isinstance(message, wire.FirstToken):
            if (adopted := peer.open.get(message.number)) is not None:
                adopted.first_token()
        elif isinstance(message, wire.Beat):
            self._take_beat(peer, message, now)
        elif isinstance(message, wire.Piece):
            self._restore(message)
        elif isinstance(message, wire.Leaving):
            self._becomes(peer, "left")
            peer.ready, peer.fading = False, len(peer.open)
            self._stop_asking(peer)

    def _adopt(self, peer: Peer, sent: wire.Decided) -> None:
        number, open_ = sent.number, peer.open
        if open_.get(number) is not None:
            return
        if len(open_) >= _MOST_OPEN:
            _end(open_.pop(next(iter(open_))), _LOST)
        pool = self._pools.get(sent.pool)
        if pool is None or (endpoint := pool.endpoints().get(sent.endpoint)) is None:
            self.counts["unknown-endpoint"] += 1
            open_[number] = None
        else:
            open_[number] = pool.accounts().adopt(wire.request_of(sent), endpoint, sent.states)

    def _take_beat(self, peer: Peer, beat: wire.Beat, now: float) -> None:
        peer.beat, peer.ready = (beat.sent, now), beat.ready
        if (ours := beat.received.get(self.instance)) is not None:
            peer.lag = max(0.0, now - ours[0] - ours[1]) / 2
        both = beat.open, self.open
        peer.agreement = min(both) / max(both) if max(both) else 1.0

    # --- snapshots --------------------------------------------------------------------------------------------------

    def _ask(self, now: float) -> None:
        """Ask for the snapshots that are wanted, but not too often; and again for those that did not come."""
        for peer in self._others():
            if peer.asked and now - peer.asked_at > _AGAIN:
                kind = peer.asked[:1]
                self._stop_asking(peer)
                peer.wanted = kind
            if peer.state != "live" or not peer.wanted or peer.asked:
                continue
            if self.joined and peer.snapshots and now - peer.asked_at < _AGAIN:
                continue
            kind, peer.wanted = peer.wanted, b""
            if (
                kind == wire.SNAPSHOT
                and not self.joined
                and any(each.asked[:1] == wire.SNAPSHOT for each in self._others())
            ):
                kind = wire.IN_FLIGHT  # one peer's knowledge is enough
            self._asks += 1
            peer.asked, peer.asked_at = wire.topic_of(kind, self.instance, self._asks), now
            self._link.subscribe(peer.address, peer.asked)

    def _stop_asking(self, peer: Peer) -> None:
        if peer.asked:
            self._link.unsubscribe(peer.address, peer.asked)
        peer.asked, peer.confirmed, peer.last, peer.pieces = b"", set(), -1, 0

    def _take_snapshot(self, peer: Peer, message: wire.AnyMessage) -> None:
        if isinstance(message, wire.Begin):
            peer.confirmed, peer.last = set(), message.last
        elif isinstance(message, wire.Open):
            try:
                sent = wire.decode_decided(message.decided)
            except wire.MalformedFrame as error:
                self._degraded("replicas-malformed", f"{peer.address}: {error}")
                return
            peer.confirmed.add(sent.number)
            self._adopt(peer, sent)
            adopted = peer.open.get(sent.number)
            if message.first_token and adopted is not None:
                adopted.first_token()
        elif isinstance(message, wire.Opened):
            if len(peer.confirmed) == message.requests:
                self._reconcile(peer)
            else:
                peer.wanted = peer.asked[:1]
        elif isinstance(message, wire.Piece):
            peer.pieces += 1
            self._restore(message)
        elif isinstance(message, wire.End):
            complete = peer.pieces == message.pieces
            if complete and peer.asked[:1] == wire.SNAPSHOT:
                self._full = self._full or peer.ready
            peer.snapshots += 1
            self.counts["snapshot"] += 1
            self._stop_asking(peer)
            if not complete:
                self._degraded("replicas-gap", f"a snapshot of {peer.address} came in part")
                peer.wanted = wire.SNAPSHOT

    def _restore(self, message: wire.Piece) -> None:
        if (pool := self._pools.get(message.pool)) is not None:
            pool.accounts().restore(message.plugin, message.piece, pool.endpoints())

    def _reconcile(self, peer: Peer) -> None:
        """All it has in flight is known: what else we thought so has ended meanwhile."""
        for number in [number for number in peer.open if number <= peer.last and number not in peer.confirmed]:
            _end(peer.open.pop(number), _LOST)

    def _join(self, now: float) -> None:
        """See whether all is known that can be."""
        others = [peer for peer in self._others() if peer.state != "other-version"]
        asking = [peer for peer in others if peer.state == "live" and (peer.asked or peer.wanted)]
        live = [peer for peer in others if peer.state == "live" and peer.beat[1]]
        if self._full and not asking:
            self._is_joined("with what a replica knew")
        elif others and len(live) == len(others) and not asking and not any(peer.ready for peer in live):
            self._is_joined("all replicas start together")
        elif not asking and now - self._began < JOIN:
            for peer in [peer for peer in live if peer.ready][:1]:  # it was not ready itself when it was asked
                peer.wanted = wire.SNAPSHOT
        elif now - self._began >= JOIN:
            if others:
                self._degraded("replica-cold-start", f"no snapshot came within {JOIN:g} s")
            self._is_joined("without a snapshot")

    def _is_joined(self, how: str) -> None:
        self.joined = True
        log.info("joined %d replicas, %s", sum(peer.state == "live" for peer in self._others()), how)


def _end(adopted: Adopted | None, response: Response) -> None:
    if adopted is not None:
        adopted.finished(response)


def _response(message: wire.Finished, now: float) -> Response:
    return Response(
        status=message.status,
        served=message.served,
        first_token_at=now if message.first_token else None,
        usage=None if message.usage is None else Usage(*message.usage),
        complete=message.complete,
        id=message.id,
        prefill_failed=message.prefill_failed,
    )
