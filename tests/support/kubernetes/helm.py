"""helm and our chart, as a user has them."""

import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).parents[3] / "manifests" / "chart"
KUBERNETES = "1.34.0"
"""What the chart is rendered for where no cluster says."""


class HelmFailed(Exception):
    """What helm said."""


def helm(*arguments: str, values: Mapping[str, Any] | None = None, kubeconfig: Path | None = None) -> str:
    """What helm prints, with a values file if there are any. HelmFailed when it fails."""
    assert shutil.which("helm"), (
        "helm was not found: `hack/test kubernetes` and `hack/test e2e` build it (hack/binaries)"
    )
    command = ["helm", *(["--kubeconfig", str(kubeconfig)] if kubeconfig else []), *arguments]
    stdin = None if values is None else yaml.safe_dump(dict(values))
    command += [] if values is None else ["--values", "-"]
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        raise HelmFailed(f"{' '.join(command)}: {done.stderr.strip()}")
    return done.stdout


def rendered(values: Mapping[str, Any], *arguments: str, namespace: str = "default") -> list[Any]:
    """What the chart makes of these values. HelmFailed when it refuses them."""
    flags = ("--namespace", namespace, "--kube-version", KUBERNETES)
    return list(yaml.safe_load_all(helm("template", "warmpath", str(CHART), *flags, *arguments, values=values)))


def commands(notes: str) -> str:
    """The commands that an installation's notes tell people to run: their indented lines."""
    return "\n".join(re.findall(r"^  (.*)$", notes.partition("NOTES:\n")[2], re.MULTILINE))
