"""docs/pd.md is true: its files load, its roles and names are those of the code."""

import re
from pathlib import Path
from random import Random

import pytest

from epp import protocol
from epp.configuration.builtin import ALIASES, CLASSES
from epp.configuration.describe import describe
from epp.configuration.loader import load_text
from epp.plugin import Endpoint, Stage, serves
from epp.pool.static import load

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "pd.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)


def test_the_endpoints_file_loads(tmp_path: Path) -> None:
    file = tmp_path / "endpoints.yaml"
    file.write_text(BLOCKS[0])
    (state,) = load([file])
    assert [serves(endpoint, "decode") for endpoint in state.endpoints] == [True, False]


@pytest.mark.parametrize(("block", "setting"), [(1, "whenNoPrefiller=refuse"), (2, "decider=prefix-based-pd-decider")])
def test_the_configurations_load(block: int, setting: str) -> None:
    text = describe(load_text(BLOCKS[block], clock=lambda: 0.0, random=Random(0)))
    assert "handler role-profile-handler" in text
    assert setting in text


ROWS = re.findall(r"^\| (none|`[a-z`, -]+`) \|(.*)\|(.*)\|(.*)\|$", PAGE, re.MULTILINE)


@pytest.mark.parametrize(("values", "decode", "prefill", "encode"), ROWS)
def test_roles_serve_what_the_table_says(values: str, decode: str, prefill: str, encode: str) -> None:
    said: dict[Stage, str] = {"decode": decode, "prefill": prefill, "encode": encode}
    for value in re.findall(r"`([a-z-]+)`", values) or [None]:
        endpoint = Endpoint("a", "10.0.0.1:1", {} if value is None else {protocol.ROLE_LABEL: value})
        assert {stage: serves(endpoint, stage) for stage in said} == {
            stage: "yes" in cell for stage, cell in said.items()
        }


def test_types_and_headers_are_those_of_the_code() -> None:
    assert len(ROWS) == 7
    for header in (protocol.PREFILLER, protocol.ENCODERS, protocol.DATA_PARALLEL):
        assert f"| `{header}` |" in PAGE
    named = re.findall(r"`([a-z-]+(?:-handler|-decider|-filter))`", PAGE)
    assert len(named) > 10
    for name in named:
        assert ALIASES.get(name, name) in CLASSES
