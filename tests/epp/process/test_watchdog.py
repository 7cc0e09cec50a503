import asyncio
import subprocess
import sys
import threading
import time
from pathlib import Path

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


STARVED = """
import asyncio, os, sys, threading, time
from epp.process.watchdog import watch

async def main():
    reported = []
    task = asyncio.create_task(watch(1.0, reported.append))
    await asyncio.sleep(0.1)
    thread = threading.get_native_id()
    os.sched_setaffinity(thread, {min(os.sched_getaffinity(0))})
    os.setpriority(os.PRIO_PROCESS, thread, 19)
    used, end = time.thread_time(), time.monotonic() + 3
    while time.monotonic() < end:
        pass
    print("after", time.thread_time() - used < 0.75, reported)
    time.sleep(2)
    print("then", reported)

asyncio.run(main())
"""
BUSY = "import os\nos.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nwhile True: pass"


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="the kernel does not tell who waits for a CPU")
def test_a_loop_that_only_gets_no_cpu_goes_on() -> None:
    """Beside a process that computes, the loop's thread gets a seventieth of its CPU, or an eighth if all is niced."""
    with subprocess.Popen([sys.executable, "-c", BUSY]) as busy:
        try:
            said = subprocess.run([sys.executable, "-c", STARVED], capture_output=True, text=True, timeout=60)
        finally:
            busy.kill()
    assert said.stdout.splitlines() == ["after True []", "then [1.0]"], said.stderr
