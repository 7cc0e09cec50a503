"""The comparison as a table for a terminal."""

from collections.abc import Callable, Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from epp.telemetry.text import printable
from tooling.replay.figures import ClassFigures, Figures, Spread, regret, spread
from tooling.replay.policies import ORACLE, TOGETHER
from tooling.replay.runs import Plan, Results

Column = tuple[str, Callable[[Figures], float], str]
"""Heading, figure, format."""
COLUMNS: Final[Sequence[Column]] = (
    ("TTFT\np50 s", lambda f: f.ttft_p50, ".3f"),
    ("\np90 s", lambda f: f.ttft_p90, ".2f"),
    ("\np99 s", lambda f: f.ttft_p99, ".2f"),
    ("TPOT\nms", lambda f: f.tpot_mean * 1000, ".1f"),
    ("tokens\n/s", lambda f: f.tokens_per_second, ",.0f"),
    ("good\n%", lambda f: f.goodput * 100, ".1f"),
    ("hits\n%", lambda f: f.hit_rate * 100, ".1f"),
    ("of\nbound %", lambda f: 100 * f.hit_rate / f.hit_bound if f.hit_bound else 0.0, ".0f"),
    ("imba-\nlance", lambda f: f.imbalance, ".2f"),
    ("pre-\nempted", lambda f: f.preemptions, ".0f"),
    ("\nfailed", lambda f: f.failed, ".0f"),
    ("$ per 1k\ntokens", lambda f: f.cost, ".4f"),
)
OF_TIERS: Final[Sequence[Column]] = (
    ("hits:\ndevice %", lambda f: 100 * f.hits["device"], ".1f"),
    ("\nL1 %", lambda f: 100 * f.hits["l1"], ".1f"),
    ("\nL2 %", lambda f: 100 * f.hits["l2"], ".1f"),
)
"""Those that stand behind the hits where tiers are simulated."""
OF_ROLES: Final[Sequence[Column]] = (
    ("answer\nmean s", lambda f: f.answer_mean, ".2f"),
    ("prefill\napart %", lambda f: 100 * (f.apart or 0.0), ".1f"),
    ("stran-\nded", lambda f: f.stranded, ".0f"),
)
"""Those that stand first where pods have roles."""
_TIE: Final = 1.0
"""Percent. Less is no difference."""
_BEHIND: Final = 8


def columns(results: Results) -> Sequence[Column]:
    """Those of a comparison."""
    found = (*COLUMNS[:_BEHIND], *OF_TIERS, *COLUMNS[_BEHIND:]) if results.runs[0].hits else COLUMNS
    return (*OF_ROLES, *found) if any(run.apart is not None for run in results.runs) else found


def by_policy(results: Results) -> dict[str, list[Figures]]:
    """The runs of each policy."""
    found: dict[str, list[Figures]] = {}
    for run in results.runs:
        found.setdefault(run.policy, []).append(run)
    return found


def title(plan: Plan, results: Results) -> str:
    """What was replayed, in a line."""
    kinds = {name: results.pods.count(name) for name in results.pods}
    rate = f"{results.rate:.2f}/s"
    if results.saturation:
        rate += f" ({100 * results.rate / results.saturation:.0f} % of {results.saturation:.2f}/s)"
    runs = f", {len(plan.seeds)} runs (± standard deviation)" if len(plan.seeds) > 1 else ""
    pods = " + ".join(f"{count} {name}" for name, count in kinds.items())
    requests = results.runs[0].requests
    return f"{results.trace}: {requests:,} requests, {rate}, on {pods}, seed {plan.seeds[0]}{runs}"


def table(plan: Plan, results: Results) -> Table:
    """A row for each policy."""
    made = Table(
        title=Text(printable(title(plan, results))), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    made.add_column("policy", no_wrap=True)
    shown = columns(results)
    for heading, _, _ in shown:
        made.add_column(heading, justify="right")
    runs = by_policy(results)
    oracle = runs.get(ORACLE)
    if oracle:
        made.add_column("regret\n%", justify="right")
    for name, own in runs.items():
        cells = [_cell(spread([figure(run) for run in own]), form) for _, figure, form in shown]
        if oracle:
            lost = regret(own, oracle)
            cells.append(_cell(Spread(lost.mean * 100, lost.deviation * 100), ".0f") if name != ORACLE else "")
        made.add_row(Text(printable(name)), *cells)
    return made


def verdict(results: Results) -> str:
    """Whether prefill and decode apart pay, where the runs say so: by the mean time to the last token."""
    means = {name: spread([run.answer_mean for run in own]).mean for name, own in by_policy(results).items()}
    ours = next((run.policy for run in results.runs if run.apart is not None), None)
    if ours is None or TOGETHER not in means:
        return ""
    apart, together = means[ours], means[TOGETHER]
    share = abs(apart / together - 1) * 100
    if share < _TIE:
        return f"Roles make no difference here: an answer takes {apart:.2f} s, and {together:.2f} s without."
    pays = "pay" if apart < together else "do not pay"
    word = "less" if apart < together else "more"
    return f"Roles {pays} here: an answer takes {apart:.2f} s, {share:.0f} % {word} than {together:.2f} s without."


CLASS_COLUMNS: Final[Sequence[tuple[str, Callable[[ClassFigures], float], str]]] = (
    ("requests", lambda f: f.requests, ",.0f"),
    ("TTFT\np50 s", lambda f: f.ttft_p50, ".3f"),
    ("\np95 s", lambda f: f.ttft_p95, ".3f"),
    ("\np99 s", lambda f: f.ttft_p99, ".3f"),
    ("waited\ns", lambda f: f.waited_mean, ".3f"),
    ("TPOT\nms", lambda f: f.tpot_mean * 1000, ".1f"),
    ("in time\n%", lambda f: f.attained * 100, ".1f"),
    ("tokens\n/s", lambda f: f.tokens_per_second, ",.0f"),
    ("shed", lambda f: f.shed, ",.0f"),
)


def by_class(results: Results) -> Table | None:
    """A row for each class of requests under each policy; None where there are no classes.

    Each seed has other requests, of which none may be of some class; its figures are of the seeds that have it.
    """
    labels = sorted({label for run in results.runs for label in run.classes})
    if not labels:
        return None
    made = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    made.add_column("class")
    made.add_column("policy", no_wrap=True)
    for heading, _, _ in CLASS_COLUMNS:
        made.add_column(heading, justify="right")
    for label in labels:
        for name, own in by_policy(results).items():
            ones = [run.classes[label] for run in own if label in run.classes]
            cells = [_cell(spread([figure(one) for one in ones]), form) for _, figure, form in CLASS_COLUMNS]
            made.add_row(Text(printable(label)), Text(printable(name)), *cells)
    return made


def _cell(value: Spread, form: str) -> str:
    text = f"{value.mean:{form}}"
    return f"{text} ±{value.deviation:{form}}" if value.deviation else text
