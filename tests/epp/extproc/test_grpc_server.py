"""The deadlines of the grpc server alone: who is cancelled when, and whose cancellation it is."""

import asyncio
from collections.abc import Callable

import pytest

from epp.extproc.grpc_server import Task, TaskDeadlines
from tests.support.process.waiting import until


def me() -> Task:
    task = asyncio.current_task()
    assert task is not None
    return task


async def waits(deadlines: TaskDeadlines, then: Callable[[], None] = lambda: None) -> str:
    """Stays inside until it is cancelled; says whether the deadlines did that."""
    deadlines.start(me())
    then()
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not deadlines.lost(me()):
            raise
        return "lost"
    finally:
        deadlines.stop(me())
    return "went on"


async def test_who_waits_too_long_is_cancelled_and_may_go_on() -> None:
    deadlines = TaskDeadlines(0.01)

    async def twice() -> list[str]:
        return [await waits(deadlines), await waits(deadlines)]

    async with asyncio.TaskGroup() as tasks:
        found = [tasks.create_task(twice()) for _ in range(3)]
    assert [task.result() for task in found] == [["lost", "lost"]] * 3


async def test_who_stops_in_time_is_left_alone() -> None:
    deadlines = TaskDeadlines(0.01)
    deadlines.start(me())
    deadlines.stop(me())
    deadlines.stop(me())
    async with asyncio.TaskGroup() as tasks:  # the timer has fired when this one is lost
        other = tasks.create_task(waits(deadlines))
    assert other.result() == "lost"
    assert not deadlines.lost(me())
    assert me().cancelling() == 0


async def test_a_cancellation_of_somebody_else_stays_one() -> None:
    deadlines, inside = TaskDeadlines(60), asyncio.Event()
    task = asyncio.ensure_future(waits(deadlines, inside.set))
    await inside.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_cancelled_by_both_counts_as_cancelled() -> None:
    deadlines, inside = TaskDeadlines(), asyncio.Event()
    task = asyncio.ensure_future(waits(deadlines, inside.set))
    await inside.wait()
    deadlines.end()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_without_a_time_it_lasts_until_its_end() -> None:
    deadlines, inside = TaskDeadlines(), asyncio.Event()
    task = asyncio.ensure_future(waits(deadlines, inside.set))
    await inside.wait()
    assert not task.done()
    deadlines.end()
    assert await task == "lost"


async def test_the_timer_rests_when_nobody_waits() -> None:
    deadlines = TaskDeadlines(0.01)
    deadlines.start(me())
    deadlines.stop(me())
    await until(lambda: deadlines._timer is None)
    async with asyncio.TaskGroup() as tasks:
        later = tasks.create_task(waits(deadlines))
    assert later.result() == "lost"
