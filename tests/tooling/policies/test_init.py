"""The configurations beside the policies: each loads, and picks somebody."""

from importlib import resources
from pathlib import Path

import pytest

from epp.testing import decide, endpoint, request
from tooling import policies as rivals

FILES = sorted(Path(str(resources.files("tooling.policies"))).glob("*.yaml"), key=lambda file: file.name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_every_configuration_picks(file: Path) -> None:
    endpoints = [endpoint("a"), endpoint("b", waiting=3)]
    assert decide(file.read_text(), endpoints, request("hello" * 200)).endpoint in endpoints


def test_every_policy_has_a_configuration() -> None:
    named = "".join(file.read_text() for file in FILES)
    assert [name for name in rivals.__all__ if f"tooling.policies.{name}" not in named] == []
