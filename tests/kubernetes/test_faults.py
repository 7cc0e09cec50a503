"""The faults of `hack/bench faults` in which pickers follow a pool of an API server, each in short."""

from pathlib import Path

import pytest

from hack.benches import faults
from hack.benches.faults import FAULTS, Outcome, run

pytestmark = pytest.mark.envoy


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"BEFORE": 0.5, "DURING": 1.5, "AFTER": 0.5, "AWAY": 6.0, "CHURNED": 30, "AT_ONCE": 10}.items():
        monkeypatch.setattr(faults, name, value)


async def outcome(start: str, folder: Path) -> Outcome:
    """Of the fault whose name begins so."""
    [fault] = (each for each in FAULTS if each.name.startswith(start))
    assert fault.api_server is not None
    return await run(fault, folder)


async def test_a_pod_that_dies_while_the_api_server_is_away_costs_no_more_than_what_it_had(tmp_path: Path) -> None:
    away = await outcome("the API server away", tmp_path)
    assert away.sent > 200
    assert away.refused == 0
    assert away.failed == away.early, "all that failed were there when it died"


async def test_versions_that_are_gone_cost_no_request(tmp_path: Path) -> None:
    gone = await outcome("etcd compacted", tmp_path)
    assert gone.sent > 200
    assert gone.answered == gone.sent


async def test_pods_that_come_and_go_cost_no_request(tmp_path: Path) -> None:
    churned = await outcome("1,000 pods", tmp_path)
    assert churned.sent > 50
    assert churned.answered == churned.sent
