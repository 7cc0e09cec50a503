import json
import os

from hack.benches import peers
from hack.benches.peers import Cell, Figures
from hack.benches.rig.peer import OURS
from hack.benches.rig.pickers import ALONE, variant

NAMES = ["2 KB", "100 chunks"]


def figures() -> Figures:
    """The machine is half as fast in the second round; the other picker costs twice as much in both."""
    cells = {}
    for name in NAMES:
        cells[name, ALONE] = [Cell(0.0, 50.0), Cell(0.0, 100.0)]
        for picker, cost in ((OURS, 200.0), ("other", 400.0)):
            cells[name, variant(picker, "lean")] = [Cell(cost, 90.0), Cell(2 * cost, 180.0)]
    return Figures(4, cells, {OURS: 0.005, "other": 0.02}, {OURS: 90 << 20, "other": 280 << 20}, {})


def test_the_table_has_ratios_of_each_round() -> None:
    shown = peers.table(figures(), [OURS, "other", "absent"], NAMES, ["lean"])
    lines = {line.split("  ")[0] or line.strip().split("  ")[0]: line.split() for line in shown.splitlines()}
    assert lines["4 endpoints"][-1] == "chunks"
    assert lines["warmpath"][1:] == ["300", "300"]
    assert lines[f"other : {OURS}"][-2:] == ["2.00", "2.00"]
    assert lines["Envoy, with other"][-1] == "135"
    assert "warmpath: idle 0.50 % of a core; 90 MiB resident" in shown
    assert "absent" not in shown
    assert json.loads(json.dumps(peers.as_json(figures())))["endpoints"] == 4


def test_memory_is_that_of_a_process() -> None:
    assert 10 << 20 < peers.resident(os.getpid()) < 10 << 30
