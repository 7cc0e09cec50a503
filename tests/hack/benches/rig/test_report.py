import json

import pytest

from hack.benches.rig import report
from hack.benches.rig.pickers import ALONE, variant
from hack.benches.rig.report import Sample

SCENARIOS = [*report.TARGETS, report.STREAMED, report.LATE]


def a_round(speed: float, epp: float = 480.0) -> dict[tuple[str, str], Sample]:
    """All figures of a machine `speed` times as slow."""
    found = {}
    for name in SCENARIOS:
        found[name, ALONE] = Sample(0.0, 50.0 * speed, 0.0, 200.0 * speed, 900.0 * speed)
        for wiring in report.WIRINGS:
            for server, cpu in (("bare server", 400.0), ("epp", epp)):
                found[name, variant(server, wiring)] = Sample(
                    cpu * speed, 90.0 * speed, cpu * 1.5 * speed, (200 + cpu) * speed, 2000.0 * speed
                )
    return found


def test_ratios_are_taken_within_a_round() -> None:
    found = report.summary([a_round(1.0), a_round(3.0), a_round(1.1)], SCENARIOS)
    figures = found["2 KB"]["epp, lean"]
    assert figures["cpu_us"] == pytest.approx((528, 960))
    assert figures["cpu_to_bare"] == pytest.approx((1.2, 0.0))
    assert figures["added_p50_us"].median == pytest.approx(528)


def test_the_table_shows_every_scenario_and_json_takes_the_figures() -> None:
    rounds = [a_round(1.0), a_round(2.0)]
    found = report.summary(rounds, SCENARIOS)
    text = report.table(found, len(rounds))
    heads, *lines = text.splitlines()
    assert [name for name in SCENARIOS if name in heads] == SCENARIOS
    ratio = next(line for line in lines if line.startswith("  epp : bare server"))
    assert ratio.split()[-2:] == ["1.20", "±0.00"]
    assert json.loads(json.dumps(found))["2 KB"]["epp, lean"]["cpu_us"] == [720.0, 480.0]


def test_targets_are_met_or_missed_by_name() -> None:
    cheap = report.verdicts(report.summary([a_round(1.0)], SCENARIOS))
    assert not [line for line in cheap if line.startswith("MISSED")]
    dear = report.verdicts(report.summary([a_round(1.0, epp=560.0)], SCENARIOS))  # 1.4 times
    assert [line.split(",")[0] for line in dear if line.startswith("MISSED")] == [
        "MISSED: epp : bare server at 2 KB",
        "MISSED: epp : bare server at 2 KB",
        "MISSED: epp : bare server at 32 KB",
        "MISSED: epp : bare server at 32 KB",
    ]


def test_a_streamed_answer_is_compared_with_one_as_late() -> None:
    dear = a_round(1.0)
    for server in report.SERVERS:
        dear[report.STREAMED, variant(server, "lean")] = Sample(528.0, 90.0, 600.0, 600.0, 2000.0)
    lines = report.verdicts(report.summary([dear], SCENARIOS))
    assert "MISSED: epp, lean: an answer of 100 chunks costs 1.10 of a plain one as late (at most 1.05)" in lines
