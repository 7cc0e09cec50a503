from collections import Counter
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import BadRequest, Endpoint, Picker
from epp.scheduling.pickers import (
    HeaderProfileHandler,
    MaxScorePicker,
    RandomPicker,
    RoundRobinPicker,
    WeightedRandomPicker,
)
from tests.support.scheduling.runs import Runs
from tests.support.scheduling.schedulers import ask, pods


def first(picker: Picker, scored: list[tuple[Endpoint, float]]) -> str:
    return picker.pick(ask(), scored)[0].name


def test_the_highest_score_wins_with_fallbacks_in_order() -> None:
    a, b, c = pods("abc")
    picks = MaxScorePicker(max_num_of_endpoints=2).pick(ask(), [(a, 0.2), (b, 0.9), (c, 0.5)])
    assert picks == [b, c]


def test_more_fallbacks_than_endpoints_gives_all() -> None:
    a, b = pods("ab")
    for picker in (MaxScorePicker(9), RandomPicker(9), WeightedRandomPicker(9), RoundRobinPicker(9)):
        assert set(picker.pick(ask(), [(a, 0.2), (b, 0.9)])) == {a, b}


@given(size=st.integers(2, 12), rounds=st.integers(1, 5))
def test_ties_spread_exactly_evenly(size: int, rounds: int) -> None:
    picker = MaxScorePicker()
    scored = [(endpoint, 0.5) for endpoint in pods("abcdefghijkl"[:size])]
    picked = Counter(first(picker, scored) for _ in range(size * rounds))
    assert set(picked.values()) == {rounds}
    assert len(picked) == size


def test_alternating_traffic_does_not_lock_step_with_the_rotation() -> None:
    picker = MaxScorePicker()
    eight = [(endpoint, 1.0) for endpoint in pods("abcdefgh")]
    two = [(endpoint, 1.0) for endpoint in pods("yz")]
    picked: Counter[str] = Counter()
    for _ in range(16):
        picked[first(picker, eight)] += 1
        first(picker, two)
    assert picked == Counter(dict.fromkeys("abcdefgh", 2))


def test_tied_fallbacks_begin_with_the_one_picked_longest_ago() -> None:
    a, b, c = pods("abc")
    picker = MaxScorePicker(2)
    scored = [(a, 1.0), (b, 1.0), (c, 1.0)]
    assert [picker.pick(ask(), scored) for _ in range(3)] == [[a, b], [b, c], [c, a]]


@pytest.mark.parametrize("picker", [MaxScorePicker(), RoundRobinPicker()])
def test_a_removed_endpoint_is_forgotten(picker: MaxScorePicker | RoundRobinPicker) -> None:
    scored = [(endpoint, 1.0) for endpoint in pods("ab")]
    for _ in range(4):
        picker.pick(ask(), scored)
    for endpoint, _ in scored:
        picker.on_removed(endpoint)
        picker.on_removed(endpoint)
    assert not picker._turns._last


def test_round_robin_goes_by_name_whatever_the_scores_and_the_order() -> None:
    a, b, c = pods("abc")
    picker = RoundRobinPicker()
    names = [first(picker, scored) for scored in [[(c, 9.0), (a, 0.0), (b, 1.0)], [(b, 0.0), (c, 1.0), (a, 2.0)]] * 3]
    assert names == list("abcabc")


def test_round_robin_stays_even_when_candidates_change() -> None:
    endpoints = pods("abcd")
    picker = RoundRobinPicker()
    everybody = [(endpoint, 0.0) for endpoint in endpoints]
    some = everybody[:2]
    picked: Counter[str] = Counter()
    for _ in range(40):
        picked[first(picker, everybody)] += 1
        picked[first(picker, some)] += 1
    assert sum(picked.values()) == 80
    assert all(19 <= picked[name] <= 21 for name in "abcd")


def test_round_robin_serves_a_new_endpoint_next() -> None:
    a, b, c = pods("abc")
    picker = RoundRobinPicker()
    assert [first(picker, [(a, 0.0), (c, 0.0)]) for _ in range(2)] == ["a", "c"]
    assert [first(picker, [(a, 0.0), (b, 0.0), (c, 0.0)]) for _ in range(4)] == list("bacb")


def test_random_ignores_scores() -> None:
    picker = RandomPicker()
    picker.random = Random(1)
    a, b = pods("ab")
    picked = Counter(first(picker, [(a, 0.0), (b, 1.0)]) for _ in range(2000))
    assert 900 < picked["a"] < 1100


def test_weighted_random_picks_in_proportion_to_the_score() -> None:
    picker = WeightedRandomPicker()
    picker.random = Random(2)
    a, b, c = pods("abc")
    picked = Counter(first(picker, [(a, 0.75), (b, 0.25), (c, 0.0)]) for _ in range(4000))
    assert 2900 < picked["a"] < 3100
    assert picked["c"] == 0


def test_weighted_random_is_uniform_when_all_scores_are_zero() -> None:
    picker = WeightedRandomPicker()
    picker.random = Random(3)
    scored = [(endpoint, 0.0) for endpoint in pods("abcd")]
    picked = Counter(first(picker, scored) for _ in range(4000))
    assert all(900 < picked[name] < 1100 for name in "abcd")


def test_weighted_random_survives_the_smallest_scores() -> None:
    picker = WeightedRandomPicker()
    picker.random = Random(4)
    a, b = pods("ab")
    picked = Counter(first(picker, [(a, 5e-324), (b, 1e-300)]) for _ in range(200))
    assert picked["b"] > 190


@pytest.mark.parametrize("kind", [MaxScorePicker, RandomPicker, WeightedRandomPicker, RoundRobinPicker])
def test_less_than_one_endpoint_is_refused(kind: type[MaxScorePicker]) -> None:
    with pytest.raises(ValueError, match="maxNumOfEndpoints"):
        kind(max_num_of_endpoints=0)


@pytest.mark.parametrize(
    ("headers", "profiles", "ran"),
    [
        ({"epp-profile": "prefill"}, ["prefill", "decode"], "prefill"),
        ({"epp-profile": " "}, ["prefill", "decode"], "decode"),
        ({}, ["prefill", "decode"], "decode"),
        ({"epp-profile": "no such"}, ["only"], "only"),
    ],
)
def test_a_header_names_the_profile(headers: dict[str, str], profiles: list[str], ran: str) -> None:
    endpoints = {"prefill": pods("p"), "decode": pods("d"), "only": pods("o")}
    picked = HeaderProfileHandler().handle(ask(headers=headers), profiles, Runs(endpoints))
    assert picked.endpoints is endpoints[ran]


def test_a_header_that_names_no_profile_is_the_clients_error() -> None:
    with pytest.raises(BadRequest, match="x-stage: got 'prefil'; expected one of prefill, decode"):
        HeaderProfileHandler("X-Stage").handle(ask(headers={"x-stage": "prefil"}), ["prefill", "decode"], Runs({}))
    with pytest.raises(ValueError, match="headerName"):
        HeaderProfileHandler("")
