import asyncio
from random import Random

import pytest

from epp.pool.rounds import Rounds
from epp.pool.store import Endpoint, Pool


def rounds(count: int) -> Rounds:
    pool = Pool("p", random=Random(1))
    pool.replace(Endpoint(f"e{n}", f"10.0.{n >> 8}.{n & 255}:8000") for n in range(count))
    return Rounds(pool, Random(1), 1.0)


@pytest.mark.parametrize(("count", "moments"), [(0, 10), (1, 10), (80, 10), (100, 12.5), (1000, 125)])
def test_an_interval_has_a_moment_for_each_eight_endpoints(count: int, moments: float) -> None:
    pause = rounds(count).pause
    pauses = {now: pause(now, 1.0) for now in (1000 + n / 10_000 for n in range(10_000))}
    assert len({round(now + seconds, 6) for now, seconds in pauses.items()}) == pytest.approx(moments + 1, abs=1)
    assert all(abs(seconds - 1.0) <= 0.5001 / moments for seconds in pauses.values())


def test_a_moment_that_is_over_is_now() -> None:
    assert rounds(1).pause(1000.04, 0.0) == 0.0


@pytest.mark.parametrize("interval", [None, 60.0])
async def test_the_next_time_is_about_an_interval_later(
    interval: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    several = rounds(100)
    await several.first()
    for _ in range(1000):
        await several.next(interval)
    first, *later = pauses
    assert 0 <= first <= 1.05
    expected = interval or 1.0
    assert min(later) >= 0.9 * expected - 0.05
    assert max(later) <= 1.1 * expected + 0.05
    assert max(later) - min(later) >= 0.1 * expected, "they differ"
