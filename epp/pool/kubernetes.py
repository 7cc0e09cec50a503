"""Pools from Kubernetes: InferencePools, the Pods they select, and what is said of them, followed as they change.

Sources: GIE `api/v1` (InferencePool), llm-d-router `apix/v1alpha2`. Each kind is watched by a task of its own
(`pool.watch`); a pool's state is put together in a thread, and the event loop only takes it over.
"""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain, groupby
from typing import Any, Final, TypeVar

import msgspec
from msgspec import inspect

from epp import protocol
from epp.documents.objects import InferencePool, Metadata, Pod, PoolSpec, Selector, TargetPort, created
from epp.documents.strict import nearest
from epp.errors import UNREADABLE, ConfigError
from epp.pool.apiserver import PODS, ApiError, Kind
from epp.pool.objects import InferenceModelRewrite, InferenceObjective, endpoints_of_pod, preferred, state_of
from epp.pool.store import Endpoint, Pool, PoolState
from epp.pool.watch import Source, Watch
from epp.telemetry.metrics import Metrics

log = logging.getLogger("warmpath")

T = TypeVar("T")

POOLS: Final = Kind(protocol.POOL_GROUP, "v1", "inferencepools")
OBJECTIVES: Final = tuple(Kind(group, "v1alpha2", "inferenceobjectives") for group in protocol.OBJECTIVE_GROUPS)
REWRITES: Final = tuple(Kind(group, "v1alpha2", "inferencemodelrewrites") for group in protocol.OBJECTIVE_GROUPS)

_QUIET: Final = 0.05
"""Seconds after a change was applied until the next is: a thousand events become a few."""
_TROUBLES: Final = frozenset(
    {"kubernetes-away", "kubernetes-forbidden", "kubernetes-refused", "kubernetes-watch-failed"}
)
"""What a watch may report; each lasts until no watch reports it any more."""


@dataclass(frozen=True)
class Named:
    """The InferencePools of these names, whether they exist yet or not."""

    names: tuple[str, ...]


@dataclass(frozen=True)
class Labelled:
    """The InferencePools a label selector matches at the start. One that loses the label counts as deleted."""

    selector: str
    names: tuple[str, ...]
    """Those it matched; see `labelled`."""


@dataclass(frozen=True)
class Selected:
    """No InferencePool: one pool of the Pods a label selector matches, with these target ports."""

    name: str
    selector: str
    ports: tuple[int, ...]


class KubePools:
    """The pools of one namespace. Which pools there are is fixed at the start.

    A pool is `ready` from when its InferencePool, its Pods and everything said of it were seen, until its InferencePool
    is deleted. While the API server is away pools stay as they were (`metrics.degraded("kubernetes-away")`, until
    `recovered`).
    """

    def __init__(
        self,
        wanted: Named | Labelled | Selected,
        namespace: str,
        source: Source,
        metrics: Metrics,
        random: random.Random,
    ) -> None:
        self._namespace = namespace
        self._source = source
        self._metrics = metrics
        self._random = random
        self._changed = asyncio.Event()
        self._group = asyncio.TaskGroup()
        self._troubles: dict[Watch[Any], str] = {}
        self._newcomers: set[str] = set()
        self._missing: set[str] = set()
        """Pools to be served that are not there, as was said."""
        self._wanted = wanted
        names = (wanted.name,) if isinstance(wanted, Selected) else wanted.names
        self._followed = [_Followed(Pool(name, namespace, random=random)) for name in names]
        self.pools = [each.pool for each in self._followed]
        """In the order of their names as given; `states` has the same order."""
        self._pools: Watch[InferencePool] | None = None
        self._objectives: dict[str, Watch[InferenceObjective]] = {}
        self._rewrites: dict[str, Watch[InferenceModelRewrite]] = {}
        if isinstance(wanted, Selected):
            self._followed[0].fixed = (_pool_of(wanted, namespace), wanted.selector)
        else:
            labels = wanted.selector if isinstance(wanted, Labelled) else ""
            self._pools = self._watch(POOLS, _reader(InferencePool), labels)
            self._objectives = {k.group: self._watch(k, _reader(InferenceObjective)) for k in OBJECTIVES}
            self._rewrites = {k.group: self._watch(k, _reader(InferenceModelRewrite)) for k in REWRITES}

    @property
    def states(self) -> list[PoolState]:
        """What was applied last; of a pool that was not there yet, its name."""
        return [each.state for each in self._followed]

    async def watch(self) -> None:
        """Follow the API server, for ever; once in the life of this object."""
        async with self._group:
            for watch in self._definition_watches():
                self._group.create_task(watch.run())
            self._changed.set()
            while True:
                await self._changed.wait()
                self._changed.clear()
                for each in self._followed:
                    await self._refresh(each)
                self._note_newcomers()
                await asyncio.sleep(_QUIET)

    def _definition_watches(self) -> list[Watch[Any]]:
        """The watches of all but Pods."""
        pools = [] if self._pools is None else [self._pools]
        return [*pools, *self._objectives.values(), *self._rewrites.values()]

    def _watches(self) -> list[Watch[Any]]:
        return [*self._definition_watches(), *(each.pods for each in self._followed if each.pods is not None)]

    def _watch(self, kind: Kind, read: Callable[[bytes], T], selector: str = "") -> Watch[T]:
        chance = random.Random(self._random.getrandbits(64))
        return Watch(self._source, kind, self._namespace, read, self, chance, selector=selector)

    async def _refresh(self, each: "_Followed") -> None:
        """Take over what changed of a pool, as soon as everything about it is known."""
        if (found := self._definition(each)) is None:
            return
        pool, selector = found
        if each.pods is None or each.pods.selector != selector:
            if each.pods is not None and each.watching is not None:
                each.watching.cancel()
                self._troubles.pop(each.pods, None)
                self._note_recoveries()
            each.pods = self._watch(PODS, _pod, selector)
            each.watching = self._group.create_task(each.pods.run())
        if not each.pods.synced or not all(watch.answered for watch in self._definition_watches()):
            return
        seen = (pool, each.pods, each.pods.revision, *(watch.revision for watch in self._definition_watches()[1:]))
        if seen == each.seen:
            return
        each.seen = seen
        state, refused = await self._build(pool, each.pods)
        each.state = state
        each.pool.apply(state)
        for detail in refused - each.refused:
            self._metrics.degraded("kubernetes-object-refused", detail)
        each.refused = refused

    def _definition(self, each: "_Followed") -> tuple[InferencePool, str] | None:
        """The pool and its selector; None while we do not know it. A pool that was deleted is emptied."""
        if each.fixed is not None:
            return each.fixed
        if self._pools is None or not (self._pools.synced or self._pools.absent):
            return None
        if (pool := self._pools.objects().get(each.pool.name)) is not None:
            self._missing.discard(each.pool.name)
            if not self._missing:
                self._metrics.recovered("pool-missing")
            return pool, ",".join(f"{key}={value}" for key, value in sorted(pool.spec.selector.match_labels.items()))
        if each.pool.ready:
            log.warning("InferencePool %s/%s was deleted", each.pool.namespace, each.pool.name)
            each.state, each.seen = PoolState(each.pool.name, each.pool.namespace), ()
            each.pool.apply(each.state)
            each.pool.ready = False
        elif each.pool.name not in self._missing:
            self._missing.add(each.pool.name)
            self._metrics.degraded("pool-missing", self._why_missing(each.pool), lasting=True)
        return None

    def _why_missing(self, pool: Pool) -> str:
        if self._pools is not None and self._pools.absent:
            return f"this cluster has no InferencePools ({POOLS}); install their definition, as hack/crds does"
        names = () if self._pools is None else self._pools.objects().keys()
        return f"there is no InferencePool {pool.namespace}/{pool.name}{nearest(pool.name, names)}"

    async def _build(self, pool: InferencePool, pods: Watch[Pod]) -> tuple[PoolState, set[str]]:
        """The pool's state, and what is wrong with some of its objects; put together while requests go on."""
        ports = [port.number for port in pool.spec.target_ports]
        objectives = [(group, each) for group, w in self._objectives.items() for each in w.objects().values()]
        rewrites = [(group, each) for group, w in self._rewrites.items() for each in w.objects().values()]
        found = pods.objects()

        def build() -> tuple[PoolState, set[str]]:
            endpoints, refused = _endpoints(found, ports)

            def refuse(each: InferenceObjective, path: str, why: str) -> None:
                refused.add(f"inferenceobjectives {each.metadata.id}: {path}: {why}")

            return state_of(pool, endpoints, preferred(objectives), preferred(rewrites), refuse), refused

        return await asyncio.to_thread(build)

    def changed(self) -> None:
        """`Listener`: look again, soon."""
        self._changed.set()

    def trouble(self, watch: Watch[Any], reason: str, detail: str) -> None:
        """`Listener`: a watch is in trouble, or out of it."""
        away = "kubernetes-away" in self._troubles.values()
        if reason:
            self._troubles[watch] = reason
        else:
            self._troubles.pop(watch, None)
        if reason and not (away and reason == "kubernetes-away"):  # one server, one message about it
            self._metrics.degraded(reason, detail, lasting=True)
        self._note_recoveries()

    def refused(self, detail: str) -> None:
        """`Listener`: an object is not what we expect."""
        self._metrics.degraded("kubernetes-object-refused", detail)

    def _note_newcomers(self) -> None:
        """Say so once where a label selector matches more pools than it did at the start."""
        if isinstance(self._wanted, Labelled) and self._pools is not None:
            newcomers = self._pools.objects().keys() - {pool.name for pool in self.pools} - self._newcomers
            for name in sorted(newcomers):
                self._newcomers.add(name)
                self._metrics.degraded("pool-not-served", f"InferencePool {name!r} is new; a restart will serve it")

    def _note_recoveries(self) -> None:
        for over in _TROUBLES - set(self._troubles.values()):
            self._metrics.recovered(over)


@dataclass(eq=False)
class _Followed:
    """A pool, the watch of its Pods, and what of them was applied last."""

    pool: Pool
    fixed: tuple[InferencePool, str] | None = None
    """What would be in its InferencePool, and its Pods' selector, where there is no such object."""
    pods: Watch[Pod] | None = None
    watching: asyncio.Task[None] | None = None
    """The task of `pods`."""
    seen: tuple[object, ...] = ()
    refused: set[str] = field(default_factory=set)
    state: PoolState = field(init=False)

    def __post_init__(self) -> None:
        self.state = PoolState(self.pool.name, self.pool.namespace)


class _Listed(msgspec.Struct):
    metadata: Metadata


class _List(msgspec.Struct):
    items: list[_Listed]


async def labelled(selector: str, namespace: str, source: Source) -> Labelled:
    """The InferencePools that have these labels now. ConfigError if there are none or they cannot be listed."""
    try:
        listed = msgspec.json.decode(await source.page(POOLS, namespace, selector, ""), type=_List)
    except (ApiError, *UNREADABLE) as error:
        raise ConfigError("", f"cannot list InferencePools in namespace {namespace!r}: {error}") from None
    if not listed.items:
        what = f"no InferencePool in namespace {namespace!r} has labels {selector!r}"
        raise ConfigError("", f"{what}; expected at least one at the start")
    return Labelled(selector, tuple(sorted(each.metadata.name for each in listed.items)))


def _pool_of(wanted: Selected, namespace: str) -> InferencePool:
    ports = [TargetPort(number) for number in wanted.ports]
    return InferencePool(Metadata(wanted.name, namespace), PoolSpec(Selector({}), ports))


def _endpoints(pods: Mapping[str, Pod], ports: list[int]) -> tuple[list[Endpoint], set[str]]:
    """The endpoints of these Pods, by name, and what is wrong with some.

    An address two Pods have is the younger's: the other's network is gone, and its status not yet.
    """
    found: dict[str, list[Endpoint]] = {}
    refused: set[str] = set()
    for pod in sorted(pods.values(), key=lambda pod: (created(pod.metadata), pod.metadata.name)):
        try:
            endpoints = endpoints_of_pod(pod, ports)
        except ValueError as error:
            refused.add(f"pods {pod.metadata.namespace}/{pod.metadata.name}: {error}")
        else:
            found.update((address, list(ranks)) for address, ranks in groupby(endpoints, lambda each: each.address))
    return sorted(chain.from_iterable(found.values()), key=lambda each: each.name), refused


def _pod(raw: bytes) -> Pod:
    return msgspec.json.decode(raw, type=Pod)


def _reader(shape: type[T]) -> Callable[[bytes], T]:
    """Reads objects of which a newer API server may say more than we know."""
    known = inspect.type_info(shape)

    return lambda raw: msgspec.convert(_pruned(msgspec.json.decode(raw), known), shape)


def _pruned(content: Any, known: inspect.Type) -> Any:
    """The content without the fields its type does not have, as the API server itself prunes."""
    match known:
        case inspect.StructType(fields=fields) if isinstance(content, dict):
            return {f.encode_name: _pruned(content[f.encode_name], f.type) for f in fields if f.encode_name in content}
        case inspect.ListType(item_type=item) if isinstance(content, list):
            return [_pruned(each, item) for each in content]
        case inspect.UnionType(types=types):
            shapes: Iterable[inspect.Type] = (each for each in types if isinstance(each, inspect.StructType))
            return next((_pruned(content, each) for each in shapes), content)
        case _:
            return content
