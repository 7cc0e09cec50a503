"""README and docs/ as a newcomer meets them: commands run, links lead somewhere, README is short and true."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tooling.laptop.ports import free_ports

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text(encoding="utf-8")
RUN_HERE = (
    "README.md",
    "docs/run.md",
    "docs/strategies.md",
    "docs/plugins.md",
    "docs/replay.md",
    "docs/operate.md",
    "examples/README.md",
)
RUN_ELSEWHERE = {
    "docs/conformance.md": "tests/tooling/conformance/test_command.py",
    "docs/flow-control.md": "tests/tree/test_flow_control_doc.py",
    "docs/kubernetes.md": "tests/e2e/conftest.py",
    "docs/limits.md": "tests/tree/test_limits_doc.py",
    "docs/pd.md": "tests/tree/test_pd_doc.py",
}
"""Page -> the test that has to do with its commands."""
BLOCK = re.compile(
    r"^ *(?:<!-- (?:background: until (?P<until>\S+)|(?P<elsewhere>cluster)) -->\n *)?"
    r"```(?P<language>bash|python|yaml)(?: file=(?P<file>\S+))?\n(?P<text>.*?)```",
    re.DOTALL | re.MULTILINE,
)
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
START_SECONDS = 120.0
AT_ONCE = 4
"""Most commands wait for a workload that takes its time, rather than for a processor."""


@dataclass(frozen=True)
class Block:
    page: str
    language: str
    text: str
    file: str | None
    until: str | None


def blocks(page: str) -> list[Block]:
    """Those for a cluster are left to tests/e2e."""
    found = (m for m in BLOCK.finditer((ROOT / page).read_text(encoding="utf-8")) if not m["elsewhere"])
    return [Block(page, m["language"], m["text"], m["file"], m["until"]) for m in found]


def pages() -> list[str]:
    listed = subprocess.run(["git", "ls-files", "-z", "*.md"], cwd=ROOT, capture_output=True, check=True).stdout
    return [name for name in listed.decode().split("\0") if name and (ROOT / name).is_file()]


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


@contextmanager
def background(block: Block, port: int, tree: Path) -> Iterator[None]:
    assert block.until
    log = tree / "background.log"
    with log.open("wb") as output:
        command = f"exec {block.text.strip()} --port {port}"
        process = subprocess.Popen(["bash", "-c", command], cwd=tree, stdout=output, stderr=output)
    try:
        wait_until(block.until.replace("8080", str(port)), process, log)
        yield
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)


def run(block: Block, tree: Path, ports: tuple[int, int]) -> None:
    text = block.text.replace("127.0.0.1:8080", f"127.0.0.1:{ports[0]}").replace("--port 8081", f"--port {ports[1]}")
    shell = ["bash", "-euo", "pipefail", "-c"] if block.language == "bash" else [sys.executable, "-c"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    done = subprocess.run(
        [*shell, text], cwd=tree, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    where = f"{block.page}:\n{text}\n"
    assert done.returncode == 0, f"{where}{done.stdout}\n{done.stderr}"
    assert done.stdout.strip(), f"says nothing: {where}"
    assert '"error"' not in done.stdout, f"{where}{done.stdout}"


@pytest.mark.envoy
@pytest.mark.parametrize(
    ("which", "fewest"),
    [
        pytest.param(RUN_HERE[:1], 1, id="README"),
        pytest.param(RUN_HERE[1:], 12, id="docs", marks=pytest.mark.long),
    ],
)
def test_every_block_runs(tree: Path, which: tuple[str, ...], fewest: int) -> None:
    """Beside README's demo, several blocks at once: each stands alone, but for the demo and the pages' files."""
    [demo] = [block for block in blocks("README.md") if block.until]
    found = [block for page in which for block in blocks(page)]
    files = {block.file: block.text for block in found if block.file}
    assert len(files) == len([block for block in found if block.file]), "two pages make a file of one name"
    for name, text in files.items():
        (tree / name).write_text(text, encoding="utf-8")
    ran = [block for block in found if block.language != "yaml" and not block.file and not block.until]
    ran.sort(key=lambda block: "hack/demo" not in block.text)  # those that take longest first
    main, *others = free_ports(1 + len(ran))
    with background(demo, main, tree), ThreadPoolExecutor(AT_ONCE) as workers:
        runs = [workers.submit(run, block, tree, (main, port)) for block, port in zip(ran, others, strict=True)]
        for done in runs:
            done.result()
    assert len(ran) >= fewest
    assert {block.page for block in ran} == set(which)


def test_pages_with_commands_are_run_somewhere() -> None:
    with_commands = {page for page in pages() if any(block.language != "yaml" for block in blocks(page))}
    assert with_commands <= {*RUN_HERE, *RUN_ELSEWHERE}, "add the page to RUN_HERE; what only shows a form is ```sh"
    assert [test for test in RUN_ELSEWHERE.values() if not (ROOT / test).is_file()] == []


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings, and those that stand in the text."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    found: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        found[slug] = found.get(slug, -1) + 1
    numbered = {f"{slug}-{number}" if number else slug for slug, last in found.items() for number in range(last + 1)}
    return numbered | set(re.findall(r'<a id="([^"]+)">', text))


@pytest.mark.parametrize("name", pages())
def test_every_link_and_anchor_leads_somewhere(name: str) -> None:
    page = ROOT / name
    text = re.sub(r"`[^`\n]*`", "", page.read_text(encoding="utf-8"))
    wrong = []
    for link in LINK.findall(text):
        path, _, anchor = link.partition("#")
        to = page.parent / path if path else page
        if not to.exists() or (anchor and to.suffix == ".md" and anchor not in anchors(to)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("# A b\n## A b\n", {"a-b", "a-b-1"}),
        ("## Beside llm-d's [picker](x.md), `now`\n```\n# no\n```\n", {"beside-llm-ds-picker-now"}),
        ('- <a id="here"></a>**x**\n', {"here"}),
    ],
)
def test_anchors_are_those_of_github(tmp_path: Path, text: str, found: set[str]) -> None:
    (tmp_path / "page.md").write_text(text)
    assert anchors(tmp_path / "page.md") == found


def test_every_page_is_in_the_index() -> None:
    listed = set(re.findall(r"\]\(([\w/-]+\.md)", (DOCS / "README.md").read_text(encoding="utf-8")))
    assert {str(page.relative_to(DOCS)) for page in DOCS.rglob("*.md")} - listed == {"README.md"}


def test_readme_is_short() -> None:
    assert README.count("\n") <= 160


def test_every_stock_strategy_is_named() -> None:
    page = (DOCS / "strategies.md").read_text(encoding="utf-8")
    strategies = [path.stem for path in (ROOT / "epp" / "configuration" / "strategies").glob("*.yaml")]
    assert [name for name in strategies if f"`{name}`" not in page] == []


def test_figures_beside_llm_d_are_those_of_the_tables() -> None:
    """README repeats what `hack/bench policies` and `hack/bench peers` made, and no other figure."""
    policies = (DOCS / "policies.md").read_text(encoding="utf-8")
    rows = {row[0]: row[1:] for row in re.findall(r"^\| ([\w-]+) \| ([\d.]+) \| ([\d.]+) \| (\d+) \|$", policies, re.M)}
    assert f"of {len(rows)} policies" in README
    assert f"in {rows['prefix-aware'][2]} settings" in README
    assert f"within {float(rows['prefix-aware'][1]) - 1:.0%}".replace("%", " %") in README
    for name, said in (("llm-d-affinity", "with its affinity filter"), ("llm-d-default", "with its default")):
        assert f"{rows[name][0]} times the best {said}" in README
    table = (DOCS / "sizing.md").read_text(encoding="utf-8").partition("## Beside llm-d")[2]
    ratios = re.findall(r"\| (\d+) KB \| [\d,]+ us \| [\d,]+ us: ([\d.]+) \|", table)  # of llm-d's column
    small, large = ([float(ratio) for size, ratio in ratios if size == of] for of in ("2", "256"))
    ends = [[f"{min(small):.1f}", f"{max(small):.1f}"], [f"{min(large):.0f}", f"{max(large):.0f}"]]
    at_small, at_large = (" to ".join(dict.fromkeys(each)) for each in ends)
    assert f"{at_small} times the CPU at 2 KB, {at_large} times at 256 KB" in README
