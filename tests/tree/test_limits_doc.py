"""docs/limits.md is true: its configurations load, its guard and the test of it run, its names are in the code."""

import os
import re
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import get_args

from epp import protocol
from epp.configuration.describe import describe
from epp.configuration.loader import load_text
from epp.configuration.schema import TenantLimitsSpec
from epp.documents.strict import parameters_of
from epp.flow.limits import FORGET, MAX_TENANTS, TELL, Limit
from epp.flow.tenants import ANONYMOUS, LONGEST
from epp.telemetry.metrics_table import FAMILIES

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"```(python|yaml)(?: file=(\S+))?\n(.*?)```", re.DOTALL)


def test_the_configuration_loads_and_check_shows_its_limits() -> None:
    text = next(text for kind, file, text in BLOCK.findall(PAGE) if kind == "yaml" and not file)
    pipeline = load_text(text, clock=lambda: 0.0, random=Random(0))
    assert pipeline.limits is not None
    shown = describe(pipeline)
    assert "tenant by header x-jwt-payload, claim org.team" in shown
    assert "tenant free: 20 requests a minute, 200000 tokens a minute, 2 requests at once" in shown
    assert "tenant batch: 2000000 tokens a minute, 50 requests at once" in shown


def test_the_guard_is_short_and_its_test_passes(tmp_path: Path) -> None:
    run = []
    for kind, file, text in BLOCK.findall(PAGE):
        if file:
            (tmp_path / file).write_text(text, encoding="utf-8")
        elif kind == "python":
            run.append(text)
    assert (tmp_path / "my_guards.py").read_text(encoding="utf-8").count("\n") <= 20
    for text in run:
        environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{tmp_path}"}
        done = subprocess.run(
            [sys.executable, "-c", text], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
    assert len(run) == 1


def test_names_and_bounds_are_those_of_the_code() -> None:
    for name in parameters_of(TenantLimitsSpec):
        assert f"`{name}`" in PAGE
    for name in (ANONYMOUS, "limits-too-many-tenants", protocol.DROP_LIMIT, "warmpath_limit_refused_total"):
        assert name in PAGE
    assert f"within {TELL:g} s" in PAGE
    assert f"{MAX_TENANTS:,} tenants" in PAGE
    assert f"to {LONGEST} characters" in PAGE
    assert FORGET == 3.0
    assert "three seconds more" in PAGE
    (family,) = (each for each in FAMILIES if each.name == "warmpath_limit_refused_total")
    assert all(limit in family.help for limit in get_args(Limit))
