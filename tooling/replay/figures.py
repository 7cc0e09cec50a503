"""What a replay is judged by: figures of one run, and of several together."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor
from statistics import fmean, stdev
from typing import Final

from tooling.replay.replay import CompletedRequest, Replay
from tooling.replay.trace import TraceRequest

_CURVE: Final = 100
_SLICES: Final = 60


@dataclass(frozen=True)
class Slo:
    """When a request was served well. Seconds."""

    ttft: float = 2.0
    tpot: float = 0.05


@dataclass(frozen=True)
class ClassFigures:
    """The requests of one class. Times are seconds, shares 0..1."""

    requests: int
    shed: int
    """Requests that flow control refused."""
    ttft_mean: float
    ttft_p50: float
    ttft_p95: float
    ttft_p99: float
    waited_mean: float
    """In flow control."""
    tpot_mean: float
    """A mean over requests."""
    attained: float
    """Share that was served within its own SLO; of those without one, whose first token came within the replay's."""
    tokens_per_second: float
    """Generated tokens, from the first request of the class to the end of its last."""


@dataclass(frozen=True)
class Figures:
    """One run of one policy, foreign traffic left out. Times are seconds, shares 0..1."""

    policy: str
    seed: int
    requests: int
    failed: int
    """Requests that never got a whole answer."""
    retried: int
    """Attempts beyond the first."""
    seconds: float
    """From the first request to the end of the last."""
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    answer_mean: float
    """From the first attempt to the last token, a mean over requests."""
    tpot_mean: float
    """Seconds per generated token after the first, a mean over requests."""
    tpot_p90: float
    tokens_per_second: float
    """Generated tokens, over `seconds`."""
    prompt_tokens_per_second: float
    goodput: float
    """Share of the requests that were answered within their own SLO, else within the replay's."""
    hit_rate: float
    """Share of prompt tokens that the pod did not compute: found in its own cache, or loaded from lower tiers."""
    hit_bound: float
    """The same in one cache without end."""
    imbalance: float
    """Busy time of the busiest pod over the mean."""
    preemptions: int
    apart: float | None
    """Share of the requests whose prompt another pod computed; None where no pod has a role."""
    stranded: int
    """Requests whose KV was computed by another pod and never fetched."""
    cost: float
    """Dollars per 1,000 generated tokens: all pods, for `seconds`."""
    curve: tuple[float, ...]
    """TTFT at 0 %, 1 % ... 100 % of the requests."""
    timeline: tuple[float, ...]
    """P90 of TTFT of the requests sent in each sixtieth of the run; -1 where there were none."""
    shares: tuple[float, ...]
    """Of the requests, by pod."""
    hits: Mapping[str, float]
    """`hit_rate` by tier: device, l1, l2; empty where no tiers are simulated."""
    classes: Mapping[str, ClassFigures]
    """By class, where the workload has some."""


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in order, linear between neighbours; 0 of none."""
    if not ordered:
        return 0.0
    at = share * (len(ordered) - 1)
    low, high = floor(at), ceil(at)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def figures(policy: str, seed: int, play: Replay, slo: Slo) -> Figures:
    """The figures of a finished run."""
    ours = [(ask, served) for ask, served in zip(play.trace.asks, play.served, strict=True) if not served.foreign]
    good = [(ask, served) for ask, served in ours if not served.failed]
    ttfts = sorted(served.first - served.sent for _, served in good)
    tpots = sorted((served.ended - served.first) / (ask.output - 1) for ask, served in good if ask.output > 1)
    begin = min((served.sent for _, served in ours), default=0.0)
    seconds = max((served.ended for _, served in ours), default=0.0) - begin
    generated = sum(ask.output for ask, _ in good)
    prompts = sum(ask.tokens for ask, _ in good)
    busy = [pod.busy for pod in play.pods]
    price = sum(pod.kind.price for pod in play.pods)
    within = sum(_within(ask, served, slo.ttft, slo.tpot) for ask, served in good)
    return Figures(
        policy=policy,
        seed=seed,
        requests=len(ours),
        failed=len(ours) - len(good),
        retried=sum(served.attempts - 1 for _, served in ours),
        seconds=seconds,
        ttft_mean=fmean(ttfts) if ttfts else 0.0,
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p90=percentile(ttfts, 0.9),
        ttft_p99=percentile(ttfts, 0.99),
        answer_mean=fmean(served.ended - served.sent for _, served in good) if good else 0.0,
        tpot_mean=fmean(tpots) if tpots else 0.0,
        tpot_p90=percentile(tpots, 0.9),
        tokens_per_second=generated / seconds if seconds else 0.0,
        prompt_tokens_per_second=prompts / seconds if seconds else 0.0,
        goodput=within / len(ours) if ours else 0.0,
        hit_rate=sum(served.cached for _, served in good) / prompts if prompts else 0.0,
        hit_bound=play.trace.cached_bound(),
        imbalance=max(busy) / fmean(busy) if any(busy) else 1.0,
        preemptions=sum(pod.preemptions for pod in play.pods),
        apart=sum(served.prefill >= 0 for _, served in ours) / (len(ours) or 1) if play.conditions.roles else None,
        stranded=play.stranded,
        cost=price * seconds / 3600 / generated * 1000 if generated else 0.0,
        curve=tuple(percentile(ttfts, share / _CURVE) for share in range(_CURVE + 1)),
        timeline=_timeline([served for _, served in good], begin),
        shares=tuple(
            sum(served.pod == number for _, served in ours) / (len(ours) or 1) for number in range(len(play.pods))
        ),
        hits=_hits([served for _, served in good], prompts) if play.tiered else {},
        classes={
            label: _class([(ask, served) for ask, served in ours if ask.label == label], slo)
            for label in sorted({ask.label for ask, _ in ours} - {""})
        },
    )


def _class(own: Sequence[tuple[TraceRequest, CompletedRequest]], slo: Slo) -> ClassFigures:
    good = [(ask, served) for ask, served in own if not served.failed]
    ttfts = sorted(served.first - served.sent for _, served in good)
    seconds = max((served.ended for _, served in good), default=0.0) - min(served.sent for _, served in own)
    tpots = [(served.ended - served.first) / (ask.output - 1) for ask, served in good if ask.output > 1]
    in_time = sum(_within(ask, served, slo.ttft, None) for ask, served in good)
    return ClassFigures(
        requests=len(own),
        shed=sum(served.shed for _, served in own),
        ttft_mean=fmean(ttfts) if ttfts else 0.0,
        ttft_p50=percentile(ttfts, 0.5),
        ttft_p95=percentile(ttfts, 0.95),
        ttft_p99=percentile(ttfts, 0.99),
        waited_mean=fmean(served.waited for _, served in own),
        tpot_mean=fmean(tpots) if tpots else 0.0,
        attained=in_time / len(own),
        tokens_per_second=sum(ask.output for ask, _ in good) / seconds if seconds > 0 else 0.0,
    )


def _within(ask: TraceRequest, served: CompletedRequest, ttft: float, tpot: float | None) -> bool:
    """Whether it was served within its own SLO; where it has none, within these."""
    most_first, most_each = (ttft, tpot) if ask.slo is None else (ask.slo.ttft, ask.slo.tpot)
    if most_first is not None and served.first - served.sent > most_first:
        return False
    return most_each is None or ask.output < 2 or (served.ended - served.first) / (ask.output - 1) <= most_each


def _hits(served: Sequence[CompletedRequest], prompts: int) -> dict[str, float]:
    l1, l2 = sum(one.l1 for one in served), sum(one.l2 for one in served)
    found = {"device": sum(one.cached for one in served) - l1 - l2, "l1": l1, "l2": l2}
    return {tier: tokens / prompts if prompts else 0.0 for tier, tokens in found.items()}


def _timeline(served: Sequence[CompletedRequest], begin: float) -> tuple[float, ...]:
    slices: list[list[float]] = [[] for _ in range(_SLICES)]
    width = (max((one.sent for one in served), default=0.0) - begin) / _SLICES or 1.0
    for one in served:
        slices[min(_SLICES - 1, int((one.sent - begin) / width))].append(one.first - one.sent)
    return tuple(percentile(sorted(each), 0.9) if each else -1.0 for each in slices)


@dataclass(frozen=True)
class Spread:
    """A figure over several runs."""

    mean: float
    deviation: float
    """Standard deviation; 0 of one run."""


def spread(values: Sequence[float]) -> Spread:
    return Spread(fmean(values), stdev(values) if len(values) > 1 else 0.0)


def regret(runs: Sequence[Figures], oracle: Sequence[Figures]) -> Spread:
    """How much longer a policy's mean TTFT is than the oracle's on the same seeds: 0.1 is ten percent."""
    best = {one.seed: one.ttft_mean for one in oracle}
    return spread([one.ttft_mean / best[one.seed] - 1 if best[one.seed] else 0.0 for one in runs])
