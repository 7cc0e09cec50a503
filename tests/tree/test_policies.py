"""The comparison in docs/policies.md is the one its results make."""

import argparse
import json
from pathlib import Path

from epp.documents.strict import parameters_of
from epp.scheduling.cost import ExpectedTtft
from hack.benches import policies


def options(results: Path) -> argparse.Namespace:
    return argparse.Namespace(results=results)


def result(policy: str, seed: int, ttft: float, goodput: float = 1.0) -> policies.Result:
    return policies.Result("agents", 0.4, policy, seed, ttft, 0.0, 0.0, 0.0, 0.0, goodput, 0.0, 10.0 + seed)


def made_of(tmp_path: Path, *results: policies.Result) -> list[str]:
    file = tmp_path / "results.jsonl"
    file.write_text("".join(json.dumps(vars(each)) + "\n" for each in results))
    return policies.table(options(file)).splitlines()


def test_the_table_is_made_of_the_results() -> None:
    assert policies.DOCUMENT.read_text() == policies.written(options(policies.RESULTS))


def test_no_run_is_there_twice() -> None:
    keys = [result.key for result in policies.results(policies.RESULTS)]
    assert len(keys) == len(set(keys))


def test_ours_is_compared_on_the_same_seeds(tmp_path: Path) -> None:
    rows = made_of(
        tmp_path,
        *(result(policies.OURS, seed, ttft) for seed, ttft in enumerate((1.0, 2.0))),
        *(result("sglang", seed, ttft) for seed, ttft in enumerate((1.0, 2.5))),
        result("lmetric", 0, 0.5),
        *(result(policies.LEAN, seed, ttft) for seed, ttft in ((0, 1.0), (1, 2.4), (2, 9.0))),
    )
    assert rows[2] == (
        "| agents | 40% | 4.2 | 1.500 ± 0.707 | 1.750 ± 1.061 sglang | -14.3% ± 14.1% | **+13.3% ± 14.1%** | 100.0% "
        "| 100.0% sglang |"
    )
    assert "| lmetric | 1.00 | 1.00 | 1 |" in rows
    assert "| prefix-aware | 2.00 | 2.00 | 1 |" in rows, "against the best of the seed that all have played"


def test_where_ours_is_behind_stands_in_bold(tmp_path: Path) -> None:
    behind = made_of(tmp_path, result(policies.OURS, 0, 1.03, 0.9), result("sglang", 0, 1.0, 0.95))[2]
    tie = made_of(tmp_path, result(policies.OURS, 0, 1.01, 0.9), result("sglang", 0, 1.0, 0.91))[2]
    assert behind.endswith("| **+3.0%** | not played | **90.0%** | 95.0% sglang |")
    assert tie.endswith("| +1.0% | not played | 90.0% | 91.0% sglang |")


def test_the_table_of_parameters_has_those_of_expected_ttft() -> None:
    text = policies.DOCUMENT.read_text().partition("| parameter of `expected-ttft` |")[2].partition("\n\n")[0]
    rows = [[cell.strip(" `") for cell in row.split("|")[1:5]] for row in text.splitlines()[2:]]
    documented = {name: (alias, float(default.replace(",", ""))) for name, alias, _, default in rows[:-1]}
    fields = parameters_of(ExpectedTtft)
    assert documented == {
        name: (field.metadata["alias"], field.default) for name, field in fields.items() if "alias" in field.metadata
    }
    assert rows[-1][0] == "learnSpeeds`, `speeds`, `slo"
    assert set(fields) == {*documented, "learnSpeeds", "speeds", "slo"}
