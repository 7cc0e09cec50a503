"""What the golden files and the integration tests do not show of `routes`."""

from datetime import timedelta

import pytest

from gateway.routes import duration


@pytest.mark.parametrize(
    ("text", "seconds"), [("1h", 3600), ("1h30m", 5400), ("10s500ms", 10.5), ("250ms", 0.25), ("0s", 0)]
)
def test_durations_are_gateway_apis(text: str, seconds: float) -> None:
    assert duration(text) == timedelta(seconds=seconds)
    assert duration(None) is None
