"""The comparison in docs/policies.md is the one its results make."""

import argparse

from hack.benches import policies


def test_the_table_is_made_of_the_results() -> None:
    assert policies.DOCUMENT.read_text() == policies.written(argparse.Namespace(results=policies.RESULTS))


def test_no_run_is_there_twice() -> None:
    keys = [result.key for result in policies.results(policies.RESULTS)]
    assert len(keys) == len(set(keys))
