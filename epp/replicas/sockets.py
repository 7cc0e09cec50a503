"""`Sockets`: the connections between replicas. zmq is spoken here, and for KV events in `epp.prefix.events`.

Each replica publishes by one socket (XPUB), and has one (SUB) for each peer. Subscriptions travel upstream, so asking
for a snapshot is subscribing to a topic of one's own: one port and one direction of connections are enough.

With a secret all of it is encrypted and both sides are authenticated by CURVE: the key pair of all replicas is derived
from the secret, so whoever does not know it can neither listen nor speak.
"""

import asyncio
from collections.abc import Callable
from hashlib import blake2b
from typing import Final

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from epp.errors import ConfigError
from epp.process.threads import background_policy
from epp.replicas import wire

_QUEUE: Final = 8192
"""Frames that wait for one peer, at most; about a second at full load. What is more is dropped, and asked for again."""
_TURN: Final = 128
"""Frames taken of one peer in a turn of the event loop."""
_LINGER: Final = 200
"""Milliseconds for the last frame of a replica that ends."""
_DOMAIN: Final = "warmpath"
_STRANGERS: Final[dict[int, str]] = {
    zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC: "its secret is another",
    zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH: "one side has a secret and the other has none",
}
"""What zmq says of handshakes that fail so, and what it means of a replica."""


def keys_of(secret: bytes) -> tuple[bytes, bytes]:
    """The key pair of all replicas that share a secret: (public, secret) in Z85."""
    private = z85.encode(blake2b(secret, digest_size=32, person=b"warmpath-peers").digest())
    return zmq.curve_public(private), private


def hash_seed_of(secret: bytes) -> int:
    """The seed of hashes (`epp.plugin.Services`) of all replicas that share a secret."""
    return int.from_bytes(blake2b(secret, digest_size=8, person=b"warmpath-hashes").digest())


class Sockets:
    """Of this process. `received(address, frame)`, `asked(topic)` and `refused(why)`, of a peer that this end did not
    let in or that did not let in this end, are called on the event loop.
    """

    def __init__(
        self,
        received: Callable[[str, bytes], None],
        asked: Callable[[bytes], None],
        refused: Callable[[str], None],
        secret: bytes | None,
    ) -> None:
        self._received = received
        self._asked = asked
        self._refused = refused
        self._keys = None if secret is None else keys_of(secret)
        self._context = zmq.Context()
        self._context.set(zmq.IPV6, 1)
        self._context.set(zmq.MAX_SOCKETS, 1023)
        if (policy := background_policy()) is not None:
            self._context.set(zmq.THREAD_SCHED_POLICY, policy)
        self._authenticator: AsyncioAuthenticator | None = None
        self._publisher = self._socket(zmq.XPUB)
        self._peers: dict[str, zmq.SyncSocket] = {}
        self._handshakes: dict[zmq.SyncSocket, zmq.SyncSocket] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self, host: str, port: int) -> int:
        """Listen; returns the port. Raises ConfigError where that cannot be. To be called on the event loop."""
        self._loop = asyncio.get_running_loop()
        if self._keys is not None:
            public, private = self._keys
            self._authenticator = AsyncioAuthenticator(self._context)
            self._authenticator.start()
            self._authenticator.configure_curve_callback(_DOMAIN, _Only(public))
            self._publisher.curve_server = True
            self._publisher.curve_secretkey = private
            self._publisher.curve_publickey = public
            self._publisher.zap_domain = _DOMAIN.encode()
        where = f"[{host}]" if ":" in host else host
        try:
            self._publisher.bind(f"tcp://{where}:{port or '*'}")
        except zmq.ZMQError as error:
            raise ConfigError("--replica-port", f"cannot listen on {where}:{port}: {error}") from error
        self._loop.add_reader(self._publisher.fileno(), self._take_subscriptions)
        self._watch_handshakes(self._publisher)
        endpoint = self._publisher.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(endpoint, bytes)
        return int(endpoint.rstrip(b"\0").rpartition(b":")[2])

    def close(self) -> None:
        """End all connections, after the last frames have left or a little time has passed."""
        for address in list(self._peers):
            self.disconnect(address)
        if self._loop is not None:
            self._loop.remove_reader(self._publisher.fileno())
        self._close_handshakes(self._publisher)
        self._publisher.close(linger=_LINGER)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._context.term()

    def connect(self, address: str) -> None:
        """Listen to the peer at `host:port`, for as long as it takes until it is there."""
        assert self._loop is not None
        socket = self._peers[address] = self._socket(zmq.SUB)
        if self._keys is not None:
            socket.curve_publickey, socket.curve_secretkey = self._keys
            socket.curve_serverkey = self._keys[0]
        self._watch_handshakes(socket)
        socket.connect(f"tcp://{address}")
        self._loop.add_reader(socket.fileno(), self._take, address)

    def disconnect(self, address: str) -> None:
        assert self._loop is not None
        socket = self._peers.pop(address, None)
        if socket is not None:
            self._loop.remove_reader(socket.fileno())
            self._close_handshakes(socket)
            socket.close(linger=0)

    def publish(self, frame: bytes) -> None:
        """Returns at once; a peer whose queue is full does not get it."""
        self._publisher.send(frame, zmq.NOBLOCK, copy=True)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call it after this turn of the event loop and so many seconds."""
        assert self._loop is not None
        if seconds:
            self._loop.call_later(seconds, call)
        else:
            self._loop.call_soon(call)

    def subscribe(self, address: str, topic: bytes) -> None:
        if address not in self._peers:
            self.connect(address)
        self._peers[address].setsockopt(zmq.SUBSCRIBE, topic)
        self.poll()

    def unsubscribe(self, address: str, topic: bytes) -> None:
        if (socket := self._peers.get(address)) is not None:
            socket.setsockopt(zmq.UNSUBSCRIBE, topic)
            self.poll()

    def poll(self) -> None:
        """Look at all sockets soon. Their descriptors say when they have something new, not that they have something:
        a call in between may have taken that signal away.
        """
        assert self._loop is not None
        self._loop.call_soon(self._take_subscriptions)
        for socket in self._handshakes:
            self._loop.call_soon(self._take_handshakes, socket)
        for address in self._peers:
            self._loop.call_soon(self._take, address)

    def _socket(self, kind: int) -> zmq.SyncSocket:
        socket = self._context.socket(kind)
        for option, value in (
            (zmq.SNDHWM, _QUEUE),
            (zmq.RCVHWM, _QUEUE),
            (zmq.MAXMSGSIZE, 2 * wire.MAX_FRAME),
            (zmq.LINGER, 0),
            (zmq.RECONNECT_IVL, 50),
            (zmq.RECONNECT_IVL_MAX, 1000),
            (zmq.HANDSHAKE_IVL, 5000),
            (zmq.HEARTBEAT_IVL, 1000),
            (zmq.HEARTBEAT_TIMEOUT, 5000),
        ):
            socket.setsockopt(option, value)
        return socket

    def _take(self, address: str) -> None:
        socket = self._peers.get(address)
        if socket is None or self._loop is None:
            return
        for _ in range(_TURN):
            try:
                frame = socket.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._received(address, frame)
            if socket.closed:
                return
        self._loop.call_soon(self._take, address)

    def _take_subscriptions(self) -> None:
        while not self._publisher.closed:
            try:
                message = self._publisher.recv(zmq.NOBLOCK)
            except zmq.Again:
                return
            topic = message[1:]
            if message[:1] == b"\1" and len(topic) == wire.TOPIC_BYTES and topic[:1] in (wire.SNAPSHOT, wire.IN_FLIGHT):
                self._asked(topic)

    def _watch_handshakes(self, socket: zmq.SyncSocket) -> None:
        """Of both ends: where one has a secret and the other has none, the end that notices first closes the
        connection, and the other may never hear why.
        """
        assert self._loop is not None
        monitor = self._handshakes[socket] = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL)
        self._loop.add_reader(monitor.fileno(), self._take_handshakes, socket)

    def _close_handshakes(self, socket: zmq.SyncSocket) -> None:
        monitor = self._handshakes.pop(socket, None)
        if monitor is not None and self._loop is not None:
            self._loop.remove_reader(monitor.fileno())
            socket.disable_monitor()
            monitor.close(linger=0)

    def _take_handshakes(self, socket: zmq.SyncSocket) -> None:
        while (monitor := self._handshakes.get(socket)) is not None:
            try:
                event = parse_monitor_message(monitor.recv_multipart(zmq.NOBLOCK))
            except zmq.Again:
                return
            if (why := _STRANGERS.get(event["value"])) is not None:
                self._refused(why)


class _Only:
    """Lets in who has the public key of all replicas."""

    def __init__(self, public: bytes) -> None:
        self._public = public

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._public
