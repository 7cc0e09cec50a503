import json
import re
import subprocess
from pathlib import Path

import pytest

from epp import __version__
from hack.supply.sbom import sbom

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]


def pinned(name: str) -> dict[tuple[str, str], set[str]]:
    """(package, version) -> hashes of its files, as the requirements file has them."""
    text = (ROOT / "requirements" / f"{name}.txt").read_text(encoding="utf-8").replace("\\\n", " ")
    found: dict[tuple[str, str], set[str]] = {}
    for package, version, rest in re.findall(r"^([\w.-]+)==([^ ;]+)(.*)$", text, re.MULTILINE):
        found.setdefault((package, version), set()).update(re.findall(r"--hash=sha256:([0-9a-f]+)", rest))
    return found


@pytest.mark.parametrize("name", ["kube", "run"])
def test_every_pinned_package_is_there_with_the_hashes_of_its_files(name: str) -> None:
    made = sbom(name)
    told = {
        (each["name"], each["version"]): {
            found["content"] for reference in each["externalReferences"] for found in reference["hashes"]
        }
        for each in made["components"]
    }
    assert told == pinned(name)
    assert all(told.values())
    root = made["metadata"]["component"]
    assert (root["name"], root["version"]) == ("warmpath", __version__)
    edges = {each["ref"]: each.get("dependsOn", []) for each in made["dependencies"]}
    assert set(edges[root["bom-ref"]]) == {each["bom-ref"] for each in made["components"]}


def test_the_command_prints_the_same_bytes_each_time() -> None:
    first, second = (subprocess.run(["hack/sbom"], cwd=ROOT, capture_output=True, check=True).stdout for _ in range(2))
    assert first == second
    assert json.loads(first)["bomFormat"] == "CycloneDX"
