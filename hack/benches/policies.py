"""Ours against other projects' policies on simulated pods, and the table of it in docs/policies.md.

    python -m hack.benches.policies run                  add what is missing to the results
    python -m hack.benches.policies table                write the table from the results

A run is one policy on one workload at one load with one seed. Results are lines of JSON in `docs/policies.jsonl`, so a
comparison may be broken off and taken up again; a change of `epp` does not make them void, deleting the file does.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median, stdev

from epp.sim.presets import pods
from epp.sim.replay.figures import Slo
from epp.sim.replay.play import Conditions
from epp.sim.replay.policies import policy
from epp.sim.replay.runs import Plan, Rate, Source, compare, saturation

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "docs" / "policies.jsonl"
DOCUMENT = ROOT / "docs" / "policies.md"
MARKS = ("<!-- made by hack/benches/policies.py -->\n", "<!-- end -->\n")

OURS = "prefix-aware"
RIVALS = (
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
    Workload("chats", "chats", "4*h100-8b", 3000),
    Workload("agents", "agents", "4*h100-8b", 1500),
    Workload("bursts", "bursts", "4*h100-8b", 1500),
    Workload("independent", "independent", "4*h100-8b", 1500),
    Workload("independent, mixed pods", "independent", "3*h100-8b,1*h100-8b@0.5", 1500),
    Workload("chats, mixed pods", "chats", "3*h100-8b,1*h100-8b@0.5", 3000),
    Workload("conversations, mixed pods", "trace", "3*h100-8b,1*h100-8b@0.5", 1500),
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
    """Requests a second that the pods can do; the load is a share of it."""

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
    full = {result.workload: result.saturation for result in found}
    chosen = [w for w in WORKLOADS if not options.workload or w.name in options.workload]
    for workload in chosen:
        source = workload.source if workload.source != "trace" else options.trace
        if source is None:
            continue
        for load in options.load or LOADS:
            for seed in range(options.runs):
                missing = [spec for spec in specs(options) if (workload.name, load, name(spec), seed) not in done]
                if missing:
                    if workload.name not in full:
                        full[workload.name] = measured(workload, source)
                    for result in play(workload, source, load, seed, missing, full[workload.name]):
                        with options.results.open("a") as file:
                            file.write(json.dumps(vars(result)) + "\n")
                        print(f"{result.workload}, {result.load:.0%}: {result.policy} {result.ttft_mean:.3f} s, "
                              f"{result.goodput:.1%}", flush=True)  # fmt: skip


def specs(options: argparse.Namespace) -> list[str]:
    return options.policy or [OURS, *(str(ROOT / "epp" / "rivals" / f"{rival}.yaml") for rival in RIVALS)]


def name(spec: str) -> str:
    return Path(spec).stem


def measured(workload: Workload, source: str) -> float:
    trace = Source(source, workload.requests).trace(0)
    return saturation(trace, pods(workload.pods), 0, lambda what, ended, total: None)


def play(workload: Workload, source: str, load: float, seed: int, missing: list[str], full: float) -> Iterator[Result]:
    plan = Plan(
        source=Source(source, workload.requests),
        kinds=tuple(pods(workload.pods)),
        policies=tuple(policy(spec) for spec in missing),
        conditions=Conditions(),
        rate=Rate("rate", load * full),
        slo=Slo(),
        seeds=(seed,),
    )
    for one in compare(plan, lambda what, ended, total: None).runs:
        yield Result(
            workload.name, load, one.policy, seed, one.ttft_mean, one.ttft_p50, one.ttft_p90, one.ttft_p99,
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


Group = dict[str, list[Result]]
"""Policy -> its runs."""


def table(options: argparse.Namespace) -> str:
    """Ours against the best of the others, setting by setting, then everybody's mean TTFT against the best."""
    groups: dict[tuple[str, float], Group] = {}
    for result in results(options.results):
        groups.setdefault((result.workload, result.load), {}).setdefault(result.policy, []).append(result)
    lines = [
        "| workload | load | req/s | ours: mean TTFT, s | best other | difference | ours: goodput | best other |",
        "|---|---|---|---|---|---|---|---|",
    ]
    lines += [_setting(*key, groups[key]) for key in sorted(groups, key=_order) if OURS in groups[key]]
    others = sorted({each for group in groups.values() for each in group} - {OURS})
    lines += ["", "| mean TTFT, times the best | middle | worst |", "|---|---|---|"]
    for each in (OURS, *others):
        times = sorted(
            _mean(group[each], "ttft_mean") / min(_mean(runs, "ttft_mean") for runs in group.values())
            for group in groups.values()
            if each in group and OURS in group
        )
        lines.append(f"| {each} | {median(times):.2f} | {times[-1]:.2f} |")
    return "\n".join(lines) + "\n"


def _setting(workload: str, load: float, group: Group) -> str:
    others = {each: runs for each, runs in group.items() if each != OURS}
    quickest = min(others, key=lambda each: _mean(others[each], "ttft_mean"))
    best = max(others, key=lambda each: _mean(others[each], "goodput"))
    ours, its = _mean(group[OURS], "ttft_mean"), _mean(others[quickest], "ttft_mean")
    goodput = _mean(group[OURS], "goodput")
    return (
        f"| {workload} | {load:.0%} | {load * group[OURS][0].saturation:.1f} | {_spread(group[OURS])} "
        f"| {_spread(others[quickest])} {quickest} | {_bold(ours / its - 1, ours / its - 1 > WITHIN)} "
        f"| {goodput:.1%} | {_mean(others[best], 'goodput'):.1%} {best} |"
    )


def _order(key: tuple[str, float]) -> tuple[int, float]:
    return [workload.name for workload in WORKLOADS].index(key[0]), key[1]


def _mean(runs: list[Result], figure: str) -> float:
    return fmean(getattr(run, figure) for run in runs)


def _spread(runs: list[Result]) -> str:
    """The mean and, of several runs, the standard deviation."""
    values = [run.ttft_mean for run in runs]
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def _bold(share: float, strong: bool) -> str:
    text = f"{share:+.1%}"
    return f"**{text}**" if strong else text


def written(options: argparse.Namespace) -> str:
    """docs/policies.md with the table of the results."""
    before, _, rest = DOCUMENT.read_text().partition(MARKS[0])
    return before + MARKS[0] + table(options) + MARKS[1] + rest.partition(MARKS[1])[2]


if __name__ == "__main__":
    sys.exit(main())
