"""`hack/binaries` with a Go that only talks: what it says, and what it keeps to itself."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GO = """#!/bin/sh
case $1 in
  mod) mkdir -p "$FAKE/source" && touch "$FAKE/source/go.mod"
       echo "go: downloading a.example/module v1.0.0" >&2
       printf '\\t"Dir": "%s",\\n' "$FAKE/source" ;;
  build) echo "go: downloading b.example/module v2.0.0" >&2
       [ -z "$FAKE_FAILS" ] || { echo "undefined: Everything" >&2; exit 1; }
       while [ "$1" != -o ]; do shift; done
       echo made >"$2" && chmod +x "$2" ;;
  version) case $3 in
         */helm) printf '\\tmod\\thelm.sh/helm/v3\\tv3.99.7\\th1:=\\n\\tdep\\thelm.sh/other\\tv5.0.0\\n' ;;
         *) printf '\\tmod\\tgithub.com/envoyproxy/gateway\\t(devel)\\n' ;;
       esac ;;
esac
"""


def binaries(folder: Path, *programs: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    fake = folder / "bin"
    fake.mkdir(exist_ok=True)
    (fake / "go").write_text(GO)
    (fake / "go").chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{fake}:{os.environ['PATH']}",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "FAKE": str(folder),
        "FAKE_FAILS": "1" if fails else "",
    }
    command = [str(ROOT / "hack" / "binaries"), str(folder / "programs"), *programs]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize(("program", "version"), [("helm", "3.99.7"), ("envoy-gateway", "1.9.1"), ("kind", "0.33.0")])
def test_a_program_is_reported_in_one_line_with_its_own_version(tmp_path: Path, program: str, version: str) -> None:
    done = binaries(tmp_path, program)
    assert done.returncode == 0, done.stderr
    (line,) = (done.stdout + done.stderr).splitlines()
    assert line.startswith(f"hack/binaries: built {program} {version} in ")
    assert (tmp_path / "programs" / program).read_text() == "made\n"
    assert binaries(tmp_path, program).stderr == ""


def test_what_go_said_is_shown_where_a_build_fails(tmp_path: Path) -> None:
    done = binaries(tmp_path, "kind", "helm", fails=True)
    assert done.returncode != 0
    assert "undefined: Everything" in done.stderr
    assert "could not build kind" in done.stderr
    assert "helm" not in done.stderr
    assert not (tmp_path / "programs" / "kind").exists()
