import json

import pytest

from hack.supply.audit import FOUND, NONE_KNOWN, UNKNOWN, verdict

WELL = {"name": "well", "version": "1", "vulns": []}
BAD = {"name": "bad", "version": "2", "vulns": [{"id": "PYSEC-1", "fix_versions": ["3"], "aliases": []}]}
SKIPPED = {"name": "nobody", "skip_reason": "not found"}


@pytest.mark.parametrize(
    ("packages", "status", "line"),
    [
        ([WELL], NONE_KNOWN, "none is known of 1 packages"),
        ([WELL, BAD, SKIPPED], FOUND, "bad 2: PYSEC-1, fixed in 3"),
        ([WELL, SKIPPED], UNKNOWN, "it knows nothing of 1 of 2 packages"),
    ],
)
def test_what_was_not_looked_at_is_not_said_to_be_well(packages: list[object], status: int, line: str) -> None:
    assert verdict(json.dumps({"dependencies": packages, "fixes": []})) == (status, [line])


def test_a_database_that_does_not_answer_says_nothing() -> None:
    assert verdict("") == (UNKNOWN, ["it does not answer"])
