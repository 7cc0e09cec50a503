"""The Kubernetes objects that only the picker reads, and what all of them say in our words.

Sources: GIE `apix/v1alpha2` (InferenceObjective, InferenceModelRewrite); see `documents.objects` for the others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, Final, TypeVar

from msgspec import Meta

from epp import protocol
from epp.documents.objects import (
    InferencePool,
    Metadata,
    Name,
    Open,
    Pod,
    Strict,
    addresses_of,
    created,
)
from epp.documents.strict import nearest
from epp.parsing.parser import milliseconds
from epp.parsing.request import Objective, Slo
from epp.pool.ranks import ranks_of
from epp.pool.store import Endpoint, PoolState, Rewrite, Target


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
    matches: tuple[RuleMatch, ...] = ()


class RewriteSpec(Strict, frozen=True):
    pool_ref: PoolRef
    rules: Annotated[list[RewriteRule], Meta(min_length=1)]


class InferenceModelRewrite(Open, frozen=True):
    metadata: Metadata
    spec: RewriteSpec


Named = TypeVar("Named", InferenceObjective, InferenceModelRewrite)


def endpoints_of_pod(pod: Pod, ports: Sequence[int]) -> list[Endpoint]:
    """The endpoints at `addresses_of(pod, ports)`. ValueError as there, and as of `ranks_of`."""
    return endpoints_at(addresses_of(pod, ports), pod)


def endpoints_at(addresses: Iterable[tuple[str, str]], pod: Pod) -> list[Endpoint]:
    """An endpoint of this pod for each rank at each (name, `ip:port`). ValueError as of `ranks_of`."""
    labels, node = pod.metadata.labels or {}, pod.spec.node_name or ""
    host = pod.status.host_ip
    found = (Endpoint(name, address, dict(labels), node=node, node_address=host) for name, address in addresses)
    return [rank for endpoint in found for rank in ranks_of(endpoint)]


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
    refuse: Callable[[InferenceObjective, str, str], None],
) -> PoolState:
    """What these objects say of the pool; objectives and rewrites of other pools are left out. `refuse` as in
    `objectives_of`.
    """
    meta, picker = pool.metadata, pool.spec.endpoint_picker_ref
    return PoolState(
        name=meta.name,
        namespace=meta.namespace,
        endpoints=tuple(endpoints),
        objectives=objectives_of((each for each in objectives if refers(each, meta)), refuse),
        rewrites=rewrites_of(each for each in rewrites if refers(each, meta)),
        grpc_port=picker.port.number if picker is not None and picker.port is not None else None,
    )


def refers(each: InferenceObjective | InferenceModelRewrite, pool: Metadata) -> bool:
    """Whether it names this pool, which must be in its namespace."""
    return each.spec.pool_ref.name == pool.name and each.metadata.namespace == pool.namespace


def objectives_of(
    objects: Iterable[InferenceObjective], refuse: Callable[[InferenceObjective, str, str], None]
) -> dict[str, Objective]:
    """What each says, by name; one without a priority has 0, one without our annotations no SLO.

    `refuse` hears of each annotation that is wrong, which then counts as missing: object, path, what is wrong.
    """
    found = {}
    for each in objects:
        ms: dict[str, float | None] = {}
        for name, value in (each.metadata.annotations or {}).items():
            if not name.startswith(protocol.OWN_ANNOTATIONS):
                continue
            try:
                if name not in _SLOS:
                    raise ValueError(f"no such annotation{nearest(name, _SLOS) or '; expected ' + ' or '.join(_SLOS)}")
                ms[name] = milliseconds(value)
            except ValueError as error:
                refuse(each, f"metadata.annotations[{name[:80]!r}]", str(error))
        ttft, tpot = (ms.get(name) for name in _SLOS)
        slo = None if ttft is tpot is None else Slo(ttft, tpot, each.metadata.name)
        found[each.metadata.name] = Objective(each.spec.priority or 0, slo)
    return found


_SLOS: Final = (protocol.SLO_TTFT_ANNOTATION, protocol.SLO_TPOT_ANNOTATION)
