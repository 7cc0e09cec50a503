"""What Kubernetes says of a pool: pods that are not ready, and HTTPRoutes that lead nowhere.

Sources: Kubernetes core v1 (PodStatus), Gateway API v1 (conditions and their reasons). Nothing is said of HTTPRoutes
and Gateways where they may not be listed, as by the picker's own account, or the cluster has no Gateway API.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, TypeVar

import msgspec
from msgspec import field

from epp.documents.objects import Metadata, Open
from epp.documents.strict import nearest
from epp.errors import UNREADABLE
from epp.pool.apiserver import PODS, ApiError, Kind
from epp.pool.kubernetes import POOLS
from epp.pool.watch import Listed, Source
from tooling.doctor.finding import Finding, hint, problem

_GROUP: Final = "gateway.networking.k8s.io"
_ROUTES: Final = Kind(_GROUP, "v1", "httproutes")
_GATEWAYS: Final = Kind(_GROUP, "v1", "gateways")
_IMAGE: Final = "the image's name and tag in its Deployment, imagePullSecrets; in kind: kind load docker-image"
_WAITING: Final[Mapping[str, str]] = {
    **dict.fromkeys(("ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName"), _IMAGE),
    "CrashLoopBackOff": "see why it ended: kubectl logs {pod} --previous",
    "CreateContainerConfigError": "make the ConfigMap or Secret that it names",
    "Unschedulable": "nodes with what it asks for, or ask for less",
}
"""Reason why a pod is not ready -> what fixes it."""
_ROUTED: Final[Mapping[str, str]] = {
    "InvalidKind": "a gateway that supports InferencePool, or the route of an overlay for this one (envoy-gateway)",
    "BackendNotFound": "in backendRefs: an InferencePool or Service of this namespace",
    "RefNotPermitted": "a ReferenceGrant in the backend's namespace",
    "NoMatchingParent": "in parentRefs: sectionName and port of one of the Gateway's listeners",
    "NoMatchingListenerHostname": "in hostnames: some that a listener of the Gateway has",
    "NotAllowedByListeners": "in the Gateway: listeners[].allowedRoutes.namespaces",
    "AddressNotAssigned": "a load balancer in the cluster; without one, kubectl port-forward to the gateway's Service",
}
"""Reason of a condition that is not True -> what fixes it."""

T = TypeVar("T")


class _Waiting(Open, frozen=True):
    reason: str = ""
    message: str = ""


class _State(Open, frozen=True):
    waiting: _Waiting | None = None


class _Container(Open, frozen=True):
    state: _State = _State()


class _Condition(Open, frozen=True):
    type: str
    status: str
    reason: str = ""
    message: str = ""


class _PodStatus(Open, frozen=True):
    conditions: tuple[_Condition, ...] = ()
    container_statuses: tuple[_Container, ...] = ()
    init_container_statuses: tuple[_Container, ...] = ()


class _Pod(Open, frozen=True):
    metadata: Metadata
    status: _PodStatus = _PodStatus()


class _Ref(Open, frozen=True):
    name: str
    kind: str = "Service"
    namespace: str = ""


class _Rule(Open, frozen=True):
    backend_refs: tuple[_Ref, ...] = ()


class _RouteSpec(Open, frozen=True):
    parent_refs: tuple[_Ref, ...] = ()
    rules: tuple[_Rule, ...] = ()


class _Parent(Open, frozen=True):
    parent_ref: _Ref
    conditions: tuple[_Condition, ...] = ()


class _RouteStatus(Open, frozen=True):
    parents: tuple[_Parent, ...] = ()


class _Route(Open, frozen=True):
    metadata: Metadata
    spec: _RouteSpec
    status: _RouteStatus = _RouteStatus()


class _GatewaySpec(Open, frozen=True):
    class_name: str = field(default="", name="gatewayClassName")


class _GatewayStatus(Open, frozen=True):
    conditions: tuple[_Condition, ...] = ()


class _Gateway(Open, frozen=True):
    metadata: Metadata
    spec: _GatewaySpec
    status: _GatewayStatus = _GatewayStatus()


class _Selector(Open, frozen=True):
    match_labels: dict[str, str] = field(default_factory=dict)


class _PoolSpec(Open, frozen=True):
    selector: _Selector = _Selector()


class _Pool(Open, frozen=True):
    metadata: Metadata
    spec: _PoolSpec


async def examine_cluster(api: Source, namespace: str, name: str) -> tuple[list[str], list[Finding]]:
    """What was looked at beside the pool's ready pods, and what is wrong with it. ApiError where it cannot be asked."""
    pools = [pool for pool in await _all(api, POOLS, namespace, _Pool) if pool.metadata.name == name]
    findings: list[Finding] = []
    for pool in pools:
        findings += await _of_pods(api, namespace, name, pool.spec.selector.match_labels)
    examined = list(dict.fromkeys(finding.subject for finding in findings))
    try:
        routes = await _all(api, _ROUTES, namespace, _Route)
    except ApiError as error:
        if error.status in (403, 404):
            return examined, findings
        raise
    leading = [route for route in routes if name in _backends(route)]
    if not leading:
        named = ", ".join(sorted({each for route in routes for each in _backends(route)})) or "nothing"
        found = f"no HTTPRoute of namespace {namespace} leads to it; they lead to: {named}"
        findings.append(hint(f"InferencePool {namespace}/{name}", "route", found, "name it in a route's backendRefs"))
    gateways: dict[str, Sequence[_Gateway]] = {}
    for route in leading:
        for parent in route.spec.parent_refs:
            at = parent.namespace or namespace
            if at not in gateways:
                gateways[at] = await _all(api, _GATEWAYS, at, _Gateway)
            found_there = _of_parent(route, parent, gateways[at])
            findings += [each for each in found_there if each not in findings]
    examined += [f"HTTPRoute {route.metadata.id}" for route in leading]
    return list(dict.fromkeys([*examined, *(finding.subject for finding in findings)])), findings


async def _of_pods(api: Source, namespace: str, pool: str, labels: Mapping[str, str]) -> list[Finding]:
    selector = ",".join(f"{name}={value}" for name, value in sorted(labels.items()))
    pods = await _all(api, PODS, namespace, _Pod, selector)
    if pods:
        return [found for pod in pods for found in _of_pod(pod)]
    found = f"no pod of namespace {namespace} has the labels {selector}"
    return [problem(f"InferencePool {namespace}/{pool}", "pods", found, "its spec.selector, or the labels of the pods")]


def _of_pod(pod: _Pod) -> Iterator[Finding]:
    status = pod.status
    ready = any(each.type == "Ready" and each.status == "True" for each in status.conditions)
    if ready or pod.metadata.deletion_timestamp is not None:
        return
    containers = (each.state.waiting for each in (*status.init_container_statuses, *status.container_statuses))
    why = [(each.reason, each.message) for each in containers if each and each.reason != "PodInitializing"]
    wrong = sorted(status.conditions, key=lambda each: each.type != "PodScheduled")
    why += [(each.reason, each.message) for each in wrong if each.status == "False" and each.reason]
    reason, message = why[0] if why else ("not ready", "")
    fix = _WAITING.get(reason, "see its events and its log: kubectl describe pod {pod}").format(pod=pod.metadata.name)
    yield problem(pod.metadata.id, "pods", f"{reason}: {message}" if message else reason, fix)


def _of_parent(route: _Route, parent: _Ref, gateways: Sequence[_Gateway]) -> Iterator[Finding]:
    """What is wrong between a route and a Gateway that it names. `gateways`: those of that namespace."""
    subject = f"HTTPRoute {route.metadata.id}"
    at = parent.namespace or route.metadata.namespace
    gateway = next((each for each in gateways if each.metadata.name == parent.name), None)
    if gateway is None:
        names = [each.metadata.name for each in gateways]
        fix = f"in parentRefs: the name of a Gateway{nearest(parent.name, names)}"
        yield problem(subject, "route", f"there is no Gateway {at}/{parent.name}", fix)
        return
    said = [each for each in route.status.parents if each.parent_ref.name == parent.name]
    programmed = list(_wrong(f"Gateway {gateway.metadata.id}", gateway.status.conditions, gateway.spec.class_name))
    yield from programmed
    for each in said:
        yield from _wrong(subject, each.conditions)
    if not said and not programmed:
        found = f"no controller says anything of it, as of Gateway {at}/{parent.name}"
        yield problem(subject, "route", found, f"see its log; its class is {gateway.spec.class_name}")


def _wrong(subject: str, conditions: Sequence[_Condition], class_name: str = "") -> Iterator[Finding]:
    """A finding for each condition that is not as it should be."""
    for each in conditions:
        if each.status == "True" or each.type not in ("Accepted", "Programmed", "ResolvedRefs"):
            continue
        found = f"{each.type} is {each.status}: {each.message or each.reason}"
        kind, namespace, name = subject.lower().replace("/", " ").split()
        fix = f"see kubectl describe {kind} {name} -n {namespace}"
        if each.reason == "Pending":
            fix = f"a controller for gatewayClassName {class_name}: kubectl get gatewayclass"
        level = hint if each.reason == "AddressNotAssigned" else problem
        yield level(subject, "route", found, _ROUTED.get(each.reason, fix))


def _backends(route: _Route) -> list[str]:
    return [backend.name for rule in route.spec.rules for backend in rule.backend_refs]


async def _all(api: Source, kind: Kind, namespace: str, shape: type[T], selector: str = "") -> list[T]:
    """Every object of that kind there. ApiError, also for what is not read."""
    found: list[T] = []
    continuation, more = "", True
    while more:
        try:
            page = msgspec.json.decode(await api.page(kind, namespace, selector, continuation), type=Listed)
            found += [msgspec.json.decode(each, type=shape) for each in page.items or ()]
        except UNREADABLE as error:
            raise ApiError(0, f"{kind} in namespace {namespace}: {error}") from None
        more = bool(continuation := page.metadata.continuation)
    return found
