from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from epp.plugin import Endpoint, Replicas
from epp.scheduling.parts import Parts


def endpoints(count: int) -> tuple[Endpoint, ...]:
    return tuple(Endpoint(f"default/pod-{n}", f"10.0.{n >> 8}.{n & 255}:8000") for n in range(count))


@given(st.integers(0, 100), st.integers(2, 8), st.randoms(use_true_random=False))
def test_each_endpoint_is_in_one_part_and_parts_are_alike_whatever_the_order(count: int, total: int, random) -> None:  # type: ignore[no-untyped-def]
    pool, parts = endpoints(count), []
    for number in range(total):
        mine = random.sample(pool, count)
        parts.append(Parts(lambda mine=mine: mine, lambda number=number: Replicas(number, total, 0.1)).look(1.0)[1])  # type: ignore[misc]
    assert sorted(each.name for part in parts for each in part) == sorted(each.name for each in pool)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize(("unreported", "costs"), [(0.0, 0.0), (0.01, 0.02), (0.7, 1.0), (inf, 2.0)])
def test_another_s_part_costs_what_a_request_that_may_be_on_its_way_there_does(unreported: float, costs: float) -> None:
    assert Parts(tuple, lambda: Replicas(0, 2, unreported)).look(1.0)[0] == pytest.approx(costs, rel=0.01)
    assert Parts(tuple, lambda: Replicas(0, 2, unreported)).look(0.05)[0] == pytest.approx(costs * 0.05, rel=0.01)


def test_one_alone_has_no_parts() -> None:
    assert Parts(lambda: endpoints(8), Replicas).look(1.0)[0] == 0.0
    assert Parts(lambda: endpoints(8), lambda: Replicas(0, 1, 0.5)).look(1.0)[0] == 0.0


def test_parts_follow_who_is_there() -> None:
    pool, seen = endpoints(8), Replicas(0, 2, 0.1)
    parts = Parts(lambda: pool, lambda: seen)
    first = parts.look(1.0)[1]
    assert len(first) == 4
    assert parts.look(1.0)[1] is first, "found once"
    seen = Replicas(1, 2, 0.2)
    assert parts.look(1.0)[1] == {*pool} - {*first}
    seen = Replicas(1, 4, 0.2)
    assert len(parts.look(1.0)[1]) == 2
    pool = pool[:4]
    assert len(parts.look(1.0)[1]) == 1
