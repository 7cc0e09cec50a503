import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.support.process.waiting import until
from tooling.laptop.processes import Processes


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


async def said(path: Path, text: str) -> None:
    async with asyncio.timeout(10):
        while not (path.exists() and text in path.read_text()):
            await asyncio.sleep(0.01)


async def test_leaving_the_block_ends_what_was_started(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        await processes.start("one", python("print('up', flush=True); import time; time.sleep(60)"))
        await processes.start("two", python("import time; time.sleep(60)"))
        await said(tmp_path / "one.log", "up")
        pids = [processes.pid("one"), processes.pid("two")]
        assert all(alive(pid) for pid in pids)
    assert not any(alive(pid) for pid in pids)


async def test_one_that_does_not_listen_is_killed(tmp_path: Path) -> None:
    code = "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    async with Processes(tmp_path, stop_seconds=0.1) as processes:
        await processes.start("deaf", python(code))
        await said(tmp_path / "deaf.log", "deaf")
        pid = processes.pid("deaf")
    assert not alive(pid)


async def test_one_that_ends_by_itself_is_reported_once_with_its_last_words(tmp_path: Path) -> None:
    async with Processes(tmp_path) as processes:
        await processes.start("weak", python("print('first', flush=True); raise SystemExit('the port is in use')"))
        await processes.start("shot", python("import time; time.sleep(60)"))
        os.kill(processes.pid("shot"), signal.SIGKILL)
        reported: list[tuple[str, str]] = []
        async with asyncio.timeout(10):
            while len(reported) < 2:
                reported += processes.ended()
                await asyncio.sleep(0.01)
        assert dict(reported) == {
            "weak": "weak ended with status 1: first / the port is in use",
            "shot": "shot was killed by SIGKILL: it said nothing",
        }
        assert processes.ended() == []


async def test_children_die_with_us_even_when_we_are_killed(tmp_path: Path) -> None:
    code = f"""
import asyncio, os, pathlib, sys
from tooling.laptop.processes import Processes
async def main():
    async with Processes(pathlib.Path({str(tmp_path)!r})) as processes:
        await processes.start("child", [sys.executable, "-c", "import time; time.sleep(60)"])
        print(processes.pid("child"), flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""
    parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert parent.stdout is not None
    pid = int(await parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    await parent.wait()
    async with asyncio.timeout(10):
        while alive(pid):
            await asyncio.sleep(0.01)


CHILD = "import signal, sys, time; {handler}; print('ready', flush=True); time.sleep(60)"
MOTHER = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', {child!r}])\n"
    "print(child.pid, 'is up', flush=True); time.sleep(60)"
)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
async def test_children_end_with_the_process_that_has_them(tmp_path: Path, how: signal.Signals) -> None:
    tidy = "signal.signal(15, lambda *_: sys.exit(print('tidied', flush=True)))"
    log = tmp_path / "mother.log"
    async with Processes(tmp_path) as processes:
        await processes.start("mother", python(MOTHER.format(child=CHILD.format(handler=tidy))), children=True)
        await said(log, "ready")
        await said(log, "is up")
        child = int(log.read_text().split(" is up")[0].split()[-1])
        assert alive(child)
        [status] = await processes.stop("mother", how=how)
        assert status == -how
        assert not alive(child)
    assert "tidied" in log.read_text()


async def test_children_that_do_not_listen_are_killed_too(tmp_path: Path) -> None:
    deaf = "signal.signal(15, signal.SIG_IGN)"
    log = tmp_path / "mother.log"
    async with Processes(tmp_path, stop_seconds=0.3) as processes:
        await processes.start("mother", python(MOTHER.format(child=CHILD.format(handler=deaf))), children=True)
        await said(log, "ready")
        await said(log, "is up")
        child = int(log.read_text().split(" is up")[0].split()[-1])
        assert alive(child)
    await until(lambda: not alive(child))
