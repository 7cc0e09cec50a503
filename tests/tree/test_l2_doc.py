"""docs/l2.md has a row for each backend of `hack/bench l2`, and says of what there is what the code says."""

import json
import re
from pathlib import Path

from hack.benches.l2 import BACKENDS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "l2.md").read_text(encoding="utf-8")


def test_each_backend_has_its_row_in_order() -> None:
    table = PAGE[PAGE.index("| adapter: backend |") :].split("\n\n")[0].splitlines()
    assert [row.split("|")[1].strip() for row in table[2:]] == list(BACKENDS)
    assert len({row.count("|") for row in table}) == 1


def test_each_adapter_is_explained_and_shown_as_an_argument() -> None:
    adapters = {name.partition(":")[0] for name in BACKENDS}
    explained = PAGE[PAGE.index("| adapter | survives |") :].split("\n\n")[0]
    shown = [json.loads(each) for each in re.findall(r"\| `(\{.*\})`", PAGE)]
    assert {each for each in adapters if f"`{each}`" not in explained} == set()
    assert {each["type"] for each in shown} == adapters - {"fs"}
    assert all(each["shared"] for each in shown)


def test_the_default_is_the_one_it_names() -> None:
    manifest = (ROOT / "manifests" / "components" / "tiered-kv" / "lmcache.yaml").read_text(encoding="utf-8")
    [adapter] = [json.loads(each) for each in re.findall(r"--l2-adapter=(\{.*\})", manifest)]
    assert adapter in [json.loads(each) for each in re.findall(r"\| `(\{.*\})`", PAGE)]
    assert f"`{adapter['type']}` on a volume" in PAGE
