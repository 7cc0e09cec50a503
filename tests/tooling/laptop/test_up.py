import asyncio
import os
import re
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

import tooling.laptop.up
from tests.support.gateway.chain import eventually
from tests.support.process.child_processes import Family
from tooling.laptop.engines import Simulated
from tooling.laptop.load import Outcome
from tooling.laptop.ports import free_ports
from tooling.laptop.up import UpError, UpOptions, comparison, run
from tooling.simulator.workloads import chats

pytestmark = pytest.mark.envoy

ON_A_TERMINAL = """
import fcntl, os, sys, termios
os.setsid()
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""


class Up:
    """A `warmpath up` in a process of its own, and all it says."""

    def __init__(self, process: asyncio.subprocess.Process, family: Family, port: int, ours: int) -> None:
        self.process = process
        self.family = family
        self.port = port
        self.ours = ours
        """Our end of its terminal or of its output."""
        self.said = b""

    async def until(self, text: str) -> str:
        async def said() -> str:
            return self.said.decode(errors="replace")

        return str(await eventually(said, lambda said: text in said))

    async def ended(self) -> int:
        """Its status, once it and all that it started are gone."""
        async with asyncio.timeout(20):
            status = await self.process.wait()

        async def left() -> dict[int, str]:
            return self.family.alive()

        await eventually(left, lambda alive: alive == {})
        return status


@asynccontextmanager
async def up(*flags: str, terminal: bool = False) -> AsyncIterator[Up]:
    family, port = Family(), free_ports(1)[0]
    command = [sys.executable, "-m", "epp.cli", "up", "--port", str(port), "--pods", "2", *flags]
    ours, theirs = os.openpty() if terminal else os.pipe()
    if terminal:
        command = [sys.executable, "-c", ON_A_TERMINAL, *command]
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=theirs if terminal else asyncio.subprocess.DEVNULL,
        stdout=theirs,
        stderr=theirs,
        env={**family.environment, "TERM": "xterm", "COLUMNS": "140", "LINES": "40"},
    )
    os.close(theirs)
    made = Up(process, family, port, ours)
    asyncio.get_running_loop().add_reader(ours, _read, made)
    try:
        yield made
    finally:
        asyncio.get_running_loop().remove_reader(ours)
        os.close(ours)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


def _read(made: Up) -> None:
    try:
        piece = os.read(made.ours, 65536)
    except OSError:  # the terminal's other end is closed
        piece = b""
    made.said += piece
    if not piece:
        asyncio.get_running_loop().remove_reader(made.ours)


async def test_on_a_terminal_it_shows_a_table_until_ctrl_c() -> None:
    async with up(terminal=True) as run:
        said = await run.until("last decisions")
        plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", said)
        assert f"http://127.0.0.1:{run.port} speaks OpenAI to 2 simulated pods" in plain
        curl = next(line for line in plain.splitlines() if line.startswith("curl -s"))
        assert curl.endswith('"content": "Hello"}]}\'')  # in one line, however narrow the terminal
        await run.until("default/pod-b")
        os.write(run.ours, b"\x03")
        assert await run.ended() == 130
        assert "Traceback" not in await run.until("")


async def test_without_a_terminal_it_tells_line_by_line_until_sigterm() -> None:
    async with up("--load") as run:
        said = await run.until(" -> default/pod-")
        assert "\x1b" not in said
        assert re.search(r"[0-9a-f-]{36} -> default/pod-[ab]: [0-9.]+ ms \(", said)
        os.kill(run.family.pid("--name pod-b "), signal.SIGKILL)
        await run.until("the gateway follows the changed files")
        assert re.search(r"^pod-b was killed by SIGKILL: .*; the others go on without it$", await run.until(""), re.M)
        run.process.terminate()
        assert await run.ended() == 143
        assert "Traceback" not in await run.until("")


async def ask(port: int, request_id: bytes) -> None:
    """A completion, with this for its id, byte for byte."""
    body = b'{"model": "sim", "prompt": "Hello", "max_tokens": 1}'
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\ncontent-type: application/json\r\n"
        b"x-request-id: " + request_id + b"\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    assert b" 200 " in await reader.readline()
    await reader.read()
    writer.close()


@pytest.mark.parametrize("terminal", [False, True])
async def test_a_request_id_neither_ends_it_nor_reaches_the_terminal_unescaped(terminal: bool) -> None:
    async with up(terminal=terminal) as run:
        await run.until("speaks OpenAI")
        for number, request_id in enumerate((b"[/x]", b"[bold red]", "\x9b2J\u202e".encode(), b"\xff")):
            await ask(run.port, request_id + b"%d" % number)
        said = await run.until("\\xff3")
        for shown in ("[/x]0", "[bold red]1", "\\x9b2J\\u202e"):
            assert shown in said
        assert not {"\x9b", "\u202e"} & set(said)
        assert run.process.returncode is None


async def test_nothing_outlives_it_even_when_it_is_killed() -> None:
    async with up() as run:
        await run.until("speaks OpenAI")
        assert len(run.family.alive()) == 5
        run.process.kill()
        assert await run.ended() == -9


async def test_when_the_chain_cannot_go_on_it_says_why_and_ends() -> None:
    async with up() as run:
        await run.until("speaks OpenAI")
        os.kill(run.family.pid("epp.cli serve"), signal.SIGKILL)
        assert await run.ended() == 1
        said = await run.until("Error: epp-1 was killed by SIGKILL")
        assert "Traceback" not in said


@pytest.mark.parametrize("terminal", [False, True])
async def test_ctrl_c_while_it_starts(terminal: bool) -> None:
    async with up(terminal=terminal) as run:

        async def started() -> bool:
            return any("tooling.simulator.server" in command for command in run.family.alive().values())

        await eventually(started, bool)
        if terminal:
            os.write(run.ours, b"\x03")
        else:
            run.process.send_signal(signal.SIGINT)
        assert await run.ended() == 130
        assert "Traceback" not in await run.until("")


async def test_a_port_in_use_is_one_sentence() -> None:
    with socket.create_server(("127.0.0.1", free_ports(1)[0])) as server:
        port = server.getsockname()[1]
        async with up("--port", str(port)) as run:
            assert await run.ended() == 1
            said = await run.until("Error")
            assert said.strip() == f"Error: port {port} is in use by another program; choose another with --port"


# --- --once ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def workload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tooling.laptop.up, "demo", lambda seed: chats(seed, sessions=2, turns=2, seconds=0.1))


def once(logs: Path) -> UpOptions:
    return UpOptions(once=True, pods=2, port=free_ports(1)[0], keep_logs=logs)


MINE = """
apiVersion: llm-d.ai/v1
kind: EndpointPickerConfig
plugins: [{type: picker_of_mine.Last}]
schedulingProfiles: [{name: default, plugins: [{pluginRef: picker_of_mine.Last}]}]
"""
LAST = """
from epp.plugin import Picker

class Last(Picker):
    def pick(self, request, scored):
        return [scored[-1][0]]
"""


async def test_once_compares_with_a_configuration_and_the_plugins_beside_it(
    tmp_path: Path, workload: None, capsys: pytest.CaptureFixture[str]
) -> None:
    config, logs = tmp_path / "mine.yaml", tmp_path / "logs"
    config.write_text(MINE)
    (tmp_path / "picker_of_mine.py").write_text(LAST)
    assert await run(replace(once(logs), config=config)) == 0
    said = capsys.readouterr().out
    header = next(line for line in said.splitlines() if "ratio" in line)
    assert "round-robin" in header
    assert "mine.yaml" in header
    assert said.count("4 of 4") == 2
    assert (logs / "strategy.yaml").read_text() == MINE


async def test_once_fails_when_an_answer_is_missing(
    tmp_path: Path, workload: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Simulated, "model", "not-there")
    assert await run(replace(once(tmp_path), strategy="round-robin")) == 1
    said = capsys.readouterr().out
    assert "0 of 4" in said
    assert "no answer round-robin: " in said


def test_the_comparison_has_a_ratio_for_each_figure() -> None:
    slow = Outcome(requests=2, ttfts=[0.2, 0.2], completion_tokens=10, prompt_tokens=100, cached_tokens=0, seconds=2)
    fast = Outcome(requests=2, ttfts=[0.1, 0.1], completion_tokens=10, prompt_tokens=100, cached_tokens=80, seconds=1)
    console = Console(width=120)
    with console.capture() as captured:
        console.print(comparison({"a": slow, "b": fast}))
    rows = {line.split("│")[1].strip(): line for line in captured.get().splitlines() if line.startswith("│")}
    assert [cell.strip() for cell in rows["TTFT p50"].split("│")[2:5]] == ["200 ms", "100 ms", "0.50"]
    assert [cell.strip() for cell in rows["throughput"].split("│")[2:5]] == ["5 tokens/s", "10 tokens/s", "2.00"]
    assert [cell.strip() for cell in rows["prefix hit rate"].split("│")[2:5]] == ["0 %", "80 %", "–"]


async def test_roles_without_nixl_are_refused_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tooling.laptop.up.engine_python", lambda: Path("/bin/false"))
    with pytest.raises(UpError, match="--roles needs NIXL beside vLLM: run `hack/install engine`"):
        await run(UpOptions(engine="vllm", roles="1p1d"))


async def test_an_engine_that_is_not_installed_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tooling.laptop.engines.ENGINE_PYTHON", tmp_path / "bin" / "python")
    monkeypatch.setattr("tooling.laptop.engines.find_spec", lambda name: None)
    with pytest.raises(UpError, match="vLLM is not installed: run `hack/install engine`"):
        await run(UpOptions(engine="vllm"))
