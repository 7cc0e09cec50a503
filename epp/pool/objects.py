"""The Kubernetes objects we read, as far as we read them, and what they say in our words.

Sources: GIE `api/v1` (InferencePool), `apix/v1alpha2` (InferenceObjective, InferenceModelRewrite), Kubernetes core v1
(Pod). Specs that are ours are strict: a field we do not know is a mistake. Of the rest we read what we need.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from epp import protocol
from epp.pool.store import Endpoint, PoolState, Rewrite, Target, address_of

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


class PoolRef(Strict, frozen=True):
    name: Name
    group: str = protocol.POOL_GROUP
    kind: str = "InferencePool"


class ObjectiveSpec(Strict, frozen=True):
    pool_ref: PoolRef
    priority: int | None = None


class InferenceObjective(Open, frozen=True):
    metadata: Metadata
    spec: ObjectiveSpec


class ModelMatch(Strict, frozen=True):
    value: Name
    type: Annotated[str, Meta(pattern="^Exact$")] = "Exact"


class RuleMatch(Strict, frozen=True):
    model: ModelMatch | None = None


class RuleTarget(Strict, frozen=True):
    model_rewrite: Name
    weight: Annotated[int, Meta(ge=1, le=1_000_000)] | None = None


class RewriteRule(Strict, frozen=True):
    targets: Annotated[list[RuleTarget], Meta(min_length=1)]
    matches: list[RuleMatch] = []


class RewriteSpec(Strict, frozen=True):
    pool_ref: PoolRef
    rules: Annotated[list[RewriteRule], Meta(min_length=1)]


class InferenceModelRewrite(Open, frozen=True):
    metadata: Metadata
    spec: RewriteSpec


Named = TypeVar("Named", InferenceObjective, InferenceModelRewrite)


class Condition(Open, frozen=True):
    type: str
    status: str


class PodStatus(Open, frozen=True):
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: list[Condition] | None = None


class PodSpec(Open, frozen=True):
    node_name: str | None = None


class Pod(Open, frozen=True):
    metadata: Metadata
    spec: PodSpec = PodSpec()
    status: PodStatus = PodStatus()


def endpoints_of_pod(pod: Pod, ports: Sequence[int]) -> list[Endpoint]:
    """One endpoint for each of the pool's target ports this pod serves; none while it is not ready or going away.

    The rank in the name is the port's place among the pool's ports, also where the pod serves only some of them.
    ValueError if its address is none or its active ports are no numbers.
    """
    meta, status = pod.metadata, pod.status
    ready = any(each.type == "Ready" and each.status == "True" for each in status.conditions or ())
    if not ready or not status.pod_ip or meta.deletion_timestamp is not None:
        return []
    active = _active_ports(meta.annotations or {})
    name = f"{meta.namespace}/{meta.name}"
    return [
        Endpoint(
            name=name if len(ports) == 1 else f"{name}-rank-{rank}",
            address=address_of(status.pod_ip, port),
            labels=dict(meta.labels or {}),
            node=pod.spec.node_name or "",
        )
        for rank, port in enumerate(ports)
        if active is None or port in active
    ]


def rewrites_of(objects: Iterable[InferenceModelRewrite]) -> tuple[Rewrite, ...]:
    """The rules of several InferenceModelRewrites in order of precedence: oldest object first, then rule order."""
    rules = []
    for each in sorted(objects, key=lambda each: created(each.metadata)):
        for rule in each.spec.rules:
            targets = tuple(Target(target.model_rewrite, target.weight) for target in rule.targets)
            models = tuple(match.model.value for match in rule.matches if match.model is not None)
            if models:
                rules.append(Rewrite(models, targets))
            if len(models) < len(rule.matches) or not rule.matches:  # a match without a model matches any
                rules.append(Rewrite((), targets))
    return tuple(rules)


def preferred(objects: Iterable[tuple[str, Named]]) -> list[Named]:
    """(API group, object) to one object for each namespace and name: of two groups, llm-d's own wins."""
    found: dict[tuple[str, str], tuple[int, Named]] = {}
    for group, each in objects:
        key, rank = (each.metadata.namespace, each.metadata.name), protocol.OBJECTIVE_GROUPS.index(group)
        if key not in found or rank <= found[key][0]:
            found[key] = rank, each
    return [each for _, each in found.values()]


def state_of(
    pool: InferencePool,
    endpoints: Iterable[Endpoint],
    objectives: Iterable[InferenceObjective],
    rewrites: Iterable[InferenceModelRewrite],
) -> PoolState:
    """What these objects say of the pool; objectives and rewrites of other pools are left out."""
    meta, picker = pool.metadata, pool.spec.endpoint_picker_ref
    return PoolState(
        name=meta.name,
        namespace=meta.namespace,
        endpoints=tuple(endpoints),
        objectives=priorities_of(each for each in objectives if refers(each, meta)),
        rewrites=rewrites_of(each for each in rewrites if refers(each, meta)),
        grpc_port=picker.port.number if picker is not None and picker.port is not None else None,
    )


def refers(each: InferenceObjective | InferenceModelRewrite, pool: Metadata) -> bool:
    """Whether it names this pool, which must be in its namespace."""
    return each.spec.pool_ref.name == pool.name and each.metadata.namespace == pool.namespace


def priorities_of(objects: Iterable[InferenceObjective]) -> dict[str, int]:
    """Name -> priority of each; one that names none has 0."""
    return {each.metadata.name: each.spec.priority or 0 for each in objects}


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
