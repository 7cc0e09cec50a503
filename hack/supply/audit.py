"""Known vulnerabilities of the pinned packages, from the first database that tells of all of them: OSV, then PyPI.

pip-audit calls a package that a database does not know "skipped", and a run in which all were skipped a success. Here
that is no answer: what was not looked at is not said to be well.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final, NamedTuple

ROOT: Final = Path(__file__).parents[2]
DATABASES: Final = ("osv", "pypi")
NONE_KNOWN, FOUND, UNKNOWN = 0, 1, 3
"""Exit statuses."""


class Verdict(NamedTuple):
    """What one database says of one file."""

    status: int
    lines: list[str]


def verdict(report: str) -> Verdict:
    """Of pip-audit's JSON; an empty text is that of a database that does not answer."""
    packages: list[dict[str, Any]] = json.loads(report)["dependencies"] if report.strip() else []
    found = [
        f"{each['name']} {each['version']}: {known['id']}, fixed in {', '.join(known['fix_versions']) or 'no version'}"
        for each in packages
        for known in each.get("vulns", ())
    ]
    skipped = [each["name"] for each in packages if "skip_reason" in each]
    if found:
        return Verdict(FOUND, found)
    if not packages:
        return Verdict(UNKNOWN, ["it does not answer"])
    if skipped:
        return Verdict(UNKNOWN, [f"it knows nothing of {len(skipped)} of {len(packages)} packages"])
    return Verdict(NONE_KNOWN, [f"none is known of {len(packages)} packages"])


def asked(file: Path, database: str) -> Verdict:
    command = (
        *(sys.executable, "-m", "pip_audit", "--vulnerability-service", database, "--requirement", str(file)),
        *("--disable-pip", "--no-deps", "--timeout", "10", "--progress-spinner", "off", "--format", "json"),
    )
    return verdict(subprocess.run(command, capture_output=True, text=True, check=False).stdout)


def main() -> int:
    parser = argparse.ArgumentParser(prog="hack/audit", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", default=["kube", "run"], metavar="NAME", help="of requirements/NAME.txt")
    worst = NONE_KNOWN
    for name in parser.parse_args().names:
        for database in DATABASES:
            status, lines = asked(ROOT / "requirements" / f"{name}.txt", database)
            for line in lines:
                print(f"requirements/{name}.txt, {database}: {line}", flush=True)
            if status != UNKNOWN:
                break
        worst = FOUND if FOUND in (status, worst) else max(worst, status)
    if worst == UNKNOWN:
        print("hack/audit: not audited: no database told of every package; this is no finding, and no all-clear")
    return worst


if __name__ == "__main__":
    sys.exit(main())
