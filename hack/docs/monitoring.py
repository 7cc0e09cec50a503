"""Makes Grafana's dashboards and the PrometheusRule of what is written in manifests/components/monitoring."""

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

FOLDER: Final = Path(__file__).parents[2] / "manifests" / "components" / "monitoring"
_DATASOURCE: Final = {"type": "prometheus", "uid": "${datasource}"}
_WIDTH, _HEIGHT, _WHOLE = 6, 8, 24


def made() -> dict[Path, str]:
    """Each made file and its text."""
    dashboards = yaml.safe_load((FOLDER / "dashboards.yaml").read_text(encoding="utf-8"))
    files = {FOLDER / "dashboards" / f"{uid}.json": _dashboard(uid, each) for uid, each in dashboards.items()}
    rules = (FOLDER / "rules.yaml").read_text(encoding="utf-8")
    files[FOLDER / "prometheusrule.yaml"] = (
        "# Made of rules.yaml by hack/manifests.\napiVersion: monitoring.coreos.com/v1\nkind: PrometheusRule\n"
        "metadata:\n  name: warmpath\nspec:\n"
    ) + "".join(f"  {line}" if line.strip() else line for line in rules.splitlines(keepends=True))
    return files


def _dashboard(uid: str, about: Mapping[str, Any]) -> str:
    pool = "label_values(warmpath_endpoints, pool)"
    variables = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"},
        {
            "name": "pool", "type": "query", "label": "Pool", "datasource": _DATASOURCE, "definition": pool,
            "query": {"query": pool, "refId": "pool"}, "refresh": 2, "includeAll": True, "multi": True,
            "current": {"text": "All", "value": "$__all"},
        },
    ]  # fmt: skip
    head = {
        "uid": uid, "title": about["title"], "tags": ["warmpath", "inference"], "schemaVersion": 39, "editable": True,
        "refresh": "10s", "time": {"from": "now-1h", "to": "now"}, "templating": {"list": variables},
        "links": [{"type": "dashboards", "title": "Warmpath", "tags": ["warmpath"], "asDropdown": True}],
    }  # fmt: skip
    lines = [f"  {json.dumps(panel)}" for panel in _panels(about["rows"])]
    return json.dumps(head)[:-1] + ', "panels": [\n' + ",\n".join(lines) + "\n]}\n"


def _panels(rows: Mapping[str, list[dict[str, Any]]]) -> Iterator[dict[str, Any]]:
    y = number = 0
    for row, panels in rows.items():
        number += 1
        place = {"h": 1, "w": _WHOLE, "x": 0, "y": y}
        yield {"id": number, "type": "row", "title": row, "collapsed": False, "panels": [], "gridPos": place}
        y += 1
        for at, panel in enumerate(panels):
            number += 1
            place = {"h": _HEIGHT, "w": _WIDTH, "x": at * _WIDTH, "y": y}
            yield {"id": number, "type": "timeseries", "gridPos": place, "datasource": _DATASOURCE, **_panel(panel)}
        y += _HEIGHT


def _panel(panel: Mapping[str, Any]) -> dict[str, Any]:
    queries = [each for legend, text in panel["queries"].items() for each in _queries(legend, text)]
    targets = [
        {"refId": chr(ord("A") + at), "expr": e, "legendFormat": legend} for at, (e, legend) in enumerate(queries)
    ]
    return {
        "title": panel["panel"],
        **({"description": panel["about"]} if "about" in panel else {}),
        "fieldConfig": {"defaults": {"unit": panel["unit"], "min": 0}, "overrides": []},
        "options": {"tooltip": {"mode": "multi", "sort": "desc"}},
        "targets": targets,
    }


def _queries(legend: str, text: str) -> Iterator[tuple[str, str]]:
    quantiles = re.match(r"(p\d\d )+", text)
    if quantiles is None:
        yield text, legend
        return
    for name in quantiles[0].split():
        yield f"histogram_quantile(0.{name[1:]}, {text[quantiles.end() :]})", f"{legend} {name}".strip()


if __name__ == "__main__":
    for path, content in made().items():
        path.parent.mkdir(exist_ok=True)
        path.write_text(content, encoding="utf-8")
