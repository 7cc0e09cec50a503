"""docs/metrics.md names what is not there of llm-d's metrics, and no more than that."""

import re
from pathlib import Path

from epp.telemetry.metrics_table import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"


def test_what_is_said_to_be_missing_is() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("| not there, all of")[2]
    missing = {
        f"llm_d_epp_{name}" for line in text.splitlines()[2:] for name in re.findall("`(.+?)`", line.split("|")[1])
    }
    exported = {name for family in FAMILIES for name in (family.name, *(alias.name for alias in family.aliases))}
    assert len(missing) > 30
    assert missing & exported == set()
