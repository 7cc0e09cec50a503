"""What changed is told once, after it has stood still; what came before the first look is not forgotten."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from epp.process.follow import changes, stamp
from tests.support.process.waiting import until


@asynccontextmanager
async def following(look: Callable[[], int], seen: int) -> AsyncIterator[list[int]]:
    """What is told, as it is."""
    reported: list[int] = []

    async def follow() -> None:
        async for change in changes(look, seen, 0.0):
            reported.append(change)

    async with asyncio.TaskGroup() as group:
        task = group.create_task(follow())
        yield reported
        task.cancel()


async def test_a_change_is_reported_once_and_only_when_it_has_stood() -> None:
    # 1 is what was seen already; 2 lasts one look only, 3 two and more.
    looks = iter((1, 1, 2, 3, 3, 3, 4, 3, 1, 1))
    async with following(lambda: next(looks, 1), 1) as reported:
        await until(lambda: reported == [3, 1])
    assert reported == [3, 1]


async def test_a_change_before_the_first_look_counts() -> None:
    async with following(lambda: 2, 1) as reported:
        await until(lambda: reported == [2])
    assert reported == [2]


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
