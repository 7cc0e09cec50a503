"""`hack/crds`, as README and docs/kubernetes.md have it, on API servers of their own: what others installed stays."""

import copy
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.kubernetes.control_plane import ControlPlane

ROOT = Path(__file__).parents[2]
CRDS = ROOT / "manifests" / "crds"
POOLS = "inferencepools.inference.networking.k8s.io"
BUNDLE = "inference.networking.k8s.io/bundle-version"
AT = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"


@pytest.fixture
def empty(tmp_path: Path) -> Iterator[ControlPlane]:
    """An API server without any of these definitions."""
    plane = ControlPlane(tmp_path)
    try:
        plane.start()
        yield plane
    finally:
        plane.stop()


def install(plane: ControlPlane) -> str:
    """Run the command of README's block for a cluster; what it printed."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"<!-- cluster -->\n```bash\n(.*?)```", text, re.DOTALL)
    command = block.splitlines()[0]
    path = f"{os.environ['KUBEBUILDER_ASSETS']}:{os.environ['PATH']}"
    environment = {**os.environ, "KUBECONFIG": str(plane.kubeconfig()), "PATH": path}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def found(plane: ControlPlane) -> dict[str, Any]:
    """By name: what is said of each definition, without what the API server notes of it."""
    items = plane.call("GET", AT)["items"]
    return {each["metadata"]["name"]: (each["spec"], each["metadata"].get("annotations")) for each in items}


def fuller(made: Any) -> Any:
    """A definition of InferencePool as a gateway's own bundle has it: with a version, and with fields ours lacks."""
    made = copy.deepcopy(made)
    made["metadata"]["annotations"][BUNDLE] = "v1.5.0"
    (version,) = made["spec"]["versions"]
    schema = version["schema"]["openAPIV3Schema"]
    schema["description"] = "A group of model servers."
    schema["properties"]["spec"]["properties"]["futureField"] = {"type": "string", "maxLength": 63}
    version["additionalPrinterColumns"] = [{"name": "Age", "type": "date", "jsonPath": ".metadata.creationTimestamp"}]
    return made


def test_what_a_cluster_lacks_is_installed_and_again_brought_up_to_date(empty: ControlPlane) -> None:
    printed = install(empty)
    names = {yaml.safe_load(path.read_text())["metadata"]["name"] for path in CRDS.glob("inference*.yaml")}
    assert found(empty).keys() == names
    assert printed.count("serverside-applied") == len(names) == 3
    before = found(empty)
    assert install(empty).count("serverside-applied") == 3
    assert found(empty) == before


@pytest.mark.parametrize("how", [("--server-side",), ()])
def test_a_definition_of_others_loses_nothing(empty: ControlPlane, how: tuple[str, ...]) -> None:
    theirs = yaml.safe_dump(fuller(yaml.safe_load((CRDS / "inferencepools.yaml").read_text(encoding="utf-8"))))
    empty.kubectl("apply", *how, "-f", "-", stdin=theirs)
    before = found(empty)[POOLS]
    assert "futureField" in str(before[0])
    printed = install(empty)
    after = found(empty)
    assert after[POOLS] == before
    assert after[POOLS][1][BUNDLE] == "v1.5.0"
    assert f"{POOLS} left as it is" in printed
    assert len(after) == 3


def test_a_definition_of_others_may_take_the_place_of_ours_and_stays(empty: ControlPlane) -> None:
    install(empty)
    theirs = fuller(yaml.safe_load((CRDS / "inferencepools.yaml").read_text(encoding="utf-8")))
    empty.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(theirs))
    before = found(empty)[POOLS]
    assert "futureField" in str(before[0])
    install(empty)
    assert found(empty)[POOLS] == before
