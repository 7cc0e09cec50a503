from math import inf

import pytest

from epp.plugin import LatencyPrediction, Slo
from epp.scheduling.slo import WINDOW, Promises, busy_share, judge


def test_prefill_is_remembered_for_a_while_and_promises_until_their_end() -> None:
    made = Promises()
    assert (made.tightest, made.prefill(5.0)) == (inf, 0.0)
    for tpot in (0.05, None, 0.02, 0.05):
        made.start(tpot, 1.0, 100.0)
    assert made.tightest == 0.02
    assert made.prefill(100.0) == pytest.approx(4 / WINDOW)
    assert 0 < made.prefill(100.0 + WINDOW) < 0.2
    for tpot in (0.02, None, 0.05, 0.05):
        made.end(tpot)
    assert made.tpots == []


def test_harm_is_what_a_newcomer_adds_to_what_is_missed() -> None:
    made = Promises()
    for tpot in (0.02, 0.02, 0.1):
        made.start(tpot, 0.0, 0.0)
    assert made.harm(0.01, 0.02) == 0.0
    assert made.harm(0.01, 0.03) == pytest.approx(2 * 0.5), "each of two by half of its own"
    assert made.harm(0.03, 0.04) == pytest.approx(2 * 0.5), "those that are missed already only by what is added"
    assert made.harm(0.09, 0.11) == pytest.approx(2 * 1.0 + 0.1)


def test_an_engine_always_has_some_time_for_answers() -> None:
    assert busy_share(0.5) == 0.5
    assert 0.9 < busy_share(3.0) < 1.0


@pytest.mark.parametrize(
    ("slo", "waited", "kept", "excess", "room"),
    [
        (Slo(2.0), 0.0, True, -0.5, 0.75),
        (Slo(2.0), 1.5, False, 0.25, 0.0),
        (Slo(tpot=0.04), 9.0, True, -0.5, 0.5),
        (Slo(2.0, 0.01), 0.0, False, 1.0, 0.0),
        (Slo(4.0, 0.08), 0.0, True, -0.75, 0.75),
        (Slo(), 0.0, True, -1.0, 1.0),
    ],
)
def test_a_verdict(slo: Slo, waited: float, kept: bool, excess: float, room: float) -> None:
    """1 s until the first token, 0.5 s of it its own prefill; 20 ms a token."""
    seen = LatencyPrediction(1.0, 0.02, 0.018, 0.03)
    found = judge(slo, waited, 0.5, seen)
    assert found.kept == kept
    assert [found.excess, found.room] == pytest.approx([excess, room])


def test_what_others_were_promised_counts() -> None:
    assert judge(Slo(2.0), 0.0, 0.0, LatencyPrediction(1.0, 0.02, 0.018, 0.03, promised=0.03)).kept
    assert not judge(Slo(2.0), 0.0, 0.0, LatencyPrediction(1.0, 0.02, 0.018, 0.03, promised=0.029)).kept
