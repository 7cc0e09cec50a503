import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import InFlight, PrefixMatch, Response
from epp.scheduling.inflight import InFlightLoad
from tests.support.scheduling.schedulers import ask, pods
from tests.support.scheduling.signals import with_signal


def test_requests_and_tokens_count_from_the_pick_to_the_end() -> None:
    a, b = pods("ab")
    load = InFlightLoad()
    one, two = ask(tokens=100), ask(tokens=50)
    load.on_picked(one, a)
    load.on_picked(two, a)
    assert load.produce(one, [a, b]) == {a: InFlight(2, 150), b: InFlight(0, 0)}
    load.on_first_token(one, a)
    assert load.produce(one, [a]) == {a: InFlight(2, 50)}
    load.on_finished(one, a, Response())
    assert load.produce(one, [a]) == {a: InFlight(1, 50)}
    load.on_finished(two, a, Response())
    assert load.statistics() == {"requests": 0, "uncached_tokens": 0}


def test_only_tokens_the_endpoint_lacks_count() -> None:
    a, b, c = pods("abc")
    load = InFlightLoad()
    request = ask(tokens=100)
    request = with_signal(request, PrefixMatch, {a: PrefixMatch(64, 4, 7), b: PrefixMatch(128, 7, 7)})
    for endpoint, uncached in ((a, 36), (b, 0), (c, 100)):
        load.on_picked(request, endpoint)
        assert load.produce(request, [endpoint]) == {endpoint: InFlight(1, uncached)}
        load.on_finished(request, endpoint, Response())


@pytest.mark.parametrize(
    ("max_tokens", "bound", "expected"), [(None, None, 150), (40, None, 40), (400, 60, 60), (40, 60, 40), (0, None, 0)]
)
def test_estimated_output_counts_until_the_end(max_tokens: int | None, bound: int | None, expected: int) -> None:
    (a,) = pods("a")
    load = InFlightLoad(add_estimated_output_tokens=True, max_estimated_output_tokens=bound)
    request = ask(tokens=100, max_tokens=max_tokens)
    load.on_picked(request, a)
    assert load.produce(request, [a])[a].uncached_tokens == 100 + expected
    load.on_first_token(request, a)
    assert load.produce(request, [a])[a].uncached_tokens == expected
    load.on_finished(request, a, Response())
    assert load.statistics() == {"requests": 0, "uncached_tokens": 0}


def test_an_endpoint_without_requests_is_not_remembered() -> None:
    endpoints = pods("abcdefgh")
    load = InFlightLoad()
    for endpoint in endpoints:
        request = ask(tokens=3)
        load.on_picked(request, endpoint)
        load.on_finished(request, endpoint, Response())
    assert not load._load


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 2), st.booleans()), max_size=30))
def test_every_order_of_ends_returns_to_zero(sent: list[tuple[int, int, bool]]) -> None:
    endpoints = pods("abc")
    load = InFlightLoad(add_estimated_output_tokens=True)
    requests = [(ask(tokens=tokens), endpoints[i], first) for tokens, i, first in sent]
    for request, endpoint, _ in requests:
        load.on_picked(request, endpoint)
    for request, endpoint, first in reversed(requests):
        if first:
            load.on_first_token(request, endpoint)
        load.on_finished(request, endpoint, Response())
    assert not load._load


@pytest.mark.parametrize("wrong", [{"output_ratio": -1.0}, {"max_estimated_output_tokens": -1}])
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected 0 or more"):
        InFlightLoad(**wrong)  # type: ignore[arg-type]
