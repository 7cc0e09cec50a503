import pytest

from hack.benches import flow
from hack.benches.flow import Load, Outcome


def test_the_table_has_medians_and_what_is_lost() -> None:
    found = {
        flow.WITHOUT: [Outcome([1.0] * 20, 500.0, 1), Outcome([3.0] * 20, 300.0, 0)],
        flow.ALONE: [Outcome([0.1] * 20, 0.0, 0)] * 2,
    }
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in flow.table(found).splitlines()[2:]]
    assert rows == [
        [flow.ALONE, "0.100 s", "0.100 s", "1.00", "0", "0.00", "0"],
        [flow.WITHOUT, "2.000 s", "2.000 s", "20.00", "400", "1.00", "1"],
    ]


@pytest.mark.envoy
def test_every_picker_answers_through_envoy() -> None:
    found = flow.run(flow._COMMANDS, 1, Load(rate=10.0, flood=4, seconds=1.0, priorities=True), 1)
    assert [*found] == [flow.ALONE, *flow._COMMANDS]
    assert found[flow.ALONE][0].flood == 0
    for name, (outcome,) in found.items():
        assert outcome.lost == 0, name
        assert len(outcome.ttfts) >= 2
