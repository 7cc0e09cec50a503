"""`hack/packages` with an apt-get that gives up where another one is at work, as Debian's does over its lists."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
APT = """#!/bin/sh
mkdir "$FAKE/locked" || { echo "E: Could not get lock" >&2; exit 100; }
trap 'rmdir "$FAKE/locked"' EXIT
sleep 0.2
[ ! -e "$FAKE/offline" ] || { echo "E: no network" >&2; exit 100; }
echo "$@" >>"$FAKE/said"
"""


def start(folder: Path, *packages: str, user: int = 0) -> subprocess.Popen[str]:
    fake = folder / "bin"
    if not fake.exists():  # else one that was started before may be about to run them
        fake.mkdir()
        for name, text in (("apt-get", APT), ("id", f"#!/bin/sh\necho {user}\n")):
            (fake / name).write_text(text)
            (fake / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{fake}:{os.environ['PATH']}",
        "FAKE": str(folder),
        "XDG_CACHE_HOME": str(folder),
    }
    return subprocess.Popen([ROOT / "hack" / "packages", *packages], env=environment, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen[str]) -> tuple[int, str]:
    _, said = process.communicate(timeout=30)
    return process.returncode, said


def test_those_that_install_side_by_side_take_turns(tmp_path: Path) -> None:
    names = ["chromium", "debootstrap", "prometheus"]
    assert [end(process) for process in [start(tmp_path, name) for name in names]] == [(0, "")] * 3
    said = (tmp_path / "said").read_text().splitlines()
    assert said[::2] == ["update -q"] * 3
    assert sorted(line.split()[-1] for line in said[1::2]) == names


@pytest.mark.parametrize("packages", [["wrk", "nginx-light"], ["chromium"]])
def test_who_is_not_root_reads_what_to_install(tmp_path: Path, packages: list[str]) -> None:
    status, said = end(start(tmp_path, *packages, user=1000))
    assert status == 1
    names = " ".join(packages)
    assert said == f"missing: {names}; as root, on Debian and Ubuntu: apt-get install {names}\n"
    assert not (tmp_path / "said").exists()


def test_what_apt_get_says_is_shown_and_nothing_is_installed_of_lists_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "offline").touch()
    assert end(start(tmp_path, "chromium")) == (100, "E: no network\n")
    assert not (tmp_path / "said").exists()


def test_no_package_is_refused(tmp_path: Path) -> None:
    assert end(start(tmp_path)) == (2, "usage: hack/packages PACKAGE...\n")
