import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> "subprocess.CompletedProcess[str]":
    env = {**os.environ, "PYTHON": sys.executable}
    return subprocess.run([ROOT / "hack" / "bench", *arguments], capture_output=True, text=True, env=env)


def test_without_a_name_it_lists_the_benchmarks() -> None:
    done = bench()
    assert done.returncode == 2
    for path in (ROOT / "hack" / "benches").glob("*.py"):
        assert f"  {path.stem}" in done.stderr


def test_an_unknown_name_is_refused() -> None:
    done = bench("nothing")
    assert done.returncode == 2
    assert "no benchmark 'nothing'" in done.stderr


def test_options_reach_the_benchmark() -> None:
    done = bench("picker", "--help")
    assert done.returncode == 0, done.stderr
    assert "--epp-command" in done.stdout
