"""docs/gateway.md is true: each supported row renders and matters, each refused one is refused at its place."""

import itertools
import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from epp.errors import ConfigError
from gateway.envoy import validate
from gateway.load import load
from gateway.translate import translate
from gateway.xds import Rendering
from tests.support.gateway.files import GATEWAY, POOL, ROUTE, write

PAGE = (Path(__file__).parents[2] / "docs" / "gateway.md").read_text(encoding="utf-8")
ROW = re.compile(r"^\| `(?P<kind>\w+) (?P<path>[^`]+)` \| `(?P<example>[^`]+)` \|", re.MULTILINE)
ENDPOINTS = """
endpoints:
- {name: one, address: 10.0.0.1, port: 8000, labels: {app: sim, tier: gold}}
"""
POD = """
apiVersion: v1
kind: Pod
metadata: {name: two, labels: {app: sim}}
status: {podIP: 10.0.0.2, conditions: [{type: Ready, status: "True"}]}
"""
LISTENERS = "[{name: http, port: 80, protocol: HTTP}, {name: other, port: 81, protocol: HTTP}]"
TWO_LISTENERS = re.sub(r"\[\{name: http.*\]", LISTENERS, GATEWAY)


class Row(NamedTuple):
    kind: str
    path: str
    example: str


def rows(heading: str) -> list[Row]:
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    found = [Row(*match.groups()) for match in ROW.finditer(section)]
    assert len(found) == section.count("\n| `"), "a row is not `Kind path` | `example` | text"
    return found


def documents(row: Row | None) -> list[str]:
    """Good ones; with the example of the row in its place."""
    made = [yaml.safe_load(text) for text in (TWO_LISTENERS, ROUTE, POOL)]
    if row:
        at: Any = next(each for each in made if each["kind"] == row.kind)
        steps: list[Any] = [0 if step == "[]" else step for step in re.findall(r"\w+|\[\]", row.path)]
        for step, following in itertools.pairwise(steps):
            if isinstance(at, dict):
                at.setdefault(step, [{}] if following == 0 else {})
            at = at[step]
        at[steps[-1]] = yaml.safe_load(row.example)
    return [yaml.safe_dump(each) for each in made]


def rendered(folder: Path, row: Row | None) -> Rendering:
    resources = load([write(folder, *documents(row), ENDPOINTS, POD)])
    return translate(resources, {"default/sim": ["127.0.0.1:9002"]})


@pytest.mark.parametrize("row", rows("Supported"), ids=lambda row: f"{row.path} {row.example}")
def test_what_is_supported_has_an_effect(tmp_path: Path, row: Row) -> None:
    assert rendered(tmp_path, row) != rendered(tmp_path, None)


@pytest.mark.envoy
async def test_envoy_takes_all_that_is_supported(tmp_path: Path) -> None:
    """In one configuration, as Envoy takes its time to start: hosts and clusters of each row under its number."""
    hosts: list[Any] = []
    clusters: dict[str, Any] = {}
    endpoints: dict[str, Any] = {}
    for number, row in enumerate(rows("Supported")):
        text = json.dumps(rendered(tmp_path, row).__dict__).replace("default.sim", f"default.{number}")
        one = Rendering(**json.loads(text))
        clusters |= one.clusters
        endpoints |= one.endpoints
        for index, host in enumerate(host for table in one.routes.values() for host in table["virtual_hosts"]):
            hosts.append({**host, "domains": [f"{number}-{index}"]})
    table = {"name": "port-80", "virtual_hosts": hosts}
    for number, host in enumerate(hosts):
        host["name"] = str(number)
    assert (
        await validate(Rendering(rendered(tmp_path, None).listeners[:1], {"port-80": table}, clusters, endpoints))
        is None
    )


@pytest.mark.parametrize("row", rows("Refused"), ids=lambda row: f"{row.path} {row.example}")
def test_what_is_refused_is_refused_by_name(tmp_path: Path, row: Row) -> None:
    with pytest.raises(ConfigError) as caught:
        rendered(tmp_path, row)
    place = row.path.replace("[]", "[0]")
    where, _, path = caught.value.path.rpartition(": ")
    assert row.kind in where
    assert path.startswith(place)
