"""Reads files and directories into the resources we know, and checks that they fit together."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from epp.documents.files import ENDINGS, Document, expectation, files_in, read_documents
from epp.documents.objects import EndpointsFile, Pod, entries_of
from epp.errors import ConfigError
from gateway.endpoints import check_members, selected
from gateway.matching import allows, intersect, parent_id, refers
from gateway.resources import Gateway, HTTPRoute, InferencePool, ParentRef

KINDS: Final[Mapping[str, type[Any]]] = {"Gateway": Gateway, "HTTPRoute": HTTPRoute, "InferencePool": InferencePool}

IRRELEVANT: Final = frozenset(
    """
    ClusterRole ClusterRoleBinding ConfigMap CronJob CustomResourceDefinition DaemonSet Deployment EndpointPickerConfig
    Endpoints EndpointSlice GatewayClass HorizontalPodAutoscaler InferenceModelRewrite InferenceObjective Job
    LimitRange Namespace NetworkPolicy PersistentVolume PersistentVolumeClaim PodDisruptionBudget PodMonitor
    PriorityClass PrometheusRule ReplicaSet ResourceQuota Role RoleBinding ScaledObject Secret Service ServiceAccount
    ServiceMonitor StatefulSet StorageClass
    """.split()  # noqa: SIM905 - a list of forty names in quotes is harder to read
)
"""Kinds that stand beside ours in a cluster's files and say nothing about how a gateway routes."""


@dataclass(frozen=True)
class Resources:
    """All a gateway has to know, checked: every reference leads to something in here."""

    gateways: tuple[Gateway, ...] = ()
    routes: tuple[HTTPRoute, ...] = ()
    pools: tuple[InferencePool, ...] = ()
    endpoints: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """`ip:port` of the endpoints of each pool, by `namespace/name`."""


Placed = list[tuple[Document, Any]]


def load(paths: Sequence[Path]) -> Resources:
    """Read every document in these files and directories. ConfigError for what is wrong or not supported."""
    found: dict[str, Placed] = {kind: [] for kind in (*KINDS, "Pod", "endpoints")}
    for path in paths:
        if not (files := files_in([path])):
            raise ConfigError(str(path), f"no {', '.join(ENDINGS)} file in here (directories below are not read)")
        for document in (each for file in files for each in read_documents(file)):
            _sort_in(document, found)
    for kind in KINDS:
        _check_unique(found[kind])
    _check_listeners(found["Gateway"])
    for document, route in found["HTTPRoute"]:
        _check_route(document, route, found)
    pools = [pool for _, pool in found["InferencePool"]]
    check_members(pools, found["endpoints"])
    return Resources(
        gateways=tuple(gateway for _, gateway in found["Gateway"]),
        routes=tuple(route for _, route in found["HTTPRoute"]),
        pools=tuple(pools),
        endpoints={pool.metadata.id: selected(pool, found["endpoints"], found["Pod"]) for pool in pools},
    )


def _sort_in(document: Document, found: dict[str, Placed]) -> None:
    kind = document.kind
    if not kind and "endpoints" not in document.content:
        raise document.error("kind", f"missing; expected {', '.join(sorted(KINDS))}, or a list under `endpoints`")
    if not kind:
        file = document.shape(EndpointsFile)
        list(entries_of(document, file))  # where no pool asks for them too, they are checked
        found["endpoints"].append((document, file))
    elif kind == "Pod":
        if document.content.get("apiVersion") == "v1":
            found[kind].append((document, document.shape(Pod)))
    elif kind in KINDS:
        found[kind].append((document, document.shape(KINDS[kind])))
    elif kind not in IRRELEVANT:
        raise document.error("kind", f"{kind} is not supported; {expectation(kind, sorted(KINDS))}")


def _check_unique(objects: Placed) -> None:
    seen: dict[str, str] = {}
    for document, each in objects:
        if each.metadata.id in seen:
            raise document.error("metadata.name", f"the same object is also in {seen[each.metadata.id]}")
        seen[each.metadata.id] = document.place


def _check_listeners(found: Placed) -> None:
    places: dict[tuple[int, str | None], str] = {}
    for document, gateway in found:
        names: set[str] = set()
        for index, listener in enumerate(gateway.spec.listeners):
            path, place = f"spec.listeners[{index}]", (listener.port, listener.hostname)
            if listener.name in names:
                raise document.error(f"{path}.name", f"{listener.name} is taken; expected one of its own")
            if place in places:
                same = f"port {listener.port} and hostname {listener.hostname or '*'}"
                message = f"{same} are those of {places[place]}; expected another port or hostname"
                raise document.error(path, message)
            names.add(listener.name)
            places[place] = f"Gateway {gateway.metadata.id} listener {listener.name}"


def _check_route(document: Document, route: HTTPRoute, found: dict[str, Placed]) -> None:
    gateways = {gateway.metadata.id: gateway for _, gateway in found["Gateway"]}
    pools = {pool.metadata.id for _, pool in found["InferencePool"]}
    for index, parent in enumerate(route.spec.parent_refs):
        _check_parent(document, f"spec.parentRefs[{index}]", route, parent, gateways)
    for number, rule in enumerate(route.spec.rules):
        for index, backend in enumerate(rule.backend_refs):
            path = f"spec.rules[{number}].backendRefs[{index}]"
            if backend.namespace not in (None, route.metadata.namespace):
                only = f"supported: the route's own, {route.metadata.namespace}"
                raise document.error(f"{path}.namespace", f"{backend.namespace} is not supported; {only}")
            if f"{route.metadata.namespace}/{backend.name}" not in pools:
                raise document.error(f"{path}.name", _unknown(f"InferencePool {backend.name}", backend.name, pools))


def _check_parent(
    document: Document, path: str, route: HTTPRoute, parent: ParentRef, gateways: Mapping[str, Gateway]
) -> None:
    id = parent_id(route, parent)
    if (gateway := gateways.get(id)) is None:
        raise document.error(f"{path}.name", _unknown(f"Gateway {id}", parent.name, gateways))
    listeners = gateway.spec.listeners
    names = [listener.name for listener in listeners]
    if parent.section_name not in (None, *names):
        message = f"no listener {parent.section_name} in Gateway {id}; "
        raise document.error(f"{path}.sectionName", message + expectation(str(parent.section_name), names))
    chosen = [listener for listener in listeners if refers(parent, listener)]
    if not chosen:
        ports = ", ".join(str(listener.port) for listener in listeners)
        message = f"no such listener with port {parent.port} in Gateway {id}; its ports: {ports}"
        raise document.error(f"{path}.port", message)
    if not (chosen := [listener for listener in chosen if allows(gateway, listener, route)]):
        message = f"Gateway {id} allows routes of its own namespace only (listeners[].allowedRoutes.namespaces.from)"
        raise document.error(path, message)
    if not any(intersect(listener.hostname, route.spec.hostnames) for listener in chosen):
        hosts = ", ".join(listener.hostname or "*" for listener in chosen)
        raise document.error("spec.hostnames", f"none is among those of Gateway {id}: {hosts}")


def _unknown(what: str, name: str, ids: Iterable[str]) -> str:
    known = sorted(each.rpartition("/")[2] for each in ids)
    if not known:
        return f"no {what} in these files; they have none at all"
    return f"no {what} in these files; {expectation(name, known, there='they have')}"
