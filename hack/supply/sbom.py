"""A bill of materials of one requirements file, in CycloneDX: every package with its version and its files' hashes."""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

from epp import __version__

ROOT: Final = Path(__file__).parents[2]


def sbom(name: str) -> dict[str, Any]:
    """Of `requirements/NAME.txt`. It has no time and no serial number: of the same file it is the same."""
    command = (
        *(sys.executable, "-m", "cyclonedx_py", "requirements", "--output-reproducible", "--spec-version", "1.6"),
        *("--pyproject", "pyproject.toml", "--mc-type", "application", f"requirements/{name}.txt"),
    )
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    made: dict[str, Any] = json.loads(done.stdout)
    root = made["metadata"]["component"]
    root["version"] = __version__
    # The file has pins alone, so the tool knows no edges. We depend on all of them, in one step or more.
    edges = {each["ref"]: each for each in made["dependencies"]}
    edges[root["bom-ref"]] = {
        "ref": root["bom-ref"],
        "dependsOn": sorted(each["bom-ref"] for each in made["components"]),
    }
    made["dependencies"] = [edges[ref] for ref in sorted(edges)]
    return made


def main() -> None:
    parser = argparse.ArgumentParser(prog="hack/sbom", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="?", default="kube", help="of requirements/NAME.txt")
    print(json.dumps(sbom(parser.parse_args().name), indent=1, sort_keys=True))


if __name__ == "__main__":
    main()
