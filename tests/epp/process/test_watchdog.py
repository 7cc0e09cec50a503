import asyncio
import threading
import time

import pytest

from epp.process.watchdog import watch

LIMIT = 0.2
HOLD = 5 * LIMIT


def in_module(name: str) -> None:
    """Stand still in a function of a module of that name."""
    space = {"__name__": name}
    exec("def hold(sleep, seconds): sleep(seconds)", space)
    space["hold"](time.sleep, HOLD)  # type: ignore[operator]


@pytest.mark.parametrize(("module", "ended"), [("my_scorers", [LIMIT]), ("bdb", [])])
async def test_a_loop_that_stands_still_is_reported_of_once_and_a_debugger_may(module: str, ended: list[float]) -> None:
    reported: list[float] = []
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch(LIMIT, reported.append))
        await asyncio.sleep(HOLD)
        assert reported == []
        in_module(module)
        await asyncio.sleep(0)
        assert reported == ended
        task.cancel()


async def test_its_thread_ends_with_it_and_none_is_made_for_no_limit() -> None:
    before = {*threading.enumerate()}
    await watch(0)
    assert {*threading.enumerate()} <= before
    async with asyncio.TaskGroup() as tasks:
        task = tasks.create_task(watch(LIMIT))
        await asyncio.sleep(0)
        [thread] = {*threading.enumerate()} - before
        task.cancel()
    await asyncio.to_thread(thread.join, 10)
    assert not thread.is_alive()
