import asyncio
import time

import pytest

from epp.telemetry.pace import REST, WORK_S, Pace


async def test_short_work_lets_others_run_and_long_work_rests_longer_than_it_took(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: now)
    pace = Pace()
    for _ in range(5):
        now += WORK_S / 4
        await pace.rest()
    assert slept[:3] == [0, 0, 0]
    assert max(slept) == pytest.approx(REST * WORK_S, rel=0.3)
    assert sum(seconds > 0 for seconds in slept) == 1
