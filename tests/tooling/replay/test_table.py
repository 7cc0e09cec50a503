from dataclasses import replace
from io import StringIO

from rich.console import Console

from tests.tooling.replay.test_runs import plan
from tooling.replay.policies import policy
from tooling.replay.replay import Conditions
from tooling.replay.runs import Rate, Source, compare, with_oracle
from tooling.replay.table import COLUMNS, OF_TIERS, by_class, by_policy, table, title
from tooling.simulator.tiers import TierParameters


def shown(seeds: tuple[int, ...] = (0,), *, oracle: bool = True) -> str:
    made = plan(seeds=seeds)
    if oracle:
        made = made.__class__(**{**made.__dict__, "policies": with_oracle(made.policies)})
    console = Console(width=250, record=True, file=StringIO())
    console.print(table(made, compare(made, lambda *reported: None)))
    return console.export_text()


def test_a_row_for_each_policy_and_regret_against_the_oracle() -> None:
    lines = shown().splitlines()
    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert set(rows) >= {"prefix-aware", "round-robin", "oracle"}
    assert len(rows["round-robin"]) == 1 + len(COLUMNS) + 1
    assert len(rows["oracle"]) == 1 + len(COLUMNS), "it has nothing to regret"
    assert int(rows["round-robin"][-1]) > 0
    assert "regret" not in shown(oracle=False)


def test_hits_by_tier_where_there_are_tiers() -> None:
    assert "device" not in shown()
    made = plan(conditions=Conditions(l2=TierParameters(tokens=100_000)))
    results = compare(made, lambda *reported: None)
    console = Console(width=250, record=True, file=StringIO())
    console.print(table(made, results))
    text = console.export_text()
    for name in ("device %", "L1 %", "L2 %"):
        assert name in text
    row = next(line.split() for line in text.splitlines() if line.strip().startswith("round-robin"))
    assert len(row) == 1 + len(COLUMNS) + len(OF_TIERS)
    found = results.runs[-1]
    assert row[9:12] == [f"{100 * found.hits[tier]:.1f}" for tier in ("device", "l1", "l2")]


def test_a_class_that_not_every_seed_has_is_shown_of_those_that_have_it() -> None:
    made = plan(Source("interactive-and-batch", 60), kinds="2*h100-8b", rate=Rate("rate", 5.0), seeds=(0, 1))
    results = compare(made, lambda *reported: None)
    batches = [run.classes["batch"] for run in results.runs if "batch" in run.classes]
    assert len(batches) == 2, "of one seed, under both policies"
    found = by_class(results)
    assert found is not None
    console = Console(width=250, record=True, file=StringIO())
    console.print(found)
    rows = [line.split() for line in console.export_text().splitlines()]
    assert [row[:3] for row in rows if row and row[0] == "batch"] == [
        ["batch", name, str(batches[0].requests)] for name in ("prefix-aware", "round-robin")
    ]


def test_several_runs_show_their_spread() -> None:
    text = shown((0, 1))
    assert "±" in text
    assert "2 runs (± standard deviation)" in text
    assert "±" not in shown()


def test_the_title_says_what_was_played() -> None:
    made = plan(Source("independent", 300), kinds="2*laptop,laptop@0.5", rate=Rate("load", 0.5))
    results = compare(made, lambda *reported: None)
    text = title(made, results)
    assert text.startswith("independent: 300 requests, ")
    assert "(50 % of " in text
    assert "on 2 laptop + 1 laptop@0.5, seed 0" in text
    assert list(by_policy(results)) == ["prefix-aware", "round-robin"]
    assert policy("oracle").name == "oracle"


def test_names_of_policies_and_traces_are_shown_as_they_are() -> None:
    made = plan()
    results = compare(made, lambda *reported: None)
    runs = tuple(replace(run, policy=f"[/x]\x9b{run.policy}") for run in results.runs)
    console = Console(width=250, record=True, file=StringIO())
    console.print(table(made, replace(results, trace="[bold]\x1b[2J", runs=runs)))
    text = console.export_text()
    assert "[/x]\\x9bround-robin" in text
    assert "[bold]\\x1b[2J" in text
