"""What flow control is for, in short replays: docs/flow-control.md has the figures of long ones."""

from dataclasses import dataclass
from statistics import fmean

import pytest

from tooling.replay.figures import Figures, Slo
from tooling.replay.policies import FLOW, policy
from tooling.replay.replay import Conditions
from tooling.replay.runs import Plan, Rate, Source, compare
from tooling.simulator.presets import pods

pytestmark = pytest.mark.long

DEFAULT = "prefix-aware"
SEEDS = (0, 1)


def played(
    workload: str, requests: int, rate: float, *policies: str, only: str | None = None
) -> dict[str, list[Figures]]:
    """A run for each seed, by policy, on four H100. `rate`: requests a second."""
    plan = Plan(
        Source(workload, requests),
        tuple(pods("4*h100-8b")),
        tuple(policy(each) for each in policies),
        Conditions(),
        Rate("rate", rate),
        Slo(),
        SEEDS,
        only=only,
    )
    runs = compare(plan, lambda what, ended, total: None).runs
    return {each: [run for run in runs if run.policy == each] for each in policies}


@dataclass(frozen=True)
class Beside:
    """What one class has beside another, means of the seeds."""

    without: float
    """TTFT (p95) without flow control, in times of what the class has alone."""
    with_it: float
    """The same with flow control."""
    others: float
    """Tokens a second of the other class with flow control, in times of those without."""


def beside(workload: str, requests: int, rate: float, ours: str, others: str) -> Beside:
    """`rate`: requests a second of both classes."""
    both = played(workload, requests, rate, DEFAULT, DEFAULT + FLOW)
    alone = played(workload, requests, rate, DEFAULT, only=ours)[DEFAULT]

    def ttft(runs: list[Figures]) -> float:
        return fmean(run.classes[ours].ttft_p95 for run in runs)

    def tokens(runs: list[Figures]) -> float:
        return fmean(run.classes[others].tokens_per_second for run in runs)

    plain, flow = both[DEFAULT], both[DEFAULT + FLOW]
    return Beside(ttft(plain) / ttft(alone), ttft(flow) / ttft(alone), tokens(flow) / tokens(plain))


def test_interactive_requests_beside_jobs_wait_little_longer_than_alone() -> None:
    """The targets are 1.5 times, which five minutes of this keep (docs/flow-control.md: 1.40), and 95 % of the jobs'
    throughput. Here the bound is 2 times: the p95 of 600 requests depends on how the few jobs of 75 s fall, and is 1.2
    to 1.8 times by the seed.
    """
    found = beside("interactive-and-batch", 1800, 24.1, "interactive", "batch")
    assert found.without > 20, "the case is one that needs flow control"
    assert found.with_it < 2
    assert found.others >= 0.95


def test_a_quiet_tenant_beside_one_that_floods_waits_hardly_longer_than_alone() -> None:
    """The target, 1.2 times, holds at this size: 1.05."""
    found = beside("noisy-neighbour", 600, 24.5, "quiet", "flooding")
    assert found.without > 5, "the case is one that needs flow control"
    assert found.with_it < 1.2
    assert found.others > 0.9


def test_below_seventy_percent_of_load_nobody_waits_longer() -> None:
    """The target, TTFT within 1 %, holds at this size. 17 requests a second are 63 % of what these pods can do."""
    found = played("independent", 1200, 17.0, DEFAULT, DEFAULT + FLOW)
    plain, flow = found[DEFAULT], found[DEFAULT + FLOW]
    assert fmean(run.ttft_mean for run in flow) < 1.01 * fmean(run.ttft_mean for run in plain)
    assert fmean(run.ttft_p50 for run in flow) < 1.01 * fmean(run.ttft_p50 for run in plain)
