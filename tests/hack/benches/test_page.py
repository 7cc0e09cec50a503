from hack.benches.page import compare, table


def test_a_row_has_shares_of_a_core() -> None:
    assert table([(8, 0.0101, 0.0022)]).splitlines()[-1] == "| 8 | 1.01 % | 0.22 % |"


async def test_a_running_picker_is_measured_with_a_viewer_and_without() -> None:
    alone, _ = await compare(2, seconds=1.5, rounds=1)
    assert alone > 0
