import asyncio

import pytest

from epp.admin import turns
from epp.admin.turns import Busy, Page, Turns


async def test_pages_are_made_one_at_a_time_with_a_pause_between(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    slept: list[float] = []
    real = asyncio.sleep

    async def sleep(seconds: float) -> None:
        nonlocal now
        if seconds:
            slept.append(seconds)
            now += seconds
        await real(0)

    monkeypatch.setattr(asyncio, "sleep", sleep)
    of, making, most = Turns(lambda: now), 0, 0

    async def read(seconds: float) -> None:
        nonlocal making, most, now
        async with of.turn():
            making += 1
            most = max(most, making)
            await real(0)
            now += seconds
            making -= 1

    await asyncio.gather(read(0.1), read(0.1), read(30.0), read(0.1))
    assert most == 1
    assert slept == pytest.approx([0.1, 0.1, turns.LONGEST_PAUSE_S])  # as long as the page before


async def test_readers_of_one_page_share_one_that_was_begun_after_they_came() -> None:
    of, begun = Turns(), 0
    go = asyncio.Event()

    async def make() -> Page:
        nonlocal begun
        begun += 1
        number = begun
        await go.wait()
        return b"%d" % number, "text/plain"

    async with asyncio.TaskGroup() as tasks:
        first = tasks.create_task(of.shared("text", make))
        await asyncio.sleep(0.01)
        later = [tasks.create_task(of.shared("text", make)) for _ in range(100)]
        await asyncio.sleep(0)
        go.set()
    assert first.result() == (b"1", "text/plain")
    assert {task.result() for task in later} == {(b"2", "text/plain")}
    assert begun == 2


async def test_too_many_readers_are_sent_away_and_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE_S", 0.05)
    of = Turns()

    async def wait() -> str:
        try:
            async with of.turn():
                return "made"
        except Busy:
            return "busy"

    async with of.turn():
        assert await asyncio.gather(*(wait() for _ in range(turns.WAITING + 5))) == ["busy"] * (turns.WAITING + 5)
    monkeypatch.undo()
    assert await wait() == "made"


async def test_a_page_that_fails_fails_for_all_who_wait_and_the_next_is_made() -> None:
    of, go = Turns(), asyncio.Event()

    async def bad() -> Page:
        await go.wait()
        raise ValueError("broken")

    async def good() -> Page:
        return b"", ""

    async with of.turn():
        both = [asyncio.ensure_future(of.shared("text", bad)) for _ in range(2)]
        await asyncio.sleep(0)
    go.set()
    assert [str(each) for each in await asyncio.gather(*both, return_exceptions=True)] == ["broken", "broken"]
    assert await of.shared("text", good) == (b"", "")


async def test_a_reader_who_leaves_takes_nobody_along() -> None:
    of, go = Turns(), asyncio.Event()

    async def make() -> Page:
        await go.wait()
        return b"page", ""

    async with of.turn():
        first, second = (asyncio.ensure_future(of.shared("text", make)) for _ in range(2))
        await asyncio.sleep(0)
        second.cancel()
    go.set()
    assert await first == (b"page", "")


async def test_a_page_is_shared_for_a_while_and_then_made_anew() -> None:
    now, made = 0.0, 0

    async def make() -> Page:
        nonlocal made
        made += 1
        return b"%d" % made, "text/plain"

    of = Turns(lambda: now)
    assert [(await of.recent("a", make))[0] for _ in range(3)] == [b"1"] * 3
    assert (await of.recent("b", make))[0] == b"2"
    now = turns.RECENT_S
    assert (await of.recent("a", make))[0] == b"3"
