from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

import epp.plugin
from epp.plugin import (
    CacheRoom,
    Cost,
    Detector,
    Endpoint,
    Filter,
    InFlight,
    Load,
    Picked,
    Picker,
    Plugin,
    PrefixMatch,
    Producer,
    ProfileHandler,
    Request,
    Response,
    Scorer,
    Services,
    Slot,
    least,
    most,
    scores_of,
)
from epp.testing import services

numbers = st.lists(st.floats(0, 1e9), max_size=20)
bills = st.lists(st.tuples(st.floats(0, 1e4), st.floats(0, 1e4)), max_size=20)


def test_least_and_most_scale_to_0_and_1() -> None:
    assert least([0, 5, 10]) == [1.0, 0.5, 0.0]
    assert most([0, 5, 10]) == [0.0, 0.5, 1.0]
    assert least(iter([3, 1])) == [0.0, 1.0]


@pytest.mark.parametrize("helper", [least, most])
def test_equal_values_all_score_1(helper: Callable[[list[float]], list[float]]) -> None:
    assert helper([]) == []
    assert helper([7]) == [1.0]
    assert helper([7, 7, 7]) == [1.0, 1.0, 1.0]


@given(numbers)
def test_scores_of_values_are_in_range_and_in_order(values: list[float]) -> None:
    scores = least(values)
    assert all(0 <= score <= 1 for score in scores)
    by_value = [score for _, score in sorted(zip(values, scores, strict=True), key=lambda pair: pair[0])]
    assert by_value == sorted(by_value, reverse=True)


@given(bills)
def test_the_cheapest_bill_scores_1_and_order_is_kept(found: list[tuple[float, float]]) -> None:
    scores = scores_of(found)
    costs = [sum(bill) for bill in found]
    assert all(0 < score <= 1 for score in scores)
    for cost, score in zip(costs, scores, strict=True):
        assert (score == 1) >= (cost == min(costs))
        assert all(score >= other for more, other in zip(costs, scores, strict=True) if more >= cost)


def test_ties_stay_ties_even_when_free() -> None:
    assert scores_of([(0.0, 0.0), (0.0,), (1.0,)]) == [1.0, 1.0, pytest.approx(0.001, rel=0.01)]


def test_a_cost_is_a_scorer_by_its_bill() -> None:
    class Distance(Cost):
        terms = ("way", "toll")

        def bill(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[tuple[float, ...]]:
            return [(float(len(endpoint.name)), 0.5) for endpoint in endpoints]

    endpoints = [Endpoint("a", "10.0.0.1:1", {}), Endpoint("abc", "10.0.0.2:1", {})]
    near, far = Distance().score(Request(id="r", model="m"), endpoints)
    assert near == 1.0 > far > 0


@pytest.mark.parametrize("kind", [Filter, Scorer, Cost, Picker, ProfileHandler, Producer, Detector])
def test_what_a_kind_is_for_must_be_written(kind: type[Plugin]) -> None:
    with pytest.raises(TypeError, match="abstract"):
        kind()


async def test_a_plugin_that_overrides_nothing_does_nothing() -> None:
    @dataclass
    class Quiet(Producer[PrefixMatch]):
        produces = PrefixMatch

        def produce(self, request: Request, endpoints: Sequence[Endpoint]) -> dict[Endpoint, PrefixMatch]:
            return {}

    quiet, request, endpoint = Quiet(), Request(id="r", model="m"), Endpoint("a", "10.0.0.1:1", {})
    await quiet.prepare(request)
    quiet.on_picked(request, endpoint)
    quiet.on_first_token(request, endpoint)
    quiet.on_finished(request, endpoint, Response())
    quiet.on_removed(endpoint)
    assert (quiet.needs, quiet.name, quiet.answer_headers(request, endpoint), quiet.statistics()) == ((), "", {}, {})
    assert quiet.clock() <= quiet.clock()
    assert request.kept == {}


def test_shares_of_a_prompt() -> None:
    assert PrefixMatch(100, 3, 12).share == 0.25
    assert PrefixMatch(0, 0, 0).share == 0.0
    assert (Picked([]).headers, CacheRoom(1, 2).capacity, InFlight(1, 2).uncached_tokens) == ({}, 2, 2)


def test_all_that_is_promised_is_there() -> None:
    assert {name for name in epp.plugin.__all__ if not hasattr(epp.plugin, name)} == set()
    assert Load().at is None


def _by_value(cls: type[Scorer]) -> type[Scorer]:
    """The methods that a decorator of another kind would give the class."""
    return type("ByValue", (cls,), {"__eq__": lambda self, other: isinstance(other, Scorer)})


@pytest.mark.parametrize(
    "made_by",
    [lambda cls: cls, dataclass, dataclass(order=True), dataclass(slots=True), dataclass(eq=False), _by_value],
    ids=["plain", "dataclass", "ordered", "slots", "no-eq", "own-eq"],
)
def test_a_plugin_of_any_kind_of_class_keeps_what_is_its_own(
    made_by: Callable[[type[Scorer]], type[Scorer]],
) -> None:
    class Kept(Scorer):
        floor: float = 0.1

        def start(self, services: Services) -> None:
            self.seen = Slot[int]()

        def score(self, request: Request, endpoints: Sequence[Endpoint]) -> Sequence[float]:
            self.seen.set(request, len(endpoints))
            return [0.0] * len(endpoints)

    cls = made_by(Kept)
    one, other, request = cls(), cls(), Request(id="1", model="m")
    for each in (one, other):
        each.start(services())
    one.score(request, [])
    other.score(request, [Endpoint("a", "10.0.0.1:80")])
    assert [each.seen.get(request) for each in (one, other)] == [0, 1]  # type: ignore[attr-defined]
