"""What `hack/bench fidelity` says of figures, without an engine."""

import pytest

from hack.benches.fidelity import BASE, POLICIES, Felt, felt, replayed, table, verdict
from hack.benches.rig.asking import Answered
from hack.benches.rig.workloads import asked
from tooling.replay.policies import policy
from tooling.simulator.presets import preset


def made(*ttfts: float, cached: int = 0) -> Felt:
    return Felt(ttfts, cached / 100)


def test_order_and_ratios_are_compared() -> None:
    real = {BASE: made(2.0), "ours": made(1.0), "theirs": made(1.5)}
    said = {BASE: made(4.0), "ours": made(2.0), "theirs": made(1.6)}
    reported = verdict(real, said)
    assert (
        f"order ours < theirs < {BASE}, replayed theirs < ours < {BASE}: 2 of 3 pairs it tells apart agree" in reported
    )
    assert "off by 23% (median), 47% at most" in reported


def test_a_tie_is_no_order() -> None:
    real = {BASE: made(2.0), "ours": made(1.0), "theirs": made(1.5)}
    said = {BASE: made(4.0), "ours": made(2.0), "theirs": made(1.98)}
    assert "2 of 2 pairs it tells apart agree" in verdict(real, said)


def test_a_row_has_seconds_ratios_and_hits() -> None:
    real = {BASE: made(2.0, 2.0), "ours": made(1.0, 0.0, cached=50)}
    said = {BASE: made(4.0), "ours": made(2.0, cached=40)}
    assert table("chats", real, said)[1] == "| chats | ours | 0.500 | 2.000 | 0.25 | 0.50 | 50.0 | 40.0 |"


def test_of_each_request_the_median_of_the_rounds_counts() -> None:
    rounds = [[Answered(0, 100, 25, [first]), Answered(1, 100, 75, [2.0])] for first in (1.0, 9.0, 2.0)]
    assert felt(rounds) == Felt([2.0, 1.0], 0.5)


@pytest.mark.parametrize("name", POLICIES)
def test_each_policy_is_replayed(name: str) -> None:
    found = replayed(asked(1, 12), preset("laptop"), policy(name), 1)
    assert len(found.ttfts) == 12
    assert min(found.ttfts) > 0
    assert 0 <= found.hit_rate < 1
