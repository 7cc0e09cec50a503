from hack.benches.page import Cost, cost, table


def test_a_row_has_shares_of_a_core() -> None:
    assert table([(8, Cost(0.1012, 0.0022, 0.0004))]).splitlines()[-1] == "| 8 | 10.1 % | 0.22 % | 0.04 |"


async def test_a_running_picker_is_measured_with_a_viewer_and_without() -> None:
    found = await cost(2, seconds=2.0, scrape=0.5)
    assert found.alone > 0
    assert found.error > 0
