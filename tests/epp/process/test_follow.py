"""What changed is told once, after it has stood still; what came before the first look is not forgotten."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epp.process.follow import Current, changes, stamp
from tests.support.waiting import until


@asynccontextmanager
async def following(look: Callable[[], int], seen: int) -> AsyncIterator[list[int]]:
    """What is told, as it is."""
    told: list[int] = []

    async def follow() -> None:
        async for change in changes(look, seen, 0.0):
            told.append(change)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        yield told
        task.cancel()


async def test_a_change_is_told_once_and_only_when_it_has_stood() -> None:
    # 1 is what was seen already; 2 lasts one look only, 3 two and more.
    looks = iter((1, 1, 2, 3, 3, 3, 4, 3, 1, 1))
    async with following(lambda: next(looks, 1), 1) as told:
        await until(lambda: told == [3, 1])
    assert told == [3, 1]


async def test_a_change_before_the_first_look_counts() -> None:
    async with following(lambda: 2, 1) as told:
        await until(lambda: told == [2])
    assert told == [2]


async def test_what_looking_raises_ends_it() -> None:
    def look() -> int:
        raise RuntimeError("no")

    with pytest.raises(ExceptionGroup, match="TaskGroup") as error:
        async with following(look, 1):
            await asyncio.sleep(5)
    assert [str(each) for each in error.value.exceptions] == ["no"]


def test_a_stamp_tells_another_file_from_the_one_before(tmp_path: Path) -> None:
    file, other = tmp_path / "a", tmp_path / "b"
    assert stamp(file) is None
    file.write_text("one")
    first = stamp(file)
    other.write_text("two")
    other.rename(file)
    assert stamp(file) not in (None, first)


class Worker:
    def __init__(self) -> None:
        self.begun: list[str] = []
        self.at_work: set[str] = set()
        self.fails = asyncio.Event()

    async def work(self, what: str) -> None:
        self.begun.append(what)
        self.at_work.add(what)
        try:
            await self.fails.wait()
            raise RuntimeError(f"no {what}")
        finally:
            await asyncio.sleep(0)  # its end takes a moment
            self.at_work.remove(what)


@asynccontextmanager
async def running(current: Current[str]) -> AsyncIterator[None]:
    async with asyncio.TaskGroup() as group:
        task = group.create_task(current.run())
        yield
        task.cancel()


async def test_only_what_is_in_use_is_worked_on() -> None:
    worker = Worker()
    current = Current(worker.work)
    async with running(current):
        await asyncio.sleep(0)
        assert worker.begun == []
        for what in ("a", "b"):
            current.use(what)
            await until(lambda what=what: worker.at_work == {what})  # type: ignore[misc]
        current.use(None)
        await until(lambda: not worker.at_work)
        current.use("a")
        await until(lambda: worker.at_work == {"a"})
    assert not worker.at_work
    assert worker.begun == ["a", "b", "a"]


async def test_what_was_chosen_before_the_run_counts_and_choosing_it_again_does_not_disturb_it() -> None:
    worker = Worker()
    current = Current(worker.work)
    current.use("a")
    async with running(current):
        await until(lambda: worker.at_work == {"a"})
        current.use("a")
        await asyncio.sleep(0.01)
        assert worker.begun == ["a"]


async def test_of_several_choices_at_once_the_last_counts() -> None:
    worker = Worker()
    current = Current(worker.work)
    async with running(current):
        for what in ("a", "b", "c"):
            current.use(what)
        await until(lambda: worker.at_work == {"c"})
    assert worker.begun == ["c"]


async def test_work_that_fails_ends_the_run() -> None:
    worker = Worker()
    current = Current(worker.work)
    current.use("a")
    worker.fails.set()
    with pytest.raises(ExceptionGroup, match="TaskGroup") as error:
        async with asyncio.timeout(5):
            await current.run()
    assert [str(each) for each in error.value.exceptions] == ["no a"]
