"""`ReplicaGroup`: this replica among its peers: who they are, the connections to them, and what is exchanged."""

import asyncio
import ipaddress
import socket
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any, Final, Protocol

from epp.errors import ConfigError
from epp.plugin import Plugin
from epp.replicas.announcer import Announcer
from epp.replicas.exchange import BEAT, Exchange, Report, SharedPool
from epp.replicas.sockets import Sockets, hash_seed_of

_LOOK: Final = 1.0
"""Seconds after which peers are looked up again by their name."""
_LOOK_DEADLINE: Final = 2.0
_SHORTEST_SECRET: Final = 16
"""Bytes."""
_LARGEST_SECRET: Final = 4096
_ASKED: Final = 64
"""Snapshots that wait to be sent, at most; a peer asks again for one that did not come."""
_TURN: Final = 8
"""Frames of a snapshot that leave between two turns of the event loop."""
_PAUSE: Final = 0.01
"""Seconds after each `_BURST` frames of a snapshot, in which queues empty."""
_BURST: Final = 512


class Service(Protocol):
    """Peers that something else knows of."""

    name: str

    async def follow(self, found: Callable[[Sequence[str]], None]) -> None:
        """Call with the addresses of all, at first and after each change; for ever."""


@dataclass(frozen=True)
class ReplicaSettings:
    """What the flags say."""

    host: str
    port: int
    """0: any."""
    peers: Sequence[str] = ()
    """`host:port` each; this replica may be among them."""
    dns: str | None = None
    """`name:port`: all addresses of the name are peers."""
    service: Service | None = None
    """All its addresses are peers."""
    secret_file: Path | None = None


class ReplicaGroup:
    """Of one process. Raises ConfigError for settings that cannot be."""

    def __init__(
        self,
        settings: ReplicaSettings,
        clock: Callable[[], float],
        random: Random,
        degraded: Report,
        recovered: Callable[[str], None],
    ) -> None:
        for flag, addresses in (("--peer", settings.peers), ("--peers-dns", [settings.dns] if settings.dns else [])):
            for address in addresses:
                _checked(flag, address)
        secret = _secret(settings.secret_file)
        self.hash_seed = 0 if secret is None else hash_seed_of(secret)
        """For `epp.plugin.Services`."""
        if secret is None and (open_to := [at for at in _reached(settings) if not _is_loopback(at)]):
            what = "expected where replicas speak beyond loopback, as"
            raise ConfigError("--replica-secret-file", f"{what} {open_to[0]} is")
        self._settings = settings
        self._degraded = degraded
        self._recovered = recovered
        self._sockets = Sockets(self._received, self._ask, self._not_let_in, secret)
        self.exchange = Exchange(random.getrandbits(63) + 1, self._sockets, clock, degraded, recovered)
        self._clock = clock
        self._known: dict[str, Sequence[str]] = {}
        """Addresses of peers, by how they became known."""
        self._asked: deque[bytes] = deque(maxlen=_ASKED)
        self._is_asked = asyncio.Event()
        self.port = settings.port

    def add_pool(self, pool: SharedPool) -> None:
        """To be called for each pool before the first request."""
        self.exchange.add_pool(pool)

    def announcer(self, pool: str, states: Callable[..., dict[str, Any]]) -> Plugin:
        """What tells peers of the requests of a pool."""
        return Announcer(self.exchange, pool, states)

    def tell(self, pool: str, plugin: str, piece: Any) -> None:
        """A plugin's word to the same plugin of all peers, which comes to their `restore`."""
        self.exchange.tell(pool, plugin, piece)

    def _not_let_in(self, why: str) -> None:
        expected = "expected --replica-secret-file with the same content everywhere"
        self._degraded("replicas-secret", f"a connection between replicas was refused: {why}; {expected}")

    @property
    def live(self) -> int:
        """Replicas that serve now, this one counted."""
        return 1 + sum(peer.state in ("live", "other-version") for peer in self.exchange.peers.values())

    @property
    def joined(self) -> bool:
        return self.exchange.joined

    def as_dict(self) -> dict[str, Any]:
        """For people."""
        now = self._clock()
        return {
            "instance": f"{self.exchange.instance:016x}",
            "joined": self.joined,
            "in_flight": self.exchange.open,
            "peers": [peer.as_dict(now) for peer in self.exchange.peers.values() if peer.state != "self"],
        }

    def open(self) -> None:
        """Listen. Raises ConfigError."""
        self.port = self._sockets.open(self._settings.host, self._settings.port)

    def close(self) -> None:
        self.exchange.leave()
        self._sockets.close()

    async def run(self) -> None:
        """Exchange with peers, for ever."""
        self._found("peers", self._settings.peers)
        async with asyncio.TaskGroup() as tasks:
            if self._settings.dns is not None:
                tasks.create_task(self._look_up(self._settings.dns))
            if self._settings.service is not None:
                tasks.create_task(self._settings.service.follow(lambda addresses: self._found("service", addresses)))
            tasks.create_task(self._send_snapshots())
            while True:
                self.exchange.tick()
                for peer in list(self.exchange.peers.values()):
                    if peer.state == "self":
                        self._sockets.disconnect(peer.address)
                self._sockets.poll()
                await asyncio.sleep(BEAT if self.joined else BEAT / 10)

    def _received(self, address: str, frame: bytes) -> None:
        self.exchange.received(address, frame)

    def _ask(self, topic: bytes) -> None:
        self._asked.append(topic)
        self._is_asked.set()

    async def _send_snapshots(self) -> None:
        while True:
            await self._is_asked.wait()
            self._is_asked.clear()
            while self._asked:
                for sent, frame in enumerate(self.exchange.snapshot(self._asked.popleft()), 1):
                    self._sockets.publish(frame)
                    if sent % _TURN == 0:
                        await asyncio.sleep(_PAUSE if sent % _BURST == 0 else 0)

    async def _look_up(self, name: str) -> None:
        """Follow who has a name."""
        while True:
            try:
                async with asyncio.timeout(_LOOK_DEADLINE):
                    self._found("dns", await _addresses(name))
                self._recovered("replicas-dns")
            except (OSError, TimeoutError) as error:  # those known last are still the best guess
                self._degraded("replicas-dns", f"{name}: {error}", lasting=True)
            await asyncio.sleep(_LOOK)

    def _found(self, how: str, addresses: Sequence[str]) -> None:
        """These are all peers that became known that way."""
        self._known[how] = addresses
        _, gone = self.exchange.found([*chain.from_iterable(self._known.values())])
        for address in gone:
            self._sockets.disconnect(address)


async def _addresses(name: str) -> list[str]:
    """All addresses of `name:port`, in a fixed order. Raises OSError."""
    host, _, port = name.rpartition(":")
    found = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    ips = sorted({str(address[0]) for *_, address in found})
    return [f"[{ip}]:{port}" if ":" in ip else f"{ip}:{port}" for ip in ips]


def _checked(flag: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdigit() and 0 < int(port) < 65536):
        raise ConfigError(flag, f"{address!r}: expected HOST:PORT, an IPv6 address in brackets")


def _reached(settings: ReplicaSettings) -> list[str]:
    """Where is listened, and who is spoken to."""
    named = [peer.rpartition(":")[0] for peer in (*settings.peers, settings.dns or "") if peer]
    return [settings.host, *named, *([f"Service {settings.service.name}"] if settings.service is not None else [])]


def _is_loopback(host: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    return host == "localhost"


def _secret(file: Path | None) -> bytes | None:
    if file is None:
        return None
    try:
        with file.open("rb") as opened:
            secret = opened.read(_LARGEST_SECRET + 1).strip()
    except OSError as error:
        raise ConfigError("--replica-secret-file", f"cannot read {file}: {error.strerror}") from error
    if not _SHORTEST_SECRET <= len(secret) <= _LARGEST_SECRET:
        raise ConfigError(
            "--replica-secret-file", f"{file} has {len(secret)} bytes, expected {_SHORTEST_SECRET} to {_LARGEST_SECRET}"
        )
    return secret
