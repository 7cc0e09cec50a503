from pathlib import Path

import pytest

from hack.benches import faults
from hack.benches.faults import FAULTS, Outcome, run, table


def test_names_are_different_and_the_table_has_a_row_for_each() -> None:
    assert len({each.name for each in FAULTS}) == len(FAULTS)
    made = table([Outcome("a fault", 10, 8, 1, 1, 3, None, 1.25, 1, ("why",))])
    assert made.splitlines()[-1] == "| a fault | 10 | 8 | 1 | 1 | 3 | ? | 1.2 |"


@pytest.mark.long
@pytest.mark.envoy
async def test_a_pod_that_fails_loses_nothing_and_is_asked_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "BEFORE", 0.5)
    monkeypatch.setattr(faults, "DURING", 1.5)
    monkeypatch.setattr(faults, "AFTER", 0.5)
    [fault] = (each for each in FAULTS if each.name == "one of three pods answers 503")
    outcome = await run(fault, tmp_path)
    assert outcome.sent > 50
    assert outcome.answered == outcome.sent
    assert 0 < outcome.retried < outcome.sent / 2
