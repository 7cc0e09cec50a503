"""From YAML documents to `PoolState`: which pools there are and what belongs to each.

Sources: llm-d-router `file-discovery` for endpoints files; see `pool.objects` for Kubernetes'.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from epp import protocol
from epp.documents.files import Document
from epp.documents.objects import (
    EndpointsFile,
    InferencePool,
    Pod,
    addresses_in,
    check_unique,
    entries_of,
    selects,
    target_ports,
)
from epp.documents.strict import nearest
from epp.errors import ConfigError
from epp.pool.objects import (
    InferenceModelRewrite,
    InferenceObjective,
    endpoints_at,
    objectives_of,
    preferred,
    refers,
    rewrites_of,
    state_of,
)
from epp.pool.ranks import ranks_of
from epp.pool.store import Endpoint, PoolState

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
    _check_pools(found["InferencePool"])
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
        objectives=objectives_of(_preferred(found["InferenceObjective"]), _refusing(found)),
        rewrites=rewrites_of(_preferred(found["InferenceModelRewrite"])),
    )


def _pool(document: Document, pool: InferencePool, found: dict[str, Found]) -> PoolState:
    meta, spec = pool.metadata, pool.spec
    try:
        ports = target_ports(spec)
    except ValueError as error:
        raise document.error("spec.targetPorts", str(error)) from None
    endpoints: list[tuple[str, Endpoint, str]] = []
    for where, file in found["endpoints"]:
        endpoints += [each for each in _entries(where, file) if selects(pool, each[2], each[1].labels)]
    for where, pod in found["Pod"]:
        if selects(pool, pod.metadata.namespace, pod.metadata.labels or {}):
            addresses = addresses_in(where, pod, ports)
            try:
                endpoints += [(where.where, each, meta.namespace) for each in endpoints_at(addresses, pod)]
            except ValueError as error:
                raise where.error("metadata.labels", str(error)) from None
    _check_endpoints(endpoints)
    picker = spec.endpoint_picker_ref
    if picker is not None and picker.port is None and picker.kind == "Service":
        raise document.error("spec.endpointPickerRef.port", "missing; expected `number: 1..65535` for a Service")
    return state_of(
        pool,
        (endpoint for _, endpoint, _ in endpoints),
        _preferred(found["InferenceObjective"]),
        _preferred(found["InferenceModelRewrite"]),
        _refusing(found),
    )


def _entries(document: Document, file: EndpointsFile) -> list[tuple[str, Endpoint, str]]:
    """(place, endpoint, namespace) of each entry."""
    found = []
    for at, entry, address in entries_of(document, file):
        endpoint = Endpoint(f"{entry.namespace}/{entry.name}", address, dict(entry.labels), node=entry.node)
        try:
            found += [(f"{document.where}: {at}", rank, entry.namespace) for rank in ranks_of(endpoint)]
        except ValueError as error:
            raise document.error(f"{at}.labels", str(error)) from None
    return found


def _refusing(found: dict[str, Found]) -> Callable[[InferenceObjective, str, str], None]:
    def refuse(objective: InferenceObjective, path: str, why: str) -> None:
        document = next(document for document, each in found["InferenceObjective"] if each is objective)
        raise document.error(path, why)

    return refuse


def _preferred(found: Found) -> list[Any]:
    return preferred((document.group, each) for document, each in found)


def _check_endpoints(endpoints: list[tuple[str, Endpoint, str]]) -> None:
    check_unique(
        (where, (f"name {each.name!r}", *(() if each.rank else (f"address {each.address!r}",))))
        for where, each, _ in endpoints
    )


def _check_pools(pools: Found) -> None:
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
            if not any(selects(pool, namespace, endpoint.labels) for pool in pools):
                wanted = " or ".join(f"{p.metadata.namespace}: {p.spec.selector.match_labels}" for p in pools)
                got = f"namespace {namespace!r} with labels {dict(endpoint.labels)}"
                raise ConfigError(where, f"{got} is in no InferencePool; expected {wanted}")


def _no_such_pool(where: str, what: str, names: list[str]) -> ConfigError:
    wanted = what.split("'")[1]
    hint = nearest(wanted, names) or f"; expected one of {', '.join(map(repr, names))}"
    return ConfigError(where, f"{what} names no InferencePool here{hint}")
