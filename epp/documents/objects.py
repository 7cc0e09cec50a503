"""The Kubernetes objects and the endpoints files that the picker and the gateway both read.

Sources: GIE `api/v1` (InferencePool), Kubernetes core v1 (Pod), llm-d-router `file-discovery` (endpoints files). Specs
that are ours are strict: a field we do not know is a mistake. Of the rest we read what we need. The gateway refuses
more of an InferencePool: see `gateway.resources`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from epp import protocol
from epp.documents.addresses import address_of
from epp.documents.files import Document
from epp.errors import ConfigError

Port = Annotated[int, Meta(ge=1, le=65535)]
Name = Annotated[str, Meta(min_length=1)]


class Strict(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename="camel"):
    """What is ours: a field we do not know is a mistake."""


class Open(msgspec.Struct, frozen=True, rename="camel"):
    """What is Kubernetes': we read some of its fields."""


class Metadata(Open, frozen=True):
    name: Name
    namespace: str = "default"
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: Any = None
    deletion_timestamp: Any = None

    @property
    def id(self) -> str:
        return f"{self.namespace}/{self.name}"


class Selector(Strict, frozen=True):
    match_labels: Annotated[dict[str, str], Meta(min_length=1, max_length=64)]


class TargetPort(Strict, frozen=True):
    number: Port


class PickerRef(Strict, frozen=True):
    name: Name
    group: str = ""
    kind: str = "Service"
    port: TargetPort | None = None
    failure_mode: str = "FailClose"


class PoolSpec(Strict, frozen=True):
    selector: Selector
    target_ports: Annotated[list[TargetPort], Meta(min_length=1, max_length=8)]
    app_protocol: str = "http"
    endpoint_picker_ref: PickerRef | None = None


class InferencePool(Open, frozen=True):
    metadata: Metadata
    spec: PoolSpec


class Condition(Open, frozen=True):
    type: str
    status: str


class PodStatus(Open, frozen=True):
    pod_ip: str = msgspec.field(default="", name="podIP")
    host_ip: str = msgspec.field(default="", name="hostIP")
    conditions: list[Condition] | None = None


class PodSpec(Open, frozen=True):
    node_name: str | None = None


class Pod(Open, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


class EndpointEntry(Strict, frozen=True):
    """An entry of an `endpoints:` list."""

    name: Name
    address: str
    port: str | int
    namespace: str = "default"
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    node: str = ""
    """The machine it runs on, where its KV memory is shared with others there (LMCache's instance id)."""


class EndpointsFile(Strict, frozen=True):
    endpoints: tuple[EndpointEntry, ...]


def entries_of(document: Document, file: EndpointsFile) -> Iterator[tuple[str, EndpointEntry, str]]:
    """(path in the document, entry, `ip:port`) of each entry. ConfigError for an address or a port that is none."""
    for index, entry in enumerate(file.endpoints):
        at = f"endpoints[{index}]"
        text = str(entry.port)
        if not (text.isascii() and text.isdigit() and 1 <= int(text[:6]) <= 65535):
            raise document.error(f"{at}.port", f"got {entry.port!r}; expected a port, 1 to 65535")
        try:
            address = address_of(entry.address, int(text))
        except ValueError:
            expected = "expected an IPv4 or IPv6 address (names are not resolved)"
            raise document.error(f"{at}.address", f"got {entry.address!r}; {expected}") from None
        yield at, entry, address


def addresses_of(pod: Pod, ports: Sequence[int]) -> list[tuple[str, str]]:
    """(name, `ip:port`) for each of the pool's target ports this pod serves; none while it is not ready or going away.

    The rank in the name is the port's place among the pool's ports, also where the pod serves only some of them.
    ValueError if its address is none or its active ports are no numbers.
    """
    meta, status = pod.metadata, pod.status
    ready = any(each.type == "Ready" and each.status == "True" for each in status.conditions or ())
    if not ready or not status.pod_ip or meta.deletion_timestamp is not None:
        return []
    try:
        active = _active_ports(meta.annotations or {})
        return [
            (meta.id if len(ports) == 1 else f"{meta.id}-rank-{rank}", address_of(status.pod_ip, port))
            for rank, port in enumerate(ports)
            if active is None or port in active
        ]
    except ValueError as error:
        raise ValueError(f"{error}; expected an IP in status.podIP and ports in active-ports") from None


def addresses_in(document: Document, pod: Pod, ports: Sequence[int]) -> list[tuple[str, str]]:
    """The same for a Pod of a file: ConfigError instead of ValueError."""
    try:
        return addresses_of(pod, ports)
    except ValueError as error:
        raise document.error("", str(error)) from None


def selects(pool: InferencePool, namespace: str, labels: Mapping[str, str]) -> bool:
    """Whether what has these labels in this namespace is the pool's."""
    return namespace == pool.metadata.namespace and pool.spec.selector.match_labels.items() <= labels.items()


def target_ports(spec: PoolSpec, field: str = "") -> list[int]:
    """The pool's target ports. ValueError for one that is there twice; it names `field`, where its path does not."""
    ports = [port.number for port in spec.target_ports]
    if len(set(ports)) < len(ports):
        raise ValueError(f"got {field}{' ' if field else ''}{ports}; expected each port once")
    return ports


def check_unique(endpoints: Iterable[tuple[str, Iterable[str]]]) -> None:
    """ConfigError where two of (place, what nothing else may have, as an error names it) share something."""
    seen: dict[str, str] = {}
    for where, keys in endpoints:
        for key in keys:
            if key in seen:
                raise ConfigError(where, f"{key} is taken by {seen[key]}; expected one of its own")
            seen[key] = where


def created(meta: Metadata) -> str:
    """When the object came to be, as text that sorts; empty if it does not say."""
    at = meta.creation_timestamp
    # YAML reads an unquoted time as one; in JSON and in quotes it is RFC 3339 text, which sorts by itself.
    if isinstance(at, datetime):
        at = at.replace(tzinfo=at.tzinfo or UTC).astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return str(at or "")


def _active_ports(annotations: Mapping[str, str]) -> set[int] | None:
    for name in protocol.ACTIVE_PORTS:
        if (value := annotations.get(name)) is not None:
            return {int(port) for port in value.split(",") if port.strip()}
    return None
