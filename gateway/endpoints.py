"""The endpoints of a pool: entries of `endpoints:` lists, and the ready Pods its selector matches.

Read exactly as the endpoint picker reads the same documents: an address that only one of the two knows would never be
served, as Envoy passes over what its own cluster does not have. Sources: llm-d's `file-discovery`; Kubernetes core v1.
"""

from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv6Address, ip_address
from typing import Annotated, Any

import msgspec
from msgspec import Meta, field

from epp import protocol
from epp.documents.files import Document
from epp.errors import ConfigError
from gateway.resources import InferencePool, Port, Strict

Text = Annotated[str, Meta(min_length=1)]


class Entry(Strict, frozen=True):
    """An entry of an `endpoints:` list."""

    name: Text
    address: str
    port: Port | Annotated[str, Meta(pattern=r"^[0-9]{1,5}$")]
    namespace: str = "default"
    labels: dict[str, str] = field(default_factory=dict)
    node: str = ""
    """For the endpoint picker alone."""


class EndpointsFile(Strict, frozen=True):
    endpoints: tuple[Entry, ...]


class Open(msgspec.Struct, frozen=True, rename="camel"):
    """What is Kubernetes': we read some of its fields and pass over the others."""


class PodMetadata(Open, frozen=True):
    name: Text
    namespace: str = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    deletion_timestamp: Any = None


class Condition(Open, frozen=True):
    type: str
    status: str


class PodStatus(Open, frozen=True):
    pod_ip: str = field(default="", name="podIP")
    conditions: list[Condition] | None = None


class Pod(Open, frozen=True):
    metadata: PodMetadata
    status: PodStatus = PodStatus()


Files = Sequence[tuple[Document, EndpointsFile]]
Pods = Sequence[tuple[Document, Pod]]


def selected(pool: InferencePool, files: Files, pods: Pods) -> tuple[str, ...]:
    """`ip:port` of each endpoint of the pool. ConfigError where a name or an address is there twice."""
    seen: dict[str, str] = {}
    found = []
    for where, name, address in (*_of_lists(pool, files), *_of_pods(pool, pods)):
        for key in (f"name {name}", f"address {address}"):
            if key in seen:
                raise ConfigError(where, f"{key} is taken by {seen[key]}; expected one of its own")
            seen[key] = where
        found.append(address)
    return tuple(found)


def check(document: Document, file: EndpointsFile) -> None:
    """ConfigError for an address or a port that is none."""
    for index, entry in enumerate(file.endpoints):
        at = f"endpoints[{index}]"
        if not 1 <= int(entry.port) <= 65535:
            raise document.error(f"{at}.port", f"got {entry.port!r}; expected a port, 1 to 65535")
        try:
            ip_address(entry.address)
        except ValueError:
            expected = "expected an IPv4 or IPv6 address (names are not resolved)"
            raise document.error(f"{at}.address", f"got {entry.address!r}; {expected}") from None


def check_members(pools: Sequence[InferencePool], files: Files) -> None:
    """ConfigError for an entry that is in none of the pools, where there are any: its labels must be wrong."""
    for document, file in files:
        for index, entry in enumerate(file.endpoints):
            if pools and not any(_selects(pool, entry.namespace, entry.labels) for pool in pools):
                wanted = " or ".join(
                    f"{_labels(pool.spec.selector.match_labels)} in {pool.metadata.namespace}" for pool in pools
                )
                message = f"{entry.name}, {_labels(entry.labels)} in {entry.namespace}, is in no InferencePool"
                raise document.error(f"endpoints[{index}]", f"{message}; expected {wanted}")


def join(address: str, port: int) -> str:
    """`ip:port`: IPv6 in brackets and short, IPv4 mapped into IPv6 as IPv4. ValueError if `address` is no address."""
    ip = ip_address(address)
    if isinstance(ip, IPv6Address) and ip.ipv4_mapped is not None:
        ip = ip.ipv4_mapped
    return f"[{ip}]:{port}" if ip.version == 6 else f"{ip}:{port}"


def _of_lists(pool: InferencePool, files: Files) -> Iterator[tuple[str, str, str]]:
    """(place, name, address) of each entry."""
    for document, file in files:
        for index, entry in enumerate(file.endpoints):
            if _selects(pool, entry.namespace, entry.labels):
                name = f"{entry.namespace}/{entry.name}"
                yield f"{document.where}: endpoints[{index}]", name, join(entry.address, int(entry.port))


def _of_pods(pool: InferencePool, pods: Pods) -> Iterator[tuple[str, str, str]]:
    ports = [port.number for port in pool.spec.target_ports]
    for document, pod in pods:
        if _selects(pool, pod.metadata.namespace, pod.metadata.labels or {}):
            try:
                yield from ((document.where, name, address) for name, address in _serving(pod, ports))
            except ValueError as error:
                expected = "expected an IP in status.podIP and ports in active-ports"
                raise document.error("", f"{error}; {expected}") from None


def _serving(pod: Pod, ports: Sequence[int]) -> list[tuple[str, str]]:
    """(name, address) for each target port the Pod serves; none while it is not ready or going away."""
    meta, status = pod.metadata, pod.status
    ready = any(each.type == "Ready" and each.status == "True" for each in status.conditions or ())
    if not ready or not status.pod_ip or meta.deletion_timestamp is not None:
        return []
    active = _active_ports(meta.annotations or {})
    name = f"{meta.namespace}/{meta.name}"
    return [
        (name if len(ports) == 1 else f"{name}-rank-{rank}", join(status.pod_ip, port))
        for rank, port in enumerate(ports)
        if active is None or port in active
    ]


def _active_ports(annotations: Mapping[str, str]) -> set[int] | None:
    for name in protocol.ACTIVE_PORTS:
        if (value := annotations.get(name)) is not None:
            return {int(port) for port in value.split(",") if port.strip()}
    return None


def _selects(pool: InferencePool, namespace: str, labels: Mapping[str, str]) -> bool:
    return namespace == pool.metadata.namespace and pool.spec.selector.match_labels.items() <= labels.items()


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{name}: {value}" for name, value in labels.items()) or "without labels"
