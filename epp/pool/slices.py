"""The addresses behind a Service of Kubernetes, from its EndpointSlices, followed as they change.

Source: the Kubernetes API's `discovery.k8s.io/v1`. A Service has several slices: one for each family of addresses, and
more where there are many; while one is emptied into another, both may name an address.
"""

import random
from collections.abc import Callable, Sequence
from ipaddress import ip_address
from typing import Any, Final

import msgspec

from epp.documents.addresses import address_of
from epp.documents.objects import Metadata, Open
from epp.pool.apiserver import Kind
from epp.pool.watch import Source, Watch
from epp.telemetry.metrics import Metrics

SLICES: Final = Kind("discovery.k8s.io", "v1", "endpointslices")
_SERVICE: Final = "kubernetes.io/service-name"
"""The label of a slice that names its Service."""


class _Port(Open, frozen=True):
    name: str | None = None
    port: int | None = None


class _Endpoint(Open, frozen=True):
    addresses: list[str] | None = None
    """They are the same; clients use the first."""


class _Slice(Open, frozen=True):
    metadata: Metadata
    endpoints: list[_Endpoint] | None = None
    ports: list[_Port] | None = None


class ServiceAddresses:
    """What a Service selects: also what is not ready yet, or is about to end and has not ended.

    `port` names the Service's port that counts; of a Service with one port, it is that one. Of a Service with addresses
    of both families, those of IPv4 count, so that nobody is found twice. While they cannot be followed, those known
    last stay, and `reason` says so in `metrics`.
    """

    def __init__(
        self,
        namespace: str,
        name: str,
        port: str,
        source: Source,
        metrics: Metrics,
        reason: str,
        random: random.Random,
    ) -> None:
        self.name = f"{namespace}/{name}"
        self._port = port
        self._metrics = metrics
        self._reason = reason
        self._found: Callable[[Sequence[str]], None] = lambda addresses: None
        self._watch = Watch(source, SLICES, namespace, self._read, self, random, selector=f"{_SERVICE}={name}")

    async def follow(self, found: Callable[[Sequence[str]], None]) -> None:
        """Call with all addresses, in a fixed order, at first and after each change; for ever."""
        self._found = found
        await self._watch.run()

    def changed(self) -> None:
        """`Listener`: slices changed."""
        found = {address for addresses in self._watch.objects().values() for address in addresses}
        first = {address for address in found if not address.startswith("[")}
        self._found(sorted(first or found))

    def trouble(self, watch: Watch[Any], reason: str, detail: str) -> None:
        """`Listener`: the watch fails, or works again."""
        if reason:
            self._metrics.degraded(self._reason, f"Service {self.name}: {detail}", lasting=True)
        else:
            self._metrics.recovered(self._reason)

    def refused(self, detail: str) -> None:
        """`Listener`: a slice is not what we expect."""
        self._metrics.degraded(self._reason, detail)

    def _read(self, raw: bytes) -> tuple[str, ...]:
        """The addresses in a slice."""
        read = msgspec.json.decode(raw, type=_Slice)
        ips = [each.addresses[0] for each in read.endpoints or () if each.addresses and _is_ip(each.addresses[0])]
        return tuple(address_of(ip, self._port_of(read)) for ip in ips)

    def _port_of(self, read: _Slice) -> int:
        ports = {each.name: each.port for each in read.ports or () if each.port is not None}
        port = ports.get(self._port, next(iter(ports.values())) if len(ports) == 1 else None)
        if port is None:
            raise msgspec.ValidationError(f"ports: expected one named {self._port!r}, or one alone")
        return port


def _is_ip(text: str) -> bool:
    """A slice of the type FQDN has names."""
    try:
        ip_address(text)
    except ValueError:
        return False
    return True
