"""Every argument list of the picker that we ship is one the picker takes."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.process.serve_args import settings_of

MANIFESTS = Path(__file__).parents[2] / "manifests"
ARGS = "/spec/template/spec/containers/0/args/"


def kustomization(folder: Path) -> Any:
    return yaml.safe_load((folder / "kustomization.yaml").read_text(encoding="utf-8"))


def patched(folder: Path, args: list[str]) -> list[str]:
    """The picker's arguments after this kustomization, as kustomize orders it: resources, components, patches."""
    content = kustomization(folder)
    for each in (*content.get("resources", ()), *content.get("components", ())):
        if (folder / each).is_dir():
            args = patched((folder / each).resolve(), args)
        elif each == "deployment.yaml":
            args = picker_args(folder / each) or args
    for patch in content.get("patches", ()):
        if patch.get("target", {}).get("kind") == "Deployment" and patch["target"].get("name") == "warmpath":
            for operation in yaml.safe_load(patch["patch"]):
                args = applied(operation, args)
    return args


def picker_args(path: Path) -> list[str]:
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
        for container in document["spec"]["template"]["spec"]["containers"]:
            if container["name"] == "warmpath":
                return list(container["args"])
    return []


def applied(operation: Any, args: list[str]) -> list[str]:
    if not operation["path"].startswith(ARGS):
        return args
    at = operation["path"].removeprefix(ARGS)
    if operation["op"] == "add":
        assert at == "-"
        return [*args, operation["value"]]
    if operation["op"] == "test":
        assert args[int(at)] == operation["value"]
        return args
    assert operation["op"] == "replace"
    return [*args[: int(at)], operation["value"], *args[int(at) + 1 :]]


OVERLAYS = sorted(path.name for path in (MANIFESTS / "overlays").iterdir())
COMPONENTS = ["ha", "monitoring", "tls", "autoscaling"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_arguments_of_an_overlay_are_taken(overlay: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = patched(MANIFESTS / "overlays" / overlay, [])
    for component in COMPONENTS:
        if component != "tls" or "--secure-serving=true" in args:
            args = patched(MANIFESTS / "components" / component, args)
    settings = settings_of(args, tmp_path, monkeypatch)
    assert settings.idle_flags == ()
    assert settings.peers_service == ("inference", "warmpath-replicas")
    assert settings.pool_name
    assert bool(settings.endpoint_selector) == ("standalone" in overlay)
