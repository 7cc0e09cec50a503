"""`Pool`: the endpoints we pick from now, and the objectives and model rewrites that belong to them.

`Endpoint`: one model server, an address or a data-parallel rank behind it. `Load`: what its metrics said last.
"""

import asyncio
import random
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import msgspec

from epp.documents.addresses import join, normal
from epp.parsing.request import NO_OBJECTIVE, Objective


class Load(msgspec.Struct, frozen=True):
    """One scrape of an endpoint's metrics. Zero where the engine does not report a figure.

    Names and meanings are vLLM's (0.32, `GET /metrics`); other engines are mapped onto them by `pool.scrape`.
    """

    waiting: int = 0
    """Requests queued in the engine (`vllm:num_requests_waiting`)."""
    running: int = 0
    """Requests in the running batch (`vllm:num_requests_running`)."""
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0..1 (`vllm:kv_cache_usage_perc`)."""
    block_size: int = 0
    """Tokens per KV block (`vllm:cache_config_info`)."""
    blocks: int = 0
    """KV blocks on the device (`vllm:cache_config_info` num_gpu_blocks)."""
    lora_running: frozenset[str] = frozenset()
    lora_waiting: frozenset[str] = frozenset()
    lora_max: int = 0
    """Adapter slots (`vllm:lora_requests_info` max_lora)."""
    prefix_queries: int = 0
    """Tokens looked up in the prefix cache since the engine started (`vllm:prefix_cache_queries_total`)."""
    prefix_hits: int = 0
    """Tokens of those found (`vllm:prefix_cache_hits_total`)."""
    prompt_tokens: int = 0
    """Prompt tokens processed since start (`vllm:prompt_tokens_total`)."""
    first_tokens: int = 0
    """First tokens produced since start (`vllm:time_to_first_token_seconds_count`)."""
    computed_tokens: int = 0
    """Prompt tokens computed since start, not those found in a cache
    (`vllm:prompt_tokens_by_source_total{source="local_compute"}`)."""
    generated_tokens: int = 0
    """Tokens generated since start (`vllm:generation_tokens_total`)."""
    steps: int = 0
    """Engine steps since start (`vllm:iteration_tokens_total_count`)."""
    custom: Mapping[str, float] = {}
    """Metrics that the configuration names for its engine, by name (`core-metrics-extractor`: `customMetrics`)."""
    at: float | None = None
    """When it was scraped, seconds on the monotonic clock; None = never."""


class ServedModel(msgspec.Struct, frozen=True, gc=False):
    """A model that an endpoint serves, as its `/v1/models` says."""

    id: str
    parent: str
    """The base model of a LoRA adapter; "" of one that is none."""
    entry: bytes
    """All of it, JSON."""


@dataclass(eq=False, slots=True, weakref_slot=True)
class Endpoint:
    """One model server, an address or a data-parallel rank behind it. Identity is the object: it lives as long as the
    server does.

    `load` is replaced, never edited, by each scrape; so state that plugins key by endpoint outlives scrapes, and a
    pod that comes back under the same address is a new endpoint with nothing remembered about it.
    """

    name: str
    """Unique in its pool: `namespace/pod`, with `-rank-N` where a pod has several ports, or ranks behind one."""
    address: str
    """`ip:port`, IPv6 in brackets: exactly what Envoy gets. Ranks behind one port share it."""
    labels: Mapping[str, str] = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    node: str = ""
    """The machine it runs on, by its name; "" where it is unknown. Endpoints of a node share the node's KV memory."""
    node_address: str = ""
    """The IP of that machine, where Kubernetes says it."""
    models: tuple[ServedModel, ...] | None = None
    """What it serves; None while that is not known."""
    rank: int | None = None
    """Which data-parallel rank behind its address it is, from 0; None where the address is one endpoint."""

    def __repr__(self) -> str:
        return f"<{self.name} {self.address}>"


class Target(msgspec.Struct, frozen=True):
    """A model a rewrite may choose. Without a weight it counts as 1."""

    model: str
    weight: int | None = None


class Rewrite(msgspec.Struct, frozen=True):
    """One rule of an InferenceModelRewrite: requests for one of `models` (none: for any) ask for a target instead."""

    models: tuple[str, ...]
    targets: tuple[Target, ...]


class PoolState(msgspec.Struct, frozen=True):
    """All a source (files, Kubernetes) says of one pool. `rewrites` are in order of precedence: oldest object first."""

    name: str
    namespace: str = "default"
    endpoints: tuple[Endpoint, ...] = ()
    objectives: Mapping[str, Objective] = {}
    """By the name of the InferenceObjective."""
    rewrites: tuple[Rewrite, ...] = ()
    grpc_port: int | None = None
    """Port of the pool's endpointPickerRef, where it names one."""


class Pool:
    """The endpoints as one immutable tuple, replaced as a whole; used on the event loop only.

    `on_added` and `on_removed` are called after the new tuple is in place, removals first; `on_filled` before them
    where the state before had none; `on_scraped` after an endpoint has a new load. `ready` turns true with the first
    state, even an empty one.
    """

    def __init__(self, name: str, namespace: str = "default", *, random: random.Random) -> None:
        self.name = name
        self.namespace = namespace
        self.ready = False
        self._first = asyncio.Event()
        self.on_filled: list[Callable[[], None]] = []
        self.on_added: list[Callable[[Endpoint], None]] = []
        self.on_removed: list[Callable[[Endpoint], None]] = []
        self.on_scraped: list[Callable[[Endpoint], None]] = []
        self._random = random
        self._endpoints: tuple[Endpoint, ...] = ()
        self._by_name: dict[str, Endpoint] = {}
        self._by_address: dict[str, list[Endpoint]] = {}
        self._by_ip: dict[str, list[Endpoint]] = {}
        self._objectives: Mapping[str, Objective] = {}
        self._rewrites: dict[str | None, tuple[tuple[str, ...], list[int]]] = {}
        self.targets: Mapping[str, str] = {}
        """Models that are rewritten -> the first of the models that are asked for instead."""

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return self._endpoints

    @property
    def by_name(self) -> Mapping[str, Endpoint]:
        """The same by their names, which are unique."""
        return self._by_name

    @property
    def is_new(self) -> bool:
        """It has never had a state yet; `ready` may turn false later, this does not turn true again."""
        return not self._first.is_set()

    async def first_state(self, seconds: float) -> None:
        """Wait for it, at most `seconds`."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._first.wait(), seconds)

    def apply(self, state: PoolState) -> None:
        """Take over everything a source says."""
        self._objectives = state.objectives
        self._rewrites = _rewrites(state.rewrites)
        self.targets = {name: models[0] for name, (models, _) in self._rewrites.items() if name is not None}
        self.replace(state.endpoints)

    def replace(self, endpoints: Iterable[Endpoint]) -> None:
        """The pool's endpoints from now on, in this order.

        One with the name, address and labels of an endpoint we have is that endpoint: the old object stays, with its
        load. Any other is new. Names must be unique, and addresses too but for the ranks of one, of which all must be
        there; else ValueError and nothing changes.
        """
        new = tuple(_same(self._by_name.get(endpoint.name), endpoint) for endpoint in endpoints)
        by_name, by_address = {endpoint.name: endpoint for endpoint in new}, ranks_by_address(new)
        if not all(map(_may_share, by_address.values())) or len(by_name) < len(new):
            raise ValueError(f"endpoints of one pool need names and addresses of their own: {new!r}")
        old, self._endpoints, self._by_name = self._endpoints, new, by_name
        self._by_address, self._by_ip = by_address, {}
        for endpoint in new:
            self._by_ip.setdefault(_split(endpoint.address)[0], []).append(endpoint)
        self.ready = True
        filled = bool(new) and not old and not self.is_new
        self._first.set()
        for filled_listener in self.on_filled if filled else ():
            filled_listener()
        kept = set(old).intersection(new)
        for gone in (endpoint for endpoint in old if endpoint not in kept):
            for listener in self.on_removed:
                listener(gone)
        for added in (endpoint for endpoint in new if endpoint not in kept):
            for listener in self.on_added:
                listener(added)

    def scraped(self, endpoint: Endpoint, load: Load) -> None:
        """The endpoint's load from now on."""
        endpoint.load = load
        for listener in self.on_scraped:
            listener(endpoint)

    async def run_for_each(
        self, what: str, work: Callable[[Endpoint], Coroutine[Any, Any, None]], left: Callable[[Endpoint], None]
    ) -> None:
        """For ever: a task called `what` does the `work` of each endpoint in the pool; `left` is called with those that
        go.
        """
        tasks: dict[Endpoint, asyncio.Task[None]] = {}
        async with asyncio.TaskGroup() as group:

            def begin(endpoint: Endpoint) -> None:
                tasks[endpoint] = group.create_task(work(endpoint), name=f"{what} {endpoint.name}")

            def end(endpoint: Endpoint) -> None:
                if (task := tasks.pop(endpoint, None)) is not None:
                    task.cancel()
                left(endpoint)

            self.on_added.append(begin)
            self.on_removed.append(end)
            try:
                for endpoint in self._endpoints:
                    begin(endpoint)
                await asyncio.Event().wait()
            finally:
                self.on_added.remove(begin)
                self.on_removed.remove(end)

    def candidates(self, subset: tuple[str, ...] | None) -> Sequence[Endpoint]:
        """The endpoints the gateway allows, in the pool's order; None = no restriction.

        A subset names `ip:port` or just an ip (all its ports), IPv6 with or without brackets. Unknown ones are ignored.
        """
        if subset is None:
            return self._endpoints
        found: set[Endpoint] = set()
        for entry in subset:
            if (there := self._by_address.get(entry)) is not None:
                found.update(there)
            else:
                found.update(self._matching(entry))
        return tuple(endpoint for endpoint in self._endpoints if endpoint in found)

    def why_empty(self, subset: tuple[str, ...] | None) -> str:
        """One sentence for a request that got no candidates."""
        pool = f"pool {self.namespace}/{self.name}"
        if not self.ready:
            return f"{pool} is not loaded yet"
        if not self._endpoints:
            return f"{pool} has no ready endpoint"
        if subset is None:
            return f"{pool} had no ready endpoint a moment ago"
        if not subset:
            return f"the gateway's subset is empty: it allows none of the {len(self._endpoints)} endpoints of {pool}"
        named = ", ".join(entry[:64] for entry in subset[:3]) + (", …" if len(subset) > 3 else "")
        return f"none of the {len(self._endpoints)} endpoints of {pool} is in the gateway's subset ({named})"

    def endpoint_at(self, address: str, rank: int | None = None) -> Endpoint | None:
        """The endpoint with this `ip:port`, however it is spelt, or None. Of several ranks the one that was asked for,
        if it is there, else the first.
        """
        there = self.ranks_at(address)
        return next((endpoint for endpoint in there if endpoint.rank == rank), there[0] if there else None)

    def ranks_at(self, address: str) -> Sequence[Endpoint]:
        """All endpoints with this `ip:port`, however it is spelt, in the order of their ranks."""
        if (there := self._by_address.get(address)) is not None:
            return there
        ip, port = _split(address)
        return self._by_address.get(join(ip, port), ()) if port else ()

    def objective(self, name: str) -> Objective:
        """What the InferenceObjective of this name says; NO_OBJECTIVE: we do not know it."""
        return self._objectives.get(name, NO_OBJECTIVE)

    @property
    def rewrites(self) -> bool:
        """Whether there is any rule for `rewrite`."""
        return bool(self._rewrites)

    def rewrite(self, model: str) -> str:
        """The model to ask for instead of `model`: a rule that names it wins over one for any, then the oldest."""
        rule = self._rewrites.get(model) or self._rewrites.get(None)
        if rule is None:
            return model
        models, weights = rule
        return models[0] if len(models) == 1 else self._random.choices(models, cum_weights=weights)[0]

    def _matching(self, entry: str) -> Sequence[Endpoint]:
        ip, port = _split(entry)
        if not port and ip in self._by_ip:
            return self._by_ip[ip]
        if not port and ":" in ip:  # `::1:8000`: an address of its own, or `[::1]:8000` without its brackets
            ip, _, port = entry.strip().rpartition(":")
            ip = normal(ip)
        return self._by_address.get(join(ip, port), ())


def ranks_by_address(endpoints: Iterable[Endpoint]) -> dict[str, list[Endpoint]]:
    """Those that share an address, in the order of their ranks."""
    found: dict[str, list[Endpoint]] = {}
    for endpoint in sorted(endpoints, key=lambda endpoint: endpoint.rank or 0):
        found.setdefault(endpoint.address, []).append(endpoint)
    return found


def _same(old: Endpoint | None, new: Endpoint) -> Endpoint:
    if old is None or (old.address, old.labels, old.node) != (new.address, new.labels, new.node):
        return new
    return old


def _may_share(there: Sequence[Endpoint]) -> bool:
    """Whether these can have one address: it is a single one, or each is another of its ranks, none missing."""
    return [endpoint.rank for endpoint in there] in ([None], [*range(len(there))])


def _split(address: str) -> tuple[str, str]:
    """`ip:port`, `[v6]:port`, `[v6]` or a bare ip to (ip in its normal form, port or "")."""
    text = address.strip()
    if text.startswith("["):
        ip, _, port = text[1:].partition("]")
        return normal(ip), port.removeprefix(":")
    if text.count(":") == 1:
        ip, _, port = text.partition(":")
        return normal(ip), port
    return normal(text), ""


def _rewrites(rules: tuple[Rewrite, ...]) -> dict[str | None, tuple[tuple[str, ...], list[int]]]:
    """Model (None: any) -> targets and their cumulated weights, of the first rule that names it."""
    found: dict[str | None, tuple[tuple[str, ...], list[int]]] = {}
    for rule in rules:
        if not rule.targets:
            continue
        weights = list(accumulate(1 if target.weight is None else target.weight for target in rule.targets))
        choice = tuple(target.model for target in rule.targets), weights
        for model in rule.models or (None,):
            found.setdefault(model, choice)
    return found
