"""docs/flow-control.md is true: its configuration loads, its commands run, its names are in the code."""

import re
import subprocess
from pathlib import Path
from random import Random
from typing import get_args

from epp import protocol
from epp.configuration.builtin import CLASSES
from epp.configuration.describe import describe
from epp.configuration.loader import load_text
from epp.flow.control import Outcome
from epp.flow.queues import BAND_BYTES, BAND_REQUESTS, TTL

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "flow-control.md").read_text(encoding="utf-8")


def test_the_configuration_loads_and_says_what_the_page_says() -> None:
    (text,) = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    pipeline = load_text(text, clock=lambda: 0.0, random=Random(0))
    assert pipeline.flow is not None
    assert pipeline.flow.detector.name == "expected-ttft"
    assert "priority 100" in describe(pipeline)
    assert pipeline.flow.band(-1).ttl == 0.0


def test_the_commands_run() -> None:
    (block,) = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
    check, replay = block.strip().splitlines()
    for command in (check, f"{replay} --requests 300"):
        done = subprocess.run(command.split(), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
    assert "interactive" in done.stdout
    assert "prefix-aware+flow-control" in done.stdout


def test_limits_headers_outcomes_and_types_are_those_of_the_code() -> None:
    assert f"{BAND_REQUESTS:,} requests or {BAND_BYTES / 1e9:g} GB" in PAGE
    assert f"it has waited {TTL:g} s" in PAGE
    for outcome in get_args(Outcome):
        assert f"`{outcome}`" in PAGE
    for reason in (protocol.DROP_SATURATED, protocol.DROP_TTL_EXPIRED, protocol.DROP_NO_ENDPOINTS):
        assert f"`{reason}`" in PAGE
    for header in (protocol.OBJECTIVE[0], protocol.FAIRNESS_ID[0], protocol.REQUEST_TTL, protocol.SLO_TTFT_MS[0]):
        assert f"`{header}`" in PAGE
    for name in re.findall(r"`([a-z-]+(?:-policy|-fairness|-detector))`", PAGE):
        assert name in CLASSES
