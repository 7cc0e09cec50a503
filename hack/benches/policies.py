"""Ours against other projects' policies on simulated pods, and the table of it in docs/policies.md.

    python -m hack.benches.policies run                  add what is missing to the results
    python -m hack.benches.policies table                write the table from the results

A run is one policy on one workload at one load with one seed. Ours plays twice: with all answers shown to it, as to the
others, and in the lean wiring, which is what our manifests configure. Results are lines of JSON in
`hack/benches/results/policies.jsonl`, so a comparison may be broken off and taken up again; a change of `epp` does not
make them void, deleting the file does.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from tooling.replay.figures import Slo
from tooling.replay.policies import policy
from tooling.replay.replay import Conditions
from tooling.replay.runs import Plan, Rate, Source, compare, saturation
from tooling.simulator.presets import pods

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results" / "policies.jsonl"
DOCUMENT = ROOT / "docs" / "policies.md"
MARKS = ("<!-- made by hack/benches/policies.py -->\n", "<!-- end -->\n")

OURS = "prefix-aware"
LEAN = f"{OURS}, lean"
"""The same where the gateway shows what the picker asks for, as by default in the lean wiring."""
SIGHTS = {LEAN: Conditions(sees_answer=False, watched=0.02)}
"""What others than all answers are shown to."""
OTHERS = (
    "llm-d-affinity", "llm-d-default", "lmetric", "lmetric-llm-d", "dynamo", "sglang", "aibrix",
    "production-stack-load", "production-stack", "kubeai", "least-requests", "session-hash", "round-robin",
)  # fmt: skip
LOADS = (0.4, 0.7, 0.9)
WITHIN = 0.02
"""Differences below are ties."""


@dataclass(frozen=True)
class Workload:
    """`source`: a workload of `warmpath replay`, or `trace`: the file given with `--trace`."""

    name: str
    source: str
    pods: str
    requests: int


WORKLOADS = (
    Workload("conversations of a trace", "trace", "4*h100-8b", 1500),
    Workload("shared documents, 8k", "documents-8k", "4*h100-8b", 1500),
    Workload("shared documents, 64k", "documents-64k", "4*h100-8b", 800),
    Workload("chats, pods empty at first", "chats", "4*h100-8b", 3000),
    Workload("chats", "chats", "4*h100-8b", 12000),
    Workload("agents", "agents", "4*h100-8b", 1500),
    Workload("bursts", "bursts", "4*h100-8b", 1500),
    Workload("independent", "independent", "4*h100-8b", 1500),
    Workload("independent, mixed pods", "independent", "3*h100-8b,1*h100-8b@0.5", 1500),
    Workload("chats, mixed, empty at first", "chats", "3*h100-8b,1*h100-8b@0.5", 3000),
    Workload("conversations, mixed pods", "trace", "3*h100-8b,1*h100-8b@0.5", 1500),
    # The next three were written when all had been chosen.
    Workload("tools, 8 pods", "tools", "8*h100-8b", 3000),
    Workload("batches, 8 mixed pods", "batches", "6*h100-8b,2*h100-8b@0.5", 2000),
    Workload("reasoning, 8 A100", "reasoning", "8*a100-8b", 2000),
    Workload("shared documents, 8k, 7 of 70B", "documents-8k", "7*8xh100-70b", 2500),
)


@dataclass(frozen=True)
class Result:
    """Seconds; goodput 0..1."""

    workload: str
    load: float
    policy: str
    seed: int
    ttft_mean: float
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    tpot_mean: float
    goodput: float
    hit_rate: float
    saturation: float
    """Requests a second that the pods can do of this seed's; the load is a share of it."""

    @property
    def key(self) -> tuple[str, float, str, int]:
        return self.workload, self.load, self.policy, self.seed


def results(file: Path) -> list[Result]:
    if not file.exists():
        return []
    return [Result(**json.loads(line)) for line in file.read_text().splitlines()]


def run(options: argparse.Namespace) -> None:
    found = results(options.results)
    done = {result.key for result in found}
    full = {(result.workload, result.seed): result.saturation for result in found}
    chosen = [w for w in WORKLOADS if not options.workload or w.name in options.workload]
    for workload in chosen:
        source = workload.source if workload.source != "trace" else options.trace
        if source is None:
            continue
        for load in options.load or LOADS:
            for seed in range(options.runs):
                missing = [spec for spec in specs(options) if (workload.name, load, name(spec), seed) not in done]
                if missing and (workload.name, seed) not in full:
                    full[workload.name, seed] = measured(workload, source, seed)
                for spec in missing:
                    result = play(workload, source, load, seed, spec, full[workload.name, seed])
                    with options.results.open("a") as file:
                        file.write(json.dumps(vars(result)) + "\n")
                    print(f"{result.workload}, {result.load:.0%}: {result.policy} {result.ttft_mean:.3f} s, "
                          f"{result.goodput:.1%}", flush=True)  # fmt: skip


def specs(options: argparse.Namespace) -> list[str]:
    return options.policy or [OURS, LEAN, *(str(ROOT / "tooling" / "policies" / f"{other}.yaml") for other in OTHERS)]


def name(spec: str) -> str:
    return spec if spec == LEAN else Path(spec).stem


def measured(workload: Workload, source: str, seed: int) -> float:
    """Saturation, requests a second, for the very requests of this seed: few of them carry much of the work."""
    trace = Source(source, workload.requests).trace(seed)
    return saturation(trace, pods(workload.pods), 0, lambda what, ended, total: None)


def play(workload: Workload, source: str, load: float, seed: int, spec: str, full: float) -> Result:
    plan = Plan(
        source=Source(source, workload.requests),
        kinds=tuple(pods(workload.pods)),
        policies=(policy(OURS if spec == LEAN else spec),),
        conditions=SIGHTS.get(spec, Conditions()),
        rate=Rate("rate", load * full),
        slo=Slo(),
        seeds=(seed,),
    )
    (one,) = compare(plan, lambda what, ended, total: None).runs
    return Result(
        workload.name, load, name(spec), seed, one.ttft_mean, one.ttft_p50, one.ttft_p90, one.ttft_p99,
        one.tpot_mean, one.goodput, one.hit_rate, full,
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("do", choices=("run", "table"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--trace", help="a Mooncake trace; without it its workloads are left out")
    parser.add_argument("--workload", action="append")
    parser.add_argument("--load", action="append", type=float)
    parser.add_argument("--policy", action="append", help="as `warmpath replay --policy` [default: all]")
    parser.add_argument("--runs", type=int, default=1, help="seeds 0, 1 ...")
    options = parser.parse_args()
    if options.do == "run":
        run(options)
    else:
        DOCUMENT.write_text(written(options))
    return 0


Group = dict[str, dict[int, Result]]
"""Policy -> seed -> its run."""


def table(options: argparse.Namespace) -> str:
    """Ours against the best of the others, setting by setting, then everybody's mean TTFT against the best."""
    groups: dict[tuple[str, float], Group] = {}
    for result in results(options.results):
        group = groups.setdefault((result.workload, result.load), {})
        group.setdefault(result.policy, {})[result.seed] = result
    groups = {key: groups[key] for key in sorted(groups, key=_order) if OURS in groups[key]}
    lines = [
        "| workload | load | req/s | ours: mean TTFT, s | best other | difference | lean "
        "| ours: goodput | best other |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_setting(*key, group) for key, group in groups.items()]
    lines += ["", "| mean TTFT, times the best | middle | worst | settings |", "|---|---|---|---|"]
    for each in (OURS, *sorted({each for group in groups.values() for each in group} - {OURS})):
        times = sorted(_times_best(each, group) for group in groups.values() if each in group)
        lines.append(f"| {each} | {median(times):.2f} | {times[-1]:.2f} | {len(times)} |")
    return "\n".join(lines) + "\n"


def _setting(workload: str, load: float, group: Group) -> str:
    """The others are those that played all seeds of ours: the far behind are not asked more than once. Beyond those of
    any other, ours and the lean wiring may have more, which are compared with each other alone.
    """
    every, lean = group[OURS], group.get(LEAN, {})
    rest = {each: runs for each, runs in group.items() if each not in (OURS, LEAN)}
    theirs = set[int]().union(*rest.values())
    ours = {seed: run for seed, run in every.items() if seed in theirs}
    others = {each: runs for each, runs in rest.items() if runs.keys() >= ours.keys()}
    quickest = min(others, key=lambda each: _mean(others[each], "ttft_mean"))
    best = max(others, key=lambda each: _mean(others[each], "goodput"))
    behind = [run.ttft_mean / others[quickest][seed].ttft_mean - 1 for seed, run in ours.items()]
    difference = _mean(ours, "ttft_mean") / _mean(others[quickest], "ttft_mean") - 1
    goodput, its = _mean(ours, "goodput"), _mean(others[best], "goodput")
    rate = load * _mean(ours, "saturation")
    return (
        f"| {workload} | {load:.0%} | {rate:.1f} | {_spread(ours)} "
        f"| {_spread(others[quickest])} {quickest} "
        f"| {_bold(f'{difference:+.1%}' + _plus_minus(behind, '.1%'), difference > WITHIN)} | {_lost(lean, every)} "
        f"| {_bold(f'{goodput:.1%}', its - goodput > WITHIN)} | {its:.1%} {best} |"
    )


def _lost(lean: dict[int, Result], ours: dict[int, Result]) -> str:
    """How much longer the mean TTFT is in the lean wiring, on the seeds that both have played."""
    both = [(lean[seed].ttft_mean, ours[seed].ttft_mean) for seed in lean.keys() & ours.keys()]
    if not both:
        return "not played"
    lost = fmean(a for a, _ in both) / fmean(b for _, b in both) - 1
    return _bold(f"{lost:+.1%}" + _plus_minus([a / b - 1 for a, b in both], ".1%"), lost > WITHIN)


def _times_best(policy: str, group: Group) -> float:
    """Mean TTFT against the best of the setting with all answers shown, on the seeds that all have played."""
    seeds = set[int].intersection(*(set(runs) for runs in group.values()))
    means = {each: fmean(runs[seed].ttft_mean for seed in seeds) for each, runs in group.items()}
    return means[policy] / min(mean for each, mean in means.items() if each not in SIGHTS)


def _order(key: tuple[str, float]) -> tuple[int, float]:
    return [workload.name for workload in WORKLOADS].index(key[0]), key[1]


def _mean(runs: dict[int, Result], figure: str) -> float:
    return fmean(getattr(run, figure) for run in runs.values())


def _spread(runs: dict[int, Result]) -> str:
    return f"{_mean(runs, 'ttft_mean'):.3f}" + _plus_minus([run.ttft_mean for run in runs.values()], ".3f")


def _plus_minus(values: list[float], form: str) -> str:
    """The standard deviation; of a single run nothing is known."""
    return f" ± {stdev(values):{form}}" if len(values) > 1 else ""


def _bold(text: str, strong: bool) -> str:
    return f"**{text}**" if strong else text


def written(options: argparse.Namespace) -> str:
    """docs/policies.md with the table of the results."""
    before, _, rest = DOCUMENT.read_text().partition(MARKS[0])
    return before + MARKS[0] + table(options) + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    sys.exit(main())
