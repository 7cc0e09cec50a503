"""From YAML documents to `PoolState`: which pools there are and what belongs to each.

Sources: llm-d-router `file-discovery` for endpoints files; see `pool.objects` for Kubernetes'.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec

from epp import protocol
from epp.documents.files import Document
from epp.documents.strict import nearest
from epp.errors import ConfigError
from epp.pool.endpoint import Endpoint
from epp.pool.objects import (
    InferenceModelRewrite,
    InferenceObjective,
    InferencePool,
    Metadata,
    Name,
    Pod,
    PoolSpec,
    Strict,
    endpoints_of_pod,
    preferred,
    priorities_of,
    refers,
    rewrites_of,
    state_of,
)
from epp.pool.store import PoolState, address_of


class EndpointEntry(Strict, frozen=True):
    name: Name
    address: str
    port: str | int
    namespace: str = "default"
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    node: str = ""
    """The machine it runs on, where its KV memory is shared with others there (LMCache's instance id)."""


class EndpointsFile(Strict, frozen=True):
    endpoints: list[EndpointEntry]


_VERSIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "InferencePool": (f"{protocol.POOL_GROUP}/v1",),
    "InferenceObjective": tuple(f"{group}/v1alpha2" for group in protocol.OBJECTIVE_GROUPS),
    "InferenceModelRewrite": tuple(f"{group}/v1alpha2" for group in protocol.OBJECTIVE_GROUPS),
    "Pod": ("v1",),
}

Found = list[tuple[Document, Any]]


def pools_of(documents: Sequence[Document], pool_name: str | None) -> list[PoolState]:
    """The pools these documents describe (see `static.load`); ConfigError where they are wrong or do not fit."""
    found: dict[str, Found] = {kind: [] for kind in (*_VERSIONS, "endpoints")}
    for document in documents:
        _sort_in(document, found)
    if not found["InferencePool"]:
        return [_flag_pool(found, pool_name or "default")]
    pools = [_pool(document, pool, found) for document, pool in found["InferencePool"]]
    _check_unique(found["InferencePool"])
    _check_references(found)
    if pool_name is None:
        return pools
    if not (wanted := [pool for pool in pools if pool.name == pool_name]):
        raise _no_such_pool("", f"pool {pool_name!r}", [pool.name for pool in pools])
    return wanted


def _sort_in(document: Document, found: dict[str, Found]) -> None:
    kind = document.kind
    if not kind:
        found["endpoints"].append((document, document.shape(EndpointsFile)))
        return
    if (versions := _VERSIONS.get(kind)) is None:
        return
    if (version := document.content.get("apiVersion")) not in versions:
        if kind == "Pod" or document.group not in (protocol.POOL_GROUP, *protocol.OBJECTIVE_GROUPS):
            return  # another project's kind of the same name
        raise document.error("apiVersion", f"got {version!r} for {kind}; expected {' or '.join(versions)}")
    shape: type[Any] = {
        "InferencePool": InferencePool,
        "InferenceObjective": InferenceObjective,
        "InferenceModelRewrite": InferenceModelRewrite,
        "Pod": Pod,
    }[kind]
    found[kind].append((document, document.shape(shape)))


def _flag_pool(found: dict[str, Found], name: str) -> PoolState:
    if found["Pod"]:
        raise found["Pod"][0][0].error("", "a Pod without an InferencePool; expected one, for its selector and ports")
    if not found["endpoints"]:
        raise ConfigError("", "the files name no endpoints; expected `endpoints:` or an InferencePool")
    endpoints = [each for document, file in found["endpoints"] for each in _entries(document, file)]
    _check_endpoints(endpoints)
    for document, each in (*found["InferenceObjective"], *found["InferenceModelRewrite"]):
        if each.spec.pool_ref.name != name:
            raise _no_such_pool(document.where, f"spec.poolRef.name {each.spec.pool_ref.name!r}", [name])
    return PoolState(
        name=name,
        endpoints=tuple(endpoint for _, endpoint, _ in endpoints),
        objectives=priorities_of(_preferred(found["InferenceObjective"])),
        rewrites=rewrites_of(_preferred(found["InferenceModelRewrite"])),
    )


def _pool(document: Document, pool: InferencePool, found: dict[str, Found]) -> PoolState:
    meta, spec = pool.metadata, pool.spec
    ports = [port.number for port in spec.target_ports]
    if len(set(ports)) < len(ports):
        raise document.error("spec.targetPorts", f"got {ports}; expected each port once")
    endpoints: list[tuple[str, Endpoint, str]] = []
    for where, file in found["endpoints"]:
        endpoints += [each for each in _entries(where, file) if _selects(spec, meta, each[1].labels, each[2])]
    for where, pod in found["Pod"]:
        if _selects(spec, meta, pod.metadata.labels or {}, pod.metadata.namespace):
            endpoints += [(where.where, each, meta.namespace) for each in _pod_endpoints(where, pod, ports)]
    _check_endpoints(endpoints)
    picker = spec.endpoint_picker_ref
    if picker is not None and picker.port is None and picker.kind == "Service":
        raise document.error("spec.endpointPickerRef.port", "missing; expected `number: 1..65535` for a Service")
    return state_of(
        pool,
        (endpoint for _, endpoint, _ in endpoints),
        _preferred(found["InferenceObjective"]),
        _preferred(found["InferenceModelRewrite"]),
    )


def _entries(document: Document, file: EndpointsFile) -> list[tuple[str, Endpoint, str]]:
    """(place, endpoint, namespace) of each entry."""
    found = []
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
        endpoint = Endpoint(f"{entry.namespace}/{entry.name}", address, dict(entry.labels), node=entry.node)
        found.append((f"{document.where}: {at}", endpoint, entry.namespace))
    return found


def _pod_endpoints(document: Document, pod: Pod, ports: list[int]) -> list[Endpoint]:
    try:
        return endpoints_of_pod(pod, ports)
    except ValueError as error:
        raise document.error("", f"{error}; expected an IP in status.podIP and ports in active-ports") from None


def _selects(spec: PoolSpec, pool: Metadata, labels: Mapping[str, str], namespace: str) -> bool:
    return namespace == pool.namespace and spec.selector.match_labels.items() <= labels.items()


def _preferred(found: Found) -> list[Any]:
    return preferred((document.group, each) for document, each in found)


def _check_endpoints(endpoints: list[tuple[str, Endpoint, str]]) -> None:
    seen: dict[str, str] = {}
    for where, endpoint, _ in endpoints:
        for key in (f"name {endpoint.name!r}", f"address {endpoint.address!r}"):
            if key in seen:
                raise ConfigError(where, f"{key} is taken by {seen[key]}; expected one of its own")
            seen[key] = where


def _check_unique(pools: Found) -> None:
    seen: dict[tuple[str, str], str] = {}
    for document, pool in pools:
        key = (pool.metadata.namespace, pool.metadata.name)
        if key in seen:
            raise document.error("metadata.name", f"InferencePool {key[0]}/{key[1]} is also in {seen[key]}")
        seen[key] = document.place


def _check_references(found: dict[str, Found]) -> None:
    pools = [pool for _, pool in found["InferencePool"]]
    for document, each in (*found["InferenceObjective"], *found["InferenceModelRewrite"]):
        if not any(refers(each, pool.metadata) for pool in pools):
            what = f"spec.poolRef.name {each.spec.pool_ref.name!r} in namespace {each.metadata.namespace!r}"
            raise _no_such_pool(document.where, what, [pool.metadata.name for pool in pools])
    for document, file in found["endpoints"]:
        for where, endpoint, namespace in _entries(document, file):
            if not any(_selects(pool.spec, pool.metadata, endpoint.labels, namespace) for pool in pools):
                wanted = " or ".join(f"{p.metadata.namespace}: {p.spec.selector.match_labels}" for p in pools)
                got = f"namespace {namespace!r} with labels {dict(endpoint.labels)}"
                raise ConfigError(where, f"{got} is in no InferencePool; expected {wanted}")


def _no_such_pool(where: str, what: str, names: list[str]) -> ConfigError:
    wanted = what.split("'")[1]
    hint = nearest(wanted, names) or f"; expected one of {', '.join(map(repr, names))}"
    return ConfigError(where, f"{what} names no InferencePool here{hint}")
