"""Nothing in the tree names a machine, or a package registry, or is half merged."""

import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]

# Written in pieces, so that this file does not match itself.
FORBIDDEN = re.compile(
    "|".join(
        (
            r"py" + r"pi\.org",
            r"pythonhos" + r"ted\.org",
            r"registry\.n" + r"pmjs",
            r"proxy\.gol" + r"ang",
            r"crates" + r"\.io/",
            r"(?<![\w.])/wo" + r"rk/[a-z.]",
            r"(?<![\w.])/ro" + r"ot/[a-z.]",
            r"^(?:<{7}|>{7}) ",
        )
    )
)


def tracked() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    return [ROOT / name for name in listed.decode().split("\0") if name]


def test_no_registry_host_no_machine_path_and_no_half_merge_is_committed() -> None:
    found = []
    for path in tracked():
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
            if FORBIDDEN.search(line):
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert found == []


def test_scripts_are_executable_and_say_what_they_do() -> None:
    for path in (ROOT / "hack").iterdir():
        if not path.is_file():
            continue
        assert path.stat().st_mode & 0o111, f"{path} is not executable"
        first, second = path.read_text(encoding="utf-8").splitlines()[:2]
        assert first.startswith("#!"), path
        assert second.startswith(("# ", '"""')), f"{path} does not say what it does in its second line"
