"""Several policies over the same requests, several times: what `warmpath replay` does before it shows anything."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from epp import plugin
from epp.documents.strict import nearest, short
from epp.errors import ConfigError
from tooling.replay.figures import Figures, Slo, figures
from tooling.replay.generators import WORKLOADS, Arrivals
from tooling.replay.policies import ORACLE, Policy, policy
from tooling.replay.replay import Conditions, Replay
from tooling.replay.trace import Trace, read_mooncake
from tooling.simulator.presets import PodKind, lowers

REFERENCE: Final = "prefix-aware"
"""The strategy under which a pool's saturation is measured."""
SECONDS: Final = 300
"""How long a workload runs when its number of requests is not given."""
_FEWEST: Final = 500
_MOST: Final = 10_000
"""Bounds of that number."""
_MEASURED: Final = 40_000
"""Requests made to measure saturation; it takes as many of them as it needs."""

Progress = Callable[[str, int, int], None]
"""Called with (what runs, requests ended, requests in all)."""


@dataclass(frozen=True)
class Source:
    """Where requests come from: a workload's name, or the file of a Mooncake trace."""

    name: str
    requests: int | None = None
    """How many; None: all of a file, and of a workload what comes in `SECONDS`."""
    arrivals: Arrivals = "poisson"

    def trace(self, seed: int) -> Trace:
        """Raises ConfigError."""
        return _trace(self, seed)


@lru_cache(2)
def _trace(source: Source, seed: int) -> Trace:
    make = WORKLOADS.get(source.name)
    if make is not None:
        return make(seed, source.requests or _MOST, source.arrivals)
    path = Path(source.name)
    if not path.exists():
        known = nearest(source.name, WORKLOADS) or "; expected a file or one of " + ", ".join(WORKLOADS)
        raise ConfigError("trace", f"there is no file or workload {short(source.name)}{known}")
    return read_mooncake(path, seed=seed, limit=source.requests)


@dataclass(frozen=True)
class Rate:
    """How fast requests come: `value` a second, as a share of what the pool can do, or times the trace's own."""

    kind: str = "times"
    """`times`, `rate` or `load`."""
    value: float = 1.0


@dataclass(frozen=True)
class Plan:
    """A whole comparison."""

    source: Source
    kinds: tuple[PodKind, ...]
    policies: tuple[Policy, ...]
    conditions: Conditions
    rate: Rate
    slo: Slo
    seeds: tuple[int, ...] = (0,)
    workers: int = 1
    """Processes."""
    only: str | None = None
    """Play the requests of this class alone, at the times that they have among the others."""
    class_slos: Mapping[str, plugin.Slo] = field(default_factory=dict)
    """By class: within what its requests are to be served, instead of what the workload says."""


@dataclass(frozen=True)
class Results:
    """What a comparison found."""

    trace: str
    rate: float
    """Requests a second, in the mean."""
    saturation: float | None
    """Requests a second that the pool completes when it never runs dry; None where it was not asked for."""
    pods: tuple[str, ...]
    runs: tuple[Figures, ...]
    """By policy, then by seed."""


@dataclass(frozen=True)
class _Run:
    plan: Plan
    policy: Policy
    seed: int
    factor: float


def compare(plan: Plan, progress: Progress) -> Results:
    """Run it all. Raises ConfigError."""
    for failure in plan.conditions.failures:
        if not 0 <= failure.pod < len(plan.kinds):
            raise ConfigError("fail", f"there are {len(plan.kinds)} pods, so no pod-{failure.pod + 1}")
    first = plan.source.trace(plan.seeds[0])
    _check_fit(first, plan.kinds)
    first.with_slos(plan.class_slos)
    if plan.only is not None:
        first.only(plan.only)
    lowers(plan.kinds, plan.conditions.l2, plan.conditions.pods_per_node)
    full = None
    if plan.rate.kind == "load":
        enough = replace(plan.source, requests=_MEASURED).trace(plan.seeds[0]) if _is_made(plan.source) else first
        full = saturation(enough, plan.kinds, plan.seeds[0], progress, plan.conditions)
    plan, wanted = _settled(plan, full)
    runs = []
    for each in plan.policies:
        for seed in plan.seeds:
            own = plan.source.trace(seed).rate
            runs.append(_Run(plan, each, seed, wanted / own if wanted and own else plan.rate.value))
    found: dict[tuple[str, int], Figures] = {}
    for run, result in _all(runs, plan.workers, progress):
        found[run.policy.name, run.seed] = result
    return Results(
        first.name,
        wanted or first.rate * plan.rate.value,
        full,
        tuple(kind.name for kind in plan.kinds),
        tuple(found[run.policy.name, run.seed] for run in runs),
    )


def _is_made(source: Source) -> bool:
    """Whether it can have any number of requests."""
    return source.name in WORKLOADS


def _settled(plan: Plan, full: float | None) -> tuple[Plan, float | None]:
    """The plan with its number of requests, and the requests a second to play (None: the trace's own, scaled)."""
    wanted = None if plan.rate.kind == "times" else plan.rate.value * (full or 1.0)
    source = plan.source
    if _is_made(source) and source.requests is None:
        rate = wanted or plan.rate.value * plan.source.trace(plan.seeds[0]).rate
        source = replace(source, requests=round(min(_MOST, max(_FEWEST, rate * SECONDS))))
    return replace(plan, source=source), wanted


def saturation(
    trace: Trace, kinds: Sequence[PodKind], seed: int, progress: Progress, given: Conditions | None = None
) -> float:
    """Requests a second that the pods complete under the reference strategy when something always waits.

    Of the conditions only the tiers count: nothing goes wrong, and nobody is in a hurry.
    """
    given = given or Conditions()
    total = len(trace.asks)
    play = Replay(
        trace.without_slos(),
        kinds,
        policy(REFERENCE).build,
        Conditions(saturate=True, l2=given.l2, pods_per_node=given.pods_per_node),
        seed,
        lambda ended: progress("saturation", ended, total),
    )
    ended = [served.ended for served in play.run() if served.ended >= 0]
    return len(ended) / max(ended)


def _all(runs: Sequence[_Run], workers: int, progress: Progress) -> Iterator[tuple[_Run, Figures]]:
    if workers == 1 or len(runs) == 1:
        for run in runs:
            yield run, _one(run, progress)
        return
    with ProcessPoolExecutor(min(workers, len(runs)), get_context("spawn")) as pool:
        futures = {pool.submit(_one, run): run for run in runs}
        for future in as_completed(futures):
            run = futures[future]
            yield run, future.result()
            count = len(run.plan.source.trace(run.seed).asks)
            progress(_label(run), count, count)


def _one(run: _Run, progress: Progress = lambda what, ended, total: None) -> Figures:
    plan = run.plan
    trace = plan.source.trace(run.seed).scaled(run.factor)
    if plan.class_slos:
        trace = trace.with_slos(plan.class_slos)
    if plan.only is not None:
        trace = trace.only(plan.only)
    total, label = len(trace.asks), _label(run)
    play = Replay(
        trace,
        plan.kinds,
        run.policy.build,
        plan.conditions if run.policy.roles else replace(plan.conditions, roles=()),
        run.seed,
        lambda ended: progress(label, ended, total),
    )
    play.run()
    return figures(run.policy.name, run.seed, play, plan.slo)


def _label(run: _Run) -> str:
    return run.policy.name if len(run.plan.seeds) == 1 else f"{run.policy.name}, seed {run.seed}"


def _check_fit(trace: Trace, kinds: Sequence[PodKind]) -> None:
    """Every request must fit in every pod: no picker knows which do not."""
    longest = max(ask.tokens + ask.output for ask in trace.asks)
    for kind in kinds:
        if longest > kind.parameters.capacity:
            raise ConfigError(
                "pods", f"{kind.name} holds {kind.parameters.capacity} tokens; the longest request has {longest}"
            )


def with_oracle(policies: Sequence[Policy]) -> tuple[Policy, ...]:
    """The policies and, last, the oracle that regret is measured against."""
    if any(each.name == ORACLE for each in policies):
        return tuple(policies)
    return (*policies, policy(ORACLE))
