"""The comparison as one HTML file that needs nothing else: plots first, the table below."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Final

from tooling.replay import plots
from tooling.replay.figures import Figures, regret, spread
from tooling.replay.policies import ORACLE
from tooling.replay.runs import Plan, Results
from tooling.replay.table import by_policy, columns, title

_STYLE: Final = """
body { font: 15px/1.45 system-ui, sans-serif; color: #212529; max-width: 1000px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.4em } h2 { font-size: 1.05em; margin: 1.4em 0 .2em }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(400px, 1fr)); gap: 0 2em }
.plots p { margin: 0 0 .3em; color: #495057; font-size: .9em }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif }
.key { margin-right: 1em; white-space: nowrap }
.key i { display: inline-block; width: .8em; height: .8em; margin-right: .35em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9em }
th, td { text-align: right; padding: .25em .6em; border-bottom: 1px solid #dee2e6; vertical-align: bottom }
th:first-child, td:first-child { text-align: left }
"""

Figure = Callable[[Figures], float]


def page(plan: Plan, results: Results) -> str:
    """HTML. Plots show the mean of several runs, with a line for their standard deviation; curves the first run."""
    runs = by_policy(results)
    names = list(runs)
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
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>warmpath replay: {escape(results.trace)}</title>'
        f"<style>{_STYLE}</style><h1>{escape(title(plan, results))}</h1><p>{plots.legend(names)}</p>"
        f'<div class="plots">{"".join(sections)}</div><h2>All figures</h2>{_table(results)}'
        f"<p>{escape(_small_print(plan))}</p></html>\n"
    )


def _tiers(plan: Plan) -> list[str]:
    told = []
    if sizes := sorted({kind.l1.tokens for kind in plan.kinds if kind.l1 is not None}):
        said = " or ".join(f"{size:,}" for size in sizes)
        told.append(f"an L1 of {said} tokens for each {plan.conditions.pods_per_node} pod(s)")
    if plan.conditions.l2 is not None:
        told.append(f"an L2 of {plan.conditions.l2.tokens:,} tokens for all")
    return told


def _plot(heading: str, explained: str, svg: str) -> str:
    return f"<section><h2>{escape(heading)}</h2><p>{escape(explained)}</p>{svg}</section>"


def _bars(runs: dict[str, list[Figures]], figure: Figure, form: str, bound: float | None = None) -> str:
    rows = []
    for name, own in runs.items():
        value = spread([figure(run) for run in own])
        rows.append((name, value.mean, value.deviation))
    return plots.bars(rows, form, bound=bound)


def _table(results: Results) -> str:
    runs, shown = by_policy(results), columns(results)
    oracle = runs.get(ORACLE)
    heads = [heading.replace("-\n", "").replace("\n", " ") for heading, _, _ in shown] + ["regret %"] * bool(oracle)
    rows = []
    for name, own in runs.items():
        cells = [f"{spread([figure(run) for run in own]).mean:{form}}" for _, figure, form in shown]
        if oracle:
            cells.append("" if name == ORACLE else f"{regret(own, oracle).mean * 100:.0f}")
        rows.append(_row("td", [name, *cells]))
    return f"<table>{_row('th', ['policy', *heads])}{''.join(rows)}</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _small_print(plan: Plan) -> str:
    conditions = plan.conditions
    told = [
        f"{conditions.replicas} picker(s)",
        f"metrics scraped every {conditions.scrape:g} s",
        "answers shown to the picker" if conditions.sees_answer else "answers not shown to the picker",
    ]
    if conditions.replicas > 1:
        told.append("no exchange" if conditions.exchange is None else f"exchange after {conditions.exchange:g} s")
    if conditions.foreign:
        told.append(f"{conditions.foreign:.0%} of the requests pass the picker by")
    told += _tiers(plan)
    told += [f"pod-{each.pod + 1} dead from {each.at:g} s for {each.seconds:g} s" for each in conditions.failures]
    return (
        "Simulated: step times are rooflines from data sheets, so trust order and ratios more than seconds. "
        "Regret is how much longer the mean TTFT is than with true knowledge of the pods. " + "; ".join(told) + "."
    )
