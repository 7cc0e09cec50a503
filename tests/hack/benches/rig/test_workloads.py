"""The small traces: what they share, that prefixes are prefixes, and that a seed is a trace."""

from collections.abc import Callable

import pytest

from hack.benches.rig.workloads import asked, mixed, talked
from tooling.replay.trace import Trace

MAKERS = [asked, talked, mixed]


@pytest.mark.parametrize("make", MAKERS)
def test_a_seed_is_a_trace(make: Callable[[int, int], Trace]) -> None:
    assert make(1, 20) == make(1, 20) != make(2, 20)
    assert len(make(1, 20).asks) == 20


@pytest.mark.parametrize("make", MAKERS)
def test_a_piece_stands_for_all_before_it(make: Callable[[int, int], Trace]) -> None:
    before: dict[int, object] = {}
    for ask in make(3, 60).asks:
        for number in range(len(ask.prompt)):
            path = ask.prompt[: number + 1]
            assert before.setdefault(path[-1].id, path) == path


@pytest.mark.parametrize("make", MAKERS)
def test_some_of_it_is_shared(make: Callable[[int, int], Trace]) -> None:
    assert 0.1 < make(1, 60).cached_bound() < 0.95
