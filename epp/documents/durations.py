"""Durations as Go writes them, such as `1m30s` or `200ms`: of flags, of YAML and of Gateway API's routes alike.

Source: Go's `time.ParseDuration`, without signs. Those of Gateway API (GEP-2257) are some of them; which, the fields of
a route say. Not by `durationpy`, which takes days, months and years besides, and numbers without a unit.
"""

import re
from typing import Final

LONGEST: Final = 2**63 / 1e9
"""Seconds Go can count, some 292 years."""
_UNITS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART: Final = r"([0-9]+(?:\.[0-9]*)?|\.[0-9]+)(ns|us|µs|μs|ms|s|m|h)"
_PARTS: Final = re.compile(f"(?:{_PART})+")
_LONGEST_TEXT: Final = 64


def seconds_of(text: str) -> float:
    """Seconds, 0 or more. ValueError if `text` is no duration, or a longer one than Go knows."""
    if len(text) <= _LONGEST_TEXT and _PARTS.fullmatch(text):
        seconds = sum(float(number) * _UNITS[unit] for number, unit in re.findall(_PART, text))
        if seconds < LONGEST:
            return seconds
    raise ValueError(text)
