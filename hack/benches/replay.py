"""Ours against round-robin on shared documents of 8k and 64k tokens, seven pods of 70B: the table of docs/replay.md.

`--priors`: what it costs to learn speeds from priors that are wrong; `--lean`: what it costs to see no answers. Both
are tables of docs/policies.md. Virtual time: the figures do not depend on the machine. Prints Markdown.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import click

from tooling.replay.figures import Figures, Slo, regret, spread
from tooling.replay.policies import Policy, policy
from tooling.replay.replay import Conditions
from tooling.replay.runs import Plan, Rate, Results, Source, compare, saturation
from tooling.replay.table import by_policy
from tooling.simulator.engine import H100_8B
from tooling.simulator.presets import pods

PODS: Final = "7*8xh100-70b"
OURS: Final = "prefix-aware"
BASE: Final = "round-robin"
LOADS: Final = (0.4, 0.7, 0.9)


class Case(NamedTuple):
    workload: str
    requests: int


CASES: Final = (Case("documents-8k", 3000), Case("documents-64k", 1000))
ROWS: Final[Sequence[tuple[str, Callable[[Figures], float], str]]] = (
    ("TTFT p50, s", lambda f: f.ttft_p50, ".3f"),
    ("TTFT p90, s", lambda f: f.ttft_p90, ".2f"),
    ("generated tokens/s", lambda f: f.tokens_per_second, ",.0f"),
    ("$ per 1,000 tokens", lambda f: f.cost, ".4f"),
    ("hit rate, %", lambda f: 100 * f.hit_rate, ".1f"),
)


def rows(case: Case, load: float, results: Results) -> list[str]:
    """Markdown rows of one case: ours, round-robin, and the change from the one to the other."""
    runs = by_policy(results)
    lines = []
    for name, figure, form in ROWS:
        ours, base = (spread([figure(run) for run in runs[which]]) for which in (OURS, BASE))
        change = spread(
            [100 * (figure(a) / figure(b) - 1) for a, b in zip(runs[OURS], runs[BASE], strict=True) if figure(b)]
        )
        lines.append(
            f"| {case.workload}, {load:.0%} | {name} | {ours.mean:{form}} | {base.mean:{form}} "
            f"| {change.mean:+.0f} % ± {change.deviation:.0f} |"
        )
    bound = spread([100 * run.hit_bound for run in runs[OURS]])
    lines.append(f"| {case.workload}, {load:.0%} | bound of the hit rate, % | {bound.mean:.1f} | {bound.mean:.1f} | |")
    return lines


class Pool(NamedTuple):
    """Pods, and their speeds by shell pattern where they are not 1."""

    name: str
    pods: str
    speeds: str


POOLS: Final = (Pool("uniform", "4*h100-8b", "{}"), Pool("mixed", "3*h100-8b,1*h100-8b@0.5", "{default/pod-4: 0.5}"))
WORKLOADS: Final = ("independent", "documents-8k")
WRONG: Final = {"a third": 1 / 3, "right": 1.0, "three times": 3.0}
"""What the priors say of a token's prefill: times the truth."""
LOAD: Final = 0.7
REQUESTS: Final = 2000
KNOWN: Final = "known"
WORKLOADS_LEAN: Final = {
    "independent": 2000, "chats": 3000, "documents-8k": 1500, "documents-64k": 600, "agents": 1000, "tools": 1500,
    "batches": 1200, "reasoning": 600, "bursts": 1500,
}  # fmt: skip
"""Workload -> its requests."""
TRACE_REQUESTS: Final = 1000
WRONG_LEAN: Final = {"a third": 1 / 3, "0.7 times": 0.7, "right": 1.0, "1.3 times": 1.3, "three times": 3.0}
LOAD_LEAN: Final = 0.8


def prior(name: str, times: float, *, learn: bool, speeds: str = "{}") -> Policy:
    """The default with the pods' seconds of prefill, `times` too slow."""
    return Policy(
        name,
        "apiVersion: llm-d.ai/v1\nkind: EndpointPickerConfig\nplugins:\n- type: expected-ttft\n  parameters:\n"
        f"    prefillSecondsPerToken: {times * H100_8B.linear!r}\n"
        f"    attentionSecondsPerTokenPair: {times * H100_8B.attention:.20f}\n"
        f"    learnSpeeds: {str(learn).lower()}\n    speeds: {speeds}\n"
        "- type: max-score-picker\nschedulingProfiles:\n- name: default\n  plugins:\n"
        "  - pluginRef: expected-ttft\n  - pluginRef: max-score-picker\n",
    )


def learnt(workload: str, pool: Pool, seeds: int, share: float, workers: int) -> list[str]:
    """Markdown rows: regret of learned speeds against known ones, by how wrong the priors are."""
    plan = Plan(
        Source(workload, max(1, round(REQUESTS * share))),
        tuple(pods(pool.pods)),
        (
            prior(KNOWN, 1.0, learn=False, speeds=pool.speeds),
            *(prior(name, times, learn=True) for name, times in WRONG.items()),
        ),
        Conditions(),
        Rate("load", LOAD),
        Slo(),
        tuple(range(seeds)),
        workers,
    )
    runs = by_policy(compare(plan, lambda what, ended, total: None))
    known = runs[KNOWN]
    lines = []
    for name in WRONG:
        learned, lost = spread([run.ttft_mean for run in runs[name]]), regret(runs[name], known)
        lines.append(
            f"| {pool.name} | {workload} | {name} | {spread([run.ttft_mean for run in known]).mean:.4f} "
            f"| {learned.mean:.4f} | {100 * lost.mean:+.1f} % ± {100 * lost.deviation:.1f} |"
        )
    return lines


def lean(name: str, requests: int, pool: Pool, seeds: int, share: float, workers: int, watched: float) -> str:
    """A Markdown row: how much longer the mean TTFT is where answers are not shown, by how wrong the priors are, than
    where all are and the priors are right.
    """
    source, kinds = Source(name, max(1, round(requests * share))), tuple(pods(pool.pods))
    rate = LOAD_LEAN * saturation(source.trace(0), kinds, 0, lambda what, ended, total: None)

    def played(conditions: Conditions, wrong: dict[str, float]) -> dict[str, list[Figures]]:
        policies = tuple(prior(each, times, learn=True) for each, times in wrong.items())
        plan = Plan(source, kinds, policies, conditions, Rate("rate", rate), Slo(), tuple(range(seeds)), workers)
        return by_policy(compare(plan, lambda what, ended, total: None))

    shown = played(Conditions(), {KNOWN: 1.0})[KNOWN]
    hidden = played(Conditions(sees_answer=False, watched=watched), WRONG_LEAN)
    cells = [f"{Path(name).name}", pool.name, f"{spread([run.ttft_mean for run in shown]).mean:.3f}"]
    for each in WRONG_LEAN:
        lost = regret(hidden[each], shown)
        cells.append(f"{100 * lost.mean:+.1f} ± {100 * lost.deviation:.1f}")
    return f"| {' | '.join(cells)} |"


@click.command()
@click.option("--seeds", default=3, show_default=True, type=click.IntRange(1))
@click.option("--share", default=1.0, show_default=True, help="Of the requests, for a quick look.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1))
@click.option("--priors", is_flag=True, help="Learned speeds against known ones, with priors three times wrong.")
@click.option("--lean", "hidden", is_flag=True, help="No answers shown against all shown, with priors that are wrong.")
@click.option(
    "--watch-answers", default=0.02, show_default=True, help="With --lean: the share that is shown after all."
)
@click.option("--trace", help="With --lean: a Mooncake trace to play too.")
@click.option("--workload", multiple=True, help="With --lean: these alone.")
def main(
    seeds: int,
    share: float,
    workers: int,
    priors: bool,
    hidden: bool,
    watch_answers: float,
    trace: str | None,
    workload: tuple[str, ...],
) -> None:
    """Print the table."""
    if hidden:
        print(f"| workload | pool | all shown, s | {' | '.join(WRONG_LEAN)} |")
        print(f"|{'---|' * (3 + len(WRONG_LEAN))}")
        for name, requests in (*WORKLOADS_LEAN.items(), *([(trace, TRACE_REQUESTS)] if trace else ())):
            if not workload or name in workload:
                for pool in POOLS:
                    print(lean(name, requests, pool, seeds, share, workers, watch_answers), flush=True)
        return
    if priors:
        print("| pool | workload | priors say | mean TTFT with known speeds, s | learned | regret |")
        print("|---|---|---|---|---|---|")
        for pool in POOLS:
            for name in WORKLOADS:
                for line in learnt(name, pool, seeds, share, workers):
                    print(line, flush=True)
        return
    print("| workload, load | figure | prefix-aware | round-robin | change |")
    print("|---|---|---|---|---|")
    for case in CASES:
        for load in LOADS:
            plan = Plan(
                Source(case.workload, max(1, round(case.requests * share)), "steady"),
                tuple(pods(PODS)),
                (policy(OURS), policy(BASE)),
                Conditions(),
                Rate("load", load),
                Slo(),
                tuple(range(seeds)),
                workers,
            )
            for line in rows(case, load, compare(plan, lambda what, ended, total: None)):
                print(line, flush=True)


if __name__ == "__main__":
    main()
