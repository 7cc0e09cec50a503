"""docs/replay.md: its table is the benchmark's, it says how it was made, and what it names is there."""

import re
from pathlib import Path

from click.testing import CliRunner

from epp.cli import warmpath
from hack.benches.replay import BASE, CASES, LOADS, OURS, PODS, POOLS, ROWS, WRONG
from hack.benches.replay import WORKLOADS as LEARNT
from tooling.replay.generators import ARRIVALS, WORKLOADS
from tooling.simulator.presets import PRESETS

POLICIES = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")
DOC = (Path(__file__).parents[2] / "docs" / "replay.md").read_text(encoding="utf-8")


def rows() -> dict[tuple[str, str], tuple[float, float, float]]:
    """(workload and load, figure) -> ours, round-robin, change."""
    found: dict[tuple[str, str], tuple[float, float, float]] = {}
    for line in re.findall(r"^\| (documents-\S+, \d+%) \|(.+)\|$", DOC, re.MULTILINE):
        figure, ours, base, change = (cell.strip() for cell in line[1].split("|"))
        percent = re.match(r"([+-]\d+) % ± \d+", change)
        our, theirs = (float(cell.replace(",", "")) for cell in (ours, base))
        found[line[0], figure] = (our, theirs, float(percent[1]) if percent else 0.0)
    return found


def test_the_table_has_a_row_for_all_that_the_benchmark_prints() -> None:
    wanted = {
        (f"{case.workload}, {load:.0%}", name)
        for case in CASES
        for load in LOADS
        for name in (*(name for name, _, _ in ROWS), "bound of the hit rate, %")
    }
    assert set(rows()) == wanted


def test_it_says_how_it_was_made() -> None:
    section = DOC.split("## Shared documents", 1)[1].split("\n## ", 1)[0]
    for said in ("Made by `hack/bench replay`", "steady arrivals", "three seeds", "saturation", OURS, BASE):
        assert said in section
    assert PODS.endswith("8xh100-70b")
    assert PRESETS["8xh100-70b"].price > 0


def test_changes_follow_from_the_figures() -> None:
    for (case, figure), (ours, base, change) in rows().items():
        if change:
            # Both are rounded, and the change is a mean over seeds.
            assert abs(100 * (ours / base - 1) - change) < 6, f"{case}, {figure}"


def test_the_goals_are_met_beyond_what_round_robin_carries() -> None:
    found = rows()
    for workload, p50, p90, throughput, cost in (
        ("documents-8k", -80, -50, 30, -25),
        ("documents-64k", -96, -50, 45, -33),
    ):
        case = f"{workload}, 70%"
        assert found[case, "TTFT p50, s"][2] <= p50
        assert found[case, "TTFT p90, s"][2] <= p90
        assert found[case, "generated tokens/s"][2] >= throughput
        assert found[case, "$ per 1,000 tokens"][2] <= cost


def test_flags_and_names_in_the_text_are_there() -> None:
    help_ = CliRunner().invoke(warmpath, ["replay", "--help"], terminal_width=200).output
    for flag in set(re.findall(r"`(--[a-z-]+)", DOC)):
        assert flag in help_
    for name in (*WORKLOADS, *ARRIVALS):
        assert f"`{name}`" in DOC
    workloads = help_.split("or a workload: ")[1].split(".\n")[0]
    assert re.split(r",\s+", workloads) == [*WORKLOADS]


def test_what_learning_costs_is_what_the_benchmark_prints_and_follows_from_its_figures() -> None:
    table = re.findall(
        r"^\| (\w+) \| (\S+) \| ([a-z ]+) \| ([\d.]+) \| ([\d.]+) \| ([+-][\d.]+) % ± [\d.]+ \|$",
        POLICIES,
        re.MULTILINE,
    )
    assert {row[:3] for row in table} == {
        (pool.name, workload, wrong) for pool in POOLS for workload in LEARNT for wrong in WRONG
    }
    for *_, known, learned, regret in table:  # both are rounded, and regret is a mean over seeds
        assert abs(100 * (float(learned) / float(known) - 1) - float(regret)) < 1.0
    assert all(float(regret) < 3 for pool, *_, regret in table if pool == "uniform")


def test_hits_by_tier_add_up_to_what_is_reached_of_the_bound() -> None:
    rows = re.findall(r"^\| (nothing|`--l1[^|]*`) \| ([a-z-]+) \|(.*)\|$", DOC, re.MULTILINE)
    assert len(rows) == 9
    bounds = []
    for _, _, cells in rows:
        *_, device, l1, l2, share, _ = (cell.strip() for cell in cells.split("|"))
        hits = sum(float(cell or 0) for cell in (device, l1, l2))
        bounds.append(hits / float(share))
    assert max(bounds) / min(bounds) < 1.02, "one bound for all"
