import pytest

from epp.telemetry.metrics_table import FAMILIES, Family


def test_no_name_is_used_twice() -> None:
    names = [name for family in FAMILIES for name in (family.name, *(alias.name for alias in family.aliases))]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_family_is_well_formed(family: Family) -> None:
    assert family.name.endswith("_total") == (family.kind == "counter")
    assert bool(family.bounds) == (family.kind == "histogram")
    assert list(family.bounds) == sorted(set(family.bounds))
    for alias in family.aliases:
        assert {ours for _, ours in alias.labels} <= set(family.labels)
        if family.kind == "histogram":  # histograms are copied, not added up
            assert {ours for _, ours in alias.labels} == set(family.labels)
        assert not alias.first or alias.first in family.labels
