"""The chart as files: what it has copies of is up to date, and its schema knows its values."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

import epp
from epp.configuration.loader import strategies, strategy_text

ROOT = Path(__file__).parents[2]
MANIFESTS = ROOT / "manifests"
CHART = MANIFESTS / "chart"
COPIES = {
    "files/envoy.json": "overlays/standalone/envoy.json",
    "files/kv-aware-tiers.yaml": "components/tiered-kv/config.yaml",
    "files/rules.yaml": "components/monitoring/rules.yaml",
    **{
        f"files/{path.name}": f"components/monitoring/dashboards/{path.name}"
        for path in (MANIFESTS / "components" / "monitoring" / "dashboards").iterdir()
    },
    **{f"crds/{path.name}": f"crds/{path.name}" for path in (MANIFESTS / "crds").glob("inference*.yaml")},
}


def text(path: str) -> str:
    return (CHART / path).read_text(encoding="utf-8")


@pytest.mark.parametrize("copy", COPIES)
def test_a_copy_is_up_to_date(copy: str) -> None:
    assert text(copy) == (MANIFESTS / COPIES[copy]).read_text(encoding="utf-8"), "expected as `hack/manifests` makes it"


@pytest.mark.parametrize("strategy", strategies())
def test_a_strategy_is_what_the_picker_knows_by_that_name(strategy: str) -> None:
    assert text(f"files/{strategy}.yaml") == strategy_text(strategy), "expected as `hack/manifests` makes it"


def test_there_is_no_other_file() -> None:
    made = {str(path.relative_to(CHART)) for folder in ("files", "crds") for path in (CHART / folder).iterdir()}
    assert made == COPIES.keys() | {f"files/{strategy}.yaml" for strategy in strategies()}


def test_it_is_this_version() -> None:
    chart = yaml.safe_load(text("Chart.yaml"))
    assert (chart["version"], chart["appVersion"]) == (epp.__version__, epp.__version__)
    assert yaml.safe_load(text("values.yaml"))["images"]["warmpath"] == f"warmpath:{epp.__version__}"


def test_the_schema_knows_each_value_and_no_other() -> None:
    schema = json.loads(text("values.schema.json"))
    assert schema["properties"].pop("global")  # Helm adds it
    compare(schema, yaml.safe_load(text("values.yaml")))
    assert sorted(schema["properties"]["strategy"]["enum"]) == sorted(strategies())


def compare(schema: Any, values: Any) -> None:
    """AssertionError where an object of the schema has not the properties that these values have, all required."""
    assert schema["properties"].keys() == values.keys() == set(schema["required"])
    assert schema["additionalProperties"] is False
    for name, within in schema["properties"].items():
        if "properties" in within:
            compare(within, values[name])
