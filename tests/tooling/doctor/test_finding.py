"""Findings name a check that is known."""

import pytest

from tooling.doctor.finding import CHECKS, hint, problem


def test_a_finding_has_a_level() -> None:
    assert problem("pod", "metrics", "none", "flag").level == "problem"
    assert hint("pod", "metrics", "none", "flag").level == "hint"


def test_a_check_nobody_knows_is_a_mistake() -> None:
    assert "metrics" in CHECKS
    with pytest.raises(AssertionError, match="metric"):
        problem("pod", "metric", "none", "flag")
