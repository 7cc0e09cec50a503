"""The endpoint picker under test: where it listens and what is known of its pool."""

import asyncio
import ipaddress
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from grpc import aio

from tooling.conformance.relay import relay
from tooling.conformance.verdict import Skipped, Unreachable


@dataclass(frozen=True)
class ConformanceOptions:
    """What the user says. Addresses are `host:port`; `endpoints` are the pool's, as the EPP should name them."""

    target: str
    tls: bool = False
    endpoints: tuple[str, ...] = ()
    model: str = "conformance"
    headers: dict[str, str] = field(default_factory=dict)
    """Sent with every request: what the pool's configuration may need to route it."""
    health: str | None = None
    """Where health is served beside the ext_proc port; always plain text."""
    reply_timeout: float = 5.0
    """Seconds a reply may take."""
    quiet: float = 0.2
    """Seconds without a reply that count as silence, once a later request is answered too."""


class Target:
    """`options`, a channel to the target, and the owner of tasks that read from it."""

    def __init__(self, options: ConformanceOptions, address: str, tasks: asyncio.TaskGroup) -> None:
        self.options = options
        self.tasks = tasks
        self._address = address
        self.channel = self.connect()

    def connect(self) -> aio.Channel:
        """A connection of its own to the ext_proc port; the caller closes it."""
        return _channel(self._address, self.options.target)

    @asynccontextmanager
    async def health_channel(self) -> AsyncIterator[aio.Channel]:
        """To the health port. Raises Skipped where none was named."""
        if self.options.health is None:
            raise Skipped("needs --health HOST:PORT")
        async with _channel(self.options.health, self.options.health) as channel:
            yield channel

    def endpoints(self, at_least: int = 1) -> tuple[str, ...]:
        """The pool's. Raises Skipped where fewer were named."""
        known = self.options.endpoints
        if len(known) < at_least:
            raise Skipped(f"needs {at_least} of the pool's endpoints: --endpoint IP:PORT, repeated")
        return known

    def ipv6_endpoint(self) -> str:
        """One with an IPv6 address, in brackets. Raises Skipped where none was named."""
        found = [known for known in self.options.endpoints if known.startswith("[")]
        if not found:
            raise Skipped("needs an endpoint with an IPv6 address: --endpoint [IP]:PORT")
        return found[0]


def _channel(address: str, authority: str) -> aio.Channel:
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.default_authority", authority),
        ("grpc.use_local_subchannel_pool", 1),  # each channel of ours is a connection of its own
        ("grpc.enable_http_proxy", 0),
    ]
    return aio.insecure_channel(address, options=options)


@asynccontextmanager
async def reach(options: ConformanceOptions) -> AsyncIterator[Target]:
    """The target, once it answers. Raises Unreachable."""
    async with AsyncExitStack() as stack:
        address = options.target
        if options.tls:
            host, _, port = address.rpartition(":")
            address = f"127.0.0.1:{await stack.enter_async_context(relay(host.strip('[]'), int(port)))}"
        async with _channel(address, options.target) as probe:
            try:
                async with asyncio.timeout(options.reply_timeout):
                    await probe.channel_ready()
            except TimeoutError:
                raise Unreachable(_nobody(options)) from None
        tasks = await stack.enter_async_context(asyncio.TaskGroup())
        target = Target(options, address, tasks)
        await stack.enter_async_context(target.channel)
        yield target


def _nobody(options: ConformanceOptions) -> str:
    how, otherwise = ("over TLS", "without --tls") if options.tls else ("in plain text", "with --tls")
    return (
        f"nothing at {options.target} speaks gRPC {how} within {options.reply_timeout:g} s: is the endpoint picker "
        f"running, and is it to be asked {otherwise}?"
    )


def host_and_port(address: str) -> tuple[str, int] | None:
    """Of `ip:port`, IPv6 in brackets; None if it is not that."""
    host, _, port = address.rpartition(":")
    try:
        parsed = ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
        number = int(port) if port.isdecimal() and port.isascii() else 0
    except ValueError:
        return None
    bracketed = host.startswith("[") and host.endswith("]")
    if bracketed != (parsed.version == 6) or not 0 < number < 65536:
        return None
    return str(parsed), number
