"""The benchmark of learned speeds: what it replays, and that its rows say what was found. Figures are in the docs."""

from random import Random

import pytest

from epp.scheduling.cost import ExpectedTtft
from hack.benches import replay
from hack.benches.replay import KNOWN, POOLS, WRONG, learnt, prior
from tooling.replay.policies import Policy
from tooling.simulator.engine import H100_8B


def cost(made: Policy) -> ExpectedTtft:
    pipeline = made.build(lambda: 0.0, Random(0))
    return next(plugin for plugin in pipeline.plugins if isinstance(plugin, ExpectedTtft))


def test_priors_are_wrong_by_what_they_say() -> None:
    right = cost(prior("a", 1.0, learn=False, speeds=POOLS[1].speeds))
    assert (right.prefill_seconds_per_token, right.learn_speeds, right.speeds) == (
        H100_8B.linear,
        False,
        {"default/pod-4": 0.5},
    )
    assert right.attention_seconds_per_token_pair == pytest.approx(H100_8B.attention)
    wrong = cost(prior("b", 3.0, learn=True))
    assert (
        wrong.prefill_seconds_per_token / right.prefill_seconds_per_token
        == wrong.attention_seconds_per_token_pair / right.attention_seconds_per_token_pair
        == pytest.approx(3.0)
    )
    assert (wrong.learn_speeds, wrong.speeds) == (True, {})
    assert {round(times, 3) for times in WRONG.values()} == {0.333, 1.0, 3.0}


@pytest.mark.long
def test_a_row_for_each_prior_with_its_regret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "LOAD", 0.5)
    rows = learnt("independent", POOLS[0], seeds=1, share=0.03, workers=1)
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert [row[:3] for row in cells] == [["uniform", "independent", name] for name in WRONG]
    for row in cells:
        known, learned, regret = float(row[3]), float(row[4]), float(row[5].split()[0])
        assert abs(100 * (learned / known - 1) - regret) < 0.3
    assert KNOWN not in {row[2] for row in cells}
