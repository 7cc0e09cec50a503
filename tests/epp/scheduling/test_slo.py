from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import LatencyPrediction, Slo
from epp.scheduling.slo import WINDOW, Promises, busy_share, chance, judge


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
    assert made.harm(0.01, 0.014) == 0.0, "far enough below"
    assert made.harm(0.01, 0.02) == pytest.approx(2 * 0.5), "each of two is missed as likely as not"
    assert made.harm(0.02, 0.03) == pytest.approx(2 * 0.5)
    assert made.harm(0.03, 0.04) == 0.0, "what is missed anyway is missed no more than once"
    assert made.harm(0.01, 0.1) == pytest.approx(2 * 1.0 + 0.5)


@given(
    tpots=st.lists(st.sampled_from([0.01, 0.02, 0.025, 0.1]) | st.floats(0.001, 1.0), max_size=20),
    before=st.floats(0.001, 0.5),
    more=st.floats(0.0, 0.5),
)
def test_harm_is_the_sum_of_what_each_is_more_likely_to_miss(tpots: list[float], before: float, more: float) -> None:
    made = Promises()
    for tpot in tpots:
        made.start(tpot, 0.0, 0.0)
    each = [chance((before + more) / tpot) - chance(before / tpot) for tpot in tpots]
    assert made.harm(before, before + more) == pytest.approx(sum(each), abs=1e-6)


def test_an_engine_always_has_some_time_for_answers() -> None:
    assert busy_share(0.5) == 0.5
    assert 0.9 < busy_share(3.0) < 1.0


@pytest.mark.parametrize(
    ("slo", "waited", "kept", "excess", "room", "missed"),
    [
        (Slo(2.0), 0.0, True, -0.5, 0.75, 0.0),
        (Slo(2.0), 1.5, False, 0.25, 0.0, 0.55 / 0.6),
        (Slo(tpot=0.04), 9.0, True, -0.5, 0.5, 0.0),
        (Slo(2.0, 0.01), 0.0, False, 1.0, 0.0, 1.0),
        (Slo(4.0, 0.08), 0.0, True, -0.75, 0.75, 0.0),
        (Slo(1.0, 0.02), 0.0, True, 0.0, 0.0, 0.75),
        (Slo(), 0.0, True, -1.0, 1.0, 0.0),
    ],
)
def test_a_verdict(slo: Slo, waited: float, kept: bool, excess: float, room: float, missed: float) -> None:
    """1 s until the first token, 0.5 s of it its own prefill; 20 ms a token."""
    seen = LatencyPrediction(1.0, 0.02, 0.018, 0.03)
    found = judge(slo, waited, 0.5, seen)
    assert found.kept == kept
    assert [found.excess, found.room, found.missed] == pytest.approx([excess, room, missed])


def test_what_others_were_promised_counts() -> None:
    assert judge(Slo(2.0), 0.0, 0.0, LatencyPrediction(1.0, 0.02, 0.018, 0.03, promised=0.03)).kept
    assert not judge(Slo(2.0), 0.0, 0.0, LatencyPrediction(1.0, 0.02, 0.018, 0.03, promised=0.029)).kept
