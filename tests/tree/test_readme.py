"""The README is run: every shell and Python block, in order, in a copy of the tree, as a newcomer would."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path

import pytest

from tooling.laptop.ports import free_ports

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:<!-- (?:background: until (?P<until>\S+)|(?P<elsewhere>cluster)) -->\n)?"
    r"```(?P<language>bash|python|yaml)(?: file=(?P<file>\S+))?\n(?P<text>.*?)```",
    re.DOTALL,
)
START_SECONDS = 120.0


@dataclass
class Block:
    language: str
    text: str
    file: str | None
    until: str | None


def blocks(markdown: str) -> list[Block]:
    """Those for a cluster are left to tests/e2e."""
    found = (m for m in BLOCK.finditer(markdown) if not m["elsewhere"])
    return [Block(m["language"], m["text"], m["file"], m["until"]) for m in found]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A copy of what is tracked, using this checkout's environment."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    for name in filter(None, listed.decode().split("\0")):
        if (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tmp_path / name)
    (tmp_path / ".venv").symlink_to(Path(sys.prefix))
    return tmp_path


def wait_until(url: str, process: "subprocess.Popen[bytes]", log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        assert process.poll() is None, log.read_text()
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    pytest.fail(f"{url} did not answer: {log.read_text()}")


@pytest.mark.envoy
def test_every_block_runs(tree: Path) -> None:
    main, other = free_ports(2)
    markdown = (ROOT / "README.md").read_text(encoding="utf-8")
    markdown = markdown.replace("127.0.0.1:8080", f"127.0.0.1:{main}").replace("--port 8081", f"--port {other}")
    ran = 0
    background: list[subprocess.Popen[bytes]] = []
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    try:
        for block in blocks(markdown):
            if block.file:
                (tree / block.file).write_text(block.text, encoding="utf-8")
            elif block.until:
                command = block.text.strip() + f" --port {main}"
                log = tree / "background.log"
                with log.open("wb") as output:
                    background.append(
                        subprocess.Popen(["bash", "-c", f"exec {command}"], cwd=tree, stdout=output, stderr=output)
                    )
                wait_until(block.until, background[-1], log)
            elif block.language != "yaml":
                shell = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
                done = subprocess.run(
                    [*shell, block.text], cwd=tree, env=environment, capture_output=True, text=True, timeout=300
                )
                assert done.returncode == 0, f"{block.text}\n{done.stdout}\n{done.stderr}"
                assert done.stdout.strip(), f"says nothing: {block.text}"
                assert '"error"' not in done.stdout, f"{block.text}\n{done.stdout}"
                ran += 1
    finally:
        for process in background:
            process.send_signal(signal.SIGINT)
            assert process.wait(30) in (0, 130)
    assert ran >= 8


def test_every_link_leads_somewhere() -> None:
    markdown = (ROOT / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)\)", markdown)
    assert links
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_stock_strategy_is_named() -> None:
    markdown = (ROOT / "README.md").read_text(encoding="utf-8")
    strategies = [path.stem for path in (ROOT / "epp" / "configuration" / "strategies").glob("*.yaml")]
    assert [name for name in strategies if f"`{name}`" not in markdown] == []
