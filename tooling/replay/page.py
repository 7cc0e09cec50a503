"""The comparison as one HTML file that needs nothing else: plots first, the table below."""

from collections.abc import Callable
from typing import Final

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from tooling.replay import plots
from tooling.replay.figures import Figures, regret, spread
from tooling.replay.policies import ORACLE
from tooling.replay.runs import Plan, Results
from tooling.replay.table import by_policy, columns, title

_TEMPLATE: Final = Environment(
    loader=PackageLoader("tooling.replay"),
    autoescape=True,
    undefined=StrictUndefined,
    trim_blocks=True,
    keep_trailing_newline=True,
).get_template("page.html")

Figure = Callable[[Figures], float]


def page(plan: Plan, results: Results) -> str:
    """HTML. Plots show the mean of several runs, with a line for their standard deviation; curves the first run."""
    runs = by_policy(results)
    first = {name: own[0] for name, own in runs.items()}
    one = results.runs[0]
    sections = [
        _plot(
            "Half of the requests wait less than this for their first token",
            "TTFT p50, seconds. Shorter is better.",
            _bars(runs, lambda f: f.ttft_p50, ".3f"),
        ),
        _plot(
            "Nine of ten wait less than this",
            "TTFT p90, seconds. Shorter is better.",
            _bars(runs, lambda f: f.ttft_p90, ".2f"),
        ),
        _plot(
            "Who waits how long",
            "All requests, from the luckiest to the unluckiest. Lower is better.",
            plots.curves([(name, f.curve) for name, f in first.items()], "of the requests", "TTFT, s"),
        ),
        _plot(
            "And when",
            "TTFT p90 over the run. A line that climbs is a pool that cannot keep up.",
            plots.curves([(name, f.timeline) for name, f in first.items()], "of the run", "TTFT p90, s"),
        ),
        _plot(
            "CompletedRequest well",
            f"Share with TTFT under {plan.slo.ttft:g} s and under {plan.slo.tpot * 1000:g} ms a token, %.",
            _bars(runs, lambda f: f.goodput * 100, ".1f"),
        ),
        _plot(
            "Prompt tokens found in the cache",
            "%. The dashed line is what one endless cache would reach.",
            _bars(runs, lambda f: f.hit_rate * 100, ".1f", bound=one.hit_bound * 100),
        ),
        _plot("Answers", "Generated tokens a second.", _bars(runs, lambda f: f.tokens_per_second, ",.0f")),
        _plot("Price", "Dollars per 1,000 generated tokens.", _bars(runs, lambda f: f.cost, ".4f")),
    ]
    heads, rows = _table(results)
    return _TEMPLATE.render(
        trace=results.trace,
        title=title(plan, results),
        legend=Markup(plots.legend([*runs])),
        plots=sections,
        heads=heads,
        rows=rows,
        small_print=_small_print(plan),
    )


def _tiers(plan: Plan) -> list[str]:
    lines = []
    if sizes := sorted({kind.l1.tokens for kind in plan.kinds if kind.l1 is not None}):
        said = " or ".join(f"{size:,}" for size in sizes)
        lines.append(f"an L1 of {said} tokens for each {plan.conditions.pods_per_node} pod(s)")
    if plan.conditions.l2 is not None:
        lines.append(f"an L2 of {plan.conditions.l2.tokens:,} tokens for all")
    return lines


def _plot(heading: str, explained: str, svg: str) -> tuple[str, str, Markup]:
    return heading, explained, Markup(svg)  # plots escape the names in them themselves


def _bars(runs: dict[str, list[Figures]], figure: Figure, form: str, bound: float | None = None) -> str:
    rows = []
    for name, own in runs.items():
        value = spread([figure(run) for run in own])
        rows.append((name, value.mean, value.deviation))
    return plots.bars(rows, form, bound=bound)


def _table(results: Results) -> tuple[list[str], list[list[str]]]:
    """Heads and rows."""
    runs, shown = by_policy(results), columns(results)
    oracle = runs.get(ORACLE)
    heads = [heading.replace("-\n", "").replace("\n", " ") for heading, _, _ in shown] + ["regret %"] * bool(oracle)
    rows = []
    for name, own in runs.items():
        cells = [f"{spread([figure(run) for run in own]).mean:{form}}" for _, figure, form in shown]
        if oracle:
            cells.append("" if name == ORACLE else f"{regret(own, oracle).mean * 100:.0f}")
        rows.append([name, *cells])
    return ["policy", *heads], rows


def _small_print(plan: Plan) -> str:
    conditions = plan.conditions
    lines = [
        f"{conditions.replicas} picker(s)",
        f"metrics scraped every {conditions.scrape:g} s",
        "answers shown to the picker" if conditions.sees_answer else "answers not shown to the picker",
    ]
    if conditions.replicas > 1:
        lines.append("no exchange" if conditions.exchange is None else f"exchange after {conditions.exchange:g} s")
    if conditions.foreign:
        lines.append(f"{conditions.foreign:.0%} of the requests pass the picker by")
    lines += _tiers(plan)
    lines += [f"pod-{each.pod + 1} dead from {each.at:g} s for {each.seconds:g} s" for each in conditions.failures]
    return (
        "Simulated: step times are rooflines from data sheets, so trust order and ratios more than seconds. "
        "Regret is how much longer the mean TTFT is than with true knowledge of the pods. " + "; ".join(lines) + "."
    )
