"""Arguments of `warmpath serve` as manifests have them, and what they come to."""

import re
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner

import epp.app
from epp.cli import warmpath, with_command


def settings_of(arguments: Sequence[str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> epp.app.Settings:
    """What a container with these arguments would run with, in the namespace `inference`. Mounted files are taken from
    `folder`, by their names.

    AssertionError with what the command line says if it refuses them.
    """
    seen: list[epp.app.Settings] = []

    def run(settings: epp.app.Settings) -> int:
        seen.append(settings)
        return 0

    monkeypatch.setattr(epp.app, "run", run)
    (folder / "certs").mkdir(exist_ok=True)
    arguments = [each.replace("$(NAMESPACE)", "inference") for each in arguments]
    arguments = [re.sub("(^|=)/(?=config/|certs)", rf"\g<1>{folder}/", each) for each in arguments]
    (folder / "config").mkdir(exist_ok=True)
    for argument in arguments:
        name = Path(argument.rpartition("=")[2])
        if name.parent == folder / "config" and name.suffix == ".yaml":
            name.write_text("")
    reported = CliRunner().invoke(warmpath, with_command(arguments), env={"NAMESPACE": None, "WARMPATH_HOST": None})
    assert reported.exit_code == 0, f"{arguments}: {reported.output}"
    [settings] = seen
    return settings
